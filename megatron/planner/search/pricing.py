"""The price of layouts from the records of their units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.rehearsal.records import Map, UnitRecords, UnitsOfRun
from megatron.planner.search.accuracy import UNKNOWN_ERROR, Level, measured_regimes, regimes_of, unmeasured
from megatron.planner.search.advice import describe_limit
from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout
from megatron.planner.search.result import PlannedLayout
from megatron.planner.step_time.workload import Array
from megatron.training.initialize import rank_grid


@dataclass(frozen=True)
class Priced:
    """Layouts with their times, the fastest first."""

    layouts: tuple[Layout, ...]
    units: tuple[UnitsOfRun, ...]
    seconds: Array
    """``[layouts]``."""
    terms: Mapping[str, Array]
    """``[layouts]`` each, by cause."""


def step_of(job: Job, layout: Layout, records: UnitRecords) -> PlannedStep:
    """The step of a layout."""
    config = layout.apply(job.config, job.given)
    return PlannedStep(UnitsOfRun(records, config, rank_grid(config.parallel, job.num_gpus)), job.global_batch_size)


def price_layouts(job: Job, layouts: Sequence[Layout], records: UnitRecords, map_in_parallel: Map = map) -> Priced:
    """The times of all layouts."""
    steps = [step_of(job, layout, records) for layout in layouts]
    records.rehearse((step.units for step in steps), map_in_parallel)
    times = StepPrices(job.cluster, job.constants).price(steps)
    order = np.argsort(times.total, kind="stable")
    return Priced(
        tuple(layouts[number] for number in order),
        tuple(steps[number].units for number in order),
        times.total[order],
        {name: seconds[order] for name, seconds in times.terms.items()},
    )


def plan_layouts(job: Job, priced: Priced, needed: Mapping[int, tuple[int, int]], level: Level) -> list[PlannedLayout]:
    """The layouts of the numbers in ``needed``, which has the bytes of the tightest stage, and that stage."""
    flops_per_token = job.architecture.flops_per_token(job.seq_length)
    planned = []
    for number, (num_bytes, stage) in needed.items():
        terms = {name: level.factor * float(seconds[number]) for name, seconds in priced.terms.items()}
        layout = priced.layouts[number]
        error = UNKNOWN_ERROR if _unmeasured(job, layout, level) else level.error
        planned.append(_planned(job, layout, num_bytes, stage, terms, error, flops_per_token))
    return planned


def accuracy_warnings(job: Job, layout: Layout, level: Level) -> list[str]:
    """Sentences on what of a layout has not been measured."""
    missing = _unmeasured(job, layout, level)
    return [f"There are no measurements of {reason}: times are +-{UNKNOWN_ERROR:.0%}." for reason in missing]


def _unmeasured(job: Job, layout: Layout, level: Level) -> list[str]:
    config = layout.apply(job.config, job.given)
    found = regimes_of(config, job.cluster, job.num_gpus, layout.schedule)
    return unmeasured(found, job.cluster, measured_regimes() | level.regimes)


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
        passes=None,
        bubble_fraction=terms["bubble"] / seconds,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        mfu=tokens_per_s_per_gpu * flops_per_token / job.peak_flops,
        limits=limits,
        advice=advice,
        is_tie=False,
    )
