"""From flags to microbatches: every sample once, in order, whatever the layout; no silent end and no endless wait."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.context_parallel import ContextSplit
from megatron.data.gpt_dataset import Dataset, MockDataset, Sample
from megatron.data.loader import (
    AHEAD,
    GRACE,
    POLL,
    Microbatch,
    Patience,
    Wait,
    cyclic_microbatches,
    single_pass_microbatches,
)
from megatron.errors import DataError, LoaderError, cause_of
from tests.data.corpora import build, load, write_corpus
from tests.end_to_end.run_process import REPOSITORY, run_python, wait_until
from tests.forked import fork_context

pytestmark = pytest.mark.usefixtures("corpora")


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
        whole = take(cyclic_microbatches(23, 0, 2, rank, 2), 20)
        assert take(cyclic_microbatches(23, done * 4, 2, rank, 2), 5) == whole[done : done + 5]


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


def test_each_rank_reads_the_future_tokens_of_its_chunks() -> None:
    """They lie in chunks of other ranks, too; none are after the sample, after a mask, or in another document."""
    tokens = np.arange(10, 18)
    sample: Sample = {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.ones(8, dtype=np.float32)}
    sample["loss_mask"][6] = 0.0
    sample["document_starts"] = np.isin(np.arange(8), (0, 3))
    found: dict[int, tuple[list[int], list[int]]] = {}
    for rank in range(2):
        positions = ContextSplit(rank, 2).positions(8).numpy()
        microbatch = next(load([sample], positions=positions, num_future=2))
        labels, mask = microbatch["future_labels"][0], microbatch["future_mask"][0]  # [2, 4]
        found |= {int(at): (labels[:, one].tolist(), mask[:, one].tolist()) for one, at in enumerate(positions)}
    assert [found[at][0] for at in range(8)] == [
        [12, 13],
        [13, 14],
        [14, 15],
        [15, 16],
        [16, 17],
        [17, 18],
        [18, 0],
        [0, 0],
    ]
    assert [found[at][1] for at in range(8)] == [[1, 1], [1, 0], [0, 0], [1, 1], [1, 0], [0, 1], [1, 0], [0, 0]]


def test_a_rank_reads_its_chunks_alone_where_documents_do_not_matter() -> None:
    (dataset, _, _) = build("a", counts=(40, 0, 0), seq_length=LENGTH)
    found, wanted = next(loader(dataset, 1, 2, num_workers=2)), next(loader(dataset, None))
    assert set(found) == {"tokens", "labels", "loss_mask"}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor[:, chunks_from_either_side(1, 2)])


# --- reading ahead -------------------------------------------------------------------------------------------


class Numbers:
    """Samples that say their index; before it reads one, it calls ``act`` with the index."""

    def __init__(self, act: Callable[[int], object] = lambda index: None, size: int = 1000) -> None:
        self._act, self._size = act, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        self._act(index)
        tokens = np.full(4, index, dtype=np.int64)
        return {"tokens": tokens, "labels": tokens, "loss_mask": np.ones(4, dtype=np.float32)}


def numbers_of(microbatches: Any) -> list[list[int]]:
    return [microbatch["tokens"][:, 0].tolist() for microbatch in microbatches]


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader ")}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_order_does_not_depend_on_the_number_of_threads(data: st.DataObject) -> None:
    """Some reads take longer than others."""
    size, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    place = {
        "consumed_samples": size * ranks * data.draw(st.integers(0, 4)),
        "micro_batch_size": size,
        "data_parallel_rank": data.draw(st.integers(0, ranks - 1)),
        "data_parallel_size": ranks,
        "dataloader_type": data.draw(st.sampled_from(["single", "cyclic"])),
    }
    slow = data.draw(st.sets(st.integers(0, 59), max_size=4))
    dataset = Numbers(lambda index: time.sleep(0.003 * (index in slow)), size=60)
    streams = [load(dataset, **place, num_workers=num_workers) for num_workers in (0, data.draw(st.integers(1, 6)))]
    alone, ahead = (numbers_of(islice(stream, 6)) for stream in streams)
    assert ahead == alone and len(alone) == 6


def test_threads_read_at_the_same_time_and_a_bounded_number_of_microbatches_ahead() -> None:
    together = threading.Barrier(3)
    started: list[int] = []

    def meet(index: int) -> None:
        started.append(index)
        if index < 3:
            together.wait(60)  # breaks if two threads do not come

    microbatches = load(Numbers(meet), num_workers=3)
    assert not started and not loader_threads()
    for number in range(20):
        assert numbers_of([next(microbatches)]) == [[number]]
        assert max(started) < number + 3 * AHEAD
    assert len(loader_threads()) == 3
    wait_until(lambda: len(started) == 19 + 3 * AHEAD, 60)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_loader_that_is_closed_or_dropped_leaves_no_thread_and_reads_no_more(is_closed: bool) -> None:
    read: list[int] = []
    microbatches = load(Numbers(read.append), num_workers=2)
    next(microbatches)
    if is_closed:
        microbatches.close()  # type: ignore[attr-defined]
    del microbatches
    wait_until(lambda: not loader_threads(), 60)
    assert len(read) <= 2 * AHEAD


def fail_with(error: Exception, at: int) -> Callable[[int], None]:
    def act(index: int) -> None:
        if index == at:
            raise error

    return act


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("error", "raised", "sentence", "cause"),
    [
        (RuntimeError("shapes differ"), RuntimeError, "^shapes differ$", "exception"),
        (TimeoutError("the store"), LoaderError, r"^The data cannot be read \(the store\): check the stor", "data"),
        (OSError(errno.EIO, "I/O"), LoaderError, r"^The data cannot be read \(.* I/O\): check the storage", "disk"),
        (DataError("a.bin was truncated"), DataError, "^a.bin was truncated$", "data"),
    ],
)
def test_an_error_of_a_read_comes_in_its_place(
    num_workers: int, error: Exception, raised: type[Exception], sentence: str, cause: str
) -> None:
    """After all microbatches before it, and with the mistake of ours in its traceback."""
    microbatches = load(Numbers(fail_with(error, at=7)), num_workers=num_workers)
    assert numbers_of(islice(microbatches, 7)) == [[number] for number in range(7)]
    with pytest.raises(raised, match=sentence) as caught:
        next(microbatches)
    assert cause_of(caught.value) == cause
    assert caught.traceback[-1].name == "act" or isinstance(caught.value.__cause__, OSError)
    assert not loader_threads()


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
            wait.check()

    return some


def test_a_read_is_given_up_after_the_limit() -> None:
    wait_of(Clock(), Patience())(100_000)  # without a limit it is waited for
    wait = wait_of(Clock(), Patience(5.0))
    wait(4)
    with pytest.raises(LoaderError, match=r"has delivered no microbatch for 5 s \(--dataloader-timeout 5\)"):
        wait(1)


def test_after_a_request_to_stop_it_has_a_little_more_time() -> None:
    clock = Clock()
    wait = wait_of(clock, Patience(1000.0, lambda: "SIGTERM" if clock.now >= 100 else None))
    wait(100 + GRACE - 1)
    with pytest.raises(LoaderError, match="SIGTERM asked the run to stop, but the loader has delivered"):
        wait(1)


def test_a_read_that_comes_late_is_delivered_in_its_place() -> None:
    late = threading.Event()
    microbatches = load(Numbers(lambda index: late.wait() if index == 3 else None), num_workers=2)
    threading.Timer(1.5 * POLL, late.set).start()
    assert numbers_of(islice(microbatches, 8)) == [[number] for number in range(8)]


STALLED = """
import os, sys
from megatron.data.gpt_dataset import MockDataset
from megatron.data.loader import Patience
from megatron.errors import LoaderError
from tests.data.corpora import load


class Silent(MockDataset):
    def __getitem__(self, index):
        return os.read(fifo, 1)


os.mkfifo("fifo")
fifo = os.open("fifo", os.O_RDWR)
microbatches = load(Silent(0, 8, 1000, 9), num_workers=2, patience=Patience(1.0))
try:
    next(microbatches)
except LoaderError as error:
    print(error)
sys.exit(7)
"""


@pytest.mark.processes
def test_a_process_ends_although_threads_hang_in_a_read(tmp_path: Path) -> None:
    """They read a file that never answers; the interpreter does not wait for them."""
    done = run_python("-c", STALLED, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert (done.returncode, done.stderr) == (7, "")
    assert re.match(r"The loader has delivered no microbatch for \d+ s \(--dataloader-timeout 1\)", done.stdout)


# --- pages that do not come ----------------------------------------------------------------------------------


class StalledMemory:
    """A copy of ``content`` whose pages do not come until :meth:`deliver`, like those of a mapped file on storage that
    does not answer (Linux's userfaultfd)."""

    def __init__(self, content: npt.NDArray[Any]) -> None:
        size = -(-content.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        source, pages = (np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8) for _ in range(2))
        source = source.copy()
        source[: content.nbytes] = np.frombuffer(content.tobytes(), np.uint8)
        self.array = pages[: content.nbytes].view(content.dtype).reshape(content.shape)
        self._source, self._pages, self._descriptor = source, pages, open_userfaultfd()
        fcntl.ioctl(self._descriptor, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
        fcntl.ioctl(self._descriptor, 0xC020AA00, struct.pack("QQQQ", pages.ctypes.data, size, 1, 0))  # UFFDIO_REGISTER

    def deliver(self) -> None:
        places = self._pages.ctypes.data, self._source.ctypes.data, len(self._pages)
        fcntl.ioctl(self._descriptor, 0xC028AA03, struct.pack("QQQQq", *places, 0, 0))  # UFFDIO_COPY
        os.close(self._descriptor)


def open_userfaultfd() -> int:
    """A descriptor for faults of user code; negative if the system does not allow it."""
    number = {"x86_64": 323, "aarch64": 282}.get(platform.machine(), -1)
    return int(ctypes.CDLL(None).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | 1))


def read_stalled_arrays(prefix: str, cache: str, sample_order: str) -> None:
    """Read a sample again and again, each time with another array stalled; the other threads run meanwhile."""
    flags = {"seq_length": 1500, "sample_order": sample_order, "data_cache_path": cache}
    (dataset, _, _) = build(prefix, counts=(20, 0, 0), eod=59_999, **flags)
    expected = dataset[5]["tokens"].tolist()
    orders = [array for name, array in dataset.order._asdict().items() if name != "statistics"]
    arrays = [(order, "_array") for order in orders]
    arrays += [(dataset.corpus, name) for name in ("sequence_lengths", "byte_offsets", "_tokens")]
    for owner, name in arrays:
        memory = StalledMemory(getattr(owner, name))
        setattr(owner, name, memory.array)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(dataset[5]["tokens"].tolist()), daemon=True)  # noqa: B023
        thread.start()
        thread.join(0.2)  # returns only if the thread has released the interpreter's lock
        assert not found, f"{name} was not read"
        memory.deliver()
        thread.join()
        assert found == [expected]


@pytest.mark.processes
@pytest.mark.skipif(open_userfaultfd() < 0, reason="needs userfaultfd")
@pytest.mark.parametrize("sample_order", ["megatron", "best-fit"])
def test_a_page_that_does_not_come_stops_only_the_thread_that_reads_it(tmp_path: Path, sample_order: str) -> None:
    """Otherwise no time limit would hold, and every read of slow storage would stop the training."""
    prefix = write_corpus(tmp_path / "corpus", 1, 60_000)
    arguments = (prefix, str(tmp_path / "cache"), sample_order)
    process = fork_context().Process(target=read_stalled_arrays, args=arguments)
    process.start()
    process.join(240)
    process.kill()
    assert process.exitcode == 0
