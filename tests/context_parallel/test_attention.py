"""Attention in tiles and over ranks, forward and backward, against its definition in fp64 with a dense mask."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config.context_parallel import ContextParallelType, Exchange
from megatron.core.communication import CollectiveRecord, Communicator
from megatron.core.context_parallel.attention import (
    AllGatherAttention,
    ContextParallel,
    RingAttention,
    UlyssesAttention,
)
from megatron.core.context_parallel.split import ContextSplit
from megatron.core.ops.attention import AttentionInputs, LocalAttention, Tile, TiledAttention, TiledGradients
from megatron.core.ops.attention_interface import AttentionKernel, AttentionOutput, Gradients
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    TorchAttention,
)
from megatron.core.ops.documents import AttentionSpans, Documents
from megatron.core.topology import RankGrid, Topology
from tests.context_parallel.definition import TOLERANCE, Shape, assert_close, begins, definition, inputs
from tests.rank_pool import RankPool

KERNELS = [ReferenceAttention(), CpuFlashAttention()]


def marked(starts: Tensor | None) -> AttentionSpans | None:
    return None if starts is None else Documents(starts, True, False, torch.device("cpu")).attention


SHAPES: list[Shape] = [(1, 1, 1, 8, 2), (2, 4, 4, 16, 8), (2, 8, 2, 24, 4), (1, 6, 2, 40, 16), (3, 8, 8, 16, 4)]


@settings(max_examples=60)
@given(
    kernel=st.sampled_from(KERNELS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 4),
    length=st.integers(2, 40),
    size=st.sampled_from([2, 8, 16]),
    cut=st.floats(0.01, 0.99),
)
def test_attention_to_some_keys_and_then_to_others_is_attention_to_all(
    kernel: AttentionKernel,
    dtype: torch.dtype,
    batch: int,
    groups: int,
    repeats: int,
    length: int,
    size: int,
    cut: float,
) -> None:
    shape = (batch, groups * repeats, groups, length, size)
    expected, expected_grads = definition(shape, None, dtype)
    query, key, value, grad = (tensor.to(dtype) for tensor in inputs(shape))
    middle = max(1, min(length - 1, int(cut * length)))
    rows, early, late = slice(None), slice(0, middle), slice(middle, length)
    diagonal = [Tile(rows, early, early, True), Tile(rows, late, late, True)]
    before = [Tile(rows, late, early, False)]
    tiled = TiledAttention(kernel, query)
    tiled.add(diagonal, key, value, is_first=True)
    tiled.add(before, key, value)
    assert_close(tiled.output, expected, dtype)
    grads = TiledGradients(kernel, grad, query, tiled.result())
    grad_key, grad_value = (torch.zeros_like(tensor, dtype=grads.dtype) for tensor in (key, value))
    grads.add([*diagonal, *before], key, value, grad_key, grad_value)
    for found, wanted in zip((grads.query, grad_key, grad_value), expected_grads):
        assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", [*KERNELS, TorchAttention()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_documents_do_not_see_each_other(kernel: AttentionKernel, shape: Shape, dtype: torch.dtype) -> None:
    starts = begins(shape, 1, 4, 5, 7)
    expected, expected_grads = definition(shape, starts, dtype)
    query, key, value, grad = (tensor.to(dtype) for tensor in inputs(shape))
    attention = LocalAttention(kernel)
    attended = attention.forward(AttentionInputs(query, key, value, marked(starts)))
    assert_close(attended.output, expected, dtype)
    grads = attention.backward(grad, AttentionInputs(query, key, value, marked(starts)), attended)
    for found, wanted in zip(grads, expected_grads):
        assert_close(found, wanted, dtype)


def on_ranks(
    kind: ContextParallelType, sizes: tuple[int, ...], shape: Shape, starts: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Gradients, list[str]]:
    """This rank's part of the output and of the gradients, and the collectives that it took."""
    size = dist.get_world_size()
    topology = Topology(RankGrid(cp=size), dist.get_rank(), torch.device("cpu"))
    ranks, levels = topology.context_parallel, topology.context_parallel_levels(sizes)
    records: list[CollectiveRecord] = []
    for communicator in (ranks, *levels):
        communicator.observer = records.append
    positions = ContextSplit(ranks.rank, size).positions(shape[3])
    query, key, value, grad = (tensor[:, :, positions].to(dtype) for tensor in inputs(shape))
    attention = ContextParallel(ranks, (kind,), levels).attention(0, CpuFlashAttention())
    attended = attention.forward(AttentionInputs(query, key, value, marked(starts)))
    assert attended.output.dtype == dtype
    grads = attention.backward(grad, AttentionInputs(query, key, value, marked(starts)), attended)
    return attended.output, grads, [record.kind for record in records]


CASES: list[tuple[Shape, tuple[int, ...] | None]] = [
    ((1, 4, 4, 16, 2), None),
    ((2, 8, 4, 24, 8), None),
    # A document across every boundary between chunks of 3, of four ranks and of two; short ones; one that is a chunk.
    ((2, 8, 4, 24, 8), (2, 4, 8, 10, 14, 16, 20)),
    ((1, 4, 4, 24, 4), (0, 6, 12, 18)),
    ((3, 4, 4, 40, 4), (1, 2, 3, 37)),
    ((2, 8, 8, 48, 16), (5, 31)),
]


@pytest.mark.parametrize(("shape", "places"), CASES, ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"), [*((kind, (ranks,)) for ranks in (2, 4) for kind in get_args(Exchange)), ("a2a+p2p", (2, 2))]
)
def test_ranks_that_share_a_sequence_attend_as_one(
    four_ranks: RankPool, kind: str, sizes: tuple[int, ...], shape: Shape, places: tuple[int, ...] | None
) -> None:
    ranks = math.prod(sizes)
    starts = None if places is None else begins(shape, *places)
    for dtype in (torch.float64, torch.bfloat16):
        expected, expected_grads = definition(shape, starts, dtype)
        results = four_ranks.run(on_ranks, kind, sizes, shape, starts, dtype, world_size=ranks)
        for rank, (output, grads, _) in enumerate(results):
            positions = ContextSplit(rank, ranks).positions(shape[3])
            assert_close(output, expected[:, :, positions], dtype)
            for found, wanted in zip(grads, expected_grads):
                assert_close(found, wanted[:, :, positions], dtype)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Keys move on in all steps but the last, forward and backward; their gradients in every step, home at last.
        ("p2p", ["shift"] * 3 + ["shift"] * 3 + ["shift"] * 4),
        ("allgather", ["all_gather", "all_gather", "reduce_scatter"]),
        ("a2a", ["all_to_all"] * 4),
        ("a2a+p2p", ["all_to_all"] * 4 + ["shift"] + ["shift"] + ["shift"] * 2),
    ],
)
def test_what_is_sent(four_ranks: RankPool, kind: ContextParallelType, expected: list[str]) -> None:
    for _, _, kinds in four_ranks.run(on_ranks, kind, (2, 2), (1, 4, 4, 16, 2), None, torch.float64):
        assert sorted(kinds) == sorted(expected)


def order_of_events(kind: ContextParallelType) -> list[str]:
    """Collectives and tiles of a forward pass, as they start."""
    ranks = Communicator(range(4), dist.get_rank(), "cp")
    events: list[str] = []
    ranks.observer = lambda record: events.append(record.kind)
    kernel = CpuFlashAttention()
    forward = kernel.forward

    def noted(*arguments: Any, **options: Any) -> AttentionOutput:
        events.append("attend")
        return forward(*arguments, **options)

    kernel.forward = noted  # type: ignore[method-assign]
    query, key, value, _ = (tensor[:, :, :4] for tensor in inputs((1, 4, 4, 16, 2)))
    ContextParallel(ranks, (kind,)).attention(0, kernel).forward(AttentionInputs(query, key, value))
    return events


def test_what_travels_does_so_behind_the_computation(four_ranks: RankPool) -> None:
    for events in four_ranks.run(order_of_events, "p2p"):
        assert events == ["shift", "attend"] * 3 + ["attend"]
    for events in four_ranks.run(order_of_events, "allgather"):
        assert events[:3] == ["all_gather", "attend", "attend"]


@pytest.mark.parametrize("kernel", [CudaFlashAttention(), CudnnAttention()], ids=lambda kernel: kernel.name)
def test_gpu_kernels_are_called_as_torch_defines_them(kernel: AttentionKernel) -> None:
    """On tensors without data, for lack of a GPU: arguments and shapes, not results."""
    with FakeTensorMode():
        make: Callable[..., Tensor] = torch.empty
        query = make(2, 8, 64, 64, dtype=torch.bfloat16, device="cuda")
        key, value = (make(2, 2, 96, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        assert kernel.supports(query.device, query.dtype)
        part = kernel.forward(query, key, value, is_causal=False)
        assert part.log_sum_exp is not None
        assert part.output.shape == query.shape and part.log_sum_exp.shape == query.shape[:3]
        grads = kernel.backward(part.output, query, key, value, part, is_causal=False)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_layers_may_attend_in_different_ways() -> None:
    ranks = Communicator((0, 1), 0)
    kinds = {"p2p": RingAttention, "a2a": UlyssesAttention, "allgather": AllGatherAttention}
    each = ContextParallel(ranks, ("p2p", "a2a", "allgather"))
    assert [type(each.attention(layer, ReferenceAttention())) for layer in range(3)] == [*kinds.values()]
    one = ContextParallel(ranks, ("a2a",))
    assert {type(one.attention(layer, ReferenceAttention())) for layer in range(3)} == {UlyssesAttention}
    alone = ContextParallel(Communicator((0,), 0), ("a2a",))
    assert type(alone.attention(0, ReferenceAttention())) is LocalAttention
