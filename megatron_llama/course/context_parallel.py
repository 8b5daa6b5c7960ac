"""Checks exercise 6: the split of a sequence, and the merge of attention over two sets of keys, by the tiles of
``megatron/core/context_parallel.py`` in fp64."""

from collections import Counter
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from megatron.core.context_parallel import ContextSplit, ring_tiles
from megatron.core.ops.attention import CAUSAL, AttentionInputs
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.ops.documents import Span
from megatron_llama.course.lesson import Wrong

LENGTH, HEADS, HEAD_SIZE = 48, 2, 4

Part = tuple[Tensor, Tensor]
"""Output ``[b, n, s, d]`` and log-sum-exp ``[b, n, s]`` of attention over some keys."""


def check(answer: ModuleType) -> str:
    """Compare both functions with the causal triangle and with attention of the whole; raises :class:`Wrong`."""
    for ranks in (4, 2, 1, 8):
        check_split([[*map(int, answer.positions(rank, ranks, LENGTH))] for rank in range(ranks)])
    error = check_merge(lambda first, second: answer.merge(*first, *second))
    pairs = LENGTH * (LENGTH + 1) // 2
    return (
        f"Each of 8 ranks has {pairs // 8} of the {pairs} pairs of {LENGTH} positions, in two pieces; merged attention "
        f"is that of the whole to {error:.0e} in fp64, also with four parts in both orders."
    )


# --- the split -----------------------------------------------------------------------------------------------


def check_split(split: list[list[int]]) -> None:
    """Every position once, the same number of pairs on every rank, ascending, in two pieces."""
    ranks, where = len(split), f"With {len(split)} ranks and {LENGTH} positions"
    times = Counter(position for own in split for position in own)
    for position in [*sorted(times), *range(LENGTH)]:
        if not 0 <= position < LENGTH:
            raise Wrong(f"{where} a rank has position {position}: the last of {2 * ranks} chunks is {2 * ranks - 1}.")
        if times[position] != 1:
            raise Wrong(
                f"{where} position {position} is on {times[position] or 'no'} ranks: every query is computed once, so "
                "the chunks of all ranks are a permutation of all chunks."
            )
    work = [sum(position + 1 for position in own) for own in split]
    if len(set(work)) > 1:
        raise Wrong(f"{where} rank 0 has {work[0]} pairs and rank {ranks - 1} has {work[-1]}: {why_unequal(split)}.")
    for rank, own in enumerate(split):
        if own != sorted(own):
            raise Wrong(
                f"{where} the positions of rank {rank} are not ascending: its tokens keep their order, by which the "
                "causal mask of its own tile is that of any sequence."
            )
        pieces = 1 + sum(second - first > 1 for first, second in pairwise(own))
        if pieces > 2:
            raise Wrong(
                f"{where} rank {rank} has equal work in {pieces} pieces: a tile needs neighbouring positions, so pair "
                f"chunks of {LENGTH // (2 * ranks)} positions from both ends instead of single positions."
            )


def why_unequal(split: list[list[int]]) -> str:
    """What a split with unequal work is."""
    length, ranks = LENGTH // len(split), len(split)
    if split == [list(range(rank * length, (rank + 1) * length)) for rank in range(ranks)]:
        return (
            "late queries see more keys than early ones, and all ranks wait for the rank with the end of the sequence"
        )
    if split == [list(range(rank, LENGTH, ranks)) for rank in range(ranks)]:
        return "stripes are nearly equal, but every position of a rank is one later than its neighbour's"
    return (
        "give a rank that has an early chunk the late chunk that is as far from the end as the other is from the start"
    )


# --- the merge -----------------------------------------------------------------------------------------------


def check_merge(merge: Callable[[Part, Part], Part]) -> float:
    """The largest error of the merged attention of four ranks."""
    generator = torch.Generator().manual_seed(6)
    heads = [torch.randn(1, HEADS, LENGTH, HEAD_SIZE, generator=generator, dtype=torch.float64) for _ in range(3)]
    usual = AttentionInputs(heads[0], heads[1], heads[2])
    # Rank 1 of 2 sees the keys of both ranks; the first chunk of rank 0 sees none of rank 1.
    expect(merge, parts(usual, 1, 2), whole(usual, 1, 2), "Where every query sees keys of both sets")
    expect(merge, parts(usual, 0, 2), whole(usual, 0, 2), "Where a query sees no key of the second set")
    expect(merge, parts(usual, 0, 2)[::-1], whole(usual, 0, 2), "Where a query sees no key of the first set")
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), -torch.inf, dtype=torch.float64)
    expect(merge, [nothing, nothing], nothing, "Where a query sees no key of either set")
    for scale in (300.0, 1e4):
        large = AttentionInputs(heads[0] * scale, heads[1], heads[2])
        expect(merge, parts(large, 1, 2), whole(large, 1, 2), f"With scores {scale:g} times as large")
    error = 0.0
    for rank in range(4):
        of_sources, (output, log_sum_exp) = parts(usual, rank, 4), whole(usual, rank, 4)
        for found in (reduce(merge, of_sources), reduce(lambda last, part: merge(part, last), reversed(of_sources))):
            if not close(found[0], output) or not close(found[1], log_sum_exp):
                raise Wrong(
                    f"Of four parts merged one after the other, rank {rank} has another result than attention of the "
                    "whole: the merge must be associative, so the log-sum-exp that it returns counts both sets."
                )
            error = max(error, (found[0] - output).abs().max().item())
    return error


def parts(inputs: AttentionInputs, rank: int, size: int) -> list[Part]:
    """The attention of a rank's queries over the keys of each rank, its own first, then as a ring brings them."""
    split, query = ContextSplit(rank, size), of_rank(inputs.query, rank, size)
    found = []
    for step in range(size):
        source = (rank - step) % size
        key, value = (of_rank(one, source, size) for one in (inputs.key, inputs.value))
        output, log_sum_exp = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
        for tile in ring_tiles(split, source, [Span(slice(None), 0, LENGTH)], LENGTH, CAUSAL):
            attended = ReferenceAttention().forward(tile.inputs(query, key, value))
            assert attended.log_sum_exp is not None
            output[:, :, tile.queries], log_sum_exp[:, :, tile.queries] = attended.output, attended.log_sum_exp
        found.append((output, log_sum_exp))
    return found


def whole(inputs: AttentionInputs, rank: int, size: int) -> Part:
    """What attention over all keys has at a rank's positions."""
    attended = ReferenceAttention().forward(inputs)
    assert attended.log_sum_exp is not None
    return of_rank(attended.output, rank, size), of_rank(attended.log_sum_exp, rank, size)


def of_rank(heads: Tensor, rank: int, size: int) -> Tensor:
    return heads[:, :, ContextSplit(rank, size).positions(LENGTH)]


def expect(merge: Callable[[Part, Part], Part], two: list[Part], wanted: Part, where: str) -> None:
    """Raise :class:`Wrong` unless the merge of ``two`` parts is ``wanted``."""
    (first, first_lse), (second, second_lse) = two
    output, log_sum_exp = merge((first.clone(), first_lse.clone()), (second.clone(), second_lse.clone()))
    if output.shape != first.shape or log_sum_exp.shape != first_lse.shape:
        shapes = f"{[*output.shape]} and {[*log_sum_exp.shape]}"
        raise Wrong(f"merge returns {shapes} for {[*first.shape]} and {[*first_lse.shape]}: keep the shapes.")
    if output.isnan().any() or log_sum_exp.isnan().any() or log_sum_exp.isposinf().any():
        hint = (
            "minus infinity minus minus infinity is no number, so such a row needs another reference than its maximum"
        )
        if "times as large" in where:
            hint = "the exponential of a large number overflows, so subtract the larger log-sum-exp of each row first"
        raise Wrong(f"{where}, merge returns NaN or infinity: {hint}.")
    # Results that follow from a known mistake.
    share = (first_lse - wanted[1]).exp().unsqueeze(-1).nan_to_num()  # [b, n, s, 1], of the first set
    known = {
        "the mean of both outputs: weigh each by its part of the sum of exponentials": (first + second) / 2,
        "the sum of both: each is a mean over its own keys, so they need weights with the sum 1": first + second,
        "each output with the weight of the other: the set with the larger log-sum-exp counts more": (
            first * (1 - share) + second * share
        ),
        "not that of attention over both: weights are exp(own log-sum-exp - merged log-sum-exp), row by row": output,
    }
    if not close(output, wanted[0]):
        what = next(name for name, value in known.items() if close(output, value))
        if torch.allclose(output.double(), wanted[0], rtol=1e-4, atol=1e-5):
            what = "right to a few digits and no further: keep the dtype of the arguments"
        raise Wrong(f"{where}, the output is {what}.")
    if not close(log_sum_exp, wanted[1]):
        hint = "it is log(e^a + e^b), with which the result can be merged again"
        if wanted[1].isneginf().all():
            hint = "no key is a sum without addends, whose logarithm is minus infinity"
        elif close(log_sum_exp, first_lse.maximum(second_lse)):
            hint = "it is the larger of the two, so that the next merge would count too few keys"
        raise Wrong(f"{where}, the output is right and the log-sum-exp is not: {hint}.")


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted, rtol=1e-10, atol=1e-11)
