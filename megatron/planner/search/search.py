"""Search of layouts: enumerate them, keep those that fit by formula, price all, rank, and rehearse the best.

A closed form prices thousands of layouts in seconds. The dry run then simulates the best ones, which decides whether
they fit; its priced rehearsal checks the closed form.
"""

import time
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron.errors import ConfigError
from megatron.planner.search.accuracy import Level, basis_warnings, level_of
from megatron.planner.search.cost import scale_point
from megatron.planner.search.enumeration import enumerate_layouts, no_layout
from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout
from megatron.planner.search.memory_formula import MemoryFormula
from megatron.planner.search.pricing import Priced, accuracy_warnings, plan_layouts, price_layouts
from megatron.planner.search.ranking import TIE, rank
from megatron.planner.search.rehearsals import Report, disagreements, no_report, parallel_map, rehearse_best
from megatron.planner.search.result import PlannedLayout, ScalePoint, SearchResult

SAFETY = 1.02
"""Factor on the memory by formula: it may be so much too low."""
INTEREST = 1.5
"""Layouts that take more than so many times the time of the fastest that fits are left out."""
_SCALES = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""Numbers of GPUs, relative to the job's, of the strong-scaling curve."""
MIN_PARALLEL = 1000
"""Layouts from which processes save more time by the memory formula than they cost."""


def search(job: Job, num_rehearsed: int = 5, level: Level | None = None, report: Report = no_report) -> SearchResult:
    """The layouts of ``job`` that fit, ranked, of which the first ``num_rehearsed`` have been rehearsed.

    Raises :class:`ConfigError` if no layout satisfies the flags, or none fits.
    """
    started = time.monotonic()
    level = level or level_of(job.cluster)
    found = find_layouts(job, level, report=report)
    ranked = rehearse_best(job, found.planned, num_rehearsed, report)
    if not ranked:
        raise ConfigError(
            f"None of {found.num_enumerated:,} layouts fits by the dry run: use more GPUs than --num-gpus "
            f"{job.num_gpus}, or GPUs with more memory."
        )
    scaling = tuple(_scaling(job, ranked[0], level, report))
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
            *disagreements(ranked),
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


@dataclass(frozen=True)
class Found:
    """The layouts that fit by formula, ranked."""

    planned: tuple[PlannedLayout, ...]
    num_enumerated: int


def find_layouts(
    job: Job,
    level: Level,
    interest: float = INTEREST,
    report: Report = no_report,
    min_parallel: int = MIN_PARALLEL,
) -> Found:
    """Enumerate, price, prune by the memory formula, and rank: layouts of at most ``interest`` times the time of the
    fastest that fits."""
    report("enumerate layouts", 0, 1)
    layouts = enumerate_layouts(job.config, job.architecture, job.num_gpus, job.cluster, job.given)
    if not layouts:
        raise no_layout(job)
    report("price layouts", 0, 1)
    priced = price_layouts(job, layouts)
    report("memory by formula", 0, 1)
    needed = _fitting(job, priced, interest, min_parallel)
    return Found(rank(plan_layouts(job, priced, needed, level), job.config.dry_run.gpu_memory), len(layouts))


def _fitting(job: Job, priced: Priced, interest: float, min_parallel: int) -> dict[int, tuple[int, int]]:
    """By number of a layout that fits: bytes of the tightest stage, and that stage."""
    limit = job.config.dry_run.gpu_memory

    def fits(number: int) -> bool:
        return needed[number][0] * SAFETY <= limit

    needed: dict[int, tuple[int, int]] = {}
    formula = MemoryFormula(job.config, job.architecture, job.given)
    for number, layout in enumerate(priced.layouts):
        needed[number] = formula.tightest(layout, job.num_microbatches(layout))
        if fits(number) and not layout.reduces_in_bf16:
            slowest = interest * float(priced.seconds[number])
            others = range(number + 1, int(np.searchsorted(priced.seconds, slowest, "right")))
            needed |= _needed(job, priced, others, min_parallel)
            break
    found = {number: needed[number] for number in sorted(needed) if fits(number)}
    if not found:
        least = min(needs for needs, _ in needed.values())
        raise ConfigError(
            f"None of {len(priced.layouts):,} layouts fits {limit / 2**30:g} GiB, the smallest needs "
            f"{least / 2**30:.1f} GiB: use more GPUs than --num-gpus {job.num_gpus}, or GPUs with more memory."
        )
    return found


def _needed(job: Job, priced: Priced, numbers: range, min_parallel: int) -> dict[int, tuple[int, int]]:
    """By number of a layout: bytes of the tightest stage, and that stage; many in parallel processes."""
    # Layouts of equal sizes share the most of the formula.
    groups: dict[Hashable, dict[int, Layout]] = {}
    for number in numbers:
        layout = priced.layouts[number]
        groups.setdefault((layout.pp, layout.tp, layout.cp, layout.dp), {})[number] = layout
    largest_first = sorted(groups.values(), key=len, reverse=True)
    with parallel_map() if len(numbers) >= min_parallel else nullcontext(map) as map_in_parallel:
        parts = list(map_in_parallel(partial(_needed_of_group, job), largest_first))
    return {number: needs for part in parts for number, needs in part.items()}


def _needed_of_group(job: Job, layouts: Mapping[int, Layout]) -> dict[int, tuple[int, int]]:
    formula = MemoryFormula(job.config, job.architecture, job.given)
    return {number: formula.tightest(layout, job.num_microbatches(layout)) for number, layout in layouts.items()}


def _scaling(job: Job, best: PlannedLayout, level: Level, report: Report) -> list[ScalePoint]:
    """The best layout on fewer and more GPUs, where one fits."""
    report("other numbers of GPUs", 0, 1)
    counts = [job.num_gpus * top // bottom for top, bottom in _SCALES if job.num_gpus * top % bottom == 0]
    with parallel_map() as map_in_parallel:
        others = map_in_parallel(partial(_scaled, job, level), [count for count in counts if count != job.num_gpus])
        points = [scale_point(job, best.layout, best.step_time_s), *(point for point in others if point is not None)]
    return sorted(points, key=lambda point: point.num_gpus)


def _scaled(job: Job, level: Level, num_gpus: int) -> ScalePoint | None:
    """The best layout on another number of GPUs; None if none fits."""
    scaled = job.with_gpus(num_gpus)
    try:
        found = find_layouts(scaled, level, TIE).planned[0]
    except ConfigError:
        return None
    return scale_point(scaled, found.layout, found.step_time_s)
