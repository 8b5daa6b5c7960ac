"""Checks exercise 2: a ring reduce-scatter and all-reduce of messages."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from megatron.core.communication import CollectiveRecord
from megatron_llama.course.lesson import Wrong, require_tensor
from megatron_llama.course.ranks import MESSAGES, Ran, Sent, ThreadCommunicator, run_ranks

CASES = ((4, 12), (3, 7), (8, 5), (2, 9), (1, 3))
"""Ranks, and length of the vectors; ranks need not divide it."""

Answer = Callable[[ThreadCommunicator, Tensor], Tensor]


def check(answer: ModuleType) -> str:
    """Compare both functions with sums in fp64; raises :class:`Wrong`."""
    for size, length in CASES:
        generator = torch.Generator().manual_seed(size)
        vectors = [torch.randn(length, dtype=torch.float64, generator=generator) for _ in range(size)]
        check_reduce_scatter(answer.reduce_scatter, vectors)
        check_all_reduce(answer.all_reduce, vectors)
    return (
        "Sums are right on 1 to 8 ranks, also for lengths that the ranks do not divide; on 4 ranks each sends 3/4 of "
        "the bytes in reduce_scatter and 6/4 in all_reduce, 2 (n - 1) / n, all of them to one neighbour."
    )


def check_reduce_scatter(function: Answer, vectors: Sequence[Tensor]) -> None:
    """Which chunk each rank has, what is in it, and what was sent for it."""
    ran, size, whole = run("reduce_scatter", function, vectors), len(vectors), torch.stack([*vectors]).sum(0)
    parts = whole.tensor_split(size)
    for rank, result in enumerate(ran.results):
        where = f"reduce_scatter on rank {rank} of {size}"
        if isinstance(result, Tensor) and result.numel() == len(whole) > len(parts[rank]):
            raise Wrong(
                f"{where} returns a whole vector of {len(whole)} numbers: return the rank's own chunk, the only one "
                "whose sum is complete there."
            )
        result = require_tensor(result, f"The result of {where}", parts[rank].shape, torch.float64)
        for owner, part in enumerate(parts):
            if owner != rank and len(part) and part.shape == result.shape and torch.allclose(part, result):
                raise Wrong(
                    f"{where} returns the sum of chunk {owner}: chunk r ends on rank r if its first sender is "
                    "the rank after r, so begin with another chunk."
                )
        if not torch.allclose(result, parts[rank], rtol=1e-12, atol=1e-12):
            scale = (result / parts[rank]).mean().item()
            if torch.allclose(result, parts[rank] * scale):
                raise Wrong(f"{where} returns {scale:.4g} times the sum: the caller divides, where it wants a mean.")
            raise Wrong(f"{where} {missing_parts(function, rank, size, len(whole))}")
    check_ring("reduce_scatter", ran)
    for rank, records in enumerate(ran.records):
        found, wanted = numbers_in(records), len(whole) - len(parts[rank])
        steps = f"reduce_scatter on rank {rank} of {size} sends {len(sends(records))} messages, {found} numbers"
        if len(sends(records)) > size - 1 and found <= len(whole):
            raise Wrong(f"{steps}: n - 1 steps complete the sums, and in them a rank sends every chunk but its own.")
        if found != wanted:
            raise Wrong(
                f"{steps}, of a vector of {len(whole)}: one chunk in each step makes {wanted}, (n - 1) / n "
                "of the vector; more than this crosses the slowest link for nothing."
            )


def missing_parts(function: Answer, rank: int, size: int, length: int) -> str:
    """What is wrong with the result of ``rank``, from numbers that count: where chunk c has 9^c on every rank, or all
    chunks of rank r have 9^r, the digits of a sum in base 9 say how often each is in it."""

    def counts(vectors: Sequence[Tensor]) -> list[int]:
        first = round(run("reduce_scatter", function, vectors).results[rank][0].item())
        return [first // 9**place % 9 for place in range(size)]

    def filled(numbers: Sequence[int]) -> Tensor:
        parts = torch.empty(length, dtype=torch.float64).tensor_split(size)
        return torch.cat([torch.full_like(part, 9.0**number) for part, number in zip(parts, numbers)])

    of_chunks = {chunk: n for chunk, n in enumerate(counts([filled(range(size))] * size)) if n}
    if len(of_chunks) > 1:
        return f"adds numbers of the chunks {[*of_chunks]}: add what arrives to the chunk that the other rank has sent."
    if rank not in of_chunks:
        chunk, times = next(iter(of_chunks.items()), (None, 0))
        return (
            f"returns chunk {chunk} with the numbers of {times} ranks: return the chunk whose last sum was made here."
        )
    of_ranks = counts([filled([one] * size) for one in range(size)])
    if of_ranks == [one == rank for one in range(size)]:
        return "returns its own numbers, without those of other ranks: add what arrives to the chunk that is sent next."
    if sum(of_ranks) == 1:
        return f"has the numbers of rank {of_ranks.index(1)} alone: add what arrives, where it now overwrites."
    if max(of_ranks) > 1:
        return f"adds rank {of_ranks.index(max(of_ranks))} {max(of_ranks)} times: each chunk passes each rank once."
    absent = ", ".join(str(one) for one, count in enumerate(of_ranks) if not count)
    if absent:
        return f"returns a sum without rank {absent}: a chunk needs n - 1 steps to pass all ranks."
    return "returns a sum that is not exact: compute in the dtype of the vector."


def check_all_reduce(function: Answer, vectors: Sequence[Tensor]) -> None:
    """The sum on every rank, and the bytes of a ring."""
    ran, size, whole = run("all_reduce", function, vectors), len(vectors), torch.stack([*vectors]).sum(0)
    for rank, result in enumerate(ran.results):
        where = f"all_reduce on rank {rank} of {size}"
        if isinstance(result, Tensor) and result.shape == whole.tensor_split(size)[rank].shape != whole.shape:
            raise Wrong(f"{where} returns a chunk: an all-gather makes the whole vector of the chunks.")
        result = require_tensor(result, f"The result of {where}", whole.shape, torch.float64)
        if size > 1 and torch.allclose(result, vectors[rank]):
            raise Wrong(f"{where} returns the rank's own vector: return what the collectives have made.")
        if not torch.allclose(result, whole, rtol=1e-12, atol=1e-12):
            raise Wrong(f"{where} is not the sum of all vectors: all-gather the chunks of reduce_scatter by rank.")
    found, wanted = sum(map(numbers_in, ran.records)), 2 * (size - 1) * len(whole)
    if found != wanted:
        raise Wrong(
            f"all_reduce of {len(whole)} numbers on {size} ranks sends {found} in all: a reduce-scatter and an "
            f"all-gather make {wanted}, 2 (n - 1) / n of the vector per rank, however many ranks there are."
        )
    check_ring("all_reduce", ran)


def run(name: str, function: Answer, vectors: Sequence[Tensor]) -> Ran[Tensor]:
    """Call ``function`` on one rank for each vector, which it must not change."""
    copies = [vector.clone() for vector in vectors]
    ran = run_ranks(len(vectors), lambda communicator: function(communicator, copies[communicator.rank]))
    if not all(map(torch.equal, copies, vectors)):
        raise Wrong(f"{name} changes the vector of the caller, to whom it still belongs: add into a copy.")
    kinds = {one.kind for records in ran.records for one in records} - MESSAGES
    if kinds:
        raise Wrong(f"{name} calls {kinds.pop()} of the communicator: make it of start_send and start_receive.")
    for one in ran.network.unfinished:
        reason = "their memory may not be written" if isinstance(one, Sent) else "their memory is not written yet"
        kind = "sends" if isinstance(one, Sent) else "receives"
        raise Wrong(f"{name} does not wait for all of its {kind}: {reason} before the wait, so wait for each of them.")
    left = [pair for pair, box in ran.network.mail.items() if box]
    if left:
        source, target = left[0]
        raise Wrong(f"{name} sends a message from rank {source} that rank {target} never receives: send one fewer.")
    return ran


def check_ring(name: str, ran: Ran[Tensor]) -> None:
    """All messages must go to the next rank, or all to the previous one."""
    size = len(ran.records)
    peers = [(rank, one.peer) for rank, records in enumerate(ran.records) for one in sends(records)]
    steps = {(peer - rank) % size for rank, peer in peers if peer is not None}
    if len(steps - {1}) and len(steps - {size - 1}):
        raise Wrong(
            f"{name} sends to ranks {', '.join(map(str, sorted(steps)))} places further in a ring of {size}: send to "
            "one neighbour alone, so that every link carries the same bytes and none carries two messages at once."
        )


def sends(records: Sequence[CollectiveRecord]) -> list[CollectiveRecord]:
    return [one for one in records if one.kind != "receive"]


def numbers_in(records: Sequence[CollectiveRecord]) -> int:
    """How many fp64 numbers a rank sends."""
    return sum(one.num_bytes for one in sends(records)) // 8
