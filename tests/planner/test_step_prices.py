"""Prices of the steps of this project: the pipeline, where ranks are, and many runs at once."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.topology import RankGrid
from megatron.planner.calibration.operations import planned_step
from megatron.planner.launches import Group, Launch
from megatron.planner.rehearsal.launch_prices import LaunchPrices
from megatron.planner.rehearsal.price import PlannedStep, StepPrices, attention_kind, followed_makespan, pass_times
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import TERMS, read_cluster
from megatron.schedules.catalog import build_schedule
from megatron.schedules.simulator import Durations, simulate
from megatron.training.initialize import rank_grid

H100 = read_cluster("h100")
COMMON = "--model llama3-70b --mock-data --bf16 --seq-length 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-3"
TINY = (
    "--model tiny --mock-data --vocab-size 1000 --seq-length 256 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 10 --lr 1e-3"
)


def step(flags: str, num_gpus: int = 64, batch: int = 64) -> PlannedStep:
    config = parse_command_line(f"{COMMON} --global-batch-size {batch} {flags}".split())
    check_run(config, num_gpus)
    return PlannedStep(UnitsOfRun(UnitRecords(128256), config, rank_grid(config.parallel, num_gpus)), batch)


ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP4 = f"{ZERO} --tensor-model-parallel-size 4 --sequence-parallel"
HOST = "--optimizer-cpu-offload"
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


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_on_cpus_products_have_the_flops_of_the_model(precision: str) -> None:
    """Also those of oneDNN: of the linear layers and of the output layer, forward and both gradients."""
    flags = f"{TINY} --device cpu {precision}"
    config = parse_command_line(flags.split())
    run = planned_step(config, 1, 1000, 2, replace(H100, generation="cpu"))
    launches = [one for unit in run.units.of_stage(0) for of_pass in unit.launches for one in of_pass]
    shapes = [one.product for one in launches if one.product is not None]
    flops = sum(2 * shape.rows * shape.columns * shape.depth * shape.count for shape in shapes)
    model = config.model.resolve(1000, 1, 256)
    h, kv = model.hidden_size, model.num_query_groups * model.kv_channels
    per_layer = 2 * h * h + 2 * h * kv + 3 * h * model.ffn_hidden_size
    weights = model.num_layers * per_layer + h * model.padded_vocab_size
    assert flops == pytest.approx(6 * weights * 256, rel=0.01)


FSDP_FP8 = "--use-torch-fsdp2 --fp8-format hybrid --tensor-model-parallel-size 8 --sequence-parallel"
RING = "--context-parallel-size 2 --rank-order tp-pp-cp-ep-dp"
APART = "--no-gradient-accumulation-fusion"
TWO_STAGES, FOUR_STAGES = (f"--pipeline-model-parallel-size {size}" for size in (2, 4))


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ((TWO_STAGES, 64), (FOUR_STAGES, 64), True),
        (("", 8), ("", 16), True),
        (("", 8), ("--grad-reduce-in-bf16", 8), True),
        (("", 8), ("--micro-batch-size 2", 8), False),
        ((TWO_STAGES, 8), (f"{TWO_STAGES} --pipeline-schedule zb-h1", 8), False),
        ((f"{RING} {TWO_STAGES}", 64), (f"{RING} {FOUR_STAGES}", 64), False),
        ((FSDP_FP8, 8), (FSDP_FP8, 16), False),
        ((APART, 8), (f"{APART} --grad-reduce-in-bf16", 8), False),
    ],
)
def test_layouts_share_the_record_of_a_layer_if_it_is_equal(
    one: tuple[str, int], other: tuple[str, int], is_shared: bool
) -> None:
    """With another order of ranks the ring's links depend on the stages; FSDP on one rank keeps FP8 weights."""
    assert (step(*one).units.key == step(*other).units.key) is is_shared


def test_many_runs_at_once_cost_what_they_cost_alone() -> None:
    """The schedules that are followed action by action are grouped: no run gets the time of another."""
    prices = StepPrices(H100, load_fitted())
    runs = [step(flags, batch=batch) for flags in KINDS for batch in (16, 64, 256)]
    found = prices.price(runs)
    assert found.total == pytest.approx([float(prices.price([run]).total[0]) for run in runs], rel=1e-12)
    assert set(found.terms) == set(TERMS)
    assert np.allclose(sum(found.terms.values()), found.total, rtol=1e-12)
    assert all((one >= 0).all() and np.isfinite(one).all() for one in found.terms.values())


@pytest.mark.parametrize(
    ("flags", "slower", "term"),
    [
        (TP4, "--no-overlap-param-gather", "data parallelism"),
        (TP4, "--no-overlap-grad-reduce", "data parallelism"),
        (f"{TP4} --optimizer sgd", "--ema-decay 0.99", "optimizer"),
        (TP4, f"{HOST} --optimizer-offload-fraction 0.1", "optimizer"),
        (f"{TP4} {HOST} --overlap-cpu-optimizer-d2h-h2d", "--no-overlap-cpu-optimizer-d2h-h2d", "optimizer"),
        # A moment in bf16 is copied to fp32 and back.
        (f"{TP4} --use-precision-aware-optimizer", "--exp-avg-dtype bf16", "optimizer"),
    ],
)
def test_what_is_not_overlapped_or_has_further_copies_takes_longer(flags: str, slower: str, term: str) -> None:
    before, after = StepPrices(H100, load_fitted()).price([step(flags), step(f"{flags} {slower}")]).terms[term]
    assert after > 1.02 * before


@pytest.mark.parametrize("flags", KINDS)
def test_the_passes_of_a_step_take_its_time_but_for_what_it_has_once(flags: str) -> None:
    """The schedule with the passes of every virtual stage is simulated; many runs at once use three kinds of stage."""
    run, prices = step(flags), StepPrices(H100, {**load_fitted(), "growth": 0.0})
    price = prices.price([run])
    seconds = float(price.total[0])
    forward, backward, weight = zip(*pass_times(prices, run, seconds).by_virtual_stage)
    placement = run.units.division.placement
    schedule = build_schedule(run.units.schedule, run.grid.pp, run.num_microbatches, placement.num_chunks)
    makespan = simulate(schedule, Durations(forward, backward, weight)).makespan
    once = sum(float(price.terms[name][0]) for name in ("data parallelism", "optimizer")) + load_fitted()["step"]
    assert makespan + once == pytest.approx(seconds, rel=0.01)


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
    found = followed_makespan(name, 4, chunks, microbatches, np.array(passes), np.array(busiest))
    assert found == pytest.approx(makespans, rel=1e-12 if microbatches <= 12 else 0.005)


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


@pytest.mark.parametrize(("kind", "times"), [("all_gather", 1.0), ("all_reduce", 2.0)])
def test_a_ring_sends_all_parts_but_its_own(kind: str, times: float) -> None:
    """Each of n ranks sends (n - 1) / n of the bytes, twice in an all-reduce."""

    def seconds(tp: int) -> float:
        prices = LaunchPrices(H100, load_fitted(), RankGrid(tp=tp), 8192, is_cudnn=False)
        group = Group(kind, "tp", tuple(range(tp)))
        return prices.collective(Launch("collective", kind, 2**30, "forward", group=group))

    rate = 2**30 * times / 2 / seconds(2)
    for ranks in (4, 8):
        assert seconds(ranks) == pytest.approx(2**30 * times * (ranks - 1) / ranks / rate)
