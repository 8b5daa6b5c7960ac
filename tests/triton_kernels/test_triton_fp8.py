"""Quantisation and weight gradients in FP8 by Triton have the bits of the definition, and fit a Hopper GPU."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.backends.triton_fp8 import TritonFp8WeightGradient, TritonQuantization
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Scaling
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    EagerQuantization,
    Fp8Format,
    Fp8Kernels,
    Quantization,
    SeparateFp8WeightGradient,
    amax_of,
    widened_gemm,
)
from megatron.core.precision import Layout, QuantizedTensor
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes
EAGER, TRITON = EagerQuantization(), TritonQuantization()
LAYOUTS = [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH]
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def assert_same_bits(found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal, and NaN, whose sign is not defined, at the same places."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def assert_same_operands(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert_same_bits(found.data, expected.data)
    assert_same_bits(found.transposed, expected.transposed)
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    assert_same(found.inverse_scale, expected.inverse_scale)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Magnitudes over the whole range of both formats and beyond, in both signs."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    magnitudes = torch.exp2(torch.rand(shape, generator=generator) * 40 - 22)
    return (magnitudes * torch.randn(shape, generator=generator).sign()).to(dtype)


def check_both_ways(tensor: Tensor, dtype: torch.dtype, layout: Layout, scale: float = 1.7) -> None:
    target, amax = Fp8Format(torch.tensor([0.0, scale, 0.0])[1], dtype, layout), amax_of(tensor)
    expected = EAGER.quantize(tensor, target, amax)
    assert_same_operands(TRITON.quantize(tensor, target, amax), expected)
    kernels: tuple[Quantization, ...] = (TRITON, EAGER)
    for before in (0.0, 3e38, math.inf, math.nan):
        recorded = [torch.tensor([1.0, before, 1.0]) for _ in range(2)]
        for quantization, amaxes in zip(kernels, recorded, strict=True):
            found = quantization.quantize_and_record(tensor, target, amaxes[1])
            assert_same_operands(found, expected)
        assert_same(*recorded)


@FORMATS
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (65, 3), (7, 130), (5, 3, 70), (200, 129)])
def test_the_bits_are_those_of_the_definition(
    interpreter: TritonProcess, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype
) -> None:
    interpreter.run(check_both_ways, numbers(*shape), dtype, layout)


def check_every_bf16_number(dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].to(input_dtype).view(255, 256)
    for scale in (1.0, 448.0 / 3.0, 2.0**-40, 2.0**126):
        check_both_ways(finite, dtype, Layout.BOTH, scale)


@FORMATS
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_every_number_is_rounded_as_torch_rounds_it(
    interpreter: TritonProcess, dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    """Subnormal numbers, ties and saturation included: a scale of 1 keeps the bf16 numbers between those of FP8."""
    interpreter.run(check_every_bf16_number, dtype, input_dtype)


def check_not_finite(bad: float, dtype: torch.dtype) -> None:
    tensor = numbers(70, 80)
    tensor[65, 3] = bad
    check_both_ways(tensor, dtype, Layout.BOTH)
    step_amax, scale = torch.tensor(1.0), torch.tensor(2.0)
    found = TRITON.quantize_and_record(tensor, Fp8Format(scale, dtype, Layout.ROWS), step_amax)
    assert found.inverse_scale is not None and found.inverse_scale.isnan()
    assert not step_amax.isfinite()
    assert scale == 2.0, "the scale of the next microbatch"


@FORMATS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_a_number_that_is_not_finite_makes_the_scale_nan(
    interpreter: TritonProcess, bad: float, dtype: torch.dtype
) -> None:
    interpreter.run(check_not_finite, bad, dtype)


def check_strides() -> None:
    """Tensors may have any."""
    for tensor in (
        numbers(40, 30).t(),
        numbers(3, 40, 20).transpose(0, 1),
        numbers(9, 200)[:, 50:121],
        numbers(1, 77).expand(5, 77),
        numbers(90, 66)[::3, ::2],
    ):
        assert not tensor.is_contiguous()
        check_both_ways(tensor, E4M3, Layout.BOTH)


def check_transpose() -> None:
    for shape in ((1, 1), (64, 64), (65, 3), (3, 200)):
        data = torch.arange(math.prod(shape)).to(torch.uint8).view(shape).view(E5M2)
        for one in (data, data[:, : shape[1] // 2 + 1]):
            assert_same_bits(TRITON.transpose(one), one.t().contiguous())


def check_current_scale(dtype: torch.dtype) -> None:
    special = [0.0, 1e-45, 1e-44, 1e-37, 5e-36, 3e38, math.inf, math.nan]
    random = torch.exp(20 * torch.randn(200, generator=torch.Generator().manual_seed(1))).tolist()
    for margin in (0, 3):
        for amax in torch.tensor([*special, *random]):
            found, expected = (one.current_scale(amax, dtype, margin) for one in (TRITON, EAGER))
            assert_same_bits(found.view(1), expected.view(1))


@FORMATS
def test_the_scale_of_an_amax_has_the_bits_of_the_definition(interpreter: TritonProcess, dtype: torch.dtype) -> None:
    interpreter.run(check_current_scale, dtype)


def check_refusals() -> None:
    """Of fp64 and empty tensors."""
    scale = torch.tensor(1.0)
    with pytest.raises(TypeError, match="float64"):
        TRITON.quantize(torch.ones(2, 2).double(), Fp8Format(scale, E4M3, Layout.ROWS), scale)
    with pytest.raises(AssertionError, match="empty"):
        TRITON.quantize(torch.ones(0, 2), Fp8Format(scale, E4M3, Layout.ROWS), scale)


def check_shards() -> None:
    """Shards of weights are quantised in their memory."""
    config = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True)
    alone, eager = Communicator((0,), 0), Fp8Kernels.eager(widened_gemm)
    for numel in (64, 200 * 64, 77):
        master, found = numbers(numel, dtype=torch.float32), []
        for kernels in (eager, replace(eager, quantization=TRITON)):
            scaling = Fp8Scaling(config, alone, torch.device("cpu"), kernels=kernels)
            scaling.gemm("linear", torch.bfloat16, alone, (), ())
            buffer = torch.full((numel + 32,), 0x55, dtype=torch.uint8)
            scaling.quantize_weights({"linear": (master, buffer[16 : 16 + numel].view(E4M3), 0)}, alone)
            found.append(buffer)
        assert torch.equal(*found)
        assert not torch.equal(found[0][16 : 16 + numel], torch.full((numel,), 0x55, dtype=torch.uint8))


@pytest.mark.parametrize("check", [check_strides, check_transpose, check_refusals, check_shards])
def test_strides_transposed_bytes_refusals_and_shards(interpreter: TritonProcess, check: Callable[[], None]) -> None:
    interpreter.run(check)


# Compiled


def compile_quantization(
    dtype: torch.dtype, layout: Layout, records: bool, shape: tuple[int, int]
) -> list[CompiledLaunch]:
    tensor, amaxes, scale = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(3), torch.tensor(1.0)
    quantize = TRITON.quantize_and_record if records else TRITON.quantize
    return compile_launches(quantize, tensor, Fp8Format(scale, dtype, layout), amaxes[1])


def compile_shard() -> list[CompiledLaunch]:
    shard, amaxes = torch.zeros(1040, 64), torch.zeros(2)
    out = torch.zeros(1040, 64, dtype=torch.uint8).view(E4M3)
    target = Fp8Format(amaxes[1], E4M3, Layout.ROWS)
    return compile_launches(TRITON.quantize, shard, target, amaxes[0], out)


def compile_transpose() -> list[CompiledLaunch]:
    return compile_launches(TRITON.transpose, torch.zeros(1040, 4112, dtype=torch.uint8).view(E4M3))


def compile_current_scale() -> list[CompiledLaunch]:
    return compile_launches(TRITON.current_scale, torch.tensor(1.0), E4M3, 3)


@FORMATS
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("records", [True, False], ids=["delayed", "current"])
def test_a_thread_has_64_registers_and_spills_none(
    compiler: TritonProcess, records: bool, layout: Layout, dtype: torch.dtype
) -> None:
    """So that a multiprocessor (65,536 registers) runs four programs of eight warps."""
    (launch,) = compiler.run(compile_quantization, dtype, layout, records, (1040, 4112))
    assert launch.registers <= 64
    assert launch.spilled_bytes == 0
    name = "e4m3" if dtype == E4M3 else "e5m2"
    assert f"cvt.rn.satfinite.{name}x2.f32" in launch.ptx
    # 16 bytes per instruction on both sides of the transposition.
    assert "ld.global.v4.b32" in launch.ptx
    assert "st.global.v4.b32" in launch.ptx
    assert "st.global.b8" not in launch.ptx
    # Triton 3.6 writes ``atom`` with a result that nothing reads, which ptxas assembles to the same ``RED``.
    assert bool(re.search(r"(red|atom)\.global\.gpu\.relaxed\.max\.s32", launch.ptx)) is records


def test_sizes_that_are_no_multiples_of_16_spill_no_registers(compiler: TritonProcess) -> None:
    (launch,) = compiler.run(compile_quantization, E4M3, Layout.BOTH, True, (1023, 4095))
    assert launch.spilled_bytes == 0


@pytest.mark.parametrize(("case", "registers"), [(compile_shard, 64), (compile_transpose, 32)])
def test_shards_and_transposed_bytes_are_read_and_written_once(
    compiler: TritonProcess, case: Callable[[], list[CompiledLaunch]], registers: int
) -> None:
    (launch,) = compiler.run(case)
    assert launch.registers <= registers
    assert launch.spilled_bytes == 0
    assert "ld.global.v4.b32" in launch.ptx
    assert re.search(r"st\.global\.v4\.b32" if case is compile_transpose else r"st\.global\.v[24]\.b32", launch.ptx)


def test_a_scale_is_divided_exactly(compiler: TritonProcess) -> None:
    """Triton's division is approximate by default."""
    (launch,) = compiler.run(compile_current_scale)
    assert "div.rn.f32" in launch.ptx
    assert "ftz" not in launch.ptx


# Weight gradients


def operand(rows: int, summed: int, dtype: torch.dtype, scale: float) -> QuantizedTensor:
    """Integers, whose products and sums are exact in every order."""
    generator = torch.Generator().manual_seed(rows * summed)
    numbers = torch.randint(-4, 5, (rows, summed), generator=generator)
    return QuantizedTensor(numbers.float().to(dtype), torch.tensor([0.0, scale])[1])


def check_products(n: int, k: int, m: int, dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    before = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(buffer_dtype)
    before[n // 2, k // 2] = math.nan
    a, b = operand(n, m, dtype, 2.0**-7), operand(k, m, E4M3, 2.0**3)
    for accumulate in (True, False):
        buffers: list[Tensor] = []
        for one in (TritonFp8WeightGradient(), SeparateFp8WeightGradient(widened_gemm)):
            buffers.append(before.clone())
            one.write(buffers[-1], a, b, accumulate)
        found, expected = buffers
        assert int(found.isnan().sum()) == int(accumulate)
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@FORMATS
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "k", "m"), [(16, 16, 16), (144, 16, 400), (48, 272, 128), (400, 160, 48), (3, 5, 7)])
def test_the_bits_are_those_of_a_product_and_a_sum(
    interpreter: TritonProcess, n: int, k: int, m: int, buffer_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    interpreter.run(check_products, n, k, m, dtype, buffer_dtype)


def check_every_tile() -> None:
    """Two groups of tiles, the second lower than the first."""
    n, k, m = 128 * 9 + 1, 128 * 2 + 1, 16
    buffer = torch.full((n, k), math.nan)
    a, b = operand(n, m, E5M2, 1.0), operand(k, m, E4M3, 1.0)
    TritonFp8WeightGradient().write(buffer, a, b, accumulate=False)
    assert torch.equal(buffer, widened_gemm(a, b, torch.float32))


def check_gemm_overflow() -> None:
    a, b = operand(32, 32, E4M3, math.nan), operand(32, 32, E4M3, 1.0)
    buffer = torch.zeros(32, 32)
    TritonFp8WeightGradient().write(buffer, a, b, accumulate=True)
    assert buffer.isnan().all()


@pytest.mark.parametrize("check", [check_every_tile, check_gemm_overflow])
def test_every_tile_is_computed_and_an_overflow_makes_the_gradient_nan(
    interpreter: TritonProcess, check: Callable[[], None]
) -> None:
    interpreter.run(check)


def compile_gemm(dtype: torch.dtype, accumulate: bool) -> list[CompiledLaunch]:
    scale = torch.tensor(1.0)
    a = QuantizedTensor(torch.zeros(1040, 2064, dtype=dtype), scale)
    b = QuantizedTensor(torch.zeros(4112, 2064, dtype=E4M3), scale)
    return compile_launches(TritonFp8WeightGradient().write, torch.zeros(1040, 4112), a, b, accumulate)


@FORMATS
@pytest.mark.parametrize("accumulate", [True, False])
def test_hoppers_tensor_cores_read_fp8_and_no_register_spills(
    compiler: TritonProcess, accumulate: bool, dtype: torch.dtype
) -> None:
    (launch,) = compiler.run(compile_gemm, dtype, accumulate)
    # 256 threads: one program on a multiprocessor has 255 registers for each, and 227 KiB of shared memory.
    assert launch.registers <= 208
    assert launch.spilled_bytes == 0
    assert launch.shared_bytes <= 160 * 1024
    name = "e4m3" if dtype == E4M3 else "e5m2"
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{name}.e4m3" in launch.ptx
    assert "cp.async.cg.shared.global" in launch.ptx, "reads overlap with products"
