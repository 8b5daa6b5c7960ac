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

from megatron.config.data import DataConfig
from megatron.core.context_parallel.attention import ContextSplit
from megatron.data.corpus_check import Share, check_indexes
from megatron.data.dataset_builder import build_datasets, parse_data_path
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, MockDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import (
    cyclic_microbatches,
    microbatch_sample_indices,
    single_pass_microbatches,
)
from megatron.data.order_cache import description_hash
from megatron.errors import ConfigError, DataError, UserError
from tests.data.corpora import CORPUS_A, build, golden_documents, load, settings_of, stamps, tokens_of, write
from tests.forked import fork_context

pytestmark = pytest.mark.usefixtures("corpora")


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
    place = {"consumed_samples": 4, "micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
    loader = load(dataset, **place, num_workers=num_workers, dataloader_type=kind)
    of_rank = single_pass_microbatches if kind == "single" else cyclic_microbatches
    for samples in take(of_rank(13, *place.values()), 2):
        microbatch = next(loader)
        assert set(microbatch) == {"tokens", "labels", "loss_mask"}
        for key, dtype in (("tokens", torch.int64), ("labels", torch.int64), ("loss_mask", torch.float32)):
            assert microbatch[key].shape == (2, 8) and microbatch[key].dtype == dtype
            assert microbatch[key].tolist() == [dataset[index][key].tolist() for index in samples]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_running_out_of_samples_is_an_error(num_workers: int) -> None:
    loader = load(MockDataset(0, 4, 10, 5), micro_batch_size=2, num_workers=num_workers)
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
    loader = load(SignalledDataset(0, 8, 1000, 5), num_workers=1)
    assert next(loader)["tokens"].shape == (1, 8)


@pytest.mark.parametrize("data_path", [("a",), ("0.7", "a", "0.3", "b")])
def test_datasets_travel_without_their_orders(data_path: tuple[str, ...]) -> None:
    """To workers that are not forked: what is in the cache is mapped there."""
    dataset = build(*data_path, counts=(5000, 0, 0))[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 3000
    copy = pickle.loads(packed)
    assert tokens_of(copy) == tokens_of(dataset) and type(copy) is type(dataset)


def test_a_dataset_without_a_cache_travels_with_its_order() -> None:
    dataset = BlendedDataset([GPTDataset(IndexedDataset("a"), 0, 40, settings_of())], [1.0], 40, 0)
    assert tokens_of(pickle.loads(pickle.dumps(dataset))) == tokens_of(dataset)


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
    with pytest.raises(RuntimeError, match="shapes differ"):
        next(load(_Fails(), num_workers=1))
    with pytest.raises(DataError, match=r"A loader process ended .*: use fewer --num-workers if memory ran out"):
        next(load(_Killed(), num_workers=1))


def test_data_path_is_prefixes_or_pairs() -> None:
    assert parse_data_path(("a",)) == (["a"], None)
    assert parse_data_path(("a", "b")) == (["a", "b"], None)
    assert parse_data_path(("0.7", "a", "3", "b")) == (["a", "b"], [0.7, 3.0])
    assert parse_data_path(("0", "a", "3", "b")) == (["b"], [3.0])
    for bad in (("-1", "a", "2", "b"), ("0", "a"), ("nan", "a")):
        with pytest.raises(ConfigError, match="--data-path has weights"):
            parse_data_path(bad)


def test_a_weight_without_a_prefix_is_refused_unless_a_corpus_has_its_name() -> None:
    for words in (("0.5", "a", "0.5"), ("a", "0.5", "b", "0.5"), ("0.5", "a", "b")):
        with pytest.raises(ConfigError, match=r"--data-path .* has the weight 0.5 without a prefix after it: write a"):
            parse_data_path(words)
    Path("2024.idx").touch()
    assert parse_data_path(("a", "b", "2024")) == (["a", "b", "2024"], None)


def test_one_corpus_and_its_default_cache() -> None:
    train, valid, test = build("a", counts=(7, 0, 0))
    assert isinstance(train, GPTDataset) and valid is None and test is None
    assert description_hash(train.description) == "7eed49f6baa69ba17261e1457380063c"
    assert len(stamps("cache/GPTDataset_indices")) == 5
    build("a", counts=(7, 0, 0), data_cache_path="elsewhere")
    assert stamps("elsewhere").keys() == stamps("cache/GPTDataset_indices").keys()


def test_weighted_blend_is_that_of_megatron() -> None:
    train, _, _ = build("7", "a", "3", "b")
    assert isinstance(train, BlendedDataset) and len(train) == 13
    assert description_hash(train.description) == "bca73e6243ecffd51ca12c62186269c6"


def test_blend_without_weights_is_proportional_to_the_samples() -> None:
    train, _, _ = build("a", "b", counts=(8, 0, 0))  # one epoch has 6 and 2
    assert len(train) == 8 and np.bincount(train.dataset_index[:]).tolist() == [6, 2]
    train, _, _ = build("a", "b", counts=(80, 0, 0))  # ten epochs
    assert len(train) == 80 and np.bincount(train.dataset_index[:]).tolist() == [60, 20]
    assert len(set(map(tuple, tokens_of(train)))) > 40


def test_blend_of_many_small_shares_gets_enough_samples() -> None:
    """Rounding every share up makes the blend outgrow what the large corpus was built for."""
    pairs = [word for _ in range(40) for word in ("0.001", "b")]
    train, _, _ = build("0.9", "a", *pairs, counts=(20, 0, 0))
    assert {len(tokens) for tokens in tokens_of(train)} == {8}


@pytest.mark.parametrize("order", ["extendable", "best-fit"])
@pytest.mark.parametrize("words", [("a",), ("0.7", "a", "0.3", "b"), ("a", "b")])
def test_longer_run_in_such_an_order_begins_with_the_shorter(words: tuple[str, ...], order: str) -> None:
    """Whatever the corpora; in Megatron-LM's order a run past its epoch is shuffled anew."""

    def samples(count: int, order: str, shown: int) -> list[list[int]]:
        return tokens_of(build(*words, counts=(count, 0, 0), sample_order=order)[0])[:shown]

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


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    data = DataConfig(data_path=("a",), seq_length=8)
    with pytest.raises(DataError, match=r"a\.bin holds token id 999, but the vocabulary has ids 0\.\.511"):
        build_datasets(data, vocab_size=512, eod=2, seed=1, sample_counts=(1, 0, 0), tokenizer_description=None)


@pytest.mark.parametrize(("num_workers", "rank"), [(0, None), (1, None), (0, 0), (0, 1)])
@pytest.mark.parametrize(("name", "place", "token"), [("tokens", 0, 1000), ("tokens", 6, 1000), ("labels", 15, -7)])
def test_an_id_beyond_the_vocabulary_is_refused_wherever_it_hides(
    num_workers: int, rank: int | None, name: str, place: int, token: int
) -> None:
    """By all context-parallel ranks that share the sample: those whose chunks do not hold it would wait for the others
    in vain. A corpus stored as int16 has negative ids, which would fail somewhere on the device."""
    samples = [{name: array.copy() for name, array in MockDataset(3, 16, 999, 2)[n].items()} for n in range(2)]
    samples[1][name][place] = token
    positions = None if rank is None else ContextSplit(rank, 2).positions(16).numpy()
    microbatches = load(samples, num_workers=num_workers, positions=positions)
    next(microbatches)
    with pytest.raises(DataError, match=rf"^Sample 1 has token id {token}, but the largest id of the tokenizer is 999"):
        next(microbatches)


def read_a_blend(directory: Path, hard: int, pipe: Connection) -> None:
    """Send the length of a sample of 40 corpora, or the refusal, of a process that may open 64 files at first."""
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    prefixes = tuple(f"corpus{number}" for number in range(40))
    try:
        check_indexes(prefixes, None, Share())
        pipe.send(str(len(build(*prefixes, counts=(80, 0, 0))[0][79]["tokens"])))
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
