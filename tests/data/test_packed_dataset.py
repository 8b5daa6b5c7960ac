"""Packing by best fit: equal to a slow packer, document-exact, deterministic, and resumed where it stopped."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import packed_dataset
from megatron.data.corpus_digests import block_uses
from megatron.data.gpt_dataset import SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packed_dataset import PackedDataset, best_fit_decreasing, build_packed_order, cut_documents
from megatron.errors import DataError
from tests.data.corpora import write

EOD = 999
SEQ_LENGTH = 8
LENGTHS = [3, 9, 0, 8, 1, 30, 2, 17, 5, 10, 4, 9]


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The space that each bin is left with, by placing one item after the other."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    return sorted(spaces)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=120))
    )
)
def test_bins_are_those_of_a_slow_packer(case: tuple[int, list[int]]) -> None:
    """Which of two bins with equal space an item gets is free; the spaces are not."""
    capacity, lengths = case
    bins, count = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    used = np.bincount(bins, weights=lengths, minlength=count) if lengths else np.zeros(0)
    assert sorted((capacity - used).astype(int).tolist()) == slow_best_fit(lengths, capacity)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 20))
def test_pieces_hold_every_pair_of_neighbouring_tokens_of_a_document_once(lengths: list[int], seq_length: int) -> None:
    pieces = cut_documents(np.array(lengths, dtype=np.int64), seq_length, first=7)
    pairs: Counter[tuple[int, int]] = Counter()
    seen: set[tuple[int, int]] = set()
    for document, offset, length in zip(*(array.tolist() for array in pieces)):
        assert 1 <= length <= seq_length + 1
        pairs.update((document, token) for token in range(offset, offset + length - 1))
        seen.update((document, token) for token in range(offset, offset + length))
        if lengths[document - 7] <= seq_length + 1:
            assert (offset, length) == (0, lengths[document - 7])
    assert pairs == Counter((number + 7, token) for number, length in enumerate(lengths) for token in range(length - 1))
    assert seen == {(number + 7, token) for number, length in enumerate(lengths) for token in range(length)}


def order_of(num_samples: int | None, seed: int = 3) -> dict[str, npt.NDArray[np.int64]]:
    lengths = np.array(LENGTHS, dtype=np.int32)
    return build_packed_order(lengths, (1, 11), seq_length=SEQ_LENGTH, num_samples=num_samples, seed=seed)._asdict()


def test_an_order_depends_on_the_seed_and_a_longer_one_begins_with_the_shorter_one() -> None:
    one_epoch, longer = order_of(None), order_of(40)
    samples = len(one_epoch["shuffle_index"])
    assert len(longer["shuffle_index"]) >= 40 and len(longer["shuffle_index"]) % samples == 0
    for name, array in one_epoch.items():
        if name != "statistics":
            np.testing.assert_array_equal(longer[name][: len(array)], array, err_msg=name)
    assert all(np.array_equal(array, order_of(None)[name]) for name, array in one_epoch.items())
    assert not np.array_equal(order_of(None, seed=4)["shuffle_index"], one_epoch["shuffle_index"])
    second = slice(samples, 2 * samples)
    assert sorted(longer["shuffle_index"][second].tolist()) == list(range(samples, 2 * samples))
    # Epochs are packed separately: other documents share a sample.
    first_pieces, pieces = len(one_epoch["documents"]), longer["documents"]
    assert not np.array_equal(pieces[:first_pieces], pieces[first_pieces : 2 * first_pieces])


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexedDataset:
    """Documents of counting tokens, each with the end of a document as its last."""
    monkeypatch.chdir(tmp_path)
    write("a", documents())
    return IndexedDataset("a")


def documents() -> list[list[int]]:
    return [
        [*range(20 * number, 20 * number + length - 1), EOD] if length else [] for number, length in enumerate(LENGTHS)
    ]


def settings_of(**changes: object) -> SampleSettings:
    values = {"seq_length": SEQ_LENGTH, "seed": 3, "split": "1", "padding": EOD, "document_end": EOD, **changes}
    return SampleSettings(**values)  # type: ignore[arg-type]


def spans(starts: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    edges = [*np.flatnonzero(starts).tolist(), len(starts)]
    yield from pairwise(edges)


def test_samples_have_every_transition_of_every_document_once_and_no_other(corpus: IndexedDataset) -> None:
    dataset = PackedDataset(corpus, 0, None, settings_of())
    trained: Counter[tuple[int, int]] = Counter()
    for sample in (dataset[index] for index in range(len(dataset))):
        assert all(len(array) == SEQ_LENGTH for array in sample.values())
        np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
        assert sample["document_starts"][0]
        for start, stop in spans(sample["document_starts"]):
            mask = sample["loss_mask"][start:stop]
            # All labels of a document but the last, which is in another one unless the document goes on.
            assert mask[:-1].all() or not mask.any()
        unmasked = sample["loss_mask"] > 0
        trained.update(zip(sample["tokens"][unmasked].tolist(), sample["labels"][unmasked].tolist()))
    expected = Counter(pair for text in documents() for pair in pairwise(text))
    assert trained == expected


def test_masked_tokens_have_no_loss_and_boundaries_are_optional(corpus: IndexedDataset) -> None:
    plain = PackedDataset(corpus, 0, None, settings_of(document_end=None))
    masked = PackedDataset(corpus, 0, None, settings_of(masked_token=20))
    assert "document_starts" not in plain[0]
    samples = [(plain[index], masked[index]) for index in range(len(plain))]
    for one, other in samples:
        expected = np.where(one["tokens"] == 20, 0.0, one["loss_mask"])
        np.testing.assert_array_equal(other["loss_mask"], expected)
    assert any((one["loss_mask"] != other["loss_mask"]).any() for one, other in samples)


def test_the_log_says_what_was_cut(corpus: IndexedDataset) -> None:
    dataset = PackedDataset(corpus, 0, None, settings_of())
    longer = sum(length > SEQ_LENGTH + 1 for length in LENGTHS)
    text = [token for document in documents() for token in document]
    starts = np.cumsum([0, *LENGTHS])
    windows = [(start, start + SEQ_LENGTH + 1) for start in range(0, len(text), SEQ_LENGTH)]
    cut = sum(
        length > 0 and not any(a <= begin and begin + length <= b for a, b in windows)
        for begin, length in zip(starts.tolist(), LENGTHS)
    )
    total = len(dataset) * (SEQ_LENGTH + 1)
    pieces = cut_documents(np.array(LENGTHS), SEQ_LENGTH)
    assert dataset.describe() == (
        f"a (train): 11 documents packed in {len(dataset)} samples an epoch; {longer} documents are longer than a "
        f"sample and cut (concatenation cuts {cut}); {1 - pieces.lengths.sum() / total:.2%} of the tokens are padding"
    )
    assert cut > longer > 0


def test_a_cached_order_is_read_and_another_corpus_is_not_taken_for_it(corpus: IndexedDataset, tmp_path: Path) -> None:
    cached = settings_of(cache_directory=str(tmp_path / "cache"))
    built = PackedDataset(corpus, 0, 30, cached)
    with mock.patch.object(packed_dataset, "build_packed_order", side_effect=AssertionError):
        again = PackedDataset(corpus, 0, 30, cached)
    for index in range(len(built)):
        for name, array in built[index].items():
            np.testing.assert_array_equal(again[index][name], array)
    write("a", documents()[:-1])
    other = PackedDataset(IndexedDataset("a"), 0, 30, cached)
    assert other.statistics.num_documents == built.statistics.num_documents - 1


def test_blocks_of_samples_are_those_that_they_read(corpus: IndexedDataset) -> None:
    dataset = PackedDataset(corpus, 0, None, settings_of())
    ranges = dataset.document_ranges(np.arange(len(dataset)))
    for index in range(len(dataset)):
        mine = ranges.positions == index
        parts = [documents()[document][first:stop] for document, first, stop in zip(*(one[mine] for one in ranges[1:]))]
        text = [token for part in parts for token in part]
        assert [*dataset[index]["tokens"].tolist(), int(dataset[index]["labels"][-1])][: len(text)] == text
    uses = block_uses(dataset, np.arange(len(dataset)))
    assert uses.blocks.tolist() == [0]


def test_a_split_without_tokens_is_refused(corpus: IndexedDataset) -> None:
    with pytest.raises(DataError, match="valid split of a has no tokens: give it more data"):
        PackedDataset(corpus, 1, 4, settings_of(split="100,0,0"))
    assert len(PackedDataset(corpus, 1, None, settings_of(split="100,0,0"))) == 0
