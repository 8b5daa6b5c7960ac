"""FP8: what is rounded to what, which scale follows from which magnitudes, and linear layers that use both."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.activations import Recomputed
from megatron.core.communication import Communicator
from megatron.core.fp8 import ROLES, Fp8Scaling
from megatron.core.kernels.selection import LayerKernels
from megatron.core.models.layer import BuildContext, NormLinear, RMSNorm
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    LARGEST_SCALE,
    BlockQuantization,
    EagerQuantization,
    FlatPieces,
    Fp8Kernels,
    ScaledGemm,
    amax_of,
    block_scaled_gemm,
    dequantize,
    largest_value,
    quantize,
    scale_from_amax,
    scaled_gemm,
    scaled_gemm_reference,
    widened_block_gemm,
    widened_gemm,
)
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.swiglu import EagerSwiGLU, swiglu
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear, SwiGLULinear

CPU = torch.device("cpu")
ALONE = Communicator((0,), 0)
EAGER = EagerQuantization()
HYBRID = PrecisionConfig(bf16=True, fp8_format="hybrid")
TENSORWISE = replace(HYBRID, fp8_recipe="tensorwise")
BLOCKWISE = PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="blockwise")
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def own_scale(tensor: Tensor, dtype: torch.dtype) -> QuantizedTensor:
    amax = amax_of(tensor)
    return quantize(tensor, scale_from_amax(amax, largest_value(dtype), 1.0), amax, dtype)


def with_scale(tensor: Tensor, scale: float, dtype: torch.dtype) -> QuantizedTensor:
    return quantize(tensor, torch.tensor(scale), amax_of(tensor), dtype)


# One tensor


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of the format that is nearest to each of ``values``, of two the one with the even code; plainly."""
    codes = torch.arange(127 if dtype == E4M3 else 124, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    assert numbers.isfinite().all()
    assert numbers[-1] == largest_value(dtype)
    distances = (values.abs().unsqueeze(-1) - numbers).abs()
    smallest = distances.amin(dim=-1, keepdim=True)
    odd = (codes % 2).double()
    chosen = torch.where(distances == smallest, odd, 2.0).argmin(dim=-1)
    return numbers[chosen].copysign(values)


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.25, 3.7e4])
def test_every_number_is_rounded_to_the_nearest_or_to_the_largest(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.logspace(-9, 5, 3000, base=10.0) * torch.rand(3000, generator=generator)
    between = torch.arange(1, 127, dtype=torch.uint8).view(dtype).float()
    between = between[between.isfinite()]
    ties = (between[1:] + between[:-1]) / 2
    scaled = torch.cat((magnitudes, -magnitudes, between, -between, ties, -ties, torch.tensor([0.0, -0.0, 1e7])))
    tensor = (scaled / scale).bfloat16()
    found = with_scale(tensor, scale, dtype)
    assert torch.equal(found.data.double(), nearest((tensor.float() * torch.tensor(scale)).double(), dtype))
    assert math.isclose(float(dequantize(found).max()), largest_value(dtype) / scale, rel_tol=1e-6)


def test_the_result_has_rows_in_memory_whatever_came() -> None:
    turned = torch.randn(3, 4, 5).transpose(0, 1)
    assert own_scale(turned, E4M3).data.is_contiguous()


@FORMATS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("product", [scaled_gemm, widened_gemm])
def test_what_is_not_finite_is_in_every_product(dtype: torch.dtype, bad: float, product: ScaledGemm) -> None:
    """Numbers saturate; an overflow of the tensor itself must not vanish behind that."""
    tensor = torch.randn(16, 32)
    other = own_scale(torch.randn(16, 32), E4M3)
    assert product(with_scale(tensor, 1e9, dtype), other, torch.float32).isfinite().all()
    tensor[3, 5] = bad
    for operand in (with_scale(tensor, 1.0, dtype), own_scale(tensor, dtype)):
        assert product(operand, other, torch.bfloat16).isnan().all()


@FORMATS
def test_a_tensor_of_zeros_stays_one(dtype: torch.dtype) -> None:
    operand = own_scale(torch.zeros(16, 16), dtype)
    assert operand.inverse_scale == 1.0
    other = operand if dtype == E4M3 else own_scale(torch.ones(16, 16), E4M3)
    for multiply in (scaled_gemm, widened_gemm):
        assert not multiply(operand, other, torch.float32).any()


# Products


@pytest.mark.parametrize(("first", "second"), [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3 x e4m3", "e5m2 x e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("product", [scaled_gemm, widened_gemm])
def test_products_are_those_of_the_quantised_numbers(
    first: torch.dtype, second: torch.dtype, dtype: torch.dtype, product: ScaledGemm
) -> None:
    generator = torch.Generator().manual_seed(3)
    a = own_scale(torch.randn(48, 160, generator=generator) * 1e-5, first)
    b = own_scale(torch.randn(32, 160, generator=generator) * 30, second)
    found = product(a, b, dtype)
    assert found.dtype == dtype
    exact = scaled_gemm_reference(a, b, torch.float64)
    terms = dequantize(a).abs() @ dequantize(b).abs().t()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    assert ((found.double() - exact).abs() <= rounding * exact.abs() + 2.0**-20 * terms).all()


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch knows nothing of GPUs")
def test_gpus_take_the_operands_as_they_lie_in_memory() -> None:
    """torch checks layouts and sizes for a GPU also where there is none."""
    device = torch.device("cuda")
    with FakeTensorMode():
        layer = Fp8Scaling(TENSORWISE, ALONE, device).gemm("layer", torch.bfloat16, ALONE, (), (32, 48))
        weight = torch.empty(32, 48, dtype=torch.bfloat16, device=device)
        inputs = layer.quantize("input", torch.empty(4, 8, 48, dtype=torch.bfloat16, device=device), Layout.BOTH)
        gradient = layer.quantize(
            "output_gradient", torch.empty(4, 8, 32, dtype=torch.bfloat16, device=device), Layout.BOTH
        )
        assert layer.output(inputs, weight).shape == (4, 8, 32)
        assert layer.input_gradient(gradient, weight).shape == (4, 8, 48)
        assert layer.weight_gradient(gradient, inputs).value().shape == (32, 48)
        assert layer.weight_gradient(gradient.with_rows([gradient.data]), inputs.kept).value().shape == (32, 48)
        rows, one = inputs.data.flatten(0, 1), torch.ones((), device=device)
        with pytest.raises(RuntimeError, match="must be col_major"):
            torch._scaled_mm(rows, rows.t().contiguous(), one, one)


# Blocks


def in_plain_loops(matrix: Tensor, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Block after block: the largest power of two that keeps the block within the range, and the nearest numbers."""
    m, k = matrix.shape
    numbers = torch.empty(m, k, dtype=torch.float64)
    inverse = torch.empty(m // height, k // width)
    for row, column in product(range(m // height), range(k // width)):
        place = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
        amax, exponent = float(matrix[place].abs().max()), 0
        if 0.0 < amax < math.inf:
            exponent = min(math.frexp(largest_value(dtype) / amax)[1] - 1, 126)
        scaled = (matrix[place].double() * 2.0**exponent).clamp(-largest_value(dtype), largest_value(dtype))
        numbers[place] = nearest(scaled, dtype)
        inverse[row, column] = 2.0**-exponent if math.isfinite(amax) else math.nan
    return numbers, inverse


def blocks_of_all_magnitudes() -> Tensor:
    """``[256, 384]`` in bf16 with a block of zeros, an overflow, and blocks whose scale has no bound or is tiny."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(256, 384, generator=generator) * torch.logspace(-6, 6, 384, base=10.0)
    tensor[:130, :128], tensor[128:, 128:256], tensor[200, 300] = 0.0, tensor[128:, 128:256] * 1e-43, math.inf
    tensor[5, 130] = 3e38
    return tensor.bfloat16()


@FORMATS
def test_every_block_has_a_power_of_two_of_its_own_in_both_layouts(dtype: torch.dtype) -> None:
    tensor, blocks = blocks_of_all_magnitudes(), BlockQuantization()
    found = blocks.quantize(tensor.view(128, 2, 384), dtype, Layout.BOTH | Layout.COLUMNS)
    assert found.columns is not None and found.inverse_scale is not None and found.columns.inverse_scale is not None
    assert found.transposed is not None and found.transposed_scale is not None
    assert (found.data.shape, found.inverse_scale.shape) == ((128, 2, 384), (128, 2, 3))
    weight = blocks.quantize_weight(tensor, dtype, Layout.BOTH)
    assert weight.transposed is not None and weight.transposed_scale is not None and weight.inverse_scale is not None
    columns = found.columns.data.flatten(0, 1), found.columns.inverse_scale
    for (height, width), pairs in {
        (1, 128): [(found.data.flatten(0, 1), found.inverse_scale.flatten(0, 1))],
        (128, 1): [columns, (found.transposed.t(), found.transposed_scale.t())],
        (128, 128): [(weight.data, weight.inverse_scale), (weight.transposed.t(), weight.transposed_scale.t())],
    }.items():
        numbers, inverse = in_plain_loops(tensor, height, width, dtype)
        for data, scale in pairs:
            assert torch.equal(data.double(), numbers)
            assert torch.equal(scale.nan_to_num(), inverse.nan_to_num())
            assert torch.equal(scale.isnan(), inverse.isnan()) and inverse.isnan().any()
    assert not torch.equal(found.transposed.t().double(), found.data.flatten(0, 1).double())
    with pytest.raises(RuntimeError):
        blocks.quantize(tensor[:, :200], dtype, Layout.ROWS)
    with pytest.raises(RuntimeError):
        blocks.quantize(tensor[:200], dtype, Layout.TRANSPOSED)


@pytest.mark.parametrize("is_weight", [False, True])
def test_products_of_blocks_are_added_in_their_order(is_weight: bool) -> None:
    blocks, generator = BlockQuantization(), torch.Generator().manual_seed(2)
    a, b = (torch.exp(2 * torch.randn(rows, 384, generator=generator)) for rows in (3, 128))
    x = blocks.quantize(a - 1, E4M3, Layout.ROWS)
    w = blocks.quantize_weight(b - 1, E4M3, Layout.ROWS) if is_weight else blocks.quantize(b - 1, E4M3, Layout.ROWS)
    assert x.inverse_scale is not None and w.inverse_scale is not None
    wanted = torch.zeros(3, 128)
    for row, column, block in product(range(3), range(128), range(3)):
        part = slice(128 * block, 128 * (block + 1))
        terms = zip(x.data[row, part].tolist(), w.data[column, part].tolist())
        exact = torch.tensor(math.fsum(one * other for one, other in terms))
        wanted[row, column] += exact * x.inverse_scale[row, block] * w.inverse_scale[0 if is_weight else column, block]
    assert torch.equal(widened_block_gemm(x, w, torch.float32), wanted)
    assert torch.allclose(wanted.double(), scaled_gemm_reference(x, w, torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [128, 384])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 640), (640, 512)])
def test_gpus_take_the_scales_of_blocks_as_they_lie_in_memory(n: int, k: int, tokens: int) -> None:
    """torch checks sizes and strides on tensors without memory; rows may also have been gathered."""
    layer = Fp8Scaling(BLOCKWISE, ALONE, CPU, kernels=Fp8Kernels.eager(block_scaled_gemm)).gemm(
        "layer", torch.bfloat16, ALONE, (), (n, k)
    )
    weight, inputs, gradient = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((n, k), (tokens, 1, k), (tokens, 1, n))
    )
    x = layer.quantize("input", inputs, Layout.ROWS | Layout.COLUMNS)
    dy = layer.quantize("output_gradient", gradient, Layout.BOTH)
    assert layer.output(x, weight).shape == (tokens, 1, n)
    assert layer.input_gradient(dy, weight).shape == (tokens, 1, k)
    for operand in (x.kept, layer.quantize("input", inputs, Layout.BOTH).kept):
        assert layer.weight_gradient(dy.kept, operand).value().shape == (n, k)


@pytest.mark.parametrize("cuts", [(64, 4096, 50000), (128 * 384,), (77, 383 * 7)])
def test_shards_of_a_weight_give_the_blocks_of_the_whole(cuts: tuple[int, ...]) -> None:
    """Wherever a rank's shard begins and ends: the amax of a block is the maximum over the shards."""
    config, weight = replace(BLOCKWISE, fp8_param_gather=True), blocks_of_all_magnitudes().float()
    whole = BlockQuantization().quantize_weight(weight, E4M3, Layout.ROWS)
    borders = (0, *cuts, weight.numel())
    shards = [(weight.flatten()[start:stop], start) for start, stop in pairwise(borders)]
    amax = torch.stack([FlatPieces.of(*one, (256, 384), 128).amax(one[0], 6) for one in shards]).amax(dim=0)
    ranks = Mock(all_reduce=Mock(return_value=amax))
    for shard, start in shards:
        scaling = Fp8Scaling(config, ALONE, CPU)
        layer = scaling.gemm("linear", torch.bfloat16, ALONE, (), (256, 384))
        numbers = torch.zeros(shard.numel(), dtype=torch.uint8).view(E4M3)
        scaling.quantize_weights({"linear": (shard, numbers, start)}, ranks)
        assert torch.equal(numbers.double(), whole.data.flatten()[start : start + shard.numel()].double())
        assert layer.block_scales is not None and whole.inverse_scale is not None
        assert torch.equal(layer.block_scales.nan_to_num(), whole.inverse_scale.nan_to_num())


# Scales over the steps


def expected_scales(
    amaxes: list[float], length: int, algorithm: Literal["most_recent", "max"], largest: float, margin: int
) -> Iterator[float]:
    """The rule in words: the window's newest or largest magnitude is to become ``largest`` / 2^margin; what is zero or
    not finite tells nothing."""
    scale = 0.0
    for step in range(len(amaxes)):
        window = [amax if math.isfinite(amax) else 0.0 for amax in amaxes[max(0, step + 1 - length) : step + 1]]
        amax = max(window) if algorithm == "max" else window[-1]
        if amax > 0.0:
            scale = min(largest / amax / 2**margin, LARGEST_SCALE)
        yield scale


@pytest.mark.parametrize(
    ("length", "algorithm", "margin"), list(product((1, 2, 5, 16), ("most_recent", "max"), (0, 3)))
)
def test_scales_follow_the_magnitudes_of_the_steps_before(
    length: int, algorithm: Literal["most_recent", "max"], margin: int
) -> None:
    config = replace(HYBRID, fp8_amax_history_len=length, fp8_amax_compute_algo=algorithm, fp8_margin=margin)
    scaling = Fp8Scaling(config, ALONE, CPU)
    scaling.gemm("layer", torch.bfloat16, ALONE, (), (32, 48))
    generator = torch.Generator().manual_seed(length)
    steps = torch.exp(6 * torch.randn(40, 3, generator=generator))
    # Nothing to see, an overflow, and magnitudes whose scale would be infinite or whose reciprocal is not normal.
    for step, bad in ((0, 0.0), (4, math.inf), (5, math.nan), (9, 0.0), (12, 1e-44), (13, 1e-37), (20, math.inf)):
        steps[step] = bad
    columns = [
        list(
            expected_scales(steps[:, column].tolist(), length, algorithm, largest_value(scaling.formats[role]), margin)
        )
        for column, role in enumerate(ROLES)
    ]
    for step, amaxes in enumerate(steps):
        scaling.start_step()
        scaling.delayed_state.step_amax[0] = amaxes
        scaling.finish_step()
        wanted = torch.tensor([column[step] for column in columns], dtype=torch.float64)
        assert torch.allclose(scaling.delayed_state.scale[0].double(), wanted, rtol=1e-6, atol=0.0), step
        assert scaling.delayed_state.scale.reciprocal().isfinite().all() or step == 0


@FORMATS
def test_an_overflow_saturates_for_one_step_and_an_underflow_is_lost_for_one(dtype: torch.dtype) -> None:
    linear, scaling = row_layer(replace(HYBRID, fp8_format="hybrid" if dtype == E5M2 else "e4m3"))
    gradient = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(4))
    factors = (1.0, 1e5, 1e5, 1e-7, 1e-7)
    first, *later = (float(weight_gradient_of_a_step(linear, scaling, gradient * factor).norm()) for factor in factors)
    relative = [norm / first for norm in later]
    assert relative[0] < 1e4, "beyond the range"
    assert relative[1] == pytest.approx(1e5, rel=1e-2)
    assert relative[2] < 1e-9, "below the range"
    assert relative[3] == pytest.approx(1e-7, rel=1e-2)


# Linear layers


def linear_layer(kind: str, scaling: Fp8Scaling) -> ColumnParallelLinear | RowParallelLinear:
    """A layer of 48 inputs and 32 outputs."""
    context = LayerContext(TensorParallel(ALONE), torch.bfloat16, CPU, fp8=scaling)
    linear: ColumnParallelLinear | RowParallelLinear
    if kind == "column":
        linear = ColumnParallelLinear(context.column_weight("linear", 48, (16, 16), 1.0), context)
    else:
        linear = RowParallelLinear(context.row_weight("linear", 48, 32, 1.0), context)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(5))
    return linear


def row_layer(config: PrecisionConfig) -> tuple[RowParallelLinear, Fp8Scaling]:
    """A layer and its scales."""
    scaling = Fp8Scaling(config, ALONE, CPU)
    linear = linear_layer("row", scaling)
    assert isinstance(linear, RowParallelLinear)
    return linear, scaling


def layer_inputs(seed: int = 6) -> Tensor:
    return torch.randn(16, 1, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight_gradient_of_a_step(linear: RowParallelLinear, scaling: Fp8Scaling, gradient: Tensor) -> Tensor:
    scaling.start_step()
    linear.weight.grad = None
    linear(layer_inputs()).backward(gradient.bfloat16())
    scaling.finish_step()
    assert linear.weight.grad is not None
    return linear.weight.grad.double()


@pytest.mark.parametrize("gradient_format", [E4M3, E5M2], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_all_three_products_of_a_layer_are_of_quantised_numbers(gradient_format: torch.dtype, kind: str) -> None:
    config = replace(TENSORWISE, fp8_format="hybrid" if gradient_format == E5M2 else "e4m3")
    linear = linear_layer(kind, Fp8Scaling(config, ALONE, CPU))
    inputs = layer_inputs().requires_grad_()
    gradient = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(7)).bfloat16() * 1e-6
    output = linear(inputs)
    output.backward(gradient)
    x, w = (dequantize(own_scale(tensor.detach().flatten(0, -2), E4M3)) for tensor in (inputs, linear.weight))
    g = dequantize(own_scale(gradient.flatten(0, -2), gradient_format))
    for found, wanted in ((output, x @ w.t()), (inputs.grad, g @ w), (linear.weight.grad, g.t() @ x)):
        assert found is not None
        error = (found.detach().double().flatten(0, -2) - wanted).abs().max()
        assert error < 2.0**-8 * wanted.abs().max()


def test_without_a_scale_a_step_takes_the_tensors_own() -> None:
    """Gradients are of the order of one over the tokens of a batch: with a scale of 1 the first step would be lost."""
    gradient = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(4)) * 1e-9
    first = weight_gradient_of_a_step(*row_layer(HYBRID), gradient)
    assert torch.equal(first, weight_gradient_of_a_step(*row_layer(TENSORWISE), gradient))
    assert first.abs().max() > 0.0


def test_microbatches_of_a_step_share_their_scales() -> None:
    linear, scaling = row_layer(HYBRID)
    weight_gradient_of_a_step(linear, scaling, torch.ones(16, 1, 32))
    scaling.start_step()
    outputs = [linear(layer_inputs(seed) * factor) for seed, factor in ((6, 1), (8, 100), (6, 1))]
    assert torch.equal(outputs[0], outputs[2])
    scaling.finish_step()
    assert not torch.equal(outputs[0], linear(layer_inputs())), "the second microbatch set the scale"


def test_evaluations_and_repeated_forward_passes_leave_no_trace() -> None:
    gradient = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(4))
    states = []
    for disturbs in (False, True):
        linear, scaling = row_layer(replace(HYBRID, fp8_amax_history_len=3))
        for factor in (1.0, 2.0, 3.0):
            if disturbs:
                with torch.no_grad():
                    linear(layer_inputs() * 1000)
            scaling.start_step()
            for _ in range(2 if disturbs else 1):
                output = linear(layer_inputs() * factor)
            output.backward((gradient * factor).bfloat16())
            scaling.finish_step()
        states.append(scaling.state())
    assert states[0].keys() == {"linear/scale", "linear/amax_history"}
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
        assert (tensor > 0).all()


class Segment(nn.Module):
    """A linear layer alone, as a segment that is recomputed."""

    last_linear = "linear"

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs)
        return output


@pytest.mark.parametrize("config", [HYBRID, TENSORWISE], ids=["delayed", "tensorwise"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_runs_again_is_quantised_as_the_first_time_and_not_multiplied(config: PrecisionConfig, kind: str) -> None:
    """Gradients, scales and the number of products are those of a single run."""
    products = 0

    def multiply(
        a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
    ) -> Tensor:
        nonlocal products
        products += 1
        return scaled_gemm(a, b, dtype, fast, out)

    def train(runs_again: bool) -> list[Tensor]:
        scaling = Fp8Scaling(config, ALONE, CPU, kernels=Fp8Kernels.eager(multiply))
        linear = linear_layer(kind, scaling)
        found = []
        for factor in (1.0, 3.0, 0.5):
            inputs = (layer_inputs() * factor).requires_grad_()
            scaling.start_step()
            output = Recomputed(Segment(linear))(inputs) if runs_again else linear(inputs)
            output.backward(torch.full_like(output, factor))
            scaling.finish_step()
            assert inputs.grad is not None
            assert linear.weight.grad is not None
            found += [output.detach(), inputs.grad, linear.weight.grad.clone()]
        return found + list(scaling.state().values())

    once = train(runs_again=False)
    twice = train(runs_again=True)
    assert products == 2 * 3 * 3
    for one, two in zip(once, twice, strict=True):
        assert torch.equal(one, two)


class SwiGLUThenLinear(SwiGLULinear):
    """The definition: the output of SwiGLU exists, and the linear layer quantises it."""

    def forward(self, gate_up: Tensor, *arguments: Any) -> Tensor:
        output: Tensor = self.linear(swiglu(gate_up, self.kernel))
        return output


class NormThenLinear(NormLinear):
    """The definition: the output of the norm exists, and the linear layer quantises it."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(self.norm(x))
        return output


def train_steps(
    layer: SwiGLULinear | NormLinear, scaling: Fp8Scaling, inputs: Tensor, runs_again: bool
) -> list[Tensor]:
    """Of three steps the output of an evaluation, the output and the gradients; and the scales after them."""
    module, found = Recomputed(layer) if runs_again else layer, []
    for factor in (1.0, 3.0, 0.5):
        scaled = (inputs * factor).bfloat16().requires_grad_()
        layer.zero_grad()
        scaling.start_step()
        with torch.no_grad():
            found.append(layer(scaled))
        output = module(scaled)
        output.backward(torch.full_like(output, factor))
        scaling.finish_step()
        found.append(output.detach())
        for tensor in (scaled, *layer.parameters()):
            assert tensor.grad is not None
            found.append(tensor.grad)
    return found + list(scaling.state().values())


def layouts_of_steps(config: PrecisionConfig, runs_again: bool) -> list[Layout]:
    """Of the evaluation and of the step, from the second step on."""
    passes = [Layout.ROWS, *([Layout.ROWS, Layout.TRANSPOSED] if runs_again else [Layout.BOTH])]
    return 2 * passes if config is HYBRID else []


def swiglu_and_linear(scaling: Fp8Scaling, is_fused: bool) -> tuple[SwiGLULinear, Mock]:
    """With the kernel, which notes its calls."""
    kernel = Mock(wraps=EagerSwiGLU())
    return (SwiGLULinear if is_fused else SwiGLUThenLinear)(kernel, linear_layer("row", scaling)), kernel


def norm_and_linear(scaling: Fp8Scaling, is_fused: bool, **flags: Any) -> tuple[NormLinear, Mock]:
    """With the kernel, which notes its calls."""
    kernel = Mock(wraps=EagerRMSNorm())
    kernels = LayerKernels(rms_norm=kernel)
    context = BuildContext(
        TensorParallel(ALONE), torch.bfloat16, CPU, ReferenceAttention(), fp8=scaling, kernels=kernels
    )
    norm = RMSNorm("norm", 48, TransformerConfig(1, 48, 64, 2, 1, 16, 64, 64, 16, **flags), context)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    return (NormLinear if is_fused else NormThenLinear)(norm, linear_layer("column", scaling)), kernel


@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize(
    ("build", "width"),
    [(swiglu_and_linear, 96), (norm_and_linear, 48), (partial(norm_and_linear, apply_layernorm_1p=True), 48)],
    ids=["SwiGLU", "norm", "norm of 1 + weight"],
)
@pytest.mark.parametrize("config", [HYBRID, TENSORWISE], ids=["delayed", "tensorwise"])
def test_an_operation_that_quantises_is_bit_equal_to_the_operation_and_a_quantisation(
    config: PrecisionConfig, build: Callable[..., tuple[SwiGLULinear | NormLinear, Mock]], width: int, runs_again: bool
) -> None:
    inputs = torch.randn(16, 1, width, generator=torch.Generator().manual_seed(8))

    def train(is_fused: bool) -> tuple[list[Tensor], list[Layout]]:
        scaling = Fp8Scaling(config, ALONE, CPU)
        layer, kernel = build(scaling, is_fused)
        tensors = train_steps(layer, scaling, inputs, runs_again)
        return tensors, [call.args[-1].target.layout for call in kernel.quantized.call_args_list]

    (fused, layouts), (apart, none) = train(is_fused=True), train(is_fused=False)
    for one, other in zip(fused, apart, strict=True):
        assert torch.equal(one, other)
    assert layouts == layouts_of_steps(config, runs_again)
    assert none == []


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (HYBRID, [0, 1, 2, 3, 4]),
        (replace(HYBRID, first_last_layers_bf16=True), [1, 2, 3]),
        (
            replace(HYBRID, first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=2),
            [0, 1, 2],
        ),
    ],
)
def test_layers_at_the_ends_may_stay_in_bf16(config: PrecisionConfig, wanted: list[int]) -> None:
    scaling = Fp8Scaling(config, ALONE, CPU)
    assert [layer for layer in range(5) if scaling.includes(layer, 5)] == wanted


# Weights: how often they are quantised, by which kernel, and in which memory


def fp8_scaling(config: PrecisionConfig, kernel: EagerQuantization, keeps_weights: bool = True) -> Fp8Scaling:
    return Fp8Scaling(config, ALONE, CPU, keeps_weights, replace(Fp8Kernels.eager(widened_gemm), quantization=kernel))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize(
    ("keeps_weights", "layouts"),
    [(True, [Layout.BOTH]), (False, 2 * [Layout.ROWS, Layout.TRANSPOSED])],
    ids=["kept", "gathered by FSDP"],
)
def test_a_kept_weight_is_quantised_once_a_step_in_both_layouts(
    recipe: Literal["delayed", "tensorwise"], keeps_weights: bool, layouts: list[Layout]
) -> None:
    """A weight that is not kept is quantised for each GEMM, in the layout of that GEMM."""
    config = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe=recipe)
    kernel = Mock(wraps=EAGER)
    scaling = fp8_scaling(config, kernel, keeps_weights)
    linear = linear_layer("row", scaling)
    for _ in range(2):
        scaling.start_step()
        kernel.reset_mock()
        for _ in range(2):
            linear(torch.ones(16, 1, 48, dtype=torch.bfloat16).requires_grad_()).sum().backward()
        scaling.finish_step()
        calls = [*kernel.quantize.call_args_list, *kernel.quantize_and_record.call_args_list]
        operands = [call.args[:2] for call in calls]
        assert [target.layout for tensor, target in operands if tensor.shape == linear.weight.shape] == layouts
        kernel.transpose.assert_not_called()


@pytest.mark.parametrize("numel", [32 * 48, 32 * 48 - 128, 77])
def test_shards_are_quantised_in_their_memory_by_the_chosen_kernel(numel: int) -> None:
    """In one call for a matrix of the whole shard, whose rows have 64 elements if 64 divides the shard."""
    config = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True)
    kernel = Mock(wraps=EAGER)
    scaling = fp8_scaling(config, kernel)
    scaling.gemm("linear", torch.bfloat16, ALONE, (), (32, 48))
    master = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    buffer = torch.zeros(numel + 128, dtype=torch.uint8)
    numbers = buffer[64 : 64 + numel].view(E4M3)
    scaling.quantize_weights({"linear": (master, numbers, 0)}, ALONE)
    (call,) = kernel.quantize.call_args_list
    width = math.gcd(numel, 64)
    assert (call.args[0].shape, call.args[1].layout) == ((numel // width, width), Layout.ROWS)
    assert call.kwargs["out"].data_ptr() == numbers.data_ptr()
    amax = master.abs().max()
    expected = quantize(master, 448.0 / amax, amax, E4M3)
    assert torch.equal(numbers.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scaling.weight_state.inverse_scale[0], (448.0 / amax).reciprocal())
    assert not buffer[:64].any() and not buffer[64 + numel :].any()


# State


def trained(length: int) -> tuple[RowParallelLinear, Fp8Scaling]:
    linear, scaling = row_layer(replace(HYBRID, fp8_amax_history_len=length, fp8_amax_compute_algo="max"))
    for factor in (1.0, 0.5, 0.25):
        weight_gradient_of_a_step(linear, scaling, torch.full((16, 1, 32), factor))
    return linear, scaling


def test_a_run_that_goes_on_scales_as_the_one_that_never_stopped() -> None:
    linear, scaling = trained(length=3)
    fresh_linear, fresh = row_layer(scaling.config)
    fresh.load({name: tensor.clone() for name, tensor in scaling.state().items()})
    gradient = torch.randn(16, 1, 32) / 8
    assert torch.equal(
        weight_gradient_of_a_step(linear, scaling, gradient), weight_gradient_of_a_step(fresh_linear, fresh, gradient)
    )
    for name, tensor in scaling.state().items():
        assert torch.equal(tensor, fresh.state()[name])


@pytest.mark.parametrize(("length", "kept"), [(1, [0.25]), (2, [0.25, 0.5]), (5, [0.25, 0.5, 1.0, 0.0, 0.0])])
def test_of_a_history_of_another_length_the_newest_are_taken(length: int, kept: list[float]) -> None:
    _, scaling = trained(length=3)
    _, other = row_layer(replace(scaling.config, fp8_amax_history_len=length))
    other.load(scaling.state())
    assert other.state()["linear/amax_history"][2].tolist() == kept
    assert torch.equal(other.state()["linear/scale"], scaling.state()["linear/scale"])


def test_a_checkpoint_without_fp8_starts_its_scales_afresh() -> None:
    gradient = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(4)) * 1e-9
    linear, scaling = row_layer(HYBRID)
    scaling.load({})
    assert torch.equal(
        weight_gradient_of_a_step(linear, scaling, gradient), weight_gradient_of_a_step(*row_layer(HYBRID), gradient)
    )
    assert row_layer(TENSORWISE)[1].state() == {}
