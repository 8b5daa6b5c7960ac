"""What stands for Triton's kernels in the dry run launches and allocates what they do."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from megatron.core.backends.triton_elementwise import TritonRMSNorm, TritonSwiGLU
from megatron.core.backends.triton_fp8 import TritonFp8WeightGradient, TritonQuantization
from megatron.core.kernels.candidates import (
    SimulatedFp8WeightGradient,
    SimulatedQuantization,
    SimulatedRMSNorm,
    SimulatedSwiGLU,
)
from megatron.core.ops.fp8 import E4M3, DelayedQuantization, EagerQuantization, Fp8Format, widened_gemm
from megatron.core.precision import Layout, QuantizedTensor
from megatron.planner.launches import LaunchRecorder
from megatron.planner.memory import MemoryTracker
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")
SHAPE = 48, 2, 256


def matrix() -> Tensor:
    return torch.ones(SHAPE, dtype=torch.bfloat16)


def number() -> Tensor:
    return torch.ones(())


def delayed(layout: Layout) -> DelayedQuantization:
    return DelayedQuantization(EagerQuantization(), Fp8Format(number(), E4M3, layout), number())


def arguments(operation: str, layout: Layout) -> tuple[Any, ...]:
    match operation:
        case "swiglu":
            return matrix(), delayed(layout)
        case "rms_norm":
            return matrix(), torch.ones(SHAPE[-1], dtype=torch.bfloat16), 1e-5, delayed(layout)
        case "current_scale":
            return number(), E4M3, 3
        case "write":
            operands = (QuantizedTensor(torch.ones(rows, 96).to(E4M3), number()) for rows in (48, 32))
            return torch.ones(48, 32), *operands, True
        case "transpose":
            return (matrix().flatten(0, 1).to(E4M3),)
        case _:
            return matrix(), Fp8Format(number(), E4M3, layout), number()


def triton_kernel(operation: str, tracker: MemoryTracker) -> Callable[..., Any]:
    own: dict[str, Callable[..., Any]] = {
        "swiglu": TritonSwiGLU(lambda function: function).quantized,
        "rms_norm": TritonRMSNorm(lambda function: function).quantized,
        "write": TritonFp8WeightGradient().write,
    }
    return own.get(operation) or getattr(TritonQuantization(), operation)


def simulated(operation: str, tracker: MemoryTracker) -> Callable[..., Any]:
    compiler = partial(partial, tracker.fused)
    match operation:
        case "swiglu":
            return SimulatedSwiGLU(compiler).quantized
        case "rms_norm":
            return SimulatedRMSNorm(compiler).quantized
        case "write":
            return SimulatedFp8WeightGradient(widened_gemm, compiler).write
        case _:
            return getattr(SimulatedQuantization(compiler), operation)


def launches_and_bytes(operation: str, layout: Layout, kernel_for: Callable[[str, MemoryTracker], Any]) -> list[int]:
    """Launches of torch and of what is compiled, and the bytes that are kept."""
    with LaunchRecorder(CPU) as recorder:
        given = arguments(operation, layout)
        recorder.launches.clear()
        kernel_for(operation, recorder)(*given)
    with MemoryTracker() as tracker:
        given = arguments(operation, layout)
        before = tracker.now.total
        results = kernel_for(operation, tracker)(*given)
        num_bytes = tracker.now.total - before
    del results
    return [len(recorder.launches), num_bytes]


def check(operation: str, layout: Layout) -> None:
    with mock.patch.object(JITFunction, "run") as launch:
        num_launches, num_bytes = launches_and_bytes(operation, layout, triton_kernel)
    num_launches += launch.call_count // 2
    assert launch.call_count
    assert launches_and_bytes(operation, layout, simulated) == [num_launches, num_bytes]


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH], ids=str)
@pytest.mark.parametrize("operation", ["swiglu", "rms_norm", "quantize", "quantize_and_record"])
def test_a_simulated_quantisation_launches_and_allocates_as_much(
    compiler: TritonProcess, operation: str, layout: Layout
) -> None:
    compiler.run(check, operation, layout)


@pytest.mark.parametrize("operation", ["current_scale", "transpose", "write"])
def test_another_simulated_kernel_launches_and_allocates_as_much(compiler: TritonProcess, operation: str) -> None:
    compiler.run(check, operation, Layout.BOTH)
