"""Search of layouts: enumerate them, rehearse their units, price all, keep those that fit, rank, and simulate the best.

Thousands of layouts share some hundred units, whose records are their only account of memory and time. The dry run then
simulates the best layouts, which decides whether they fit.
"""

import time
from dataclasses import dataclass

import numpy as np

from megatron.errors import ConfigError
from megatron.operation.effective_time import Costs, daly_interval_s, effective_time, job_mtbf_s
from megatron.planner.arithmetic import DAY
from megatron.planner.rehearsal.price import attention_kind
from megatron.planner.rehearsal.records import UnitRecords
from megatron.planner.search.accuracy import Level, basis_warnings, level_of
from megatron.planner.search.enumeration import enumerate_layouts, no_layout
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.result import TIE, PlannedLayout, ScalePoint, SearchResult, rank
from megatron.planner.search.search import (
    Priced,
    Report,
    accuracy_warnings,
    no_report,
    parallel_map,
    plan_layouts,
    price_layouts,
    rehearse_best,
)
from megatron.planner.search.stage_memory import StageMemory

SAFETY = 1.02
"""Factor on the memory by the units' records: it may be so much too low."""
INTEREST = 1.5
"""Layouts that take more than so many times the time of the fastest that fits are left out."""
_SCALES = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""Numbers of GPUs, relative to the job's, of the strong-scaling curve."""


def search(job: Job, num_rehearsed: int = 5, level: Level | None = None, report: Report = no_report) -> SearchResult:
    """The layouts of ``job`` that fit, ranked, of which the first ``num_rehearsed`` have been rehearsed.

    Raises :class:`ConfigError` if no layout satisfies the flags, or none fits.
    """
    started = time.monotonic()
    level = level or level_of(job.cluster)
    records = unit_records(job)
    found = find_layouts(job, level, records, report=report)
    ranked = rehearse_best(job, found.planned, num_rehearsed, records, report)
    if not ranked:
        raise ConfigError(
            f"None of {found.num_enumerated:,} layouts fits by the dry run: use more GPUs than --num-gpus "
            f"{job.num_gpus}, or GPUs with more memory."
        )
    scaling = tuple(_scaling(job, ranked[0], level, records, report))
    return SearchResult(
        job,
        ranked,
        found.num_enumerated,
        len(ranked),
        time.monotonic() - started,
        scaling,
        (
            *node_warnings(job),
            *basis_warnings(job.cluster, [point.num_gpus for point in scaling], level),
            *accuracy_warnings(job, ranked[0].layout, level),
        ),
    )


def node_warnings(job: Job) -> list[str]:
    """A sentence about GPUs that do not fill their last node."""
    size = job.cluster.node_size
    rest = job.num_gpus % size
    if job.num_gpus < size or not rest:
        return []
    full = job.num_gpus - rest
    return [
        f"{job.num_gpus:,} GPUs leave {size - rest} of the {size} GPUs of the last node idle: {full:,} or "
        f"{full + size:,} fill their nodes."
    ]


def unit_records(job: Job) -> UnitRecords:
    """Records of units for all layouts of ``job``, none yet."""
    return UnitRecords(job.vocabulary.size, attention_kind(job.config, job.cluster))


@dataclass(frozen=True)
class Found:
    """The layouts that fit by the records of their units, ranked."""

    planned: tuple[PlannedLayout, ...]
    num_enumerated: int


def find_layouts(
    job: Job,
    level: Level,
    records: UnitRecords | None = None,
    interest: float = INTEREST,
    report: Report = no_report,
) -> Found:
    """Enumerate, price, prune by memory, and rank: layouts of at most ``interest`` times the time of the fastest that
    fits."""
    records = records or unit_records(job)
    report("enumerate layouts", 0, 1)
    layouts = enumerate_layouts(job.config, job.architecture, job.num_gpus, job.cluster, job.given)
    if not layouts:
        raise no_layout(job)
    report("price layouts", 0, 1)
    with parallel_map() as map_in_parallel:
        priced = price_layouts(job, layouts, records, map_in_parallel)
    report("memory of layouts", 0, 1)
    needed = _fitting(job, priced, records, interest)
    return Found(rank(plan_layouts(job, priced, needed, level), job.config.dry_run.gpu_memory), len(layouts))


def _fitting(job: Job, priced: Priced, records: UnitRecords, interest: float) -> dict[int, tuple[int, int]]:
    """By number of a layout that fits: bytes of the tightest stage, and that stage."""
    limit = job.config.dry_run.gpu_memory
    memory = StageMemory(job.config, records, job.given)
    needed: dict[int, tuple[int, int]] = {}

    def fits(number: int) -> bool:
        if number not in needed:
            layout = priced.layouts[number]
            needed[number] = memory.tightest(layout, job.num_microbatches(layout), priced.units[number])
        return needed[number][0] * SAFETY <= limit

    numbers = range(len(priced.layouts))
    fastest = next((number for number in numbers if fits(number) and not priced.layouts[number].reduces_in_bf16), None)
    if fastest is not None:
        slowest = interest * float(priced.seconds[fastest])
        numbers = range(int(np.searchsorted(priced.seconds, slowest, "right")))
    found = {number: needed[number] for number in numbers if fits(number)}
    if not found:
        least = min(needs for needs, _ in needed.values())
        raise ConfigError(
            f"None of {len(priced.layouts):,} layouts fits {limit / 2**30:g} GiB, the smallest needs "
            f"{least / 2**30:.1f} GiB: use more GPUs than --num-gpus {job.num_gpus}, or GPUs with more memory."
        )
    return found


def _scaling(job: Job, best: PlannedLayout, level: Level, records: UnitRecords, report: Report) -> list[ScalePoint]:
    """The best layout on fewer and more GPUs, where one fits."""
    report("other numbers of GPUs", 0, 1)
    counts = [job.num_gpus * top // bottom for top, bottom in _SCALES if job.num_gpus * top % bottom == 0]
    others = [_scaled(job, level, records, count) for count in counts if count != job.num_gpus]
    points = [scale_point(job, best.layout, best.step_time_s), *(point for point in others if point is not None)]
    return sorted(points, key=lambda point: point.num_gpus)


def _scaled(job: Job, level: Level, records: UnitRecords, num_gpus: int) -> ScalePoint | None:
    """The best layout on another number of GPUs; None if none fits."""
    scaled = job.with_gpus(num_gpus)
    try:
        found = find_layouts(scaled, level, records, TIE).planned[0]
    except ConfigError:
        return None
    return scale_point(scaled, found.layout, found.step_time_s)


def scale_point(job: Job, layout: Layout, step_time_s: float) -> ScalePoint:
    """A run of ``layout`` over the tokens of the job, saved at the interval that leaves most time for training."""
    costs = Costs(job_mtbf_s(job.num_gpus, job.gpu_hours_per_failure), job.operation.restart_s, job.operation.save_s)
    interval = daly_interval_s(costs)
    goodput = effective_time(interval, costs)
    seconds = job.tokens / job.tokens_per_step * step_time_s / goodput
    gpu_hours = seconds * job.num_gpus / 3600.0
    price = job.price_per_gpu_hour
    return ScalePoint(
        num_gpus=job.num_gpus,
        layout=layout,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=job.tokens_per_step / step_time_s / job.num_gpus,
        goodput=goodput,
        save_interval_s=interval,
        days=seconds / DAY,
        gpu_hours=gpu_hours,
        price=None if price is None else gpu_hours * price,
    )
