"""RMSNorm and SwiGLU that write their output in FP8, in the layouts that the next linear layer reads, and RoPE."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.backends.triton_fp8 import SCALARS, TILE, magnitude_bits, own_tile, record_amax, tiles_of, to_fp8
from megatron.core.ops.fp8 import DelayedQuantization, largest_value
from megatron.core.ops.norm import CompiledRMSNorm
from megatron.core.ops.rope import real_table
from megatron.core.ops.swiglu import CompiledSwiGLU
from megatron.core.precision import Layout, QuantizedTensor


class TritonRMSNorm(CompiledRMSNorm):
    """:class:`CompiledRMSNorm`, which writes FP8 alone before a linear layer that quantises with a known scale: 3 bytes
    per element for rows instead of 7, and 6 for both layouts instead of 8."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        """The output computed in fp32 and rounded once, to FP8; and the inverse RMS ``[..., 1]`` in fp32.

        Raises ``step_amax`` to the amax if that is larger. If the amax is not finite, the inverse scale is NaN.
        """
        inputs, gain = inputs.contiguous(), weight.contiguous()
        *shape, k = inputs.shape
        m, target, dtype = inputs.numel() // k, quantization.target, quantization.target.dtype
        writes_rows, largest = Layout.ROWS in target.layout, largest_value(dtype)
        data = inputs.new_empty((*shape, k) if writes_rows else 0, dtype=dtype)
        inverse_rms = inputs.new_empty((*shape, 1), dtype=torch.float32)
        inverse_scale, step_amax = target.scale.reciprocal(), quantization.step_amax.view(torch.int32)
        block = triton.next_power_of_2(k)
        # A program per row: the inverse RMS needs the whole row, which it then quantises without reading it again.
        _row[m,](
            *(inputs, gain, target.scale, data, inverse_rms, inverse_scale, step_amax, k, epsilon),
            LARGEST=largest,
            WRITES_ROWS=writes_rows,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
        if Layout.TRANSPOSED not in target.layout:
            return QuantizedTensor(data, inverse_scale), inverse_rms
        # A program per tile reads the input again: a row alone would write single bytes of the transpose.
        transposed = inputs.new_empty(k, m, dtype=dtype)
        pointers = inputs, gain, inverse_rms, target.scale, transposed
        _transposed_tile[tiles_of(m, k)](*pointers, m, k, LARGEST=largest, **TILE)
        return QuantizedTensor(data, inverse_scale, transposed), inverse_rms


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _row(
    x_ptr: tl.tensor,  # [m, k]
    gain_ptr: tl.tensor,  # [k]
    scale_ptr: tl.tensor,  # []
    rows_ptr: tl.tensor,  # [m, k]
    inverse_rms_ptr: tl.tensor,  # [m]
    inverse_scale_ptr: tl.tensor,  # []
    step_amax_ptr: tl.tensor,  # [], the bits of fp32
    k: tl.tensor,
    epsilon: tl.tensor,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the inverse RMS of a row, the quantised row, and record the amax."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < k
    x = tl.load(x_ptr + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x) / k + epsilon)
    tl.store(inverse_rms_ptr + row, inverse_rms)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    output = x * inverse_rms * gain
    record_amax(tl.max(magnitude_bits(output)), step_amax_ptr, inverse_scale_ptr)
    if WRITES_ROWS:
        quantized = to_fp8(output, tl.load(scale_ptr), rows_ptr.dtype.element_ty, LARGEST)
        tl.store(rows_ptr + row * k + columns, quantized, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _transposed_tile(
    x_ptr: tl.tensor,  # [m, k]
    gain_ptr: tl.tensor,  # [k]
    inverse_rms_ptr: tl.tensor,  # [m]
    scale_ptr: tl.tensor,  # []
    transposed_ptr: tl.tensor,  # [k, m]
    m: tl.tensor,
    k: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write a tile of the transpose, with the numbers of the rows."""
    rows, columns, inside = own_tile(m, k, BLOCK_M, BLOCK_K)
    x = tl.load(x_ptr + rows * k + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=columns < k, other=0.0).to(tl.float32)
    inverse_rms = tl.load(inverse_rms_ptr + rows, mask=rows < m, other=0.0)
    quantized = to_fp8(x * inverse_rms * gain, tl.load(scale_ptr), transposed_ptr.dtype.element_ty, LARGEST)
    # Through shared memory, so that loads and stores are of neighbouring bytes.
    tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(quantized), mask=tl.trans(inside))


class TritonSwiGLU(CompiledSwiGLU):
    """:class:`CompiledSwiGLU`, which writes FP8 alone before a linear layer that quantises with a known scale: 6 bytes
    per element for both layouts instead of 10."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        """The output computed in fp32 and rounded once, to FP8.

        Raises ``step_amax`` to the amax if that is larger. If the amax is not finite, the inverse scale is NaN.
        """
        assert gate_and_up.is_contiguous(), gate_and_up.stride()
        *shape, width = gate_and_up.shape
        m, k = gate_and_up.numel() // width, width // 2
        target, dtype = quantization.target, quantization.target.dtype
        writes_rows, writes_transposed = Layout.ROWS in target.layout, Layout.TRANSPOSED in target.layout
        data = gate_and_up.new_empty((*shape, k) if writes_rows else 0, dtype=dtype)
        transposed = gate_and_up.new_empty((k, m) if writes_transposed else 0, dtype=dtype)
        inverse_scale, step_amax = target.scale.reciprocal(), quantization.step_amax.view(torch.int32)
        _swiglu_tile[tiles_of(m, k)](
            *(gate_and_up, target.scale, data, transposed, inverse_scale, step_amax, m, k),
            LARGEST=largest_value(dtype),
            WRITES_ROWS=writes_rows,
            WRITES_TRANSPOSED=writes_transposed,
            **TILE,
        )
        return QuantizedTensor(data, inverse_scale, transposed if writes_transposed else None)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _swiglu_tile(
    gate_and_up_ptr: tl.tensor,  # [m, 2 k]
    scale_ptr: tl.tensor,  # []
    rows_ptr: tl.tensor,  # [m, k]
    transposed_ptr: tl.tensor,  # [k, m]
    inverse_scale_ptr: tl.tensor,  # []
    step_amax_ptr: tl.tensor,  # [], the bits of fp32
    m: tl.tensor,
    k: tl.tensor,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    WRITES_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write a tile of the output."""
    rows, columns, inside = own_tile(m, k, BLOCK_M, BLOCK_K)
    gate_ptr = gate_and_up_ptr + rows * (2 * k) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + k, mask=inside, other=0.0).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    record_amax(tl.max(magnitude_bits(output)), step_amax_ptr, inverse_scale_ptr)
    quantized = to_fp8(output, tl.load(scale_ptr), rows_ptr.dtype.element_ty, LARGEST)
    if WRITES_ROWS:
        tl.store(rows_ptr + rows * k + columns, quantized, mask=inside)
    if WRITES_TRANSPOSED:
        # Through shared memory, so that both stores are of neighbouring bytes.
        tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(quantized), mask=tl.trans(inside))


ELEMENTS = 2048
"""Elements of a program of RoPE: 16 for each thread, which in bf16 are two loads and two stores of 16 bytes."""


def rotate(activations: Tensor, table: Tensor) -> Tensor:
    """A :data:`~megatron.core.ops.rope.Rotation`. Half precisions are rotated in fp32 and rounded once."""
    length, batch, width = activations.shape
    angles, sign = real_table(table)  # [s, 1 or b, 1, head_size / 2, 2]
    head_size = 2 * angles.shape[-2]
    assert activations.stride(-1) == 1 and angles.stride()[-2:] == (2, 1), (activations.stride(), angles.stride())
    padded_size = triton.next_power_of_2(head_size)
    heads = max(1, ELEMENTS // padded_size)
    _rotate_kernel[length * batch, triton.cdiv(width // head_size, heads)](
        activations,
        angles,
        float(sign),
        batch,
        width,
        head_size,
        *activations.stride()[:2],
        angles.stride(0),
        angles.stride(1) if angles.shape[1] == batch else 0,
        HEADS=heads,
        PAIRS=padded_size // 2,
    )
    return activations


@triton.jit
def _rotate_kernel(
    activations: tl.tensor,
    angles: tl.tensor,
    sign: tl.tensor,
    batch: tl.tensor,
    width: tl.tensor,
    head_size: tl.tensor,
    stride_position: tl.tensor,
    stride_sequence: tl.tensor,
    stride_angle_position: tl.tensor,
    stride_angle_sequence: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Rotate ``HEADS`` heads of one token in place."""
    token = tl.program_id(0).to(tl.int64)
    position, sequence = token // batch, token % batch

    pairs = tl.arange(0, PAIRS)
    angle = angles + position * stride_angle_position + sequence * stride_angle_sequence + 2 * pairs
    cosine = tl.load(angle, mask=2 * pairs < head_size)  # [PAIRS]
    sine = tl.load(angle + 1, mask=2 * pairs < head_size) * sign

    columns = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]) * head_size
    elements = tl.arange(0, 2 * PAIRS)[None, :]
    mask = (columns < width) & (elements < head_size)
    pointers = activations + position * stride_position + sequence * stride_sequence + columns + elements
    numbers = tl.load(pointers, mask=mask)  # [HEADS, 2 PAIRS]
    even, odd = tl.split(numbers.to(cosine.dtype).reshape(HEADS, PAIRS, 2))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)  # [HEADS, PAIRS, 2]
    tl.store(pointers, turned.reshape(HEADS, 2 * PAIRS).to(numbers.dtype), mask=mask)
