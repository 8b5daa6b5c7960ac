"""Grouped GEMMs are those of each group; which one is chosen where, and what its trial finds."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse_command_line
from megatron.config.precision import KernelConfig
from megatron.core.device import Machine, Unavailable
from megatron.core.gradient import GradientProduct
from megatron.core.kernels import candidates
from megatron.core.kernels.candidates import SimulatedTritonGroupedGemm
from megatron.core.kernels.choice import Choice, ExpertSizes, KernelRequest
from megatron.core.kernels.selection import Kernels, build_kernels, choose_kernels, expert_sizes
from megatron.core.kernels.trials import Trials, TrialSizes, try_grouped_gemm
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, RowCounts, TorchGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient
from megatron.core.topology import single_process
from megatron.planner.launches import LaunchRecorder
from megatron.planner.simulated_rank import simulated_kernels

STALE = 1e6
"""What the last step left in a gradient buffer."""

COUNTS = {
    "uneven": (5, 1, 33, 16),
    "empty first and last": (0, 7, 40, 0),
    "empty in between": (3, 0, 0, 24),
    "all in one": (0, 0, 50, 0),
    "no rows": (0, 0, 0, 0),
}
OUT, IN = 24, 40


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(counts: RowCounts, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and output gradient."""
    groups, rows = len(counts.host), counts.total
    return random(rows, IN, dtype=dtype), random(groups * OUT, IN, dtype=dtype, seed=1), random(rows, OUT, dtype=dtype)


def definition(x: Tensor, weight: Tensor, dy: Tensor, counts: RowCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient in fp64, row by row."""
    matrices, x, dy = weight.double().view(-1, OUT, IN), x.double(), dy.double()
    of_row = torch.repeat_interleave(torch.arange(len(counts.host)), counts.device)  # [m]
    output = torch.einsum("rnk,rk->rn", matrices[of_row], x)
    input_gradient = torch.einsum("rnk,rn->rk", matrices[of_row], dy)
    outer = torch.einsum("rn,rk->rnk", dy, x)
    return output, input_gradient, torch.zeros_like(matrices).index_add_(0, of_row, outer).flatten(0, 1)


GEMMS: dict[str, GroupedGemm] = {
    "loop": LoopGroupedGemm(),
    "loop in place": LoopGroupedGemm(InPlaceWeightGradient()),
    "padded": PaddedGroupedGemm(),
    "grouped_mm": TorchGroupedGemm(),
    "grouped_mm, then loop": TorchGroupedGemm(SeparateWeightGradient()),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


DTYPES = {gemm: (torch.bfloat16,) if gemm.startswith("grouped_mm") else tuple(TOLERANCE) for gemm in GEMMS}
DTYPES["loop in place"] = (torch.float64,)
"""What each multiplies."""


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("gemm", "dtype"), [(gemm, dtype) for gemm in GEMMS for dtype in DTYPES[gemm]])
def test_all_three_gemms_are_those_of_each_group(gemm: str, dtype: torch.dtype, name: str) -> None:
    kernel = GEMMS[gemm]
    counts = RowCounts.of(COUNTS[name])
    x, weight, dy = operands(counts, dtype)
    expected = definition(x, weight, dy, counts)
    product = kernel.weight_gradient(dy, x, counts)
    found = (kernel.output(x, weight, counts), kernel.input_gradient(dy, weight, counts), product.value())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("gemm", GEMMS)
def test_weight_gradients_overwrite_then_add_also_for_groups_without_rows(gemm: str, name: str) -> None:
    counts = RowCounts.of(COUNTS[name])
    dtype = torch.float64 if torch.float64 in DTYPES[gemm] else torch.bfloat16
    x, weight, dy = operands(counts, dtype)
    expected = definition(x, weight, dy, counts)[2]
    buffer = torch.full(weight.shape, STALE, dtype=torch.promote_types(dtype, torch.float32))
    product = GEMMS[gemm].weight_gradient(dy, x, counts)
    product.write_to(buffer, accumulate=False)
    torch.testing.assert_close(buffer.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])
    product.write_to(buffer, accumulate=True)
    torch.testing.assert_close(buffer.double(), 2 * expected, rtol=0.0, atol=2 * TOLERANCE[dtype])


def test_a_wide_buffer_sums_half_precision_products_in_fp32() -> None:
    counts = RowCounts.of((4, 0, 9))
    x, weight, dy = operands(counts, torch.bfloat16)
    buffer = torch.full(weight.shape, 1e-3)
    LoopGroupedGemm().weight_gradient(dy, x, counts).write_to(buffer, accumulate=True)
    assert torch.equal(buffer[OUT : 2 * OUT], torch.full((OUT, IN), 1e-3))
    product = LoopGroupedGemm().weight_gradient(dy, x, counts).value()
    assert torch.equal(buffer, product.float() + 1e-3)


def test_counts_on_the_device_are_those_on_the_host() -> None:
    counts = RowCounts.of((3, 0, 2))
    assert counts.total == 5
    assert counts.ends.tolist() == [3, 3, 5]
    assert counts.ends.dtype == torch.int32
    assert [list(range(10)[rows]) for rows in counts.slices()] == [[0, 1, 2], [], [3, 4]]


def test_padded_gemms_have_few_shapes() -> None:
    """Also at the end of the rows; a new shape costs oneDNN more than the GEMM."""
    kernel = Mock()
    for sizes in ((5, 1, 33, 61), (90, 0, 3, 7), (0, 0, 100, 0)):
        counts = RowCounts.of(sizes)
        x, weight, dy = operands(counts, torch.float32)
        PaddedGroupedGemm(kernel).weight_gradient(dy, x, counts).write_to(weight, accumulate=True)
    calls = kernel.write.call_args_list
    assert {operand.shape[0] for call in calls for operand in call.args[1:3]} == {32, 64, 96, 100}


# Which one is chosen

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EXPERTS = ExpertSizes(4, 32, 48, rows=2**21)
"""Many rows: GEMMs that take longer than a launch."""
SIZES = TrialSizes(2, AttentionShape(8, 2, 128), 32, 48, 64, (64, 57))


def choice(device: torch.device, dtype: torch.dtype, experts: ExpertSizes | None = EXPERTS) -> Choice:
    gradient = dtype if dtype == torch.float64 else torch.float32
    request = KernelRequest(Machine(device), dtype, gradient, SIZES, experts=experts)
    return choice_of(choose_kernels(KernelConfig(), request))


def choice_of(kernels: Kernels) -> Choice:
    return next(choice for choice in kernels.choices if choice.operation == "grouped_gemm")


@pytest.mark.parametrize(
    ("device", "dtype", "experts", "expected"),
    [
        (CPU, torch.float32, EXPERTS, "padded"),
        (CPU, torch.bfloat16, EXPERTS, "padded"),
        (CPU, torch.float64, EXPERTS, "loop"),
        (GPU, torch.bfloat16, EXPERTS, "grouped_mm"),
        (GPU, torch.bfloat16, replace(EXPERTS, rows=2**20), "triton"),
        (GPU, torch.float32, EXPERTS, "loop"),
        (GPU, torch.bfloat16, replace(EXPERTS, count=1), "loop"),
        (GPU, torch.bfloat16, replace(EXPERTS, width=44), "loop"),
    ],
)
def test_the_fastest_that_multiplies_is_chosen(
    device: torch.device, dtype: torch.dtype, experts: ExpertSizes, expected: str
) -> None:
    assert choice(device, dtype, experts=experts).implementation == expected


def test_a_dense_model_has_no_grouped_gemm() -> None:
    with pytest.raises(StopIteration):
        choice(CPU, torch.float32, experts=None)


def test_on_a_gpu_it_is_tried_and_passed_over_if_it_fails() -> None:
    tried: list[Any] = []

    def failing(*given: Any) -> None:
        tried.append(given[1:])
        raise Unavailable("a trial had a relative error of 50%")

    machine, trials = Machine(GPU, can_try=True), Trials(grouped_gemm=failing)
    request = KernelRequest(machine, torch.bfloat16, torch.float32, SIZES, experts=EXPERTS, trials=trials)
    _, grouped_mm, *_ = candidates.grouped_gemm(request, SeparateWeightGradient())
    with pytest.raises(Unavailable, match="error of 50%"):
        grouped_mm.ready("grouped_gemm")
    assert tried == [(GPU, torch.bfloat16, torch.float32)]


class _WritesNothingWithoutRows(LoopGroupedGemm):
    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        product = super().weight_gradient(grad_outputs, inputs, counts)

        class Product:
            def value(self) -> Tensor:
                return product.value()

            def write_to(self, buffer: Tensor, accumulate: bool) -> None:
                kept = buffer.clone()
                product.write_to(buffer, accumulate)
                for part, old, count in zip(counts.matrices(buffer), counts.matrices(kept), counts.host):
                    if not count:
                        part.copy_(old)

        return Product()


class _TakesTheFirstMatrix(LoopGroupedGemm):
    def output(self, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        matrices = counts.matrices(weight)
        return super().output(inputs, matrices[:1].expand_as(matrices).flatten(0, 1), counts)


class _IsTransposed(LoopGroupedGemm):
    def input_gradient(self, grad_outputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        return super().input_gradient(grad_outputs, weight, counts).flip(0)


@pytest.mark.parametrize("kernel", [_WritesNothingWithoutRows(), _TakesTheFirstMatrix(), _IsTransposed()])
def test_a_trial_finds_a_wrong_kernel(kernel: GroupedGemm) -> None:
    with pytest.raises(Unavailable, match="a trial"):
        try_grouped_gemm(kernel, CPU, torch.float32, torch.float32)


@pytest.mark.parametrize("kernel", [LoopGroupedGemm(), PaddedGroupedGemm(), TorchGroupedGemm()])
def test_a_trial_accepts_the_right_ones(kernel: GroupedGemm) -> None:
    try_grouped_gemm(kernel, CPU, torch.bfloat16, torch.float32)


# Runs

RUN = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --mock-data "
    "--vocab-size 61 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-2 --bf16 --num-experts 8 "
    "--moe-ffn-hidden-size 24"
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ExpertSizes(8, 32, 24, 8)),
        ("--expert-model-parallel-size 4", ExpertSizes(2, 32, 24, 32)),
        ("--expert-model-parallel-size 2 --expert-tensor-parallel-size 3", ExpertSizes(4, 32, 8, 48)),
        ("--tensor-model-parallel-size 2 --sequence-parallel", ExpertSizes(8, 32, 12, 8)),
    ],
)
def test_a_rank_has_its_part_of_the_experts(flags: str, expected: ExpertSizes) -> None:
    config = parse_command_line(f"{RUN} {flags}".split())
    model = config.model.resolve(61, config.parallel.tensor_model_parallel_size, config.seq_length)
    assert expert_sizes(model, config.parallel, tokens=32) == expected


@pytest.mark.parametrize(
    ("flags", "on_cpu", "on_gpu"),
    [
        ("", PaddedGroupedGemm, SimulatedTritonGroupedGemm),
        ("--kernel grouped_gemm=grouped_mm", TorchGroupedGemm, TorchGroupedGemm),
        ("--kernel grouped_gemm=loop", LoopGroupedGemm, LoopGroupedGemm),
        ("--expert-model-parallel-size 8", PaddedGroupedGemm, LoopGroupedGemm),
        ("--expert-model-parallel-size 8 --kernel grouped_gemm=grouped_mm", TorchGroupedGemm, TorchGroupedGemm),
    ],
)
def test_the_dry_run_multiplies_as_the_run_does(flags: str, on_cpu: type, on_gpu: type) -> None:
    config = parse_command_line(f"{RUN} {flags}".split())
    topology = single_process()
    assert type(build_kernels(config, topology, 61).layers.grouped_gemm) is on_cpu
    for device, expected in ((CPU, on_cpu), (GPU, on_gpu)):
        kernels = simulated_kernels(config, topology, device, 61, LaunchRecorder())
        assert type(kernels.layers.grouped_gemm) is expected
