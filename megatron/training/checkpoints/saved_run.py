"""The checkpoint that a run starts from: found, verified by all ranks, and compared with the flags and the data."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
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
from megatron.data.data_record import DataRecord, evaluation_differences, training_differences
from megatron.errors import CheckpointError
from megatron.training.batch_schedule import BatchSchedule

FIRST_STAGE = "first"
"""Default name of a run's first stage."""
EPOCHS = "train_epochs"
"""Field of a stage's data: epochs of its training corpora, by the digest of their ``.idx``."""
_MAX_DIFFERENCES = 20
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
    beginning: Progress = field(default_factory=Progress)
    """The progress of a run that resumes no checkpoint."""

    @property
    def resumed(self) -> SavedRun | None:
        """The checkpoint, if it is a checkpoint of this run."""
        return self.saved if self.is_resumed else None

    @property
    def progress(self) -> Progress:
        return self.beginning if self.resumed is None else self.resumed.progress


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


# --- data stages ---------------------------------------------------------------------------------------------
#
# Consecutive parts of a run that read different data. A stage begins at the first sample of its data. A checkpoint
# records all stages up to the current one.


def earlier_lengths(stages: Sequence[DataStage]) -> list[tuple[int, int]]:
    """(samples, tokens per sample) of every stage but the last."""
    return [(later.first_sample - stage.first_sample, stage.seq_length) for stage, later in pairwise(stages)]


@dataclass(frozen=True)
class ResolvedStages:
    """The stages of a run, up to the current one."""

    stages: tuple[DataStage, ...]
    notices: tuple[str, ...] = ()
    """Lines for the log."""

    @property
    def current(self) -> DataStage:
        return self.stages[-1]


def first_stage(name: str | None, now: DataRecord) -> ResolvedStages:
    """The stages of a new run."""
    return ResolvedStages((DataStage(name or FIRST_STAGE, 0, 0, now),))


def resolve_data_stages(
    saved: Sequence[DataStage], name: str | None, now: DataRecord, iteration: int, consumed_samples: int, where: str
) -> ResolvedStages:
    """The stages with which a run resumes from the checkpoint ``where`` of ``iteration``.

    ``now`` are the data of the flags, ``name`` is ``--new-data-stage``. Raises :class:`CheckpointError` if the data
    differ from the data of the continued stage, or if ``name`` is the name of an earlier stage.
    """
    #   --new-data-stage     not given        name of the last stage   another name
    #   the run              continues in the last stage               begins a stage after the last
    #   data of the flags    must equal those of the last stage        are those of the new stage
    current = saved[-1]
    if name is not None and name != current.name:
        if name in [stage.name for stage in saved]:
            raise CheckpointError(
                f"--new-data-stage {name} is over: {where} is in data stage {current.name}, which came later; remove "
                "the flag to continue, use a new name, or load an older checkpoint with --ckpt-step."
            )
        begun = DataStage(name, iteration, consumed_samples, now)
        notices = [
            f"data stage {name} begins after iteration {iteration}, at its first sample ({consumed_samples} samples "
            "consumed before)"
        ]
        if current.seq_length != begun.seq_length:
            notices.append(
                f"samples have {begun.seq_length} tokens from now on, and had {current.seq_length}: the learning rate, "
                "--train-samples and --global-batch-size count samples, so a batch of as many samples has "
                f"{begun.seq_length / current.seq_length:g} times the tokens"
            )
        return ResolvedStages((*saved, begun), tuple(notices))
    differences = training_differences(current.data, now)
    if differences:
        shown = list(differences[:_MAX_DIFFERENCES])
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        raise CheckpointError(
            f"The data differ from the data of stage {current.name} of {where} ({'; '.join(shown)}): use the same "
            "flags and files, begin these data at their first sample with --new-data-stage and a new name, or start a "
            "new run from the weights alone with --finetune."
        )
    behind = consumed_samples - current.first_sample
    notices = [f"data stage {current.name} continues after {behind} of its samples"]
    if current.data.keys() <= {"sequence_length"}:
        notices.append(f"{where} has no record of its data: they are not compared with the flags")
    for line in evaluation_differences(current.data, now):
        notices.append(f"WARNING: the evaluation data differ from {where}: {line}")
    kept = {EPOCHS: current.data[EPOCHS]} if EPOCHS in current.data else {}
    return ResolvedStages((*saved[:-1], replace(current, data={**now, **kept})), tuple(notices))


def with_train_epochs(
    stages: tuple[DataStage, ...], epochs: Mapping[str, int]
) -> tuple[tuple[DataStage, ...], list[str]]:
    """``stages`` with the ``epochs`` of the training corpora (by prefix) in the last one, and warnings for the log.

    Megatron-LM's sample order over N epochs differs from the first N epochs of a longer order, so a run that is
    extended by an epoch continues in another order.
    """
    current = stages[-1]
    digests = {corpus["path"]: corpus["index_xxh3_128"] for corpus in current.data.get("corpora", ())}
    now = {digests[prefix]: count for prefix, count in epochs.items() if prefix in digests}
    saved = current.data.get(EPOCHS, {})
    warnings = [
        f"WARNING: the run now needs {now[digest]} epochs of {prefix}, and its checkpoint was trained in the order of "
        f"{saved[digest]}: from here on samples come in another order, so some repeat and some are left out; start a "
        "run that may be extended with --sample-order extendable"
        for prefix, digest in digests.items()
        if digest in now and saved.get(digest, now[digest]) != now[digest]
    ]
    is_extendable = current.data.get("sample_order") in ("extendable", "best-fit")
    return (*stages[:-1], replace(current, data={**current.data, EPOCHS: now})), [] if is_extendable else warnings
