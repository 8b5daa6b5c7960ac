"""The process that does a rank's file work behind the training's back; ``background`` starts it.

    python -m megatron.checkpoint.background_main DESCRIPTOR

Jobs come in on stdin and reports go out on stdout, one JSON object a line. ``DESCRIPTOR`` is that of the memory that
the rank shares with it. It imports no torch, so it is there at once and takes little memory; and it dies with its rank.
"""

import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import MANIFEST, commit
from megatron.checkpoint.files import DigestedFile, WrittenFile, explained, seal, sync_directory, verify_file
from megatron.config.errors import CheckpointError

OUTCOMES = ".written"
"""The directory, inside that of a save, in which every rank says what it has written."""
_BLOCK = 16 << 20  # bytes written at a time
_POLL_SECONDS = 0.05

Job = Mapping[str, Any]


class Worker:
    """Does the jobs, each of which is a method."""

    def __init__(self, memory: int, report: Callable[[Mapping[str, object]], None]) -> None:
        self._memory = memory
        self._report = report

    def do(self, job: Job) -> None:
        """Do one job; an error is a :class:`CheckpointError`."""
        {"write": self.write, "copy": self.copy, "commit": self.commit, "mirror": self.mirror}[job["kind"]](job)

    def write(self, job: Job) -> None:
        """Write the first ``bytes`` of the memory as the file ``path``."""
        path = Path(job["path"])
        with explained("write", path), DigestedFile(path) as file:
            # Not to be closed here: after an error, which must not be lost, its parts are still held.
            content = memoryview(mmap.mmap(self._memory, job["bytes"], prot=mmap.PROT_READ))
            for start in range(0, len(content), _BLOCK):
                file.write(content[start : start + _BLOCK])
                self._report({"progress": start})
        self._announce(path, file.written, job["read_back"])

    def copy(self, job: Job) -> None:
        """When the checkpoint ``source`` is complete, copy its file ``name``, if it has one, to the directory
        ``target``."""
        source, target = Path(job["source"]) / job["name"], Path(job["target"])
        self._await(source.with_name(MANIFEST))
        if not source.exists():
            return
        path = target / job["name"]
        with explained("copy", source), source.open("rb", buffering=0) as original, DigestedFile(path) as file:
            while block := original.read(_BLOCK):
                file.write(block)
                self._report({"progress": original.tell()})
        self._announce(path, file.written, read_back=True)

    def commit(self, job: Job) -> None:
        """When every rank has written its file, make the directory the checkpoint of ``iteration`` in ``root``."""
        content = json.loads(job["content"])
        written = self._collect(Path(job["directory"]), set(content["files"]))
        content["files"] = {name: {"bytes": file.size, "xxh3_128": file.digest} for name, file in written.items()}
        commit(Path(job["directory"]), Path(job["root"]), job["iteration"], seal(json.dumps(content)))

    def mirror(self, job: Job) -> None:
        """When every rank has copied its file of the checkpoint ``source``, make the directory one, too."""
        manifest = Path(job["source"]) / MANIFEST
        self._await(manifest)
        with explained("read", manifest):
            text = manifest.read_text()
        files = json.loads(text)["manifest"]["files"]
        for name, file in self._collect(Path(job["directory"]), set(files)).items():
            if file != WrittenFile(name, files[name]["bytes"], files[name]["xxh3_128"]):
                raise CheckpointError(
                    f"{manifest.with_name(name)} has changed since it was written, so it is not mirrored: look at it "
                    "with tools/inspect_checkpoint.py --verify."
                )
        commit(Path(job["directory"]), Path(job["root"]), job["iteration"], text)

    def _announce(self, path: Path, file: WrittenFile, read_back: bool) -> None:
        """Tell the process that commits what was written, once it is sure to stay."""
        outcome = path.parent / OUTCOMES / path.name
        with explained("write", path):
            sync_directory(path.parent)
        if read_back:
            self._forget(path)
            verify_file(path.parent, file)
        with explained("write", outcome):
            draft = outcome.with_name(f"{outcome.name}.draft")
            draft.write_text(json.dumps(asdict(file)))
            draft.rename(outcome)

    @staticmethod
    def _forget(path: Path) -> None:
        """Have the next reader read from the storage, not from memory."""
        if hasattr(os, "posix_fadvise"):
            with explained("read", path), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @staticmethod
    def _await(path: Path) -> None:
        while not path.exists():
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _collect(directory: Path, names: set[str]) -> dict[str, WrittenFile]:
        """Wait until all ``names`` are written, and remove what they left to say so."""
        outcomes = directory / OUTCOMES
        written: dict[str, WrittenFile] = {}
        with explained("read", outcomes):
            while written.keys() != names:
                for name in names.intersection(os.listdir(outcomes)):
                    written[name] = WrittenFile(**json.loads((outcomes / name).read_text()))
                    (outcomes / name).unlink()
                time.sleep(_POLL_SECONDS)
            outcomes.rmdir()
        return written


def main(memory: int) -> None:
    """Do what the rank asks for until it is gone."""
    _die_with_parent()
    # What asks the run to stop is the rank's to heed: it waits for what is being written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    worker = Worker(memory, _report)
    while True:
        job = jobs.get()
        try:
            worker.do(job)
        except CheckpointError as error:
            _report({"failed": job["number"], "error": str(error)})
        except Exception:
            traceback.print_exc()
            _report({"failed": job["number"], "error": "The background writer failed; see its traceback above."})
        else:
            _report({"done": job["number"]})


def _die_with_parent() -> None:
    """Be killed when the rank ends, however it ends, even while this process is stopped (Linux)."""
    parent = os.getppid()
    with suppress(AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _receive(jobs: "queue.SimpleQueue[Job]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    # The rank is gone, or done with us.
    os._exit(0)


def _report(report: Mapping[str, object]) -> None:
    os.write(sys.stdout.fileno(), f"{json.dumps(report)}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
