"""Initial weights as a function of (seed, parameter name, global index) alone.

Every rank computes its own elements only, and every layout starts from the same model. The generator is counter based:
SplitMix64 (Steele et al., 2014, "Fast splittable pseudorandom number generators") of key + index gives 64 random bits,
whose upper 52 become a uniform number and, through the inverse error function, a normal number.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.core.parameter import Box, InitialValues, ParameterInfo, flat_range_boxes, info_of

_CHUNK = 1 << 20


def parameter_key(seed: int, name: str) -> int:
    """The key of one parameter's generator, 64 bits (signed)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def random_bits(key: int, index: Tensor) -> Tensor:
    """SplitMix64's output number ``index`` (int64) for the state ``key``; int64 arithmetic wraps."""
    # Each constant is an unsigned number of 64 bits; int64 has the same bits.
    bits = (index + 1) * _signed(0x9E3779B97F4A7C15) + key
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def normal_numbers(key: int, index: Tensor) -> Tensor:
    """Standard normal fp64 numbers for the global indices ``index`` (int64)."""
    return normal_of_bits(random_bits(key, index))


def normal_of_bits(bits: Tensor) -> Tensor:
    """A standard normal fp64 number from the upper 52 bits of each int64 number; always finite."""
    # The middle of one of 2^52 equal intervals, so neither 0 nor 1, where the inverse is infinite.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return torch.erfinv(2.0 * uniform - 1.0) * math.sqrt(2.0)


@torch.no_grad()
def initialize_range(flat: Tensor, info: ParameterInfo, start: int, seed: int, at_a_time: int = _CHUNK) -> None:
    """Fill ``flat`` ``[n]``, elements ``[start, start + n)`` of a rank's flattened local tensor: with the values of
    ``info.initial``, or normal with ``info.init_std``, zeros or ones; padding is zero. About ``at_a_time`` elements are
    computed at a time."""
    values = info.initial
    if values is None:
        std = info.init_std
        if std is None:
            flat.fill_(1.0)
            return
        if std == 0.0:
            flat.zero_()
            return
        values = normal(std)
    flat.zero_()  # padding, which no box contains
    key = parameter_key(seed, info.name)
    for box, begin, end in flat_range_boxes(info, start, start + flat.numel()):
        target = flat[begin - start : end - start].view(box.shape)
        rows_at_a_time = max(1, at_a_time // max(1, target[0].numel()))
        inner = _global_index(info, box, flat.device)  # of the elements of row 0 of the global tensor
        width = math.prod(info.global_shape[1:])
        for first in range(0, box.shape[0], rows_at_a_time):
            last = min(first + rows_at_a_time, box.shape[0])
            rows = torch.arange(first, last, device=flat.device) + box.global_offset[0]
            part = target[first:last]
            index = rows.unsqueeze(1) * width + inner  # [rows, columns], in the flattened global tensor
            part.copy_(values(key, index).view(part.shape))


def _global_index(info: ParameterInfo, box: Box, device: torch.device) -> Tensor:
    """The index of each element of a row of ``box`` in a row of the global tensor, both flattened: ``[columns]``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, length in zip(info.global_shape[1:], box.global_offset[1:], box.shape[1:]):
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + length, device=device)
    return index.flatten()


def normal(std: float) -> InitialValues:
    """Normal values of mean 0."""
    return lambda key, index: normal_numbers(key, index) * std


def constant(value: float) -> InitialValues:
    """One value for all elements."""
    return lambda key, index: torch.full(index.shape, value, dtype=torch.float64, device=index.device)


def initialize_parameters(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter, which must be contiguous."""
    for parameter in parameters:
        initialize_range(parameter.detach().view(-1), info_of(parameter), 0, seed)
