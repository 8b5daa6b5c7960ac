"""Ranks that share the cores of a machine."""

from collections.abc import Mapping

from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.workload import Cluster
from megatron.schedules.catalog import build_schedule
from megatron.schedules.schedule import Result, Schedule
from megatron.schedules.simulator import Durations, simulate

_ONCE = ("data parallelism", "optimizer")
"""Terms outside of the pipeline, to which all ranks come at the same time."""


def price_on_cores(step: PlannedStep, cluster: Cluster, constants: Constants, cores: int) -> Mapping[str, float]:
    """Seconds of a step by cause, of ranks with one thread each on ``cores``.

    ``cluster`` has all ranks on one node, and is calibrated with a process on every core. With r ranks on a
    core work takes r times as long, also collectives, which compute on the CPU; but while a stage idles in the bubble,
    the others have its core.
    """
    units, ranks, stages = step.units, step.grid.world_size, step.grid.pp
    placement = units.division.placement
    schedule = build_schedule(units.schedule, stages, step.num_microbatches, placement.num_chunks)
    price = StepPrices(cluster, constants).price([step])
    seconds = {name: float(one[0]) for name, one in price.terms.items()}
    assert price.passes is not None
    first, inner, last = price.passes
    by_stage = [first, *[inner] * (placement.num_virtual_stages - 2), last][: placement.num_virtual_stages]
    forward, backward, weight = (tuple(float(times[kind][0]) for times in by_stage) for kind in range(3))
    durations = Durations(forward, backward, weight)
    longer = makespan_on_cores(schedule, durations, ranks // stages, cores) / simulate(schedule, durations).makespan
    ranks_per_core = max(1.0, ranks / cores)
    once = {name: ranks_per_core * seconds.pop(name) for name in _ONCE}
    whole = longer * sum(seconds.values())
    bubble = seconds.pop("bubble")
    busy = whole / longer - bubble
    # A stage that has more to do than the others shares its core less.
    slower = min(ranks_per_core, whole / busy)
    return {name: slower * one for name, one in seconds.items()} | once | {"bubble": whole - slower * busy}


def makespan_on_cores(schedule: Schedule, durations: Durations, replicas: int, cores: int) -> float:
    """The makespan of ``replicas`` equal pipelines in lockstep, with one process per stage, on too few ``cores``.

    While more processes compute than there are cores, all of them progress more slowly and equally fast. ``durations``
    are of passes on a core of their own; ``durations.send`` is ignored.
    """
    splits = schedule.splits_backward
    queues = [list(reversed(actions)) for actions in schedule.actions]
    done: set[Result] = set()
    active: dict[int, float] = {}  # stage: what is left of its action
    now = 0.0
    while any(queues):
        for stage, queue in enumerate(queues):
            if queue and stage not in active and done.issuperset(schedule.requirements(stage, queue[-1])):
                virtual_stage = schedule.result(stage, queue[-1]).virtual_stage
                active[stage] = durations.of(queue[-1].kind, virtual_stage, splits)
        slower = max(1.0, replicas * len(active) / cores)
        step = min(active.values())
        now += slower * step
        for stage in [stage for stage, left in active.items() if left == step]:
            done.add(schedule.result(stage, queues[stage].pop()))
            del active[stage]
        active = {stage: left - step for stage, left in active.items()}
    return now
