"""What lies on disk: readable by others, checked when read, and never code."""

import errno
import json
import os
import pickle
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.checkpointing import SyncSaveBackend, load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import MANIFEST, TRACKER
from megatron.checkpoint.files import explained
from megatron.checkpoint.finding import find_checkpoint, verify_share
from megatron.checkpoint.lock import LOCK, acquire
from megatron.checkpoint.manifest import JSON, decode_manifest, encode_manifest, read_manifest
from megatron.checkpoint.safetensors_file import DTYPES, write_safetensors
from megatron.checkpoint.schema import FORMAT_VERSION
from megatron.data.digests import BlockDigests
from megatron.errors import CheckpointError
from tests.checkpoint.models import Bomb


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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root with one checkpoint, of iteration 5."""
    save_checkpoint(tmp_path, 5, {"weight": torch.arange(100.0)}, {"iteration": 5})
    return tmp_path


def load(root: Path) -> Tensor:
    weight = torch.zeros(100)
    load_checkpoint(root, 5, {"weight": weight})
    return weight


def only_file(root: Path) -> Path:
    return root / "iter_0000005" / "rank_00000.safetensors"


def manifest_file(root: Path) -> Path:
    return root / "iter_0000005" / MANIFEST


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


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state: dict[str, JSON] = {"loss": 0.1 + 0.2, "flags": {"a": [1, None, True, "é"]}, "big": 2**70}
    save_checkpoint(tmp_path, 3, {"x": torch.zeros(2)}, state)
    assert load_checkpoint(tmp_path, 3, {}) == state


def test_a_file_with_other_entries_is_refused_by_name(saved: Path) -> None:
    """As a faulty writer would leave it: the digests are right."""
    content = only_file(saved).read_bytes().replace(b'"F32"', b'"I32"')
    only_file(saved).write_bytes(content)
    digests = [xxhash.xxh3_128_hexdigest(content)]
    change = partial(edit, lambda d: d["files"][only_file(saved).name].update(xxh3_128=digests))
    manifest_file(saved).write_text(change(manifest_file(saved).read_text()))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged .*not what the manifest"):
        load(saved)
    only_file(saved).write_bytes(content.replace(b'"weight@0"', b'"height@0"'))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged"):
        load(saved)


def edit(change: Callable[[Any], object], text: str) -> str:
    """The manifest with a change of its content, and the digest of that: what only a fault of ours could write."""
    document = json.loads(text)["manifest"]
    change(document)
    changed = json.dumps(document, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(changed.encode())
    return f'{{"xxh3_128": "{digest}", "manifest": {changed}}}'


def test_the_manifest_text_is_stable(saved: Path) -> None:
    text = manifest_file(saved).read_text()
    assert encode_manifest(decode_manifest(text)) == text == edit(lambda document: None, text)


def chunks(document: Any) -> Any:
    """The columns of the only chunk."""
    return document["tensors"]["weight"]["chunks"]


def record(document: Any) -> Any:
    return document["files"]["rank_00000.safetensors"]


def in_two(document: Any, *ranges: tuple[int, int]) -> None:
    """Cut the only chunk in two of such offsets and lengths."""
    starts, lengths = zip(*ranges)
    chunks(document).update(offset=[*starts], shape=[*lengths], file=[0] * len(ranges))


def test_chunks_that_are_disjoint_and_fill_a_tensor_are_accepted(saved: Path) -> None:
    decode_manifest(edit(lambda d: in_two(d, (60, 40), (0, 60)), manifest_file(saved).read_text()))


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
    "no tensors": partial(edit, lambda d: d.pop("tensors")),
    "a newer format": partial(edit, lambda d: d.update(format_version=FORMAT_VERSION + 1)),
    "another digest": lambda text: text.replace(text[14:46], "0" * 32),
    "another number": lambda text: text.replace('"bytes":', '"bytes":1'),
    "state is a list": partial(edit, lambda d: d.update(state=[])),
    "unknown dtype": partial(edit, lambda d: d["tensors"]["weight"].update(dtype="F31")),
    "a chunk twice": partial(edit, lambda d: in_two(d, (0, 50), (0, 50))),
    "chunks that overlap": partial(edit, lambda d: in_two(d, (0, 60), (40, 40))),
    "a digest too few": partial(edit, lambda d: record(d).update(xxh3_128=[])),
    "no block size": partial(edit, lambda d: record(d).update(block_bytes=0)),
    "a hole": partial(edit, lambda d: chunks(d).update(shape=[99])),
    "out of bounds": partial(edit, lambda d: chunks(d).update(offset=[1])),
    "negative": partial(edit, lambda d: chunks(d).update(offset=[-1])),
    "shape of strings": partial(edit, lambda d: chunks(d).update(shape=["100"])),
    "other rank": partial(edit, lambda d: chunks(d).update(offset=[0, 0])),
    "huge number": partial(edit, lambda d: d["tensors"]["weight"].update(shape=[10**40])),
    "fraction": partial(edit, lambda d: chunks(d).update(offset=[0.5])),
    "no file": partial(edit, lambda d: chunks(d).update(file=[])),
    "a file before the first": partial(edit, lambda d: chunks(d).update(file=[-1])),
    "a huge offset": partial(edit, lambda d: chunks(d).update(offset=[(1 << 63) - 1])),
    "nested columns": partial(edit, lambda d: chunks(d).update(offset=[[0]])),
    "unlisted file": partial(edit, lambda d: chunks(d).update(file=[1])),
    "file elsewhere": lambda text: text.replace("rank_00000.safetensors", "../rank_00000.safetensors"),
    "deeply nested": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_manifest_is_refused_by_name(saved: Path, damage: Callable[[str], str]) -> None:
    text = damage(manifest_file(saved).read_text())
    manifest_file(saved).write_text(text)
    for read in (lambda: read_manifest(saved / "iter_0000005"), lambda: load(saved)):
        with pytest.raises(CheckpointError, match=r"iter_0000005/manifest\.json is damaged"):
            read()


def test_every_flipped_bit_of_a_manifest_is_noticed(saved: Path) -> None:
    """200 random bits; the seed is printed on failure. Bits of tensor files are flipped in test_verified_file.py."""
    seed = random.SystemRandom().randrange(2**32)
    choose, victim = random.Random(seed), manifest_file(saved)
    verify_share(saved, 5, rank=0, size=1)
    content = bytearray(victim.read_bytes())
    for _ in range(200):
        place, bit = choose.randrange(len(content)), 1 << choose.randrange(8)
        content[place] ^= bit
        victim.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{victim.name} is damaged"):
            verify_share(saved, 5, rank=0, size=1)
            pytest.fail(f"seed {seed}: a flipped bit {bit} of byte {place} was not noticed")
        content[place] ^= bit


@pytest.mark.parametrize("same_size", [False, True])
@pytest.mark.parametrize("victim", [only_file, manifest_file])
def test_a_pickle_in_place_of_a_file_is_never_executed(
    saved: Path, victim: Callable[[Path], Path], same_size: bool
) -> None:
    mark = saved / "executed"
    content = pickle.dumps(Bomb(mark))
    size = victim(saved).stat().st_size
    victim(saved).write_bytes(content.ljust(size, b"\0") if same_size else content)
    with pytest.raises(CheckpointError, match=victim(saved).name):
        load(saved)
    assert not mark.exists()
    # The trap works: Python's own loader walks into it.
    pickle.loads(content)
    assert mark.exists()


@pytest.mark.parametrize("name", [TRACKER, LOCK])
def test_a_pickle_in_place_of_a_tracker_or_a_lock_is_never_executed(saved: Path, name: str) -> None:
    (saved / name).write_bytes(pickle.dumps(Bomb(saved / "executed")))
    acquire(saved).release()
    assert find_checkpoint(saved) == 5
    assert not (saved / "executed").exists()


def test_a_state_that_is_not_json_fails_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not JSON serializable"):
        save_checkpoint(tmp_path / "root", 1, {"x": torch.zeros(1)}, {"path": Path()})  # type: ignore[dict-item]
    assert not (tmp_path / "root").exists()
    assert find_checkpoint(tmp_path / "root") is None


def test_the_coordinator_is_told_of_a_complete_checkpoint_before_anything_else_can_fail(tmp_path: Path) -> None:
    class RankEnds(BaseException):
        pass

    def end() -> None:
        assert find_checkpoint(tmp_path) is not None
        raise RankEnds

    saving = SyncSaveBackend(tmp_path, 5, on_commit=end)
    with pytest.raises(RankEnds):
        save_checkpoint(tmp_path, 5, {"weight": torch.ones(100)}, {}, saving=saving)
    assert load(tmp_path).tolist() == [1.0] * 100


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "access"),
        (errno.EROFS, "choose a directory that can be written"),
        (errno.EIO, "file system"),
    ],
)
def test_errors_of_the_system_name_the_path_and_the_remedy(code: int, remedy: str) -> None:
    with pytest.raises(CheckpointError, match=f"Cannot write here .*{os.strerror(code)}.*{remedy}"):
        with explained("write", Path("here")):
            raise OSError(code, os.strerror(code))
