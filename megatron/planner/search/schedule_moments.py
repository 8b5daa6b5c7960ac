"""What a pipeline stage holds during the passes of its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.registry import SCHEDULES, placement_of
from megatron.schedules.schedule import Action, Kind, Placement
from megatron.schedules.spec import Shape

KINDS: tuple[Kind, ...] = ("F", "B", "W")


@dataclass(frozen=True)
class StageMoments:
    """The different passes of a stage, each with what the stage holds beside it."""

    passes: NDArray[np.int64]
    """``[n]``: the number of the kind in :data:`KINDS`, times the chunks, plus the chunk."""
    held: NDArray[np.int64]
    """``[n, 2 chunks + 1]``: by chunk the other microbatches between forward and backward pass, by chunk those between
    backward pass and weight gradients, and whether the input of the next pass is being received."""


def moments_of(
    schedule: str, stages: int, microbatches: int, chunks: int, stage: int, group_size: int | None = None
) -> StageMoments:
    """The moments of ``stage``, each once."""
    spec = SCHEDULES[schedule]
    size = stages if group_size is None else group_size
    count = microbatches if schedule == "gpipe" else _enough(microbatches, stages, size)
    actions = list(spec.actions(stage, Shape(stages, count, chunks, size)))
    rows = np.unique(_rows(actions, placement_of(schedule, stages, chunks), stage, spec.splits_backward), axis=0)
    return StageMoments(rows[:, 0], rows[:, 1:])


def _enough(microbatches: int, stages: int, group_size: int) -> int:
    """Microbatches with which a schedule reaches its steady state; as many beyond whole groups."""
    groups, rest = divmod(microbatches, group_size)
    return min(groups, max(4, 2 * stages // group_size + 2, rest + 1)) * group_size + rest


def _rows(actions: Sequence[Action], placement: Placement, stage: int, splits: bool) -> NDArray[np.int64]:
    """For each action its pass, and what is held, ``[n, 2 chunks + 2]``."""
    chunks = placement.num_chunks
    kinds = np.array([KINDS.index(action.kind) for action in actions])
    numbers = kinds * chunks + np.array([action.chunk for action in actions])
    done = np.cumsum(np.eye(3 * chunks, dtype=np.int64)[numbers], axis=0)  # [n, 3 chunks]: with this action
    forward, backward, weight = done[:, :chunks], done[:, chunks : 2 * chunks], done[:, 2 * chunks :]
    own = np.eye(3 * chunks, dtype=np.int64)[numbers]
    # A backward pass has already taken its microbatch, a forward pass does not hold its own yet.
    live = forward - backward - own[:, :chunks]
    deferred = (backward - weight - own[:, chunks : 2 * chunks]) if splits else np.zeros_like(live)
    received = np.array([_is_received(number, placement, stage) for number in range(3 * chunks)], dtype=np.int64)
    receives = np.append(received[numbers[1:]], 0)
    return np.column_stack((numbers, live, deferred, receives))


def _is_received(number: int, placement: Placement, stage: int) -> bool:
    """Whether the input of the pass ``number`` comes from another stage."""
    kind, chunk = divmod(number, placement.num_chunks)
    here = placement.virtual_stage(stage, chunk)
    source = {"F": here - 1, "B": here + 1, "W": -1}[KINDS[kind]]
    if not 0 <= source < placement.num_virtual_stages:
        return False
    return placement.location(source)[0] != stage
