"""Saved by any ranks, loaded by any others, bit for bit; and when one rank fails, all know."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import SyncSaveBackend, load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import MANIFEST, iteration_directory
from megatron.checkpoint.files import WrittenFile, explained
from megatron.checkpoint.finding import find_checkpoint, list_checkpoints
from megatron.checkpoint.manifest import JSON, read_checkpoint
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError
from tests.checkpoint.fault_run import sentence
from tests.checkpoint.models import PARTS, place_of, rank_part
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


def layout(tensor_parallel: int, data_parallel: int, rank: int) -> dict[str, tuple[BoxedTensor, Tensor, Tensor]]:
    """What ``rank`` holds of each tensor: (boxed, its memory, what that memory should be).

    The weights (bf16) are replicated over data parallelism; master weights (fp32) and moments (fp64) are flat
    ranges of one buffer that runs over all parameters, so a range begins and ends anywhere.
    """
    tensor_rank, data_rank = rank % tensor_parallel, rank // tensor_parallel
    held = {}
    infos = [rank_part(name, torch.zeros(shape), tensor_rank, tensor_parallel)[0] for name, shape in PARTS.items()]
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
            _, local = rank_part(info.name, whole, tensor_rank, tensor_parallel)
            expected = local.contiguous() if kind == "model" else local.flatten()[start:stop]
            memory = torch.full_like(expected, -1)
            if kind == "model":
                boxed = BoxedTensor.from_flat_range(info, memory.view(-1), 0)
            else:
                boxed = BoxedTensor.from_flat_range(info, memory, start)
            held[f"{kind}.{info.name}"] = (boxed, memory, expected)
    return held


# --- what the ranks do -------------------------------------------------------------------------------------


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
    return sentence(lambda: load_checkpoint(root, 100, {"model.whole vector": wanted}, control))


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


FAILURES: dict[Callable[[Path, ControlGroup], str], str] = {
    save_where_one_rank_cannot_write: r"Rank 5: Cannot write .*rank_00005.* \(File exists\): .*move it away",
    save_where_nobody_can: r"Rank 0: Cannot write .*Not a directory.*choose another directory",
    load_where_one_rank_is_another_model: r"Rank 3: model.whole vector is \[6\] in the checkpoint but \[7\] in this",
    load_what_was_not_saved: r"^The checkpoint has no a \(nor 1 others\): it is from another model",
    load_from_a_broken_file: r"Rank 6: .*rank_00006.safetensors has 100 bytes instead of",
    save_with_a_hole: r"the ranks hold 7 of the 8 elements of holey",
}
"""What fails on some rank, and the sentence that all ranks say."""


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
    for kind, (part, shape) in product(("model", "master", "moment"), PARTS.items()):
        times = torch.zeros(shape, dtype=torch.int64)
        for chunk in manifest.chunks(f"{kind}.{part}"):
            times[place_of(chunk.offset, chunk.entry.shape)] += 1
        assert (times == 1).all(), (kind, part)
    # Nothing is pickled, such as DCP's .metadata.
    assert {path.name for path in iteration_directory(ranks.root, 100).iterdir()} == {MANIFEST, *manifest.files()}
    assert {name for name in manifest.tensors if name.startswith("rng/")} == {
        f"rng/rank_{rank}" for rank in range(WORLD_SIZE)
    }


def test_ranks_write_about_equally_much(ranks: Ranks) -> None:
    manifest = read_checkpoint(ranks.root, 100)
    written = dict.fromkeys(manifest.files(), 0)
    for name in manifest.tensors:
        for chunk in manifest.chunks(name):
            written[chunk.file.name] += chunk.entry.nbytes
    assert len(written) == WORLD_SIZE
    assert max(written.values()) - min(written.values()) <= SLICE_BYTES


def test_dtensors_and_boxes_read_each_other(ranks: Ranks) -> None:
    assert ranks.found("dtensor") == [[True, True]] * WORLD_SIZE


@pytest.mark.parametrize("failure", FAILURES)
def test_all_ranks_learn_of_a_failure(ranks: Ranks, failure: Callable[[Path, ControlGroup], str]) -> None:
    sentences = ranks.found(failure.__name__)
    assert len(sentences) == WORLD_SIZE and len(set(sentences)) == 1
    assert re.search(FAILURES[failure], str(sentences[0])), sentences[0]


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


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state: dict[str, JSON] = {"loss": 0.1 + 0.2, "flags": {"a": [1, None, True, "é"]}, "big": 2**70}
    save_checkpoint(tmp_path, 3, {"x": torch.zeros(2)}, state)
    assert load_checkpoint(tmp_path, 3, {}) == state


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
    weight = torch.zeros(100)
    load_checkpoint(tmp_path, 5, {"weight": weight})
    assert weight.tolist() == [1.0] * 100


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
