"""Saved by any ranks, loaded by any others, bit for bit; and when one rank fails, all know."""

import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import SyncSaveBackend, load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import MANIFEST, iteration_directory
from megatron.checkpoint.files import WrittenFile
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.save_plan import BoxTable, GlobalTensor, own_share, spread_replicas, tensor_data
from megatron.core.control import ControlGroup
from megatron.core.parameter import Box, ParameterInfo, columns_box, sharded_boxes
from megatron.errors import CheckpointError
from tests.rank_pool import RankPool

WORLD_SIZE = 8
SLICE_BYTES = 50  # of what is replicated, so that this small model is sliced too
SAVED_AS = (2, 4)  # tensor-parallel x data-parallel
LOADED_AS = [(1, 1), (2, 1), (1, 3), (4, 1), (2, 3), (2, 4), (1, 8)]

# --- a small model in any layout, cut by plain tensor operations -------------------------------------------


def truth(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The value of the global tensor ``name``: bits that no two elements share by chance."""
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(name.encode()))
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def cut(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """The part of ``whole`` that tensor-parallel rank ``rank`` of ``size`` holds."""
    if name == "qkv":
        return torch.cat([section.chunk(size)[rank] for section in whole.split([8, 4, 4])])
    if name == "proj":
        return whole.chunk(size, dim=1)[rank]
    return whole.chunk(size)[rank] if name == "embedding" else whole


def facts(name: str, rank: int, size: int) -> ParameterInfo:
    parts = {
        "embedding": sharded_boxes([12], [6], rank, size),
        "qkv": sharded_boxes([8, 4, 4], [6], rank, size),
        "proj": columns_box(6, 8, rank, size),
        "norm": ((6,), (6,), (Box((0,), (0,), (6,)),)),
    }[name]
    return ParameterInfo(name, *parts, None, True, name != "norm")


NAMES = ["embedding", "qkv", "proj", "norm"]


def layout(tensor_parallel: int, data_parallel: int, rank: int) -> dict[str, tuple[BoxedTensor, Tensor, Tensor]]:
    """What ``rank`` holds of each tensor: (boxed, its memory, what that memory should be).

    The weights (bf16) are replicated over data parallelism; master weights (fp32) and moments (fp64) are flat
    ranges of one buffer that runs over all parameters, so a range begins and ends anywhere.
    """
    tensor_rank, data_rank = rank % tensor_parallel, rank // tensor_parallel
    held = {}
    infos = [facts(name, tensor_rank, tensor_parallel) for name in NAMES]
    share = ceil(sum(torch.Size(info.local_shape).numel() for info in infos) / data_parallel)
    first, last = data_rank * share, (data_rank + 1) * share
    position = 0
    for info in infos:
        size = torch.Size(info.local_shape).numel()
        start = min(max(first - position, 0), size)
        stop = min(max(last - position, 0), size)
        position += size
        for kind, dtype in (("model", torch.bfloat16), ("master", torch.float32), ("moment", torch.float64)):
            whole = truth(f"{kind}.{info.name}", info.global_shape, dtype)
            local = cut(info.name, whole, tensor_rank, tensor_parallel)
            expected = local.contiguous() if kind == "model" else local.flatten()[start:stop]
            memory = torch.full_like(expected, -1)
            if kind == "model":
                boxed = BoxedTensor.from_flat_range(info, memory.view(-1), 0)
            else:
                boxed = BoxedTensor.from_flat_range(info, memory, start)
            held[f"{kind}.{info.name}"] = (boxed, memory, expected)
    return held


def global_shapes() -> dict[str, tuple[int, ...]]:
    return {
        f"{kind}.{name}": facts(name, 0, 1).global_shape for kind in ("model", "master", "moment") for name in NAMES
    }


# --- what the ranks do -------------------------------------------------------------------------------------


def sentence(call: Callable[[], object]) -> str:
    """The message of the :class:`CheckpointError` that ``call`` must raise."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_all(root: Path, control: ControlGroup) -> str:
    rank = control.rank
    tensors: dict[str, Tensor] = {"step": torch.tensor(17), f"rng/rank_{rank}": torch.full((5,), rank)}
    for name, (boxed, memory, expected) in layout(*SAVED_AS, rank).items():
        memory.copy_(expected)
        tensors[name] = boxed
    with mock.patch("megatron.checkpoint.save_plan.SLICE_BYTES", SLICE_BYTES):
        return save_checkpoint(root, 100, tensors, {"iteration": 100, "rank": rank}, control).name


def load_as(root: Path, tensor_parallel: int, data_parallel: int, control: ControlGroup) -> list[str]:
    """The names of the tensors that came back other than they should."""
    rank = control.rank
    held = layout(tensor_parallel, data_parallel, rank)
    step, generator = torch.tensor(0), torch.zeros(5, dtype=torch.int64)
    own = f"rng/rank_{WORLD_SIZE - 1 - rank}"
    tensors = {"step": step, own: generator, **{name: boxed for name, (boxed, _, _) in held.items()}}
    state = load_checkpoint(root, 100, tensors, control)
    wrong = [name for name, (_, memory, expected) in held.items() if not torch.equal(memory, expected)]
    wrong += ["state"] * (state != {"iteration": 100, "rank": 0})
    wrong += ["step"] * (step.item() != 17)
    wrong += [own] * (generator.tolist() != [WORLD_SIZE - 1 - rank] * 5)
    return wrong


def dtensor_and_boxes(root: Path, control: ControlGroup) -> list[bool]:
    """A DTensor, uneven over the ranks, goes into a file and comes back as a DTensor and as boxes."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    whole = truth("uneven", (10, 3), torch.float32)
    root = root / "dtensor"
    save_checkpoint(root, 1, {"uneven": distribute_tensor(whole, mesh, [Shard(0)])}, {}, control)
    sharded, plain = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)]), torch.zeros(10, 3)
    load_checkpoint(root, 1, {"uneven": sharded}, control)
    load_checkpoint(root, 1, {"uneven": plain}, control)
    return [torch.equal(sharded.full_tensor(), whole), torch.equal(plain, whole)]


class SpoiledSave(SyncSaveBackend):
    """Something has the name of the file of rank 5."""

    def begin(self) -> Path:
        directory = super().begin()
        (directory / "rank_00005.safetensors").mkdir()
        return directory


def save_where_one_rank_cannot_write(root: Path, control: ControlGroup) -> str:
    tensors = {f"of/rank_{control.rank}": torch.zeros(3)}
    return sentence(lambda: save_checkpoint(root, 200, tensors, {}, control, SpoiledSave(root, 200)))


def save_where_nobody_can(root: Path, control: ControlGroup) -> str:
    return sentence(
        lambda: save_checkpoint(root / "iter_0000100" / MANIFEST / "x", 1, {"x": torch.zeros(1)}, {}, control)
    )


def load_where_one_rank_is_another_model(root: Path, control: ControlGroup) -> str:
    wanted = torch.zeros(7 if control.rank == 3 else 6, dtype=torch.bfloat16)
    return sentence(lambda: load_checkpoint(root, 100, {"model.norm": wanted}, control))


def load_what_was_not_saved(root: Path, control: ControlGroup) -> str:
    return sentence(lambda: load_checkpoint(root, 100, {"a": torch.zeros(1), "b": torch.zeros(1)}, control))


def load_from_a_broken_file(root: Path, control: ControlGroup) -> str:
    """Only the rank that needs the broken file meets it."""
    broken = root / "broken" / "iter_0000100"
    if control.rank == 0:
        shutil.copytree(root / "iter_0000100", broken)
        os.truncate(broken / "rank_00006.safetensors", 100)
    dist.barrier()
    return sentence(
        lambda: load_checkpoint(root / "broken", 100, {f"rng/rank_{control.rank}": torch.zeros(5).long()}, control)
    )


def save_with_a_hole(root: Path, control: ControlGroup) -> str:
    pieces = [] if control.rank == 4 else [((control.rank,), torch.zeros(1))]
    boxed = BoxedTensor.from_boxes((WORLD_SIZE,), torch.float32, pieces)
    try:
        save_checkpoint(root, 300, {"holey": boxed}, {}, control)
    except RuntimeError as error:
        return str(error)
    return "no error"


FAILURES = [
    save_where_one_rank_cannot_write,
    save_where_nobody_can,
    load_where_one_rank_is_another_model,
    load_what_was_not_saved,
    load_from_a_broken_file,
    save_with_a_hole,
]


def work(root: Path) -> dict[str, object]:
    """All that the ranks do, one after the other, and what each found."""
    rank = dist.get_rank()
    control = ControlGroup(range(WORLD_SIZE), rank)
    found: dict[str, object] = {"save": save_all(root, control)}
    for tensor_parallel, data_parallel in LOADED_AS:
        size = tensor_parallel * data_parallel
        # Groups that do not begin with rank 0, where they can.
        first = min(1, WORLD_SIZE - size)
        # All ranks create it: ranks that are in several groups would otherwise count other groups than the rest.
        process_group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            group = ControlGroup(range(first, first + size), rank)
            group.process_group = process_group
            found[f"{tensor_parallel}x{data_parallel}"] = load_as(root, tensor_parallel, data_parallel, group)
    found["dtensor"] = dtensor_and_boxes(root, control)
    for failure in FAILURES:
        found[failure.__name__] = failure(root, control)
    return found


@dataclass(frozen=True)
class Ranks:
    """Eight ranks that have saved, loaded and failed in a directory."""

    root: Path
    records: list[dict[str, object]]

    def found(self, what: str) -> list[object]:
        """What each rank that took part found."""
        return [record[what] for record in self.records if what in record]


@pytest.fixture(scope="module")
def ranks(sixteen_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    root = tmp_path_factory.mktemp("ranks")
    return Ranks(root, sixteen_ranks.run(work, root, world_size=WORLD_SIZE))


# --- ranks together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor_parallel", "data_parallel"), LOADED_AS)
def test_any_layout_loads_what_another_saved(ranks: Ranks, tensor_parallel: int, data_parallel: int) -> None:
    assert ranks.found(f"{tensor_parallel}x{data_parallel}") == [[]] * (tensor_parallel * data_parallel)


def test_every_element_is_on_disk_once(ranks: Ranks) -> None:
    manifest = read_checkpoint(ranks.root, 100)
    for name, shape in global_shapes().items():
        times = torch.zeros(shape, dtype=torch.int64)
        for chunk in manifest.chunks(name):
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape))
            times[place] += 1
        assert (times == 1).all(), name
    # Nothing is pickled, such as DCP's .metadata.
    assert {path.name for path in iteration_directory(ranks.root, 100).iterdir()} == {MANIFEST, *manifest.files()}
    assert {name for name in manifest.tensors if name.startswith("rng/")} == {
        f"rng/rank_{rank}" for rank in range(WORLD_SIZE)
    }


def test_ranks_write_about_equally_much(ranks: Ranks) -> None:
    manifest = read_checkpoint(ranks.root, 100)
    written = dict.fromkeys(manifest.files(), 0)
    for name, tensor in manifest.tensors.items():
        for chunk in manifest.chunks(name):
            written[chunk.file.name] += torch.Size(chunk.shape).numel() * tensor.dtype.itemsize
    assert len(written) == WORLD_SIZE
    assert max(written.values()) - min(written.values()) <= SLICE_BYTES


def test_dtensors_and_boxes_read_each_other(ranks: Ranks) -> None:
    assert ranks.found("dtensor") == [[True, True]] * WORLD_SIZE


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (save_where_one_rank_cannot_write, r"Rank 5: Cannot write .*rank_00005.* \(File exists\): .*move it away"),
        (save_where_nobody_can, r"Rank 0: Cannot write .*Not a directory.*choose another directory"),
        (load_where_one_rank_is_another_model, r"Rank 3: model.norm is \[6\] in the checkpoint but \[7\] in this"),
        (load_what_was_not_saved, r"^The checkpoint has no a \(nor 1 others\): it is from another model"),
        (load_from_a_broken_file, r"Rank 6: .*rank_00006.safetensors has 100 bytes instead of"),
        (save_with_a_hole, r"the ranks hold 7 of the 8 elements of holey"),
    ],
)
def test_all_ranks_learn_of_a_failure(ranks: Ranks, failure: Callable[[Path, int], str], told: str) -> None:
    sentences = ranks.found(failure.__name__)
    assert len(sentences) == WORLD_SIZE
    assert len(set(sentences)) == 1
    assert isinstance(sentences[0], str)
    assert re.search(told, sentences[0]), sentences[0]


def test_a_failed_save_leaves_nothing_behind(ranks: Ranks) -> None:
    assert list_checkpoints(ranks.root) == [100]
    assert [path.name for path in ranks.root.iterdir() if path.name.startswith(".")] == []
    assert (ranks.root / "latest_checkpointed_iteration.txt").read_text() == "100"


# --- one process -------------------------------------------------------------------------------------------


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    expected = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    save_checkpoint(tmp_path, 1, dict(linear.named_parameters()), {})
    with torch.no_grad():
        linear.weight.zero_()
    load_checkpoint(tmp_path, 1, dict(linear.named_parameters()))
    assert torch.equal(linear.weight, expected["weight"])
    assert linear.weight.requires_grad and linear.weight.grad_fn is None


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_floating_point_is_converted(tmp_path: Path, saved: torch.dtype, wanted: torch.dtype) -> None:
    value = torch.linspace(-3, 3, 50, dtype=torch.float64).to(saved)
    save_checkpoint(tmp_path, 1, {"x": value}, {})
    loaded = torch.zeros(50, dtype=wanted)
    load_checkpoint(tmp_path, 1, {"x": loaded})
    assert torch.equal(loaded, value.to(wanted))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"x": torch.zeros(4, 2)}, r"x is \[2, 4\] in the checkpoint but \[4, 2\] in this model: use the flags"),
        ({"x": torch.zeros(2, 4).int()}, r"x is torch.float32 in the checkpoint but torch.int32 in this model"),
        ({"x": torch.zeros(8), "y": torch.zeros(1)}, r"but \[8\] in this model \(and 1 others differ\)"),
        ({"z": torch.zeros(1)}, r"The checkpoint has no z: it is from another model"),
    ],
)
def test_another_model_is_refused_with_the_difference(tmp_path: Path, wanted: dict[str, Tensor], told: str) -> None:
    save_checkpoint(tmp_path, 1, {"x": torch.ones(2, 4), "y": torch.ones(5)}, {})
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path, 1, wanted)
    with pytest.raises(CheckpointError, match="iter_0000002 is not a checkpoint"):
        load_checkpoint(tmp_path, 2, wanted)


TWICE = [((0,), torch.zeros(2)), ((1,), torch.zeros(2))]
"""As many elements as the tensor, but some of them twice."""


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (BoxedTensor.from_boxes((3,), torch.float32, []), "of x"),
        (BoxedTensor.from_boxes((3,), torch.float32, TWICE[:1]), "of x"),
        (BoxedTensor.from_boxes((4,), torch.float32, TWICE), "boxes of x that overlap"),
        (3, "int"),
    ],
    ids=["no rank has any of it", "a part is missing", "overlap", "no tensor"],
)
def test_what_is_not_a_whole_tensor_is_not_saved(tmp_path: Path, tensor: Tensor, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        save_checkpoint(tmp_path, 1, {"fine": torch.zeros(3), "x": tensor}, {})
    assert os.listdir(tmp_path) == []


def test_pieces_may_come_in_any_order(tmp_path: Path) -> None:
    memory = torch.arange(6.0)
    pieces = [((4,), memory[4:]), ((0,), memory[:2]), ((2,), memory[2:4])]
    save_checkpoint(tmp_path, 1, {"x": BoxedTensor.from_boxes((6,), torch.float32, pieces)}, {})
    loaded = torch.zeros(6)
    load_checkpoint(tmp_path, 1, {"x": loaded})
    assert torch.equal(loaded, memory)


def test_an_interrupt_stays_one_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(SyncSaveBackend):
        def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
            super().write(path, tensors)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, {"x": torch.zeros(3)}, {}, saving=Interrupted(tmp_path, 1))
    assert os.listdir(tmp_path) == []


# --- who writes what ---------------------------------------------------------------------------------------


def listed(tensors: dict[str, Tensor]) -> tuple[BoxTable, list[WriteItem]]:
    """What a rank with these tensors lists."""
    boxed = {
        name: tensor if isinstance(tensor, BoxedTensor) else BoxedTensor.from_whole(tensor)
        for name, tensor in tensors.items()
    }
    items = [item for name, tensor in boxed.items() for item in tensor.__create_write_items__(name, tensor)]
    facts = [GlobalTensor(name, tensor.dtype, tuple(tensor.size())) for name, tensor in boxed.items()]
    return BoxTable.of(facts, items), items


def parts_of(*ranks: dict[str, Tensor]) -> list[list[int]]:
    """The bytes of the parts that each rank writes."""
    tables = [listed(tensors)[0] for tensors in ranks]
    table = BoxTable.joined(tables)
    owners = np.repeat(np.arange(len(tables)), [len(one.tensor) for one in tables])
    parts = spread_replicas(table, owners, int(owners.max()) + 1)
    _, sizes = parts.in_table(table)
    tensors = list(table.tensors)
    found: list[list[int]] = [[] for _ in ranks]
    for box, shape in zip(parts.box, sizes):
        found[owners[box]].append(int(shape.prod()) * tensors[table.tensor[box]].dtype.itemsize)
    return found


def bytes_of(*ranks: dict[str, Tensor]) -> list[int]:
    return [sum(parts) for parts in parts_of(*ranks)]


def test_replicas_go_first_to_the_ranks_with_little_of_their_own() -> None:
    replicated = {f"layer_{number}": torch.zeros(100) for number in range(6)}
    ranks = [
        {**replicated, "mine": torch.zeros(300)},
        replicated,
        {"only_here": torch.zeros(10), **replicated},
    ]
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
