"""From flags to microbatches: every sample once, in order, whatever the layout, and no silent end."""

import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.context_parallel import ContextSplit
from megatron.data.gpt_dataset import BlendedDataset, Dataset, GPTDataset, MockDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import Microbatch, cyclic_microbatches, microbatch_sample_indices, single_pass_microbatches
from megatron.errors import DataError
from tests.data.corpora import build, load, settings_of, tokens_of

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


# --- the part of a context-parallel rank ---------------------------------------------------------------------

LENGTH = 16


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
def test_each_rank_reads_its_chunks_of_every_sample_and_where_all_documents_begin(size: int, kind: str) -> None:
    (dataset, _, _) = build("a", counts=(40, 0, 0), seq_length=LENGTH, eod_mask_loss=True, reset_attention_mask=True)
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


def test_a_rank_reads_its_chunks_alone_where_documents_do_not_matter() -> None:
    (dataset, _, _) = build("a", counts=(40, 0, 0), seq_length=LENGTH)
    found, wanted = next(loader(dataset, 1, 2, num_workers=2)), next(loader(dataset, None))
    assert set(found) == {"tokens", "labels", "loss_mask"}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor[:, chunks_from_either_side(1, 2)])
