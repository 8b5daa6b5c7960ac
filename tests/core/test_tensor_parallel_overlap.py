"""Collectives behind products: what they send, what they give, and which way is chosen.

That products hide them is in ``test_launch_order.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import CollectiveRecord, Communicator, add_in_order
from megatron.core.gradient import Gradient
from megatron.core.ops.fp8 import Fp8Role
from megatron.core.ops.matmul import Gemm, PlainGemm
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.collectives import (
    NoOverlap,
    P2POverlap,
    RankDevice,
    SymmetricMemoryOverlap,
    TensorParallel,
    TPOverlap,
    choose_overlap,
    obstacle_between,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from megatron.core.topology import single_process
from tests.parallel.symmetric_memory import symmetric_memory_overlap_on_cpu
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
ROWS, WIDTH, OUTPUTS = 12, 8, 6
"""Of a whole sequence; rows are divisible by two, three and four ranks."""


def test_a_sum_is_in_order_and_may_overwrite_a_summand() -> None:
    parts = [torch.tensor([number], dtype=torch.float32) for number in (1.0, 2.0**24, -(2.0**24), 3.0)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(expected, sum(reversed(parts), torch.zeros(1)))
    assert torch.equal(add_in_order(parts), expected)
    assert add_in_order(parts, parts[2]) is parts[2] and torch.equal(parts[2], expected)
    assert torch.equal(add_in_order(parts[:2], parts[1]), torch.tensor([2.0**24]))


# --- what layers compute and send ----------------------------------------------------------------------------

Edges = Callable[[Communicator], TPOverlap]


@dataclass(frozen=True)
class Ran:
    """What a column- and a row-parallel layer gave on a rank, and what was recorded of each forward and backward."""

    results: list[Tensor]
    records: list[list[CollectiveRecord]]


def run_layers(edges: Edges | None, dtype: torch.dtype = torch.float64, gemm: Gemm | None = None) -> Ran:
    """A column-parallel layer and a row-parallel one behind it, with sequence parallelism; ``gemm`` replaces theirs."""
    ranks = Communicator(range(dist.get_world_size()), dist.get_rank(), "tp")
    parallel = TensorParallel(ranks, True, None if edges is None else edges(ranks))
    inputs, first, second, gradient = whole_tensors(dtype)
    rank, size = ranks.rank, ranks.size
    context = LayerContext(parallel, dtype, CPU)
    column = ColumnParallelLinear(context.column_weight("column", WIDTH, (12,), 1.0), context)
    row = RowParallelLinear(context.row_weight("row", 12, OUTPUTS, 1.0), context)
    column.weight.data.copy_(first.chunk(size)[rank])
    row.weight.data.copy_(second.chunk(size, dim=1)[rank])
    if gemm is not None:
        column.op, row.op = replace(column.op, gemm=gemm), replace(row.op, gemm=gemm)
    mine = inputs.chunk(size)[rank].clone().requires_grad_()
    records: list[list[CollectiveRecord]] = []

    def recorded(run: Callable[[], Any]) -> Any:
        records.append([])
        ranks.observer = records[-1].append
        return run()

    hidden = recorded(lambda: column(mine))
    output = recorded(lambda: row(hidden))
    grad_hidden, grad_row = recorded(
        lambda: torch.autograd.grad(output, (hidden, row.weight), gradient.chunk(size)[rank])
    )
    grad_inputs, grad_column = recorded(lambda: torch.autograd.grad(hidden, (mine, column.weight), grad_hidden))
    return Ran([hidden.detach(), output.detach(), grad_hidden, grad_row, grad_inputs, grad_column], records)


def whole_tensors(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Input, the two weights, and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = (ROWS, 2, WIDTH), (12, WIDTH), (OUTPUTS, 12), (ROWS, 2, OUTPUTS)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def expected_of(rank: int, size: int) -> list[Tensor]:
    """What :func:`run_layers` must give, by one process."""
    inputs, first, second, gradient = whole_tensors(torch.float64)
    hidden, grad_hidden = inputs @ first.t(), gradient @ second
    return [
        hidden.chunk(size, dim=-1)[rank],
        (hidden @ second.t()).chunk(size)[rank],
        grad_hidden.chunk(size, dim=-1)[rank],
        torch.einsum("sbo,sbi->oi", gradient, hidden).chunk(size, dim=1)[rank],
        (grad_hidden @ first).chunk(size)[rank],
        torch.einsum("sbo,sbi->oi", grad_hidden, inputs).chunk(size)[rank],
    ]


def sent(records: list[CollectiveRecord]) -> float:
    """Bytes that a rank sends; of a collective the parts of the others."""
    return sum(
        record.num_bytes * (1.0 if record.kind == "exchange" else (record.group_size - 1) / record.group_size)
        for record in records
    )


@pytest.mark.parametrize("edges", [P2POverlap, symmetric_memory_overlap_on_cpu])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_layers_give_what_one_process_gives_and_send_what_they_send_without_overlap(
    four_ranks: RankPool, size: int, edges: Edges
) -> None:
    plain: list[Ran] = four_ranks.run(run_layers, None, world_size=size)
    overlapped: list[Ran] = four_ranks.run(run_layers, edges, world_size=size)
    for rank, (ran, without) in enumerate(zip(overlapped, plain)):
        for number, (found, wanted) in enumerate(zip(ran.results, expected_of(rank, size))):
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12), number
            assert torch.allclose(without.results[number], wanted, rtol=1e-12, atol=1e-12), number
        assert [sent(records) for records in ran.records] == [sent(records) for records in without.records]
        kinds = [[record.kind for record in records] for records in ran.records]
        if edges is P2POverlap:
            parts = ["exchange"] * (size - 1)
            assert kinds == [parts, parts, parts, ["all_gather", *parts]]
        else:
            assert kinds == [["all_gather"], ["reduce_scatter"], ["all_gather"], ["all_gather", "reduce_scatter"]]


class RowScaledGemm(PlainGemm):
    """Divides every row by its amax, and multiplies every row of what it computes, ``[s, b, n]``, by that scale."""

    is_plain = False

    def quantize(self, role: Fp8Role, tensor: Tensor, layout: Layout) -> QuantizedTensor:
        amax = tensor.abs().amax(dim=-1, keepdim=True)  # [s, b, 1]
        return QuantizedTensor(tensor / amax, amax)

    def output(self, inputs: QuantizedTensor, weight: Tensor) -> Tensor:
        return super().output(inputs, weight) * scales_of(inputs)

    def input_gradient(self, grad_outputs: QuantizedTensor, weight: Tensor) -> Tensor:
        return super().input_gradient(grad_outputs, weight) * scales_of(grad_outputs)

    def weight_gradient(self, grad_outputs: QuantizedTensor, inputs: QuantizedTensor) -> Gradient:
        rows = QuantizedTensor(grad_outputs.data * scales_of(grad_outputs) * scales_of(inputs))
        return super().weight_gradient(rows, inputs)


def scales_of(rows: QuantizedTensor) -> Tensor:
    """The scale of each row ``[s, b, 1]``."""
    assert rows.inverse_scale is not None and rows.inverse_scale.shape == (*rows.data.shape[:-1], 1)
    return rows.inverse_scale


@pytest.mark.parametrize("edges", [None, P2POverlap])
def test_the_scales_of_rows_move_with_the_rows(four_ranks: RankPool, edges: Edges | None) -> None:
    ran: list[Ran] = four_ranks.run(run_layers, edges, torch.float64, RowScaledGemm(), world_size=2)
    for rank, found in enumerate(ran):
        for number, (result, wanted) in enumerate(zip(found.results, expected_of(rank, 2))):
            assert torch.allclose(result, wanted, rtol=1e-12, atol=1e-12), number


def run_rounding() -> Tensor:
    """Summands whose sum depends on the order of additions, as the output of a row-parallel layer."""
    ranks = Communicator(range(dist.get_world_size()), dist.get_rank(), "tp")
    mine = QuantizedTensor(summands()[ranks.rank].clone())
    return P2POverlap(ranks).gemm_reduce(mine, lambda rows: rows.data, None).wait()


def summands() -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(0, 6, 64)


def test_the_ranks_are_added_in_their_order(four_ranks: RankPool) -> None:
    parts = summands()
    in_rank_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(in_rank_order, ((parts[3] + parts[2]) + parts[1]) + parts[0])
    assert torch.equal(torch.cat(four_ranks.run(run_rounding, world_size=4)), in_rank_order)


# --- which way -----------------------------------------------------------------------------------------------

DEVICES = [RankDevice("node", device, (9, 0), "nccl") for device in range(4)]


def everyone(mine: int, other: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("devices", "can_access", "why"),
    [
        (DEVICES, everyone, None),
        (DEVICES, lambda mine, other: other != 3, "not every GPU reads the memory of every other"),
        ([*DEVICES[:3], replace(DEVICES[3], host="another")], everyone, "all tensor-parallel ranks on one host"),
        ([replace(device, backend="gloo") for device in DEVICES], everyone, "needs NCCL, not gloo"),
        (
            [replace(device, capability=(8, 0)) for device in DEVICES],
            everyone,
            "from compute capability 9.0 on, not 8.0",
        ),
        # Each process sees one GPU, under the same number: nothing can be asked.
        ([replace(device, device=0) for device in DEVICES], everyone, "not every GPU reads the memory of every other"),
    ],
)
def test_symmetric_memory_needs_gpus_that_read_each_others_memory(
    devices: list[RankDevice], can_access: Callable[[int, int], bool], why: str | None
) -> None:
    found = obstacle_between(devices, 1, can_access)
    assert found == why or (found is not None and why is not None and why in found)


def test_cpus_overlap_part_by_part_and_say_why() -> None:
    chosen = choose_overlap(single_process().tensor_parallel, single_process().control, CPU)
    assert isinstance(chosen, P2POverlap) and chosen.name == "pipelined (symmetric memory needs GPUs)"


def test_gpus_that_can_use_symmetric_memory_do() -> None:
    single = single_process()
    chosen = choose_overlap(single.tensor_parallel, single.control, CPU, find_obstacle=lambda *_: None)
    assert isinstance(chosen, SymmetricMemoryOverlap)


def test_without_the_flag_nothing_overlaps() -> None:
    assert isinstance(TensorParallel(single_process().tensor_parallel).overlap, NoOverlap)
