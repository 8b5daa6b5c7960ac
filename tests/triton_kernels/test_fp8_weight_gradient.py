"""The Triton GEMM of FP8 weight gradients adds to its buffer what the reference adds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.trials import try_fp8_weight_gradient
from megatron.core.ops.fp8 import E4M3, E5M2, Fp8WeightGradientKernel, SeparateFp8WeightGradient, widened_gemm
from megatron.core.precision import QuantizedTensor
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def kernel() -> Fp8WeightGradientKernel:
    from megatron.core.backends.triton.fp8 import TritonFp8WeightGradient

    return TritonFp8WeightGradient()


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
        for one in (kernel(), SeparateFp8WeightGradient(widened_gemm)):
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
    kernel().write(buffer, a, b, accumulate=False)
    assert torch.equal(buffer, widened_gemm(a, b, torch.float32))


def check_overflow() -> None:
    a, b = operand(32, 32, E4M3, math.nan), operand(32, 32, E4M3, 1.0)
    buffer = torch.zeros(32, 32)
    kernel().write(buffer, a, b, accumulate=True)
    assert buffer.isnan().all()


@pytest.mark.parametrize("check", [check_every_tile, check_overflow])
def test_every_tile_is_computed_and_an_overflow_makes_the_gradient_nan(
    interpreter: TritonProcess, check: Callable[[], None]
) -> None:
    interpreter.run(check)


def check_trial(buffer_dtype: torch.dtype) -> None:
    try_fp8_weight_gradient(kernel(), torch.device("cpu"), buffer_dtype)


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_passes_its_trial(interpreter: TritonProcess, buffer_dtype: torch.dtype) -> None:
    interpreter.run(check_trial, buffer_dtype)


def compile_kernel(dtype: torch.dtype, accumulate: bool) -> list[CompiledLaunch]:
    scale = torch.tensor(1.0)
    a = QuantizedTensor(torch.zeros(1040, 2064, dtype=dtype), scale)
    b = QuantizedTensor(torch.zeros(4112, 2064, dtype=E4M3), scale)
    return compile_launches(kernel().write, torch.zeros(1040, 4112), a, b, accumulate)


@FORMATS
@pytest.mark.parametrize("accumulate", [True, False])
def test_hoppers_tensor_cores_read_fp8_and_no_register_spills(
    compiler: TritonProcess, accumulate: bool, dtype: torch.dtype
) -> None:
    (launch,) = compiler.run(compile_kernel, dtype, accumulate)
    # 256 threads: one program on a multiprocessor has 255 registers for each, and 227 KiB of shared memory.
    assert launch.registers <= 208
    assert launch.spilled_bytes == 0
    assert launch.shared_bytes <= 160 * 1024
    name = "e4m3" if dtype == E4M3 else "e5m2"
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{name}.e4m3" in launch.ptx
    assert "cp.async.cg.shared.global" in launch.ptx, "reads overlap with products"
