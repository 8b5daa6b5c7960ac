"""Repeated layers have the memory and the collectives of a rehearsal of every layer and microbatch, byte for byte."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron.commands.pages.dry_run_report import as_json
from megatron.core.models.layer import TransformerLayer
from megatron.planner.plan import Plan, Run, StagePlan, simulate_rank
from tests.covering import each_factor_by_default, flags_of
from tests.planner.planned_run import planned_run

TINY = (
    "--model tiny --num-layers 6 --mock-data --vocab-size 1000 --seq-length 256 --micro-batch-size 1 --bf16 "
    "--train-iters 10 --lr 1e-3 --dry-run"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 96 --expert-model-parallel-size 2"
ALL_TO_ALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2"
PP2, SHARED = "--pipeline-model-parallel-size 2", "--moe-shared-expert-intermediate-size 64"
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
INTERLEAVED = "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ZERO_1 = f"--use-distributed-optimizer {OVERLAP} --ddp-bucket-size 200000"
ZERO_2 = f"--data-parallel-sharding-strategy optim_grads {OVERLAP} --ddp-bucket-size 200000"
FSDP = "--use-torch-fsdp2"
LAYOUTS = [
    # Ranks, simulated pipeline stage, flags.
    (1, 0, ""),
    (1, 0, "--device cpu"),
    (1, 0, f"{FULL} uniform --recompute-num-layers 1"),
    # The last group has fewer layers.
    (1, 0, f"{FULL} uniform --recompute-num-layers 4"),
    (1, 0, f"{FULL} block --recompute-num-layers 4"),
    (1, 0, "--attention-backend unfused --kernel rms_norm=eager swiglu=eager cross_entropy=eager"),
    (2, 0, ZERO_1),
    (2, 0, f"{ZERO_2} --grad-reduce-in-bf16"),
    (4, 0, FSDP),
    (4, 0, f"{FSDP} {OVERLAP} {FULL} uniform --recompute-num-layers 2"),
    (8, 0, f"{FSDP} --num-distributed-optimizer-instances 2"),
    (2, 0, f"{TP2} {SELECTIVE} layernorm"),
    (2, 0, f"{TP2} --sequence-parallel {SELECTIVE} core_attn mlp_act layernorm"),
    (2, 0, f"{TP2} --distribute-saved-activations {FULL} uniform --recompute-num-layers 2"),
    (2, 0, "--context-parallel-size 2 --cp-comm-type p2p --reset-attention-mask --reset-position-ids"),
    (2, 0, "--context-parallel-size 2 --cp-comm-type allgather"),
    (2, 0, "--context-parallel-size 2 --cp-comm-type a2a p2p a2a p2p a2a p2p"),
    (4, 0, "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    (6, 0, f"--pipeline-model-parallel-size 3 {ZERO_1}"),
    (3, 1, "--pipeline-model-parallel-size 3 --reset-attention-mask --reset-position-ids"),
    (3, 2, f"--pipeline-model-parallel-size 3 --untie-embeddings-and-output-weights {SELECTIVE} mlp"),
    (3, 0, f"{INTERLEAVED} --reset-attention-mask"),
    (6, 2, f"{INTERLEAVED} {ZERO_2}"),
    (2, 0, "--num-layers 7 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"),
    (2, 1, "--pipeline-model-parallel-size 2 --pipeline-schedule gpipe"),
    (4, 1, f"{ALL_TO_ALL} {PP2} --pipeline-schedule zb-h1 {SHARED} --reset-attention-mask"),
    (8, 1, f"--num-layers 8 {TP2} --sequence-parallel {PP2} --pipeline-schedule zb-v {ZERO_2}"),
    (2, 0, f"--fp8-format hybrid --fp8-recipe delayed {FSDP}"),
    (2, 0, f"--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather {ZERO_1}"),
    (1, 0, "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 2"),
    (2, 0, f"{ALL_TO_ALL} {ZERO_1} --moe-layer-freq [0,1,1]*2 --moe-aux-loss-coeff 1e-2"),
    (4, 0, f"{EXPERTS} --moe-token-dispatcher-type allgather {SELECTIVE} moe_act --moe-z-loss-coeff 1e-3"),
    # FSDP gathers the experts by themselves, so MoE layers run in full.
    (4, 0, f"{ALL_TO_ALL} {FSDP} --moe-layer-freq [0]*4+[1]*2"),
]
LARGE = [
    (8, 0, f"--model llama3-8b --num-layers 32 {FSDP} {OVERLAP} --seq-length 8192"),
    (
        64,
        1,
        "--model llama3-70b --num-layers 80 --tensor-model-parallel-size 4 --sequence-parallel "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5 --context-parallel-size 2 "
        f"--seq-length 8192 {ZERO_1}",
    ),
    (
        16,
        0,
        "--model qwen3-30b-a3b --num-layers 48 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --use-distributed-optimizer --seq-length 4096",
    ),
]


def run_of(ranks: int, flags: str, whole: bool = False) -> Run:
    words = f"{TINY} --global-batch-size {4 * ranks} {flags} --num-gpus {ranks}"
    return planned_run(words + " --dry-run-whole" * whole, ranks)


def layers_run(simulate: Callable[[], StagePlan]) -> tuple[StagePlan, int]:
    """The result, and how many forward passes of layers ran in full."""
    count = 0
    forward = TransformerLayer.forward

    def counted(layer: TransformerLayer, *arguments: Any) -> Tensor:
        nonlocal count
        count += 1
        return forward(layer, *arguments)

    with patch.object(TransformerLayer, "forward", counted):
        return simulate(), count


def test_one_layer_of_a_kind_runs() -> None:
    """Six layers, in a step of one microbatch and a step of two."""
    repeated, few = layers_run(lambda: simulate_rank(run_of(1, ""), 0))
    whole, all_of_them = layers_run(lambda: simulate_rank(run_of(1, "", whole=True), 0))
    assert (repeated.simulated_microbatches, few, all_of_them) == (2, 1, 6 * 3)
    plans = Plan(run_of(1, ""), (repeated,)), Plan(run_of(1, "", whole=True), (whole,))
    assert [as_json(plan, None, None, 0.0)["extrapolated"] for plan in plans] == [{"0": True}, {"0": False}]


@pytest.mark.parametrize("was_frozen", [False, True])
def test_a_simulation_leaves_the_garbage_collector_as_it_was(was_frozen: bool) -> None:
    gc.unfreeze()
    if was_frozen:
        gc.freeze()
    try:
        simulate_rank(run_of(1, ""), 0)
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == was_frozen
    finally:
        gc.freeze()  # as tests/conftest.py does


@pytest.mark.parametrize(
    "layout",
    [
        *each_factor_by_default(LAYOUTS, lambda layout: flags_of(layout[-1])),
        *(pytest.param(one, marks=pytest.mark.slow) for one in LARGE),
    ],
    ids=str,
)
def test_repeated_layers_are_equal_to_rehearsed_ones(layout: tuple[int, int, str]) -> None:
    ranks, stage, flags = layout
    run, whole_run = run_of(ranks, flags), run_of(ranks, flags, whole=True)
    rank = run.rank_of_stage(stage)
    repeated, whole = simulate_rank(run, rank), simulate_rank(whole_run, rank)
    assert not whole.is_extrapolated
    # Kinds, pass of the peak, parameters, bytes by axis and link, and all collectives in their order.
    assert replace(repeated, is_extrapolated=False) == whole
    assert repeated.is_extrapolated
