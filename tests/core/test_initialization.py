"""Initial weights are a function of (seed, name, global index) alone, and normal.

Checked against SplitMix64 in Python's integers and the standard library's inverse normal distribution.
"""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.parameter import (
    ParameterInfo,
    columns_box,
    empty_parameter,
    initialize_parameters,
    initialize_range,
    normal_of_bits,
    padded_rows_box,
    random_bits,
    sharded_boxes,
)

MASK = (1 << 64) - 1
STD = 0.02
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def split_mix(state: int, number: int) -> int:
    """Output ``number`` (from 0) of SplitMix64 seeded with ``state``: the published algorithm, unsigned."""
    mixed = (state + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def bits_of(key: int, *numbers: int) -> list[int]:
    return [bits & MASK for bits in random_bits(key, torch.tensor(numbers)).tolist()]


def layout_of(kind: str, rank: int, size: int) -> ParameterInfo:
    """One weight of each kind, as ``rank`` of ``size`` holds it."""
    if kind == "fused rows":
        shapes = sharded_boxes([16, 8, 8], [12], rank, size)
    elif kind == "columns":
        shapes = columns_box(10, 12, rank, size)
    elif kind == "padded rows":
        shapes = padded_rows_box(9, 16, 12, rank, size)
    else:
        assert kind == "vector"
        shapes = sharded_boxes([16], [], rank, size)
    return ParameterInfo("layers.3.weight", *shapes, STD, weight_decay=True, tensor_parallel_sharded=True)


def local_part(kind: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """The same cut of the whole tensor, without the code under test."""
    if kind == "fused rows":
        return torch.cat([section.chunk(size)[rank] for section in whole.split([16, 8, 8])])
    if kind == "columns":
        return whole.chunk(size, dim=1)[rank]
    return whole.chunk(size)[rank]


def initialized(info: ParameterInfo, seed: int = 1234, dtype: torch.dtype = torch.float64, **options: int) -> Tensor:
    tensor = torch.full(info.local_shape, math.nan, dtype=dtype)
    initialize_range(tensor.view(-1), info, 0, seed, **options)
    return tensor


KINDS = ["fused rows", "columns", "padded rows", "vector"]
CUTS = [(size, rank) for size in (2, 4) for rank in range(size)]


@pytest.mark.parametrize(
    ("seed", "published"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_the_generator_gives_the_published_numbers(seed: int, published: list[int]) -> None:
    assert bits_of(seed, 0, 1, 2) == published
    assert [split_mix(seed, number) for number in range(3)] == published


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, (1 << 62)))
def test_the_generator_is_split_mix_for_any_key_and_index(key: int, index: int) -> None:
    assert bits_of(key, index) == [split_mix(key & MASK, index)]


def test_a_weight_is_the_inverse_normal_distribution_of_its_bits() -> None:
    """From seed and name to the weights, by the standard library alone."""
    info = layout_of("fused rows", 0, 1)
    digest = hashlib.blake2b(b"1234/layers.3.weight", digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    uniform = [((split_mix(key, index) >> 12) + 0.5) / 2**52 for index in range(32 * 12)]
    expected = torch.tensor([NormalDist().inv_cdf(number) * STD for number in uniform], dtype=torch.float64)
    torch.testing.assert_close(initialized(info).flatten(), expected, rtol=1e-9, atol=1e-12)


def test_even_the_extreme_bits_give_finite_numbers() -> None:
    numbers = normal_of_bits(torch.tensor([0, -1, (1 << 63) - 1, -(1 << 63)]))
    assert numbers.isfinite().all()
    assert numbers[0] == -numbers[1] < -8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_holds_the_same_bits_as_the_whole(kind: str, dtype: torch.dtype) -> None:
    whole = initialized(layout_of(kind, 0, 1), dtype=dtype)
    for size, rank in CUTS:
        part = initialized(layout_of(kind, rank, size), dtype=dtype)
        assert torch.equal(part, local_part(kind, whole, rank, size)), f"rank {rank} of {size}"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_depend_on_how_many_are_made_at_a_time(kind: str) -> None:
    info = layout_of(kind, 1, 2)
    at_once = initialized(info)
    for count in (1, 7, 13, 64):
        assert torch.equal(initialized(info, at_a_time=count), at_once)


def test_padding_is_zero_and_does_not_move_the_other_rows() -> None:
    whole = initialized(layout_of("padded rows", 0, 1))
    assert torch.equal(whole[9:], torch.zeros(7, 12, dtype=torch.float64))
    assert (whole[:9] != 0).all()
    only_padding = initialized(layout_of("padded rows", 3, 4))
    assert torch.equal(only_padding, torch.zeros(4, 12, dtype=torch.float64))
    more_padding = ParameterInfo("layers.3.weight", *padded_rows_box(9, 40, 12, 0, 1), STD, True, True)
    assert torch.equal(initialized(more_padding)[:9], whole[:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_are_the_same_weights_rounded(dtype: torch.dtype) -> None:
    info = layout_of("columns", 1, 2)
    assert torch.equal(initialized(info, dtype=dtype), initialized(info).to(dtype))


def test_every_parameter_is_filled_from_its_own_facts() -> None:
    matrix = empty_parameter(layout_of("columns", 0, 2), torch.float32, "cpu")
    norm_info = ParameterInfo("norm", *sharded_boxes([5], [], 0, 1), None, False, False)
    norm = empty_parameter(norm_info, torch.float32, "cpu")
    initialize_parameters([matrix, norm], seed=7)
    assert torch.equal(matrix.detach(), initialized(layout_of("columns", 0, 2), 7, torch.float32))
    assert torch.equal(norm.detach(), torch.ones(5))
    assert matrix.requires_grad
