"""The closed form of a step's time: against counts by hand, the schedule simulator, the bytes that docs/moe.md states,
and published runs of models with experts; and the files of the clusters that it prices."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.fit import errors
from benchmarks.published.table import TABLE
from megatron.errors import ConfigError
from megatron.planner.step_time.formulas import ExpertShapes, StepTimeModel, accesses_between, dispatch_seconds
from megatron.planner.step_time.prices import CONSTANTS, Machines, load_fitted, pod_share
from megatron.planner.step_time.published import read_published
from megatron.planner.step_time.workload import (
    CLUSTERS,
    TERMS,
    Cluster,
    Run,
    Schedule,
    Software,
    Workload,
    cluster_names,
    read_cluster,
)
from megatron.schedules.catalog import build_schedule
from megatron.schedules.simulator import Durations, simulate

EXPERTS = Path(__file__).with_name("published_experts.csv")
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


# Experts.

MIXTRAL = Run(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, is_gated=True, vocab=32000, seq_length=4096, gpus=8, dp=8,
    global_batch_size=64, num_experts=8, moe_topk=2, moe_ffn=14336, moe_layers=32, ep=8, software=SOFTWARE,
    cluster=H100,
)  # fmt: skip
QWEN = replace(
    MIXTRAL, layers=48, hidden=2048, kv_heads=4, head_size=128, ffn=6144, vocab=151936, num_experts=128, moe_topk=8,
    moe_ffn=768, moe_layers=48,
)  # fmt: skip
PEAK = {
    **dict.fromkeys(CONSTANTS, 1e-15),
    **{name: 1.0 for name in CONSTANTS if name.startswith(("product_hopper", "product_fp8"))},
    **dict.fromkeys(("cudnn_hopper", "link", "network"), 1e15),
}
"""A machine whose products reach the peak, and where all else takes no time."""


@pytest.mark.parametrize("run", [MIXTRAL, QWEN, replace(QWEN, shared_ffn=1024), replace(MIXTRAL, moe_layers=16)])
def test_at_the_peak_products_are_the_flops_of_what_a_token_uses(run: Run) -> None:
    """The router's product is in fp32, which has a 16th of the rate."""
    tokens = run.global_batch_size * run.seq_length / run.gpus
    head = run.head_size or run.hidden // run.heads
    attention = 2 * run.hidden * run.heads * head + 2 * run.hidden * run.kv_heads * head
    experts = 3 * run.hidden * (run.moe_topk * run.moe_ffn + run.shared_ffn) + 16 * run.hidden * run.num_experts
    dense = 3 * run.hidden * run.ffn
    weights = run.layers * attention + run.moe_layers * experts + (run.layers - run.moe_layers) * dense
    found = terms(run, PEAK)
    assert found["products"] == pytest.approx(6 * weights * tokens / 989e12, rel=1e-6)
    assert found["expert parallelism"] < 1e-9


@pytest.mark.parametrize(("ep", "node_size"), [(1, 8), (2, 8), (8, 8), (16, 8), (32, 8), (8, 4), (64, 72)])
def test_an_all_to_all_takes_as_long_as_its_slower_kind_of_link(ep: int, node_size: int) -> None:
    """Rank 0 sends an equal part to every other rank; ranks are placed in order."""
    cluster = replace(H100, node_size=node_size)
    run = replace(QWEN, ep=ep, gpus=128, dp=128, global_batch_size=128, cluster=cluster)
    link, network = 400e9, 50e9
    part = 4 * 4096 * 8 * 2048 * 2 / ep
    fast = sum(part for rank in range(1, ep) if rank // node_size == 0) / link
    slow = sum(part for rank in range(1, ep) if rank // node_size > 0) / network
    found = dispatch_seconds(ExpertShapes(Workload([run])), np.array([link]), np.array([network]))
    assert float(found[0]) == pytest.approx(max(fast, slow), rel=1e-12)


def test_the_accesses_are_those_of_the_operations_one_by_one() -> None:
    """Elements of 2 bytes: an fp32 tensor counts twice."""
    run = replace(MIXTRAL, ep=1, dp=1, gpus=1, global_batch_size=1)
    tokens, row, logits = 4096 * 4096, 2 * 4096 * 4096, 4096 * 8  # elements of all tokens, all rows, all logits
    inner = 2 * 4096 * 14336
    take, add = 2 * row, row + tokens  # a row is read and written; rows are read and the sum is written
    to_fp32, softmax, swiglu = 3 * tokens, 8 * logits, 3 * inner
    forward, backward = accesses_between(ExpertShapes(Workload([run])))
    assert float(forward[0]) == to_fp32 + softmax + take + swiglu + add
    # Backward: the gradients of the rows are taken, multiplied with the rows, and weighted in place.
    products = row + row, row + row
    from_fp32 = 5 * tokens
    assert float(backward[0]) == from_fp32 + softmax + take + sum(products) + 5 * inner + add
    sorted_twice = 4 * row  # by source and by expert, and back
    forward_of_two, _ = accesses_between(
        ExpertShapes(Workload([replace(run, ep=2, dp=2, gpus=2, global_batch_size=2)]))
    )
    assert float(forward_of_two[0]) == float(forward[0]) + sorted_twice


def test_one_expert_that_every_token_uses_is_a_dense_model_with_a_router() -> None:
    """Products alone: with one expert on each rank the rows are those of the MLP."""
    one = replace(MIXTRAL, num_experts=1, moe_topk=1, ep=1)
    dense = replace(one, num_experts=0, moe_layers=0)
    router = 6 * 16 * 4096 * 4096 * 64 / 8 * 32 / 989e12
    constants = load_fitted()
    difference = terms(one, constants)["products"] - terms(dense, constants)["products"]
    assert difference == pytest.approx(router, rel=1e-6)
    # On one rank experts need no messages.
    assert terms(one, constants)["expert parallelism"] == 0 < terms(MIXTRAL, constants)["expert parallelism"]


@pytest.mark.parametrize("ep", [1, 4])
def test_with_few_tokens_the_weights_of_all_experts_of_a_rank_are_read(ep: int) -> None:
    run = replace(QWEN, seq_length=32 // ep, ep=ep, dp=ep, gpus=ep, global_batch_size=ep)
    constants = PEAK | {"product_hopper": 1e15, "product_bytes": 1.0}
    weights = 48 * 128 / ep * 3 * 2048 * 768
    # Each weight is read forward and backward (2 bytes); its gradient is written, and added to the main gradient.
    least = weights * (2 + 2 + 2 + 4) / H100.hbm_bytes_per_s
    assert least < terms(run, constants)["products"] < 1.4 * least


def test_parameters_of_a_rank_are_those_of_its_experts() -> None:
    """235B of Qwen3 on EP 32, PP 8: experts are 227 of the 235 billion parameters."""
    run = replace(
        QWEN, layers=94, moe_layers=94, hidden=4096, heads=64, moe_ffn=1536, tp=2, pp=8, vp=4, ep=32, dp=16, gpus=256,
        sequence_parallel=True,
    )  # fmt: skip
    found = ExpertShapes(Workload([run]))
    assert float(found.parameters[0]) * 32 * 8 == pytest.approx(94 * 128 * 3 * 4096 * 1536)
    assert float(found.edp[0]) == 1


def test_a_dense_model_has_the_same_price_beside_one_with_experts() -> None:
    dense = replace(MIXTRAL, num_experts=0, moe_layers=0, moe_topk=0, moe_ffn=0, ep=1)
    assert seconds(dense, QWEN) == pytest.approx([*seconds(dense), *seconds(QWEN)], rel=1e-12)


def test_published_runs_of_qwen3_are_within_thirty_percent() -> None:
    """Untuned. The release before 26.02.01 ran the same layout 1.8 times as slowly: no formula predicts both."""
    runs = read_published(EXPERTS)
    assert all(one.run is not None for one in runs), [one.reason for one in runs]
    usual = [one for one in runs if one.row["tokens_per_s_per_gpu"] != "5113"]
    assert len(usual) == len(runs) - 1 == 8
    found = errors(usual, load_fitted())
    assert np.abs(found).max() <= 0.3
    assert np.median(np.abs(found)) <= 0.15


# Clusters.

GPUS = ("a100-80gb", "h100", "h200", "b200", "gb200")
NO_CONSTANTS = {"name", "sources", "constants"}


@pytest.mark.parametrize("name", cluster_names())
def test_every_constant_has_a_source_with_a_date(name: str) -> None:
    cluster = read_cluster(name)
    stated = {one.name for one in fields(Cluster) if getattr(cluster, one.name) != one.default}
    assert set(cluster.sources) == stated - NO_CONSTANTS
    for constant, source in cluster.sources.items():
        assert re.search(r"\b20\d\d\b", source), f"{constant}: {source}"
    assert cluster.node_size == (72 if "gb200" in name else 8)
    # 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3).
    assert cluster.gpu_hours_per_failure == pytest.approx(54 * 24 * 16384 / 419, rel=1e-3)
    assert {cluster: 1}[read_cluster(name)] == 1  # a cluster can be a key


def test_there_is_a_file_for_each_gpu_with_either_network() -> None:
    for gpu in GPUS:
        assert {gpu, f"{gpu}-roce"} <= set(cluster_names())
        roce = read_cluster(f"{gpu}-roce")
        assert (roce.pod_size, roce.oversubscription) == (3072, 7.0)
        same = replace(roce, name=gpu, pod_size=None, oversubscription=1.0, sources={})
        assert same == replace(read_cluster(gpu), sources={})


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"There is no cluster h900: .* h100"):
        read_cluster("h900")
    assert "roce" not in cluster_names()
    with pytest.raises(ConfigError, match="lacks"):
        read_cluster(CLUSTERS / "fabrics" / "roce.toml")


def write_cluster(directory: Path, name: str, text: str) -> str:
    (directory / f"{name}.toml").write_text(text)
    return str(directory / f"{name}.toml")


def test_a_file_inherits_what_it_does_not_state(tmp_path: Path) -> None:
    write_cluster(tmp_path, "mine", 'base = "h100"\nmemory_gib = 94.0\n[sources]\nmemory_gib = "measured, 2026"\n')
    place = write_cluster(tmp_path, "ours", 'base = ["mine", "fabrics/roce"]\nnode_size = 4\n[constants]\nlink = 0.8\n')
    cluster, h100 = read_cluster(place), read_cluster("h100")
    assert (cluster.name, cluster.memory_gib, cluster.node_size, cluster.pod_size) == ("ours", 94.0, 4, 3072)
    assert cluster.hbm_bytes_per_s == h100.hbm_bytes_per_s
    assert cluster.sources["memory_gib"] == "measured, 2026"
    assert cluster.sources["hbm_bytes_per_s"] == h100.sources["hbm_bytes_per_s"]
    assert cluster.constants == {"link": 0.8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "h100"\nnvlink = 3\n', ["nvlink"]),
        ('base = "h101"\n', ["h101", "h100"]),
        ("base = 3\n", ["3"]),
        ('base = "wrong"\n', ["its own base"]),
        ('generation = "hopper"\n', ["bf16_flops", "node_size"]),
        ('base = "h100"\ngeneration = "volta"\n', ["volta", "hopper"]),
        ('base = "h100"\nnode_size = 0\n', ["node_size", "0"]),
        ('base = "h100"\nnode_size = "8"\n', ["node_size", "'8'"]),
        ('base = "h100"\nsources = ["a data sheet"]\n', ["[sources]"]),
        ('base = "h100"\n[constants]\nlink = -1\n', ["constants.link", "-1"]),
        ("base = \n", ["not a TOML file"]),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    place = write_cluster(tmp_path, "wrong", text)
    with pytest.raises(ConfigError) as raised:
        read_cluster(place)
    assert all(word in str(raised.value) for word in words), raised.value


def reference_share(ranks: int, distance: int, pod: int, oversubscription: float) -> float:
    """By counting: all GPUs send at their full rate; how much of it the busiest pod's links to others can carry."""
    gpus = range(ranks * distance)
    pods = {place // pod for place in gpus}
    sent = dict.fromkeys(pods, 0)
    for rank in gpus:
        following = (rank + distance) % len(gpus)  # each residue modulo the distance is a ring
        sent[rank // pod] += following // pod != rank // pod
    most = max(sent.values())
    return 1.0 if most == 0 else min(1.0, pod / oversubscription / most)


@pytest.mark.parametrize(("ranks", "distance"), [(128, 8), (8, 128), (4, 256), (16, 16), (2, 8), (64, 64), (2, 1024)])
def test_rings_use_the_links_between_pods_once_per_pod(ranks: int, distance: int) -> None:
    cluster = replace(read_cluster("h100-roce"), pod_size=256)
    share = float(pod_share(Machines([cluster]), ranks, distance)[0])
    assert share == pytest.approx(reference_share(ranks, distance, 256, 7.0))
    unlimited = Machines([read_cluster("h100")])
    assert float(pod_share(unlimited, ranks, distance)[0]) == 1.0


def test_oversubscription_slows_down_stages_larger_than_pods_and_not_the_rings_of_llama_3() -> None:
    def of_llama(cluster: Cluster) -> Mapping[str, float]:
        run = replace(
            LLAMA_8B, layers=128, hidden=16384, heads=128, ffn=53248, gpus=16384, tp=8, pp=16, dp=128,
            global_batch_size=2048, software=replace(SOFTWARE, elementwise="eager"), cluster=cluster,
        )  # fmt: skip
        return terms(run, load_fitted())

    roce, full = of_llama(read_cluster("h100-roce")), of_llama(H100)
    assert roce["data parallelism"] == full["data parallelism"]
    assert roce["pipeline messages"] / full["pipeline messages"] == pytest.approx(7.0 / 3)
    # A stage has 1,024 GPUs: all of a small pod send to the next one.
    small = of_llama(replace(read_cluster("h100-roce"), pod_size=1024))
    assert small["pipeline messages"] / full["pipeline messages"] == pytest.approx(7.0)
