"""Data stages: the parts of a run that read different data, one after the other.

A stage begins at the first sample of its own data, wherever the run is by then. A checkpoint records all stages up to
the current one, so that a run finds its place in the data again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.checkpoint.schema import DataStage
from megatron.data.data_record import DataRecord, evaluation_differences, training_differences
from megatron.errors import CheckpointError

FIRST_STAGE = "first"
"""The name of a run's first stage where the flags give it none."""

EPOCHS = "train_epochs"
"""Field of a stage's data: epochs of its training corpora, by the digest of their ``.idx``."""
_MAX_DIFFERENCES = 20


def earlier_lengths(stages: Sequence[DataStage]) -> list[tuple[int, int]]:
    """(samples, tokens per sample) of every stage but the last."""
    return [(later.first_sample - stage.first_sample, stage.seq_length) for stage, later in pairwise(stages)]


@dataclass(frozen=True)
class ResolvedStages:
    """The stages of a run that is about to start, the last of which it is in."""

    stages: tuple[DataStage, ...]
    notices: tuple[str, ...] = ()
    """What the log must say."""

    @property
    def current(self) -> DataStage:
        """The stage that the run is in."""
        return self.stages[-1]


def first_stage(name: str | None, now: DataRecord) -> ResolvedStages:
    """The stages of a run that starts afresh."""
    return ResolvedStages((DataStage(name or FIRST_STAGE, 0, 0, now),))


def resolve_data_stages(
    saved: Sequence[DataStage], name: str | None, now: DataRecord, iteration: int, consumed_samples: int, where: str
) -> ResolvedStages:
    """The stages with which a run resumes from the checkpoint ``where`` of ``iteration``.

    ``now`` are the data of the flags, ``name`` is ``--new-data-stage``. The run stays in the last stage of the
    checkpoint if it has this name, or if there is none, and begins a stage otherwise.

    Raises :class:`CheckpointError` on data that differ from the data of the stage that the run would stay in, and on
    the name of an earlier stage.
    """
    current = saved[-1]
    if name is not None and name != current.name:
        if name in [stage.name for stage in saved]:
            raise CheckpointError(
                f"--new-data-stage {name} is over: {where} is in data stage {current.name}, which came later; remove "
                "the flag to continue, use a new name, or load an older checkpoint with "
                "--ckpt-step."
            )
        begun = DataStage(name, iteration, consumed_samples, now)
        return ResolvedStages((*saved, begun), (_beginning(begun), *_change_of_length(current, begun)))
    differences = training_differences(current.data, now)
    if differences:
        raise CheckpointError(_refusal(current.name, differences, where))
    notices = [_continuation(current, consumed_samples)]
    if current.data.keys() <= {"sequence_length"}:
        notices.append(f"{where} recorded nothing of its data: whether these are the same is not checked")
    for line in evaluation_differences(current.data, now):
        notices.append(f"WARNING: the data of evaluation are not those of {where}: {line}")
    kept = {EPOCHS: current.data[EPOCHS]} if EPOCHS in current.data else {}
    return ResolvedStages((*saved[:-1], replace(current, data={**now, **kept})), tuple(notices))


def with_train_epochs(
    stages: tuple[DataStage, ...], epochs: Mapping[str, int]
) -> tuple[tuple[DataStage, ...], list[str]]:
    """``stages`` whose last records the ``epochs`` of its training corpora (by prefix), and what the log must say.

    Megatron-LM's order over N epochs is another one than the first N epochs of a longer order: a run that was extended
    into a further epoch goes on in an order that shares nothing with the samples behind it.
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
    is_extendable = current.data.get("sample_order") == "extendable"
    return (*stages[:-1], replace(current, data={**current.data, EPOCHS: now})), [] if is_extendable else warnings


def _beginning(stage: DataStage) -> str:
    return (
        f"data stage {stage.name} begins after iteration {stage.first_iteration}, at the first of its samples "
        f"({stage.first_sample} samples consumed before)"
    )


def _continuation(stage: DataStage, consumed_samples: int) -> str:
    return f"data stage {stage.name} continues behind {consumed_samples - stage.first_sample} of its samples"


def _change_of_length(old: DataStage, new: DataStage) -> tuple[str, ...]:
    if old.seq_length == new.seq_length:
        return ()
    return (
        f"samples have {new.seq_length} tokens from now on, and had {old.seq_length}: the learning rate, "
        "--train-samples and --global-batch-size count samples, so a batch of as many samples has "
        f"{new.seq_length / old.seq_length:g} times the tokens",
    )


def _refusal(name: str, differences: Sequence[str], where: str) -> str:
    shown = list(differences[:_MAX_DIFFERENCES])
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    return (
        f"The data are not those that {where} was trained on in data stage {name} ({'; '.join(shown)}): "
        "give its flags and files, begin these data at their first sample with --new-data-stage and a new "
        "name, or start a new run from the weights alone with --finetune."
    )
