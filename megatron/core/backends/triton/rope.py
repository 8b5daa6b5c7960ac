"""RoPE as one kernel, which reads and writes the rotated part once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Elements of a program: 16 for each thread, which in bf16 are two loads and two stores of 16 bytes."""


def rotate(activations: Tensor, table: Tensor) -> Tensor:
    """A :data:`~megatron.core.ops.rope.Rotation`. Half precisions are rotated in fp32 and rounded once."""
    length, batch, width = activations.shape
    angles = torch.view_as_real(table.conj() if table.is_conj() else table)  # [s, 1 or b, 1, head_size / 2, 2]
    head_size = 2 * angles.shape[-2]
    assert activations.stride(-1) == 1 and angles.stride()[-2:] == (2, 1), (activations.stride(), angles.stride())
    padded_size = triton.next_power_of_2(head_size)
    heads = max(1, ELEMENTS // padded_size)
    _rotate_kernel[length * batch, triton.cdiv(width // head_size, heads)](
        activations,
        angles,
        # conj() only sets a flag, which a real view does not have.
        -1.0 if table.is_conj() else 1.0,
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
