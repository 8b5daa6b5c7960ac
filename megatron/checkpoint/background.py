"""Saves that training does not wait for: a process beside each rank writes what the rank has copied aside.

The rank lays the file that it has to write into memory that it shares with its process (and keeps for the next save),
which takes as long as a copy, and goes on training. The process writes the file, and says so by a small file beside it.
That of the first rank waits for all of these, writes the manifest and commits. So nothing is communicated behind the
back of the training's collectives.
"""

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import megatron
from megatron.checkpoint.background_main import OUTCOMES
from megatron.checkpoint.directory import new_saving_directory, remove_checkpoint
from megatron.checkpoint.files import WrittenFile, explained
from megatron.checkpoint.manifest import Manifest, encode_content
from megatron.checkpoint.safetensors_file import SafetensorsImage


class SharedMemory:
    """Memory without a name that another process can map; it grows, and stays."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes."""
        if self._map is None or len(self._map) < size:
            os.ftruncate(self.descriptor, size)
            if hasattr(os, "posix_fallocate"):
                # At once is twice as quick as page by page, and memory that is not there is an error, not a crash.
                os.posix_fallocate(self.descriptor, 0, size)
            self._map = mmap.mmap(self.descriptor, size)
        return self._map

    def close(self) -> None:
        """Give it back once nobody maps it any more."""
        self._map = None
        os.close(self.descriptor)


class BackgroundProcess:
    """A process that does jobs in their order, and is watched while it does.

    ``failure`` says what became of the first job that failed, or of the process: it is killed when it has made no
    progress for ``timeout`` seconds. After a failure nothing that was submitted is done any more; the next
    :meth:`submit` starts afresh.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._memory = SharedMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_number = 0
        self._waiting: list[int] = []
        self._unread = b""
        self._seen_at = 0.0
        self.failure: str | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether something that was submitted is not done, as far as :meth:`poll` knows."""
        return bool(self._waiting)

    def submit(self, job: Mapping[str, Any]) -> int:
        """Have a job done; its number."""
        if not self._waiting:
            self.failure = None
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._last_number += 1
        self._waiting.append(self._last_number)
        self._seen_at = time.monotonic()
        try:
            self._process.stdin.write(f"{json.dumps({**job, 'number': self._last_number})}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("The background writer has died")
        return self._last_number

    def lend(self, size: int) -> mmap.mmap:
        """The memory that a job of kind "write" writes, when none is under way."""
        assert not self._waiting
        return self._memory.reserve(size)

    def _start(self) -> None:
        package = Path(megatron.__path__[0]).parent
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron.checkpoint.background_main", str(self._memory.descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.descriptor],
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""

    def poll(self, patient: bool = False) -> None:
        """Take note of what was done; costs next to nothing. A ``patient`` caller does not mind a standstill."""
        if not self._waiting or self._process is None:
            return
        if self._read_reports():
            self._seen_at = time.monotonic()
        elif self._process.poll() is not None:
            self._fail(f"The background writer has died (exit code {self._process.returncode})")
        elif not patient and time.monotonic() - self._seen_at > self._timeout:
            self._fail(f"The background writer has made no progress for {self._timeout:.0f} s (--async-save-timeout)")

    def _read_reports(self) -> bool:
        """Whether the process has said anything."""
        assert self._process is not None and self._process.stdout is not None
        try:
            news = os.read(self._process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return False
        *lines, self._unread = (self._unread + news).split(b"\n")
        for report in map(json.loads, lines):
            if "done" in report:
                self._waiting.remove(report["done"])
            elif "failed" in report:
                self._fail(report["error"])
                break
        return bool(news)

    def has_before_it(self, number: int | None) -> bool:
        """Whether job ``number`` is not done, as far as :meth:`poll` knows."""
        return number in self._waiting

    def wait(self, number: int) -> str | None:
        """Wait for a job; what became of it if it failed."""
        self._seen_at = time.monotonic()
        while number in self._waiting:
            assert self._process is not None and self._process.stdout is not None
            select.select([self._process.stdout], [], [], 0.2)
            self.poll()
        return self.failure

    def _fail(self, reason: str) -> None:
        self.cancel()
        self.failure = reason

    def cancel(self) -> None:
        """Stop at once, whatever is under way."""
        self._waiting = []
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def close(self) -> None:
        """End the process."""
        self.cancel()
        self._memory.close()


class Undertaking:
    """This rank's part in putting one checkpoint in place: a file of its own, and on the coordinator the commit."""

    def __init__(self, root: Path, iteration: int, process: BackgroundProcess) -> None:
        self.iteration = iteration
        self._root = root
        self._process = process
        self._directory: Path | None = None
        self._own: int | None = None
        self._commit: int | None = None

    def begin(self) -> Path:
        """On the coordinator: make a hidden directory, with a place for what the ranks say."""
        self._directory = new_saving_directory(self._root, self.iteration)
        with explained("write", self._directory):
            (self._directory / OUTCOMES).mkdir()
        return self._directory

    def _submit_commit(self, directory: Path, job: Mapping[str, Any]) -> None:
        place = {"directory": str(directory), "root": str(self._root), "iteration": self.iteration}
        self._commit = self._process.submit({**place, **job})

    def poll(self) -> str | None:
        """Notice a process that is dead or stalled; what went wrong, if anything."""
        # The coordinator's may have to wait for those of the others, each of which is watched by its own rank.
        self._process.poll(patient=not self._process.has_before_it(self._own))
        return self._process.failure

    @property
    def is_over(self) -> bool:
        """Whether this rank's part is done or has failed, as far as :meth:`poll` knows: the coordinator's is all."""
        return not self._process.is_busy

    def finish_own(self) -> str | None:
        """Wait for this rank's file; what went wrong, if anything."""
        return self._process.failure if self._own is None else self._process.wait(self._own)

    def finish(self) -> str | None:
        """On the coordinator, when all ranks have finished theirs: wait for the commit; what went wrong, if
        anything."""
        assert self._commit is not None
        return self._process.wait(self._commit)

    def abandon(self) -> None:
        """Stop, and remove the directory where it was made."""
        self._process.cancel()
        if self._directory is not None:
            remove_checkpoint(self._directory)


class BackgroundSaving(Undertaking):
    """A :class:`~megatron.checkpoint.storage.Saving` that is written while training goes on.

    ``read_back`` also reads every file again and compares it with its digest before the checkpoint becomes visible.
    """

    def __init__(self, root: Path, iteration: int, process: BackgroundProcess, read_back: bool = False) -> None:
        super().__init__(root, iteration, process)
        self._read_back = read_back

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """Copy the tensors aside; the digest of the file is not known yet."""
        image = SafetensorsImage(tensors)
        with explained("get memory for", path):
            memory = self._process.lend(image.size)
        image.copy_into(memory)
        job = {"kind": "write", "path": str(path), "bytes": image.size, "read_back": self._read_back}
        self._own = self._process.submit(job)
        return WrittenFile(path.name, image.size, "")

    def commit(self, directory: Path, manifest: Manifest) -> None:
        """Have the coordinator's process commit when all have written."""
        self._submit_commit(directory, {"kind": "commit", "content": encode_content(manifest)})


class BackgroundCopy(Undertaking):
    """A copy, under another root, of a checkpoint that need not be complete yet.

    It becomes visible when every file has been read back and is what was written in the first place.
    """

    def start(self, source: Path, file: str, directory: Path) -> None:
        """Copy this rank's ``file`` of the checkpoint at ``source``; the coordinator's process commits."""
        copy = {"kind": "copy", "source": str(source), "name": file, "target": str(directory)}
        self._own = self._process.submit(copy)
        if self._directory is not None:
            self._submit_commit(directory, {"kind": "mirror", "source": str(source)})
