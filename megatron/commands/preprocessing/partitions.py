"""Partitions of a run of tools/preprocess_data.py: each has its own outputs and record, and all are merged.

They are in PREFIX_partitions/. A partition is complete when its record exists, which is written last and names the
inputs and flags of the partition.
"""

import hashlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from megatron.commands.preprocess_work import Counts, EncodeTask, Progress, Work, output_of
from megatron.data.build_lock import load_or_build_once
from megatron.data.corpus_digests import SUFFIX
from megatron.data.corpus_writer import merge_datasets, warn_of_overwriting
from megatron.data.storage import SourceFile
from megatron.data.text_inputs import cut_in_partitions
from megatron.data.tokenizers import shared_tokenizer, tokenizer_files
from megatron.errors import DataError, UserError

MakeProgress = Callable[[int], Progress]
_MERGED = "merged.json"


class Job(NamedTuple):
    """Everything that a run reads and writes."""

    sources: tuple[SourceFile, ...]
    task: EncodeTask
    output_prefix: str
    workers: int

    def settings(self, partitions: int) -> dict[str, Any]:
        """All that decides about the tokens of a partition."""
        return {
            "partitions": partitions,
            "inputs": [list(source) for source in self.sources],
            "json_keys": list(self.task.form.keys),
            "text_documents": self.task.form.separation,
            "append_eod": self.task.append_eod,
            "skip_bad_documents": self.task.skip_bad_documents,
            "tokenizer_type": self.task.tokenizer.tokenizer_type,
            "tokenizer_model": _digest(tokenizer_files(self.task.tokenizer)),
            "encoded_by": shared_tokenizer(self.task.tokenizer).encoded_by,
            "end_of_document": shared_tokenizer(self.task.tokenizer).eod,  # may stand in a file beside the model
            "vocab_size": self.task.tokenizer.vocab_size,
            "tiktoken_num_special_tokens": self.task.tokenizer.tiktoken_num_special_tokens,
        }


class Partitioning(NamedTuple):
    """How many partitions there are, and which one to do (None: all)."""

    parts: int
    only: int | None


def _digest(files: tuple[str, ...]) -> str | None:
    return "+".join(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files) or None


class _Records:
    """The files of PREFIX_partitions/."""

    def __init__(self, job: Job, count: int) -> None:
        self.directory = Path(f"{job.output_prefix}_partitions")
        self.count = count
        self._job = job
        self._settings = job.settings(count)

    def prefix(self, number: int) -> str:
        """Of the outputs of a partition."""
        return str(self.directory / f"{number}-of-{self.count}")

    def complete(self, number: int) -> Counts | None:
        """What a complete partition counted."""
        counts = self._read(Path(f"{self.prefix(number)}.json"))
        outputs = (f"{output_of(self.prefix(number), key)}.idx" for key in self._job.task.form.keys)
        return counts if counts and all(map(os.path.exists, outputs)) else None

    def merged(self) -> Counts | None:
        """What all counted, if they are merged already."""
        counts = self._read(self.directory / _MERGED)
        if counts and not all(
            os.path.exists(f"{output_of(self._job.output_prefix, k)}.idx") for k in self._job.task.form.keys
        ):
            raise DataError(f"The merged output of {self.directory} is gone: remove that folder to make it again.")
        return counts

    def write(self, name: str, counts: Counts) -> None:
        """Say that a partition, or all, is complete."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f"{name}.{uuid.uuid4().hex[:8]}.incomplete"
        temporary.write_text(json.dumps({"settings": self._settings, "counts": counts.to_json()}, indent=1))
        os.replace(temporary, self.directory / name)

    def _read(self, path: Path) -> Counts | None:
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} is damaged: remove it to make the partition again.") from error
        changed = [name for name, value in self._settings.items() if record["settings"].get(name) != value]
        if changed:
            raise DataError(
                f"{path} was made with other {', '.join(changed)}: set the flags as they were, or remove "
                f"{self.directory} to start again."
            )
        return Counts(**record["counts"])

    def remove_partitions(self) -> None:
        """Remove what has been merged."""
        for number in range(self.count):
            for key in self._job.task.form.keys:
                for kind in (".idx", ".bin", SUFFIX):
                    with suppress(FileNotFoundError):
                        os.remove(output_of(self.prefix(number), key) + kind)
            with suppress(FileNotFoundError):
                os.remove(f"{self.prefix(number)}.json")


def run_partitions(job: Job, partitioning: Partitioning, vocab_size: int, progress: MakeProgress) -> Counts:
    """Do the partitions that are not complete yet, and merge if all are; returns what has been counted in all."""
    records = _Records(job, partitioning.parts)
    if (merged := records.merged()) is not None:
        print(f"{job.output_prefix} is complete already.", file=sys.stderr)
        return merged
    for key in job.task.form.keys:
        warn_of_overwriting(output_of(job.output_prefix, key))
    wanted = range(partitioning.parts) if partitioning.only is None else [partitioning.only]
    missing = [number for number in wanted if records.complete(number) is None]
    for number in sorted(set(wanted) - set(missing)):
        print(f"Partition {number} is complete already.", file=sys.stderr)
    parts = cut_in_partitions(list(job.sources), partitioning.parts, job.task.form.separation)
    at_a_time = min(job.workers, len(missing))
    shares = cycle(_shares(job.workers, at_a_time))
    works = {
        number: Work(tuple(parts[number]), job.task, records.prefix(number), vocab_size, share, True)
        for number, share in zip(missing, shares)
    }
    with progress(sum(work.stored_bytes for work in works.values())) as shown:
        if partitioning.only is not None:
            for number, work in works.items():
                records.write(f"{number}-of-{records.count}.json", work.run(shown.add))
        else:
            _run_together(works, at_a_time, records, shown)
        return _merge(job, records, shown.counts)


def _shares(workers: int, partitions: int) -> list[int]:
    """Workers of each of the partitions that run at a time."""
    return [workers // partitions + (number < workers % partitions) for number in range(partitions)]


def _merge(job: Job, records: _Records, counts: Counts) -> Counts:
    """Merge if all are complete, or wait while another node does it; what has been counted of all, or else here."""
    missing = [str(number) for number in range(records.count) if records.complete(number) is None]
    if missing and records.merged() is None:  # a merge removes the partitions behind its record
        print(f"To be merged when partitions {', '.join(missing)} are complete.", file=sys.stderr)
        return counts
    try:
        return load_or_build_once(
            str(records.directory / "merge"), records.merged, lambda: _merge_all(job, records, counts.seconds)
        )
    except OSError as error:
        raise DataError(
            f"{records.directory} cannot be written ({error.strerror}): choose another --output-prefix."
        ) from error


def _merge_all(job: Job, records: _Records, seconds: float) -> Counts:
    total = Counts(seconds=seconds)
    for number in range(records.count):
        part = records.complete(number)
        assert part is not None
        total.add(part)
    if not total.tokens:
        raise DataError("The inputs have no document with text: check --input and --json-keys.")
    for key in job.task.form.keys:
        prefixes = [output_of(records.prefix(number), key) for number in range(records.count)]
        merge_datasets(prefixes, output_of(job.output_prefix, key))
    records.write(_MERGED, total)
    records.remove_partitions()
    return total


# --- several partitions at a time ----------------------------------------------------------------------------


class _Done(NamedTuple):
    """A partition has written its outputs."""

    number: int
    counts: Counts


def _run_together(works: dict[int, Work], at_a_time: int, records: _Records, shown: Progress) -> None:
    """Every partition in a process with workers of its own, some ``at_a_time``; if one fails, the others end, too."""
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    with ExitStack() as stack:
        processes: dict[int, Any] = {}
        waiting = deque(works.items())
        while processes or waiting:
            while waiting and len(processes) < at_a_time:
                number, work = waiting.popleft()
                process = context.Process(target=_run_in_process, args=(number, work, messages, os.getpid()))
                process.start()
                stack.callback(_end, process)
                processes[number] = process
            try:
                message = messages.get(timeout=1)
            except queue.Empty:
                died = [number for number, process in processes.items() if process.exitcode not in (None, 0)]
                if died and messages.empty():
                    raise DataError(
                        f"The process of partition {died[0]} died, perhaps for lack of memory: use fewer --workers."
                    ) from None
                continue
            if isinstance(message, str):
                raise DataError(message)
            if isinstance(message, _Done):
                records.write(f"{message.number}-of-{records.count}.json", message.counts)
                processes.pop(message.number).join()
            else:
                shown.add(message)


def _run_in_process(number: int, work: Work, messages: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def report(counts: Counts) -> None:
        if os.getppid() != parent:
            sys.exit(1)  # killed: nobody reads messages any more
        messages.put(counts)

    try:
        messages.put(_Done(number, work.run(report)))
    except UserError as error:
        messages.put(str(error))


def _end(process: Any) -> None:
    process.terminate()
    process.join()
