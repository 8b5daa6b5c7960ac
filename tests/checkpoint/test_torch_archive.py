"""Files of ``torch.save`` and of DCP are read without unpickling, as torch reads them, or refused."""

import io
import pickle
import random
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from megatron.checkpoint.megatron_lm.torch_archive import Range, TorchArchive, read_rows
from megatron.checkpoint.megatron_lm.torch_dist import TorchDistCheckpoint
from megatron.errors import CheckpointError
from tests.checkpoint.models import ITERATION, Bomb, unpack_fixtures
from tests.messages import assert_helpful

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
WHERE = "/model/__0_0.distcp"


def saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def archive_of(content: bytes, before: bytes = b"", after: bytes = b"") -> tuple[io.BytesIO, TorchArchive]:
    file = io.BytesIO(before + content + after)
    return file, TorchArchive(file, Range(len(before), len(content)), WHERE)


def rows_of(content: bytes, rows: slice, **around: bytes) -> Tensor:
    file, archive = archive_of(content, **around)
    return read_rows(file, archive.tensor(archive.value()), rows, WHERE)


def refusal(content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        rows_of(content, slice(0, 1))
    assert_helpful(str(caught.value), WHERE)
    return str(caught.value)


def replaced(content: bytes, name: str, new: bytes, **how: Any) -> bytes:
    """The archive with another content of one of its members."""
    source, target = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as copy:
        for member in source.namelist():
            is_changed = member.partition("/")[2] == name
            copy.writestr(member, new if is_changed else source.read(member), **(how if is_changed else {}))
    return target.getvalue()


# --- tensors -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_are_those_that_torch_saved(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    tensor = torch.randint(0, 2, shape).to(dtype)
    if data.draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if data.draw(st.booleans()):
        tensor = tensor[len(tensor) // 2 :]
    if data.draw(st.booleans()) and tensor.dtype.is_floating_point:
        tensor = torch.nn.Parameter(tensor)
    first = data.draw(st.integers(0, len(tensor)))
    last = data.draw(st.integers(first, len(tensor)))
    around = {"before": b"x" * data.draw(st.integers(0, 9)), "after": b"PK" * data.draw(st.integers(0, 9))}
    found = rows_of(saved(tensor), slice(first, last), **around)
    assert found.dtype == dtype
    assert found.shape == tensor[first:last].shape
    assert torch.equal(found.to(torch.float64), tensor[first:last].detach().to(torch.float64))


def test_an_archive_without_checksums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        content = saved(torch.arange(4))
    finally:
        torch.serialization.set_crc32_options(True)
    assert rows_of(content, slice(1, 3)).tolist() == [1, 2]


def test_a_part_of_a_tensor_takes_the_memory_of_the_part(tmp_path: Path) -> None:
    torch.save(torch.zeros(40_000, 256), tmp_path / "large")  # 40 MB
    with (tmp_path / "large").open("rb") as file:
        tracemalloc.start()
        try:
            archive = TorchArchive(file, Range(0, (tmp_path / "large").stat().st_size), WHERE)
            read_rows(file, archive.tensor(archive.value()), slice(30_000, 30_010), WHERE)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16e6


# --- damage --------------------------------------------------------------------------------------------------


def test_other_archives_than_those_of_torch_are_refused() -> None:
    content = saved(torch.zeros(1000))
    packed = replaced(content, "data/0", b"\0" * 4000, compress_type=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(packed)
    assert "big-endian" in refusal(replaced(content, "byteorder", b"big"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00/"), "not a number"),
        (lambda text: text.replace(b"X\x01\x00\x00\x000", b"X\x0a\x00\x00\x00../../etc/"), "not a number"),
        (lambda text: text.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"), "lacks 'data/7'"),
        (lambda text: text.replace(b"K\x06", b"K\x07"), "outside of its storage"),
        (lambda text: text.replace(b"K\x06", b"J\xff\xff\xff\x7f"), "outside of its storage"),
        (lambda text: text.replace(b"K\x06", b"J\xff\xff\xff\xff"), "unknown type"),
        (lambda text: text.replace(b"FloatStorage", b"DoubleStorage"), "outside of its storage"),
        (lambda text: text.replace(b"K\x02K\x03\x86", b"K\x02J\xff\xff\xff\x7f\x86"), "outside of its storage"),
        (lambda text: text.replace(b"K\x02K\x03\x86", b"K\x02J\xff\xff\xff\xff\x86"), "not made of numbers"),
        (lambda text: text.replace(b"K\x03K\x01\x86", b"K\x03J\xff\xff\x00\x00\x86"), "outside of its storage"),
        (lambda text: text.replace(b"K\x03K\x01\x86", b"K\x03\x85"), "its shape is wrong"),
        (lambda text: text.replace(b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem"), "refers to os.system"),
        (lambda text: text.replace(b"torch\nFloatStorage", b"posix\nsystem"), "refers to posix.system"),
        (lambda text: text.replace(b"torch\nFloatStorage", b"torch\nfloat32"), "unknown type"),
        (lambda text: b"\x80\x02N.", "not a plain tensor"),
        (lambda text: text[:-1], "not a readable pickle"),
    ],
)
def test_a_pickle_that_lies_is_refused(change: Callable[[bytes], bytes], words: str) -> None:
    content = saved(torch.arange(6.0).view(2, 3))
    text = zipfile.ZipFile(io.BytesIO(content)).read("archive/data.pkl")
    assert change(text) != text
    assert words in refusal(replaced(content, "data.pkl", change(text)))


@pytest.mark.parametrize("field", [42, 46], ids=["offset of the local header", "size"])
def test_an_entry_outside_of_the_archive_is_refused(field: int) -> None:
    content = bytearray(saved(torch.zeros(1)))
    position = content.find(b"PK\1\2")
    start = field if field == 42 else 20
    while position >= 0:
        content[position + start : position + start + 4] = struct.pack("<I", 1 << 30)
        position = content.find(b"PK\1\2", position + 4)
    refusal(bytes(content))


# --- the directory -------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return unpack_fixtures(tmp_path) / "llama_tp2_pp2" / ITERATION


def read_all(directory: Path) -> dict[str, Tensor]:
    checkpoint = TorchDistCheckpoint(directory)
    checkpoint.common()
    return {
        name: checkpoint.read(tensor.rows(0)[()], 0, tensor.shape[0]) for name, tensor in checkpoint.tensors.items()
    }


def metadata_of(directory: Path) -> Metadata:
    found = pickle.loads((directory / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(directory)
    assert_helpful(str(caught.value), str(directory))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_are_those_that_dcp_reads(directory: Path) -> None:
    found = read_all(directory)
    wanted = {
        name: torch.empty(described.size)
        for name, described in metadata_of(directory).state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    load(wanted, storage_reader=FileSystemReader(directory), no_dist=True)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp", "metadata.json"])
def test_damaged_files_are_refused_or_harmless(name: str, directory: Path) -> None:
    path, wanted = directory / name, read_all(directory)
    content, choose = path.read_bytes(), random.Random(2)
    for size in (*range(0, len(content), max(1, len(content) // 40)), len(content) - 1):
        path.write_bytes(content[:size])
        refused(directory)
    for _ in range(120):
        damaged = bytearray(content)
        damaged[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            found = read_all(directory)
        except CheckpointError as error:
            assert_helpful(str(error), "")
        else:
            # .metadata has no checksum: a flipped byte may give a tensor another name.
            assert name == ".metadata" or all(torch.equal(found[one], wanted[one]) for one in wanted)
    path.unlink()
    refused(directory)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../outside.distcp", "is not the name of a file"),
        ("/etc/passwd", "is not the name of a file"),
        ("a/b.distcp", "is not the name of a file"),
        ("common.pt", "is not the name of a file"),
        ("__9_9.distcp", "No such file"),
    ],
)
def test_a_file_elsewhere_is_not_opened(file: str, words: str, directory: Path) -> None:
    shutil.copy(directory / "__0_0.distcp", directory.parent / "outside.distcp")
    metadata = metadata_of(directory)
    for info in metadata.storage_data.values():
        info.relative_path = file
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert words in refused(directory)


@pytest.mark.parametrize(
    ("offsets", "sizes", "words"),
    [
        ([(0, 0), (2, 0)], [(2, 3), (1, 3)], "do not cover it once"),
        ([(0, 0), (1, 0)], [(2, 3), (2, 3)], "do not cover it once"),
        ([(0, 0), (2, 0)], [(2, 3), (2, 4)], "do not cover it once"),
        ([(0, 0), (2,)], [(2, 3), (2,)], "other dims"),
        ([(0, 0), (2, 0)], [(2, 3), (2**63, 3)], "impossible size"),
        ([(0, 0), (2, 0)], [(2, 3), (2**60, 3)], "larger than its archive"),
        ([(0, 0), (2, 0)], [(2, 3), (-2, 3)], "not made of numbers"),
        ([(0, 0), (2, 0)], [(2, 3), (2.0, 3)], "not made of numbers"),
    ],
)
def test_chunks_that_do_not_tile_a_tensor_are_refused(
    offsets: list[tuple[int, ...]], sizes: list[tuple[Any, ...]], words: str, directory: Path
) -> None:
    metadata = metadata_of(directory)
    info = next(iter(metadata.storage_data.values()))
    chunks = [ChunkStorageMetadata(offset, size) for offset, size in zip(offsets, sizes, strict=True)]  # type: ignore[arg-type]
    metadata.state_dict_metadata["x"] = TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks)
    for offset in offsets:
        metadata.storage_data[MetadataIndex("x", torch.Size(offset))] = info
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert words in refused(directory)


def test_a_chunk_of_another_shape_than_described_is_refused(directory: Path) -> None:
    metadata = metadata_of(directory)
    described = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    assert isinstance(described, TensorStorageMetadata)
    described.properties.dtype = torch.float16
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "differs from .metadata" in refused(directory)


@pytest.mark.parametrize("name", ["common.pt", ".metadata"])
def test_a_pickle_that_would_run_a_command_is_refused(name: str, directory: Path, tmp_path: Path) -> None:
    content = {"args": Bomb(tmp_path / "mark")}
    (directory / name).write_bytes(saved(content) if name == "common.pt" else pickle.dumps(content))
    assert "nothing was imported or executed" in refused(directory)
    assert not (tmp_path / "mark").exists()
