"""Runs with Transformer Engine's layers, here the stand-in's: what they save, and what they say to the user."""

import importlib.metadata
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.commands import pretrain_llama
from megatron.config.command_line import parse_command_line
from megatron.config.precision import PrecisionConfig
from megatron.core.backends.transformer_engine import TransformerEngine, build_recipe
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.device import Unavailable
from megatron.core.kernels.selection import share_buffers
from megatron.errors import RankError
from megatron.training.checkpoints.state import fp8_tensors, model_tensors, optimizer_tensors
from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    Outcome,
    call_training,
    flags_of,
    fork_training,
    losses,
    tiny_corpus,
)
from tests.parallel.comparison import TOLERANCE
from tests.parallel.layout_run import Layout, RecordingOptimizer, Task, assemble, build, make_steps, place_in, train
from tests.parallel.tasks import ADAM, DELAYED
from tests.stand_ins import transformer_engine

pytestmark = pytest.mark.processes

SAVED = 2
OURS, THEIRS = Layout(), Layout(transformer_engine=True)
LONG = PrecisionConfig(
    bf16=True, fp8_format="hybrid", fp8_margin=1, fp8_amax_history_len=3, fp8_amax_compute_algo="max"
)


def tensors_of(data_parallel: DataParallel, optimizer: RecordingOptimizer) -> dict[str, Tensor]:
    return model_tensors(data_parallel.local_params) | optimizer_tensors(optimizer)


@pytest.mark.parametrize(
    "task", [replace(ADAM, steps=4), Task(DELAYED.optimizer, steps=5, fp8=LONG)], ids=["fp64", "delayed"]
)
@pytest.mark.parametrize(("first", "then"), [(OURS, THEIRS), (THEIRS, OURS)], ids=["to-theirs", "to-ours"])
def test_a_checkpoint_of_one_goes_on_in_the_other(tmp_path: Path, task: Task, first: Layout, then: Layout) -> None:
    """As if it had never stopped, histories of magnitudes included."""
    whole = train(task, OURS)
    topology = place_in(first)
    executor, data_parallel, optimizer = build(task, first, topology)
    make_steps(task, first, topology, executor, data_parallel, optimizer, range(SAVED))
    tensors = tensors_of(data_parallel, optimizer)
    tensors |= {name: BoxedTensor.from_whole(tensor) for name, tensor in fp8_tensors(optimizer.fp8).items()}
    save_checkpoint(tmp_path, SAVED, tensors, {"steps": optimizer.num_steps})

    executor, data_parallel, optimizer = build(task, then, topology)
    fp8_states = {name: torch.empty_like(tensor) for name, tensor in fp8_tensors(optimizer.fp8).items()}
    state = load_checkpoint(tmp_path, SAVED, tensors_of(data_parallel, optimizer) | fp8_states)
    optimizer.num_steps = state["steps"]
    if optimizer.fp8 is not None:
        optimizer.fp8.load({name.removeprefix("fp8/"): tensor for name, tensor in fp8_states.items()})
    trace = make_steps(task, then, topology, executor, data_parallel, optimizer, range(SAVED, task.steps))
    assert trace.losses == pytest.approx(whole.losses[SAVED:], rel=TOLERANCE)
    found, wanted = assemble(trace.weights[-1]), assemble(whole.weights[-1])
    for name, weight in wanted.items():
        assert (found[name] - weight).abs().max() < TOLERANCE * weight.abs().max(), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (PrecisionConfig(fp8_format="e4m3", fp8_margin=2, fp8_amax_history_len=7), "Delayed E4M3 2 7 most_recent"),
        (PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"), "Current HYBRID"),
        (PrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise"), "Block E4M3"),
        (PrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8"), "MXFP8 E4M3"),
    ],
)
def test_recipes_are_those_of_the_flags(flags: PrecisionConfig, words: str) -> None:
    recipe = build_recipe(transformer_engine(), flags, num_ranks=1)
    kind, fp8_format, *numbers = words.split()
    assert kind in type(recipe).__name__ and recipe.fp8_format.name == fp8_format
    if numbers:
        assert [str(recipe.margin), str(recipe.amax_history_len), recipe.amax_compute_algo] == numbers
        assert not recipe.reduce_amax and build_recipe(transformer_engine(), flags, num_ranks=2).reduce_amax


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("2.8.0", "is installed in version 2.8.0, which is too old"), ("2.20.2", "cannot be imported (no such library)")],
)
def test_a_package_that_does_not_serve_is_named(installed: str, reason: str) -> None:
    broken = mock.patch("importlib.import_module", side_effect=OSError("no such library\nand more"))
    with broken, mock.patch.object(importlib.metadata, "version", return_value=installed):
        with pytest.raises(Unavailable) as error:
            TransformerEngine.find(torch.device("cuda"))
    assert str(error.value) == reason


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.getbasetemp())


RUN: dict[str, FlagValue] = {"bf16": True, "train_iters": 6, "lr_warmup_iters": 0, "log_interval": 1}
ENGINE: dict[str, FlagValue] = {**RUN, "transformer_impl": "transformer_engine"}


def run(corpus: Corpus, directory: Path, flags: dict[str, FlagValue]) -> Outcome:
    directory.mkdir()
    with mock.patch.object(TransformerEngine, "find", return_value=transformer_engine()):
        return call_training(flags_of(corpus, **flags, save=directory, metrics_jsonl=directory / "metrics.jsonl"))


OVERLAP: dict[str, FlagValue] = {
    **ENGINE,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 2,
    "sequence_parallel": True,
    "tp_comm_overlap": True,
    "micro_batch_size": 1,
    "train_iters": 2,
}


def main_with_stand_in(flags: Sequence[str]) -> int:
    """The entry point; then what the stand-in was told of buffers."""
    with mock.patch.object(TransformerEngine, "find", return_value=transformer_engine()):
        exit_code = pretrain_llama.main(flags)
    print(f"told: {json.dumps(transformer_engine().pytorch.STATE.events)}")
    return exit_code


def test_layers_overlap_through_buffers_that_are_there_before_them(corpus: Corpus, tmp_path: Path) -> None:
    """And gone in the end; the stand-in checks that activations fit them. The run is that of the local layers but for
    rounding, and says whose layers it has."""
    assert run(corpus, tmp_path / "alone", {**RUN, "train_iters": 2}).succeeded()
    (tmp_path / "four").mkdir()
    directories = {"save": tmp_path / "four", "metrics_jsonl": tmp_path / "four/metrics.jsonl"}
    together = fork_training(flags_of(corpus, **OVERLAP, **directories), 4, main_with_stand_in).succeeded()
    ours, theirs = (losses(tmp_path / name / "metrics.jsonl") for name in ("alone", "four"))
    assert list(theirs) == pytest.approx(list(ours), rel=1e-3)
    run(corpus, tmp_path / "plain", {**ENGINE, "train_iters": 2}).succeeded()
    assert list(losses(tmp_path / "plain/metrics.jsonl")) == pytest.approx(list(ours), rel=1e-3)
    assert "transformer_engine  version stand-in, by --transformer-impl" in together.stdout
    assert "tensor-parallel overlap: Transformer Engine's buffers; in the output layer pipelined" in together.stdout
    column = {"ub_overlap_ag": True, "ub_bulk_wgrad": True, "ub_bulk_dgrad": True}
    row = {"ub_overlap_ag": True, "ub_overlap_rs": True}
    layer = [
        ["LayerNormLinear", {**column, "ub_name": "qkv"}],
        ["Linear", {**row, "ub_name": "proj"}],
        ["LayerNormLinear", {**column, "ub_name": "fc1"}],
        ["Linear", {**row, "ub_name": "fc2"}],
    ]
    # A sequence of 32 on two context-parallel ranks, and 32 features.
    wanted = [["initialize_ub", [[16, 32], 2, ["NONE"]]], *layer * 2, ["destroy_ub", None]]
    told = [json.loads(line[6:]) for line in together.stdout.splitlines() if line.startswith("told: ")]
    assert told == [wanted] * 4


@pytest.mark.parametrize("kind", [AssertionError, RuntimeError])
def test_without_buffers_a_sentence_says_what_to_do(corpus: Corpus, kind: type[Exception]) -> None:
    """Which of the two it is depends on the version."""
    config = parse_command_line(flags_of(corpus, **OVERLAP))
    topology, engine = mock.Mock(rank=3, **{"tensor_parallel.size": 2, "grid.cp": 2}), transformer_engine()
    failing = mock.patch.object(engine.pytorch, "initialize_ub", side_effect=kind("No multicast.\nSo."))
    with failing, mock.patch("torch.distributed.get_backend"), pytest.raises(RankError) as error, ExitStack() as at_end:
        share_buffers(config, topology, engine, at_end)
    assert "on rank 3 cannot share buffers between GPUs (No multicast): " in str(error.value)
    assert str(error.value).endswith("use --transformer-impl local, or remove --tp-comm-overlap.")


def test_a_recipe_that_the_gpu_lacks_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    flags: dict[str, FlagValue] = {**ENGINE, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}
    (error,) = run(corpus, tmp_path / "run", flags).errors
    assert (
        "--fp8-recipe mxfp8 is not supported on" in error
        and "10.0 or higher" in error
        and "use another recipe" in error
    )


def test_without_the_package_a_sentence_says_what_to_do(corpus: Corpus, tmp_path: Path) -> None:
    (error,) = call_training(flags_of(corpus, **ENGINE)).errors
    assert "--transformer-impl transformer_engine needs that package, which has no kernels for a CPU" in error
    assert "requirements-cuda.txt" in error and "--transformer-impl local" in error
