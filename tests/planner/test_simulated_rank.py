"""A simulated step holds and sends what a real one does, byte for byte but for what depends on when messages arrive."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import CollectiveRecord, Communicator
from megatron.core.moe.layer import Experts
from megatron.core.ops.attention import VarlenKernel
from megatron.core.topology import Topology
from megatron.planner import simulated_rank
from megatron.planner.launches import Traffic
from megatron.planner.memory import Kind, MemoryTracker
from megatron.planner.plan import (
    Plan,
    Run,
    StagePlan,
    enough_microbatches,
    fake_processes,
    largest_fitting_load,
    live_peaks,
    make_plan,
    simulate_rank,
)
from megatron.planner.simulated_rank import ShapeTracker, build_rank, run_step, simulated_kernels
from tests.covering import each_factor_by_default, flags_of
from tests.end_to_end.run_process import call_training
from tests.planner.planned_run import planned_run
from tests.rank_pool import RankPool

TINY = (
    "--model tiny --mock-data --vocab-size 1000 --seq-length 256 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 10 --lr 1e-3 --device cpu"
)
RANKS = 4
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
    "state on the host": "--use-distributed-optimizer --bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
    "--overlap-cpu-optimizer-d2h-h2d --ema-decay 0.9",
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
    "multi-token prediction": "--mtp-num-layers 2 --pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer",
    "Muon, ZeRO-1": "--optimizer muon --tensor-model-parallel-size 2 --use-distributed-optimizer --bf16",
    "Muon, FSDP": "--optimizer muon --use-torch-fsdp2 --bf16",
}


def run_of(flags: str) -> Run:
    return planned_run(f"{TINY} {flags}", RANKS)


class ObservedTopology(Topology):
    """Real communicators that tell ``traffic`` of their collectives."""

    traffic: Traffic

    def _connect(self, *arguments: object, **options: object) -> Communicator:
        communicator = super()._connect(*arguments, **options)  # type: ignore[arg-type]
        communicator.observer = self.traffic.observer(communicator)
        return communicator


def real_step(flags: str, num_microbatches: int) -> tuple[int, dict[Kind, int], list[CollectiveRecord]]:
    """A step with numbers: the bytes at its peak, those between steps by kind, and its collectives."""
    run = run_of(flags)
    # Over gloo: the memory that ranks share is outside torch's, and its views would count as tensors.
    topology = ObservedTopology(run.grid, dist.get_rank(), torch.device("cpu"), shares_memory=False)
    topology.traffic = Traffic(dist.get_rank(), node_size=8)
    tracker = MemoryTracker()
    topology.on_host = tracker.untracked  # type: ignore[method-assign]
    with tracker:
        module = build_rank(run.config, topology, run.vocabulary, tracker)
    module.data_parallel.initialize(run.config.training.seed)
    topology.traffic.clear()
    steady = tracker.now
    with tracker:
        run_step(run.config, topology, module, num_microbatches, tracker)
    return tracker.peak.total, dict(steady.by_kind), topology.traffic.records


@pytest.mark.parametrize("layout", each_factor_by_default(LAYOUTS, lambda name: flags_of(LAYOUTS[name])))
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
    run = planned_run(f"{TINY} {flags} --global-batch-size {6 * ranks // len(simulated)}", ranks)
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])
    assert [stage.simulated_rank for stage in plan.stages] == simulated
    for stage in plan.stages:
        if stage.simulated_rank != stage.rank:
            own = simulate_rank(run, stage.rank)
            assert replace(own, simulated_rank=stage.simulated_rank, records=stage.records) == stage


@pytest.mark.parametrize("documents", ["", "--reset-attention-mask"])
def test_documents_on_gpus_are_planned_as_one_call(documents: str) -> None:
    run, tracker = planned_run(f"{TINY} --bf16 {documents}".replace("--device cpu", ""), 1), ShapeTracker()
    with fake_processes(run, 0), tracker:
        topology = run.topology(0, tracker, run.traffic(0))
        kernels = simulated_kernels(run.config, topology, run.device, run.vocabulary.size, tracker)
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
    model = f"--model llama3-8b --num-layers 2 --mock-data --bf16 --seq-length {TOKENS}"
    return simulate_rank(planned_run(f"{model} --micro-batch-size 1 --train-iters 10 --lr 1e-3 {flags}", num_gpus), 0)


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


# --- experts: rows, memory by load, and the load that still fits ---------------------------------------------

MANY_EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"
EP4 = f"{MANY_EXPERTS} --expert-model-parallel-size 4"
EP2 = f"{MANY_EXPERTS} --expert-model-parallel-size 2"
DENSE_FIRST = f"{EP2} --pipeline-model-parallel-size 2 --moe-layer-freq [0]*2+[1]*2 --moe-ffn-hidden-size 384"
WIDE_FIRST = f"{DENSE_FIRST} --ffn-hidden-size 1024 --global-batch-size 4"
"""The first stage has no experts, and with an even load its peak is the highest."""
TOKEN_IDS = 3
"""So few that the load is uneven: tokens of an id choose similar experts."""


def rows_during(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of ``run``, and the rows of every call of the experts."""
    rows: list[int] = []
    forward = Experts.forward

    def counted(experts: Experts, inputs: Tensor, *arguments: Any) -> Tensor:
        rows.append(inputs.shape[0])
        return forward(experts, inputs, *arguments)

    with patch.object(Experts, "forward", counted):
        return run(), rows


@pytest.mark.processes
@pytest.mark.parametrize("load", [0.5, 1, 1.5])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        ("--expert-model-parallel-size 4", 1),
        (f"{TP2} --expert-model-parallel-size 2", 1),
        (f"{TP2} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 1 / 2),
        ("--context-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2", 1),
    ],
)
def test_experts_of_a_simulated_rank_have_all_rows_of_the_load(
    layout: str, factor: float, dispatcher: str, load: float
) -> None:
    """s b k ETP / (TP CP) times the load. What a fake tensor returns for counts, 1 for each expert, is never used."""
    run = run_of(f"{MANY_EXPERTS} {layout} --moe-token-dispatcher-type {dispatcher}").with_expert_load(load)
    _, rows = rows_during(lambda: simulate_rank(run, 0, 2))
    assert set(rows) == {256 * 2 * factor * load}


def few_tokens(original: Callable[..., Iterator[dict[str, Tensor]]]) -> Callable[..., Iterator[dict[str, Tensor]]]:
    """Microbatches of :data:`TOKEN_IDS` random token ids, others on every data-parallel rank."""

    def microbatches(config: object, topology: Topology, *more: object) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(topology.coordinates["dp"])
        for microbatch in original(config, topology, *more):
            tokens = torch.randint(0, TOKEN_IDS, microbatch["tokens"].shape, generator=generator)
            yield microbatch | {"tokens": tokens}

    return microbatches


def routed_step(flags: str, num_microbatches: int) -> tuple[int, list[int]]:
    """A real step whose router chooses: the bytes at its peak, and the rows of every call of the experts."""
    with patch.object(simulated_rank, "_microbatches", few_tokens(simulated_rank._microbatches)):
        (peak, *_), rows = rows_during(lambda: real_step(flags, num_microbatches))
    return peak, rows


@pytest.mark.processes
def test_memory_is_that_of_a_real_step_with_the_measured_load(four_ranks: RankPool) -> None:
    # One MoE layer, since a rank has another load in each.
    flags = f"{EP4} --moe-layer-freq [0]*3+[1] --moe-ffn-hidden-size 768 --use-distributed-optimizer"
    run = run_of(flags)
    loads = []
    for rank, (peak, rows) in enumerate(four_ranks.run(routed_step, flags, run.num_microbatches)):
        assert len(rows) == run.num_microbatches
        # The peak is in the microbatch with the most rows: without a pipeline one is alive at a time.
        loads.append(max(rows) / (256 * 2))
        plan = simulate_rank(run.with_expert_load(loads[-1]), rank, run.num_microbatches)
        assert plan.peak.total == pytest.approx(peak, rel=0.02)
    # Uneven enough: the dry run of an even load misses the memory of the fullest rank.
    fullest = loads.index(max(loads))
    even = simulate_rank(run, fullest, run.num_microbatches)
    assert even.peak.total < 0.96 * simulate_rank(run.with_expert_load(max(loads)), fullest).peak.total


def plan_of(flags: str, limit: int) -> Plan:
    """The plan on GPUs with ``limit`` bytes."""
    run = run_of(f"{flags} --dry-run --num-gpus 4 --gpu-memory-gb {limit / 2**30!r}")
    return make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])


def most_needed(run: Run, load: float) -> int:
    ranks = map(run.rank_of_stage, range(run.grid.pp))
    return max(simulate_rank(run.with_expert_load(load), rank).needed for rank in ranks)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "largest"),
    [pytest.param(EP4, 4, marks=pytest.mark.slow(reason="the same with one stage")), (WIDE_FIRST, 2)],
)
def test_the_largest_load_that_fits_is_found(flags: str, largest: float) -> None:
    even, worst = (most_needed(run_of(flags), load) for load in (1, largest))
    assert even < worst
    plan = plan_of(flags, (even + worst) // 2)
    load = largest_fitting_load(plan)
    assert load is not None and 1 < load < largest
    assert most_needed(plan.run, load) <= plan.limit < most_needed(plan.run, 1.05 * load)
    # The dry run may begin at another load.
    assumed = plan.run.with_expert_load((1 + load) / 2)
    again = largest_fitting_load(make_plan(assumed, [stage.rank for stage in plan.stages]))
    assert again == pytest.approx(load, rel=0.05)
    assert largest_fitting_load(plan_of(flags, worst)) == largest
    assert largest_fitting_load(plan_of(flags, even - 1)) is None
    # Without expert parallelism the load does not matter.
    assert largest_fitting_load(plan_of(MANY_EXPERTS, 80 * 2**30)) is None


@pytest.mark.processes
def test_the_report_says_the_assumed_load_and_the_largest(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    even, worst = (most_needed(run_of(EP2), load) for load in (1, 2))
    flags = f"{TINY} {EP2} --dry-run --num-gpus 4 --dry-run-json {path}".split()
    outcome = call_training([*flags, "--gpu-memory-gb", repr((even + worst) / 2 / 2**30)])
    found = json.loads(path.read_text())
    load = found["largest_fitting_expert_load"]
    assert found["expert_load"] == 1 and 1 < load < 2
    largest = f"{math.floor(100 * load) / 100:g}"
    assert f"assumed expert load: 1, which is balanced; fits up to an expert load of {largest}\n" in outcome.stdout
    assert {"ep", "edp"} <= set(found["bytes_sent"]["0"])
    whole = call_training([*flags, "--dry-run-expert-load", "1.5"])
    assert "assumed expert load: 1.5; fits with every load, at most 2" in whole.stdout
    assert json.loads(path.read_text())["expert_load"] == 1.5
    call_training([*flags, "--gpu-memory-gb", repr((even - 1) / 2**30)])
    assert json.loads(path.read_text())["largest_fitting_expert_load"] is None
