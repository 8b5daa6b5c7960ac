"""FP8: tensors quantised with one scale each, their GEMMs, and the scale for an amax.

A tensor ``x`` is kept as ``round(x * scale)`` in e4m3 (range 448, 3 bits of fraction) or e5m2 (range 57344, 2 bits),
together with ``1 / scale``. *amax* is the largest magnitude of a tensor. Sources: FP8 formats for deep learning
(Micikevicius et al., arXiv 2209.05433); delayed scaling follows NVIDIA's Transformer Engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron.core.precision import Layout, QuantizedTensor
from megatron.torch_compat import ScalingType, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Fp8Role = Literal["input", "weight", "output_gradient"]
"""The quantised tensors of a linear layer."""

LARGEST_SCALE = 2.0**126
"""The largest power of two whose reciprocal is a normal number of fp32."""


def largest_value(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def amax_of(tensor: Tensor) -> Tensor:
    """Largest magnitude of ``tensor``, ``[]`` in fp32; NaN if it has one."""
    return torch.linalg.vector_norm(tensor, torch.inf).float()


def scale_from_amax(amax: Tensor, largest: float | Tensor, previous: float | Tensor, margin: int = 0) -> Tensor:
    """``largest / amax / 2^margin``, elementwise in fp32: the scale that maps ``amax`` to ``largest``; ``previous``
    where ``amax`` is zero or not finite."""
    scale = torch.clamp(largest / amax / 2.0**margin, max=LARGEST_SCALE)
    return torch.where((amax > 0.0) & torch.isfinite(amax), scale, previous)


def push_amax(history: Tensor, amax: Tensor) -> None:
    """Insert ``amax`` ``[...]`` at the front of ``history`` ``[..., length]``, in place, and drop the oldest. A
    non-finite one is recorded as zero, so that it does not determine the maximum of the history."""
    # roll() copies, so the source is not overwritten while it is read.
    history.copy_(history.roll(1, dims=-1))
    history[..., 0] = torch.where(torch.isfinite(amax), amax, 0.0)


def quantize(
    tensor: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> QuantizedTensor:
    """``tensor`` times ``scale`` in the FP8 format ``dtype``, saturated; in ``out`` of the same shape and this format,
    if given. If ``amax``, the amax of ``tensor``, is not finite, every GEMM with the result is NaN, so that an overflow
    is visible as without FP8."""
    largest = largest_value(dtype)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if out is None:
        out = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    # torch's conversion saturates in some versions only.
    out.copy_((wide * scale).clamp_(-largest, largest))
    return QuantizedTensor(out, scale.reciprocal() + (amax - amax))


@dataclass(frozen=True)
class Fp8Format:
    """The scale, the FP8 dtype and the layouts of a quantised tensor."""

    scale: Tensor
    """``[]`` in fp32."""
    dtype: torch.dtype
    layout: Layout


class Quantization(Protocol):
    """Quantises tensors ``[..., k]`` of ``m`` rows as :func:`quantize`, in one or in both layouts."""

    def quantize(self, tensor: Tensor, target: Fp8Format, amax: Tensor, out: Tensor | None = None) -> QuantizedTensor:
        """:func:`quantize` with the amax of ``tensor``, which current scaling computes before. ``out``, a contiguous
        tensor, is the memory of the rows."""

    def quantize_and_record(self, tensor: Tensor, target: Fp8Format, step_amax: Tensor) -> QuantizedTensor:
        """:func:`quantize`; raises ``step_amax`` ``[]`` to the amax of ``tensor`` if that is larger, or NaN."""

    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        """:func:`scale_from_amax` for the range of ``dtype``; 1 where ``amax`` ``[]`` is zero or not finite."""

    def transpose(self, data: Tensor) -> Tensor:
        """A contiguous copy ``[n, m]`` of the transpose of ``data`` ``[m, n]`` in FP8."""


class EagerQuantization:
    """One torch operation after the other: the definition, 29 bytes per bf16 element and layout."""

    def quantize(self, tensor: Tensor, target: Fp8Format, amax: Tensor, out: Tensor | None = None) -> QuantizedTensor:
        rows = quantize(tensor, target.scale, amax, target.dtype, out)  # [..., k]
        if Layout.TRANSPOSED not in target.layout:
            return rows
        data = rows.data if Layout.ROWS in target.layout else rows.data.new_empty(0)
        return QuantizedTensor(data, rows.inverse_scale, self.transpose(rows.data.flatten(0, -2)))

    def quantize_and_record(self, tensor: Tensor, target: Fp8Format, step_amax: Tensor) -> QuantizedTensor:
        amax = amax_of(tensor)
        torch.maximum(step_amax, amax, out=step_amax)
        return self.quantize(tensor, target, amax)

    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        return scale_from_amax(amax, largest_value(dtype), 1.0, margin)

    def transpose(self, data: Tensor) -> Tensor:
        return data.t().contiguous()


@dataclass(frozen=True)
class DelayedQuantization:
    """The quantisation of a tensor of a linear layer under delayed scaling, whose scale is known before the tensor."""

    quantization: Quantization
    target: Fp8Format
    step_amax: Tensor
    """``[]``: the largest amax of this step so far."""

    def quantize(self, tensor: Tensor) -> QuantizedTensor:
        return self.quantization.quantize_and_record(tensor, self.target, self.step_amax)


# The GEMMs of a linear layer y = x W^T, with m rows, k inputs and n outputs. FP8 units read both operands along the
# summed dim, so x, dy and W are needed in two layouts:
#
#     output            y  [m, n] = x [m, k]     @ (W [n, k])^T        summed over k: rows of both
#     input gradient    dx [m, k] = dy [m, n]    @ (W^T [k, n])^T      summed over n: W transposed
#     weight gradient   dW [n, k] = dy^T [n, m]  @ (x^T [k, m])^T      summed over m: both transposed


class ScaledGemm(Protocol):
    """``a [m, k] @ b [n, k]^T`` of two quantised matrices, as ``[m, n]`` in ``dtype``; in ``out``, which has this
    dtype, if given."""

    def __call__(
        self, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
    ) -> Tensor: ...


def scaled_gemm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """A :class:`ScaledGemm` in bf16 or fp32, accumulated in fp32, or with fewer bits if ``fast`` and the hardware
    supports it. Hopper requires this layout, with rows of multiples of 16, and does not multiply e5m2 by e5m2."""
    assert a.data.is_contiguous() and b.data.is_contiguous(), (a.data.stride(), b.data.stride())
    assert a.inverse_scale is not None and b.inverse_scale is not None
    scales = a.inverse_scale, b.inverse_scale
    return scaled_mm(a.data, b.data.t(), *scales, out_dtype=dtype, use_fast_accum=fast, out=out)


def widened_gemm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """:func:`scaled_gemm` by an fp32 GEMM, for devices without FP8 units."""
    assert a.inverse_scale is not None and b.inverse_scale is not None
    product = a.data.float() @ b.data.float().t()
    product.mul_(a.inverse_scale * b.inverse_scale)
    return product.to(dtype) if out is None else out.copy_(product)


def gemm_for(device: torch.device) -> ScaledGemm:
    """The GEMM for ``device``; on some CPUs torch's own takes seconds instead of milliseconds."""
    return widened_gemm if device.type == "cpu" else scaled_gemm


class Fp8WeightGradientKernel(Protocol):
    """The weight-gradient GEMM ``a [n, m] @ b [k, m]^T`` into a buffer ``[n, k]``."""

    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        """Add the product to ``buffer``, or overwrite it."""


@dataclass(frozen=True)
class SeparateFp8WeightGradient:
    """A GEMM into the buffer; later microbatches have a GEMM in fp32, then a sum: one more pass, and memory for the
    product."""

    gemm: ScaledGemm

    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        if accumulate:
            buffer.add_(self.gemm(a, b, torch.promote_types(buffer.dtype, torch.float32)))
        else:
            self.gemm(a, b, buffer.dtype, out=buffer)


@dataclass(frozen=True)
class InPlaceFp8WeightGradient:
    """A GEMM that accumulates in the buffer."""

    gemm: ScaledGemm
    scaled_addmm_: Callable[..., Tensor]
    """torch's, which versions up to 2.13 do not have."""

    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        if not accumulate:
            self.gemm(a, b, buffer.dtype, out=buffer)
            return
        tensorwise = ScalingType.TensorWise
        self.scaled_addmm_(buffer, a.data, b.data.t(), a.inverse_scale, tensorwise, b.inverse_scale, tensorwise)


@dataclass(frozen=True)
class Fp8Kernels:
    """The implementations of the operations of FP8 linear layers."""

    gemm: ScaledGemm
    quantization: Quantization
    weight_gradient: Fp8WeightGradientKernel

    @staticmethod
    def eager(gemm: ScaledGemm) -> "Fp8Kernels":
        """``gemm``, and plain torch operations."""
        return Fp8Kernels(gemm, EagerQuantization(), SeparateFp8WeightGradient(gemm))


@dataclass(frozen=True)
class Fp8WeightGradientProduct:
    """A :class:`~megatron.core.gradient.GradientProduct` of the transposed operands ``[n, m]`` and ``[k, m]``; in
    ``dtype`` where there is no buffer."""

    grad_outputs: QuantizedTensor
    inputs: QuantizedTensor
    kernels: Fp8Kernels
    dtype: torch.dtype

    def value(self) -> Tensor:
        return self.kernels.gemm(self.grad_outputs, self.inputs, self.dtype)

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        self.kernels.weight_gradient.write(buffer, self.grad_outputs, self.inputs, accumulate)


def scaled_gemm_reference(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """:func:`scaled_gemm` in fp64."""
    product = dequantize(a) @ dequantize(b).t()
    return product.to(dtype) if out is None else out.copy_(product)


def dequantize(operand: QuantizedTensor) -> Tensor:
    """The values of ``operand`` in fp64."""
    assert operand.inverse_scale is not None
    return operand.data.double() * operand.inverse_scale.double()


FP8_CAPABILITY = (8, 9)
"""The lowest CUDA capability of GPUs that multiply in FP8 (Ada)."""
