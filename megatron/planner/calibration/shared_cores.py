"""Ranks that share the cores of a machine."""

from collections.abc import Mapping
from dataclasses import replace

from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.workload import Run, Workload


def price_on_cores(run: Run, constants: Constants, cores: int) -> Mapping[str, float]:
    """Seconds of a step by cause, of ranks with one thread each on ``cores``.

    The cluster is calibrated with a process on every core. With r ranks on a core everything takes r times as long,
    also collectives, which compute on the CPU; but not the bubble: while stages idle, the others have their cores.
    """
    cluster = replace(run.cluster, node_size=max(run.cluster.node_size, run.gpus))
    terms = StepTimeModel(Workload([replace(run, cluster=cluster)])).price(constants).terms
    ranks_per_core = max(1.0, run.gpus / cores)
    return {name: float(seconds[0]) * (1.0 if name == "bubble" else ranks_per_core) for name, seconds in terms.items()}
