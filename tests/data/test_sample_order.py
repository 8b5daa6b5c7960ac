"""Sample order: Megatron-LM's, index for index, and equal to slow walks over the tokens."""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import gpt_dataset, sample_order
from megatron.data.gpt_dataset import (
    BlendedDataset,
    GPTDataset,
    MockDataset,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import description_hash
from megatron.data.sample_order import (
    SampleOrder,
    blend_order,
    blend_targets,
    build_sample_order,
    exhaustive_blend_order,
    normalize,
    parse_split,
    plan_epochs,
    split_range,
)
from megatron.errors import ConfigError, DataError
from tests.data.corpora import CORPUS_A, CORPUS_B, golden_documents, settings_of, slow_blend, slow_order, write

# Samples asked for: epochs, last apart, document index, shuffle index, cache key.
GOLDEN: dict[int, tuple[int, bool, list[int], list[int], str]] = {
    4: (
        1,
        False,
        [7, 2, 9, 1, 0, 8, 4, 5, 6, 3],
        [5, 0, 3, 4, 2, 1],
        "907fb36885276fd22d94ddc215c38362",
    ),
    7: (
        2,
        True,
        [7, 2, 9, 1, 0, 8, 4, 5, 6, 3, 7, 3, 5, 1, 4, 8, 0, 2, 6, 9],
        [5, 1, 4, 3, 0, 2, 10, 7, 6, 9, 11, 8],
        "7eed49f6baa69ba17261e1457380063c",
    ),
    11: (
        2,
        False,
        [3, 3, 2, 6, 4, 5, 4, 0, 8, 8, 7, 1, 0, 9, 7, 1, 9, 2, 6, 5],
        [4, 7, 1, 10, 9, 3, 8, 6, 11, 5, 0, 2],
        "75c6d4b53aed34acc988c4d56a855284",
    ),
    16: (
        3,
        False,
        [7, 0, 4, 1, 8, 8, 3, 3, 4, 3, 2, 4, 0, 2, 7, 6, 8, 5, 6, 5, 1, 9, 7, 9, 0, 2, 1, 6, 9, 5],
        [6, 0, 5, 16, 8, 9, 17, 4, 7, 13, 15, 10, 14, 3, 11, 1, 12, 2],
        "35a13fc06972f20fc336dd8d75caebfd",
    ),
}
SAMPLE_ROWS = [(0, 0), (1, 3), (4, 0), (5, 3), (6, 2), (8, 2), (9, 2), (11, 1), (14, 0), (15, 2), (16, 1)]
SAMPLE_ROWS += [(17, 4), (18, 5)]


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Corpora ``a`` and ``b`` in the working directory: their names are part of cache keys."""
    monkeypatch.chdir(tmp_path)
    write("a", golden_documents(CORPUS_A))
    write("b", golden_documents(CORPUS_B, start=500))
    return tmp_path


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_order_of_one_corpus_is_that_of_megatron(num_samples: int) -> None:
    epochs, last_apart, documents, shuffled, _ = GOLDEN[num_samples]
    plan = plan_epochs(sum(CORPUS_A), 8, num_samples)
    assert (plan.num_epochs, plan.last_epoch_apart) == (epochs, last_apart)
    lengths = np.array(CORPUS_A, dtype=np.int32)
    order = build_sample_order(lengths, (0, 10), seq_length=8, num_samples=num_samples, seed=1234)
    assert order.document_index[:].tolist() == documents and order.document_index[:].dtype == np.int32
    assert order.shuffle_index[:].tolist() == shuffled and order.shuffle_index[:].dtype == np.uint32
    assert order.sample_index[:].dtype == np.int32
    if num_samples in (4, 7):
        rows = [tuple(row) for row in order.sample_index[:].tolist()]
        assert rows == SAMPLE_ROWS[: len(shuffled) + 1]


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_cache_key_is_that_of_megatron(corpora: Path, num_samples: int) -> None:
    dataset = GPTDataset(IndexedDataset("a"), 0, num_samples, settings_of())
    assert description_hash(dataset.description) == GOLDEN[num_samples][-1]


@pytest.mark.parametrize("mmap", [True, False])
def test_samples_of_one_corpus_are_those_of_megatron(corpora: Path, mmap: bool) -> None:
    dataset = GPTDataset(IndexedDataset("a", mmap), 0, 4, settings_of())
    assert len(dataset) == 6
    expected = [
        [29, 30, 31, 32, 33, 999, 15, 16],
        [35, 36, 37, 38, 999, 8, 9, 10],
        [43, 44, 45, 46, 47, 999, 19, 20],
    ]
    for index, tokens in enumerate(expected):
        sample = dataset[index]
        assert sample["tokens"].tolist() == tokens and sample["tokens"].dtype == np.int64
        assert sample["labels"].tolist()[:-1] == tokens[1:] and sample["labels"].dtype == np.int64
        assert sample["loss_mask"].tolist() == [1.0] * 8 and sample["loss_mask"].dtype == np.float32
    assert dataset[0]["labels"][-1] == 17


def test_end_of_document_gets_no_loss_when_asked(corpora: Path) -> None:
    dataset = GPTDataset(IndexedDataset("a"), 0, 4, settings_of(masked_token=999))
    assert dataset[0]["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


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
    documents_at_once=st.sampled_from([1, 3, 1 << 22]),
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
    with mock.patch.object(sample_order, "_DOCUMENTS_AT_ONCE", documents_at_once):
        order = build_sample_order(
            np.array(lengths, dtype=np.int32), (first, end), seq_length=seq_length, num_samples=wanted, seed=seed
        )
    documents, rows, shuffled = slow_order(lengths, first, end, seq_length, wanted, seed)
    assert order.document_index[:].tolist() == documents
    assert [tuple(row) for row in order.sample_index[:].tolist()] == rows
    assert order.shuffle_index[:].tolist() == shuffled


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


def test_every_sample_of_an_epoch_comes_once_and_labels_are_shifted(tmp_path: Path) -> None:
    documents = [list(range(start, start + n)) for start, n in ((0, 7), (7, 0), (7, 40), (47, 1), (48, 15))]
    corpus = IndexedDataset(write(tmp_path / "corpus", documents))
    dataset = GPTDataset(corpus, 0, None, settings_of())
    stream = [token for document in dataset.order.document_index[:] for token in documents[document]]
    seen = sorted(dataset.order.shuffle_index[:].tolist())
    assert seen == list(range((63 - 1) // 8))
    for index in range(len(dataset)):
        start = int(dataset.order.shuffle_index[index]) * 8
        assert dataset[index]["tokens"].tolist() == stream[start : start + 8]
        assert dataset[index]["labels"].tolist() == stream[start + 1 : start + 9]


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
        ([0.7, 0.3], 13, [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]),
        ([1.0], 3, [0, 0, 0]),
    ],
)
def test_blend_order_is_that_of_megatron(weights: list[float], size: int, expected: list[int]) -> None:
    datasets, samples = blend_order(weights, size)
    assert datasets.tolist() == expected and datasets.dtype == np.int16
    assert samples.tolist() == [expected[:k].count(d) for k, d in enumerate(expected)]
    assert samples.dtype == np.int64


def test_exhaustive_blend_uses_every_sample_once() -> None:
    datasets, samples = exhaustive_blend_order([3, 5, 2])
    assert datasets.tolist() == [1, 0, 2, 1, 0, 1, 2, 1, 0, 1]
    assert sorted(zip(datasets.tolist(), samples.tolist(), strict=True)) == [
        (d, i) for d, n in enumerate([3, 5, 2]) for i in range(n)
    ]


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
    for sizes in ([3000, 1, 0, 4500, 777, 2], [0, 2, 2]):
        weights = [size / sum(sizes) for size in sizes]
        assert exhaustive_blend_order(sizes)[0].tolist() == slow_blend(weights, sum(sizes), sizes)


def test_blend_of_two_corpora_is_that_of_megatron(corpora: Path) -> None:
    targets, built = blend_targets([0.7, 0.3], 12)
    assert (targets, built) == ([9, 4], [10, 5])
    # Half a percent more, as in Megatron-LM.
    assert blend_targets([0.7, 0.3], 10_000) == ([7000, 3000], [7035, 3015])
    children = [
        GPTDataset(IndexedDataset("a"), 0, 10, settings_of()),
        GPTDataset(IndexedDataset("b"), 0, 5, settings_of()),
    ]
    assert [len(child) for child in children] == [12, 7]
    blend = BlendedDataset(children, [0.7, 0.3], 13, 0)
    assert len(blend) == 13
    assert blend.dataset_index[:].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert blend.dataset_sample_index[:].tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 7, 3, 8]
    assert description_hash(blend.description) == "bca73e6243ecffd51ca12c62186269c6"
    assert blend[1]["tokens"].tolist() == children[1][0]["tokens"].tolist()
    assert len(BlendedDataset(children, [], None, 0)) == 19
    for size, taken in ((19, 13), (20, 14)):
        with pytest.raises(DataError, match=f"The blend takes {taken} samples of a, which has 12"):
            BlendedDataset(children, [0.7, 0.3], size, 0)


def refuse(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("built although it was cached")


def test_order_is_cached_under_the_names_of_megatron(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    key = GOLDEN[7][-1]
    names = [f"{key}-GPTDataset-train-{n}_index.npy" for n in ("document", "sample", "shuffle")]
    kept = [f"{key}-GPTDataset-train-{name}" for name in ("description.txt", "digests.json")]
    assert sorted(os.listdir("cache")) == [*kept, *names]
    monkeypatch.setattr(gpt_dataset, "build_sample_order", refuse)
    cached = GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    assert all(np.array_equal(x[:], y[:]) for x, y in zip(built.order, cached.order, strict=True))
    assert [cached[i]["labels"].tolist() for i in range(12)] == [built[i]["labels"].tolist() for i in range(12)]


def test_order_of_a_corpus_from_a_clock_ahead_is_cached_too(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every rank would find it too old, and build it for itself, one after the other."""
    ahead = time.time() + 100.5
    os.utime("a.idx", (ahead, ahead))
    GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    monkeypatch.setattr(gpt_dataset, "build_sample_order", refuse)
    GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))


def truncate(stem: str) -> None:
    os.truncate(f"{stem}-shuffle_index.npy", 130)


def remove(stem: str) -> None:
    os.remove(f"{stem}-sample_index.npy")


def replace(stem: str) -> None:
    np.save(f"{stem}-document_index.npy", np.array([{"not": "numbers"}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("spoil", [truncate, remove, replace])
def test_damaged_cache_is_built_anew(corpora: Path, spoil: Callable[[str], None]) -> None:
    GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    spoil(f"cache/{GOLDEN[7][-1]}-GPTDataset-train")
    again = GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    fresh = GPTDataset(IndexedDataset("a"), 0, 7, settings_of())
    assert all(np.array_equal(x[:], y[:]) for x, y in zip(fresh.order, again.order, strict=True))
    assert len(os.listdir("cache")) == 5


def newer_corpus_of_the_same_size() -> None:
    for name in os.listdir("cache"):
        os.utime(f"cache/{name}", (1, 1))
    write("a", golden_documents(CORPUS_A[::-1]))


def another_corpus_of_the_same_age() -> None:
    write("a", golden_documents([*CORPUS_A, 20]))
    os.utime("a.idx", (1, 1))


@pytest.mark.parametrize("change", [newer_corpus_of_the_same_size, another_corpus_of_the_same_age])
def test_cache_of_a_former_corpus_of_this_name_is_built_anew(corpora: Path, change: Callable[[], None]) -> None:
    old = GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    change()
    new = GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="cache"))
    fresh = GPTDataset(IndexedDataset("a"), 0, 7, settings_of())
    assert np.array_equal(new.order.sample_index[:], fresh.order.sample_index[:])
    assert not np.array_equal(new.order.sample_index[:], old.order.sample_index[:])


def test_concurrent_builders_agree_and_leave_nothing_behind(corpora: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(GPTDataset, IndexedDataset("a"), 0, 16, settings_of(cache="cache")) for _ in range(8)]
        orders = [job.result().order for job in jobs]
    assert all(order.shuffle_index[:].tolist() == GOLDEN[16][3] for order in orders)
    assert len(os.listdir("cache")) == 5


def test_unwritable_cache_is_one_sentence(corpora: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot write the sample order to a\.bin/cache .*--data-cache-path"):
        GPTDataset(IndexedDataset("a"), 0, 7, settings_of(cache="a.bin/cache"))


def test_mock_sample_depends_on_seed_split_and_index_alone() -> None:
    dataset, again = MockDataset(1234, 32, 100, 10), MockDataset(1234, 32, 100, 1_000_000)
    for index in (9, 0, 5):
        sample = dataset[index]
        assert sample["tokens"].tolist() == again[index]["tokens"].tolist()
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert all(0 <= token < 100 for token in [*sample["tokens"], sample["labels"][-1]])
    others = [MockDataset(1235, 32, 100, 10), MockDataset(1234, 32, 100, 10, split_index=1)]
    assert all(other[0]["tokens"].tolist() != dataset[0]["tokens"].tolist() for other in others)
    assert dataset[0]["tokens"].tolist() != dataset[1]["tokens"].tolist()
    with pytest.raises(IndexError):
        dataset[10]


def test_mock_samples_can_be_learned() -> None:
    """Most tokens follow from the two before them."""
    dataset = MockDataset(0, 256, 512, 4)
    for index in range(4):
        tokens = dataset[index]["tokens"]
        differences = np.diff(tokens) % 512
        assert np.bincount(differences).max() > 0.7 * len(differences)
