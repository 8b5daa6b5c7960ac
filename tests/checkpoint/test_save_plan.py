"""Which rank writes which part: about equally many bytes, and of what several hold each element once."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.save_plan import BoxTable, own_share, spread_replicas, tensor_data

# --- who writes what ---------------------------------------------------------------------------------------


def listed(tensors: dict[str, Tensor]) -> tuple[BoxTable, list[WriteItem]]:
    """What a rank with these tensors lists."""
    boxed = {
        name: tensor if isinstance(tensor, BoxedTensor) else BoxedTensor.from_whole(tensor)
        for name, tensor in tensors.items()
    }
    items = [item for name, tensor in boxed.items() for item in tensor.__create_write_items__(name, tensor)]
    return BoxTable.of(boxed, items), items


def parts_of(*ranks: dict[str, Tensor]) -> list[list[int]]:
    """The bytes of the parts that each rank writes."""
    tables = [listed(tensors)[0] for tensors in ranks]
    table = BoxTable.joined(tables)
    owners = np.repeat(np.arange(len(tables)), [len(one.tensor) for one in tables])
    parts = spread_replicas(table, owners, int(owners.max()) + 1)
    _, sizes = parts.in_table(table)
    item_sizes = table.nbytes() // np.maximum(table.sizes.prod(axis=1), 1)
    found: list[list[int]] = [[] for _ in ranks]
    for box, shape in zip(parts.box, sizes):
        found[owners[box]].append(int(shape.prod() * item_sizes[box]))
    return found


def bytes_of(*ranks: dict[str, Tensor]) -> list[int]:
    return [sum(parts) for parts in parts_of(*ranks)]


def test_replicas_go_first_to_the_ranks_with_little_of_their_own() -> None:
    replicated = {f"layer_{number}": torch.zeros(100) for number in range(6)}
    ranks = [{**replicated, "mine": torch.zeros(300)}, replicated, {"only_here": torch.zeros(10), **replicated}]
    assert bytes_of(*ranks) == [4 * 300, 4 * 300, 4 * 310]


def test_pieces_weigh_what_they_hold_and_not_their_whole_tensor() -> None:
    def piece(size: int) -> BoxedTensor:
        return BoxedTensor.from_boxes((1000,), torch.float32, [((0,), torch.zeros(size))])

    replicated: dict[str, Tensor] = {"small": piece(10), "also": piece(10), "large": piece(20)}
    assert bytes_of(replicated, replicated) == [80, 80]


def test_a_large_replica_is_cut_for_all_its_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.save_plan.SLICE_BYTES", 200)
    rows = {"embedding": torch.zeros(20, 10)}
    assert bytes_of(*[rows] * 4) == [200] * 4
    # What only one rank has stays whole, and a row is never cut.
    assert [len(parts) for parts in parts_of(rows, {})] == [1, 0]
    assert sum(len(parts) for parts in parts_of(*[{"wide": torch.zeros(2, 1000)}] * 4)) == 2


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3).int()),
        (torch.zeros(3), BoxedTensor.from_boxes((3,), torch.float32, [((0,), torch.zeros(2))])),
    ],
    ids=["shape", "dtype", "piece"],
)
def test_ranks_that_disagree_about_a_tensor_are_refused(left: Tensor, right: Tensor) -> None:
    with pytest.raises(AssertionError):
        parts_of({"x": left}, {"x": right})


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 40),
)
def test_holders_divide_their_boxes_without_asking(
    shapes: list[tuple[int, int]], num_ranks: int, slice_bytes: int
) -> None:
    """Each element is listed by one of the ranks, and these write about equally many bytes."""
    tensors: dict[str, Tensor] = {str(number): torch.zeros(shape) for number, shape in enumerate(shapes)}
    holders = [3 * rank + 1 for rank in range(num_ranks)]
    tensors["scalar"] = torch.tensor(1.0)
    _, items = listed(tensors)
    counted = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    loads = []
    with mock.patch("megatron.checkpoint.save_plan.SLICE_BYTES", slice_bytes):
        for rank in holders:
            # The order in which a rank has its tensors does not matter.
            shuffled = random.Random(rank).sample(items, len(items))
            shares = [tensor_data(item).chunk for item in own_share(shuffled, dict.fromkeys(tensors, holders), rank)]
            names = [item.index.fqn for item in own_share(shuffled, dict.fromkeys(tensors, holders), rank)]
            for name, chunk in zip(names, shares):
                counted[name][tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes))] += 1
            loads.append(4 * sum(chunk.sizes.numel() for chunk in shares))
    assert all((times == 1).all() for times in counted.values())
    assert max(loads) - min(loads) <= max(slice_bytes, 4 * max(columns for _, columns in shapes), 4)


def test_boxes_of_unknown_holders_are_listed_by_all() -> None:
    _, items = listed({"known": torch.zeros(4), "unknown": torch.zeros(4)})
    shares = [[item.index.fqn for item in own_share(items, {"known": (0, 1)}, rank)] for rank in (0, 1)]
    assert shares == [["unknown", "known"], ["unknown"]]
