"""Ranks that share the cores of a machine."""

from collections.abc import Mapping
from dataclasses import replace

from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.workload import Run, Workload


def price_on_cores(run: Run, constants: Constants, cores: int) -> Mapping[str, float]:
    """Seconds of a step by cause, of ranks with one thread each on ``cores``.

    The cluster is calibrated with a process on every core. With r ranks on a core all work takes r times as long, also
    collectives, which compute on the CPU. A rank that idles in the bubble leaves its core to others, so of the bubble
    remains what makes the step as long as on cores of their own.
    """
    cluster = replace(run.cluster, node_size=max(run.cluster.node_size, run.gpus))
    terms = StepTimeModel(Workload([replace(run, cluster=cluster)])).price(constants).terms
    ranks_per_core = max(1.0, run.gpus / cores)
    seconds = {name: float(one[0]) for name, one in terms.items()}
    bubble = seconds.pop("bubble")
    busy = sum(seconds.values())
    shared = {name: ranks_per_core * one for name, one in seconds.items()}
    return {**shared, "bubble": max(0.0, busy + bubble - ranks_per_core * busy)}
