"""The closed form of a step's time: against counts by hand and the schedule simulator, and what it takes from a run."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published.table import TABLE
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.topology import RankGrid
from megatron.errors import ConfigError
from megatron.planner.step_time.cluster import Cluster, read_cluster
from megatron.planner.step_time.constants import CONSTANTS, load_fitted
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.of_run import attention_kind, step_to_price
from megatron.planner.step_time.own_step import followed_makespan
from megatron.planner.step_time.published import read_published
from megatron.planner.step_time.workload import TERMS, Run, Schedule, Software, Workload
from megatron.schedules.registry import build_schedule
from megatron.schedules.simulator import Durations, simulate
from megatron.training.initialize import rank_grid

H100 = read_cluster("h100")
SOFTWARE = Software(attention="cudnn", elementwise="transformer-engine", sharding="optimizer")
LLAMA_8B = Run(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, is_gated=True, vocab=128256, seq_length=8192,
    gpus=8, dp=8, global_batch_size=128, software=SOFTWARE, cluster=H100,
)  # fmt: skip
IDEAL = {
    **dict.fromkeys(CONSTANTS, 1e-15),
    **{name: 1.0 for name in CONSTANTS if name.startswith(("product_", "flash", "cudnn", "link", "network"))},
    "product_depth": 1e-15,
    "product_bytes": 1e-15,
}
"""A machine that reaches its peak, and overlaps everything but collectives."""


def seconds(*runs: Run, constants: Mapping[str, float] | None = None) -> list[float]:
    found: list[float] = StepTimeModel(Workload(runs)).price(constants or load_fitted()).total.tolist()
    return found


def terms(run: Run, constants: dict[str, float]) -> dict[str, float]:
    return {name: float(value[0]) for name, value in StepTimeModel(Workload([run])).price(constants).terms.items()}


@pytest.mark.parametrize("is_gated", [True, False])
def test_at_the_peak_the_time_is_the_flops_of_the_model(is_gated: bool) -> None:
    run = replace(LLAMA_8B, is_gated=is_gated, gpus=1, dp=1, global_batch_size=4)
    h, kv = 4096, 8 * 128
    per_layer = 2 * h * h + 2 * h * kv + (3 if is_gated else 2) * h * 14336
    tokens = 4 * 8192
    products = 6 * (32 * per_layer + h * 128256) * tokens
    attention = 3.5 * 32 * 2 * h * 8192 * tokens  # two causal products forward, five backward
    assert seconds(run, constants=IDEAL) == [pytest.approx((products + attention) / 989e12, rel=1e-6)]


@pytest.mark.parametrize("name", ["tensor parallelism", "context parallelism", "data parallelism", "pipeline messages"])
def test_fp32_moves_twice_the_bytes(name: str) -> None:
    run = replace(LLAMA_8B, tp=2, cp=2, pp=2, dp=2, gpus=16)
    wide = replace(run, software=replace(SOFTWARE, element_bytes=4))
    constants = {**load_fitted(), "product_bytes": 1e-15}
    assert terms(wide, constants)[name] == pytest.approx(2 * terms(run, constants)[name])


def test_an_optimizer_updates_the_parameters_of_its_shard() -> None:
    alone = replace(LLAMA_8B, gpus=1, dp=1)
    whole = replace(LLAMA_8B, software=replace(SOFTWARE, sharding="none"))
    shard, replica, all_parameters = (terms(run, load_fitted())["optimizer"] for run in (LLAMA_8B, whole, alone))
    assert shard == pytest.approx(all_parameters / 8)
    assert replica == pytest.approx(all_parameters)


@pytest.mark.parametrize("faster", ["bf16_flops", "hbm_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"])
def test_a_faster_part_never_makes_a_step_slower(faster: str) -> None:
    runs = [one.run for one in read_published(TABLE) if one.run is not None]
    double = [replace(run, cluster=replace(run.cluster, **{faster: 2 * getattr(run.cluster, faster)})) for run in runs]
    before, after = (np.array(seconds(*some)) for some in (runs, double))
    assert (after <= before * (1 + 1e-12)).all()
    assert (after < before).any()


@pytest.mark.parametrize(
    ("name", "schedule", "vp", "stages", "microbatches"),
    [
        ("1f1b", "1f1b", 1, 4, 4),
        ("1f1b", "1f1b", 1, 8, 32),
        ("1f1b", "1f1b", 1, 16, 48),
        ("interleaved", "1f1b", 2, 4, 16),
        ("interleaved", "1f1b", 4, 8, 32),
        ("zb-h1", "zb-h1", 1, 4, 16),
        ("zb-h1", "zb-h1", 1, 8, 32),
    ],
)
def test_the_bubble_is_that_of_the_simulated_schedule(
    name: str, schedule: Schedule, vp: int, stages: int, microbatches: int
) -> None:
    run = replace(
        LLAMA_8B, vocab=1, layers=2 * stages * vp, pp=stages, vp=vp, gpus=stages, dp=1, schedule=schedule,
        global_batch_size=microbatches,
    )  # fmt: skip
    # Equal passes: no attention, no operations between the products, and no messages.
    constants = IDEAL | {"cudnn_hopper": 1e15, "link": 1e15, "network": 1e15}
    found = terms(run, constants)
    unit = found["products"] / (3 * microbatches)
    placed = build_schedule(name, stages, microbatches, vp if vp > 1 else None)
    timeline = simulate(placed, Durations.uniform(placed.placement, 1.0, 1.0, 1.0))
    assert found["bubble"] / unit == pytest.approx(timeline.makespan - 3 * microbatches, rel=1e-5)


# --- runs of this project -------------------------------------------------------------------------------------

COMMON = "--model llama3-70b --mock-data --bf16 --seq-length 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-3"


def step(flags: str, num_gpus: int = 64, batch: int = 64, cluster: Cluster = H100) -> Run:
    config = parse_command_line(f"{COMMON} --global-batch-size {batch} {flags}".split())
    check_run(config, num_gpus)
    architecture = config.model.resolve(128256, config.parallel.tensor_model_parallel_size, config.seq_length)
    return step_to_price(architecture, config, rank_grid(config.parallel, num_gpus), batch, cluster)


ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP4 = f"{ZERO} --tensor-model-parallel-size 4 --sequence-parallel"
PP4 = f"{TP4} --pipeline-model-parallel-size 4"
KINDS = [
    PP4,
    f"{PP4} --num-virtual-stages-per-pipeline-rank 5",
    f"{PP4} --pipeline-schedule zb-h1",
    f"{PP4} --pipeline-schedule zb-v",
    f"{PP4} --pipeline-schedule zb-v --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--num-layers 62",
    f"{TP4} --context-parallel-size 2",
    f"{TP4} --fp8-format hybrid",
    "--use-torch-fsdp2",
    TP4,
]


def test_many_runs_at_once_cost_what_they_cost_alone() -> None:
    """The schedules that are followed action by action are grouped: no run gets the time of another."""
    runs = [step(flags, batch=batch) for flags in KINDS for batch in (16, 64, 256)]
    assert seconds(*runs) == pytest.approx([seconds(run)[0] for run in runs], rel=1e-12)


def test_terms_are_those_of_published_runs_and_add_up() -> None:
    published = [one.run for one in read_published(TABLE) if one.run is not None]
    for runs in ([step(flags) for flags in KINDS], published):
        price = StepTimeModel(Workload(runs)).price(load_fitted())
        assert set(price.terms) == set(TERMS)
        assert np.allclose(sum(price.terms.values()), price.total, rtol=1e-12)
        assert all((one >= 0).all() and np.isfinite(one).all() for one in price.terms.values())


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("zb-v", 2), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize("microbatches", [4, 8, 40])
def test_a_followed_schedule_takes_as_long_as_a_simulated_one(name: str, chunks: int, microbatches: int) -> None:
    """Five runs at once, with passes of any length at the ends of the model."""
    random, last = np.random.default_rng(0), 4 * chunks - 1
    passes = [[random.uniform(0.5, 1.5, 5) for _ in range(3)] for _ in range(3)]
    schedule = build_schedule(name, 4, microbatches, chunks)
    places = [0 if number == 0 else 2 if number == last else 1 for number in range(last + 1)]
    makespans, busiest = [], []
    for run in range(5):
        by_pass = [tuple(float(passes[place][kind][run]) for place in places) for kind in range(3)]
        forward, backward, weight = by_pass
        makespans.append(simulate(schedule, Durations(forward, backward, weight)).makespan)
        stages = [0.0] * 4
        for number in range(last + 1):
            stages[schedule.placement.location(number)[0]] += sum(one[number] for one in by_pass)
        busiest.append(max(stages))
    found = followed_makespan(name, 4, chunks, microbatches, passes, np.array(busiest))
    assert found == pytest.approx(makespans, rel=1e-12 if microbatches <= 12 else 0.005)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cp-comm-type " + "p2p a2a " * 40 + "--context-parallel-size 2", "a type per layer has no closed form"),
        (
            "--model mixtral-8x7b --recompute-activations --recompute-modules moe_act",
            "--recompute-modules moe_act has no closed form",
        ),
    ],
)
def test_what_the_formulas_do_not_describe_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step(flags)


@pytest.mark.parametrize(
    ("flags", "cluster", "kind"),
    [
        ("", "h100", "cudnn"),
        ("", "b200", "cudnn"),
        ("", "a100-80gb", "flash"),
        ("--attention-backend flash", "h100", "flash"),
        ("--kernel attention=flash3", "h100", "cudnn"),
        ("--kernel attention=reference", "h100", "unfused"),
    ],
)
def test_attention_is_the_kernel_that_the_run_would_choose(flags: str, cluster: str, kind: str) -> None:
    config = parse_command_line(f"{COMMON} {flags}".split())
    assert attention_kind(config, read_cluster(cluster)) == kind


@pytest.mark.parametrize("order", ["tp-cp-ep-pp-dp", "tp-cp-ep-dp-pp"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 64, 8, 1), (4, 2, 4, 8, 2, 1), (2, 1, 2, 16, 4, 2), (8, 1, 8, 2, 4, 4), (1, 4, 2, 8, 8, 1)]
)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_ranks_in_a_node_are_those_of_the_grid(order: str, sizes: tuple[int, ...], strategy: str) -> None:
    tp, cp, pp, dp, ep, etp = sizes
    replicas = dp if strategy == "no_shard" else min(2, dp)
    grid = RankGrid(tp, cp, pp, dp, ep, etp, 1 if (tp * cp * dp // (ep * etp)) % replicas else replicas, order)
    config = parse_command_line(f"{COMMON} --data-parallel-sharding-strategy {strategy}".split())
    architecture = config.model.resolve(128256, tp, 8192)
    own = step_to_price(architecture, config, grid, 64, H100).own
    assert own is not None

    def inside(*axes: str) -> int:
        return sum(rank < 8 for rank in grid.group(0, axes))

    shards = ("cp", "dp") if strategy == "no_shard" else ("cp", "dp_shard")
    expert_shards = "edp" if strategy == "no_shard" else "edp_shard"
    found = (own.tp_in_node, own.cp_in_node, own.shards_in_node, own.expert_shards_in_node)
    assert found == (inside("tp"), inside("cp"), inside(*shards), inside(expert_shards))
    assert own.sends_in_node is (inside("pp") == pp)
