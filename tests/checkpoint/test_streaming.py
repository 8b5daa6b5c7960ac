"""Checkpoints written and read piece by piece are those that everything else reads and writes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import iteration_directory
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.streaming import ChunkedModel, SavedTensors, save_streaming
from megatron.errors import CheckpointError

WEIGHT = torch.arange(7 * 10, dtype=torch.float64).view(7, 10)
# As tensor parallelism by columns and a distributed optimizer cut it: columns, then ranges within rows.
CUTS = [((0, 0), (7, 4)), ((0, 4), (2, 6)), ((2, 4), (1, 2)), ((2, 6), (1, 4)), ((3, 4), (4, 6))]


def piece(offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    return WEIGHT[tuple(slice(start, start + size) for start, size in zip(offset, shape))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedTensors:
    """A checkpoint of a tensor in several chunks."""
    root = tmp_path_factory.mktemp("checkpoint")
    boxed = BoxedTensor.from_boxes(WEIGHT.shape, WEIGHT.dtype, [(at, piece(at, shape)) for at, shape in CUTS])
    save_checkpoint(root, 1, {"weight": boxed}, {})
    return SavedTensors(root, 1)


def slices(size: int) -> st.SearchStrategy[slice]:
    return st.builds(slice, st.integers(0, size), st.integers(0, size), st.integers(1, 3))


@settings(max_examples=100)
@given(place=st.tuples(slices(7), slices(10)))
def test_any_part_can_be_read_whatever_the_chunks(saved: SavedTensors, place: tuple[slice, slice]) -> None:
    wanted = WEIGHT[place]
    found = torch.full(wanted.shape, -1, dtype=torch.float32)
    saved.read_into(found, "weight", place)
    assert torch.equal(found, wanted.float())


class Model(ChunkedModel):
    """The weight in four chunks."""

    def __init__(self) -> None:
        super().__init__(lambda count: None)
        cuts = [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
        self._add("weight", Entry(WEIGHT.dtype, tuple(WEIGHT.shape)), cuts)

    def read(self, name: str, rows: slice) -> Tensor:
        return WEIGHT[rows]


@pytest.mark.parametrize(("file_bytes", "files"), [(1, 4), (240, 3), (1 << 20, 1)])
def test_what_is_streamed_loads_and_verifies(tmp_path: Path, file_bytes: int, files: int) -> None:
    save_streaming(
        tmp_path,
        3,
        Model(),
        {"iteration": 3},
        furnish=lambda directory: (directory / "more").write_text("more"),
        file_bytes=file_bytes,
    )
    found = torch.zeros_like(WEIGHT)
    assert load_checkpoint(tmp_path, 3, {"weight": found}) == {"iteration": 3}
    assert torch.equal(found, WEIGHT)
    verify_share(tmp_path, 3, 0, 1)
    directory = iteration_directory(tmp_path, 3)
    assert (directory / "more").read_text() == "more"
    assert len(list(directory.glob("*.safetensors"))) == files


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    class Damaged(Model):
        def read(self, name: str, rows: slice) -> Tensor:
            raise CheckpointError("the source is damaged")

    with pytest.raises(CheckpointError, match="the source is damaged"):
        save_streaming(tmp_path, 3, Damaged(), {})
    assert list(tmp_path.iterdir()) == [] and list_checkpoints(tmp_path) == []
