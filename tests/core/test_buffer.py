"""The contiguous buffers: nothing overlaps, nothing is lost, whatever the sizes, buckets and shards."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.core.data_parallel.buffer import ParameterBuffer, ParamShard, plan_buffer
from megatron.core.gradient import main_grad_of
from megatron.core.parameter import ParameterInfo, empty_parameter, info_of, sharded_boxes

any_plan = given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    shards=st.integers(1, 9),
    bucket_size=st.none() | st.integers(1, 5000),
)


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters named by their number, each element of all of them different."""
    parameters, first = [], 1.0
    for number, (rows, *other) in enumerate(shapes):
        info = ParameterInfo(f"p{number}", *sharded_boxes([rows], other, 0, 1), 0.02, True, False)
        parameter = empty_parameter(info, dtype, "cpu")
        with torch.no_grad():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view(parameter.shape))
        first += parameter.numel()
        parameters.append(parameter)
    return parameters


def shards_of(buffer: ParameterBuffer, rank: int) -> list[ParamShard]:
    return [shard for _, _, param_shards in buffer.buckets(rank) for shard in param_shards]


@any_plan
def test_parameters_lie_in_order_inside_buckets_and_do_not_overlap(
    sizes: list[int], shards: int, bucket_size: int | None
) -> None:
    layout = plan_buffer(sizes, shards, bucket_size)
    assert [stop - start for start, stop in layout.parameters] == sizes
    assert all(stop <= start for (_, stop), (start, _) in pairwise(layout.parameters))
    for start, stop in layout.parameters:
        assert sum(first <= start and stop <= last for first, last in layout.buckets) == 1


@any_plan
def test_buckets_fill_the_buffer_and_divide_evenly(sizes: list[int], shards: int, bucket_size: int | None) -> None:
    layout = plan_buffer(sizes, shards, bucket_size)
    assert layout.buckets[0][0] == 0
    assert layout.buckets[-1][1] == layout.size
    assert all(stop == start for (_, stop), (start, _) in pairwise(layout.buckets))
    for start, stop in layout.buckets:
        assert (stop - start) % shards == 0
        assert (stop - start) // shards * 2 % 128 == 0, "a share of bf16 is not a multiple of 128 bytes"
    # Padding is less than one unit per bucket.
    assert layout.size - sum(sizes) < len(layout.buckets) * shards * 64


@any_plan
def test_a_bucket_closes_with_the_parameter_that_fills_it(
    sizes: list[int], shards: int, bucket_size: int | None
) -> None:
    layout = plan_buffer(sizes, shards, bucket_size)
    contents = [
        [stop - start for start, stop in layout.parameters if first <= start < last] for first, last in layout.buckets
    ]
    if bucket_size is None:
        assert len(contents) == 1
        return
    assert all(sum(members) >= bucket_size for members in contents[:-1])
    assert all(sum(members[:-1]) < bucket_size for members in contents)


@any_plan
def test_rank_r_has_chunk_r_of_every_bucket(sizes: list[int], shards: int, bucket_size: int | None) -> None:
    """As the collectives cut it; so the shards of all ranks are equal parts of the buffer."""
    layout = plan_buffer(sizes, shards, bucket_size)
    chunks = [torch.arange(*bucket).chunk(shards) for bucket in layout.buckets]
    for rank in range(shards):
        found = [list(range(*part)) for part in layout.shard(rank, shards)]
        assert found == [of_bucket[rank].tolist() for of_bucket in chunks]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40)) | st.tuples(*[st.integers(1, 12)] * 2), min_size=1, max_size=6),
    st.integers(1, 5),
    st.none() | st.integers(1, 300),
)
def test_the_pieces_of_all_ranks_hold_every_element_once(
    shapes: list[tuple[int, ...]], shards: int, bucket_size: int | None
) -> None:
    parameters = parameters_of(shapes)
    before = [parameter.detach().clone().flatten() for parameter in parameters]
    buffer = ParameterBuffer(parameters, torch.float64, shards, bucket_size)
    held: dict[str, list[Tensor]] = {}
    covered: dict[str, list[tuple[int, int]]] = {}
    for rank in range(shards):
        for shard in shards_of(buffer, rank):
            assert shard.weight.shape == shard.gradient.shape == (shard.stop - shard.start,)
            held.setdefault(shard.info.name, []).append(shard.weight)
            covered.setdefault(shard.info.name, []).append((shard.start, shard.stop))
    for number, values in enumerate(before):
        ranges = covered[f"p{number}"]
        assert ranges[0][0] == 0 and ranges[-1][1] == values.numel()
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert torch.equal(torch.cat(held[f"p{number}"]), values)


def test_the_last_parameter_comes_first() -> None:
    """Its gradient is complete first, so its bucket can leave first."""
    parameters = parameters_of([(64,), (64,), (64,)])
    buffer = ParameterBuffer(parameters, torch.float32, shards=1, bucket_size=64)
    assert [info_of(parameter).name for parameter in buffer.parameters] == ["p2", "p1", "p0"]
    assert parameters[2].data_ptr() == buffer.weights.data_ptr()
    assert len(buffer.layout.buckets) == 3


def test_a_parameter_a_slot_a_piece_and_the_buffer_share_memory() -> None:
    parameters = parameters_of([(3, 4), (5,)], torch.bfloat16)
    buffer = ParameterBuffer(parameters, torch.float32, shards=1)
    assert (buffer.weights.dtype, buffer.gradients.dtype) == (torch.bfloat16, torch.float32)
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in parameters)
    main_grad = main_grad_of(parameters[0])
    assert main_grad is not None
    main_grad.add(torch.arange(12.0).view(3, 4))
    param_shards = {shard.info.name: shard for shard in shards_of(buffer, 0)}
    assert torch.equal(param_shards["p0"].gradient, torch.arange(12.0))
    assert not param_shards["p1"].gradient.any()
    param_shards["p0"].weight.fill_(9.0)
    assert (parameters[0] == 9.0).all()
    assert not (parameters[1] == 9.0).any()
    buffer.weights.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in parameters)


@pytest.mark.parametrize("shards", [2, 3])
def test_a_rank_whose_shard_is_padding_owns_nothing(shards: int) -> None:
    buffer = ParameterBuffer(parameters_of([(3,), (5,)]), torch.float32, shards)
    assert [len(shards_of(buffer, rank)) for rank in range(shards)] == [2] + [0] * (shards - 1)


@any_plan
def test_the_ranges_of_a_parameter_are_where_the_shards_of_its_bucket_meet_it(
    sizes: list[int], shards: int, bucket_size: int | None
) -> None:
    buffer = ParameterBuffer(parameters_of([(size,) for size in sizes]), torch.float32, shards, bucket_size)
    layout = buffer.layout
    for split, (first, last) in zip(buffer.splits, layout.parameters):
        owners: dict[int, int] = {}
        for rank in range(shards):
            for start, stop in layout.shard(rank, shards):
                owners |= dict.fromkeys(range(max(start, first) - first, min(stop, last) - first), rank)
        found = {element: rank for rank in range(shards) for element in range(*split.range_of(rank))}
        assert found == owners and len(found) == last - first
