"""No alarm for a hundred pairs of runs that compute the same: layouts, kernels, precisions, orders of summation."""

from itertools import product
from pathlib import Path

import pytest

from tests.comparison.in_process import InProcess, Ranks, search

LAYOUTS = (
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type allgather",
    "--context-parallel-size 2 --cp-comm-type a2a",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce",
)
ALONE = (
    "--micro-batch-size 4",
    "--micro-batch-size 8",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn",
    "--recompute-granularity selective --recompute-modules layernorm mlp_act",
    "--loss-chunk-size 16",
    "--attention-backend unfused",
    "--no-gradient-accumulation-fusion",
    "--cpu-offloading-num-layers 1",
)
PRECISIONS = ("", "--fp64", "--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --fp8-format hybrid")
"""The first is fp32."""
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss"  # aux_loss depends on the microbatch
)
EXPERT_LAYOUTS = ("--expert-model-parallel-size 2", LAYOUTS[1], LAYOUTS[5], "--micro-batch-size 4")
PAIRS = (
    *product(PRECISIONS, ("", *LAYOUTS, *ALONE)),
    *((f"{precision} {EXPERTS}", layout) for precision, layout in product(("", "--bf16"), EXPERT_LAYOUTS)),
)
QUICK = {
    ("--bf16", LAYOUTS[1]),
    ("", LAYOUTS[3]),
    ("--bf16 --fp8-format hybrid", ALONE[0]),
    (f"--bf16 {EXPERTS}", LAYOUTS[1]),
}
"""Of the default tests."""


def marked() -> list[object]:
    slow = [() if pair in QUICK else (pytest.mark.slow,) for pair in PAIRS]
    return [pytest.param(*pair, marks=marks, id=" ".join(pair).strip()) for pair, marks in zip(PAIRS, slow)]


@pytest.mark.parametrize(("common", "b"), marked())
def test_no_cause_is_named(common: str, b: str, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    found = search(InProcess(ranks), tmp_path, common, f"{common} {b}")
    assert not found.causes, found.causes
    assert not found.operations.differences


def test_there_are_a_hundred_pairs() -> None:
    assert len(PAIRS) >= 100 and set(PAIRS) > QUICK
