"""Data parallelism of dense and expert parameters, in every folding as in one process."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ShardingStrategy
from megatron.core.data_parallel.sharing import ModelSharing, Sharing
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.parameter import ParameterInfo
from megatron.training.checkpoints.tensors import model_tensors, optimizer_tensors
from tests.parallel.expert_toy import Folding, Record, ToyRun, accumulate, build_toy, run_folding, train_toy
from tests.parallel.layout_run import assemble
from tests.parallel.test_resharding import SAVED
from tests.parallel.test_resharding import differences as not_as_saved
from tests.rank_pool import RankPool

STEPS = 3
SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.9, weight_decay=0.1, clip_grad=0.5)
ADAM = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)
TOLERANCE = 1e-11

FOLDINGS = {
    "ep4": Folding(dp=4, ep=4),
    "ep2 edp2": Folding(dp=4, ep=2),
    "edp4": Folding(dp=4),
    "etp2 of dp4": Folding(dp=4, etp=2),
    "tp2 without etp": Folding(tp=2, dp=2),
    "tp2 ep2": Folding(tp=2, dp=2, ep=2),
    "tp2 etp2": Folding(tp=2, dp=2, etp=2),
    "tp2 etp2 ep2": Folding(tp=2, dp=2, etp=2, ep=2),
    "tp4, dense without data parallelism": Folding(tp=4, ep=2),
    "cp2 ep2": Folding(cp=2, dp=2, ep=2),
    "pp2 ep2": Folding(pp=2, dp=2, ep=2),
    "pp2 edp2": Folding(pp=2, dp=2),
    "dp first": Folding(tp=2, dp=2, ep=2, order="dp-tp-cp-ep-pp"),
}
FSDP = Folding(dp=4, ep=2, strategy="optim_grads_params")
STRATEGIES: tuple[ShardingStrategy, ...] = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@cache
def one_process(config: OptimizerConfig) -> Record:
    return run_folding(Folding(), config, STEPS)


def differences(found: list[Record], config: OptimizerConfig) -> set[str]:
    """What differs from one process."""
    expected = one_process(config)
    wrong: set[str] = set()
    for step in range(STEPS):
        for kind in ("gradients", "weights"):
            whole = assemble(getattr(expected, kind)[step])
            for record in found:
                for name, _, box, local in getattr(record, kind)[step]:
                    place = tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))
                    if not torch.allclose(local, whole[name][place], rtol=TOLERANCE, atol=TOLERANCE):
                        wrong.add(kind)
            if not wrong:
                assert (
                    assemble([part for record in found for part in getattr(record, kind)[step]]).keys() == whole.keys()
                )
        for record in found:
            for number in ("norms", "weight_norms", "zeros"):
                if getattr(record, number)[step] != pytest.approx(getattr(expected, number)[step], rel=TOLERANCE):
                    wrong.add(number)
    return wrong


WITH_ALL_STRATEGIES = ("ep2 edp2", "tp2 etp2 ep2", "tp4, dense without data parallelism", "pp2 ep2")


def cases() -> Iterator[Any]:
    """Every folding with every strategy, by default two for most; overlap and the optimizer take turns."""
    for place, (name, folding) in enumerate(FOLDINGS.items()):
        for number, strategy in enumerate(STRATEGIES):
            overlap, config = (place + number) % 2 == 0, (SGD, ADAM)[(place + number // 2) % 2]
            case = replace(folding, strategy=strategy, overlap=overlap)
            is_left_out = name not in WITH_ALL_STRATEGIES and (place + number // 2) % 2
            yield pytest.param(case, config, marks=[pytest.mark.whole_matrix] if is_left_out else [])
    for strategy in STRATEGIES[1:]:
        for name in ("ep2 edp2", "edp4", "pp2 edp2", "tp2 etp2"):
            yield replace(FOLDINGS[name], strategy=strategy, instances=2, overlap=True), SGD


def name_of(case: object) -> str:
    if isinstance(case, OptimizerConfig):
        return case.optimizer
    return " ".join(f"{key}={value}" for key, value in vars(case).items() if value != getattr(Folding(), key))


@pytest.mark.parametrize(("folding", "config"), list(cases()), ids=name_of)
def test_a_folding_trains_as_one_process(four_ranks: RankPool, folding: Folding, config: OptimizerConfig) -> None:
    found = four_ranks.run(run_folding, folding, config, STEPS, world_size=folding.world_size)
    assert differences(found, config) == set()
    assert max(found[0].norms) > 0.5, "nothing is clipped"


# Fully sharded


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("in_flight", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize("overlap", [False, True], ids=["when used", "ahead"])
def test_recomputed_layers_gather_their_experts_again(
    four_ranks: RankPool, overlap: bool, in_flight: bool, reshard: bool
) -> None:
    folding = replace(FSDP, overlap=overlap, recompute=True, reshard=reshard, in_flight=in_flight)
    assert differences(four_ranks.run(run_folding, folding, SGD, STEPS), SGD) == set()


@dataclass
class Gathers:
    """What a rank saw of the all-gathers of weights in a microbatch."""

    groups: list[str] = field(default_factory=list)
    """Whose groups they were over."""
    before: list[int] = field(default_factory=list)
    """How many had started when each unit ran, and when it ran backward, before it asked for its weights."""
    whole: list[int] = field(default_factory=list)
    """How many units were whole at these times, and at the end."""


def gathers_of(folding: Folding) -> Gathers:
    """On every rank: a step."""
    run, seen = build_toy(folding, SGD), Gathers()
    sharing = run.data_parallel.sharing
    assert sharing.experts is not None
    for name, ranks in (("dense", sharing.dense.shards), ("experts", sharing.experts.shards)):
        ranks.observer = lambda record, name=name: seen.groups.append(name) if record.kind == "all_gather" else None
    units = [module for module in run.toy.modules() if isinstance(module, FSDPModule) and module is not run.toy.chunk]

    def look(*_: object) -> None:
        seen.before.append(len(seen.groups))
        # The first parameter of a unit in the toy is its own.
        seen.whole.append(sum(not isinstance(next(unit.parameters()), DTensor) for unit in units))

    for unit in units:
        unit.register_forward_pre_hook(look)
        unit.register_full_backward_pre_hook(look)
    accumulate(run, 0, num_microbatches=1)
    look()
    return seen


D, E = "dense", "experts"


@pytest.mark.parametrize(
    ("folding", "groups", "before", "most", "after"),
    [
        (FSDP, [D, D, E, D, E, D, E, D, E, D], [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10], 2, 0),
        (replace(FSDP, overlap=True), [D, D, E, D, E, D, E, D, E, D], [2, 4, 4, 5, 5, 6, 8, 8, 10, 10, 10], 2, 0),
        (replace(FSDP, recompute=True), [D, D, E, E, D, E, E, D], [1, 2, 3, 4, 4, 6, 7, 7, 7, 7, 8], 3, 0),
        (replace(FSDP, reshard=False), [D, D, E, D, E], [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5], 5, 5),
    ],
    ids=["when used", "ahead", "recomputed", "kept"],
)
def test_a_layer_and_its_experts_are_gathered_twice(
    four_ranks: RankPool, folding: Folding, groups: list[str], before: list[int], most: int, after: int
) -> None:
    """Once for each pass. Recomputed experts stay whole until their backward pass."""
    for seen in four_ranks.run(gathers_of, folding):
        assert (seen.groups, seen.before, max(seen.whole), seen.whole[-1]) == (groups, before, most, after)


# Planted faults


def run_with_fault(fault: str, folding: Folding) -> Record:
    """On every rank: train with a fault."""
    is_counted, finish = ModelSharing.is_counted, DataParallel.finish_grad_sync

    def without_experts(sharing: ModelSharing, info: ParameterInfo, over_all_ranks: bool) -> bool:
        return not info.is_expert and is_counted(sharing, info, over_all_ranks)

    def of_every_replica(sharing: ModelSharing, info: ParameterInfo, over_all_ranks: bool) -> bool:
        return info.is_expert or is_counted(sharing, info, over_all_ranks)

    def as_first_tensor_parallel_rank(sharing: ModelSharing, info: ParameterInfo, over_all_ranks: bool) -> bool:
        return is_counted(sharing, info, over_all_ranks) and not (info.is_expert and sharing.tensor_parallel.rank > 0)

    def finish_divided(data_parallel: DataParallel) -> None:
        finish(data_parallel)
        for shard in data_parallel.param_shards:
            if shard.info.is_expert:
                shard.gradient.div_(data_parallel.sharing.of_parameter(shard.info).size)

    faults: dict[str, Any] = {
        "none": patch.object(ModelSharing, "is_counted", is_counted),
        "norm without experts": patch.object(ModelSharing, "is_counted", without_experts),
        "norm counts replicated experts twice": patch.object(ModelSharing, "is_counted", of_every_replica),
        "norm counts experts of the first TP rank": patch.object(
            ModelSharing, "is_counted", as_first_tensor_parallel_rank
        ),
        "expert gradients divided by edp": patch.object(DataParallel, "finish_grad_sync", finish_divided),
        "expert gradients reduced over dp": patch.object(Sharing, "of_experts", Sharing.of),
    }
    with faults[fault]:
        return run_folding(folding, SGD, STEPS)


@pytest.mark.parametrize(
    ("fault", "folding", "caught"),
    [
        ("none", FOLDINGS["ep2 edp2"], set()),
        ("norm without experts", FOLDINGS["ep4"], {"norms", "weight_norms", "zeros"}),
        ("norm counts replicated experts twice", FOLDINGS["ep2 edp2"], {"norms", "weight_norms", "zeros"}),
        ("norm counts experts of the first TP rank", FOLDINGS["tp2 ep2"], {"norms", "weight_norms", "zeros"}),
        ("expert gradients divided by edp", FOLDINGS["edp4"], {"gradients", "norms"}),
        ("expert gradients reduced over dp", FOLDINGS["ep2 edp2"], {"gradients", "norms"}),
    ],
)
def test_planted_faults_are_caught(four_ranks: RankPool, fault: str, folding: Folding, caught: set[str]) -> None:
    records = four_ranks.run(run_with_fault, fault, folding)
    if fault == "none":
        assert differences(records, SGD) == set()
    else:
        assert caught <= differences(records, SGD)


# Checkpoints


def tensors_of(run: ToyRun, with_copies: bool) -> dict[str, Tensor]:
    return model_tensors(run.data_parallel.local_params, with_copies) | optimizer_tensors(run.optimizer, with_copies)


def save_folding(folding: Folding, root: Path) -> Record:
    """On every rank: train a step and save."""
    run = build_toy(folding, ADAM)
    record = train_toy(run, range(1))
    save_checkpoint(root, SAVED, tensors_of(run, False), {}, folding.topology().control)
    return record


def load_folding(folding: Folding, root: Path) -> tuple[list[str], Record]:
    """On every rank: load, compare with the file and train the other steps."""
    run = build_toy(folding, ADAM)
    tensors = tensors_of(run, True)
    load_checkpoint(root, SAVED, tensors, folding.topology().control)
    run.optimizer.num_steps = 1
    found = not_as_saved(root, tensors)
    return found, train_toy(run, range(1, STEPS))


CHECKPOINTED = {
    "tp2 ep2, ZeRO-1": replace(FOLDINGS["tp2 ep2"], strategy="optim"),
    "tp2 etp2 ep2": FOLDINGS["tp2 etp2 ep2"],
    "ep2 edp2, FSDP": replace(FOLDINGS["ep2 edp2"], strategy="optim_grads_params"),
    "pp2 edp2, ZeRO-2": replace(FOLDINGS["pp2 edp2"], strategy="optim_grads"),
    "one": Folding(),
}


NAMES = list(CHECKPOINTED)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(one, other) for place, one in enumerate(CHECKPOINTED) for other in (NAMES[place - 1], NAMES[place - 3])],
)
def test_a_checkpoint_goes_from_folding_to_folding(
    four_ranks: RankPool, checkpoints: Path, saved: str, loaded: str
) -> None:
    """Every bit of weights, moments and master weights, and training continues as without interruption."""
    root, one, other = checkpoints / saved, CHECKPOINTED[saved], CHECKPOINTED[loaded]
    if not root.exists():
        four_ranks.run(save_folding, one, root, world_size=one.world_size)
    expected = one_process(ADAM)
    for different, record in four_ranks.run(load_folding, other, root, world_size=other.world_size):
        assert different == []
        assert record.norms == pytest.approx(expected.norms[1:], rel=TOLERANCE)
        assert record.weight_norms == pytest.approx(expected.weight_norms[1:], rel=TOLERANCE)
