"""Cluster files: their sources, what a file inherits, mistakes in them, and links between pods."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import Machines, load_fitted, pod_share
from megatron.planner.step_time.workload import CLUSTERS, Cluster, Run, Software, Workload, cluster_names, read_cluster

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


def write(directory: Path, name: str, text: str) -> str:
    (directory / f"{name}.toml").write_text(text)
    return str(directory / f"{name}.toml")


def test_a_file_inherits_what_it_does_not_state(tmp_path: Path) -> None:
    write(tmp_path, "mine", 'base = "h100"\nmemory_gib = 94.0\n[sources]\nmemory_gib = "measured, 2026"\n')
    place = write(tmp_path, "ours", 'base = ["mine", "fabrics/roce"]\nnode_size = 4\n[constants]\nlink = 0.8\n')
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
    place = write(tmp_path, "wrong", text)
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


def terms(cluster: Cluster, **layout: Any) -> Mapping[str, float]:
    run = Run(
        layers=128, hidden=16384, heads=128, kv_heads=8, ffn=53248, is_gated=True, vocab=128256, seq_length=8192,
        gpus=16384, global_batch_size=2048, cluster=cluster, **layout,
        software=Software(attention="cudnn", elementwise="eager", sharding="optimizer"),
    )  # fmt: skip
    priced = StepTimeModel(Workload([run])).price(load_fitted()).terms
    return {name: float(seconds[0]) for name, seconds in priced.items()}


def test_oversubscription_slows_down_stages_larger_than_pods_and_not_the_rings_of_llama_3() -> None:
    roce, small = read_cluster("h100-roce"), replace(read_cluster("h100-roce"), pod_size=1024)
    full = read_cluster("h100")
    of_llama = {"tp": 8, "pp": 16, "dp": 128}
    assert terms(roce, **of_llama)["data parallelism"] == terms(full, **of_llama)["data parallelism"]
    # A stage has 1,024 GPUs: all of a small pod send to the next one.
    ratio = terms(small, **of_llama)["pipeline messages"] / terms(full, **of_llama)["pipeline messages"]
    assert ratio == pytest.approx(7.0)
    ratio = terms(roce, **of_llama)["pipeline messages"] / terms(full, **of_llama)["pipeline messages"]
    assert ratio == pytest.approx(7.0 / 3)
