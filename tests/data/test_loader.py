"""From flags to microbatches: every sample once, in order, whatever the layout; no silent end and no endless wait."""

import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from megatron.core.context_parallel import ContextSplit
from megatron.data import loader as loader_module
from megatron.data.gpt_dataset import BlendedDataset, Dataset, GPTDataset, MockDataset, Sample
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import (
    GRACE,
    POLL,
    LoaderProcesses,
    LoaderStalledError,
    Microbatch,
    Patience,
    Wait,
    cyclic_microbatches,
    microbatch_sample_indices,
    single_pass_microbatches,
)
from megatron.errors import DataError, LoaderError
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


# --- waiting for loader processes -----------------------------------------------------------------------------


class Clock:
    """A monotonic clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_of(clock: Clock, patience: Patience) -> Callable[[float], None]:
    """A wait; called with a number of seconds, so many pass, with a look at every one."""
    wait = Wait(patience, clock)

    def some(seconds: float) -> None:
        for _ in range(int(seconds)):
            clock.now += 1.0
            wait.check(4711)

    return some


def test_a_process_is_given_up_after_the_limit() -> None:
    wait_of(Clock(), Patience())(100_000)  # without a limit it is waited for
    wait = wait_of(Clock(), Patience(5.0))
    wait(4)
    with pytest.raises(
        LoaderStalledError, match=r"process 4711 has delivered no microbatch for 5 s \(--dataloader-timeout 5\)"
    ):
        wait(1)


def test_after_a_request_to_stop_it_has_a_little_more_time() -> None:
    clock = Clock()
    wait = wait_of(clock, Patience(1000.0, lambda: "SIGTERM" if clock.now >= 100 else None))
    wait(100 + GRACE - 1)
    with pytest.raises(LoaderStalledError, match="SIGTERM asked the run to stop, but loader process 4711"):
        wait(1)


class Numbers:
    """Samples that say their index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Sample:
        tokens = np.full(4, index, dtype=np.int64)
        return {"tokens": tokens, "labels": tokens, "loss_mask": np.ones(4, dtype=np.float32)}


def numbers(num_workers: int, patience: Patience, dataset: Any = None) -> Any:
    return load(dataset or Numbers(), micro_batch_size=2, num_workers=num_workers, patience=patience)


def first_samples(batches: Any, count: int = 20) -> list[int]:
    return [int(next(batches)["tokens"][0, 0]) for _ in range(count)]


def loader_pids() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


@pytest.mark.processes
def test_a_stopped_process_is_named_and_nothing_of_the_loader_remains() -> None:
    before = set(loader_pids())
    batches = numbers(2, Patience(2.0))
    next(batches)
    pids = set(loader_pids()) - before
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DataError) as error:
        list(batches)
    named = re.search(r"Loader process (\d+) has delivered", str(error.value))
    assert named and int(named[1]) in pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.processes
def test_a_process_that_comes_back_delivers_what_it_owes() -> None:
    expected = first_samples(numbers(0, Patience()))
    before = set(loader_pids())
    batches = numbers(1, Patience(60.0))
    found = first_samples(batches, 5)
    (pid,) = set(loader_pids()) - before
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(2.5 * POLL, os.kill, (pid, signal.SIGCONT)).start()
    assert found + first_samples(batches, 15) == expected
    batches.close()


class SlowNumbers(Numbers):
    """The first sample takes long to read."""

    def __getitem__(self, index: int) -> Sample:
        time.sleep(2.5 * POLL if index == 0 else 0.0)
        return super().__getitem__(index)


@pytest.mark.processes
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("where", ["_prepare_worker", "_stack"])
def test_a_process_that_never_delivers_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, worker: int
) -> None:
    """Before it reads (a lock that was held at the fork), or when it has read: once, and with the same samples. Also if
    another process has delivered."""
    expected = first_samples(numbers(0, Patience()))
    original = getattr(loader_module, where)

    def hang_once(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords) if where == "_stack" else None
        info = get_worker_info()
        if info is not None and info.id == worker:
            with suppress(FileExistsError):
                (tmp_path / "hung").mkdir()
                time.sleep(3600)
        return original(*arguments, **keywords) if result is None else result

    monkeypatch.setattr(loader_module, where, hang_once)
    before = set(loader_pids())
    batches = numbers(2, Patience(600.0, start_limit=1.0))
    assert first_samples(batches) == expected
    assert caplog.text.count("The loader processes are started again.") == 1
    assert len(set(loader_pids()) - before) == 2
    batches.close()
    assert set(loader_pids()) <= before


@pytest.mark.processes
def test_a_process_that_reads_slowly_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    batches = numbers(1, Patience(start_limit=1.0), SlowNumbers())
    assert first_samples(batches) == first_samples(numbers(0, Patience()))
    assert not caplog.text
    batches.close()


@pytest.mark.processes
def test_a_process_that_never_delivers_is_not_started_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_prepare_worker", lambda worker, starts: time.sleep(3600))
    with pytest.raises(DataError, match=r"has delivered no microbatch for 3 s \(--dataloader-timeout 3\)"):
        next(numbers(1, Patience(3.0, start_limit=1.0)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "is_of_loader"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (EOFError(), True),
        (ConnectionResetError("Caught ConnectionResetError in DataLoader worker process 0."), False),
    ],
)
def test_a_process_that_ends_while_it_delivers_is_named(error: Exception, is_of_loader: bool) -> None:
    """torch fetches the memory of a microbatch through a socket of the process."""

    def broken() -> Iterator[Any]:
        raise error
        yield

    with pytest.raises(LoaderError if is_of_loader else ConnectionResetError):
        next(LoaderProcesses[Any](broken(), Patience()))
