"""FP8: tensors quantised with one scale each or one per block, their GEMMs, and the scale for an amax.

A tensor ``x`` is kept as ``round(x * scale)`` in e4m3 (range 448, 3 bits of fraction) or e5m2 (range 57344, 2 bits),
together with ``1 / scale``. *amax* is the largest magnitude of a tensor or of a block. Sources: FP8 formats for deep
learning (Micikevicius et al., arXiv 2209.05433); delayed and block scaling follow NVIDIA's Transformer Engine, block
scaling also DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import Compiler
from megatron.core.precision import Layout, QuantizedTensor
from megatron.torch_compat import ScalingType, scaled_mm, scaled_mm_of_kinds

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
    if out is None:
        out = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    out.copy_(saturated(tensor, scale, dtype))
    return QuantizedTensor(out, inverse_of(scale, amax))


def saturated(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor * scale``, at least in fp32, within the range of the FP8 format ``dtype``."""
    # torch's conversion saturates in some versions only.
    largest = largest_value(dtype)
    return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * scale).clamp_(-largest, largest)


def inverse_of(scale: Tensor, amax: Tensor) -> Tensor:
    """``1 / scale``; NaN where ``amax`` is not finite."""
    return scale.reciprocal() + (amax - amax)


BLOCK = 128
"""Elements of the summed dim with one scale under block scaling."""

# Blocks of x and dy [m, k], and of W [n, k]:
#
#     rows of x, dy      1 x 128    scales [m, k / 128]         along k, which the output and the input gradient sum
#     columns of x, dy   128 x 1    scales [m / 128, k]         along m, which the weight gradient sums
#     W                  128 x 128  scales [n / 128, k / 128]   the transpose has the same numbers and scales
#
# So x and dy are quantised twice: the transpose of the rows is not the operand of the weight gradient.


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that is at most :func:`scale_from_amax`, as is Transformer Engine's default; 1 where
    ``amax`` is zero or not finite."""
    scale = scale_from_amax(amax, largest_value(dtype), 1.0)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # without its fraction


def quantize_blocks(
    matrix: Tensor, height: int, width: int, dtype: torch.dtype, transposes: bool = False
) -> tuple[Tensor, Tensor]:
    """``matrix [m, k]`` in the FP8 format ``dtype``, and the inverse scales ``[m / height, k / width]`` of its blocks
    ``[height, width]``, NaN for a block that is not finite: what a GEMM sums over it is NaN. With ``transposes`` the
    transposes of both, of which only the first is copied."""
    m, k = matrix.shape
    blocks = matrix.reshape(m // height, height, k // width, width)
    amax = blocks.abs().amax(dim=(1, 3)).float()
    scale = power_of_two_scale(amax, dtype)
    numbers, inverse = saturated(blocks, scale[:, None, :, None], dtype).to(dtype).view(m, k), inverse_of(scale, amax)
    return (numbers.t().contiguous(), inverse.t()) if transposes else (numbers, inverse)


def quantize_pieces(pieces: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """``pieces [p, width]`` with a known ``scale [p]`` each, written to ``out`` of the same shape."""
    out.copy_(saturated(pieces, scale[:, None], dtype))


class BlockQuantization:
    """Quantises with a scale for each block of ``size`` or ``size x size`` elements, from the block's amax. Blocks
    divide the tensors.

    ``compiler`` makes one kernel of each function. Without it one torch operation follows the other: the definition.
    """

    def __init__(self, compiler: Compiler = lambda function: function, size: int = BLOCK) -> None:
        self.size = size
        self._quantize_blocks, self.quantize_pieces = compiler(quantize_blocks), compiler(quantize_pieces)

    def quantize(self, tensor: Tensor, dtype: torch.dtype, layout: Layout) -> QuantizedTensor:
        """An input or output gradient ``[..., k]`` in each part of ``layout`` from its own blocks."""
        matrix, size = tensor.flatten(0, -2), self.size  # [m, k]
        data: Tensor = tensor.new_empty(0, dtype=dtype)
        scale: Tensor | None = None
        transposed: tuple[Tensor | None, Tensor | None] = None, None
        columns: QuantizedTensor | None = None
        if Layout.ROWS in layout:
            numbers, scales = self._quantize_blocks(matrix, 1, size, dtype)
            data, scale = numbers.view(tensor.shape), scales.view(*tensor.shape[:-1], -1)
        if Layout.TRANSPOSED in layout:
            transposed = self._quantize_blocks(matrix, size, 1, dtype, True)
        if Layout.COLUMNS in layout:
            numbers, scales = self._quantize_blocks(matrix, size, 1, dtype)
            columns = QuantizedTensor(numbers.view(tensor.shape), scales)
        return QuantizedTensor(data, scale, *transposed, columns=columns)

    def quantize_weight(self, weight: Tensor, dtype: torch.dtype, layout: Layout) -> QuantizedTensor:
        """A weight ``[n, k]``."""
        data, scale = self._quantize_blocks(weight, self.size, self.size, dtype)
        if Layout.TRANSPOSED not in layout:
            return QuantizedTensor(data, scale)
        rows = data if Layout.ROWS in layout else data.new_empty(0)
        return QuantizedTensor(rows, scale, data.t().contiguous(), scale.t())


@dataclass(frozen=True)
class FlatPieces:
    """A 1-D shard of a weight ``[n, k]`` as rows of equal width, each inside one block of the weight."""

    width: int
    block: Tensor
    """``[pieces]``: the block of each piece, counted along the rows of blocks."""

    @classmethod
    def of(cls, shard: Tensor, start: int, shape: Sequence[int], size: int) -> "FlatPieces":
        """The pieces of ``shard``, whose first element is number ``start`` of the flattened weight of ``shape``."""
        width, in_row = math.gcd(start, shard.numel(), size), shape[1]
        first = torch.arange(start, start + shard.numel(), width, device=shard.device)  # of each piece
        return cls(width, first // in_row // size * (in_row // size) + first % in_row // size)

    def amax(self, shard: Tensor, num_blocks: int) -> Tensor:
        """``[blocks]`` in fp32: the amax of what ``shard`` has of each block; inf if that is not finite."""
        amax = shard.view(-1, self.width).abs().amax(dim=1).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return amax.new_zeros(num_blocks).scatter_reduce_(0, self.block, amax, "amax")


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


def block_scaled_gemm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """A :class:`ScaledGemm` of ``a`` in blocks of 1 x 128 and ``b`` in blocks of 1 x 128 or 128 x 128. torch multiplies
    these pairs on Hopper, both in e4m3. Never ``fast``: Transformer Engine sums each block with all bits, too."""
    assert a.inverse_scale is not None and b.inverse_scale is not None
    (n, k), scale_b, recipe_b = b.data.shape, b.inverse_scale, ScalingType.BlockWise1x128
    if scale_b.shape[0] == n:
        scale_b = _outer_dim_first(scale_b)
    else:
        # [n / 128, k / 128], of which each row has a multiple of 4 scales in memory.
        padding, recipe_b = -(k // BLOCK) % 4, ScalingType.BlockWise128x128
        scale_b = (F.pad(scale_b, (0, padding)) if padding else scale_b).contiguous().t()
    scale_a, recipe_a = _outer_dim_first(a.inverse_scale), ScalingType.BlockWise1x128
    scales_a, scales_b = (([scale_a], [recipe_a.value]), ([scale_b], [recipe_b.value]))
    return scaled_mm_of_kinds(a.data, b.data.t(), *scales_a, [], *scales_b, [], None, dtype, out=out)


def _outer_dim_first(scale: Tensor) -> Tensor:
    """``scale [m, blocks]`` with the scales of a block of all rows side by side in memory."""
    return scale.t().contiguous().t()


def widened_block_gemm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """:func:`block_scaled_gemm` by its definition, for devices without FP8 units: of each block of the summed dim, from
    the first to the last, the exact sum of the products, rounded to fp32, times the scale of ``a``, times the scale of
    ``b``, is added in fp32. So the result depends on no BLAS and on no other row."""
    assert a.inverse_scale is not None and b.inverse_scale is not None
    (n, k), num_blocks = b.data.shape, a.inverse_scale.shape[1]
    scales = a.inverse_scale.split(1, dim=1), spread(b.inverse_scale, (n, num_blocks)).split(1, dim=1)
    total = a.data.new_zeros(a.data.shape[0], n, dtype=torch.float32)
    for one, other, scale_a, scale_b in zip(*(c.data.split(k // num_blocks, dim=1) for c in (a, b)), *scales):
        product = (one.double() @ other.double().t()).float()  # [m, n]; fp64 holds the sum
        total += product.mul_(scale_a).mul_(scale_b.t())
    return total.to(dtype) if out is None else out.copy_(total)


def spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """``scale`` of blocks, repeated to ``shape``; a scale of a whole tensor is returned."""
    for dim in range(scale.dim()):
        scale = scale.repeat_interleave(shape[dim] // scale.shape[dim], dim=dim)
    return scale


def gemm_for(device: torch.device, has_blocks: bool = False) -> ScaledGemm:
    """The GEMM for ``device``; on some CPUs torch's own takes seconds instead of milliseconds."""
    if has_blocks:
        return widened_block_gemm if device.type == "cpu" else block_scaled_gemm
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
    blocks: BlockQuantization = field(default_factory=BlockQuantization)
    """Quantises under block scaling, in place of ``quantization``."""

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
    return operand.data.double() * spread(operand.inverse_scale, operand.data.shape).double()


FP8_CAPABILITY = (8, 9)
"""The lowest CUDA capability of GPUs that multiply in FP8 (Ada)."""
