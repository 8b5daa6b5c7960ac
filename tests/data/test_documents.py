"""Where documents begin in samples, and which part of a sample each context-parallel rank reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.core.context_parallel.attention import ContextSplit
from megatron.data.dataset_builder import build_datasets
from megatron.data.gpt_dataset import Dataset, GPTDataset, MockDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import Microbatch
from megatron.data.order_cache import description_hash
from tests.data.corpora import load, write

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
    source: dict[str, Any] = {"mock_data": True} if prefix is None else {"data_path": (prefix,)}
    data = DataConfig(**source, **flags, seq_length=LENGTH, split="60,20,20" if counts[1] else "1")
    end = SYNTHETIC_END if prefix is None else END
    return build_datasets(data, vocab_size=end + 1, eod=end, seed=5, sample_counts=counts, tokenizer_description=None)


def starts_of(tokens: list[int], end: int = END) -> list[bool]:
    """Where documents begin, by the definition."""
    return [place == 0 or tokens[place - 1] == end for place in range(len(tokens))]


# --- where documents begin -----------------------------------------------------------------------------------


def assert_samples_are_those_of_a_walk(dataset: GPTDataset, lengths: list[int], seq_length: int) -> None:
    """Through the documents in their order, token by token: its id, and whether it is the first of a document."""
    documents = documents_of(lengths)
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


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 12),
    seq_length=st.integers(1, 12),
    epochs=st.integers(1, 3),
)
def test_samples_have_the_tokens_that_a_walk_over_the_corpus_meets_and_documents_begin_there(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, epochs: int
) -> None:
    corpus = IndexedDataset(write(tmp_path_factory.mktemp("any") / "corpus", documents_of(lengths)))
    wanted = epochs * sum(lengths) // seq_length
    dataset = GPTDataset(corpus, 0, wanted, sample_settings(seq_length))
    assert_samples_are_those_of_a_walk(dataset, lengths, seq_length)


def test_documents_of_one_token_and_ends_at_both_ends_of_a_sample_are_seen(prefix: str) -> None:
    """What the walk above must have met, here on one corpus that surely has it."""
    dataset = GPTDataset(IndexedDataset(prefix), 0, 60, sample_settings(LENGTH))
    assert_samples_are_those_of_a_walk(dataset, LENGTHS, LENGTH)
    samples = [dataset[index] for index in range(len(dataset))]
    assert any(sample["tokens"][0] == END and sample["document_starts"][1] for sample in samples)
    assert any(sample["tokens"][-1] == END for sample in samples)
    assert any((sample["document_starts"][1:] & sample["document_starts"][:-1]).any() for sample in samples)
    assert any(not sample["document_starts"][1:].any() for sample in samples)


def test_corpus_without_ends_of_documents_is_one_document_per_sample(tmp_path: Path) -> None:
    """Only the token tells; a corpus made without --append-eod has none."""
    corpus = IndexedDataset(write(tmp_path / "corpus", [list(range(n)) for n in (9, 30, 4, 40)]))
    dataset = GPTDataset(corpus, 0, 8, sample_settings(LENGTH))
    for index in range(8):
        assert dataset[index]["document_starts"].tolist() == [True] + [False] * (LENGTH - 1)


def test_synthetic_documents_begin_behind_the_last_id() -> None:
    dataset = MockDataset(3, LENGTH, 20, 200, document_end=19)
    counts = []
    for index in range(len(dataset)):
        tokens, starts = (dataset[index][name].tolist() for name in ("tokens", "document_starts"))
        assert starts == starts_of(tokens, 19)
        counts.append(sum(starts))
    assert {1, 2, 3} <= set(counts)


# --- the flags that ask for it -------------------------------------------------------------------------------


def corpus_of(kind: str, prefix: str) -> str | None:
    return prefix if kind == "corpus" else None


@pytest.mark.parametrize("kind", ["corpus", "mock"])
@pytest.mark.parametrize("flags", [{}, {"eod_mask_loss": True}], ids=["no flag", "loss mask alone"])
def test_samples_say_nothing_of_documents_unless_asked(prefix: str, kind: str, flags: dict[str, bool]) -> None:
    for dataset in build(corpus_of(kind, prefix), counts=(4, 2, 2), **flags):
        assert set(dataset[0]) == {"tokens", "labels", "loss_mask"}


@pytest.mark.parametrize("kind", ["corpus", "mock"])
@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_that_needs_documents_marks_them_in_every_split_and_changes_nothing_else(
    prefix: str, kind: str, flag: str
) -> None:
    counts = (4, 2, 2)
    marked = build(corpus_of(kind, prefix), counts, **{flag: True})
    plain = build(corpus_of(kind, prefix), counts)
    end = END if kind == "corpus" else SYNTHETIC_END
    for with_starts, without, count in zip(marked, plain, counts, strict=True):
        documents = 0
        for index in range(count):
            sample = with_starts[index]
            starts = sample.pop("document_starts").tolist()
            assert starts == starts_of(sample["tokens"].tolist(), end)
            documents += sum(starts)
            assert sample.keys() == without[index].keys()
            assert all(np.array_equal(sample[name], array) for name, array in without[index].items())
        assert documents > count
    assert marked[0][0]["tokens"].tolist() != marked[1][0]["tokens"].tolist()
    if kind == "corpus":
        assert description_hash(marked[0].description) == description_hash(plain[0].description)


def test_blends_hand_on_where_documents_begin(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, documents_of(lengths)) for name, lengths in (("a", LENGTHS), ("b", LENGTHS[::-1]))]
    data = DataConfig(data_path=("2", paths[0], "1", paths[1]), seq_length=LENGTH, split="1", reset_position_ids=True)
    dataset, _, _ = build_datasets(
        data, vocab_size=END + 1, eod=END, seed=5, sample_counts=(30, 0, 0), tokenizer_description=None
    )
    assert dataset is not None
    for index in range(30):
        tokens, starts = (dataset[index][name].tolist() for name in ("tokens", "document_starts"))
        assert starts == starts_of(tokens)


# --- the part of a context-parallel rank ---------------------------------------------------------------------


def chunks_from_either_side(rank: int, size: int) -> list[int]:
    """The positions of ``rank``, written out: of ``2 * size`` chunks one from the front and one from the back."""
    chunk = LENGTH // (2 * size)
    front = [rank * chunk + place for place in range(chunk)]
    back = [LENGTH - (rank + 1) * chunk + place for place in range(chunk)]
    return front + back


def loader(dataset: Dataset, rank: int | None, size: int = 1, **changes: Any) -> Iterator[Microbatch]:
    """Microbatches of three samples of data-parallel rank 1 of 2; of a context-parallel rank, or whole."""
    positions = None if rank is None else ContextSplit(rank, size).positions(LENGTH).numpy()
    place = {"consumed_samples": 6, "micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2}
    return load(dataset, **{**place, **changes}, positions=positions)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_each_rank_reads_its_chunks_of_every_sample_and_where_all_documents_begin(
    prefix: str, size: int, kind: str
) -> None:
    (dataset, _, _) = build(prefix, eod_mask_loss=True, reset_attention_mask=True)
    whole = loader(dataset, None, dataloader_type=kind)
    parts = [loader(dataset, rank, size, dataloader_type=kind) for rank in range(size)]
    for _ in range(4):
        wanted = next(whole)
        seen = []
        for rank, part in enumerate(parts):
            positions = chunks_from_either_side(rank, size)
            found = next(part)
            assert set(found) == {"tokens", "labels", "loss_mask", "document_starts"}
            for name in ("tokens", "labels", "loss_mask"):
                assert found[name].dtype == wanted[name].dtype
                assert found[name].shape == (3, LENGTH // size)
                assert found[name].tolist() == [[row[place] for place in positions] for row in wanted[name].tolist()]
            assert found["document_starts"].dtype == torch.bool
            assert torch.equal(found["document_starts"], wanted["document_starts"])
            seen += positions
        assert sorted(seen) == list(range(LENGTH))
        assert 0 < wanted["loss_mask"].sum() < wanted["loss_mask"].numel()


def test_a_rank_reads_its_chunks_alone_where_documents_do_not_matter(prefix: str) -> None:
    (dataset, _, _) = build(prefix)
    found, wanted = next(loader(dataset, 1, 2)), next(loader(dataset, None))
    assert set(found) == {"tokens", "labels", "loss_mask"}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor[:, chunks_from_either_side(1, 2)])


def test_loader_processes_hand_over_the_same_parts(prefix: str) -> None:
    (dataset, _, _) = build(prefix, reset_position_ids=True)
    here, there = loader(dataset, 1, 2), loader(dataset, 1, 2, num_workers=2)
    for _ in range(3):
        one, other = next(here), next(there)
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
