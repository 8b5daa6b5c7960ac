"""Samples of one corpus and synthetic ones: tokens, labels, and where documents begin."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset, MockDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import description_hash
from tests.data.corpora import build as build_run
from tests.data.corpora import write

END, SYNTHETIC_END = 999, 7
LENGTH = 16
LENGTHS = [7, 1, 1, 5, 0, 23, 16, 17, 15, 1, 48, 2, 33, 0, 9, 3, 31, 3, 1, 1, 1, 28]
"""Of documents, their ends included: empty ones, ends alone, one as long as a sample, and others about as long."""
FLAGS = ["reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids"]


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents of so many tokens, each but the empty ones ended by ``END``."""
    return [
        [(17 * number + place) % END for place in range(n - 1)] + [END] * (n > 0) for number, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of documents of very different lengths."""
    return write(tmp_path_factory.mktemp("corpus") / "corpus", documents_of(LENGTHS))


def sample_settings(seq_length: int, document_end: int | None = END, **other: Any) -> SampleSettings:
    return SampleSettings(seq_length=seq_length, seed=5, split="1", document_end=document_end, **other)


def build(prefix: str | None, counts: tuple[int, int, int] = (40, 0, 0), **flags: Any) -> Any:
    """Datasets of a run with such flags, on the corpus (``None``: synthetic)."""
    flags |= {"counts": counts, "seq_length": LENGTH, "split": "60,20,20" if counts[1] else "1"}
    return build_run(mock_data=True, eod=SYNTHETIC_END, **flags) if prefix is None else build_run(prefix, **flags)


def starts_of(tokens: list[int], end: int = END) -> list[bool]:
    """Where documents begin, by the definition."""
    return [place == 0 or tokens[place - 1] == end for place in range(len(tokens))]


# --- where documents begin -----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 12),
    seq_length=st.integers(1, 12),
    epochs=st.integers(1, 3),
)
@example(lengths=LENGTHS, seq_length=LENGTH, epochs=4)
def test_samples_have_the_tokens_that_a_walk_over_the_corpus_meets_and_documents_begin_there(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, epochs: int
) -> None:
    """Through the documents in their order, token by token: its id, and whether it is the first of a document."""
    documents = documents_of(lengths)
    corpus = IndexedDataset(write(tmp_path_factory.mktemp("any") / "corpus", documents))
    dataset = GPTDataset(corpus, 0, epochs * sum(lengths) // seq_length, sample_settings(seq_length))
    order = dataset.order.document_index[:].tolist()
    stream = [(token, place == 0) for number in order for place, token in enumerate(documents[number])]
    tokens, firsts = map(list, zip(*stream))
    assert len(dataset) > 0
    assert sorted(dataset.order.shuffle_index[:].tolist()) == list(range(len(dataset)))
    for index in range(len(dataset)):
        begin = int(dataset.order.shuffle_index[index]) * seq_length
        sample = dataset[index]
        assert sample["tokens"].tolist() == tokens[begin : begin + seq_length]
        assert sample["labels"].tolist() == tokens[begin + 1 : begin + seq_length + 1]
        starts = sample["document_starts"]
        assert starts.dtype == np.bool_ and starts.shape == (seq_length,)
        # Attention and positions know nothing of the sample before.
        assert starts.tolist() == [True, *firsts[begin + 1 : begin + seq_length]]


def test_corpus_without_ends_of_documents_is_one_document_per_sample(tmp_path: Path) -> None:
    """Only the token tells; a corpus made without --append-eod has none."""
    corpus = IndexedDataset(write(tmp_path / "corpus", [list(range(n)) for n in (9, 30, 4, 40)]))
    dataset = GPTDataset(corpus, 0, 8, sample_settings(LENGTH))
    for index in range(8):
        assert dataset[index]["document_starts"].tolist() == [True] + [False] * (LENGTH - 1)


# --- the flags that ask for it -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["corpus", "mock"])
@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_that_needs_documents_marks_them_in_every_split_and_changes_nothing_else(
    prefix: str, kind: str, flag: str
) -> None:
    counts = (4, 2, 2)
    source, end = (prefix, END) if kind == "corpus" else (None, SYNTHETIC_END)
    marked, plain = build(source, counts, **{flag: True}), build(source, counts)
    for with_starts, without, count in zip(marked, plain, counts, strict=True):
        documents = 0
        for index in range(count):
            sample = with_starts[index]
            starts = sample.pop("document_starts").tolist()
            assert starts == starts_of(sample["tokens"].tolist(), end)
            documents += sum(starts)
            assert sample.keys() == without[index].keys() == {"tokens", "labels", "loss_mask"}
            assert all(np.array_equal(sample[name], array) for name, array in without[index].items())
        assert documents > count
    assert marked[0][0]["tokens"].tolist() != marked[1][0]["tokens"].tolist()
    if kind == "corpus":
        assert description_hash(marked[0].description) == description_hash(plain[0].description)


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
