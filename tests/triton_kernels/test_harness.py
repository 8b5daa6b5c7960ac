"""The processes in which kernels are tested round as GPUs do, and report the resources that a kernel needs."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes


@triton.jit
def convert_kernel(source: tl.tensor, target: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    numbers = tl.load(source + offsets, mask=mask).to(tl.float32)
    tl.store(target + offsets, numbers.to(target.dtype.element_ty), mask=mask)


def convert(source: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty_like(source, dtype=dtype)
    convert_kernel[(triton.cdiv(source.numel(), 1024),)](source, target, source.numel(), BLOCK=1024)
    return target


@triton.jit
def hungry_kernel(source: tl.tensor, target: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Needs all numbers of a program at once."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(source + rows * BLOCK + columns)
    numbers = numbers / tl.sum(numbers)
    tl.store(target + columns * BLOCK + rows, numbers)


def hungry() -> None:
    source = torch.empty(256, 256)
    hungry_kernel[(1,)](source, torch.empty_like(source), BLOCK=256, num_warps=4)


def check_rounding(dtype: torch.dtype) -> None:
    numbers = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(convert(numbers, dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_interpreter_rounds_to_the_nearest(interpreter: TritonProcess, dtype: torch.dtype) -> None:
    """The tests of FP8 kernels do so for FP8."""
    interpreter.run(check_rounding, dtype)


def compile_hungry_kernel() -> list[CompiledLaunch]:
    return compile_launches(hungry)


def test_spilled_registers_are_counted(compiler: TritonProcess) -> None:
    """A program of 128 threads has 32,768 registers for 65,536 numbers."""
    (launch,) = compiler.run(compile_hungry_kernel)
    assert launch.spilled_bytes > 256
    assert launch.shared_bytes > 0
    assert ".target sm_90" in launch.ptx


def fail() -> None:
    raise ValueError("on purpose")


def test_a_case_that_fails_shows_its_traceback(interpreter: TritonProcess) -> None:
    with pytest.raises(AssertionError, match="ValueError: on purpose"):
        interpreter.run(fail)
    assert interpreter.run(torch.initial_seed) is not None, "the process serves the next case"
