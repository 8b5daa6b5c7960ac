"""The implementations of FP8 quantisation and of the FP8 weight gradient, and their trials on a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.kernels.choice import Candidate, Unavailable, load
from megatron.core.kernels.toolchain import missing_for_triton
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    EagerQuantization,
    Fp8WeightGradientKernel,
    Quantization,
    ScaledGemm,
    SeparateFp8WeightGradient,
    amax_of,
    widened_gemm,
)
from megatron.core.ops.quantized import Layout, QuantizedTensor

if TYPE_CHECKING:
    from megatron.core.kernels.selection import Setting


def quantization_candidates(setting: "Setting") -> Sequence[Candidate[Quantization]]:
    def triton() -> Quantization:
        kernel: Quantization = _triton_kernel(setting, "quantize", "TritonQuantization")
        return kernel

    def trial(kernel: Quantization) -> None:
        try_quantization(kernel, setting.device, setting.weight)

    return [
        Candidate("triton", triton, "one pass", setting.on_gpu, setting.trial(trial)),
        Candidate("eager", EagerQuantization, "one operation after the other"),
    ]


def weight_gradient_candidates(setting: "Setting", gemm: ScaledGemm) -> Sequence[Candidate[Fp8WeightGradientKernel]]:
    def triton() -> Fp8WeightGradientKernel:
        kernel: Fp8WeightGradientKernel = _triton_kernel(setting, "fp8_weight_gradient", "TritonFp8WeightGradient")
        return kernel

    def trial(kernel: Fp8WeightGradientKernel) -> None:
        try_weight_gradient(kernel, setting.device, setting.gradient)

    return [
        Candidate("separate", lambda: SeparateFp8WeightGradient(gemm), "a GEMM, then an addition"),
        # Its speed is unmeasured.
        Candidate("triton", triton, "", False, setting.trial(trial)),
    ]


def _triton_kernel(setting: "Setting", module: str, name: str) -> Any:
    missing = missing_for_triton() if setting.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    return getattr(load(f"megatron.core.backends.triton.{module}", "Triton"), name)()


def try_quantization(kernel: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Compare every bit of results with the definition's; raises :class:`Unavailable`."""
    generator, eager = torch.Generator().manual_seed(0), EagerQuantization()
    # Magnitudes over the whole range of FP8; sizes are multiples of 16, as in every run.
    tensor = torch.exp(4 * torch.randn(144, 272, generator=generator)).mul_(torch.randn(144, 272, generator=generator))
    tensor = tensor.to(device, dtype)
    overflowing = tensor.clone()
    overflowing[100, 200] = torch.inf
    scale = torch.tensor(1.7, device=device)
    for operand in (tensor, overflowing):
        amax = amax_of(operand)
        for fp8 in (E4M3, E5M2):
            expected = eager.quantize(operand, scale, amax, fp8, Layout.BOTH)
            _require_equal(kernel.quantize(operand, scale, amax, fp8, Layout.BOTH), expected)
            step_amax = torch.ones((), device=device)
            _require_equal(kernel.quantize_and_record(operand, scale, step_amax, fp8, Layout.BOTH), expected)
            _require(torch.equal(step_amax, amax), "another amax")
            assert expected.transposed is not None
            transpose = kernel.transpose(expected.data)
            _require(torch.equal(_bytes(transpose), _bytes(expected.transposed)), "another transpose")
            scales = (one.current_scale(amax, fp8, margin=2) for one in (kernel, eager))
            _require(torch.equal(*scales), "another scale")


def _require_equal(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert found.transposed is not None and expected.transposed is not None
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    _require(torch.equal(_bytes(found.data), _bytes(expected.data)), "other numbers")
    _require(torch.equal(_bytes(found.transposed), _bytes(expected.transposed)), "another transpose")
    _require(
        torch.equal(found.inverse_scale.nan_to_num(), expected.inverse_scale.nan_to_num()), "another inverse scale"
    )


def try_weight_gradient(kernel: Fp8WeightGradientKernel, device: torch.device, buffer_dtype: torch.dtype) -> None:
    """Compare two GEMMs into one buffer with the sum of both products, which is exact; raises :class:`Unavailable`."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(0.5, device=device)

    def operand(rows: int, dtype: torch.dtype) -> QuantizedTensor:
        numbers = torch.randint(-2, 3, (rows, 272), generator=generator)
        return QuantizedTensor(numbers.float().to(dtype).to(device), scale)

    for fp8 in (E4M3, E5M2):
        grad_outputs, inputs = operand(144, fp8), operand(208, E4M3)
        buffer = torch.full((144, 208), torch.nan, dtype=buffer_dtype, device=device)
        for accumulate in (False, True):
            kernel.write(buffer, grad_outputs, inputs, accumulate)
        expected = 2 * widened_gemm(grad_outputs, inputs, torch.float32)
        _require(torch.equal(buffer, expected.to(buffer_dtype)), "another gradient")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _require(is_equal: bool, otherwise: str) -> None:
    if not is_equal:
        raise Unavailable(f"a trial returned {otherwise} than the reference")
