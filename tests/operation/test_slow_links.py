"""From the speeds of pairs of nodes to the slow node, group of nodes or link."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.features.preflight.network import (
    ALL_PAIRS,
    Pair,
    Suspect,
    explain,
    rounds_again,
    rounds_of,
    slow_pairs,
    usual_speed,
)

RATIO = 0.5
COUNTS = st.integers(3, 200)
SEEDS = st.integers(0, 2**32 - 1)


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


@given(COUNTS)
def test_every_vertex_is_measured_with_at_least_two_others(count: int) -> None:
    partners: dict[int, set[int]] = {vertex: set() for vertex in range(count)}
    for one, other in pairs_of(count):
        partners[one].add(other)
        partners[other].add(one)
    assert min(map(len, partners.values())) >= min(2, count - 1)


@given(COUNTS, SEEDS)
def test_nothing_is_suspected_without_a_fault(count: int, seed: int) -> None:
    pairs = pairs_of(count)
    speeds = speeds_with_noise(pairs, set(), random.Random(seed))
    assert explain(pairs, slow_pairs(speeds, RATIO)) == []


@given(COUNTS, SEEDS)
def test_a_slow_node_is_named(count: int, seed: int) -> None:
    dice, pairs = random.Random(seed), pairs_of(count)
    culprit = dice.randrange(count)
    speeds = speeds_with_noise(pairs, {pair for pair in pairs if culprit in pair}, dice)
    assert explain(pairs, slow_pairs(speeds, RATIO)) == [Suspect((culprit,))]


@given(st.integers(4, 200), SEEDS)
def test_a_slow_link_is_named(count: int, seed: int) -> None:
    dice, pairs = random.Random(seed), pairs_of(count)
    culprit = dice.choice(pairs)
    speeds = speeds_with_noise(pairs, {culprit}, dice)
    assert explain(pairs, slow_pairs(speeds, RATIO)) == [Suspect(culprit, is_link=True)]


@given(st.integers(5, 200), SEEDS)
def test_neighbours_behind_a_slow_uplink_are_named_together(count: int, seed: int) -> None:
    dice, pairs = random.Random(seed), pairs_of(count)
    size = dice.randint(2, (count - 1) // 2)
    first = dice.randint(0, count - size)
    group = set(range(first, first + size))
    speeds = speeds_with_noise(pairs, {pair for pair in pairs if len(group & set(pair)) == 1}, dice)
    assert set(explain(pairs, slow_pairs(speeds, RATIO))) == {Suspect(tuple(sorted(group)), is_group=True)}


@given(st.integers(8, 200), SEEDS)
def test_two_slow_nodes_are_named(count: int, seed: int) -> None:
    dice, pairs = random.Random(seed), pairs_of(count)
    culprits = dice.sample(range(count), 2)
    speeds = speeds_with_noise(pairs, {pair for pair in pairs if set(culprits) & set(pair)}, dice)
    assert sorted(explain(pairs, slow_pairs(speeds, RATIO)), key=lambda one: one.vertices) == [
        Suspect((culprit,)) for culprit in sorted(culprits)
    ]


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
