"""The price of layouts from the records of their units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.rehearsal.records import Map, UnitRecords, UnitsOfRun
from megatron.planner.search.accuracy import UNKNOWN_ERROR, Level, measured_regimes, regimes_of, unmeasured
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.result import PlannedLayout
from megatron.planner.step_time.workload import Array
from megatron.training.initialize import rank_grid

PRODUCTS = "products"
"""The term that a layout is limited by in the best case."""

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
"""By term of the step time."""


def largest_overhead(terms: Mapping[str, float], layout: Layout) -> str:
    """The largest term besides products.

    The output layer is a product, too. It limits a pipeline only, where the other stages wait for the last one.
    """
    is_product = {PRODUCTS} if layout.pp > 1 else {PRODUCTS, "output layer"}
    overheads = {name: seconds for name, seconds in terms.items() if name not in is_product}
    return max(overheads, key=overheads.__getitem__)


def describe_limit(terms: Mapping[str, float], layout: Layout, job: Job) -> tuple[str, str]:
    """What limits the layout, and what would change that."""
    name = largest_overhead(terms, layout)
    share = terms[name] / sum(terms.values())
    advice = _ADVICE[name]
    if name == "tensor parallelism" and "tp_comm_overlap" in job.given and not layout.tp_comm_overlap:
        advice = f"--tp-comm-overlap, or {advice}"
    return f"{name}: {share:.0%} of the step", advice


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
