"""Bytes are compared with their digests when they are read, by whoever loads them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Place
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.files import WrittenFile, verify_file
from megatron.checkpoint.finding import verify_share
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.safetensors_file import Entry, VerifiedSafetensors, write_safetensors
from megatron.checkpoint.streaming import SavedTensors
from megatron.data.digests import BlockDigests
from megatron.errors import CheckpointError

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes and bands of 40, so that small tensors have many."""
    monkeypatch.setattr("megatron.checkpoint.files.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(WrittenFile.__init__, "__defaults__", (BLOCK,))
    monkeypatch.setattr("megatron.checkpoint.safetensors_file._BAND_BYTES", 40)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.rand(13, 7, generator=generator),
        "cube": torch.rand(5, 3, 4, generator=generator).double(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(150, dtype=torch.uint8),
    }


@pytest.fixture
def written(tmp_path: Path) -> WrittenFile:
    """A file with these tensors."""
    return write_safetensors(tmp_path / "file", tensors())


PLACES: list[tuple[str, Place]] = [
    ("matrix", (slice(0, 13), slice(0, 7))),
    ("matrix", (slice(3, 12), slice(2, 5))),
    ("matrix", (slice(1, 12, 3), slice(0, 7, 2))),
    ("cube", (slice(1, 5), slice(0, 3), slice(1, 2))),
    ("bytes", (slice(149, 150),)),
    ("empty", (slice(0, 0), slice(0, 4))),
    ("scalar", ()),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_any_part_of_an_entry_is_read(tmp_path: Path, written: WrittenFile, name: str, place: Place) -> None:
    whole = tensors()[name]
    target = torch.zeros_like(whole[place])
    with VerifiedSafetensors(tmp_path, written) as entries:
        entries.copy_into(target, name, place, Entry(whole.dtype, tuple(whole.shape)))
    assert torch.equal(target, whole[place])


def test_every_flipped_bit_is_found_by_whoever_reads_it(tmp_path: Path, written: WrittenFile) -> None:
    path = tmp_path / "file"
    content = path.read_bytes()
    whole = tensors()["matrix"]
    entry = Entry(whole.dtype, tuple(whole.shape))
    start = 8 + int.from_bytes(content[:8], "little")
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        target = torch.zeros_like(whole)
        try:
            with VerifiedSafetensors(tmp_path, written) as entries:
                entries.copy_into(target, "matrix", (slice(0, 13), slice(0, 7)), entry)
        except CheckpointError as error:
            assert "is damaged" in str(error) and str(path) in str(error)
        else:
            assert position >= start, "the header is always read"
            assert torch.equal(target, whole), position
        with pytest.raises(CheckpointError, match="is damaged"):
            verify_file(tmp_path, written)


def test_a_header_that_is_nested_without_end_is_damage(tmp_path: Path) -> None:
    """Its digest is right: whoever can write a checkpoint can do that."""
    header = b"[" * 100_000
    content = len(header).to_bytes(8, "little") + header
    digests = BlockDigests(BLOCK)
    digests.update(content)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        VerifiedSafetensors(tmp_path, WrittenFile.of("file", digests))


def test_a_load_finds_damage_that_came_after_the_check(tmp_path: Path) -> None:
    """Another node may read other bytes than the rank that verified the file."""
    save_checkpoint(tmp_path, 1, tensors(), {"iteration": 1})
    verify_share(tmp_path, 1, rank=0, size=1)
    path = tmp_path / "iter_0000001" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    for read in (
        lambda: load_checkpoint(tmp_path, 1, tensors()),
        lambda: SavedTensors(tmp_path, 1).read_into(torch.zeros(150).byte(), "bytes", (slice(0, 150),)),
    ):
        with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged \(the digest of bytes"):
            read()


def test_a_directory_of_another_number_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"x": torch.ones(2)}, {"iteration": 1})
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000002")
    with pytest.raises(CheckpointError, match="holds the state of iteration 1: rename it to iter_0000001"):
        read_checkpoint(tmp_path, 2)
    with pytest.raises(CheckpointError, match="holds the state of iteration 1"):
        load_checkpoint(tmp_path, 2, {"x": torch.ones(2)})
