"""The facts of a parameter, and its initial weights.

Gradient norm, weight decay, initialisation, gradient synchronisation and checkpoints read the facts from the parameter,
so there are no lists of names.

Initial weights are a function of (seed, parameter name, global index) alone: every rank computes its own elements only,
and every layout starts from the same model. The generator is counter based: SplitMix64 (Steele et al., 2014, "Fast
splittable pseudorandom number generators") of key + index gives 64 random bits, whose upper 52 become a uniform number
and, through the inverse error function, a normal number.
"""

# A fused weight of two sections (gate and up), column-parallel over two ranks; each box is a rectangle:
#
#     global    | gate 0 | gate 1 | up 0 | up 1 |  rows          local, rank 1    | gate 1 | up 1 |
#                          box 0           box 1                                    box 0    box 1

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor, nn

_ATTRIBUTE = "parameter_info"


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor, and its offset in a rank's local tensor; one entry per dim."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]

    def view(self, local: Tensor) -> Tensor:
        return local[tuple(slice(start, start + size) for start, size in zip(self.local_offset, self.shape))]


InitialValues = Callable[[int, Tensor], Tensor]
"""The initial values of a parameter, in fp64, from the key of its random numbers (of seed and name) and the indices of
elements in the flattened global tensor, int64: equal in every layout (:func:`initialize_range`)."""

Division = tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]
"""Global shape, local shape, and the boxes of the local tensor."""


@dataclass(frozen=True)
class ParameterInfo:
    """Facts about one parameter, the same on every rank but for ``boxes`` and ``local_shape``."""

    name: str
    """Global name, independent of the layout, such as ``layers.17.mlp.linear_fc1.weight``."""
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The boxes of the local tensor, in their order along its dim 0. Rows after the last box are padding, which is
    always zero and in no checkpoint."""
    init_std: float | None
    """Standard deviation of the initial weights; None means ones (a norm's gain), 0 zeros. ``initial`` overrides it."""
    weight_decay: bool
    tensor_parallel_sharded: bool
    """False: every tensor-parallel rank has the whole parameter, and only the first counts it in norms. An expert's
    parameter is counted by every rank that has a shard of it."""
    gradient_is_partial: bool = False
    """True: each tensor-parallel rank computes the gradient of its part of the sequence (sequence parallelism) or of
    its heads, so the gradients must be summed over the tensor-parallel group."""
    uses: int = 1
    """The number of gradients that the backward pass of a microbatch accumulates. A parameter that plain torch
    operations use has 1, however often they use it; if recomputed segments share it, one for each of them."""
    is_vocabulary: bool = False
    """Whether its rows are ids of the vocabulary: the embedding and the output layer."""
    stages: tuple[int, ...] = ()
    """The pipeline stages with a copy of this weight, if there are several: first its home, which counts it in norms
    and saves it; -1 is the last stage. Every copy has its ``uses``; the gradients of all copies are added."""
    is_copy: bool = False
    """Whether this is a copy outside of the weight's home."""
    is_expert: bool = False
    """Whether it belongs to experts: then the ranks of the stage divide it by the axes ``etp`` and ``ep``, and the
    ranks along ``edp`` share it. Other parameters are dense: the axes are ``tp``, and ``cp`` and ``dp``."""
    fan_in_mult: float = 1.0
    """Under muP the fan-in of a matrix divided by its fan-in in the base model. 1 if it does not grow with the width,
    and for the output layer, whose logits have a multiplier instead."""
    fan_out_mult: float = 1.0
    """Under muP the fan-out of a matrix, or the size of a vector, divided by its value in the base model."""
    initial: InitialValues | None = None
    """Initial values that are not ones, zeros or normal."""

    @property
    def section_rows(self) -> list[int]:
        """Rows of each section of a fused weight on this rank: query, key and value, or gate and up projection."""
        return [box.shape[0] for box in self.boxes]


def attach_info(parameter: nn.Parameter, info: ParameterInfo) -> nn.Parameter:
    assert tuple(parameter.shape) == info.local_shape, (info.name, parameter.shape, info.local_shape)
    setattr(parameter, _ATTRIBUTE, info)
    return parameter


def info_of(parameter: Tensor) -> ParameterInfo:
    """The facts of ``parameter``; every parameter of the core has them."""
    info: ParameterInfo = getattr(parameter, _ATTRIBUTE)
    return info


def sharded_boxes(section_sizes: Sequence[int], other_sizes: Sequence[int], rank: int, size: int) -> Division:
    """Split each section of dim 0 evenly over ``size`` ranks and stack this rank's shards: (global shape, local shape,
    boxes). Fused weights (query-key-value, gate-up) are several sections."""
    other = tuple(other_sizes)
    zeros = (0,) * len(other)
    boxes = []
    global_start = local_start = 0
    for section in section_sizes:
        assert section % size == 0, (section, size)
        part = section // size
        boxes.append(Box((global_start + rank * part, *zeros), (local_start, *zeros), (part, *other)))
        global_start += section
        local_start += part
    return (global_start, *other), (local_start, *other), tuple(boxes)


def padded_rows_box(rows: int, padded_rows: int, columns: int, rank: int, size: int) -> Division:
    """Split ``padded_rows`` evenly over ``size`` ranks: (global shape, local shape, boxes). Only the first ``rows``
    exist globally; a rank with padding alone has no box."""
    assert padded_rows % size == 0 and padded_rows >= rows, (rows, padded_rows, size)
    part = padded_rows // size
    first = rank * part
    real = min(rows, first + part) - first
    boxes = (Box((first, 0), (0, 0), (real, columns)),) if real > 0 else ()
    return (rows, columns), (part, columns), boxes


def columns_box(rows: int, columns: int, rank: int, size: int) -> Division:
    """Split dim 1 of a ``[rows, columns]`` weight evenly over ``size`` ranks: (global shape, local shape, boxes)."""
    assert columns % size == 0, (columns, size)
    part = columns // size
    return (rows, columns), (rows, part), (Box((0, rank * part), (0, 0), (rows, part)),)


@dataclass(frozen=True)
class RowDivision:
    """An even division of a parameter's local rows among ranks: each keeps the next ``rows`` of them, the last ranks
    fewer or none, and no other rank keeps them."""

    rows: int
    first_rank: int
    stride: int
    """Distance from one rank to the next, at least 1."""


def flat_range_boxes(info: ParameterInfo, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Cut elements ``[start, stop)`` of the flattened local tensor into boxes: ``(box, begin, end)``, where elements
    ``[begin, end)`` viewed as ``box.shape`` are the box. A range of a 2-D tensor with one box has at most three."""
    width = prod(info.local_shape[1:])
    for box in info.boxes:
        first = box.local_offset[0] * width
        begin, end = max(start, first), min(stop, first + prod(box.shape))
        for offset, shape in _cut(info.local_shape, begin, end):
            size = prod(shape)
            places = zip(box.global_offset, offset, box.local_offset)
            yield Box(tuple(there + own - zero for there, own, zero in places), offset, shape), begin, begin + size
            begin += size


def _cut(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of the boxes of elements ``[begin, end)`` of a flattened tensor of ``shape``, in their order:
    whole rows in one box, a partial first and last row each cut in the same way."""
    if len(shape) == 1:
        if begin < end:
            yield (begin,), (end - begin,)
        return
    width = prod(shape[1:])
    while begin < end:
        row, column = divmod(begin, width)
        rows = (end - begin) // width if column == 0 else 0
        if rows:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            begin += rows * width
            continue
        stop = min(end, (row + 1) * width)
        for offset, part in _cut(shape[1:], column, stop - row * width):
            yield (row, *offset), (1, *part)
        begin = stop


def empty_parameter(info: ParameterInfo, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter of the local shape with its facts attached."""
    return attach_info(nn.Parameter(torch.empty(info.local_shape, dtype=dtype, device=device)), info)


# Initial weights

_CHUNK = 1 << 20


def parameter_key(seed: int, name: str) -> int:
    """The key of one parameter's generator, 64 bits (signed)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def random_bits(key: int, index: Tensor) -> Tensor:
    """SplitMix64's output number ``index`` (int64) for the state ``key``; int64 arithmetic wraps."""
    # Each constant is an unsigned number of 64 bits from 2^63 on; int64 has the same bits.
    increment, first, second = (
        constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    )
    bits = (index + 1) * increment + key
    bits = (bits ^ _shift_right(bits, 30)) * first
    bits = (bits ^ _shift_right(bits, 27)) * second
    return bits ^ _shift_right(bits, 31)


def normal_of_bits(bits: Tensor) -> Tensor:
    """A standard normal fp64 number from the upper 52 bits of each int64 number; always finite."""
    # The middle of one of 2^52 equal intervals, so neither 0 nor 1, where the inverse is infinite.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return torch.erfinv(2.0 * uniform - 1.0) * sqrt(2.0)


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
        width = prod(info.global_shape[1:])
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
    return lambda key, index: normal_of_bits(random_bits(key, index)) * std


def constant(value: float) -> InitialValues:
    """One value for all elements."""
    return lambda key, index: torch.full(index.shape, value, dtype=torch.float64, device=index.device)


def initialize_parameters(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter, which must be contiguous."""
    for parameter in parameters:
        initialize_range(parameter.detach().view(-1), info_of(parameter), 0, seed)
