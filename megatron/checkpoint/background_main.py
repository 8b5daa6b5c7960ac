"""The process that writes a rank's files in the background; ``background`` starts it.

python -m megatron.checkpoint.background_main DESCRIPTOR

Jobs arrive on stdin and reports are written to stdout, one JSON object per line. ``DESCRIPTOR`` is the file descriptor
of the memory shared with the rank. The process imports no torch, so it starts quickly and needs little memory, and it
ends when its rank ends.
"""

import json
import logging
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import MANIFEST, Attempt, Housekeeping, commit
from megatron.checkpoint.files import (
    DigestedFile,
    RemotePath,
    WrittenFile,
    check_unmodified,
    explained,
    files_of,
    sync_directory,
    verify_file,
)
from megatron.checkpoint.lock import check_token
from megatron.console import protect_console
from megatron.data.digests import seal
from megatron.errors import CheckpointError, UserError
from megatron.operation.processes import die_with_parent

OUTCOMES = ".written"
"""Directory inside a save's directory for the outcome of every rank."""
_BLOCK = 16 << 20  # bytes written at a time
_POLL_SECONDS = 0.05
_REMOTE_POLL_SECONDS = 1.0  # every poll is one or several requests

Job = Mapping[str, Any]


class Worker:
    """Runs jobs; every kind of job is a method, whose errors are :class:`CheckpointError`."""

    def __init__(self, memory: int, report: Callable[[Mapping[str, object]], None]) -> None:
        self._memory, self._report = memory, report
        self._progress = partial(report, {"progress": True})
        # One for every URL, because it records which iterations are clean.
        self._housekeeping = cache(lambda url: Housekeeping(RemotePath(url)))

    def write(self, job: Job) -> None:
        """Write the first ``bytes`` of the shared memory to the file ``path``."""
        path = Path(job["path"])
        with explained("write", path), DigestedFile(path) as file:
            # Not closed: after an error its slices are still referenced, and closing would raise another error.
            content = memoryview(mmap.mmap(self._memory, job["bytes"], prot=mmap.PROT_READ))
            for start in range(0, len(content), _BLOCK):
                file.write(content[start : start + _BLOCK])
                self._report({"progress": start})
        self._announce(path, file.written, job["read_back"])

    def copy(self, job: Job) -> None:
        """Wait until the checkpoint ``source`` is complete and copy its file ``name`` (if any) to ``target``."""
        source, target = Path(job["source"]) / job["name"], Path(job["target"])
        _await(source.with_name(MANIFEST))
        if not source.exists():
            return
        path = target / job["name"]
        with explained("copy", source), source.open("rb", buffering=0) as original, DigestedFile(path) as file:
            while block := original.read(_BLOCK):
                file.write(block)
                self._report({"progress": original.tell()})
        self._announce(path, file.written, read_back=True)

    def commit(self, job: Job) -> None:
        """Wait until every rank has written its file, then make the directory a checkpoint of ``root``."""
        content = json.loads(job["content"])
        written = self._collect(Path(job["directory"]), set(content["files"]))
        # In their order: chunks name files by their places in it.
        content["files"] = {name: written[name].to_json() for name in content["files"]}
        text = seal("manifest", json.dumps(content, separators=(",", ":")))
        commit(Path(job["directory"]), Path(job["root"]), job["iteration"], text, job["lock_token"])

    def mirror(self, job: Job) -> None:
        """Wait until every rank has copied its file of the checkpoint ``source``, then make the copy a checkpoint."""
        manifest = Path(job["source"]) / MANIFEST
        _await(manifest)
        with explained("read", manifest):
            text = manifest.read_text()
        files = files_of(text)
        for name, file in self._collect(Path(job["directory"]), set(files)).items():
            check_unmodified(manifest.with_name(name), file, files[name])
        commit(Path(job["directory"]), Path(job["root"]), job["iteration"], text, job["lock_token"])

    def clear(self, job: Job) -> None:
        """Delete the files of earlier attempts at the URL ``root``; a failure does not prevent the save."""
        try:
            self._housekeeping(job["root"]).clear(job["attempt"], self._progress)
        except CheckpointError as error:
            self._report({"note": f"what earlier attempts left stays: {error}"})

    def upload(self, job: Job) -> None:
        """Wait until the checkpoint ``source`` is complete and upload its file ``name`` (if any)."""
        source = Path(job["source"]) / job["name"]
        _await(source.with_name(MANIFEST))
        if source.exists():
            Attempt(RemotePath(job["root"]), job["iteration"], job["attempt"]).upload(source, self._progress)

    def publish(self, job: Job) -> None:
        """Wait until every rank has uploaded its file, make the checkpoint visible, and delete older ones."""
        manifest = Path(job["source"]) / MANIFEST
        _await(manifest)
        with explained("read", manifest):
            files = set(files_of(manifest.read_text()))
        attempt = Attempt(RemotePath(job["root"]), job["iteration"], job["attempt"])
        while files := attempt.missing(files):
            time.sleep(_REMOTE_POLL_SECONDS)
        if job["lock_token"] is not None:
            check_token(manifest.parent.parent, job["lock_token"])
        attempt.publish(manifest, self._progress)
        if job["retained"] is None:
            return

        def note(text: str) -> None:
            self._report({"note": text})

        try:
            last, interval = job["retained"]
            self._housekeeping(job["root"]).retain(job["iteration"], last, interval, note, self._progress)
        except CheckpointError as error:
            note(f"nothing more is deleted under {job['root']}: {error}")

    def _announce(self, path: Path, file: WrittenFile, read_back: bool) -> None:
        """Record the written file for the committing process, after it is on stable storage."""
        outcome = path.parent / OUTCOMES / path.name
        with explained("write", path):
            sync_directory(path.parent)
        if read_back:
            if hasattr(os, "posix_fadvise"):
                # Drop the page cache of the file, so that the bytes are read from storage.
                with explained("read", path), path.open("rb") as written:
                    os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            verify_file(path.parent, file)
        with explained("write", outcome):
            draft = outcome.with_name(f"{outcome.name}.draft")
            draft.write_text(json.dumps(file.to_json()))
            draft.rename(outcome)

    @staticmethod
    def _collect(directory: Path, names: set[str]) -> dict[str, WrittenFile]:
        """Wait until all ``names`` are written and remove their outcome files."""
        outcomes = directory / OUTCOMES
        written: dict[str, WrittenFile] = {}
        with explained("read", outcomes):
            while written.keys() != names:
                for name in names.intersection(os.listdir(outcomes)):
                    written[name] = WrittenFile.from_json(name, json.loads((outcomes / name).read_text()))
                    (outcomes / name).unlink()
                time.sleep(_POLL_SECONDS)
            outcomes.rmdir()
        return written


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_SECONDS)


def main(memory: int) -> None:
    """Run jobs until the rank ends."""
    die_with_parent()
    # The rank handles stop signals, and waits for the files that are being written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A connection that breaks is reported as a failed job, in a sentence.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    worker = Worker(memory, _report)
    while True:
        job = jobs.get()
        try:
            getattr(worker, job["kind"])(job)
        except UserError as error:
            _report({"failed": job["number"], "error": str(error)})
        except Exception:
            traceback.print_exc()
            _report({"failed": job["number"], "error": "The background writer failed; see its traceback above."})
        else:
            _report({"done": job["number"]})


def _receive(jobs: "queue.SimpleQueue[Job]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # the rank has ended or closed the pipe


def _report(report: Mapping[str, object]) -> None:
    os.write(sys.stdout.fileno(), f"{json.dumps(report)}\n".encode())


if __name__ == "__main__":
    # A traceback on a full disk must not end the process.
    protect_console()
    main(int(sys.argv[1]))
