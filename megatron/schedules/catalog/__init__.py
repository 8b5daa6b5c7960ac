"""The schedules by name: every :class:`ScheduleSpec` of the modules here, whose functions yield the actions of a stage
in order."""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megatron.schedules.schedule import Placement, Schedule, ScheduleError, ScheduleSpec, Shape


def _find_schedules() -> dict[str, ScheduleSpec]:
    found: dict[str, ScheduleSpec] = {}
    for module in pkgutil.iter_modules(__path__):
        names = vars(import_module(f"{__name__}.{module.name}"))
        found |= {spec.name: spec for spec in names.values() if isinstance(spec, ScheduleSpec)}
    return dict(sorted(found.items()))


SCHEDULES = _find_schedules()

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
    """The choices of a flag that takes a schedule."""


def placement_of(name: str, num_stages: int, num_chunks: int | None = None) -> Placement:
    """The placement of the schedule's chunks; raises :class:`ScheduleError` for an unsupported number of chunks."""
    spec = SCHEDULES[name]
    num_chunks = spec.resolve_chunks(num_chunks)
    if not spec.allows(num_chunks):
        raise ScheduleError(f"{name} needs {spec.chunks} per stage, not {num_chunks}")
    return Placement(num_stages, num_chunks, spec.placement)


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """The schedule ``name`` of a batch; raises :class:`ScheduleError` for unsupported sizes.

    ``num_chunks`` and ``microbatch_group_size`` (default: ``num_stages``) are for schedules of several chunks.
    """
    spec = SCHEDULES[name]
    placement = placement_of(name, num_stages, num_chunks)
    if min(num_stages, num_microbatches) < 1:
        raise ScheduleError("a schedule needs at least one stage and one microbatch")
    group_size = num_stages if microbatch_group_size is None else microbatch_group_size
    if group_size < num_stages:
        raise ScheduleError(
            f"{name} would idle or deadlock with {group_size} microbatches per group on {num_stages} stages: use "
            f"{num_stages} or more"
        )
    shape = Shape(num_stages, num_microbatches, placement.num_chunks, group_size)
    actions = tuple(tuple(spec.actions(stage, shape)) for stage in range(num_stages))
    return Schedule(name, placement, num_microbatches, spec.kinds, actions)
