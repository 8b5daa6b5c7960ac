"""The manifest: boxes whose rows ranks divide are the chunks that are listed one by one; damage is refused."""

import json
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint.boxes import BoxedTensor, DividedBox, Divisions, divided_boxes
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import MANIFEST, TRACKER, iteration_directory
from megatron.checkpoint.files import WrittenFile
from megatron.checkpoint.finding import verify_share
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.manifest import (
    Manifest,
    SavedTensor,
    decode_manifest,
    encode_content,
    encode_manifest,
    read_manifest,
)
from megatron.checkpoint.schema import FORMAT_VERSION
from megatron.core.parameter import Box, ParameterInfo, RowDivision, flat_range_boxes
from megatron.core.topology import RankGrid, Topology
from megatron.data.digests import seal
from megatron.errors import CheckpointError
from tests.checkpoint.directories import acquire
from tests.checkpoint.models import Bomb
from tests.rank_pool import RankPool

Chunk = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offset, shape and owner."""


def info_of_sections(*rows: int, width: int = 3, padding: int = 0) -> ParameterInfo:
    """A parameter of fused sections, of which this tensor-parallel rank has the second half of each."""
    boxes, start, top = [], 0, 0
    for count in rows:
        boxes.append(Box((top + count, 0), (start, 0), (count, width)))
        start, top = start + count, top + 2 * count
    return ParameterInfo("x", (top, width), (start + padding, width), tuple(boxes), None, True, True)


def one_by_one(info: ParameterInfo, shards: int, first_rank: int, stride: int) -> set[Chunk]:
    """Every rank's boxes, as it lists them without a division."""
    rows = -(-info.local_shape[0] // shards)
    width, last = info.local_shape[1], info.local_shape[0]
    return {
        (box.global_offset, box.shape, first_rank + part * stride)
        for part in range(shards)
        for box, _, _ in flat_range_boxes(info, min(part * rows, last) * width, min((part + 1) * rows, last) * width)
    }


def saved(boxes: list[DividedBox], shape: tuple[int, ...]) -> SavedTensor:
    dims = len(shape)
    return SavedTensor(
        torch.float32,
        shape,
        np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), dims),
        np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), dims),
        np.array([box.owner for box in boxes], np.int64),
        Divisions.of(boxes),
    )


def chunks_of(tensor: SavedTensor) -> list[Chunk]:
    columns = tensor.offsets.tolist(), tensor.shapes.tolist(), tensor.files.tolist()
    return [(tuple(offset), tuple(shape), file) for offset, shape, file in zip(*columns)]


class Case(NamedTuple):
    """A parameter whose rows ranks ``first_rank``, ``first_rank + stride`` and so on divide."""

    info: ParameterInfo
    shards: int
    first_rank: int
    stride: int

    @property
    def tensor(self) -> SavedTensor:
        division = RowDivision(-(-self.info.local_shape[0] // self.shards), self.first_rank, self.stride)
        return saved(divided_boxes(self.info, division), self.info.global_shape)


infos = st.builds(
    lambda sections, padding: info_of_sections(*sections, padding=padding),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(0, 3),
)
cases = st.builds(Case, infos, st.integers(1, 12), st.integers(0, 3), st.integers(1, 4))


@given(cases)
def test_the_parts_of_divided_boxes_are_those_of_every_rank(case: Case) -> None:
    assert len(case.tensor.files) == len(case.info.boxes)
    found = chunks_of(case.tensor.expanded())
    assert len(found) == len(set(found))
    assert set(found) == one_by_one(*case)


@given(cases, st.tuples(st.integers(0, 60), st.integers(1, 60)), st.tuples(st.integers(0, 3), st.integers(1, 3)))
def test_the_chunks_that_overlap_a_box_are_found(case: Case, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    tensor, starts, stops = case.tensor, (rows[0], columns[0]), (sum(rows), sum(columns))
    expected = {
        (offset, shape, file)
        for offset, shape, file in chunks_of(tensor.expanded())
        if all(start < at + size and at < stop for start, stop, at, size in zip(starts, stops, offset, shape))
    }
    numbers = tensor.overlapping(starts, stops)
    assert len(set(numbers.tolist())) == len(numbers)
    assert set(chunks_of(tensor.expanded(numbers))) == expected


@given(cases)
def test_the_bytes_of_a_file_are_those_of_its_chunks(case: Case) -> None:
    load = np.zeros(case.first_rank + case.shards * case.stride, np.int64)
    case.tensor.add_bytes(load)
    expected = np.zeros_like(load)
    for _, shape, file in chunks_of(case.tensor.expanded()):
        expected[file] += 4 * np.prod(shape)
    assert (load == expected).all()


FILES = [WrittenFile(f"rank_{rank:05d}.safetensors", 100, (f"{rank:032x}",)) for rank in range(6)]
DIVIDED = [DividedBox((0, 0), (7, 3), 1, 3, 2, 2), DividedBox((7, 0), (3, 3), 0, 3, 4, 1)]
"""Rows 0 to 3, 3 to 5 and 5 to 7 in files 1, 3 and 5, and 7 to 10 in file 0."""
WHOLE = SavedTensor(
    torch.float32, (2,), np.zeros((1, 1), np.int64), np.full((1, 1), 2), np.zeros(1, np.int64), Divisions.none(1)
)


def manifest() -> Manifest:
    return Manifest({"model/x": saved(DIVIDED, (10, 3)), "model/y": WHOLE}, FILES, {"iteration": 1})


def test_a_manifest_with_divided_boxes_is_read_as_it_was_written() -> None:
    found = decode_manifest(encode_manifest(manifest()))
    expected = [((0, 0), (3, 3), 1), ((3, 0), (2, 3), 3), ((5, 0), (2, 3), 5), ((7, 0), (3, 3), 0)]
    assert chunks_of(found.tensors["model/x"].expanded()) == expected
    keys = [(chunk.key, chunk.file.name) for chunk in found.chunks("model/x")]
    assert keys[1] == ("model/x@3,0", "rank_00003.safetensors")
    assert "stride" not in json.loads(encode_content(manifest()))["tensors"]["model/y"]["chunks"]


@pytest.mark.parametrize(
    "column, numbers",
    [
        *(("stride", numbers) for numbers in ([3, 1], [-1, 1], [1 << 62, 1], [2])),
        *(("first_rows", [first, 3]) for first in (0, 8, -1)),
        *(("rows", [rows, 4]) for rows in (0, -2, 1, 2.0)),
        *(("file", [file, 0]) for file in (2, -1)),
    ],
)
def test_a_division_into_other_files_or_rows_is_refused(column: str, numbers: list[int]) -> None:
    content = json.loads(encode_content(manifest()))
    content["tensors"]["model/x"]["chunks"][column] = numbers
    with pytest.raises(ValueError):
        decode_manifest(seal("manifest", json.dumps(content)))


@pytest.mark.parametrize("name", ["..", "a/b", "a\0b", ""])
def test_a_file_name_that_is_none_is_refused(name: str) -> None:
    content = json.loads(encode_content(manifest()))
    content["files"] = dict.fromkeys([name], next(iter(content["files"].values())))
    with pytest.raises(ValueError, match="bad file name"):
        decode_manifest(seal("manifest", json.dumps(content)))


def test_a_scalar_is_not_divided() -> None:
    content = json.loads(encode_content(manifest()))
    chunks = {"offset": [], "shape": [], "file": [0], "first_rows": [1], "rows": [1], "stride": [1]}
    content["tensors"]["model/z"] = {"dtype": "F32", "shape": [], "chunks": chunks}
    with pytest.raises(ValueError, match="model/z"):
        decode_manifest(seal("manifest", json.dumps(content)))


@pytest.mark.parametrize("places", [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 3]])
def test_files_that_do_not_follow_each_other_are_listed_one_by_one(places: list[int]) -> None:
    """Where a rank between the owners wrote no file."""
    tensor = saved(DIVIDED, (10, 3))
    expected = [(offset, shape, places[file]) for offset, shape, file in chunks_of(tensor.expanded())]
    assert chunks_of(tensor.in_files(np.array(places)).expanded()) == expected


def save_divided(directory: str, rows: int) -> int:
    """A case for four ranks, of which the last one has no rows; returns the boxes in the manifest."""
    topology = Topology(RankGrid(dp=4), torch.distributed.get_rank(), torch.device("cpu"))
    info = ParameterInfo("x", (rows, 2), (rows, 2), (Box((0, 0), (0, 0), (rows, 2)),), None, True, False)
    per_rank = -(-rows // 4)
    first = min(topology.rank * per_rank, rows)
    mine = torch.arange(2.0 * rows)[2 * first : 2 * min(first + per_rank, rows)]
    tensors: dict[str, torch.Tensor] = {}
    if mine.numel():
        tensors["x"] = BoxedTensor.from_flat_range(info, mine, 2 * first, (), RowDivision(per_rank, 0, 1))
    tensors["own"] = torch.ones(3)
    save_checkpoint(Path(directory), 1, tensors, {"iteration": 1}, topology.control)
    return len(read_manifest(iteration_directory(Path(directory), 1)).tensors["x"].files)


def save_other_rows(directory: str) -> str:
    """A case for two ranks, of which the second one has a row more than the first one says."""
    topology = Topology(RankGrid(dp=2), torch.distributed.get_rank(), torch.device("cpu"))
    info = ParameterInfo("x", (8, 2), (8, 2), (Box((0, 0), (0, 0), (8, 2)),), None, True, False)
    first, last = ((0, 4), (3, 8))[topology.rank]
    mine = torch.zeros(2 * (last - first))
    tensors = {"x": BoxedTensor.from_flat_range(info, mine, 2 * first, (), RowDivision(4, 0, 1))}
    try:
        save_checkpoint(Path(directory), 1, tensors, {"iteration": 1}, topology.control)
    except Exception as error:
        return str(error)
    return ""


def test_a_rank_that_writes_other_rows_than_it_should_have_prevents_the_checkpoint(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    for error in four_ranks.run(save_other_rows, str(tmp_path), world_size=2):
        assert "rank 1 has written 40 bytes of tensors instead of 32" in error
    assert not iteration_directory(tmp_path, 1).exists()


@pytest.mark.parametrize("rows", [4, 5, 6, 9])
def test_ranks_save_what_they_divide(four_ranks: RankPool, tmp_path: Path, rows: int) -> None:
    assert four_ranks.run(save_divided, str(tmp_path), rows, world_size=4) == [1] * 4
    loaded = {"x": torch.zeros(rows, 2), "own": torch.zeros(3)}
    load_checkpoint(tmp_path, 1, loaded)
    assert torch.equal(loaded["x"].flatten(), torch.arange(2.0 * rows))
    assert torch.equal(loaded["own"], torch.ones(3))


# --- damage -------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
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


def test_a_file_with_other_entries_is_refused_by_name(root: Path) -> None:
    """As a faulty writer would leave it: the digests are right."""
    content = only_file(root).read_bytes().replace(b'"F32"', b'"I32"')
    only_file(root).write_bytes(content)
    digests = [xxhash.xxh3_128_hexdigest(content)]
    change = partial(edit, lambda d: d["files"][only_file(root).name].update(xxh3_128=digests))
    manifest_file(root).write_text(change(manifest_file(root).read_text()))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged .*not what the manifest"):
        load(root)
    only_file(root).write_bytes(content.replace(b'"weight@0"', b'"height@0"'))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged"):
        load(root)


def edit(change: Callable[[Any], object], text: str) -> str:
    """The manifest with a change of its content, and the digest of that: what only a fault of ours could write."""
    document = json.loads(text)["manifest"]
    change(document)
    changed = json.dumps(document, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(changed.encode())
    return f'{{"xxh3_128": "{digest}", "manifest": {changed}}}'


def test_the_manifest_text_is_stable(root: Path) -> None:
    text = manifest_file(root).read_text()
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


def test_chunks_that_are_disjoint_and_fill_a_tensor_are_accepted(root: Path) -> None:
    decode_manifest(edit(lambda d: in_two(d, (60, 40), (0, 60)), manifest_file(root).read_text()))


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
def test_a_damaged_manifest_is_refused_by_name(root: Path, damage: Callable[[str], str]) -> None:
    text = damage(manifest_file(root).read_text())
    manifest_file(root).write_text(text)
    for read in (lambda: read_manifest(root / "iter_0000005"), lambda: load(root)):
        with pytest.raises(CheckpointError, match=r"iter_0000005/manifest\.json is damaged"):
            read()


def test_every_flipped_bit_of_a_manifest_is_noticed(root: Path) -> None:
    """200 random bits; the seed is printed on failure. Bits of tensor files are flipped in test_safetensors_file.py."""
    seed = random.SystemRandom().randrange(2**32)
    choose, victim = random.Random(seed), manifest_file(root)
    verify_share(root, 5, rank=0, size=1)
    content = bytearray(victim.read_bytes())
    for _ in range(200):
        place, bit = choose.randrange(len(content)), 1 << choose.randrange(8)
        content[place] ^= bit
        victim.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{victim.name} is damaged"):
            verify_share(root, 5, rank=0, size=1)
            pytest.fail(f"seed {seed}: a flipped bit {bit} of byte {place} was not noticed")
        content[place] ^= bit


@pytest.mark.parametrize("place", [TRACKER, LOCK, f"iter_0000005/{MANIFEST}", "iter_0000005/rank_00000.safetensors"])
def test_a_pickle_in_place_of_a_file_is_never_executed(root: Path, place: str) -> None:
    content = pickle.dumps(Bomb(root / "executed"))
    (root / place).write_bytes(content)
    acquire(root).release()
    with pytest.raises(CheckpointError, match=Path(place).name) if "/" in place else nullcontext():
        load(root)
    assert not (root / "executed").exists()
    # The trap works: Python's own loader walks into it.
    pickle.loads(content)
    assert (root / "executed").exists()
