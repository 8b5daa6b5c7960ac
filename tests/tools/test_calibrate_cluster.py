"""A calibration: the fit recovers a machine's constants, and the tool writes a file that the planner reads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.benchmark_planner_cpu import LAYOUTS, order_of_distinct, rank_correlation
from benchmarks.lib.shared_cores import price_on_cores
from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands import machines
from megatron.config.command_line import parse_command_line
from megatron.core.communication import CollectiveRecord, Communicator
from megatron.planner.calibration import operations
from megatron.planner.calibration.fit import calibrated, cluster_file, nonnegative_least_squares, without_overlap
from megatron.planner.calibration.measure import (
    Effort,
    Measured,
    Plan,
    Ranks,
    Sample,
    _after_a_product,
    measure,
    merge,
    number_of_operations,
)
from megatron.planner.calibration.operations import (
    collective_shapes,
    groups_of,
    planned_step,
    product_shapes,
    with_layers,
)
from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import Cluster, read_cluster
from tests.rank_pool import RankPool

SMALL = (
    "--num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 16 --vocab-size 128 --seq-length 32"
)
DATA = "--mock-data --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --device cpu"
CPU = torch.device("cpu")
PLAN = Plan(
    parse_command_line(f"{SMALL} {DATA}".split()),
    128,
    CPU,
    Effort(turns=2, warmup=1, least_seconds=1e-5),
    batches=(1, 2),
    copy_bytes=2**16,
    message_bytes=(2**12, 2**14),
)
TRUE = {
    "product_cpu": 0.8, "product_depth": 40.0, "product_bytes": 0.3, "flash_cpu": 0.2, "attention_length": 20.0,
    "own_elementwise": 2.0, "layer_gap": 1e-5, "optimizer": 1.5, "step": 2e-4,
}  # fmt: skip
"""Constants of a machine."""
MACHINE = Cluster(
    "machine", "cpu", bf16_flops=1e10, fp8_flops=0.0, hbm_bytes_per_s=1e9, multiprocessors=1, memory_gib=1.0,
    node_size=2, link_bytes_per_s=2e8, network_bytes_per_s=1e8,
)  # fmt: skip


def product_of_the_machine(shape: operations.ProductShape) -> float:
    """Written out: the rate falls with a short inner length; a share of the fp32 traffic is not hidden."""
    flops = 2 * shape.rows * shape.columns * shape.depth
    elements = (shape.rows + shape.columns) * shape.depth + shape.rows * shape.columns
    traffic = 4 * elements + (4 * shape.rows * shape.columns if shape.is_weight_gradient else 0)
    rate = 1e10 * TRUE["product_cpu"] / (1 + TRUE["product_depth"] / shape.depth)
    return flops / rate + TRUE["product_bytes"] * traffic / 1e9


def measured_on_the_machine(plan: Plan, ranks: int = 2, latency: float = 0.0) -> Measured:
    """Measurements without noise; ``latency`` is that of a ring."""
    lengths = operations.attention_shapes(plan.model, 32, 2)
    runs = {
        key: planned_step(with_layers(plan.config, key[0], key[1]), 1, plan.vocab_size, key[2], MACHINE)
        for key in ((1, 1, 1), (1, 2, 1), (3, 1, 1), (3, 2, 1), (3, 2, 2))
    }
    constants = {**load_fitted(), **without_overlap(), **TRUE}
    shapes = collective_shapes(groups_of(ranks, ranks), plan.message_bytes)
    return Measured(
        {one: Sample(product_of_the_machine(one), 0.0) for one in product_shapes(plan.model, 32, plan.batches)},
        {
            one: Sample(3.5 * one.forward_flops / (0.2 * 1e10 * one.length / (one.length + 20.0)), 0.0)
            for one in lengths
        },
        "flash",
        Sample(2 * plan.copy_bytes / 1e9, 0.0),
        {
            one: Sample(1e-4 + one.sent / 1e8 if one.kind == "message" else latency + one.sent / 2e8, 0.0)
            for one in shapes
        },
        {key: Sample(seconds(run, constants), 0.0) for key, run in runs.items()},
    )


def seconds(step: PlannedStep, constants: Mapping[str, float], cluster: Cluster = MACHINE) -> float:
    return float(StepPrices(cluster, constants).price([step]).total[0])


def test_the_spread_of_samples_is_half_the_distance_of_their_quartiles() -> None:
    assert Sample.of([2.0]) == Sample(2.0, 0.0)
    assert Sample.of([1.0, 3.0]).spread > 0.0
    assert Sample.of([1.0, 2.0, 3.0]) == Sample(2.0, 0.5)


def test_the_fit_recovers_the_constants_of_a_machine() -> None:
    found = calibrated(PLAN, measured_on_the_machine(PLAN), None, 1.0, Ranks(0, 2, 2))
    cluster, constants = found.cluster, found.cluster.constants
    # The peak is the largest measured rate: rates are compared, not shares of it.
    assert constants["product_cpu"] * cluster.bf16_flops == pytest.approx(0.8 * 1e10, rel=1e-6)
    assert constants["flash_cpu"] * cluster.bf16_flops == pytest.approx(0.2 * 1e10, rel=1e-6)
    assert cluster.hbm_bytes_per_s == pytest.approx(1e9)
    assert cluster.link_bytes_per_s == pytest.approx(2e8)
    assert constants["exposed_messages"] == pytest.approx(2.0)
    for name in TRUE.keys() - {"product_cpu", "flash_cpu"}:
        assert constants[name] == pytest.approx(TRUE[name], rel=1e-4), name
    assert all(fitted.median_error < 1e-6 for fitted in found.errors.values())
    # The latency of a ring lowers its rate.
    latency = 1e-4
    found = calibrated(PLAN, measured_on_the_machine(PLAN, latency=latency), None, 1.0, Ranks(0, 2, 2))
    sent = [shape.sent for shape in collective_shapes(groups_of(2, 2), PLAN.message_bytes) if shape.kind != "message"]
    rates = [size / (latency + size / 2e8) for size in sent]
    assert min(rates) < found.cluster.link_bytes_per_s < max(rates)


def test_on_a_gpu_the_shares_refer_to_the_vendors_figures() -> None:
    """The machine behaves as an H100 whose products reach a share of the peak that depends on the generation's name."""
    base = replace(read_cluster("h100"), bf16_flops=1e10, hbm_bytes_per_s=1e9, link_bytes_per_s=4e8, multiprocessors=1)
    found = calibrated(PLAN, measured_on_the_machine(PLAN, latency=1e-4), base, 1.0, Ranks(0, 2, 2))
    constants = found.cluster.constants
    assert found.cluster.bf16_flops == 1e10
    assert constants["product_hopper"] == pytest.approx(0.8)
    assert constants["flash_hopper"] == pytest.approx(0.2)
    assert constants["link"] == pytest.approx(0.5)
    assert not {"product_cpu", "exposed_messages", "hidden_data_parallel"} & set(constants)


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    measured = measured_on_the_machine(PLAN)
    found = calibrated(PLAN, measured, None, 8.0, Ranks(0, 2, 2))
    path = tmp_path / "mine.toml"
    path.write_text(cluster_file(found, measured, None, "2026-01-02", "a machine"))
    cluster = read_cluster(path)
    assert cluster.memory_gib == 8.0 and cluster.generation == "cpu"
    assert cluster.constants == pytest.approx(dict(found.cluster.constants), rel=1e-5)
    stated = {"generation", "bf16_flops", "hbm_bytes_per_s", "link_bytes_per_s", "node_size"} | set(cluster.constants)
    assert stated <= set(cluster.sources)
    assert all("2026-01-02" in source for source in cluster.sources.values())
    path.write_text(cluster_file(found, measured, "h200", "2026-01-02", "a machine"))
    assert read_cluster(path).memory_gib == 141.0


def test_least_squares_without_negative_unknowns() -> None:
    """Against a fine grid."""
    random = np.random.default_rng(0)
    for _ in range(20):
        columns, target = random.uniform(0.1, 1, (6, 2)), random.uniform(0.5, 2, 6)
        found = nonnegative_least_squares(columns, target)
        grid = np.stack(np.meshgrid(np.linspace(0, 8, 801), np.linspace(0, 8, 801)), axis=-1)

        def loss(unknowns: np.ndarray, columns: np.ndarray = columns, target: np.ndarray = target) -> np.ndarray:
            return ((unknowns @ columns.T / target - 1) ** 2).sum(axis=-1)

        assert (found >= 0).all()
        assert loss(found) <= loss(grid).min() + 1e-9


@pytest.mark.parametrize(("world", "local", "sizes"), [(1, 1, []), (2, 2, [2]), (6, 6, [2, 6]), (16, 8, [2, 4, 8, 2])])
def test_groups_of_ranks(world: int, local: int, sizes: list[int]) -> None:
    groups = groups_of(world, local)
    assert [group.size for group in groups] == sizes
    for group in groups:
        members = {group.ranks_of(rank, local) for rank in range(world)}
        assert sorted(rank for ranks in members for rank in ranks) == list(range(world))
        nodes = [{rank // local for rank in ranks} for ranks in members]
        assert all(len(one) == (group.size if group.spans_nodes else 1) for one in nodes)


def run_collectives() -> dict[str, list[int]]:
    """Bytes that the communicator records, by kind."""
    recorded: dict[str, list[int]] = {}
    for kind in operations.KINDS:
        first = dist.get_rank() // 2 * 2
        group = Communicator((first, first + 1), dist.get_rank(), f"test {kind}")
        records: list[CollectiveRecord] = []
        group.observer = records.append
        operations.collective_action(operations.CollectiveShape(kind, 4096, 2, False), group, CPU)()
        recorded[kind] = [one.num_bytes for one in records]
    return recorded


def test_collectives_have_the_stated_size(four_ranks: RankPool) -> None:
    for recorded in four_ranks.run(run_collectives):
        assert recorded == {
            "all-reduce": [4096], "all-gather": [4096], "reduce-scatter": [4096], "message": [4096, 4096],
        }  # fmt: skip


def test_products_are_those_of_a_layer() -> None:
    """FLOPs of one pass of the model with 40 shapes or so; every product runs in the stated shape."""
    model = TransformerConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, kv_channels=20,
        vocab_size=128, padded_vocab_size=128, max_position_embeddings=32,
    )  # fmt: skip
    shapes = product_shapes(model, 32, (1,))
    whole = shapes[:15]
    weights = model.num_parameters() - 128 * 64 - 3 * 64  # without the embedding and the norms
    assert sum(2 * one.rows * one.columns * one.depth for one in whole) == 3 * 2 * weights * 32
    assert 30 <= len(product_shapes(model, 32, (1, 4))) <= 50
    for shape in shapes:
        result = operations.product_action(shape, torch.float32, CPU)()
        if isinstance(result, torch.Tensor):
            assert result.shape == (shape.rows, shape.columns)


@pytest.mark.parametrize("together", [1, 1000])
def test_measuring_takes_the_stated_number_of_operations(together: int) -> None:
    counted: list[str] = []
    ranks = Ranks()
    measured = measure(replace(PLAN, together=together), ranks, counted.append)
    assert len(counted) == number_of_operations(PLAN, ranks)
    assert set(counted) == {"products", "attention", "copies", "steps"}
    assert all(sample.median > 0 for sample in measured.products.values())
    assert merge(measured, measured).products == measured.products


def step_on_one_machine(name: str) -> tuple[PlannedStep, Cluster]:
    layout = next(one for one in LAYOUTS if one.name == name)
    machine = replace(MACHINE, node_size=layout.ranks)
    return planned_step(layout.config, layout.ranks, 2048, layout.num_microbatches, machine), machine


def prices_on_cores(name: str, cores: int) -> Mapping[str, float]:
    return price_on_cores(*step_on_one_machine(name), {**load_fitted(), **without_overlap(), **TRUE}, cores)


def test_ranks_that_share_cores_take_turns_and_have_the_core_of_a_stage_that_idles() -> None:
    own, shared = prices_on_cores("DP4", 4), prices_on_cores("DP4", 2)
    assert {name: 2 * value for name, value in own.items()} == pytest.approx(shared)
    own, shared = prices_on_cores("PP2 DP2", 4), prices_on_cores("PP2 DP2", 2)
    # A core for each rank changes no price.
    step, machine = step_on_one_machine("PP2 DP2")
    expected = seconds(step, {**load_fitted(), **without_overlap(), **TRUE}, machine)
    assert own["bubble"] > 0 and sum(own.values()) == pytest.approx(expected)
    once = ("data parallelism", "optimizer")
    assert all(shared[name] == pytest.approx(2 * own[name]) for name in once)
    # With two microbatches one stage works alone for most of the time, on a core for each of its two ranks.
    whole, longer = (sum(terms.values()) - sum(terms[name] for name in once) for terms in (own, shared))
    assert whole < longer < 1.5 * whole
    # Three stages: while less than two of them work, a core idles, and the step takes longer than its work.
    own, shared = prices_on_cores("PP3 1F1B", 3), prices_on_cores("PP3 1F1B", 2)
    assert sum(shared.values()) > 1.05 * sum(own.values()) and shared["bubble"] >= 0


def test_order_counts_distinct_pairs_only() -> None:
    assert order_of_distinct([1.0, 3.0, 2.0], [1.0, 2.0, 2.1]) == (2, 2)
    assert order_of_distinct([3.0, 1.0, 2.0], [1.0, 2.0, 2.1]) == (0, 2)
    assert rank_correlation([1.0, 3.0, 2.0], [1.0, 2.0, 4.0]) == pytest.approx(0.5)


def test_the_tool_writes_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cpu.toml"
    words = ["--out", str(out), "--device", "cpu", "--turns", "1", "--batches", "1", "2", f"--flags={SMALL}"]
    assert machines.main_calibrate(words) == 0
    cluster = read_cluster(out)
    assert cluster.generation == "cpu" and cluster.constants["product_cpu"] > 0
    assert out.read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--base", "h100"], "--base is for GPUs"),
        (["--turns", "0"], "--turns 0"),
        (["--batches"], "--batches"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert machines.main_calibrate(["--out", str(tmp_path / "a.toml"), *words]) != 0
    assert message in capsys.readouterr().err


def test_a_ring_costs_what_it_adds_to_a_product_and_no_less_than_alone() -> None:
    slow, fast = [one for one in collective_shapes(groups_of(2, 2), PLAN.message_bytes) if one.kind == "all-reduce"]
    alone = {slow: Sample(0.2, 0.1), fast: Sample(0.2, 0.1)}
    group = cast(Communicator, None)  # the builders are not called
    found = _after_a_product(PLAN, group, alone, lambda builders: [Sample(seconds, 0.0) for seconds in (1.0, 1.5, 1.1)])
    assert [sample.median for sample in found.values()] == pytest.approx([0.5, 0.2])
