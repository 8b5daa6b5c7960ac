"""The schema of the saved state: what a checkpoint holds besides tensors, in every version that can be read.

Every reader of a run's state calls :func:`upgrade`, which returns the state in the current schema:

- a field that was added has its dataclass default where an older checkpoint lacks it. If older code behaved in another
  way than the default, a migration sets the value that describes it;
- a field that was renamed, or whose meaning changed, has a migration from the version before the change;
- a field that was removed is refused by name, unless a migration drops it because its value changed nothing.

To change the schema: raise :data:`FORMAT_VERSION`, add the migration if one is needed, and freeze checkpoints of the
new version (``python -m tests.checkpoint.frozen_checkpoints``).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.hyperparameters import LearningRateSchedule
from megatron.errors import CheckpointError

FORMAT_VERSION = 9
"""Version of the manifest and of the state in it."""
READABLE_VERSIONS = range(2, FORMAT_VERSION + 1)

T = TypeVar("T")
State = dict[str, Any]


@dataclass(frozen=True)
class DataStage:
    """A part of a run with the same data, from the iteration and sample at which it began."""

    name: str
    first_iteration: int
    """Iterations before the stage."""
    first_sample: int
    """Samples consumed before the stage."""
    data: Mapping[str, Any]
    """The stage's data record (``megatron/data/data_record.py``)."""

    @property
    def seq_length(self) -> int:
        """Tokens per sample."""
        return int(self.data["sequence_length"])


@dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint, and the samples that the run has skipped since then.

    Samples are counted from the beginning of the run, so that they mean the same for every batch size and layout.
    """

    cause: str
    """spike or not_finite"""
    iteration: int
    """The iteration after which the run returned."""
    loaded_iteration: int
    """The iteration of the checkpoint that it returned to."""
    first_iteration: int
    """The first skipped iteration, up to ``iteration``; with other batch sizes, other iterations are skipped."""
    first_sample: int
    """Samples consumed before the skipped range."""
    end_sample: int
    """Samples consumed after it."""

    def leaves_out(self, consumed_samples: int, batch_size: int) -> bool:
        """Whether the next batch has a sample of the range."""
        return consumed_samples < self.end_sample and self.first_sample < consumed_samples + batch_size

    def before(self, sample: int) -> "Rollback":
        """The part of the range before ``sample``."""
        first, end = min(self.first_sample, sample), min(self.end_sample, sample)
        return dataclasses.replace(self, first_sample=first, end_sample=end)


@dataclass(frozen=True)
class SavedState:
    iteration: int
    consumed_samples: int
    optimizer_steps: int
    has_master_weights: bool
    architecture: TransformerConfig
    flags: Mapping[str, Any]
    """Flags of the run, by group. A converted checkpoint has only some groups."""
    skipped_samples: int = 0
    loss_scaler: Mapping[str, float] | None = None
    """None under a constant loss scale."""
    lr_schedule: LearningRateSchedule | None = None
    """None in a checkpoint of weights only."""
    data_stages: tuple[DataStage, ...] = ()
    """Data stages up to the current one; empty if the checkpoint recorded or consumed no data."""
    rollbacks: tuple[Rollback, ...] = ()
    """Rollbacks of the run so far; the ranges of some may lie after the checkpoint."""
    update_guard: Mapping[str, Any] | None = None
    """State of ``UpdateGuard`` (``megatron/features/spikes/flags.py``); None if it is not known."""
    generation_config: str | None = None
    """Text of ``generation_config.json`` of the Hugging Face model that the run started from; None without one."""

    def to_json(self) -> State:
        """The inverse of :func:`upgrade`."""
        return dataclasses.asdict(self)

    def flag_group(self, name: str, kind: type[T]) -> T:
        """The flags of one group; flags that did not exist yet have their defaults."""
        return _build(kind, dict(self.flags.get(name, {})), f"flag group {name}")


def _rename_schedule(state: State) -> State:
    if "schedule" in state:
        state["lr_schedule"] = state.pop("schedule")
    return state


MIGRATIONS: Mapping[int, Callable[[State], State]] = {
    2: _rename_schedule,
    # The states of the later versions need none:
    # Version 4 added the fields of experts. Their defaults describe a dense model, as all older checkpoints are.
    # Version 5 added rollbacks and the state of the update guard. Older code did not roll back, and had no guard.
    # Version 6 added the generation settings of a Hugging Face model, which older code did not read.
    # Version 7 added the fields of muP. Their defaults describe a model without it, as all older checkpoints are.
    # Version 8 lists the chunks of tensors in columns, and version 9 a box that several ranks divide by rows once.
}
"""Migrations from a version to the next, where the state needs one."""


def upgrade(state: Mapping[str, Any], version: int) -> SavedState:
    """Convert a state that was saved in format ``version`` to the current schema.

    Raises :class:`CheckpointError` for a missing field without a default, and for an unknown field.
    """
    current = dict(state)
    for step in range(version, FORMAT_VERSION):
        if step in MIGRATIONS:
            current = MIGRATIONS[step](current)
    for name, kind in (("architecture", TransformerConfig), ("lr_schedule", LearningRateSchedule)):
        if current.get(name) is not None:
            current[name] = _build(kind, current[name], name)
    current["data_stages"] = _build_list(DataStage, current, "data_stages")
    current["rollbacks"] = _build_list(Rollback, current, "rollbacks")
    return _build(SavedState, current, "state")


def _build_list(kind: type[T], state: Mapping[str, Any], name: str) -> list[T]:
    records = state.get(name, ())
    if not isinstance(records, list | tuple):
        raise CheckpointError(f"The checkpoint's {name} are not a list: load another checkpoint.")
    return [_build(kind, record, name[:-1].replace("_", " ")) for record in records]


def _build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """The dataclass ``kind`` from its saved ``values``."""
    if not isinstance(values, Mapping):
        raise CheckpointError(f"The checkpoint's {where} has no fields: load another checkpoint.")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [f"{name} {value!r}" for name, value in values.items() if name not in fields]
    if unknown:
        raise CheckpointError(
            f"The checkpoint's {where} has {', '.join(unknown)}, which this version of the code does not have: it was "
            "removed, or added by a newer version; load the checkpoint with the version that saved it."
        )
    required = [name for name, field in fields.items() if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise CheckpointError(
            f"The checkpoint's {where} lacks {', '.join(missing)}: use a checkpoint that training or "
            "tools/convert_checkpoint.py saved."
        )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
