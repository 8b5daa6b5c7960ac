"""Data stages: consecutive parts of a run that read different data.

A stage begins at the first sample of its data. A checkpoint records all stages up to the current one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.checkpoint.schema import DataStage
from megatron.data.data_record import DataRecord, evaluation_differences, training_differences
from megatron.errors import CheckpointError

FIRST_STAGE = "first"
"""Default name of a run's first stage."""

EPOCHS = "train_epochs"
"""Field of a stage's data: epochs of its training corpora, by the digest of their ``.idx``."""
_MAX_DIFFERENCES = 20


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
