"""The schedules by name. A new one is a module in ``catalog``, which this module finds."""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megatron.schedules import catalog
from megatron.schedules.schedule import Placement, Schedule, ScheduleError, ScheduleSpec, Shape


def _find_schedules() -> dict[str, ScheduleSpec]:
    modules = (import_module(f"{catalog.__name__}.{found.name}") for found in pkgutil.iter_modules(catalog.__path__))
    by_name: dict[str, ScheduleSpec] = {module.SCHEDULE.name: module.SCHEDULE for module in modules}
    return dict(sorted(by_name.items()))


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
