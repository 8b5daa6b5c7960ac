"""The checks before a run without processes: what they conclude from measurements, and how they exchange them."""

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron.core.communication import Communicator
from megatron.features.preflight.check import (
    Board,
    Check,
    MissingRanksError,
    Needs,
    Network,
    Node,
    Place,
    Result,
    Site,
    Verdict,
    failed_hosts,
    nodes_of,
    table,
    within,
    worst,
)
from megatron.features.preflight.host import (
    Disk,
    Gpu,
    Product,
    available_memory,
    existing_parent,
    find_nvml,
    probe_bytes,
)
from megatron.features.preflight.network import (
    _END,
    ALL_PAIRS,
    Clocks,
    Links,
    Pair,
    Sums,
    Suspect,
    addend,
    expected_sum,
    explain,
    named_by_bits,
    offset_of,
    peer_of,
    rounds_again,
    rounds_of,
    slow_pairs,
    usual_speed,
)
from megatron.features.preflight.run import CHECKS, judge, run_preflight
from tests.stand_ins import pynvml

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)
REPETITIONS = 100


def nodes_for(count: int, ranks_of_node: int = 1) -> list[Node]:
    ranks = iter(range(count * ranks_of_node))
    return [Node(f"node{number}", tuple(next(ranks) for _ in range(ranks_of_node))) for number in range(count)]


def named(results: list[Result]) -> list[tuple[int | None, Verdict]]:
    """What is not ok."""
    return [(one.rank, one.verdict) for one in results if one.verdict is not Verdict.OK]


# --- product -------------------------------------------------------------------------------------------------


def products(dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Healthy ranks, which differ by up to 8 %."""
    times = [dice.uniform(1.0, 1.08) for _ in range(count)]
    return [{"device": "cpu", "wrong": 0, "seconds": seconds, "flop": 1e12} for seconds in times]


def test_a_slow_or_wrong_rank_is_named_every_time_and_no_healthy_one() -> None:
    for seed in range(REPETITIONS):
        dice = random.Random(seed)
        count = dice.randint(2, 64)
        nodes, measured = nodes_for(count), products(dice, count)
        assert named(Product().judge(measured, nodes)) == []
        slow, wrong = dice.sample(range(count), 2)
        measured[slow]["seconds"] = 1.5 * 1.04
        assert [rank for rank, _ in named(Product().judge(measured, nodes))] == [slow]
        measured[wrong]["wrong"] = 1
        assert set(named(Product().judge(measured, nodes))) >= {(wrong, Verdict.FAILURE)}


def test_ranks_are_compared_with_ranks_of_the_same_device() -> None:
    measured = products(random.Random(0), 4)
    for one in measured[2:]:
        one.update(device="another", seconds=5.0)
    assert named(Product().judge(measured, nodes_for(4))) == []


# --- sums ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), SEEDS)
def test_the_sum_is_that_of_the_addends(count: int, seed: int) -> None:
    part = random.Random(seed).sample(range(count), random.Random(seed).randint(1, count))
    total = sum((addend(rank, 100, CPU) for rank in part), torch.zeros(100))
    assert torch.equal(total, expected_sum(part, 100, CPU))


def test_the_sum_of_many_ranks_is_exact() -> None:
    assert float(expected_sum(range(100_000), 13, CPU).abs().max()) < 2**24


@given(st.integers(2, 5000), SEEDS)
def test_the_rank_with_the_wrong_addend_is_found_by_its_bits(count: int, seed: int) -> None:
    guilty = random.Random(seed).randrange(count)
    by_bits = [(guilty >> bit & 1 == 1, guilty >> bit & 1 == 0) for bit in range((count - 1).bit_length())]
    assert named_by_bits(by_bits, count) == guilty


def test_nobody_is_named_if_every_sum_is_wrong() -> None:
    assert named_by_bits([(False, False), (False, False)], 4) is None
    measured = [{"wrong": 1, "by_bits": [[False, False], [False, False]], "bytes_per_s": 1.0}] * 4
    results = Sums().judge(measured, nodes_for(4))
    assert named(results) == [(None, Verdict.FAILURE)]
    assert "all ranks" in results[0].value


# --- clocks --------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=5))
def test_the_error_of_an_offset_is_within_its_bound(offset: float, trips: list[tuple[float, float]]) -> None:
    seen = [(1e6 + offset, 1e6 + there, 1e6 + offset + there + back) for there, back in trips]
    found, error = offset_of(seen)
    assert abs(found - offset) <= error + 1e-6


@pytest.mark.parametrize(("culprit", "skew"), [(0, 5.0), (2, 5.0), (3, -5.0)])
def test_the_wrong_clock_is_named_also_that_of_rank_0(culprit: int, skew: float) -> None:
    for seed in range(REPETITIONS):
        dice = random.Random(seed)
        # The load of the machines delays answers by up to a second.
        offsets = [[0.0, 0.0], *([dice.uniform(-0.01, 0.01), dice.uniform(0.0, 0.5)] for _ in range(3))]
        assert named(Clocks().judge(offsets, nodes_for(4))) == []
        shifted = [
            [offset + skew * ((rank == culprit) - (culprit == 0)) if rank else 0.0, error]
            for rank, (offset, error) in enumerate(offsets)
        ]
        assert named(Clocks().judge(shifted, nodes_for(4))) == [(culprit, Verdict.FAILURE)]


def test_slow_answers_are_no_skew() -> None:
    measured = [[0.0, 0.0], [2.5, 3.0], [0.0, 0.01]]
    assert named(Clocks().judge(measured, nodes_for(3))) == [(1, Verdict.WARNING)]


# --- links ---------------------------------------------------------------------------------------------------


def link_speeds(nodes: list[Node], dice: random.Random, slow_ranks: set[int]) -> list[dict[str, Any]]:
    vertices = [node.ranks for node in nodes]
    measured: list[dict[str, Any]] = [{"device": "cuda", "speeds": {}} for node in nodes for _ in node.ranks]
    for pairs in rounds_of(len(nodes)):
        for rank, one in enumerate(measured):
            peer = peer_of(rank, vertices, pairs)
            if peer is not None:
                factor = 0.2 if slow_ranks & {rank, peer} else 1.0
                one["speeds"][str(peer)] = factor * dice.uniform(0.92, 1.08) * 1e10
    return measured


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_a_slow_adapter_of_one_rank_is_named_every_time_and_no_healthy_one(count: int) -> None:
    nodes = nodes_for(count, ranks_of_node=2)
    for seed in range(REPETITIONS if count < 100 else 5):
        dice = random.Random(seed)
        assert named(Links().judge(link_speeds(nodes, dice, set()), nodes)) == []
        slow = dice.randrange(2 * count)
        results = Links().judge(link_speeds(nodes, dice, {slow}), nodes)
        assert len(results) == 1
        if count > 2:
            assert named(results) == [(slow, Verdict.FAILURE)]
        else:  # of two nodes it is only known that their link is slow
            assert results[0].rank in (slow, (slow + 2) % 4)


def test_a_group_of_nodes_behind_a_slow_uplink_is_one_result() -> None:
    nodes = nodes_for(8)
    measured = link_speeds(nodes, random.Random(0), set())
    for rank, one in enumerate(measured):
        for peer in one["speeds"]:
            if (rank in (4, 5)) != (int(peer) in (4, 5)):
                one["speeds"][peer] *= 0.5
    results = Links().judge(measured, nodes)
    assert named(results) == [(4, Verdict.WARNING)]
    assert "rank 5 (node5) to the others" in results[0].value


@given(st.integers(2, 70), SEEDS)
def test_peers_are_of_the_same_place_and_mutual(count: int, seed: int) -> None:
    dice = random.Random(seed)
    ranks = iter(range(10 * count))
    vertices = [tuple(next(ranks) for _ in range(dice.randint(1, 3))) for _ in range(count)]
    for pairs in dice.sample(rounds_of(count), 1):
        for members in vertices:
            for place, rank in enumerate(members):
                peer = peer_of(rank, vertices, pairs)
                if peer is not None:
                    assert peer_of(peer, vertices, pairs) == rank
                    assert next(other for other in vertices if peer in other).index(peer) == place


# --- from the speeds of pairs to the slow node, group or link -------------------------------------------------

RATIO = 0.5


def pairs_of(count: int) -> list[Pair]:
    return [pair for pairs in rounds_of(count) for pair in pairs]


def speeds_with_noise(pairs: list[Pair], slow: set[Pair], dice: random.Random) -> dict[Pair, float]:
    """10 GB/s, 20 % more or less, and a third of it for the slow pairs."""
    return {pair: dice.uniform(0.8, 1.2) * (1 / 3 if pair in slow else 1.0) * 1e10 for pair in pairs}


@given(st.integers(2, 300))
def test_rounds_are_disjoint_and_their_number_is_limited(count: int) -> None:
    rounds = rounds_of(count)
    for pairs in rounds:
        vertices = [vertex for pair in pairs for vertex in pair]
        assert len(vertices) == len(set(vertices))
        assert all(0 <= one < other < count for one, other in pairs)
    everything = pairs_of(count)
    assert len(everything) == len(set(everything))
    if count <= ALL_PAIRS:
        assert len(everything) == count * (count - 1) // 2
        assert len(rounds) <= count
    else:
        assert len(rounds) <= 2 * math.ceil(math.log2(count))
    # Every vertex is measured with at least two others.
    partners = Counter(vertex for pair in everything for vertex in pair)
    assert len(partners) == count and min(partners.values()) >= min(2, count - 1)


@given(st.integers(5, 200), SEEDS)
def test_a_slow_link_nodes_or_neighbours_behind_a_slow_uplink_are_named_and_no_others(count: int, seed: int) -> None:
    dice, pairs = random.Random(seed), pairs_of(count)
    link, first = dice.choice(pairs), dice.randint(0, count // 2)
    nodes = set(dice.sample(range(count), dice.randint(0, 2 if count >= 8 else 1)))
    group = set(range(first, first + dice.randint(2, (count - 1) // 2)))
    for slow, suspects in (
        ({link}, {Suspect(link, is_link=True)}),
        ({pair for pair in pairs if nodes & set(pair)}, {Suspect((node,)) for node in nodes}),
        ({pair for pair in pairs if len(group & set(pair)) == 1}, {Suspect(tuple(sorted(group)))}),
    ):
        found = explain(pairs, slow_pairs(speeds_with_noise(pairs, slow, dice), RATIO))
        assert set(found) == suspects and len(found) == len(suspects)


def test_a_node_that_is_slow_with_half_of_the_others_is_named_alone() -> None:
    pairs = pairs_of(8)
    slow = [(0, 3), (1, 3), (3, 4), (3, 7)]
    assert explain(pairs, slow) == [Suspect((3,))]


def test_without_a_majority_nobody_is_accused_of_being_alone() -> None:
    # Two groups of two: which of the two switches is at fault is not known. All four links between them are told.
    pairs = pairs_of(4)
    slow = [pair for pair in pairs if len({0, 1} & set(pair)) == 1]
    assert all(len(suspect.vertices) < 3 for suspect in explain(pairs, slow))
    assert explain(pairs, slow)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_the_usual_speed_is_that_of_healthy_pairs_though_most_are_slow(count: int) -> None:
    speeds = {pair: 1.0 if 0 in pair else 10.0 for pair in pairs_of(count)}
    assert usual_speed(speeds) == 10.0


@given(st.integers(2, 100), SEEDS, st.integers(1, 8))
def test_pairs_are_measured_again_in_few_rounds(count: int, seed: int, most: int) -> None:
    dice = random.Random(seed)
    slow = set(dice.sample(pairs_of(count), min(dice.randint(1, 20), len(pairs_of(count)))))
    rounds = rounds_again(slow, most)
    assert 1 <= len(rounds) <= most
    for pairs in rounds:
        assert set(pairs) <= slow
        assert len({vertex for pair in pairs for vertex in pair}) == 2 * len(pairs)


# --- disk, memory, GPU ---------------------------------------------------------------------------------------


def test_a_pair_ends_as_soon_as_one_of_the_two_ends() -> None:
    exchanged = []

    def exchange(sent: Tensor, received: Tensor, peer: int) -> None:
        exchanged.append(sent.numel())
        if sent.numel() == 1 and len(exchanged) > 2:
            received.fill_(_END)

    site: Any = SimpleNamespace(
        rank=0, device=CPU, network=SimpleNamespace(exchange=exchange), synchronize=lambda: None
    )
    Links()._measure_round(site, [[0], [1]], [(0, 1)], {}, times=4)
    # A word and the data, then the other's last word.
    assert exchanged == [1, exchanged[1], 1]


def test_the_file_of_a_node_is_smaller_if_there_are_many_nodes() -> None:
    assert [probe_bytes(count) >> 20 for count in (1, 512, 16_384)] == [64, 8, 4]


def test_a_directory_that_is_missing_is_checked_at_its_parent(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "runs" / "checkpoints") == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_a_container_is_limited_by_its_cgroup(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:  800 kB\n")
    assert available_memory(tmp_path, tmp_path) == 800 * 1024
    files = {"memory.max": "500000", "memory.current": "300000", "memory.stat": "inactive_file 100000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path, tmp_path) == 300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 800 * 1024
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


GPU_FAULTS = {
    "none": ({}, "", Verdict.OK),
    "counters missing": (dict.fromkeys(("uncorrected", "remapped", "reasons", "xids")), "", Verdict.OK),
    "memory in use": ({"free": 60 * 2**30}, "60.0 of 80.0 GiB", Verdict.FAILURE),
    "memory errors": ({"uncorrected": 3}, "3 uncorrected", Verdict.FAILURE),
    "row failed": ({"remapped": (0, 0, 0, 1)}, "could not be remapped", Verdict.FAILURE),
    "row pending": ({"remapped": (0, 1, 1, 0)}, "waits for a reset", Verdict.FAILURE),
    "Xid": ({"xids": [79, 48]}, "Xid 79, 48", Verdict.FAILURE),
    "heat": ({"reasons": 0x44}, "lowered by heat", Verdict.WARNING),
}


def gpu_results(monkeypatch: pytest.MonkeyPatch, gpu: pynvml.Gpu) -> list[Result]:
    monkeypatch.setattr(pynvml, "gpu", gpu)
    check = Gpu(lambda: pynvml, uuid=lambda device: "GPU-1234", load=lambda device: None)
    site = replace(alone(), device=torch.device("cuda"))
    return check.judge([check.measure(site)], site.nodes)


@pytest.mark.parametrize(("changed", "value", "verdict"), GPU_FAULTS.values(), ids=GPU_FAULTS)
def test_a_fault_of_a_gpu_is_named_and_a_healthy_one_passes(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], value: str, verdict: Verdict
) -> None:
    results = gpu_results(monkeypatch, pynvml.Gpu(**changed))
    assert pynvml.asked[-1] == "GPU-1234"
    assert named(results) == ([] if verdict is Verdict.OK else [(0, verdict)])
    assert value in results[0].value and bool(results[0].remedy) == (verdict is not Verdict.OK)


def test_the_module_of_nvml_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert find_nvml() is pynvml
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_nvml() is None


def test_gpus_without_nvml_are_a_warning() -> None:
    assert named(Gpu().judge([{}, {}], nodes_for(2))) == [(None, Verdict.WARNING)]
    assert named(Gpu().judge([None, None], nodes_for(2))) == []


# --- names ---------------------------------------------------------------------------------------------------


def test_ranks_of_two_machines_with_one_name_are_two_nodes() -> None:
    places = [Place("a", "boot 1", "n"), Place("a", "boot 2", "n"), Place("a", "boot 1", "n")]
    assert nodes_of(places) == [Node("a", (0, 2)), Node("a", (1,))]


# --- the whole -----------------------------------------------------------------------------------------------


def alone(needs: Needs | None = None) -> Site:
    """A job of one process."""
    network = Network(Communicator([0], 0))
    return Site(0, Place("laptop"), nodes_for(1), CPU, network, Board(HashStore(), 0, 1), needs or Needs())


def test_checks_have_different_names_and_end_in_a_minute() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert max(check.seconds for check in CHECKS) < 60


class Late(Check):
    name, seconds, remedy = "late", 0.2, "wait"

    def measure(self, site: Site) -> None:
        time.sleep(5)

    def judge(self, measured: Any, nodes: Any) -> list[Result]:
        return self.ok("never")


def test_a_check_that_does_not_end_is_given_up_and_those_after_it(tmp_path: Path) -> None:
    site = alone()
    results = run_preflight(site.board, CPU, site.network, site.needs, [Late(), Disk()], Place("laptop")).results
    assert [(one.check, one.value, one.remedy) for one in results] == [("late", "no answer", "wait")]


def agreed(ranks: Sequence[int], seconds: float) -> list[Any]:
    """What each of these ranks, of three, gets for its number: the ranks that rank 0 has heard, or that are missing."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def agree(rank: int) -> Any:
        try:
            return Board(store, rank, 3).agree("numbers", rank, list, seconds)
        except MissingRanksError as missing:
            return missing

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(agree, ranks))


def test_ranks_agree_on_what_rank_0_decides_and_name_one_that_does_not_answer() -> None:
    assert agreed([0, 1, 2], 30.0) == [[0, 1, 2]] * 3
    assert [missing.ranks for missing in agreed([0, 2], 0.3)] == [[1], [1]]


def test_an_error_of_a_thread_reaches_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)
    assert within(5.0, lambda: 7) == 7


def test_the_rank_with_the_error_is_named_and_not_those_that_wait_for_it() -> None:
    measured = [{"error": "no answer"}, {"error": "connection reset"}, {"error": "no answer"}]
    results = judge(Links(), measured, nodes_for(3), 5.0)
    assert [(one.rank, one.value, one.host) for one in results] == [(1, "connection reset", "node1")]


def test_results_as_table_and_json() -> None:
    results = [
        Result("disk", Verdict.OK, "9 GiB free"),
        Result("product", Verdict.FAILURE, "3 wrong elements", "0", "leave this node out", 5, "node1"),
        Result("links", Verdict.WARNING, "slow", "0.5 x", "check the cable", 6, "node2"),
    ]
    assert [Result.from_json(one.to_json()) for one in results] == results
    assert worst(results) is Verdict.FAILURE and worst(results[::2]) is Verdict.WARNING and worst([]) is Verdict.OK
    assert failed_hosts(results) == ["node1"]
    assert table(results) == [
        "check    verdict  where          measured          limit",
        "disk     ok       all ranks      9 GiB free",
        "product  failure  node1, rank 5  3 wrong elements  0",
        "  -> leave this node out",
        "links    warning  node2, rank 6  slow              0.5 x",
        "  -> check the cable",
    ]
    assert results[1].sentence() == "product, node1, rank 5: 3 wrong elements (limit: 0): leave this node out"
