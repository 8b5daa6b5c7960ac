"""Sample order: Megatron-LM's, index for index, and equal to slow walks over the tokens."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import description_hash
from megatron.data.sample_order import (
    SampleOrder,
    blend_order,
    blend_targets,
    build_sample_index,
    build_sample_order,
    exhaustive_blend_order,
    normalize,
    parse_split,
    plan_epochs,
    split_range,
)
from megatron.errors import ConfigError, DataError
from tests.data.corpora import CORPUS_A, settings_of, slow_blend, slow_order

# Samples asked for: epochs, last apart, document index, shuffle index, cache key.
GOLDEN: dict[int, tuple[int, bool, list[int], list[int], str]] = {
    4: (1, False, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3], [5, 0, 3, 4, 2, 1], "907fb36885276fd22d94ddc215c38362"),
    7: (
        *(2, True, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3, 7, 3, 5, 1, 4, 8, 0, 2, 6, 9]),
        *([5, 1, 4, 3, 0, 2, 10, 7, 6, 9, 11, 8], "7eed49f6baa69ba17261e1457380063c"),
    ),
    11: (
        *(2, False, [3, 3, 2, 6, 4, 5, 4, 0, 8, 8, 7, 1, 0, 9, 7, 1, 9, 2, 6, 5]),
        *([4, 7, 1, 10, 9, 3, 8, 6, 11, 5, 0, 2], "75c6d4b53aed34acc988c4d56a855284"),
    ),
    16: (
        *(3, False, [7, 0, 4, 1, 8, 8, 3, 3, 4, 3, 2, 4, 0, 2, 7, 6, 8, 5, 6, 5, 1, 9, 7, 9, 0, 2, 1, 6, 9, 5]),
        *([6, 0, 5, 16, 8, 9, 17, 4, 7, 13, 15, 10, 14, 3, 11, 1, 12, 2], "35a13fc06972f20fc336dd8d75caebfd"),
    ),
}
SAMPLE_ROWS = [(0, 0), (1, 3), (4, 0), (5, 3), (6, 2), (8, 2), (9, 2), (11, 1), (14, 0), (15, 2), (16, 1)]
SAMPLE_ROWS += [(17, 4), (18, 5)]


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_order_of_one_corpus_and_its_cache_key_are_those_of_megatron(corpora: Path, num_samples: int) -> None:
    epochs, last_apart, documents, shuffled, key = GOLDEN[num_samples]
    plan = plan_epochs(sum(CORPUS_A), 8, num_samples)
    assert (plan.num_epochs, plan.last_epoch_apart) == (epochs, last_apart)
    dataset = GPTDataset(IndexedDataset("a"), 0, num_samples, settings_of())
    assert description_hash(dataset.description) == key
    found, rows, order = (array[:] for array in dataset.order)
    assert found.tolist() == documents and found.dtype == np.int32
    assert order.tolist() == shuffled and order.dtype == np.uint32
    assert rows.dtype == np.int32
    if num_samples in (4, 7):
        assert list(map(tuple, rows.tolist())) == SAMPLE_ROWS[: len(shuffled) + 1]


def test_splits_are_ranges_of_sequences(corpora: Path) -> None:
    assert parse_split("'969,30,1'") == parse_split("969,30,1") == [(0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert parse_split("100") == parse_split("100, 0, 0") == [(0, 1.0), None, None]
    ranges = [split_range(bounds, 10) for bounds in parse_split("60,20,20")]
    assert ranges == [(0, 6), (6, 8), (8, 10)]
    assert split_range(None, 10) == (0, 0)
    for index, samples in enumerate((3, 1, 1)):
        assert len(GPTDataset(IndexedDataset("a"), index, 1, settings_of("60,20,20"))) == samples


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "0,0,0", "1e3", "-1,2", "1.2.3,4"])
def test_bad_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--split {split!r} must be one to three weights")):
        parse_split(split)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seq_length=st.integers(1, 20),
    wanted=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    documents_at_once=st.integers(1, 4),
)
def test_order_equals_a_walk_over_the_tokens(
    lengths: list[int],
    part: tuple[float, float],
    seq_length: int,
    wanted: int | None,
    seed: int,
    documents_at_once: int,
) -> None:
    first, end = sorted(round(share * len(lengths)) for share in part)
    if not sum(lengths[first:end]):
        return
    of_documents = np.array(lengths, dtype=np.int32)
    order = build_sample_order(of_documents, (first, end), seq_length=seq_length, num_samples=wanted, seed=seed)
    documents, rows, shuffled = slow_order(lengths, first, end, seq_length, wanted, seed)
    assert order.document_index[:].tolist() == documents
    assert [tuple(row) for row in order.sample_index[:].tolist()] == rows
    assert order.shuffle_index[:].tolist() == shuffled
    in_parts = build_sample_index(of_documents, order.document_index[:], seq_length, len(rows) - 1, documents_at_once)
    assert np.array_equal(in_parts, order.sample_index[:])


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any),
    seq_length=st.integers(1, 20),
    wanted=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    seed=st.integers(0, 2**32 - 1),
)
def test_extendable_order_of_a_longer_run_begins_with_that_of_a_shorter(
    lengths: list[int], seq_length: int, wanted: tuple[int, int], seed: int
) -> None:
    def build(num_samples: int | None, extendable: bool = True) -> SampleOrder:
        return build_sample_order(
            np.array(lengths, dtype=np.int32),
            (0, len(lengths)),
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
            extendable=extendable,
        )

    shorter, longer = (build(n) for n in sorted(wanted))
    assert len(shorter.shuffle_index) >= min(wanted) and len(longer.shuffle_index) >= max(wanted)
    for of_shorter, of_longer in zip(shorter, longer, strict=True):
        assert of_longer[: len(of_shorter)].tolist() == of_shorter[:].tolist()
    # Every sample once, and every document once an epoch.
    assert sorted(longer.shuffle_index[:].tolist()) == list(range(len(longer.shuffle_index)))
    epochs = longer.document_index[:].reshape(-1, len(lengths))
    assert (np.sort(epochs, axis=1) == np.arange(len(lengths))).all()
    # A run that fits into one epoch may be extended whatever it began with.
    for ours, theirs in zip(build(None), build(None, extendable=False), strict=True):
        assert ours[:].tolist() == theirs[:].tolist() and ours[:].dtype == theirs[:].dtype


def test_extendable_order_has_a_cache_entry_for_each_number_of_epochs(corpora: Path) -> None:
    keys = {
        n: description_hash(GPTDataset(IndexedDataset("a"), 0, n, settings_of(extendable=True)).description)
        for n in (2, 6, 7, 11, 13, 16)
    }
    assert keys[2] == keys[6] != keys[7] == keys[11] != keys[13] == keys[16]
    assert keys[6] != description_hash(GPTDataset(IndexedDataset("a"), 0, 6, settings_of()).description)


def test_split_without_tokens_is_an_error_only_when_asked(corpora: Path) -> None:
    with pytest.raises(DataError, match=r"The valid split of b has 4 tokens in 1 documents, but one sample needs 9"):
        GPTDataset(IndexedDataset("b"), 1, 1, settings_of("1,1,1"))
    assert len(GPTDataset(IndexedDataset("b"), 1, None, settings_of("1,1,1"))) == 0
    assert len(GPTDataset(IndexedDataset("b"), 1, 0, settings_of("1,0,0"))) == 0


@pytest.mark.parametrize(
    ("weights", "size", "expected"),
    [
        ([0.3, 0.5, 0.2], 12, [1, 0, 2, 1, 0, 1, 2, 1, 0, 1, 0, 1]),
        ([0.5, 0.5], 6, [0, 1, 0, 1, 0, 1]),
        ([0.9, 0.1], 10, [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        ([1.0], 3, [0, 0, 0]),
    ],
)
def test_blend_order_is_that_of_megatron(weights: list[float], size: int, expected: list[int]) -> None:
    datasets, samples = blend_order(weights, size)
    assert datasets.tolist() == expected and datasets.dtype == np.int16
    assert samples.tolist() == [expected[:k].count(d) for k, d in enumerate(expected)]
    assert samples.dtype == np.int64


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12), size=st.integers(1, 400), more=st.integers(0, 400)
)
def test_a_blend_keeps_its_shares_at_every_step_and_grows_without_change(
    weights: list[float], size: int, more: int
) -> None:
    shares = normalize(weights)
    datasets, samples = blend_order(shares, size)
    counts = np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)
    ahead = counts - np.arange(1, size + 1)[:, None] * np.array(shares)
    assert ahead.max() < 1 + 1e-6  # at no step is a corpus a whole sample ahead of its share
    assert (samples == counts[np.arange(size), datasets] - 1).all()  # each corpus in its own order
    longer = blend_order(shares, size + more)
    assert longer[0][:size].tolist() == datasets.tolist() and longer[1][:size].tolist() == samples.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_blend_order_computed_side_by_side_equals_step_by_step(seed: int) -> None:
    # Long enough for several segments; small shares make the past matter for long.
    generator = np.random.default_rng(seed)
    weights = normalize(generator.dirichlet([0.3] * int(generator.integers(2, 12))).tolist())
    assert blend_order(weights, 15_000)[0].tolist() == slow_blend(weights, 15_000)


def test_exhaustive_order_computed_side_by_side_equals_step_by_step() -> None:
    for sizes in ([3000, 1, 0, 4500, 777, 2], [0, 2, 2], [3, 5, 2]):
        datasets, samples = (array.tolist() for array in exhaustive_blend_order(sizes))
        assert datasets == slow_blend([size / sum(sizes) for size in sizes], sum(sizes), sizes)
        assert sorted(zip(datasets, samples)) == [(number, i) for number, n in enumerate(sizes) for i in range(n)]


def test_blend_of_two_corpora_is_that_of_megatron(corpora: Path) -> None:
    surplus = DataConfig().mid_level_dataset_surplus
    targets, built = blend_targets([0.7, 0.3], 12, surplus)
    assert (targets, built) == ([9, 4], [10, 5])
    # Half a percent more, as in Megatron-LM.
    assert blend_targets([0.7, 0.3], 10_000, surplus) == ([7000, 3000], [7035, 3015])
    children = [GPTDataset(IndexedDataset(name), 0, count, settings_of()) for name, count in (("a", 10), ("b", 5))]
    assert [len(child) for child in children] == [12, 7]
    blend = BlendedDataset(children, [0.7, 0.3], 13, 0)
    assert len(blend) == 13
    assert blend.dataset_index[:].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert blend.dataset_sample_index[:].tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 7, 3, 8]
    assert description_hash(blend.description) == "bca73e6243ecffd51ca12c62186269c6"
    assert blend[1]["tokens"].tolist() == children[1][0]["tokens"].tolist()
    assert len(BlendedDataset(children, [], None, 0)) == 19
    for size, taken in ((19, 13), (20, 14)):
        remedy = "lower its weight in --data-path"
        with pytest.raises(DataError, match=f"The blend takes {taken} samples of a, which has 12: {remedy}"):
            BlendedDataset(children, [0.7, 0.3], size, 0)
