"""The price of layouts in closed form."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.search.accuracy import UNKNOWN_ERROR, Level, measured_regimes, unmeasured
from megatron.planner.search.advice import describe_limit
from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout
from megatron.planner.search.result import PlannedLayout
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.of_run import step_to_price
from megatron.planner.step_time.workload import Array, Run, StepTime, Workload
from megatron.training.initialize import rank_grid


def step_of(job: Job, config: RunConfig) -> Run:
    """The step of a configuration on the job's GPUs; raises :class:`ConfigError` for what has no closed form."""
    grid = rank_grid(config.parallel, job.num_gpus)
    return step_to_price(job.architecture, config, grid, job.global_batch_size, job.cluster)


def price_steps(job: Job, steps: Sequence[Run]) -> StepTime:
    """The times of steps on the job's cluster."""
    return StepTimeModel(Workload(steps)).price(job.constants)


@dataclass(frozen=True)
class Priced:
    """Layouts with their times, the fastest first."""

    layouts: tuple[Layout, ...]
    steps: tuple[Run, ...]
    seconds: Array
    """``[layouts]``."""
    terms: Mapping[str, Array]
    """``[layouts]`` each, by cause."""


def price_layouts(job: Job, layouts: Sequence[Layout]) -> Priced:
    """The times of all layouts; those without a closed form are left out."""
    found = []
    for layout in layouts:
        with suppress(ConfigError):
            found.append((layout, step_of(job, layout.apply(job.config, job.given))))
    if not found:
        raise ConfigError("No layout has a closed form of its time: remove flags that it does not describe.")
    times = price_steps(job, [step for _, step in found])
    order = np.argsort(times.total, kind="stable")
    return Priced(
        tuple(found[number][0] for number in order),
        tuple(found[number][1] for number in order),
        times.total[order],
        {name: seconds[order] for name, seconds in times.terms.items()},
    )


def plan_layouts(job: Job, priced: Priced, needed: Mapping[int, tuple[int, int]], level: Level) -> list[PlannedLayout]:
    """The layouts of the numbers in ``needed``, which has the bytes of the tightest stage, and that stage."""
    measured = measured_regimes() | level.regimes
    flops_per_token = job.architecture.flops_per_token(job.seq_length)
    planned = []
    for number, (num_bytes, stage) in needed.items():
        terms = {name: level.factor * float(seconds[number]) for name, seconds in priced.terms.items()}
        error = UNKNOWN_ERROR if unmeasured(priced.steps[number], measured) else level.error
        planned.append(_planned(job, priced.layouts[number], num_bytes, stage, terms, error, flops_per_token))
    return planned


def accuracy_warnings(job: Job, layout: Layout, level: Level) -> list[str]:
    """Sentences on what of a layout has not been measured."""
    missing = unmeasured(step_of(job, layout.apply(job.config, job.given)), measured_regimes() | level.regimes)
    return [f"There are no measurements of {reason}: times are +-{UNKNOWN_ERROR:.0%}." for reason in missing]


def _planned(
    job: Job, layout: Layout, needed: int, stage: int, terms: Mapping[str, float], error: float, flops_per_token: float
) -> PlannedLayout:
    seconds = sum(terms.values())
    tokens_per_s_per_gpu = job.tokens_per_step / seconds / job.num_gpus
    limits, advice = describe_limit(terms, layout, job)
    return PlannedLayout(
        layout=layout,
        flags=layout.flags(job.given, job.architecture.num_experts is not None),
        step_time_s=seconds,
        interval_s=(seconds * (1 - error), seconds * (1 + error)),
        terms=terms,
        memory_bytes=needed,
        tightest_stage=stage,
        is_rehearsed=False,
        memory_by_stage=(),
        rehearsal=None,
        bubble_fraction=terms["bubble"] / seconds,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        mfu=tokens_per_s_per_gpu * flops_per_token / job.peak_flops,
        limits=limits,
        advice=advice,
        is_tie=False,
    )
