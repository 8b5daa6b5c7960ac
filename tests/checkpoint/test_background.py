"""Saves behind the training's back: the same bytes as others, and writers that die, stall or fail."""

import errno
import logging
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess, CopyTask, CudaHostMemory, SharedMemory
from megatron.checkpoint.boxes import Divisions
from megatron.checkpoint.checkpointing import file_of_rank, load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import MANIFEST, iteration_directory
from megatron.checkpoint.files import WrittenFile
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.manifest import Manifest, SavedTensor, read_manifest
from megatron.checkpoint.safetensors_file import SafetensorsImage
from megatron.core.activations import CudaCopyStream, TensorPair
from tests.checkpoint.directories import acquire
from tests.end_to_end.run_process import bytes_under, wait_until
from tests.forked import fork_context

pytestmark = pytest.mark.processes

TIMEOUT = 60.0


def tensors(scale: int = 1) -> dict[str, Tensor]:
    """Of several widths and shapes, one of them a view that is not contiguous, one empty."""
    numbers = torch.arange(scale * 240, dtype=torch.float64)
    return {
        "bytes": numbers.to(torch.uint8)[:13],
        "halves": numbers.to(torch.bfloat16).view(-1, 6).T,
        "wide": numbers.view(2, -1),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def process() -> Iterator[BackgroundProcess]:
    """A rank's background process."""
    process = BackgroundProcess(TIMEOUT)
    yield process
    process.close()


def save(root: Path, iteration: int, process: BackgroundProcess, content: dict[str, Tensor]) -> AsyncSaveBackend:
    saving = AsyncSaveBackend(root, iteration, process, read_back=True)
    save_checkpoint(root, iteration, content, {"iteration": iteration}, saving=saving)
    return saving


def finish(saving: AsyncSaveBackend) -> str | None:
    return saving.finish_own() or saving.finish()


def save_and_compare(root: Path, iteration: int, process: BackgroundProcess, content: dict[str, Tensor]) -> None:
    """Save ``content`` under ``root``, in the background and directly: the files are the same."""
    assert finish(save(root / "background", iteration, process, content)) is None
    save_checkpoint(root / "direct", iteration, content, {"iteration": iteration})
    ours, theirs = (bytes_under(iteration_directory(root / name, iteration)) for name in ("background", "direct"))
    assert ours == theirs and len(ours) == 2


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_the_files_are_those_of_a_direct_save(tmp_path: Path, process: BackgroundProcess) -> None:
    # The second is larger than the memory of the first, the third smaller.
    for iteration, scale in ((1, 1), (2, 50), (3, 2)):
        save_and_compare(tmp_path, iteration, process, tensors(scale))
    assert left_in(tmp_path / "background") == []
    assert (tmp_path / "background" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, process: BackgroundProcess) -> None:
    value = torch.ones(1_000_000)
    saving = save(tmp_path, 1, process, {"x": value})
    value.zero_()
    assert finish(saving) is None
    load_checkpoint(tmp_path, 1, {"x": value})
    assert (value == 1).all()


ENDLESS_COPY = {"kind": "copy", "source": "/proc", "name": "none", "target": "/proc"}
"""A job that waits for a file that never comes."""


def copy_of_nothing(root: Path) -> dict[str, str]:
    """A job that is done at once."""
    (root / "empty").mkdir()
    (root / "empty" / MANIFEST).touch()
    return {"kind": "copy", "source": str(root / "empty"), "name": "none", "target": str(root)}


def state_of(pid: int) -> str:
    """The letter of a process's state; Z, a zombie's, if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def stop(process: BackgroundProcess) -> int:
    """Stop the process in the middle of a job; its number."""
    process.submit(ENDLESS_COPY)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", TIMEOUT)
    return pid


@pytest.mark.parametrize(
    ("end", "message"),
    [(lambda pid: os.kill(pid, signal.SIGKILL), "has died"), (lambda _: None, r"no progress for 60 s \(--async-save")],
    ids=["killed", "stopped"],
)
def test_a_writer_that_dies_or_stalls_is_reported_and_the_next_save_works(
    tmp_path: Path, end: Callable[[int], None], message: str
) -> None:
    save_checkpoint(tmp_path, 1, tensors(), {})
    process = BackgroundProcess(TIMEOUT)
    pid = stop(process)
    process.unfinished = []
    saving = save(tmp_path, 2, process, tensors())
    assert saving.poll() is None and not saving.is_over
    end(pid)
    process.timeout = 1.0 if "progress" in message else TIMEOUT
    started = time.monotonic()
    failure = finish(saving)
    assert failure is not None and re.search(message, failure), failure
    assert time.monotonic() - started < TIMEOUT / 2
    assert state_of(pid) == "Z"
    saving.abandon()
    assert list_checkpoints(tmp_path) == [1] and left_in(tmp_path) == []
    process.timeout = TIMEOUT  # the next process may take a second to start
    assert finish(save(tmp_path, 3, process, tensors())) is None
    assert list_checkpoints(tmp_path) == [1, 3]
    process.close()


def kill_idle(process: BackgroundProcess) -> None:
    """Kill a process that has no job."""
    process.poll()
    assert not process.unfinished and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    # A zombie may still have threads that are ending.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_an_idle_writer_that_has_died_is_replaced_before_the_next_save(
    tmp_path: Path, process: BackgroundProcess
) -> None:
    for iteration in (1, 2):
        assert finish(save(tmp_path, iteration, process, tensors())) is None
        kill_idle(process)
    copying = copy(iteration_directory(tmp_path, 1), tmp_path / "second", process)
    assert copying.finish_own() is None and copying.finish() is None
    assert list_checkpoints(tmp_path) == [1, 2] and list_checkpoints(tmp_path / "second") == [1]


def test_a_writer_that_dies_while_it_gets_its_job_fails_that_save_alone(
    tmp_path: Path, process: BackgroundProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finish(save(tmp_path, 1, process, tensors())) is None
    kill_idle(process)
    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda self: None)  # as if it died right after this
        saving = save(tmp_path, 2, process, tensors())
        assert saving.poll() == "The background writer has died"
    # Its commit was dropped, too.
    assert finish(saving) == "The background writer has died" and saving.is_over
    assert time.monotonic() - started < TIMEOUT / 2
    saving.abandon()
    assert left_in(tmp_path) == []
    assert finish(save(tmp_path, 3, process, tensors())) is None
    assert list_checkpoints(tmp_path) == [1, 3]


def test_a_writer_that_cannot_be_started_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = BackgroundProcess(TIMEOUT)

    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        saving = save(tmp_path, 1, process, tensors())
        failure = finish(saving)
    assert failure is not None and "cannot be started" in failure and "Cannot allocate memory" in failure
    saving.abandon()
    assert finish(save(tmp_path, 2, process, tensors())) is None
    process.close()


def stop_the_writer_of_a_rank(root: Path, pipe: Connection) -> None:
    process = BackgroundProcess(TIMEOUT)
    # It has started, and is in the middle of the next job.
    assert process.wait(process.submit(copy_of_nothing(root))) is None
    pipe.send(stop(process))
    time.sleep(600)


def test_a_writer_dies_with_its_rank_even_while_it_is_stopped(tmp_path: Path) -> None:
    ours, theirs = fork_context().Pipe()
    rank = fork_context().Process(target=stop_the_writer_of_a_rank, args=(tmp_path, theirs))
    rank.start()
    pid = ours.recv()
    assert state_of(pid) == "T"
    rank.kill()
    rank.join()
    wait_until(lambda: state_of(pid) == "Z", TIMEOUT)


# --- two ranks, played by one process ----------------------------------------------------------------------


class Ranks:
    """Two ranks that save one tensor each, without collectives."""

    def __init__(self, root: Path) -> None:
        self.lock = acquire(root)
        self.processes = [BackgroundProcess(TIMEOUT) for _ in range(2)]
        self.savings = [AsyncSaveBackend(root, 1, process, self.lock.token) for process in self.processes]
        self.directory = self.savings[0].begin()

    def write(self, rank: int) -> WrittenFile:
        return self.savings[rank].write(self.directory / file_of_rank(rank), {self.key(rank): torch.full((4,), rank)})

    @staticmethod
    def key(rank: int) -> str:
        return f"of_{rank}@0"

    def commit(self) -> None:
        zero, four = np.array([[0]]), np.array([[4]])
        described = {
            f"of_{rank}": SavedTensor(torch.int64, (4,), zero, four, np.array([rank]), Divisions.none(1))
            for rank in range(2)
        }
        files = [WrittenFile(file_of_rank(rank), 0, ()) for rank in range(2)]
        self.savings[0].commit(self.directory, Manifest(described, files, {}))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Their directory is ``tmp_path``."""
    ranks = Ranks(tmp_path)
    yield ranks
    for process in ranks.processes:
        process.close()
    ranks.lock.release()


@pytest.mark.parametrize("is_written", [True, False])
def test_the_commit_waits_for_the_file_of_every_rank(tmp_path: Path, ranks: Ranks, is_written: bool) -> None:
    """What another rank never writes is given up without a trace."""
    ranks.write(0)
    ranks.commit()
    assert ranks.savings[0].finish_own() is None
    ranks.processes[0].timeout = 0.5
    time.sleep(1.0)
    # Longer than the limit: but it is the other rank that makes no progress.
    assert ranks.savings[0].poll() is None and not ranks.savings[0].is_over
    assert list_checkpoints(tmp_path) == []
    ranks.processes[0].timeout = TIMEOUT
    if not is_written:
        ranks.savings[0].abandon()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        return
    ranks.write(1)
    assert ranks.savings[1].finish_own() is None
    assert ranks.savings[0].finish() is None
    verify_share(tmp_path, 1, 0, 1)
    loaded = torch.zeros(4, dtype=torch.int64)
    load_checkpoint(tmp_path, 1, {"of_1": loaded})
    assert (loaded == 1).all()


def test_an_error_of_the_file_system_is_told_with_the_file(tmp_path: Path, ranks: Ranks) -> None:
    """A commit after the failed write is dropped, and the next save works."""
    saving, file = ranks.savings[0], ranks.directory / file_of_rank(0)
    file.mkdir()
    ranks.write(0)
    wait_until(lambda: saving.poll() is not None, TIMEOUT)
    started = time.monotonic()
    ranks.commit()
    failure = saving.finish_own()
    assert failure is not None and f"Cannot write {file} (File exists)" in failure
    assert saving.finish() == failure == saving.poll() and saving.is_over
    assert time.monotonic() - started < TIMEOUT / 2
    saving.abandon()
    assert left_in(tmp_path) == [LOCK]
    assert finish(save(tmp_path, 2, ranks.processes[0], tensors())) is None


def test_the_process_that_commits_reads_the_lock_again_before_it_renames(tmp_path: Path, ranks: Ranks) -> None:
    ranks.write(0)
    ranks.commit()
    ranks.lock.release()
    ranks.lock = acquire(tmp_path)
    ranks.write(1)
    assert ranks.savings[1].finish_own() is None
    failure = ranks.savings[0].finish()
    assert failure is not None and f"taken over by process {os.getpid()}" in failure
    assert list_checkpoints(tmp_path) == []


# --- copies ------------------------------------------------------------------------------------------------


def copy(source: Path, target: Path, process: BackgroundProcess) -> CopyTask:
    copying = CopyTask(target, 1, process)
    copying.start(source, file_of_rank(0), copying.begin())
    return copying


def test_a_copy_waits_for_its_original_and_is_the_same(tmp_path: Path, process: BackgroundProcess) -> None:
    source, target = tmp_path / "first", tmp_path / "second"
    copying = copy(iteration_directory(source, 1), target, process)
    time.sleep(0.3)
    assert not copying.is_over
    save_checkpoint(source, 1, tensors(), {"a": 1})
    assert copying.finish_own() is None and copying.finish() is None
    assert bytes_under(iteration_directory(source, 1)) == bytes_under(iteration_directory(target, 1))
    assert left_in(target) == []


def test_what_has_changed_since_it_was_written_is_not_copied(tmp_path: Path, process: BackgroundProcess) -> None:
    save_checkpoint(tmp_path / "first", 1, tensors(), {})
    source = iteration_directory(tmp_path / "first", 1)
    content = bytearray((source / file_of_rank(0)).read_bytes())
    content[-3] ^= 1
    (source / file_of_rank(0)).write_bytes(content)
    copying = copy(source, tmp_path / "second", process)
    assert copying.finish_own() is None
    failure = copying.finish()
    assert failure is not None and "rank_00000.safetensors was modified after it was written" in failure
    copying.abandon()
    assert list((tmp_path / "second").iterdir()) == []
    assert read_manifest(source).files()


def test_a_job_for_a_stopped_writer_waits_for_the_timeout_and_not_for_ever(tmp_path: Path) -> None:
    """The manifest of a large checkpoint is larger than a pipe."""
    process = BackgroundProcess(timeout=1.0)
    try:
        stop(process)
        submitting = threading.Thread(target=process.submit, args=({"kind": "commit", "content": "x" * (1 << 20)},))
        submitting.daemon = True
        submitting.start()
        submitting.join(30)
        assert not submitting.is_alive()
        assert process.failure is not None and "--async-save-timeout" in process.failure
    finally:
        process.close()


def test_a_rank_with_many_open_files_can_wait_for_its_writer(tmp_path: Path, process: BackgroundProcess) -> None:
    """A blend of hundreds of corpora opens thousands, so the pipes have descriptors above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert finish(save(tmp_path, 1, process, tensors())) is None
        assert list_checkpoints(tmp_path) == [1]
    finally:
        for descriptor in others:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_job_that_is_larger_than_a_pipe_arrives(tmp_path: Path, process: BackgroundProcess) -> None:
    assert process.wait(process.submit({**copy_of_nothing(tmp_path), "ignored": "x" * (1 << 20)})) is None


# --- copies from a GPU -------------------------------------------------------------------------------------

# A log stands in for the GPU; tests/gpu/test_staging_copies.py needs one.


GPU = torch.device("cuda", 0)


class Gpu(CudaHostMemory):
    """Host memory and a stream that write what they do into a log."""

    def __init__(self, log: list[str], error: str | None = None) -> None:
        self._log, self._error = log, error
        self._registered: dict[int, int] = {}

    def register(self, address: int, size: int, device: torch.device) -> str | None:
        self._log.append("register" if self._error is None else "refuse")
        if self._error is None:
            self._registered[address] = size
        return self._error

    def unregister(self, address: int) -> None:
        del self._registered[address]
        self._log.append("unregister")

    def open_stream(self, device: torch.device) -> CudaCopyStream:
        self._log.append("open stream")
        return cast(CudaCopyStream, self)

    def copy(self, pairs: Sequence[TensorPair]) -> "Gpu":
        """As :meth:`CudaCopyStream.copy`: complete when its event is, the GPU itself."""
        self._log.append("copy")
        self._pairs = pairs
        for target, _ in pairs:
            starts = [start for start, size in self._registered.items() if 0 <= target.data_ptr() - start <= size]
            assert self._error or starts or target.numel() == 0
        return self

    def synchronize(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self._log.append("wait")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log, in which the writer's jobs appear as well; the tensors count as those of a GPU."""
    log: list[str] = []
    submit = BackgroundProcess.submit

    def logged(process: BackgroundProcess, job: Mapping[str, Any]) -> int:
        log.append(job["kind"])
        return submit(process, job)

    monkeypatch.setattr(BackgroundProcess, "submit", logged)
    monkeypatch.setattr(SafetensorsImage, "device", GPU)
    return log


def test_the_writer_starts_when_all_copies_to_registered_memory_are_complete(tmp_path: Path, log: list[str]) -> None:
    gpu = Gpu(log)
    process = BackgroundProcess(60.0, SharedMemory(gpu, gpu.open_stream))
    save_and_compare(tmp_path, 1, process, tensors(2))
    assert log == ["register", "open stream", "copy", "wait", "write", "commit"]
    log.clear()
    save_and_compare(tmp_path, 2, process, tensors(1))  # in the memory of the first
    assert log == ["copy", "wait", "write", "commit"]
    log.clear()
    save_and_compare(tmp_path, 3, process, tensors(50))  # too large for it
    assert log == ["unregister", "register", "copy", "wait", "write", "commit"]
    log.clear()
    process.close()
    assert log == ["unregister"]


def test_memory_that_cannot_be_registered_is_pageable_and_warned_of_once(
    tmp_path: Path, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(log, error="error 2")
    process = BackgroundProcess(60.0, SharedMemory(gpu, gpu.open_stream))
    with caplog.at_level(logging.WARNING):
        for iteration, scale in enumerate((2, 1, 50), 1):
            save_and_compare(tmp_path, iteration, process, tensors(scale))
    process.close()
    assert log.count("refuse") == 2  # once for each mapping
    assert "unregister" not in log and log.count("wait") == 3
    (warning,) = caplog.messages
    assert warning.startswith("--async-save copies to pageable memory") and "(error 2)" in warning


class Runtime:
    """CUDA's registration, which returns ``error``."""

    def __init__(self, error: int) -> None:
        self._error = error
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.mark.parametrize(("error", "found"), [(0, None), (712, "error 712")])
def test_an_error_of_cuda_does_not_reach_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, error: int, found: str | None
) -> None:
    """CUDA keeps it for the check after the next kernel, which would fail."""
    runtime, kernels = Runtime(error), []

    def launch(*size: int, device: torch.device) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    memory = CudaHostMemory()
    assert memory.register(4096, 100, GPU) == found
    memory.unregister(4096)
    assert kernels == ([] if error == 0 else [GPU])
    assert runtime.calls == [("register", 4096), ("unregister", 4096)]
