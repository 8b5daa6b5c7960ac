"""Search of layouts: enumerate them, record their units, price all, keep those that fit, rank, and simulate the best.

Thousands of layouts share some hundred units, whose records are their only account of memory and time. The dry run then
simulates the best layouts, which decides whether they fit.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from megatron.config.dry_run import ALLOWANCE
from megatron.errors import ConfigError
from megatron.operation.run_summary import Costs, daly_interval_s, effective_time, job_mtbf_s
from megatron.planner.plan import Run, make_plan, parallel_map
from megatron.planner.rehearsal.price import PlannedStep, StepPrices, attention_kind, pass_times
from megatron.planner.rehearsal.records import Map, UnitRecords, UnitsOfRun
from megatron.planner.search.accuracy import (
    UNKNOWN_ERROR,
    Level,
    basis_warnings,
    level_of,
    unmeasured,
)
from megatron.planner.search.enumeration import enumerate_layouts, no_layout
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.result import TIE, PlannedLayout, ScalePoint, SearchResult, first_of_families, rank
from megatron.planner.search.stage_memory import StageMemory
from megatron.planner.step_time.workload import Array
from megatron.training.initialize import rank_grid

_ADVICE: Mapping[str, str] = {
    "attention": "a faster attention kernel (docs/kernels.md), or a shorter sequence",
    "between products": "fused norms and activations (docs/kernels.md)",
    "recompute": "less recomputation: more GPUs to shard over, or GPUs with more memory",
    "tensor parallelism": "a smaller tensor-parallel size, which needs more memory per GPU",
    "context parallelism": "a smaller context-parallel size, which needs more memory per GPU",
    "gaps": "larger microbatches: the host launches more work at a time",
    "output layer": "--account-for-loss-in-pipeline-split: the stage with the output layer gets fewer layers",
    "pipeline messages": "fewer chunks per stage, or a faster network",
    "bubble": "more microbatches: a larger global batch, or fewer GPUs",
    "data parallelism": "a larger global batch, which reduces gradients less often per token, or a faster network",
    "optimizer": "the optimizer state sharded over more ranks",
    "expert parallelism": "a smaller expert-parallel size, so that tokens stay in a node",
}
"""What would change each term of the step time."""


def describe_limit(terms: Mapping[str, float], layout: Layout, job: Job) -> tuple[str, str]:
    """What limits the layout, the largest term besides products, and what would change that."""
    # The output layer is a product, too. It limits a pipeline only, where the other stages wait for the last one.
    products = {"products"} if layout.pp > 1 else {"products", "output layer"}
    name = max((name for name in terms if name not in products), key=terms.__getitem__)
    advice = _ADVICE[name]
    if name == "tensor parallelism" and "tp_comm_overlap" in job.given and not layout.tp_comm_overlap:
        advice = f"--tp-comm-overlap, or {advice}"
    return f"{name}: {terms[name] / sum(terms.values()):.0%} of the step", advice


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
    config = layout.apply(job.config, job.given)
    return PlannedStep(UnitsOfRun(records, config, rank_grid(config.parallel, job.num_gpus)), job.global_batch_size)


def price_layouts(job: Job, layouts: Sequence[Layout], records: UnitRecords, map_in_parallel: Map = map) -> Priced:
    steps = [step_of(job, layout, records) for layout in layouts]
    # Thousands of layouts share some hundred units, which are rehearsed first.
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
        layout = priced.layouts[number]
        terms = {name: level.factor * float(seconds[number]) for name, seconds in priced.terms.items()}
        seconds = sum(terms.values())
        error = UNKNOWN_ERROR if unmeasured(job, layout, level) else level.error
        rate = job.tokens_per_step / seconds / job.num_gpus
        limits, advice = describe_limit(terms, layout, job)
        planned.append(
            PlannedLayout(
                layout=layout,
                flags=layout.flags(job.given, job.architecture.num_experts is not None),
                step_time_s=seconds,
                interval_s=(seconds * (1 - error), seconds * (1 + error)),
                terms=terms,
                memory_bytes=num_bytes,
                tightest_stage=stage,
                bubble_fraction=terms["bubble"] / seconds,
                tokens_per_s_per_gpu=rate,
                mfu=rate * flops_per_token / job.peak_flops,
                limits=limits,
                advice=advice,
            )
        )
    return planned


def accuracy_warnings(job: Job, layout: Layout, level: Level) -> list[str]:
    """Sentences on what of a layout has not been measured."""
    missing = unmeasured(job, layout, level)
    return [f"There are no measurements of {reason}: times are +-{UNKNOWN_ERROR:.0%}." for reason in missing]


_MOST_TRIES = 4
"""Dry runs for each one wanted, if most of them do not fit."""

Report = Callable[[str, int, int], None]
"""Receives what is being done, how much is done, and of how much."""


def no_report(what: str, done: int, total: int) -> None:
    """Show no progress."""


Memory = tuple[Mapping[str, int], ...]
"""Bytes by kind at the peak of each stage, with the allowance."""


def memory_by_dry_run(job: Job, layout: Layout) -> Memory:
    run = Run.of(layout.apply(job.config, job.given), job.num_gpus, job.vocabulary)
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])
    return tuple({**stage.peak.by_kind, "allowance": ALLOWANCE} for stage in plan.stages)


def simulate_best(
    job: Job,
    ranked: Sequence[PlannedLayout],
    wanted: int,
    records: UnitRecords,
    report: Report = no_report,
    simulate: Callable[[Job, Layout], Memory] = memory_by_dry_run,
    in_parallel: bool = True,
) -> tuple[PlannedLayout, ...]:
    """``ranked``, with the first layouts of its first ``wanted`` families simulated by the dry run. Layouts that do not
    fit in it are left out, and the next ones are simulated instead."""
    limit = job.config.dry_run.gpu_memory
    found: dict[Layout, Memory] = {}
    with parallel_map() if in_parallel else nullcontext(map) as map_in_parallel:
        while len(found) < _MOST_TRIES * wanted:
            # Layouts that failed drop out, so that the next families move up.
            kept = (one for one in ranked if one.layout not in found or _needed(found[one.layout])[0] <= limit)
            best = [one.layout for one in islice(first_of_families(kept), wanted)]
            batch = [layout for layout in best if layout not in found]
            if not batch:
                break
            done = wanted - len(batch)
            report("dry run", done, wanted)
            for number, memory in enumerate(map_in_parallel(partial(simulate, job), batch), start=1):
                found[batch[number - 1]] = memory
                report("dry run", done + number, wanted)
    prices = StepPrices(job.cluster, job.constants)
    completed: list[PlannedLayout] = []
    for one in ranked:
        if one.layout not in found:
            completed.append(one)
            continue
        memory = found[one.layout]
        needed, stage = _needed(memory)
        if needed <= limit:
            completed.append(
                replace(
                    one,
                    memory_bytes=needed,
                    tightest_stage=stage,
                    is_simulated=True,
                    memory_by_stage=memory,
                    passes=pass_times(prices, step_of(job, one.layout, records), one.step_time_s),
                )
            )
    return tuple(completed)


def _needed(memory: Memory) -> tuple[int, int]:
    """Bytes of the tightest stage, and the stage."""
    return max((sum(kinds.values()), stage) for stage, kinds in enumerate(memory))


SAFETY = 1.02
"""Factor on the memory by the units' records: it may be so much too low."""
INTEREST = 1.5
"""Layouts that take more than so many times the time of the fastest that fits are left out."""
_SCALES = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""Numbers of GPUs, relative to the job's, of the strong-scaling curve."""


def search(job: Job, num_simulated: int = 5, level: Level | None = None, report: Report = no_report) -> SearchResult:
    """The layouts of ``job`` that fit, ranked, of which the dry run has simulated the first ``num_simulated``.

    Raises :class:`ConfigError` if no layout satisfies the flags, or none fits.
    """
    started = time.monotonic()
    level = level or level_of(job.cluster)
    records = unit_records(job)
    found = find_layouts(job, level, records, report=report)
    ranked = simulate_best(job, found.planned, num_simulated, records, report)
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
    """The bytes of the tightest stage, and that stage, by number of a layout that fits."""
    limit = job.config.dry_run.gpu_memory
    memory = StageMemory(job.config, records, job.given)
    needed: dict[int, tuple[int, int]] = {}

    def fits(number: int) -> bool:
        if number not in needed:
            layout = priced.layouts[number]
            by_stage = memory.by_stage(layout, job.num_microbatches(layout), priced.units[number])
            needed[number] = max(by_stage), by_stage.index(max(by_stage))
        return needed[number][0] * SAFETY <= limit

    # From the fastest on: memory is computed only until the first that fits says what is of interest.
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
    points = []
    for count in counts:
        # The search is repeated for other numbers, without the dry run, for ties alone.
        scaled, chosen = job.with_gpus(count), best
        if count != job.num_gpus:
            try:
                chosen = find_layouts(scaled, level, records, TIE).planned[0]
            except ConfigError:
                continue  # none fits
        points.append(scale_point(scaled, chosen.layout, chosen.step_time_s))
    return sorted(points, key=lambda point: point.num_gpus)


def scale_point(job: Job, layout: Layout, step_time_s: float) -> ScalePoint:
    """A run of ``layout`` over the tokens of the job, saved at the interval that leaves most time for training."""
    costs = Costs(job_mtbf_s(job.num_gpus, job.gpu_hours_per_failure), job.operation.restart_s, job.operation.save_s)
    interval = daly_interval_s(costs)
    goodput = effective_time(interval, costs)
    seconds = job.operation.tokens / job.tokens_per_step * step_time_s / goodput
    gpu_hours = seconds * job.num_gpus / 3600.0
    price = job.operation.price_per_gpu_hour
    price = job.cluster.price_per_gpu_hour if price is None else price  # None if neither states one
    return ScalePoint(
        num_gpus=job.num_gpus,
        layout=layout,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=job.tokens_per_step / step_time_s / job.num_gpus,
        goodput=goodput,
        save_interval_s=interval,
        days=gpu_hours / job.num_gpus / 24.0,
        gpu_hours=gpu_hours,
        price=None if price is None else gpu_hours * price,
    )
