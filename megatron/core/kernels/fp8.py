"""The implementations of FP8 quantisation and of the FP8 weight gradient, and their trials on a GPU."""

from collections.abc import Sequence
from typing import Any

from megatron.core.kernels.choice import Candidate
from megatron.core.kernels.request import KernelRequest
from megatron.core.ops.fp8 import (
    EagerQuantization,
    Fp8WeightGradientKernel,
    Quantization,
    ScaledGemm,
    SeparateFp8WeightGradient,
)
from megatron.core.packages import Unavailable, load


def quantization_candidates(request: KernelRequest) -> Sequence[Candidate[Quantization]]:
    def triton() -> Quantization:
        kernel: Quantization = _triton_kernel(request, "quantize", "TritonQuantization")
        return kernel

    def trial(kernel: Quantization) -> None:
        request.trials.fp8_quantization(kernel, request.device, request.weight)

    return [
        Candidate("triton", triton, "one pass", request.on_gpu, request.trial(trial)),
        Candidate("eager", EagerQuantization, "one operation after the other"),
    ]


def weight_gradient_candidates(
    request: KernelRequest, gemm: ScaledGemm
) -> Sequence[Candidate[Fp8WeightGradientKernel]]:
    def triton() -> Fp8WeightGradientKernel:
        kernel: Fp8WeightGradientKernel = _triton_kernel(request, "fp8_weight_gradient", "TritonFp8WeightGradient")
        return kernel

    def trial(kernel: Fp8WeightGradientKernel) -> None:
        request.trials.fp8_weight_gradient(kernel, request.device, request.gradient)

    return [
        Candidate("separate", lambda: SeparateFp8WeightGradient(gemm), "a GEMM, then an addition"),
        # Its speed is unmeasured.
        Candidate("triton", triton, "", False, request.trial(trial)),
    ]


def _triton_kernel(request: KernelRequest, module: str, name: str) -> Any:
    missing = request.machine.missing_for_triton if request.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    return getattr(load(f"megatron.core.backends.triton.{module}", "Triton"), name)()
