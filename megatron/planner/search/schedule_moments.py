"""What a pipeline stage holds at the moments of its schedule that may need the most memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.schedules.registry import SCHEDULES, placement_of
from megatron.schedules.schedule import Action, Kind, Placement
from megatron.schedules.spec import Shape


@dataclass(frozen=True)
class Moment:
    """A pass of a stage, and what the stage holds beside it."""

    kind: Kind
    chunk: int
    live: tuple[int, ...]
    """By chunk: other microbatches between forward and backward pass."""
    deferred: tuple[int, ...]
    """By chunk: other microbatches between backward pass and weight gradients."""
    receives: int
    """Whether the input of the next pass is being received (0 or 1)."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.live, *self.deferred, self.receives)


def moments_of(
    schedule: str, stages: int, microbatches: int, chunks: int, stage: int, group_size: int | None = None
) -> list[Moment]:
    """The moments of ``stage``, without those at which another pass of the kind and chunk has as much of everything."""
    spec = SCHEDULES[schedule]
    size = stages if group_size is None else group_size
    count = microbatches if schedule == "gpipe" else _enough(microbatches, stages, size)
    actions = list(spec.actions(stage, Shape(stages, count, chunks, size)))
    found: dict[tuple[Kind, int], set[Moment]] = {}
    for moment in _walk(actions, placement_of(schedule, stages, chunks), stage, spec.splits_backward):
        found.setdefault((moment.kind, moment.chunk), set()).add(moment)
    return [moment for group in found.values() for moment in _largest(group)]


def _enough(microbatches: int, stages: int, group_size: int) -> int:
    """Microbatches with which a schedule reaches its steady state; as many beyond whole groups."""
    groups, rest = divmod(microbatches, group_size)
    return min(groups, max(4, 2 * stages // group_size + 2, rest + 1)) * group_size + rest


def _walk(actions: Sequence[Action], placement: Placement, stage: int, splits: bool) -> Iterable[Moment]:
    live, deferred = [0] * placement.num_chunks, [0] * placement.num_chunks
    for action, following in zip(actions, (*actions[1:], None)):
        if action.kind == "B":
            live[action.chunk] -= 1
        elif action.kind == "W":
            deferred[action.chunk] -= 1
        receives = following is not None and _is_received(following, placement, stage)
        yield Moment(action.kind, action.chunk, tuple(live), tuple(deferred), int(receives))
        if action.kind == "F":
            live[action.chunk] += 1
        elif action.kind == "B" and splits:
            deferred[action.chunk] += 1


def _is_received(action: Action, placement: Placement, stage: int) -> bool:
    """Whether the input of ``action`` comes from another stage."""
    here = placement.virtual_stage(stage, action.chunk)
    source = {"F": here - 1, "B": here + 1, "W": -1}[action.kind]
    if not 0 <= source < placement.num_virtual_stages:
        return False
    return placement.location(source)[0] != stage


def _largest(moments: Iterable[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda one: -sum(one.numbers)):
        if not any(all(a >= b for a, b in zip(other.numbers, moment.numbers)) for other in kept):
            kept.append(moment)
    return kept
