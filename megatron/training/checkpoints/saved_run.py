"""The checkpoint that a run starts from: found, verified by all ranks, and compared with the flags."""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.directory import iteration_of, saved_iterations
from megatron.checkpoint.files import AnyPath, path_of
from megatron.checkpoint.finding import find_checkpoint, missing_checkpoint, verify_share
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.schema import DataStage, SavedState, upgrade
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.training import LearningRateConfig
from megatron.core.control import ControlGroup, run_on_all_ranks, run_on_rank0
from megatron.core.hyperparameters import LearningRateSchedule
from megatron.errors import CheckpointError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints.saved_run import FIRST_STAGE

_logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Iterations and samples so far."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0

    def count_iteration(self, batches: BatchSchedule) -> None:
        """Count the iteration that ``batches`` has for these samples."""
        self.skipped_samples += batches.skipped_samples(self.consumed_samples)
        self.consumed_samples += batches.global_batch_size(self.consumed_samples)
        self.iteration += 1


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that was found, and its content."""

    root: AnyPath
    iteration: int
    shapes: dict[str, tuple[int, ...]]  # global, by tensor name
    state: SavedState

    @property
    def progress(self) -> Progress:
        return Progress(self.state.iteration, self.state.consumed_samples, self.state.skipped_samples)

    def data_stages(self, seq_length: int) -> tuple[DataStage, ...]:
        """The data stages up to the checkpoint; none before the first sample.

        A checkpoint without a record of them is in the first, with the sequence length of its flags, else
        ``seq_length``.
        """
        if self.state.data_stages or not self.state.consumed_samples:
            return self.state.data_stages
        length = self.state.flags.get("data", {}).get("seq_length", seq_length)
        return (DataStage(FIRST_STAGE, 0, 0, {"sequence_length": length}),)


def find_saved_run(config: CheckpointConfig, control: ControlGroup) -> SavedRun | None:
    """The checkpoint of ``--load``, verified by all ranks, or None if there is none; a collective."""
    if config.load is None:
        return None
    bad: dict[tuple[AnyPath, int], CheckpointError] = {}
    while True:
        try:
            # On rank 0, so that all ranks load the same checkpoint.
            found = run_on_rank0(control, lambda: look_up_saved_run(config, bad))
        except CheckpointError as nothing_left:
            # The error of the latest checkpoint is more useful.
            raise next(iter(bad.values()), nothing_left) from None
        if found is None:
            return None
        try:
            run_on_all_ranks(control, partial(verify_share, found.root, found.iteration, control.rank, control.size))
            return found
        except CheckpointError as error:
            if not config.checkpoint_fallback or config.ckpt_step is not None:
                raise
            if control.rank == 0:
                _logger.warning("Skipping the checkpoint of iteration %d: %s", found.iteration, error)
            bad[found.root, found.iteration] = error


def look_up_saved_run(config: CheckpointConfig, known_bad: Collection[tuple[AnyPath, int]] = ()) -> SavedRun | None:
    """The newest checkpoint of the directories to load from, without those ``known_bad``; the first directory wins.

    It runs on one rank and reads only the manifests.
    """
    found: tuple[int, AnyPath] | None = None
    errors: list[CheckpointError] = []
    first, *copies = map(path_of, config.load_roots)
    for root in (first, *copies):
        bad = [iteration for place, iteration in known_bad if place == root]
        try:
            iteration = find_checkpoint(root, config.ckpt_step, bad, config.checkpoint_fallback, first)
        except CheckpointError as error:
            errors.append(error)
            continue
        if iteration is not None and (found is None or iteration > found[0]):
            found = iteration, root
    if found is None:
        if errors:
            raise errors[0]
        return None
    for defect in errors:
        if not config.checkpoint_fallback:
            raise defect
        _logger.warning("Loading from %s: %s", found[1], defect)
    iteration, root = found
    manifest = read_checkpoint(root, iteration)
    shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    return SavedRun(root, iteration, shapes, upgrade(manifest.state, manifest.format_version))


def check_may_begin(config: CheckpointConfig) -> None:
    """Raise :class:`CheckpointError` where ``--load`` has no checkpoint and a run must not begin. It runs on one rank.

    A run begins where it saves: there, the same command resumes it later.
    """
    assert config.load is not None
    root = path_of(config.load)
    if iteration_of(root) is not None:
        raise missing_checkpoint(root)
    if config.finetune and config.load_hf is None and config.pretrained_checkpoint is None:
        raise missing_checkpoint(root, remedy="set it to the weights from which --finetune starts")
    if not config.saves_to_load:
        remedy = "check the path"
        if config.save is not None:
            remedy += f", or use --load {config.save}, the directory of --save, where a run also begins"
        elif not config.use_checkpoint_args:
            remedy += ", or remove --load to start from the beginning"
        raise missing_checkpoint(root, remedy=remedy)
    if config.exit_on_missing_checkpoint:
        raise missing_checkpoint(root, remedy="check the path, or remove --exit-on-missing-checkpoint")


def state_of_weights(
    iteration: int, architecture: TransformerConfig, flags: Mapping[str, Any], generation_config: str | None = None
) -> SavedState:
    """The state of a checkpoint of weights alone: no samples, no step, no schedule.

    ``flags`` has the known groups: tools build the model from ``model``, ``tokenizer`` and ``precision``.
    """
    return SavedState(
        iteration=iteration,
        consumed_samples=0,
        optimizer_steps=0,
        has_master_weights=False,
        architecture=architecture,
        flags=flags,
        generation_config=generation_config,
    )


# --- start --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from, if any."""

    saved: SavedRun | None
    is_resumed: bool
    """Whether it is a checkpoint of this run, so that its progress is loaded, too."""

    @property
    def resumed(self) -> SavedRun | None:
        """The checkpoint, if it is a checkpoint of this run."""
        return self.saved if self.is_resumed else None

    @property
    def progress(self) -> Progress:
        return Progress() if self.resumed is None else self.resumed.progress


def find_start(config: CheckpointConfig, control: ControlGroup) -> Start:
    """The checkpoint of ``--load``, else of ``--pretrained-checkpoint``."""
    saved, base = find_saved_run(config, control), config.pretrained_checkpoint
    if saved is not None:
        return Start(saved, is_resumed=not config.finetune)
    if config.load is not None:
        run_on_rank0(control, lambda: check_may_begin(config))
    if base is None:
        return Start(None, is_resumed=False)
    saved = find_saved_run(dataclasses.replace(config, load=base, ckpt_step=None), control)
    if saved is None:
        raise run_on_rank0(control, lambda: missing_checkpoint(path_of(base), "--pretrained-checkpoint"))
    return Start(saved, is_resumed=False)


def check_nothing_is_abandoned(config: CheckpointConfig, start: Start) -> None:
    """Raise :class:`CheckpointError` if ``--save`` has later checkpoints than the start, unless ``--load`` equals it.

    After the first save the later checkpoints would be abandoned.
    """
    if config.save is None:
        return
    newest = max(saved_iterations(Path(config.save)), default=0)
    if newest <= start.progress.iteration:
        return
    if start.is_resumed and config.load is not None and Path(config.load).resolve() == Path(config.save).resolve():
        return
    raise CheckpointError(
        f"--save {config.save} has checkpoints up to iteration {newest}, but this run would start at iteration "
        f"{start.progress.iteration}: add --load {config.save} to resume, or set --save to another directory."
    )


# --- comparison with the flags ------------------------------------------------------------------------------


def resolve_lr_schedule(
    wanted: LearningRateSchedule, saved: LearningRateSchedule | None, config: LearningRateConfig
) -> LearningRateSchedule:
    """The schedule to resume with; raises :class:`CheckpointError` if flags and checkpoint differ.

    ``saved`` is None for a checkpoint of weights alone (:func:`state_of_weights`).
    """
    if saved is None:
        if config.use_checkpoint_opt_param_scheduler:
            raise CheckpointError(
                "The checkpoint has no learning-rate schedule: remove --use-checkpoint-opt-param-scheduler."
            )
        return wanted
    if wanted == saved or config.override_opt_param_scheduler:
        return wanted
    if config.use_checkpoint_opt_param_scheduler:
        return saved
    if replace(wanted, warmup=int(wanted.warmup)) == saved:
        return saved  # earlier versions ended --lr-warmup-fraction at a whole sample
    there = asdict(saved)
    different = [
        f"{name} {value} (checkpoint: {there[name]})" for name, value in asdict(wanted).items() if there[name] != value
    ]
    raise CheckpointError(
        "The learning-rate schedule of the command line differs from the checkpoint, in samples: "
        f"{', '.join(different)}. Add --override-opt-param-scheduler to use the command line, or "
        "--use-checkpoint-opt-param-scheduler."
    )
