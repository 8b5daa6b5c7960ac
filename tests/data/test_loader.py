"""From flags to microbatches: every sample once, in order, whatever the layout, and no silent end."""

import os
import pickle
import re
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data.corpus_check import Share, check_indexes
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, MockDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import (
    build_datasets,
    build_loader,
    cyclic_microbatches,
    microbatch_sample_indices,
    single_pass_microbatches,
)
from megatron.data.order_cache import description_hash
from megatron.data.sources import parse_data_path
from megatron.data.tokenizers import describe_tokenizer
from megatron.errors import ConfigError, DataError, UserError
from tests.data.corpora import CORPUS_A, CORPUS_B, golden_documents, write
from tests.forked import fork_context


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("a", golden_documents(CORPUS_A))
    write("b", golden_documents(CORPUS_B, start=500))
    return tmp_path


def build(*data_path: str, counts: tuple[int, int, int] = (12, 0, 0), **flags: Any) -> Any:
    """Datasets for the golden corpora."""
    data = DataConfig(**{"data_path": data_path, "seq_length": 8, "split": "100,0,0", **flags})
    tokenizer = describe_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=999))
    return build_datasets(
        data, vocab_size=1000, eod=999, seed=1234, sample_counts=counts, tokenizer_description=tokenizer
    )


def test_microbatch_is_a_slice_of_the_chunk_of_all_ranks() -> None:
    assert microbatch_sample_indices(100, 2, 0, 3) == [100, 101]
    assert microbatch_sample_indices(100, 2, 2, 3) == [104, 105]
    with pytest.raises(ValueError, match="rank 3 of 3"):
        microbatch_sample_indices(0, 2, 3, 3)


@settings(max_examples=60)
@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_ranks_together_read_every_sample_in_order(total: int, consumed: int, size: int, ranks: int) -> None:
    streams = [list(single_pass_microbatches(total, consumed, size, rank, ranks)) for rank in range(ranks)]
    together = [sample for chunk in zip(*streams, strict=True) for part in chunk for sample in part]
    complete = max(0, total - consumed) // (size * ranks) * size * ranks
    assert together == list(range(consumed, consumed + complete))


def take(stream: Any, count: int) -> list[list[int]]:
    return [next(stream) for _ in range(count)]


def test_cyclic_order_is_that_of_megatron() -> None:
    for rank in range(2):
        microbatches = take(cyclic_microbatches(23, 0, 2, rank, 2), 10)
        for epoch in range(2):
            generator = torch.Generator().manual_seed(epoch)
            expected = (torch.randperm(10, generator=generator) + 10 * rank).tolist()
            assert [s for part in microbatches[5 * epoch :][:5] for s in part] == expected


@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 13])
def test_cyclic_order_resumes_where_it_stopped(done: int) -> None:
    for rank in range(2):
        whole = take(cyclic_microbatches(23, 0, 2, rank, 2, seed=7), 20)
        assert take(cyclic_microbatches(23, done * 4, 2, rank, 2, seed=7), 5) == whole[done : done + 5]
        assert whole[:5] != take(cyclic_microbatches(23, 0, 2, rank, 2, seed=8), 5)


def test_cyclic_order_refuses_what_it_cannot_do() -> None:
    with pytest.raises(DataError, match="3 samples, fewer than the 4"):
        next(cyclic_microbatches(3, 0, 2, 0, 2))
    with pytest.raises(DataError, match="cannot resume at sample 6"):
        next(cyclic_microbatches(23, 6, 2, 0, 2))


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_loader_yields_the_samples_of_its_rank(num_workers: int, kind: Any) -> None:
    (dataset, _, _) = build("0.7", "a", "0.3", "b")
    loader = build_loader(
        dataset,
        vocab_size=1000,
        consumed_samples=4,
        micro_batch_size=2,
        data_parallel_rank=1,
        data_parallel_size=2,
        num_workers=num_workers,
        dataloader_type=kind,
    )
    place = (13, 4, 2, 1, 2)
    indices = single_pass_microbatches(*place) if kind == "single" else cyclic_microbatches(*place)
    for samples in take(indices, 2):
        microbatch = next(loader)
        assert set(microbatch) == {"tokens", "labels", "loss_mask"}
        for key, dtype in (("tokens", torch.int64), ("labels", torch.int64), ("loss_mask", torch.float32)):
            assert microbatch[key].shape == (2, 8) and microbatch[key].dtype == dtype
            assert microbatch[key].tolist() == [dataset[index][key].tolist() for index in samples]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_running_out_of_samples_is_an_error(num_workers: int) -> None:
    loader = build_loader(
        MockDataset(0, 4, 10, 5),
        vocab_size=10,
        consumed_samples=0,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=num_workers,
    )
    assert len(take(loader, 2)) == 2
    with pytest.raises(DataError, match="All 5 samples of the dataset have been consumed: train for fewer"):
        next(loader)


class SignalledDataset(MockDataset):
    """Whoever reads a sample gets every signal by which a run may be asked to stop."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        return super().__getitem__(index)


def test_workers_read_on_when_all_processes_of_a_run_are_signalled() -> None:
    loader = build_loader(
        SignalledDataset(0, 8, 1000, 5),
        vocab_size=1000,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=1,
    )
    assert next(loader)["tokens"].shape == (1, 8)


@pytest.mark.parametrize("data_path", [("a",), ("0.7", "a", "0.3", "b")])
def test_datasets_travel_without_their_orders(data_path: tuple[str, ...]) -> None:
    """To workers that are not forked: what is in the cache is mapped there."""
    dataset = build(*data_path, counts=(5000, 0, 0))[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 3000
    copy = pickle.loads(packed)
    assert len(copy) == len(dataset) >= 5000 and type(copy) is type(dataset)
    for index in (0, 1, 2500, 4999):
        assert {name: array.tolist() for name, array in copy[index].items()} == {
            name: array.tolist() for name, array in dataset[index].items()
        }


def test_a_dataset_without_a_cache_travels_with_its_order() -> None:
    settings_ = SampleSettings(8, 1234, "1")
    dataset = BlendedDataset([GPTDataset(IndexedDataset("a"), 0, 40, settings_)], [1.0], 40, 0)
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy[index]["tokens"].tolist() for index in range(40)] == [
        dataset[index]["tokens"].tolist() for index in range(40)
    ]


class _Fails:
    """A dataset with a mistake of ours."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("shapes differ")


class _Killed(_Fails):
    """A dataset whose worker the kernel ends."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_is_blamed_for_workers_that_died_alone() -> None:
    options: dict[str, Any] = {"vocab_size": 10, "consumed_samples": 0, "micro_batch_size": 2}
    options |= {"data_parallel_rank": 0, "data_parallel_size": 1, "num_workers": 1}
    with pytest.raises(RuntimeError, match="shapes differ"):
        next(build_loader(_Fails(), **options))
    with pytest.raises(DataError, match=r"A loader process ended .*: use fewer --num-workers if memory ran out"):
        next(build_loader(_Killed(), **options))


def test_data_path_is_prefixes_or_pairs() -> None:
    assert parse_data_path(("a",)) == (["a"], None)
    assert parse_data_path(("a", "b")) == (["a", "b"], None)
    assert parse_data_path(("0.7", "a", "3", "b")) == (["a", "b"], [0.7, 3.0])
    assert parse_data_path(("0", "a", "3", "b")) == (["b"], [3.0])
    for bad in (("-1", "a", "2", "b"), ("0", "a"), ("nan", "a")):
        with pytest.raises(ConfigError, match="--data-path has weights"):
            parse_data_path(bad)


def test_a_weight_without_a_prefix_is_refused_unless_a_corpus_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("0.5", "a", "0.5"), ("a", "0.5", "b", "0.5"), ("0.5", "a", "b")):
        with pytest.raises(ConfigError, match=r"--data-path .* has the weight 0.5 without a prefix after it: write a"):
            parse_data_path(words)
    (tmp_path / "2024.idx").touch()
    assert parse_data_path(("a", "b", "2024")) == (["a", "b", "2024"], None)


def test_one_corpus_and_its_default_cache(corpora: Path) -> None:
    train, valid, test = build("a", counts=(7, 0, 0))
    assert isinstance(train, GPTDataset) and valid is None and test is None
    assert description_hash(train.description) == "7eed49f6baa69ba17261e1457380063c"
    assert len(list((corpora / "cache" / "GPTDataset_indices").iterdir())) == 5
    build("a", counts=(7, 0, 0), data_cache_path="elsewhere")
    assert len(list((corpora / "elsewhere").iterdir())) == 5


def test_weighted_blend_is_that_of_megatron() -> None:
    train, _, _ = build("7", "a", "3", "b")
    assert isinstance(train, BlendedDataset) and len(train) == 13
    assert description_hash(train.description) == "bca73e6243ecffd51ca12c62186269c6"


def test_blend_without_weights_is_proportional_to_the_samples() -> None:
    train, _, _ = build("a", "b", counts=(8, 0, 0))  # one epoch has 6 and 2
    assert len(train) == 8 and np.bincount(train.dataset_index[:]).tolist() == [6, 2]
    train, _, _ = build("a", "b", counts=(80, 0, 0))  # ten epochs
    assert len(train) == 80 and np.bincount(train.dataset_index[:]).tolist() == [60, 20]
    assert len({tuple(train[i]["tokens"].tolist()) for i in range(80)}) > 40


def test_blend_of_many_small_shares_gets_enough_samples() -> None:
    """Rounding every share up makes the blend outgrow what the large corpus was built for."""
    pairs = [word for _ in range(40) for word in ("0.001", "b")]
    train, _, _ = build("0.9", "a", *pairs, counts=(20, 0, 0))
    assert [train[i]["tokens"].shape for i in range(len(train))] == [(8,)] * len(train)


@pytest.mark.parametrize("order", ["extendable", "best-fit"])
@pytest.mark.parametrize("words", [("a",), ("0.7", "a", "0.3", "b"), ("a", "b")])
def test_longer_run_in_such_an_order_begins_with_the_shorter(words: tuple[str, ...], order: str) -> None:
    """Whatever the corpora; in Megatron-LM's order a run past its epoch is shuffled anew."""

    def samples(count: int, order: str, shown: int) -> list[list[int]]:
        train, _, _ = build(*words, counts=(count, 0, 0), sample_order=order)
        return [train[index]["tokens"].tolist() for index in range(shown)]

    for shorter, longer in ((5, 8), (8, 90), (30, 31)):
        assert samples(longer, order, shorter) == samples(shorter, order, shorter)
    assert samples(90, "megatron", 8) != samples(8, "megatron", 8)


def test_every_split_reads_its_own_documents() -> None:
    train, valid, test = build("a", counts=(3, 1, 1), split="60,20,20")
    documents = [set(dataset.order.document_index[:].tolist()) for dataset in (train, valid, test)]
    assert documents == [{0, 1, 2, 3, 4, 5}, {6, 7}, {8, 9}]


def test_end_of_document_mask_reaches_the_samples() -> None:
    train, _, _ = build("a", eod_mask_loss=True)
    masked = train[0]["loss_mask"] == 0
    assert masked.any() and (train[0]["tokens"][masked] == 999).all()
    mock, _, _ = build(mock_data=True, eod_mask_loss=True, counts=(500, 0, 0))
    assert any((mock[i]["loss_mask"] == 0).any() for i in range(500))


def test_mock_splits_differ() -> None:
    train, valid, test = build(mock_data=True, counts=(5, 4, 0))
    assert (len(train), len(valid), test) == (5, 4, None)
    assert train[0]["tokens"].tolist() != valid[0]["tokens"].tolist()


@pytest.mark.parametrize(
    ("data_path", "flags", "sentence"),
    [
        ((), {}, "There is no corpus: set --data-path"),
        (("a",), {"seq_length": None}, "--seq-length is missing"),
        (("nowhere",), {}, r"nowhere\.idx does not exist"),
        (
            ("a",),
            {"counts": (1, 5, 0)},
            "5 samples of the valid split are needed, but --split '100,0,0' gives it nothing",
        ),
        (("b",), {"counts": (1, 1, 0), "split": "2,1"}, "The valid split of b has 6 tokens in 1 documents"),
        (
            ("b", "b"),
            {"counts": (1, 1, 0), "split": "2,1"},
            "No corpus of --data-path has tokens for one sample",
        ),
        (("a",), {"split": "x"}, "--split 'x' must be"),
    ],
)
def test_user_errors_are_one_sentence(data_path: tuple[str, ...], flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        build(*data_path, **flags)
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    data = DataConfig(data_path=("a",), seq_length=8)
    with pytest.raises(DataError, match=r"a\.bin holds token id 999, but the vocabulary has ids 0\.\.511"):
        build_datasets(data, vocab_size=512, eod=2, seed=1, sample_counts=(1, 0, 0), tokenizer_description=None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_id_beyond_the_vocabulary_is_refused_wherever_it_hides(num_workers: int) -> None:
    loader = build_loader(
        MockDataset(0, 64, 10, 5),
        vocab_size=9,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=num_workers,
    )
    with pytest.raises(DataError, match=r"^Sample \d has token id 9, but the largest id of the tokenizer is 8: set"):
        take(loader, 5)


def test_a_negative_id_is_refused_too() -> None:
    """Such as those of a corpus stored as int16; looked up, it would fail somewhere on the device."""

    class Negative(MockDataset):
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            return {**sample, "labels": np.array([*sample["labels"][:-1], -7])}

    loader = build_loader(
        Negative(0, 64, 10, 5),
        vocab_size=10,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=0,
    )
    with pytest.raises(DataError, match="Sample 0 has token id -7, but"):
        take(loader, 1)


def read_a_blend(directory: Path, hard: int, pipe: Connection) -> None:
    """Send the length of a sample of 40 corpora, or the refusal, of a process that may open 64 files at first."""
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    prefixes = tuple(f"corpus{number}" for number in range(40))
    data = DataConfig(data_path=prefixes, seq_length=8, split="1")
    try:
        check_indexes(prefixes, None, Share())
        dataset, _, _ = build_datasets(
            data, vocab_size=1000, eod=999, seed=1, sample_counts=(80, 0, 0), tokenizer_description=None
        )
        assert dataset is not None
        pipe.send(str(len(dataset[79]["tokens"])))
    except UserError as error:
        pipe.send(str(error))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hard", "said"),
    [
        (4000, r"8"),
        (1000, r"8"),
        (100, r"40 corpora need 1144 open files .* the hard limit is 100: raise it \(ulimit -Hn\), or merge .*"),
    ],
)
def test_a_blend_may_have_more_files_than_a_process_may_open_at_first(tmp_path: Path, hard: int, said: str) -> None:
    """Many systems let a process open 1,024 files, which are those of 170 corpora."""
    for number in range(40):
        write(f"corpus{number}", golden_documents(CORPUS_A))
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=read_a_blend, args=(tmp_path, hard, theirs))
    process.start()
    process.join(300)
    assert ours.poll() and re.fullmatch(said, words := ours.recv()), words
