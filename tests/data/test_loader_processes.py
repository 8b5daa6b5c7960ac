"""A loader process that delivers nothing is waited for as long as is allowed, and no longer."""

import multiprocessing
import os
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
from torch.utils.data import get_worker_info

from megatron.data import loader as loader_module
from megatron.data.gpt_dataset import Sample
from megatron.data.loader import GRACE, POLL, LoaderProcesses, LoaderStalledError, Patience, Wait
from megatron.errors import DataError, LoaderError
from tests.data.corpora import load

pytestmark = pytest.mark.processes


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


# --- real processes -------------------------------------------------------------------------------------------


class Numbers:
    """Samples that say their index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Sample:
        tokens = np.full(4, index, dtype=np.int64)
        return {"tokens": tokens, "labels": tokens, "loss_mask": np.ones(4, dtype=np.float32)}


def loader(num_workers: int, patience: Patience, dataset: Any = None) -> Any:
    return load(dataset or Numbers(), micro_batch_size=2, num_workers=num_workers, patience=patience)


def first_samples(batches: Any, count: int = 20) -> list[int]:
    return [int(next(batches)["tokens"][0, 0]) for _ in range(count)]


def loader_pids() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def test_a_stopped_process_is_named_and_nothing_of_the_loader_remains() -> None:
    before = set(loader_pids())
    batches = loader(2, Patience(2.0))
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


def test_a_process_that_comes_back_delivers_what_it_owes() -> None:
    expected = first_samples(loader(0, Patience()))
    before = set(loader_pids())
    batches = loader(1, Patience(60.0))
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


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("where", ["_prepare_worker", "_stack"])
def test_a_process_that_never_delivers_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, worker: int
) -> None:
    """Before it reads (a lock that was held at the fork), or when it has read: once, and with the same samples. Also if
    another process has delivered."""
    expected = first_samples(loader(0, Patience()))
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
    batches = loader(2, Patience(600.0, start_limit=1.0))
    assert first_samples(batches) == expected
    assert caplog.text.count("The loader processes are started again.") == 1
    assert len(set(loader_pids()) - before) == 2
    batches.close()
    assert set(loader_pids()) <= before


def test_a_process_that_reads_slowly_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    batches = loader(1, Patience(start_limit=1.0), SlowNumbers())
    assert first_samples(batches) == first_samples(loader(0, Patience()))
    assert not caplog.text
    batches.close()


def test_a_process_that_never_delivers_is_not_started_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_prepare_worker", lambda worker, starts: time.sleep(3600))
    with pytest.raises(DataError, match=r"has delivered no microbatch for 3 s \(--dataloader-timeout 3\)"):
        next(loader(1, Patience(3.0, start_limit=1.0)))


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
