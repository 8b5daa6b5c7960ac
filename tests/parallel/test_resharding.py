"""Saved in one layout, continued in another: every bit comes back, and the run goes on as if nothing had happened."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.streaming import SavedTensors
from megatron.config.training import OptimizerConfig
from megatron.core.data_parallel.strategy import DataParallel
from megatron.training.checkpoints.state import bias_tensors, model_tensors, optimizer_tensors
from tests.parallel.comparison import TOLERANCE
from tests.parallel.layout_run import (
    DEEP_MODEL,
    DEEP_TIED_MODEL,
    Layout,
    LocalTensor,
    RecordingOptimizer,
    Task,
    Trace,
    assemble,
    build,
    make_steps,
    place_in,
    train,
)
from tests.parallel.tasks import DSV, MUON_FLAGS, RESTARTED
from tests.rank_pool import RankPool

SAVED, STEPS = 2, 4
ADAM = OptimizerConfig(weight_decay=0.1, clip_grad=0.05)
UNTIED = Task(ADAM, model=DEEP_MODEL, steps=STEPS)
TIED = Task(ADAM, model=DEEP_TIED_MODEL, steps=STEPS)
AVERAGED = replace(TIED, optimizer=replace(ADAM, ema_decay=0.7))
MUON = Task(MUON_FLAGS, model=DEEP_TIED_MODEL, steps=STEPS)
MOE = replace(DSV, steps=STEPS, moe=replace(DSV.moe, moe_z_loss_coeff=1e-3))
LLAMA4 = replace(RESTARTED, optimizer=ADAM, steps=STEPS)
FUTURE = Task(ADAM, model=replace(DEEP_MODEL, num_layers=4, mtp_num_layers=1), steps=STEPS)
TASK_NAMES = {
    FUTURE: ", MTP",
    UNTIED: "",
    TIED: ", tied",
    MUON: ", muon",
    AVERAGED: ", averaged",
    MOE: ", experts",
    LLAMA4: ", llama 4",
}

LAYOUTS = {
    "one": Layout(),
    "tp4-sp": Layout(4, sequence_parallel=True),
    "dp4": Layout(dp=4, microbatches=2),
    "pp4": Layout(pp=4, microbatches=4),
    "fsdp4": Layout(dp=4, strategy="optim_grads_params"),
    "tp2-dp2-zero1": Layout(2, 2, strategy="optim", bucket_size=3000, offload=0.5),
    "pp2-vp4-tp2": Layout(2, pp=2, schedule="interleaved", chunks=4, microbatches=4, sequence_parallel=True),
    "cp2-fsdp2": Layout(dp=2, cp=2, strategy="optim_grads_params"),
    "zbv2-dp2-zero2": Layout(dp=2, pp=2, schedule="zb-v", strategy="optim_grads", microbatches=4),
    "dp4-zero1-2": Layout(dp=4, strategy="optim", instances=2),
    "pp2-fsdp2": Layout(dp=2, pp=2, strategy="optim_grads_params", microbatches=2, offload=1.0),
    "cp2-tp2": Layout(2, cp=2, sequence_parallel=True, cp_comm_type=("allgather",)),
    "uneven pp3": Layout(pp=3, split="Et|tttttt|tL", microbatches=2, schedule="zb-h1"),
}
EXPERT_LAYOUTS = {
    "ep4": Layout(dp=4, ep=4, microbatches=2),
    "tp2-ep2-pp2-zero1": Layout(2, 1, True, "optim", ep=2, pp=2, microbatches=2, bucket_size=3000),
    "etp2-ep2-fsdp": Layout(dp=4, etp=2, ep=2, strategy="optim_grads_params", dispatcher="allgather"),
    "etp4-zero2": Layout(2, 2, True, "optim_grads", etp=4, overlap_grad_reduce=True),
    "ep2-hsdp": Layout(dp=4, ep=2, strategy="optim_grads_params", instances=2),
    "cp2-ep4": Layout(dp=2, cp=2, ep=4, strategy="optim"),
    "zbv2-ep2": Layout(dp=2, pp=2, ep=2, schedule="zb-v", microbatches=4, split="E|t||tL"),
}
NAMES = list(LAYOUTS)
PAIRS = [(UNTIED, one, NAMES[(place + 1) % len(NAMES)]) for place, one in enumerate(NAMES)]
OTHER_PAIRS = [(UNTIED, one, NAMES[(place + 5) % len(NAMES)]) for place, one in enumerate(NAMES)]
"""Slow: by default each layout is saved once and loaded once."""
PAIRS += [(TIED, one, other) for one, other in (("one", "pp2-fsdp2"), ("pp2-fsdp2", "uneven pp3"), ("pp4", "tp4-sp"))]
PAIRS += [
    (MUON, one, other)
    for one, other in (
        ("tp2-dp2-zero1", "fsdp4"),
        ("fsdp4", "tp4-sp"),
        ("pp4", "dp4-zero1-2"),
        ("cp2-fsdp2", "pp2-fsdp2"),
    )
]
PAIRS += [(AVERAGED, "tp2-dp2-zero1", "pp2-fsdp2"), (AVERAGED, "pp2-fsdp2", "uneven pp3")]
EXPERT_NAMES = ["one", *EXPERT_LAYOUTS]
PAIRS += [(MOE, one, EXPERT_NAMES[(place + 3) % len(EXPERT_NAMES)]) for place, one in enumerate(EXPERT_NAMES)]
PAIRS += [(FUTURE, one, other) for one, other in (("pp2-fsdp2", "one"), ("one", "pp4"))]
PAIRS += [(LLAMA4, "cp2-ep4", "tp2-ep2-pp2-zero1"), (LLAMA4, "etp2-ep2-fsdp", "cp2-ep4")]
LAYOUTS |= EXPERT_LAYOUTS


def tensors_of(
    data_parallel: DataParallel, optimizer: RecordingOptimizer, with_copies: bool
) -> dict[str, torch.Tensor]:
    tensors = model_tensors(data_parallel.local_params, with_copies) | optimizer_tensors(optimizer, with_copies)
    return tensors | {name: BoxedTensor.from_whole(bias) for name, bias in bias_tensors(optimizer.experts).items()}


def save_in(task: Task, layout: Layout, root: Path) -> None:
    """On every rank: train the first steps and save."""
    topology = place_in(layout)
    executor, data_parallel, optimizer = build(task, layout, topology)
    make_steps(task, layout, topology, executor, data_parallel, optimizer, range(SAVED))
    save_checkpoint(
        root, SAVED, tensors_of(data_parallel, optimizer, False), {"steps": optimizer.num_steps}, topology.control
    )


def continue_in(
    task: Task, layout: Layout, root: Path
) -> tuple[list[str], list[float], list[float], list[LocalTensor]]:
    """On every rank: load, and train the other steps.

    Returns what differs from the file after loading, the losses, the norms, and the last weights.
    """
    topology = place_in(layout)
    executor, data_parallel, optimizer = build(task, layout, topology)
    tensors = tensors_of(data_parallel, optimizer, True)
    optimizer.num_steps = load_checkpoint(root, SAVED, tensors, topology.control)["steps"]
    different = differences(root, tensors)
    if not optimizer.has_master_weights:
        optimizer.reload_master_weights()
    trace = make_steps(task, layout, topology, executor, data_parallel, optimizer, range(SAVED, STEPS))
    return different, trace.losses, trace.grad_norms, trace.weights[-1] + renamed_averages(trace)


def differences(root: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names whose param_shards are not what the file holds, read in another way."""
    saved = SavedTensors(root, SAVED)
    wrong = []
    for name, tensor in tensors.items():
        assert isinstance(tensor, BoxedTensor)
        for offset, shard in tensor.boxes:
            wanted = torch.full_like(shard, torch.nan)
            saved.read_into(wanted, name, tuple(slice(at, at + size) for at, size in zip(offset, shard.shape)))
            if not torch.equal(shard, wanted):
                wrong.append(name)
    return wrong


def renamed_averages(trace: Trace) -> list[LocalTensor]:
    """The last moving averages, if there are any, under names of their own."""
    return [(f"average of {name}", shape, box, local) for name, shape, box, local in trace.averages[-1]]


@cache
def uninterrupted(task: Task) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One process from start to end."""
    trace = train(task, Layout())
    return trace.losses[SAVED:], trace.grad_norms[SAVED:], assemble(trace.weights[-1] + renamed_averages(trace))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each layout saves, once."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("task", "saved", "loaded"),
    [
        pytest.param(task, one, other, id=f"{one} to {other}{TASK_NAMES[task]}", marks=marks)
        for pairs, marks in ((PAIRS, ()), (OTHER_PAIRS, pytest.mark.slow))
        for task, one, other in pairs
    ],
)
def test_a_run_goes_from_layout_to_layout(
    four_ranks: RankPool, checkpoints: Path, task: Task, saved: str, loaded: str
) -> None:
    root = checkpoints / f"{saved}{TASK_NAMES[task]}"
    one, other = LAYOUTS[saved], LAYOUTS[loaded]
    if not root.exists():
        four_ranks.run(save_in, task, one, root, world_size=one.world_size)
    outcomes = four_ranks.run(continue_in, task, other, root, world_size=other.world_size)
    losses, grad_norms, weights = uninterrupted(task)
    for different, found_losses, found_norms, _ in outcomes:
        assert different == []
        assert found_losses == pytest.approx(losses, rel=TOLERANCE)
        assert found_norms == pytest.approx(grad_norms, rel=TOLERANCE)
    found = assemble([part for *_, parts in outcomes for part in parts])
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=TOLERANCE, atol=1e-11, msg=name)
