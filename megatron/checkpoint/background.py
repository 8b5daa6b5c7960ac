"""Asynchronous saves: a background process of each rank writes files while training continues.

A save needs no collectives beside those of training: the coordinator's process waits for files of the others.
"""

import json
import logging
import mmap
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import megatron
from megatron.checkpoint.background_main import OUTCOMES
from megatron.checkpoint.directory import new_saving_directory, remove_checkpoint
from megatron.checkpoint.files import WrittenFile, explained
from megatron.checkpoint.manifest import Manifest, encode_content
from megatron.checkpoint.safetensors_file import SafetensorsImage
from megatron.core.activations import CudaCopyStream, PlainCopies

_logger = logging.getLogger(__name__)

# A save of two ranks. Each rank writes jobs to the stdin of its process and reads reports from its stdout, one JSON
# object a line; the processes of different ranks share only the directory of the save, .iter_0000100.saving-1f6c0a9e:
#
#   rank 0      copy to shared memory ─ jobs "write", "commit" ─ trains ─ … ────────────────────────── report "done"
#   process 0        rank_00000.safetensors ─> .written/rank_00000.safetensors ─> all there? ─ manifest ─ rename
#   process 1        rank_00001.safetensors ─> .written/rank_00001.safetensors ───┘
#   rank 1      copy to shared memory ─ job "write" ─ trains ─ … ─ report "done"
#
# A file in .written has the size and the digests of the other, and is renamed into place after that is on stable
# storage. Reports {"progress": …} show that a process is alive; {"failed": number, "error": …} drops its later jobs.


# --- shared memory -------------------------------------------------------------------------------------------


class CudaHostMemory:
    def register(self, address: int, size: int, device: torch.device) -> str | None:
        """Register a mapping; the error, if CUDA refuses."""
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, size, 0)
        if int(error) == 0:
            return None
        # CUDA keeps the error, and torch would report it after the next kernel. This kernel's check removes it.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        return f"error {int(error)}"

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class SharedMemory:
    """Anonymous memory that another process can map, and an image that is copied into it; grows on demand, is reused.

    Tensors of a GPU are copied on a stream of their own, into memory that the first of them registers with CUDA.
    """

    def __init__(
        self,
        host_memory: CudaHostMemory | None = None,
        open_stream: Callable[[torch.device], CudaCopyStream] = CudaCopyStream,
    ) -> None:
        self._host_memory = host_memory or CudaHostMemory()
        self._open_stream = open_stream
        self._stream: CudaCopyStream | None = None
        self._address: int | None = None
        """Address of the mapping that CUDA has registered, or refused to register."""
        self._is_registered = False
        self._has_warned = False
        self._map: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def fill(self, image: SafetensorsImage) -> mmap.mmap:
        """Copy ``image`` when the computation so far is complete; returns the memory that begins with it."""
        memory, device = self._reserve(image.size), image.device
        pairs = image.lay_out(memory)
        if device.type == "cpu":
            PlainCopies().copy(pairs)
            return memory
        if self._address is None:
            self._register(memory, device)
        self._stream = self._stream or self._open_stream(device)
        self._stream.copy(pairs).synchronize()
        return memory

    def _reserve(self, size: int) -> mmap.mmap:
        """Grow to at least ``size`` bytes."""
        if self._map is None or len(self._map) < size:
            self._unregister()
            os.ftruncate(self.descriptor, size)
            if hasattr(os, "posix_fallocate"):
                # Twice as fast as page by page, and missing memory raises an error instead of SIGBUS.
                os.posix_fallocate(self.descriptor, 0, size)
            self._map = mmap.mmap(self.descriptor, size)
        return self._map

    def _register(self, memory: mmap.mmap, device: torch.device) -> None:
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        error = self._host_memory.register(self._address, len(memory), device)
        self._is_registered = error is None
        if error is not None and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "--async-save copies to pageable memory, which makes saves pause training for longer: CUDA cannot "
                "register %.1f GB of host memory (%s). Raise the limit of locked memory (ulimit -l), or the memory of "
                "the container.",
                len(memory) / 1e9,
                error,
            )

    def _unregister(self) -> None:
        """Before the mapping is freed: another may get its address."""
        if self._is_registered:
            assert self._address is not None
            self._host_memory.unregister(self._address)
        self._address, self._is_registered = None, False

    def close(self) -> None:
        """Free the memory once no process maps it."""
        self._unregister()
        self._map = None
        os.close(self.descriptor)


# --- the process --------------------------------------------------------------------------------------------


class BackgroundProcess:
    """A process that runs jobs in order.

    ``failure`` describes the first failed job, or the failed process: it is killed after ``timeout`` seconds without
    progress. After a failure all jobs are dropped until :meth:`begin`. A process that has died without a job is
    replaced before the next one.
    """

    def __init__(self, timeout: float, memory: SharedMemory | None = None) -> None:
        self.timeout = timeout
        self._stalled = f"The background writer has made no progress for {timeout:.0f} s (--async-save-timeout)"
        self._memory = memory or SharedMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_number = 0
        self.unfinished: list[int] = []
        """Numbers of the submitted jobs, as of the last :meth:`poll`."""
        self._unread = b""
        self._progress_at = 0.0
        self.failure: str | None = None
        self._notes: list[str] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Accept jobs again after a failure; no job may be unfinished."""
        assert not self.unfinished
        self.failure = None

    def submit(self, job: Mapping[str, Any]) -> int:
        """Send a job to the process, started if necessary; returns its number. An error is a :attr:`failure`."""
        self._last_number += 1
        if self.failure is not None:
            return self._last_number
        if self._process is not None and not self.unfinished and self._process.poll() is not None:
            self.cancel()
        try:
            if self._process is None:
                self._process = self._start()
            self.unfinished.append(self._last_number)
            self._progress_at = time.monotonic()
            self._write(f"{json.dumps({**job, 'number': self._last_number})}\n".encode())
        except BrokenPipeError:
            self._fail("The background writer has died")
        except OSError as error:
            self._fail(f"The background writer cannot be started ({error}): free memory or processes.")
        return self._last_number

    def _write(self, content: bytes) -> None:
        """Write to the process, which may be stopped."""
        # A manifest can be larger than a pipe.
        assert self._process is not None and self._process.stdin is not None
        rest, deadline = memoryview(content), time.monotonic() + self.timeout
        while rest:
            if _is_ready(self._process.stdin, select.POLLOUT):
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
                deadline = time.monotonic() + self.timeout
            elif time.monotonic() > deadline:
                self._fail(self._stalled)
                return

    def take_notes(self) -> list[str]:
        """Reports other than failures since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def fill_memory(self, image: SafetensorsImage) -> None:
        """Copy ``image`` to the shared memory, for the next "write" job; no job may be unfinished."""
        assert not self.unfinished
        self._memory.fill(image)

    def _start(self) -> subprocess.Popen[bytes]:
        package = Path(megatron.__path__[0]).parent
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "megatron.checkpoint.background_main", str(self._memory.descriptor)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.descriptor],
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._unread = b""
        return process

    def poll(self, patient: bool = False) -> None:
        """Read reports; almost free. A ``patient`` caller ignores a stalled process."""
        if not self.unfinished or self._process is None:
            return
        if self._read_reports():
            self._progress_at = time.monotonic()
        elif self._process.poll() is not None:
            self._fail(f"The background writer has died (exit code {self._process.returncode})")
        elif not patient and time.monotonic() - self._progress_at > self.timeout:
            self._fail(self._stalled)

    def _read_reports(self) -> bool:
        """Whether the process reported anything."""
        assert self._process is not None and self._process.stdout is not None
        try:
            content = os.read(self._process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return False
        *lines, self._unread = (self._unread + content).split(b"\n")
        for report in map(json.loads, lines):
            if "done" in report:
                self.unfinished.remove(report["done"])
            elif "note" in report:
                self._notes.append(report["note"])
            elif "failed" in report:
                self._fail(report["error"])
                break
        return bool(content)

    def wait(self, number: int) -> str | None:
        """Wait for a job; returns its failure, if any."""
        self._progress_at = time.monotonic()
        while number in self.unfinished:
            assert self._process is not None and self._process.stdout is not None
            _is_ready(self._process.stdout, select.POLLIN)
            self.poll()
        return self.failure

    def _fail(self, reason: str) -> None:
        self.cancel()
        self.failure = reason

    def cancel(self) -> None:
        """Stop immediately and drop all jobs."""
        self.unfinished = []
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def close(self) -> None:
        self.cancel()
        self._memory.close()


def _is_ready(pipe: IO[bytes], event: int) -> bool:
    """Wait up to 0.2 s until ``pipe`` can be read or written."""
    poll = select.poll()  # select takes no descriptor above 1,023
    poll.register(pipe, event)
    return bool(poll.poll(200))


class AsyncSaveTask:
    """This rank's part of one background save: its own file, and on the coordinator the commit."""

    def __init__(self, iteration: int, process: BackgroundProcess) -> None:
        self.iteration = iteration
        self._process = process
        process.begin()
        self._own: int | None = None
        self._commit: int | None = None

    def poll(self) -> str | None:
        """Detect a dead or stalled process; returns the failure, if any."""
        # After its own file the coordinator's process waits for the other ranks, which watch their own processes.
        self._process.poll(patient=self._own not in self._process.unfinished)
        return self._process.failure

    @property
    def is_over(self) -> bool:
        """Whether this rank's part (on the coordinator, the save) had ended at the last :meth:`poll`."""
        return not self._process.unfinished

    def finish_own(self) -> str | None:
        """Wait for this rank's file; returns the failure, if any."""
        return self._process.failure if self._own is None else self._process.wait(self._own)

    def finish(self) -> str | None:
        """On the coordinator, after :meth:`finish_own` on all ranks: wait for the commit; returns the failure."""
        assert self._commit is not None
        return self._process.wait(self._commit)

    def abandon(self) -> None:
        self._process.cancel()


class DirectorySaveTask(AsyncSaveTask):
    """A save that is committed by renaming a directory, only by the run whose lock on ``root`` has ``lock_token``."""

    def __init__(self, root: Path, iteration: int, process: BackgroundProcess, lock_token: str | None = None) -> None:
        super().__init__(iteration, process)
        self._root, self._lock_token = root, lock_token
        self._directory: Path | None = None

    def begin(self) -> Path:
        """On the coordinator: create a hidden directory, with a subdirectory for the ranks' outcomes."""
        self._directory = new_saving_directory(self._root, self.iteration)
        with explained("write", self._directory):
            (self._directory / OUTCOMES).mkdir()
        return self._directory

    def _submit_commit(self, directory: Path, job: Mapping[str, Any]) -> None:
        place = {"directory": str(directory), "root": str(self._root), "iteration": self.iteration}
        self._commit = self._process.submit({**place, "lock_token": self._lock_token, **job})

    def abandon(self) -> None:
        super().abandon()
        if self._directory is not None:
            remove_checkpoint(self._directory)


class AsyncSaveBackend(DirectorySaveTask):
    """A :class:`~megatron.checkpoint.checkpointing.SaveBackend` that writes while training continues.

    ``read_back`` reads every file again and compares it with its digest before the checkpoint becomes visible.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        process: BackgroundProcess,
        lock_token: str | None = None,
        read_back: bool = False,
    ) -> None:
        super().__init__(root, iteration, process, lock_token)
        self._read_back = read_back

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """Copy the tensors to shared memory; the digests are not known yet."""
        image = SafetensorsImage(tensors)
        with explained("get memory for", path):
            self._process.fill_memory(image)
        job = {"kind": "write", "path": str(path), "bytes": image.size, "read_back": self._read_back}
        self._own = self._process.submit(job)
        return WrittenFile(path.name, image.size, ())

    def commit(self, directory: Path, manifest: Manifest) -> None:
        self._submit_commit(directory, {"kind": "commit", "content": encode_content(manifest)})


class CopyTask(DirectorySaveTask):
    """A copy of a checkpoint, possibly still unfinished, to another root.

    It becomes visible when every file has been read back and equals the original.
    """

    def start(self, source: Path, file: str, target: Path | str) -> None:
        """Copy this rank's ``file`` of the checkpoint ``source``; the coordinator's process commits."""
        copy = {"kind": "copy", "source": str(source), "name": file, "target": str(target)}
        self._own = self._process.submit(copy)
        if self._directory is not None:
            self._submit_commit(self._directory, {"kind": "mirror", "source": str(source)})


class UploadTask(AsyncSaveTask):
    """A copy of a checkpoint, possibly still unfinished, to a URL; ``upload`` describes the commit.

    With a ``lock_token``, only the run whose lock on the original's directory has it may commit. ``retained`` has
    ``--save-retain-last`` and ``--save-retain-interval``; None if nothing is deleted at the URL.
    """

    def __init__(
        self,
        url: str,
        iteration: int,
        process: BackgroundProcess,
        lock_token: str | None,
        retained: tuple[int | None, int | None] | None,
    ) -> None:
        super().__init__(iteration, process)
        self._url, self._lock_token, self._retained = url, lock_token, retained
        self._is_coordinator = False

    def begin(self) -> str:
        """On the coordinator: create the token of this attempt, which all ranks use."""
        self._is_coordinator = True
        return secrets.token_hex(4)

    def start(self, source: Path, file: str, target: Path | str) -> None:
        """Upload this rank's ``file`` of the checkpoint ``source``; the coordinator's process commits."""
        place = {"root": self._url, "iteration": self.iteration, "attempt": str(target), "source": str(source)}
        if self._is_coordinator:
            self._process.submit({**place, "kind": "clear"})
        self._own = self._process.submit({**place, "kind": "upload", "name": file})
        if self._is_coordinator:
            publish = {"kind": "publish", "lock_token": self._lock_token, "retained": self._retained}
            self._commit = self._process.submit({**place, **publish})
