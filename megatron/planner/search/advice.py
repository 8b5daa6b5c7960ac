"""What limits a layout, and what would change that."""

from collections.abc import Mapping

from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout

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
