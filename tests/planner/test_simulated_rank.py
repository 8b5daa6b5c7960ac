"""A simulated step holds and sends what a real one does, byte for byte but for what depends on when messages arrive."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.communication import CollectiveRecord, Communicator
from megatron.core.ops.attention import VarlenKernel
from megatron.planner.launches import Traffic
from megatron.planner.memory import MemoryTracker
from megatron.planner.plan import (
    Run,
    StagePlan,
    enough_microbatches,
    fake_processes,
    live_peaks,
    make_plan,
    simulate_rank,
)
from megatron.planner.simulated_rank import ShapeTracker, build_rank, simulated_kernels
from megatron.training.build.vocabulary import Vocabulary, planned_vocabulary
from tests.planner.real_step import RANKS, TINY, VOCABULARY, real_step, run_of
from tests.rank_pool import RankPool

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 96 --moe-router-force-load-balancing"
"""A real step has an even load, too."""
LLAMA_4 = "--no-rope-freq 2 --attention-chunk-size 64 --qk-l2-norm --attention-temperature-tuning --bf16"
PP, TP2 = "--pipeline-model-parallel-size", "--tensor-model-parallel-size 2 --sequence-parallel"
PP4 = f"{PP} 4 --pipeline-schedule gpipe"
FP8 = "--bf16 --fp8-format hybrid --first-last-layers-bf16"
LAYOUTS = {
    "tensor and sequence parallel": "--tensor-model-parallel-size 4 --sequence-parallel",
    "1F1B, ZeRO-1": "--pipeline-model-parallel-size 2 --use-distributed-optimizer --bf16 --overlap-grad-reduce",
    "zero bubble": "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1",
    "tensor and pipeline, recompute": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "context parallel, ZeRO-2": "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads --bf16 "
    "--recompute-granularity selective --recompute-modules mlp layernorm",
    "context parallel in two levels": "--context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2 --bf16",
    "FSDP": "--use-torch-fsdp2 --bf16",
    "experts, all-to-all": f"{EXPERTS} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --bf16 "
    "--use-distributed-optimizer",
    "experts, all-to-all, divided experts": f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type "
    "alltoall --tensor-model-parallel-size 2 --sequence-parallel",
    "experts, all-gather": f"{EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "Llama 4's attention in chunks, exchanged": f"{LLAMA_4} --context-parallel-size 2 --cp-comm-type a2a",
    "Llama 4's attention and experts": f"{LLAMA_4} {EXPERTS} --moe-router-topk 1 --moe-router-score-function sigmoid "
    "--moe-apply-probs-on-input --moe-shared-expert-intermediate-size 96 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer",
    "Muon, ZeRO-1": "--optimizer muon --tensor-model-parallel-size 2 --use-distributed-optimizer --bf16",
    "Muon, FSDP": "--optimizer muon --use-torch-fsdp2 --bf16",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_and_traffic_are_those_of_a_real_step(four_ranks: RankPool, layout: str) -> None:
    run = run_of(LAYOUTS[layout])
    measured = four_ranks.run(real_step, LAYOUTS[layout], run.num_microbatches)
    for stage in range(run.grid.pp):
        rank = run.rank_of_stage(stage)
        peak, steady, records = measured[rank]
        plan = simulate_rank(run, rank, run.num_microbatches)
        assert plan.steady.total == pytest.approx(sum(steady.values()), rel=0.05)
        assert {kind: size for kind, size in plan.steady.by_kind.items() if size > 100_000} == {
            kind: pytest.approx(size, rel=0.05) for kind, size in steady.items() if size > 100_000
        }
        assert plan.peak.total == pytest.approx(peak, rel=0.02 if EXPERTS in LAYOUTS[layout] else 0.05)
        assert Counter(plan.records) == Counter(records)
        assert sum(plan.sent_by_axis.values()) == sum(plan.sent_by_link.values()) > 0


@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [
        ("--expert-model-parallel-size 4", 256),
        (f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 128),
    ],
)
def test_tokens_of_experts_have_the_bytes_of_the_formula(flags: str, num_tokens: int) -> None:
    """4 n k h itemsize (EP - 1) / EP a layer and microbatch (docs/moe.md), and the counts of rows."""
    dispatch = f"{flags} --moe-token-dispatcher-type alltoall --bf16"
    run = run_of(f"{EXPERTS} {dispatch}")
    ep, model = run.grid.ep, run.architecture
    rows = 4 * num_tokens * model.moe_router_topk * model.hidden_size * 2 * (ep - 1) // ep
    counts = 4 * 8 * (ep - 1) // ep
    plan = simulate_rank(run, 0)
    assert plan.sent_by_axis["ep"] == run.num_microbatches * model.num_layers * (rows + counts)


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP} 2",
        f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2",
        f"{PP} 2 --pipeline-schedule zb-v --overlap-grad-reduce --use-distributed-optimizer",
        "--data-parallel-sharding-strategy optim_grads",
        # A step gathers the weights that the step before has updated.
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000",
    ],
)
def test_a_few_microbatches_show_the_peak_and_the_traffic_of_all(flags: str) -> None:
    run = run_of(f"{flags} --global-batch-size 48")
    for stage in range(run.grid.pp):
        rank = run.rank_of_stage(stage)
        few, all_of_them = simulate_rank(run, rank), simulate_rank(run, rank, run.num_microbatches)
        assert few.simulated_microbatches < all_of_them.simulated_microbatches == run.num_microbatches
        assert few.peak.total == all_of_them.peak.total
        assert few.sent_by_axis == all_of_them.sent_by_axis
        assert few.sent_by_link == all_of_them.sent_by_link


def test_gpipe_needs_all_microbatches() -> None:
    run = run_of("--pipeline-model-parallel-size 2 --pipeline-schedule gpipe")
    assert enough_microbatches(run.schedule, 0, 50) == 50
    assert live_peaks(run.schedule(50), 0) == {(50,)}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_the_schedules_of_few_microbatches_hold_as_much(schedule: str) -> None:
    chunks = " --num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else ""
    run = run_of(f"--num-layers 8 --pipeline-model-parallel-size 4 --pipeline-schedule {schedule}{chunks}")
    for stage in range(4):
        few = enough_microbatches(run.schedule, stage, 64)
        assert few <= 20
        assert live_peaks(run.schedule(few), stage) == live_peaks(run.schedule(64), stage)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("all_to_all", 75), ("send", 100)],
)
def test_bytes_sent_are_those_of_a_ring(kind: str, sent: int) -> None:
    traffic = Traffic(rank=6, node_size=8)
    near, far = (Communicator(ranks, 6, "dp") for ranks in ((4, 5, 6, 7), (6, 14, 22, 30)))
    for ranks in (near, far):
        observe = traffic.observer(ranks)
        observe(CollectiveRecord(kind, "dp", 4, 100))
        observe(CollectiveRecord("receive", "dp", 4, 100, peer=5))
    assert traffic.by_axis == {"dp": 2 * sent}
    assert traffic.by_link == {"in node": sent, "across": sent}
    traffic.observer(far)(CollectiveRecord("send", "pp F down", 4, 10, peer=14))
    traffic.observer(far)(CollectiveRecord("shift", "cp", 4, 1, peer=7))
    assert traffic.by_link == {"in node": sent + 1, "across": sent + 10}
    assert traffic.by_axis == {"dp": 2 * sent, "pp": 10, "cp": 1}


@pytest.mark.parametrize(("gpus_per_node", "across"), [(1, {"tp", "dp"}), (2, {"dp"}), (4, set())])
def test_traffic_crosses_nodes_of_the_given_size(gpus_per_node: int, across: set[str]) -> None:
    run = run_of(f"--tensor-model-parallel-size 2 --dry-run --num-gpus {RANKS} --gpus-per-node {gpus_per_node}")
    plan = simulate_rank(run, 0)
    sent = {axis: size for axis, size in plan.sent_by_axis.items() if axis in ("tp", "dp")}
    assert set(sent) == {"tp", "dp"}
    several = sum(plan.sent_by_axis.values()) - sum(sent.values())
    expected = sum(size for axis, size in sent.items() if axis in across)
    assert several < 1000
    assert expected <= plan.sent_by_link.get("across", 0) <= expected + several


@pytest.mark.parametrize(
    ("flags", "ranks", "simulated"),
    [
        # So few microbatches that two stages have all of them in flight.
        (f"{PP} 6 --num-layers 12 --num-virtual-stages-per-pipeline-rank 2", 6, [0, 1, 1, 3, 4, 5]),
        (f"{PP4} --use-distributed-optimizer", 32, [0, 1, 1, 3]),
        # Stages 0 and 1 share a node, and so do 2 and 3.
        (f"{PP4} --tensor-model-parallel-size 4", 16, [0, 4, 8, 12]),
        # Layer 2, of stage 1, is in bf16, and all of stage 2 are in FP8.
        (f"{PP4} --num-layers 8 {FP8} --num-layers-at-start-in-bf16 3", 4, [0, 1, 2, 3]),
        # The two layers of each inner stage are FP8.
        (f"{PP4} --num-layers 8 {FP8} --num-layers-at-start-in-bf16 1", 4, [0, 1, 1, 3]),
        (f"{PP4} --num-experts 4", 4, [0, 1, 1, 3]),
        # The layers of stage 1 are dense, those of stage 2 MoE layers.
        (f"{PP4} --num-experts 4 --num-layers 8 --moe-layer-freq [0]*4+[1]*4", 4, [0, 1, 2, 3]),
        # Stages of 12 ranks: the first expert-parallel ranks of stage 2 are in a node, those of stage 1 in two.
        (
            f"{PP4} --rank-order tp-cp-ep-dp-pp --num-experts 6 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-model-parallel-size 6 --expert-tensor-parallel-size 1",
            48,
            [0, 12, 24, 36],
        ),
    ],
)
def test_stages_with_equal_signatures_are_equal(flags: str, ranks: int, simulated: list[int]) -> None:
    config = parse_command_line(f"{TINY} {flags}".split())
    config = replace(config, training=replace(config.training, global_batch_size=6 * ranks // len(simulated)))
    check_run(config, ranks)
    run = Run.of(config, ranks, Vocabulary(VOCABULARY, VOCABULARY - 1))
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])
    assert [stage.simulated_rank for stage in plan.stages] == simulated
    for stage in plan.stages:
        if stage.simulated_rank != stage.rank:
            own = simulate_rank(run, stage.rank)
            assert replace(own, simulated_rank=stage.simulated_rank, records=stage.records) == stage


@pytest.mark.parametrize("documents", ["", "--reset-attention-mask"])
def test_documents_on_gpus_are_planned_as_one_call(documents: str) -> None:
    config = parse_command_line(f"{TINY} --bf16 {documents}".replace("--device cpu", "").split())
    check_run(config, 1)
    run, tracker = Run.of(config, 1, Vocabulary(VOCABULARY, VOCABULARY - 1)), ShapeTracker()
    with fake_processes(run, 0), tracker:
        topology = run.topology(0, tracker, run.traffic(0))
        kernels = simulated_kernels(config, topology, run.device, VOCABULARY, tracker)
    assert isinstance(kernels.attention, VarlenKernel) == bool(documents)
    assert simulate_rank(run, 0).peak.by_kind["activations"] > 0


def test_a_tracker_follows_what_is_made_let_go_of_and_resized() -> None:
    with MemoryTracker() as tracker:
        with tracker.allocating("weights"):
            weights = torch.zeros(100)
        view = weights[:10]
        passing = torch.ones(50) + 1
        assert tracker.now.by_kind["weights"] == 400
        assert tracker.now.by_kind["working memory"] == 200
        assert tracker.peak.total == 800
        del passing, weights
        assert tracker.now.total == 400
        view.untyped_storage().resize_(40)
        assert tracker.now.total == 40
        del view
    assert tracker.now.total == 0


def test_the_ranks_of_a_model_have_its_parameters_together() -> None:
    """What the stages build, each global tensor once, is the model."""
    run = run_of("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2")
    sizes: dict[str, int] = {}
    for stage in range(2):
        tracker, traffic = ShapeTracker(), run.traffic(0)
        with torch._subclasses.FakeTensorMode(), tracker:
            module = build_rank(
                run.config, run.topology(run.rank_of_stage(stage), tracker, traffic), run.vocabulary, tracker
            )
            sizes |= {
                weight.info.name: torch.Size(weight.info.global_shape).numel()
                for weight in module.data_parallel.local_params
            }
    assert sum(sizes.values()) == run.architecture.num_parameters()


PADDED, TOKENS, CHUNK = 128256, 8192, 1024


def plan_of_8b(flags: str, num_gpus: int) -> StagePlan:
    config = parse_command_line(
        f"--model llama3-8b --num-layers 2 --mock-data --bf16 --seq-length {TOKENS} --micro-batch-size 1 "
        f"--train-iters 10 --lr 1e-3 {flags}".split()
    )
    check_run(config, num_gpus)
    return simulate_rank(Run.of(config, num_gpus, planned_vocabulary(config)), 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_with_loss_chunks_the_plan_saves_the_logits_of_the_other_tokens(tp: int) -> None:
    """Of Llama 3 8B with 8,192 tokens."""
    layout = f"--tensor-model-parallel-size {tp}" + " --sequence-parallel" * (tp > 1)
    whole, chunked = plan_of_8b(layout, tp), plan_of_8b(f"{layout} --loss-chunk-size {CHUNK}", tp)
    logits = 2 * PADDED // tp * TOKENS
    assert whole.peak.by_kind["logits and loss"] >= logits
    assert chunked.peak.by_kind["logits and loss"] < logits / 1000
    # The output layer's backward pass also holds its whole input and the gradient of that.
    hidden = 2 * 4096 * TOKENS
    saved = whole.peak.total - chunked.peak.total
    assert logits * (1 - CHUNK / TOKENS) - 2 * hidden <= saved <= logits


def test_overlapped_tensor_parallelism_on_gpus_is_planned_with_whole_products() -> None:
    """As symmetric memory has it: the bytes of the collectives, and no copies of parts. Rows in FP8 are exchanged and
    multiplied part by part."""
    layout = "--tensor-model-parallel-size 4 --sequence-parallel"
    plain, overlapped = plan_of_8b(layout, 4), plan_of_8b(f"{layout} --tp-comm-overlap", 4)
    assert overlapped.sent_by_axis == plain.sent_by_axis
    assert overlapped.peak.total == pytest.approx(plain.peak.total, rel=1e-3)

    def exchanges(plan: StagePlan) -> int:
        return sum(record.kind == "exchange" for record in plan.records)

    in_fp8 = plan_of_8b(f"{layout} --tp-comm-overlap --fp8-format hybrid --fp8-recipe tensorwise", 4)
    assert exchanges(plain) == 0 < exchanges(overlapped)
    assert exchanges(in_fp8) > 2 * exchanges(overlapped)
