"""Checkpoints written and read piece by piece are those that everything else reads and writes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import iteration_directory
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.streaming import SavedTensors, save_streaming
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


def layout(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, TensorStorageMetadata]:
    cut = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in chunks]
    return {"weight": TensorStorageMetadata(TensorProperties(dtype=WEIGHT.dtype), WEIGHT.shape, cut)}


@pytest.mark.parametrize("file_bytes", [1, 300, 1 << 20])
def test_what_is_streamed_loads_and_verifies(tmp_path: Path, file_bytes: int) -> None:
    save_streaming(
        tmp_path,
        3,
        layout(*CUTS),
        lambda name, chunk: piece(chunk.offsets, chunk.sizes),
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
    sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
    assert len(sizes) == {1: len(CUTS), 300: 3, 1 << 20: 1}[file_bytes]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(name: str, chunk: ChunkStorageMetadata) -> Tensor:
        raise CheckpointError("the source is damaged")

    with pytest.raises(CheckpointError, match="the source is damaged"):
        save_streaming(tmp_path, 3, layout(*CUTS), fail, {})
    assert list(tmp_path.iterdir()) == [] and list_checkpoints(tmp_path) == []
