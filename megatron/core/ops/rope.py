"""Rotary position embedding (Su et al., arXiv 2104.09864) with Llama 3.1's frequency scaling, and YaRN.

Scales of queries by their position are attention temperature tuning (Llama 4; Nakanishi, arXiv 2501.19399).

The rotated pairs are neighbouring elements ``(2i, 2i+1)`` of a head, as in the paper and in Meta's weights: a pair is
one complex number and the rotation one complex product. Hugging Face stores the two halves of a head apart; conversion
permutes the rows of the query and key weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.device import Compiler, inductor

Rotation = Callable[[Tensor, Tensor], Tensor]
"""Multiplies every head of ``[s, b, heads * head_size]`` in place by a complex table, whose magnitude is not always 1
(:func:`rotary_table`), or by real scales (:func:`query_scales`); the gradient is multiplied by ``table.conj()``."""


def rotary_frequencies(
    head_size: int,
    base: float,
    *,
    scaling_factor: float | None = None,
    original_length: int = 8192,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Tensor:
    """Angles per position, ``[head_size / 2]`` in fp64; ``scaling_factor`` enables Llama 3.1's scaling.

    A frequency that turns at most ``low_freq_factor`` times in ``original_length`` positions is divided by the factor,
    one that turns at least ``high_freq_factor`` times is kept, and between the two the kept share grows linearly with
    the turns. With equal bounds there is nothing between, and a frequency at the bound is kept.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    frequencies = 1.0 / base**exponents
    if scaling_factor is None:
        return frequencies
    turns = original_length * frequencies / (2 * math.pi)  # in the context that the model was trained with
    if low_freq_factor == high_freq_factor:
        keep = (turns >= low_freq_factor).double()
    else:
        keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling_factor)


def yarn_frequencies(
    head_size: int,
    base: float,
    *,
    scaling_factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    round_to_int: bool = True,
) -> Tensor:
    """YaRN's angles per position, ``[head_size / 2]`` in fp64 (Peng et al., arXiv 2309.00071, section 3.2).

    A frequency that turns ``beta_fast`` times in ``original_length`` positions, or more often, is kept, one that turns
    at most ``beta_slow`` times is divided by ``scaling_factor``. Between the two the kept share falls linearly with the
    number of the pair. As in YaRN's code and in transformers, the pairs at the two bounds are clamped to the head size
    (not to its half), and ``round_to_int`` widens the range to whole numbers.
    """
    # kept share  1 |----.            pairs 0 (fastest) to d/2 - 1 (slowest)
    #               |     `.
    #             0 |_______`-----    low: the pair that turns beta_fast times in original_length, high: beta_slow times
    low, high = (
        head_size * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (beta_fast, beta_slow)
    )
    if round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    pairs = torch.arange(head_size // 2, dtype=torch.float64)
    keep = 1 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return rotary_frequencies(head_size, base) * (keep + (1 - keep) / scaling_factor)


def rotary_table(frequencies: Tensor, positions: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> Tensor:
    """Complex rotations ``[s, 1 or b, 1, head_size / 2]`` of ``positions`` ``[s]`` or ``[s, b]``, times ``magnitude``;
    ``dtype`` is the activations' dtype (half precisions rotate in fp32)."""
    by_row = positions if positions.dim() == 2 else positions[:, None]
    angles = (by_row.to(torch.float64)[..., None] * frequencies.to(positions.device)).unsqueeze(2)
    return torch.polar(torch.full_like(angles, magnitude), angles).to(
        torch.complex128 if dtype == torch.float64 else torch.complex64
    )


def rotate_(activations: Tensor, table: Tensor) -> Tensor:
    """The eager :data:`Rotation`."""
    if activations.dtype in (torch.float32, torch.float64):
        pairs = torch.view_as_complex(activations.unflatten(-1, (-1, table.shape[-1], 2)))  # [s, b, heads, d / 2]
        pairs.mul_(table)
        return activations
    return activations.copy_(rotate_(activations.to(torch.float32, copy=True), table))


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, table: Tensor, rotated_size: int, rotate: Rotation) -> Tensor:
        ctx.table, ctx.rotated_size, ctx.rotate = table, rotated_size, rotate
        # Detached: autograd forbids in-place changes of views, which the GEMM's output is on some devices.
        qkv = qkv.detach()
        rotate(qkv[..., :rotated_size], table)
        return qkv

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # The adjoint of a product with z is the product with conj(z), whatever the magnitude of z.
        ctx.rotate(gradients[0][..., : ctx.rotated_size], ctx.table.conj())
        return gradients[0], None, None, None


def apply_rotary(qkv: Tensor, table: Tensor, rotated_size: int, rotate: Rotation = rotate_) -> Tensor:
    """Rotate queries and keys, the first ``rotated_size`` of ``[s, b, (n + 2g) d]``, in place.

    Nothing else may read ``qkv`` or its gradient. ``table`` is from :func:`rotary_table`. With ``Tensor.mul_`` in the
    place of ``rotate`` it scales them by :func:`query_scales`, which are their own conjugates.
    """
    output: Tensor = _Rotary.apply(qkv, table, rotated_size, rotate)
    return output


def rotated(activations: Tensor, table: Tensor, sign: int) -> Tensor:
    """``[s, b, heads * head_size]`` rotated by ``sign`` times the angles of a real table ``[..., head_size / 2, 2]`` of
    cosines and sines, in real arithmetic."""
    pairs = activations.unflatten(-1, (-1, *table.shape[-2:])).to(table.dtype)  # [s, b, heads, head_size / 2, 2]
    even, odd = pairs.unbind(-1)
    cosine, sine = table[..., 0], sign * table[..., 1]
    turned = even * cosine - odd * sine, even * sine + odd * cosine
    # Rounded before the stack: it replaces its own inputs, so it is a temporary in memory even when compiled.
    return torch.stack([part.to(activations.dtype) for part in turned], dim=-1).flatten(-3)


class CompiledRotation:
    """:func:`rotated` through a compiler, because ``torch.compile`` does not support complex numbers, and a copy."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self._rotated = compiler(rotated)

    def __call__(self, activations: Tensor, table: Tensor) -> Tensor:
        return activations.copy_(self._rotated(activations, *real_table(table)))


def real_table(table: Tensor) -> tuple[Tensor, int]:
    """The cosines and sines ``[..., 2]`` of a complex table, and the sign of its angles: ``conj()`` only sets a flag,
    which a real view does not have."""
    return (torch.view_as_real(table.conj()), -1) if table.is_conj() else (torch.view_as_real(table), 1)


def query_scales(positions: Tensor, floor: int, scale: float, dtype: torch.dtype) -> Tensor:
    """``1 + scale log(1 + floor((p + 1) / floor))`` of ``positions`` ``[s]`` or ``[s, b]``, as ``[s, 1 or b, 1]`` in
    ``dtype`` or fp32 if that is wider."""
    by_row = positions if positions.dim() == 2 else positions[:, None]
    steps = torch.div(by_row + 1, floor, rounding_mode="floor").to(torch.float64)
    return (1 + scale * torch.log1p(steps)).unsqueeze(-1).to(torch.promote_types(dtype, torch.float32))
