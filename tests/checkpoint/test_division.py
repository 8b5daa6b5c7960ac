"""Boxes whose rows ranks divide, listed once: the same chunks as listed one by one."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import BoxedTensor, DividedBox, Divisions, divided_boxes
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import iteration_directory
from megatron.checkpoint.files import WrittenFile
from megatron.checkpoint.manifest import (
    Manifest,
    SavedTensor,
    decode_manifest,
    encode_content,
    encode_manifest,
    read_manifest,
)
from megatron.core.parameter import Box, ParameterInfo, RowDivision, flat_range_boxes
from megatron.core.topology import RankGrid, Topology
from megatron.data.digests import seal
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
WHOLE = SavedTensor.undivided(
    torch.float32, (2,), np.zeros((1, 1), np.int64), np.full((1, 1), 2), np.zeros(1, np.int64)
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
        ("stride", [3, 1]),
        ("stride", [-1, 1]),
        ("stride", [1 << 62, 1]),
        ("stride", [2]),
        ("first_rows", [0, 3]),
        ("first_rows", [8, 3]),
        ("first_rows", [-1, 3]),
        ("rows", [0, 4]),
        ("rows", [-2, 4]),
        ("rows", [1, 4]),
        ("rows", [2.0, 4]),
        ("file", [2, 0]),
        ("file", [-1, 0]),
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
