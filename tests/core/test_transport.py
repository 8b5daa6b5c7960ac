"""Transports: ranks that share memory notice each other's end, reuse places, and enlarge them; the transports of tests
give the results of every collective, and show a missing wait and a changed input."""

import gc
import multiprocessing as mp
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import transport
from megatron.core.communication import Communicator
from megatron.core.topology import RankGrid, Topology
from megatron.core.transport import open_transport, shared_memory
from megatron.core.transport.shared_memory import SharedMemoryTransport
from megatron.core.transport.torch_distributed import Transport
from tests.core.collectives import Results, assert_results, collectives_of, everyone, expected_results, part_of
from tests.forked import fork_context
from tests.late_transport import LateCommunicator, LateTopology
from tests.rank_pool import RankPool
from tests.staged_transport import StagedTopology

CPU = torch.device("cpu")


def slots_of(ranks: Communicator) -> Any:
    shared = ranks.transport
    assert isinstance(shared, SharedMemoryTransport)
    return shared._slots


def run_kinds_of_transport() -> list[str]:
    """The transport of a group that shares memory, of one that does not, of its twin, and of many ranks."""
    topology = Topology(RankGrid(tp=dist.get_world_size()), dist.get_rank(), CPU, shares_memory=False)
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    one = Communicator(ranks, rank, "one")
    twin = Communicator(ranks, rank, "twin", twin=one)
    groups = [one, Communicator(ranks, rank, "gloo", shares_memory=False), topology.tensor_parallel]
    kinds = [type(group.transport).__name__ for group in groups]
    assert twin.transport is one.transport
    many = open_transport(one.process_group, tuple(range(transport.LARGEST_GROUP + 1)), rank, None, True)
    return [*kinds, type(many).__name__]


def test_ranks_of_one_host_share_memory_unless_told_otherwise(four_ranks: RankPool) -> None:
    wanted = ["SharedMemoryTransport", "Transport", "Transport", "Transport"]
    assert four_ranks.run(run_kinds_of_transport, world_size=2) == [wanted] * 2


def run_where_one_cannot(obstacle: str) -> tuple[str, float]:
    """The transport of three ranks, of which the last cannot share memory; and a sum over it."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2 and obstacle == "memfd":
            patch.setattr("os.memfd_create", _refuse)
        if rank == 2 and obstacle == "host":
            patch.setattr(shared_memory, "_host_number", lambda: 7)
        group = Communicator(ranks, rank, "three")
        return type(group.transport).__name__, group.all_reduce(torch.ones(2))[0].item()


def _refuse(*_: Any) -> int:
    raise PermissionError("forbidden")


@pytest.mark.parametrize("obstacle", ["memfd", "host"])
def test_all_ranks_use_gloo_if_one_cannot_share_memory(four_ranks: RankPool, obstacle: str) -> None:
    assert four_ranks.run(run_where_one_cannot, obstacle, world_size=3) == [("Transport", 3.0)] * 3


def run_unread_messages() -> list[float]:
    """A rank sends more than its arena has, before the other takes the first; then all arrive, the last ones first."""
    ranks = everyone()
    other = 1 - ranks.rank
    count = 300
    for number in range(count):
        ranks.start_send(torch.full((1 + 50 * number,), float(number)), other)
    dist.barrier()
    works = [ranks.start_receive(torch.zeros(1 + 50 * number), other) for number in range(count)]
    arrived = [work.wait() for work in reversed(works)]
    ends = [(tensor[0].item(), tensor[-1].item()) for tensor in reversed(arrived)]
    assert ends == [(number, number) for number in range(count)]
    # All are read, whatever their order: the slots are free.
    dist.barrier()
    before = slots_of(ranks)._end
    for _ in range(3):
        ranks.all_reduce(torch.ones(50 * count))
    return [slots_of(ranks)._end - before]


def test_messages_wait_for_their_receiver(four_ranks: RankPool) -> None:
    assert four_ranks.run(run_unread_messages, world_size=2) == [[0], [0]]


def run_full_ring() -> list[int]:
    """More unread messages than there are entries: the sender waits until the first ones are read."""
    ranks = everyone()
    count = shared_memory._RING_SIZE + 10
    if ranks.rank == 0:
        for number in range(count):
            ranks.start_send(torch.tensor([number]), 1)
        return []
    time.sleep(0.2)
    return [int(ranks.start_receive(torch.zeros(1, dtype=torch.int64), 0).wait()) for _ in range(count)]


def test_a_sender_waits_for_a_free_entry(four_ranks: RankPool) -> None:
    assert four_ranks.run(run_full_ring, world_size=2)[1] == list(range(shared_memory._RING_SIZE + 10))


def run_large() -> bool:
    """Tensors too large for shared memory, between small ones."""
    ranks, kept = everyone(), shared_memory.LARGEST_BYTES
    shared_memory.LARGEST_BYTES = 4096
    try:
        other = 1 - ranks.rank
        for sizes in [(10, 3000), (3000, 10), (3000, 3000)]:
            mine, its = sizes[ranks.rank], sizes[other]
            sent, received = [torch.empty(0)] * 2, [torch.empty(0)] * 2
            sent[other], received[other] = torch.full((mine,), 1.0 + ranks.rank), torch.zeros(its)
            ranks.exchange_parts(sent, received)
            assert received[other].eq(1.0 + other).all()
            assert ranks.all_reduce(torch.ones(mine + its)).eq(2).all()
            assert ranks.all_gather(torch.full((mine + its,), float(ranks.rank))).sum() == mine + its
    finally:
        shared_memory.LARGEST_BYTES = kept
    return slots_of(ranks)._end < 2**21


def test_large_tensors_go_through_gloo(four_ranks: RankPool) -> None:
    assert four_ranks.run(run_large, world_size=2) == [True, True]


def run_repeated() -> list[list[float]]:
    """Exchanges in which a tensor goes to a rank twice, with another one between."""
    ranks = everyone()
    mine, other = torch.tensor([1.0 + ranks.rank]), torch.tensor([10.0 + ranks.rank])
    shifted = ranks.start_shifts([mine, mine, other, mine]).wait()
    return [tensor.tolist() for tensor in shifted]


def test_messages_of_one_exchange_keep_their_order(four_ranks: RankPool) -> None:
    for rank, shifted in enumerate(four_ranks.run(run_repeated, world_size=3)):
        source = (rank - 1) % 3
        assert shifted == [[1.0 + source], [1.0 + source], [10.0 + source], [1.0 + source]]


def run_disagreeing() -> str:
    ranks = everyone()
    try:
        ranks.all_reduce(torch.ones(3 + ranks.rank))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_disagree_on_a_size_are_told(four_ranks: RankPool) -> None:
    first, second = four_ranks.run(run_disagreeing, world_size=2)
    assert "16 bytes where 12 are expected" in first
    assert "12 bytes where 16 are expected" in second


# Ends of ranks: processes of their own, because they do not survive

PATIENCE = 120.0
"""Seconds that a rank waits for the other, which begins or ends late on a busy machine."""


def _rank(rank: int, store: str, case: Callable[[Communicator], str], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = everyone(timeout=PATIENCE)
    ranks.all_reduce(torch.ones(3))
    results.put((rank, case(ranks)))
    results.close()
    results.join_thread()
    os._exit(0)


def _ends(case: Callable[[Communicator], str], tmp_path: Path, answers: int) -> dict[int, str]:
    # A forked process is waited for by the server that forked it, a spawned one by nobody.
    context = mp.get_context("spawn") if case is killed else fork_context()
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), case, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=2 * PATIENCE) for _ in range(answers))
    finally:
        for process in processes:
            process.kill()
            process.join()


def killed(ranks: Communicator) -> str:
    """Rank 1 is killed; rank 0 waits for it, in the end for a process that nobody has waited for."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: ranks.all_reduce(torch.ones(3)))


def failure(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def leaving(ranks: Communicator) -> str:
    """Rank 1 lives on without its communicator."""
    if ranks.rank == 1:
        del ranks.__dict__["transport"], ranks.__dict__["group_transport"]
        gc.collect()
        time.sleep(600)
    return failure(lambda: ranks.all_reduce(torch.ones(3)))


def last_words(ranks: Communicator) -> str:
    """Rank 1 writes its part and ends, before rank 0 reads it."""
    if ranks.rank == 1:
        ranks.start_all_reduce(torch.full((3,), 5.0))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    return str(ranks.all_reduce(torch.ones(3)).tolist())


def hanging(ranks: Communicator) -> str:
    """Only this wait is short: the ranks may begin long after each other."""
    if ranks.rank == 1:
        time.sleep(600)
    vars(ranks.transport)["_timeout"] = 2.0
    start = time.monotonic()
    return f"{failure(lambda: ranks.start_receive(torch.ones(3), 1).wait())} {time.monotonic() - start >= 2.0}"


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (killed, "Connection closed by peer: a rank that shares memory with this one has ended."),
        (leaving, "Connection closed by peer: a rank that shares memory with this one has ended."),
        (last_words, "[6.0, 6.0, 6.0]"),
        (hanging, "Timed out waiting 2 s for a message of another rank in shared memory. True"),
    ],
    ids=["killed", "left", "last words", "hangs"],
)
def test_the_end_of_a_rank(case: Callable[[Communicator], str], wanted: str, tmp_path: Path) -> None:
    assert _ends(case, tmp_path, answers=1) == {0: wanted}


def run_nothing_left() -> tuple[bool, int, list[int]]:
    """Whether the transport is freed with its group, without a collection of cycles; descriptors that are left; and the
    ends of the slots after 10 sums and 110."""

    def descriptors() -> int:
        paths = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
        return sum("megatron ranks" in os.readlink(path) for path in paths if os.path.lexists(path))

    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        ranks = everyone()
        ends = []
        for count in (10, 100):
            for _ in range(count):
                ranks.all_reduce(torch.ones(5000))
            ends.append(slots_of(ranks)._end)
        freed = weakref.ref(ranks.transport)
        assert descriptors() > before
        dist.barrier()
        del ranks
        return freed() is None, descriptors() - before, ends
    finally:
        gc.enable()


def test_a_group_that_is_gone_leaves_nothing(four_ranks: RankPool) -> None:
    """A process group that lives until the interpreter ends may abort the process then."""
    for is_freed, descriptors, ends in four_ranks.run(run_nothing_left, world_size=3):
        assert is_freed and descriptors == 0
        assert ends[0] == ends[1], "slots of sums, which several ranks read, are used again"


def test_the_plain_transport_serves_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a processor whose stores other cores may see in another order."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert type(open_transport(dist.group.WORLD, (0,), 0, None, shares_memory=True)) is Transport
    finally:
        dist.destroy_process_group()


def collectives_over(kind: type[Topology], device: str) -> Results:
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = kind(RankGrid(dp=size), rank, torch.device(device)).data_parallel
    return collectives_of(ranks, part_of(rank, torch.float32, device=device))


@pytest.mark.parametrize("kind", [LateTopology, StagedTopology])
def test_results_are_those_of_the_definition(four_ranks: RankPool, kind: type[Topology], device_name: str) -> None:
    device = device_name if kind is StagedTopology else "cpu"
    for rank, results in enumerate(four_ranks.run(collectives_over, kind, device, world_size=3)):
        assert_results(results, expected_results(torch.float32, range(3), rank))


def forget_to_wait() -> list[bool]:
    """Whether each output is NaN before its wait."""
    ranks = LateCommunicator(range(2), dist.get_rank(), "world")
    reduced, gathered, scattered = torch.ones(2), torch.ones(4), torch.ones(1)
    works = [
        ranks.start_all_reduce(reduced),
        ranks.start_all_gather(torch.ones(2), gathered),
        ranks.start_reduce_scatter(torch.ones(2), scattered),
    ]
    unseen = [bool(tensor.isnan().all()) for tensor in (reduced, gathered, scattered)]
    for work in works:
        work.wait()
    return [*unseen, *(bool(tensor.isnan().any()) for tensor in (reduced, gathered, scattered))]


def test_without_a_wait_there_is_no_result(four_ranks: RankPool) -> None:
    assert four_ranks.run(forget_to_wait, world_size=2) == [[True] * 3 + [False] * 3] * 2


def change_before_the_wait(of_output: bool) -> str:
    ranks = LateCommunicator(range(2), dist.get_rank(), "world")
    tensor, output = torch.ones(2), torch.zeros(4)
    work = ranks.start_all_gather(tensor, output)
    (output if of_output else tensor).fill_(2.0)
    with pytest.raises(AssertionError) as raised:
        work.wait()
    return str(raised.value)


@pytest.mark.parametrize(("of_output", "told"), [(False, "an input was changed"), (True, "an output was written")])
def test_a_change_before_the_wait_is_seen(four_ranks: RankPool, of_output: bool, told: str) -> None:
    for message in four_ranks.run(change_before_the_wait, of_output, world_size=2):
        assert message.startswith(told)


def before_the_wait(device: str) -> list[float]:
    """An output before and after its wait, and the input, which may change once the collective has started."""
    ranks: Communicator = StagedTopology(RankGrid(dp=2), dist.get_rank(), torch.device(device)).data_parallel
    own, output = torch.ones(1, device=device), torch.full((2,), -1.0, device=device)
    work = ranks.start_all_gather(own, output)
    before = output[0].item()
    work.wait()
    return [before, output[0].item()]


def test_an_output_has_its_result_after_its_wait(four_ranks: RankPool, device_name: str) -> None:
    assert four_ranks.run(before_the_wait, device_name, world_size=2) == [[-1.0, 1.0]] * 2
