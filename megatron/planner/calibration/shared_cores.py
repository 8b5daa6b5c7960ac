"""Ranks that share the cores of a machine."""

from collections.abc import Mapping

from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.own_step import OwnStepModel
from megatron.planner.step_time.workload import Run, Workload
from megatron.schedules.registry import build_schedule
from megatron.schedules.simulator import Durations, makespan_on_cores, simulate

_ONCE = ("data parallelism", "optimizer")
"""Terms outside of the pipeline, to which all ranks come at the same time."""


def price_on_cores(run: Run, constants: Constants, cores: int) -> Mapping[str, float]:
    """Seconds of a step of this project by cause, of ranks with one thread each on ``cores``.

    The cluster of the run has all ranks on one node, and is calibrated with a process on every core. With r ranks on a
    core work takes r times as long, also collectives, which compute on the CPU; but while a stage idles in the bubble,
    the others have its core.
    """
    assert run.own is not None
    microbatches = int(run.global_batch_size / (run.micro_batch_size * run.dp))
    schedule = build_schedule(run.own.pipeline_schedule, run.pp, microbatches, run.vp)
    price = OwnStepModel(Workload([run])).price(constants)
    seconds = {name: float(one[0]) for name, one in price.terms.items()}
    first, inner, last = price.passes
    by_stage = [first, *[inner] * (run.pp * run.vp - 2), last][: run.pp * run.vp]
    forward, backward, weight = (tuple(float(times[kind][0]) for times in by_stage) for kind in range(3))
    durations = Durations(forward, backward, weight)
    longer = makespan_on_cores(schedule, durations, run.gpus // run.pp, cores) / simulate(schedule, durations).makespan
    ranks_per_core = max(1.0, run.gpus / cores)
    once = {name: ranks_per_core * seconds.pop(name) for name in _ONCE}
    whole = longer * sum(seconds.values())
    bubble = seconds.pop("bubble")
    busy = whole / longer - bubble
    # A stage that has more to do than the others shares its core less.
    slower = min(ranks_per_core, whole / busy)
    return {name: slower * one for name, one in seconds.items()} | once | {"bubble": whole - slower * busy}
