"""The closed form of a step's time: against counts by hand and the schedule simulator."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published.table import TABLE
from megatron.planner.step_time.cluster import read_cluster
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import CONSTANTS, load_fitted
from megatron.planner.step_time.published import read_published
from megatron.planner.step_time.workload import TERMS, Run, Schedule, Software, Workload
from megatron.schedules.registry import build_schedule
from megatron.schedules.simulator import Durations, simulate

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


def test_terms_of_published_runs_add_up() -> None:
    published = [one.run for one in read_published(TABLE) if one.run is not None]
    price = StepTimeModel(Workload(published)).price(load_fitted())
    assert set(price.terms) == set(TERMS)
    assert np.allclose(sum(price.terms.values()), price.total, rtol=1e-12)
    assert all((one >= 0).all() and np.isfinite(one).all() for one in price.terms.values())
