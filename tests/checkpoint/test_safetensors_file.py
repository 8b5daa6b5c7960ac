"""Safetensors files: readable by others, and every byte that is read was compared with its digest."""

import errno
import json
import os
from itertools import count
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.boxes import Place
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.files import WrittenFile, verify_file
from megatron.checkpoint.finding import verify_share
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.safetensors_file import DTYPES, Entry, VerifiedSafetensors, write_safetensors
from megatron.checkpoint.streaming import SavedTensors
from megatron.data.digests import BlockDigests
from megatron.errors import CheckpointError

# --- reading ------------------------------------------------------------------------------------------------


BLOCK = 64


@pytest.fixture
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
def written(tmp_path: Path, small_blocks: None) -> WrittenFile:
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


@pytest.mark.usefixtures("small_blocks")
def test_a_header_that_is_nested_without_end_is_damage(tmp_path: Path) -> None:
    """Its digest is right: whoever can write a checkpoint can do that."""
    header = b"[" * 100_000
    content = len(header).to_bytes(8, "little") + header
    digests = BlockDigests(BLOCK)
    digests.update(content)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        VerifiedSafetensors(tmp_path, WrittenFile.of("file", digests))


@pytest.mark.usefixtures("small_blocks")
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


# --- writing ------------------------------------------------------------------------------------------------


def tensors_of_every_dtype() -> dict[str, Tensor]:
    """All bit patterns that a byte has, seen as each dtype; with a scalar, an empty one and a view."""
    pattern = torch.arange(256, dtype=torch.uint8)
    tensors = {str(dtype): pattern.view(dtype) for dtype in DTYPES.values() if dtype != torch.bool}
    tensors["torch.bool"] = pattern > 100
    tensors["scalar"] = torch.tensor(7)
    tensors["empty"] = torch.empty(0, 3)
    tensors["transposed"] = torch.arange(12.0).view(3, 4).t()
    return tensors


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (left, right)))


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = tensors_of_every_dtype()
    path = tmp_path / "file.safetensors"
    written = write_safetensors(path, tensors)
    assert (written.name, written.size) == (path.name, path.stat().st_size)
    assert written.digest == xxhash.xxh3_128_hexdigest(path.read_bytes())
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert [name for name in tensors if not same_bits(read[name], tensors[name])] == []


def test_every_entry_is_aligned_for_its_dtype(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_safetensors(path, {"a": torch.zeros(3).byte(), "b": torch.zeros(3).double(), "c": torch.zeros(3).bfloat16()})
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:data])
    for entry in entries.values():
        assert (data + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = tensors_of_every_dtype()
    save_checkpoint(tmp_path, 1, tensors, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(tmp_path, 1, loaded)
    assert [name for name in tensors if not same_bits(loaded[name], tensors[name])] == []


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        write_safetensors(path, {"x": torch.zeros(1)})
    assert path.read_text() == "precious"


@pytest.mark.parametrize("failing", range(1, 6))  # after the header, after each of three tensors, and at the end
def test_no_error_of_the_disk_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The disk works while more is copied, and the system tells of an error only once."""
    sync, calls = os.fsync, count(1)

    def fail_once(descriptor: int) -> None:
        sync(descriptor)
        if next(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.fsync", fail_once)
    monkeypatch.setattr("megatron.checkpoint.files.SYNC_BYTES", 100)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_safetensors(tmp_path / "file.safetensors", {name: torch.zeros(50) for name in "abc"})


def test_no_error_of_a_thread_that_takes_digests_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(digests: BlockDigests, content: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(BlockDigests, "update", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_safetensors(tmp_path / "file.safetensors", {"a": torch.zeros(50)})
