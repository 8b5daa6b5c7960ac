"""Planning of a save: which rank writes which part of which tensor.

``torch.distributed.checkpoint`` (DCP) gathers what all ranks hold on one of them, the coordinator, and sends each its
share. Here they send columns of numbers instead of DCP's objects: of a model of 405B parameters, 16,384 ranks list 1.6
million boxes (docs/performance.md).
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from megatron.checkpoint.boxes import DividedBox, Divisions, Numbers, boxed, boxes_are_disjoint
from megatron.checkpoint.manifest import SavedTensor, padded
from megatron.checkpoint.safetensors_file import DTYPES

# Who lists a box of a tensor for the coordinator, and who decides which rank writes it:
#
#   a box of one rank                          that rank               nobody needs to
#   replicas whose holders are known           each its share          each holder computes the same division
#   replicas whose holders are not known       every rank              the coordinator (spread_replicas)
#   rows that FSDP divides among ranks         the owner, as one box   every rank writes its own rows

SLICE_BYTES = 16 << 20
"""Replicated boxes are cut into slices of about this size, which are spread over the ranks."""

_DTYPES = tuple(DTYPES.values())
_DTYPE_PLACES = {dtype: place for place, dtype in enumerate(_DTYPES)}
_ITEM_SIZES = np.array([dtype.itemsize for dtype in _DTYPES], np.int64)


@dataclass(frozen=True)
class TensorTable:
    """Global tensors, one per row. Numbers instead of objects: the coordinator receives a table from every rank."""

    names: Sequence[str]
    dtypes: Numbers  # [tensors], places in the list of dtypes
    num_dims: Numbers  # [tensors]
    shapes: Numbers  # [tensors, dims]; a tensor of fewer dims has size 1 in the others

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "TensorTable":
        shapes = [tensor.size() for tensor in tensors.values()]
        num_dims = [len(shape) for shape in shapes]
        return cls(
            tuple(tensors),
            np.array([_DTYPE_PLACES[tensor.dtype] for tensor in tensors.values()], np.int64),
            np.array(num_dims, np.int64),
            _column(shapes, max(num_dims, default=0) or 1, 1),
        )

    @classmethod
    def joined(cls, tables: Sequence["TensorTable"]) -> tuple["TensorTable", list[Numbers]]:
        """All tensors, each once, and the places in them of the rows of each table. Tables agree about a tensor."""
        known: dict[str, int] = {}
        places = [np.array([known.setdefault(name, len(known)) for name in table.names], np.int64) for table in tables]
        dims = max(table.shapes.shape[1] for table in tables)
        facts = np.concatenate(
            [np.column_stack((table.dtypes, table.num_dims, padded(table.shapes, dims, 1))) for table in tables]
        )
        of_row = np.concatenate(places)
        _, first = np.unique(of_row, return_index=True)
        different = np.flatnonzero((facts != facts[first[of_row]]).any(axis=1))
        names = tuple(known)
        assert not len(different), f"ranks disagree about the dtype or the shape of {names[of_row[different[0]]]}"
        return cls(names, facts[first, 0], facts[first, 1], facts[first, 2:]), places


@dataclass(frozen=True)
class BoxTable:
    """Boxes of global tensors, one per row."""

    tensors: TensorTable
    """The tensors of the boxes, and tensors without a box."""
    tensor: Numbers  # [boxes], places in ``tensors``
    offsets: Numbers  # [boxes, dims]; a tensor of fewer dims has offset 0 and size 1 in the others
    sizes: Numbers  # [boxes, dims]
    divisions: Divisions

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], boxes: Sequence[WriteItem], divided: Sequence[tuple[str, DividedBox]] = ()
    ) -> "BoxTable":
        """The table of one rank's ``boxes``, then of its ``divided`` boxes with the names of their tensors."""
        table = TensorTable.of(tensors)
        places = {name: place for place, name in enumerate(table.names)}
        dims = table.shapes.shape[1]
        chunks = [tensor_data(item).chunk for item in boxes]
        names = [*(item.index.fqn for item in boxes), *(name for name, _ in divided)]
        offsets = [*(chunk.offsets for chunk in chunks), *(box.offset for _, box in divided)]
        sizes = [*(chunk.sizes for chunk in chunks), *(box.shape for _, box in divided)]
        divisions = Divisions.joined([Divisions.none(len(boxes)), Divisions.of([box for _, box in divided])])
        tensor = np.array([places[name] for name in names], np.int64)
        return cls(table, tensor, _column(offsets, dims, 0), _column(sizes, dims, 1), divisions)

    @classmethod
    def joined(cls, tables: Sequence["BoxTable"]) -> "BoxTable":
        """The rows of all ``tables``."""
        tensors, places = TensorTable.joined([table.tensors for table in tables])
        dims = tensors.shapes.shape[1]
        return cls(
            tensors,
            np.concatenate([own[table.tensor] for own, table in zip(places, tables)]),
            np.concatenate([padded(table.offsets, dims, 0) for table in tables]),
            np.concatenate([padded(table.sizes, dims, 1) for table in tables]),
            Divisions.joined([table.divisions for table in tables]),
        )

    def nbytes(self) -> Numbers:
        return self.sizes.prod(axis=1) * _ITEM_SIZES[self.tensors.dtypes[self.tensor]]  # [boxes]


def _column(extents: Sequence[Sequence[int]], dims: int, value: int) -> Numbers:
    """``[extents, dims]``, with ``value`` in further dims."""
    rows = [(*extent, *(value,) * (dims - len(extent))) for extent in extents]
    return np.array(rows, np.int64).reshape(len(extents), dims)


class SavePlanner(DefaultSavePlanner):
    """Spreads replicas over the ranks that hold them, and checks that the ranks together hold every element.

    On the coordinator, :attr:`saved` has the chunks of every tensor after the plan; their files are ranks.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rank = rank
        self._listed: list[WriteItem] = []
        self._divided: list[WriteItem] = []
        """This rank's parts of divided boxes."""
        self.saved: dict[str, SavedTensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(boxed(state_dict), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """On every rank: list its boxes, of those with several known holders its share."""
        items = super().create_local_plan().items
        divided = divided_tensors(self.state_dict)
        self._divided = [item for item in items if item.index.fqn in divided]
        others = (item for item in items if item.index.fqn not in divided)
        self._listed = list(own_share(others, known_holders(self.state_dict), self._rank))
        first = [(name, box) for name, boxes in divided.items() for box in boxes if box.owner == self._rank]
        names = {item.index.fqn for item in self._listed} | {name for name, _ in first}
        table = BoxTable.of(named(self.state_dict, names, self._rank), self._listed, first)
        return SavePlan([], planner_data=table)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: assign boxes to ranks, and check them."""
        tables = [plan.planner_data for plan in all_plans]
        table = BoxTable.joined(tables)
        ranks = np.repeat(np.arange(len(tables)), [len(one.tensor) for one in tables])
        parts = spread_replicas(table, ranks, len(tables))
        self.saved = _saved_tensors(table, ranks, parts)
        _check_complete(table, parts)
        # Each rank gets [parts, 3]: the number of the box in its own list, first row and rows. It computes its part of
        # a divided box itself.
        chosen = np.flatnonzero(~table.divisions.is_divided[parts.box])
        owners = ranks[parts.box[chosen]]
        first_box = np.searchsorted(ranks, np.arange(len(tables)))
        own = np.column_stack((parts.box[chosen] - first_box[owners], parts.start[chosen], parts.count[chosen]))
        order = np.argsort(owners, kind="stable")
        by_rank = np.split(own[order], np.searchsorted(owners[order], np.arange(1, len(tables))))
        # DCP sends the metadata to all ranks, of which none needs it.
        return [SavePlan([], planner_data=one) for one in by_rank], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """On every rank: the write items of its share."""
        items = [_cut(self._listed[row], start, count) for row, start, count in new_plan.planner_data.tolist()]
        return replace(new_plan, items=items + self._divided)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """On every rank: the assigned part of a local box, as a view."""
        chunk = tensor_data(write_item).chunk
        tensor: Any = self.state_dict[write_item.index.fqn]
        for whole in tensor.__create_chunk_list__():
            starts = [inner - outer for inner, outer in zip(chunk.offsets, whole.offsets)]
            if all(0 <= at <= most - size for at, size, most in zip(starts, chunk.sizes, whole.sizes)):
                box: Tensor = tensor.__get_tensor_shard__(MetadataIndex(write_item.index.fqn, whole.offsets))
                return box[tuple(slice(at, at + size) for at, size in zip(starts, chunk.sizes))]
        raise AssertionError(f"no box of {write_item.index} here")


def known_holders(tensors: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """The ranks that hold the same boxes, by the names of the tensors for which that is known."""
    known = {name: getattr(tensor, "holders", ()) for name, tensor in tensors.items()}
    return {name: ranks for name, ranks in known.items() if len(ranks) > 1}


def divided_tensors(tensors: Mapping[str, Any]) -> dict[str, Sequence[DividedBox]]:
    """The boxes of those tensors whose rows ranks divide, by name."""
    return {name: tensor.divided for name, tensor in tensors.items() if getattr(tensor, "divided", ())}


def named(tensors: Mapping[str, Any], listed: Collection[str], rank: int) -> dict[str, Tensor]:
    """Tensors that ``rank`` reports to the coordinator: those with a ``listed`` box, and those it must report anyway.

    Every tensor is reported by at least one rank, so that a missing box is an error: by its first holder, by the owner
    of its first divided box, or by all ranks if neither is known.
    """
    first = {name: holders[0] for name, holders in known_holders(tensors).items()}
    first |= {name: boxes[0].owner for name, boxes in divided_tensors(tensors).items()}
    return {name: one for name, one in tensors.items() if name in listed or first.get(name, rank) == rank}


# --- on every rank -----------------------------------------------------------------------------------------


def own_share(items: Iterable[WriteItem], holders: Mapping[str, Sequence[int]], rank: int) -> Iterator[WriteItem]:
    """The boxes that ``rank`` lists: those without known ``holders`` (ranks by tensor), and its share of the others.

    The ranks of a group have the same boxes, so each computes the same division without asking the others.
    """
    groups: dict[tuple[int, ...], list[WriteItem]] = {}
    for item in items:
        if item.index.fqn in holders:
            groups.setdefault(tuple(holders[item.index.fqn]), []).append(item)
        else:
            yield item
    for ranks, boxes in groups.items():
        yield from equal_shares(boxes, len(ranks))[ranks.index(rank)]


def equal_shares(boxes: Iterable[WriteItem], num_ranks: int) -> list[list[WriteItem]]:
    """The parts of ``boxes`` that each of ``num_ranks`` ranks writes, about equally many bytes; whatever the order."""
    parts = []
    for item in boxes:
        sizes = tensor_data(item).chunk.sizes
        parts += [_cut(item, start, count) for start, count in slices(sizes[0] if sizes else 1, _nbytes(item))]
    parts.sort(key=lambda part: (-_nbytes(part), part.index.fqn, tuple(part.index.offset or ())))
    shares: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    # (bytes, place) of every rank
    loads = [(0, place) for place in range(num_ranks)]
    for part in parts:
        load, place = loads[0]
        heapq.heapreplace(loads, (load + _nbytes(part), place))
        shares[place].append(part)
    return shares


def slices(rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a box of ``rows`` along dim 0 into slices of at most :data:`SLICE_BYTES`, or of one row."""
    step = max(1, SLICE_BYTES * rows // max(1, nbytes))
    if step >= rows:
        yield 0, rows
        return
    for row in range(0, rows, step):
        yield row, min(step, rows - row)


def _cut(item: WriteItem, start: int, count: int) -> WriteItem:
    """``count`` rows of a box, from the row ``start`` on."""
    data = tensor_data(item)
    if not data.chunk.sizes or (start, count) == (0, data.chunk.sizes[0]):
        return item
    offsets = torch.Size((data.chunk.offsets[0] + start, *data.chunk.offsets[1:]))
    sizes = torch.Size((count, *data.chunk.sizes[1:]))
    part = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
    return replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=part)


def tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, item
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    data = tensor_data(item)
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize


# --- on the coordinator ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Parts of the boxes of a table, each a range of rows along dim 0 of one of them."""

    box: Numbers  # [parts], rows of the table
    start: Numbers  # [parts], first row of the part in the box
    count: Numbers  # [parts], rows

    def in_table(self, table: BoxTable) -> tuple[Numbers, Numbers]:
        """Offsets and sizes ``[parts, dims]`` of the parts."""
        offsets, sizes = table.offsets[self.box], table.sizes[self.box]
        offsets[:, 0] += self.start
        sizes[:, 0] = self.count
        return offsets, sizes


def spread_replicas(table: BoxTable, ranks: Numbers, num_ranks: int) -> Parts:
    """Assign each box to one of the ``ranks`` that listed it, so that ranks write about equally many bytes.

    ``ranks`` has the rank of each row; the assigned part is one of a row of that rank. Large boxes that several ranks
    listed are first cut into slices, so that no rank writes a whole embedding while its replicas wait.
    """
    nbytes = table.nbytes()
    # An empty box is written only of an empty tensor.
    numels = table.tensors.shapes.prod(axis=1)
    boxes = np.flatnonzero((nbytes > 0) | (numels[table.tensor] == 0))
    keys = (boxes, *table.offsets[boxes].T[::-1], table.tensor[boxes])
    boxes = boxes[np.lexsort(keys)]
    places = np.column_stack((table.tensor[boxes], table.offsets[boxes]))
    is_first = np.concatenate(([True], (places[1:] != places[:-1]).any(axis=1)))[: len(boxes)]
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(boxes)))
    assert not table.divisions.is_divided[boxes[np.repeat(counts > 1, counts)]].any(), "a divided box is replicated"
    single = boxes[starts[counts == 1]]
    single_rows, bytes_by_rank = table.sizes[single, 0], np.zeros(num_ranks, np.int64)
    row_bytes = nbytes[single] // np.maximum(single_rows, 1)
    table.divisions.take(single).add_bytes(bytes_by_rank, ranks[single], single_rows, row_bytes)
    load = bytes_by_rank.tolist()
    replicated: list[tuple[int, int, int, list[int]]] = []
    for first, number in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist()):
        holders = boxes[first : first + number]
        assert (table.sizes[holders] == table.sizes[holders[0]]).all(), (
            table.tensors.names[table.tensor[holders[0]]],
            table.sizes[holders],
        )
        total, rows = int(nbytes[holders[0]]), int(table.sizes[holders[0], 0])
        for start, count in slices(rows, total):
            replicated.append((total * count // max(1, rows), start, count, holders.tolist()))
    chosen = []
    # The largest first: the small ones level the load at the end.
    for size, start, count, rows_of_holders in sorted(replicated, key=lambda part: -part[0]):
        box = min(rows_of_holders, key=lambda row: load[ranks[row]])
        load[ranks[box]] += size
        chosen.append((box, start, count))
    columns = np.array(chosen, np.int64).reshape(len(chosen), 3).T
    return Parts(
        np.concatenate((single, columns[0])),
        np.concatenate((np.zeros(len(single), np.int64), columns[1])),
        np.concatenate((single_rows, columns[2])),
    )


def _saved_tensors(table: BoxTable, ranks: Numbers, parts: Parts) -> dict[str, SavedTensor]:
    """The chunks of every tensor; their files are ranks."""
    of_tensor = table.tensor[parts.box]
    order = np.argsort(of_tensor, kind="stable")
    offsets, sizes = parts.in_table(table)
    borders = np.searchsorted(of_tensor[order], np.arange(len(table.tensors.names) + 1))
    saved, tensors = {}, table.tensors
    columns = tensors.dtypes.tolist(), tensors.num_dims.tolist(), tensors.shapes.tolist(), borders[:-1], borders[1:]
    for name, dtype, dims, shape, first, last in zip(tensors.names, *columns):
        rows = order[first:last]
        saved[name] = SavedTensor(
            _DTYPES[dtype],
            tuple(shape[:dims]),
            offsets[rows, :dims],
            sizes[rows, :dims],
            ranks[parts.box[rows]],
            table.divisions.take(parts.box[rows]),
        )
    return saved


def _check_complete(table: BoxTable, parts: Parts) -> None:
    """Raise ``ValueError`` unless the parts are disjoint and have every element of every tensor."""
    offsets, sizes = parts.in_table(table)
    of_tensor = table.tensor[parts.box]
    found = np.zeros(len(table.tensors.names), np.int64)
    np.add.at(found, of_tensor, sizes.prod(axis=1))
    numels = table.tensors.shapes.prod(axis=1)
    if len(wrong := np.flatnonzero(found != numels)):
        place = wrong[0]
        raise ValueError(
            f"the ranks hold {found[place]} of the {numels[place]} elements of {table.tensors.names[place]}"
        )
    if ((offsets < 0) | (offsets + sizes > table.tensors.shapes[of_tensor])).any():
        raise ValueError("a rank holds a box that is not inside its tensor")
    if not boxes_are_disjoint(offsets, offsets + sizes, of_tensor):
        chosen = ((name, of_tensor == place) for place, name in enumerate(table.tensors.names))
        name = next(name for name, rows in chosen if not boxes_are_disjoint(offsets[rows], (offsets + sizes)[rows]))
        raise ValueError(f"the ranks hold boxes of {name} that overlap without being equal")
