"""The result of a small search, with figures that are consistent but made up, and what its page shows.

``python -m tests.tools.sample_search`` writes ``plan_page.txt``: read what it changes before you commit it.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron.commands.pages.plan_report import plan_page
from megatron.config.command_line import CommandLine
from megatron.planner.rehearsal.launch_prices import Product
from megatron.planner.rehearsal.price import PassTimes
from megatron.planner.search.layout import Job, Layout, Operation
from megatron.planner.search.result import PlannedLayout, SearchResult
from megatron.planner.search.search import scale_point
from megatron.planner.step_time.workload import read_cluster
from tests.reports.load_page import Page

GIB = 2**30


@cache
def sample_job() -> Job:
    """Llama 3.1 70B on 64 H100."""
    arguments = ["--model", "llama3.1-70b", "--seq-length", "8192", "--global-batch-size", "128", "--bf16"]
    operation = Operation(tokens=15e12, price_per_gpu_hour=2.5)
    return Job.of(CommandLine.of(arguments), read_cluster("h100"), 64, operation)


def sample_layout(tp: int, pp: int, cp: int, vp: int = 1, schedule: str = "1f1b", **others: Any) -> Layout:
    given: dict[str, Any] = {"sharding": "optim", "micro_batch_size": 1, "recompute": "none"} | others
    return Layout(tp=tp, pp=pp, cp=cp, dp=64 // (tp * pp * cp), vp=vp, schedule=schedule, **given)


LAYOUTS = (
    sample_layout(4, 4, 2, 5, "interleaved"),
    sample_layout(4, 4, 1, 5, "interleaved", recompute="layernorm+mlp_act"),
    sample_layout(8, 2, 1),
    sample_layout(2, 4, 2, 1, "zb-h1", recompute="mlp_act"),
    sample_layout(2, 8, 1, 2, "zb-v"),
    sample_layout(8, 1, 1, sharding="optim_grads_params", recompute="full", recompute_layers=40),
    sample_layout(1, 8, 2, recompute="full", recompute_layers=10, micro_batch_size=2),
    sample_layout(4, 4, 4, 5, "interleaved", reduces_in_bf16=True),
)


def planned(rank: int, layout: Layout) -> PlannedLayout:
    """The ``rank``-th layout, from 0 on; each is 0.7 % slower than the one before, later ones 6 %."""
    seconds = 8.0 * 1.007**rank * (1.06 ** max(0, rank - 2))
    terms = {
        "products": 0.6 * seconds,
        "attention": 0.09 * seconds,
        "between products": 0.08 * seconds,
        "tensor parallelism": 0.02 * layout.tp * seconds,
        "context parallelism": 0.004 * (layout.cp - 1) * seconds,
        "output layer": 0.03 * seconds,
        "bubble": 0.01 * (layout.pp - 1) / layout.vp * seconds,
        "optimizer": 0.002 * seconds,
    }
    terms["gaps"] = seconds - sum(terms.values())
    job = sample_job()
    rate = job.tokens_per_step / seconds / 64
    return PlannedLayout(
        layout=layout,
        flags=layout.flags(),
        step_time_s=seconds,
        interval_s=(0.88 * seconds, 1.12 * seconds),
        terms=terms,
        memory_bytes=int((78.3 - 4.1 * rank) * GIB),
        tightest_stage=rank % layout.pp,
        bubble_fraction=terms["bubble"] / seconds,
        tokens_per_s_per_gpu=rate,
        mfu=rate * job.architecture.flops_per_token(job.seq_length) / job.peak_flops,
        limits="attention: 9% of the step",
        advice="a faster attention kernel",
        is_tie=rank < 3,
    )


def simulated(one: PlannedLayout) -> PlannedLayout:
    """With the memory of each stage, and the times of its passes."""
    layout = one.layout
    kinds = {"weights": 0.2, "gradients": 0.25, "master weights": 0.1, "moments": 0.2, "activations": 0.2}
    memory = [
        {kind: int(share * (one.memory_bytes - 4 * GIB) * (1 - 0.02 * stage)) for kind, share in kinds.items()}
        | {"logits and loss": GIB if stage == layout.pp - 1 else 0, "allowance": 4 * GIB}
        for stage in range(layout.pp)
    ]
    return replace(one, is_simulated=True, memory_by_stage=tuple(memory), passes=pass_times(one))


def pass_times(one: PlannedLayout) -> PassTimes:
    layout = one.layout
    microbatches = 128 // (layout.micro_batch_size * layout.dp)
    each = 0.9 * one.step_time_s / microbatches / layout.vp / 3
    last = layout.pp * layout.vp - 1
    passes = tuple((each, 1.05 * each, (1.1 if stage == last else 0.9) * each) for stage in range(last + 1))
    shapes = ((4096, 2560, 8192, 640), (4096, 14336, 8192, 640), (8192, 14336, 4096, 640), (4096, 32064, 8192, 32))
    products = tuple(
        Product(m, n, k, "bfloat16", count, 2.0 * m * n * k * count / (5.5e14 + 4e9 * n)) for m, n, k, count in shapes
    )
    return PassTimes(passes, products)


def sample_result() -> SearchResult:
    """Eight layouts, of which the first two are simulated and the first three tie."""
    job = sample_job()
    found = [planned(rank, layout) for rank, layout in enumerate(LAYOUTS)]
    layouts = (*map(simulated, found[:2]), *found[2:])
    scaling = tuple(
        scale_point(job.with_gpus(count), layouts[0].layout, 8.0 * (64 / count) ** 0.93)
        for count in (16, 32, 64, 128, 256)
    )
    return SearchResult(job, layouts, 4321, 12.3, scaling, ("There are no measurements of zb-v: +-30%.",))


STORED = Path(__file__).with_name("plan_page.txt")


def shown(page: Page) -> str:
    """The words of a page, and its tips without those of single microbatches, one a line."""
    tips = dict.fromkeys(tip.replace("\n", " | ") for tip in page.attributes["data-tip"] if ", microbatch " not in tip)
    return "\n".join([fill(" ".join(page.text.split()), 116, break_on_hyphens=False), "", *tips, ""])


if __name__ == "__main__":
    STORED.write_text(shown(Page(plan_page(sample_result()))), encoding="utf-8")
