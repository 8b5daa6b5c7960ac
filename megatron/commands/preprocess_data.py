"""Tokenize text into the .bin/.idx files that training reads: PREFIX_KEY_document.bin/.idx.

Inputs are jsonl files (every line a JSON object, whose text becomes one document), parquet files, plain-text files,
folders and globs of such, or a Hugging Face dataset. The output does not depend on --workers and --partitions.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from megatron.commands.preprocess_work import Counts, EncodeTask, Progress, Work, output_of
from megatron.commands.tool import HeldSignals, run_tool
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_digests import SUFFIX
from megatron.data.corpus_writer import merge_datasets, warn_of_overwriting
from megatron.data.storage import SourceFile, load_or_build_once
from megatron.data.text_inputs import (
    DATASET_PREFIX,
    InputFormat,
    Separation,
    cut_in_partitions,
    is_plain_text,
    list_sources,
    whole_ranges,
)
from megatron.data.tokenizers import shared_tokenizer, tokenizer_files
from megatron.errors import ConfigError, DataError, UserError
from megatron.urls import refuse_urls

MakeProgress = Callable[[int], Progress]
_MERGED = "merged.json"
_MOST_PROCESSES = 65536  # more is a mistyped number


class Job(NamedTuple):
    """Everything that a run reads and writes."""

    sources: tuple[SourceFile, ...]
    task: EncodeTask
    output_prefix: str
    workers: int

    def settings(self, partitions: int) -> dict[str, Any]:
        """The settings that determine the tokens of a partition."""
        return {
            "partitions": partitions,
            "inputs": [list(source) for source in self.sources],
            "json_keys": list(self.task.form.keys),
            "text_documents": self.task.form.separation,
            "append_eod": self.task.append_eod,
            "skip_bad_documents": self.task.skip_bad_documents,
            "tokenizer_type": self.task.tokenizer.tokenizer_type,
            "tokenizer_model": "+".join(
                hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in tokenizer_files(self.task.tokenizer)
            )
            or None,
            "encoded_by": shared_tokenizer(self.task.tokenizer).encoded_by,
            "end_of_document": shared_tokenizer(self.task.tokenizer).eod,  # may stand in a file beside the model
            "vocab_size": self.task.tokenizer.vocab_size,
            "tiktoken_num_special_tokens": self.task.tokenizer.tiktoken_num_special_tokens,
        }


#   PREFIX_partitions/0-of-4_text_document.bin, .idx, .digests.json     the outputs of a partition
#   PREFIX_partitions/0-of-4.json      its record, written last: settings and counts
#   PREFIX_partitions/merge.lock       while a process merges
#   PREFIX_partitions/merged.json      the record of the merged outputs, after which the partitions are removed


class _Records:
    """The files of PREFIX_partitions/. A record names the inputs and flags; other ones are refused."""

    def __init__(self, job: Job, count: int) -> None:
        self.directory = Path(f"{job.output_prefix}_partitions")
        self.count = count
        self._job = job
        self._settings = job.settings(count)

    def prefix(self, number: int) -> str:
        return str(self.directory / f"{number}-of-{self.count}")

    def complete(self, number: int) -> Counts | None:
        """The counts of a partition; None if it is not complete."""
        counts = self._read(Path(f"{self.prefix(number)}.json"))
        return counts if counts and self._has_outputs(self.prefix(number)) else None

    def merged(self) -> Counts | None:
        """The counts of all partitions; None if they are not merged."""
        counts = self._read(self.directory / _MERGED)
        if counts and not self._has_outputs(self._job.output_prefix):
            raise DataError(f"The merged output of {self.directory} is gone: remove that folder to make it again.")
        return counts

    def _has_outputs(self, prefix: str) -> bool:
        return all(os.path.exists(f"{output_of(prefix, key)}.idx") for key in self._job.task.form.keys)

    def write(self, name: str, counts: Counts) -> None:
        """Record that a partition, or all, is complete."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f"{name}.{uuid.uuid4().hex[:8]}.incomplete"
        temporary.write_text(json.dumps({"settings": self._settings, "counts": asdict(counts)}, indent=1))
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


def run_partitions(job: Job, count: int, only: int | None, vocab_size: int, progress: MakeProgress) -> Counts:
    """Do the partitions that are not complete yet (``only`` this one), and merge if all are; returns all counts."""
    records = _Records(job, count)
    if (merged := records.merged()) is not None:
        print(f"{job.output_prefix} is complete already.", file=sys.stderr)
        return merged
    for key in job.task.form.keys:
        warn_of_overwriting(output_of(job.output_prefix, key))
    wanted = range(count) if only is None else [only]
    missing = [number for number in wanted if records.complete(number) is None]
    for number in sorted(set(wanted) - set(missing)):
        print(f"Partition {number} is complete already.", file=sys.stderr)
    parts = cut_in_partitions(list(job.sources), count, job.task.form.separation)
    at_a_time = min(job.workers, len(missing))
    # Workers of each of the partitions that run at a time.
    shares = cycle([job.workers // at_a_time + (slot < job.workers % at_a_time) for slot in range(at_a_time)])
    works = {
        number: Work(tuple(parts[number]), job.task, records.prefix(number), vocab_size, share, True)
        for number, share in zip(missing, shares)
    }
    with progress(sum(work.stored_bytes for work in works.values())) as shown:
        if only is not None:
            for number, work in works.items():
                records.write(f"{number}-of-{records.count}.json", work.run(shown.add))
        else:
            _run_together(works, at_a_time, records, shown)
        return _merge(job, records, shown.counts)


def _merge(job: Job, records: _Records, counts: Counts) -> Counts:
    """Merge if all are complete, or wait while another node does it; returns the counts of all, or else ``counts``."""
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
    # The merged partitions are not needed any more.
    for number in range(records.count):
        for key in job.task.form.keys:
            for kind in (".idx", ".bin", SUFFIX):
                with suppress(FileNotFoundError):
                    os.remove(output_of(records.prefix(number), key) + kind)
        with suppress(FileNotFoundError):
            os.remove(f"{records.prefix(number)}.json")
    return total


# --- several partitions at a time ----------------------------------------------------------------------------


class _Done(NamedTuple):
    """Message: a partition has written its outputs."""

    number: int
    counts: Counts


def _run_together(works: dict[int, Work], at_a_time: int, records: _Records, shown: Progress) -> None:
    """Every partition in a process with workers of its own, some ``at_a_time``; if one fails, the others end, too."""
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    with HeldSignals() as signals, ExitStack() as stack:
        processes: dict[int, Any] = {}
        waiting = deque(works.items())
        while processes or waiting:
            signals.raise_received()
            while waiting and len(processes) < at_a_time:
                number, work = waiting.popleft()
                process = context.Process(target=_run_in_process, args=(number, work, messages, os.getpid()))
                process.start()
                stack.callback(process.join)
                stack.callback(process.terminate)  # called before the join
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
            sys.exit(1)  # it was killed, and no process reads the messages
        messages.put(counts)

    try:
        messages.put(_Done(number, work.run(report)))
    except UserError as error:
        messages.put(str(error))


@dataclass(frozen=True)
class PreprocessConfig:
    """Inputs, tokenization and outputs."""

    input: tuple[str, ...]
    """Files, directories, globs, or URLs of these. .parquet files are read as parquet, .txt, .text and .md as plain
    text, all others as jsonl; .gz and .zst are decompressed. dataset:NAME is a Hugging Face dataset, or a directory of
    one. Documents keep their order; files of a directory are sorted by name."""
    output_prefix: str
    """Prefix of the outputs: PREFIX_KEY_document.bin and .idx."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    json_keys: tuple[str, ...] = ("text",)
    """JSON keys (columns of parquet files and datasets) to tokenize; each has its own output."""
    text_documents: Separation = "file"
    """Document of a plain-text file: the file, a paragraph (separated by blank lines), or a line."""
    dataset_config: str | None = None
    """Configuration of a Hugging Face dataset with several."""
    dataset_split: str = "train"
    """Split of a Hugging Face dataset."""
    workers: int = 1
    """Tokenizing processes; 1 works in this process."""
    partitions: int = 1
    """Divide the inputs into this many parts of about equal size, tokenize them in parallel, each with its share of
    --workers (at most --workers parts at a time), and merge the results. A restarted run skips completed parts."""
    partition: int | None = None
    """Tokenize only this one of the --partitions (0..N-1), for example one per node; the last one to finish merges all.
    """
    append_eod: bool = False
    """Append the end-of-document token to every document."""
    skip_bad_documents: bool = False
    """Skip documents that cannot be read or tokenized, and report their number and location, instead of failing."""
    log_interval: int = 1000
    """Documents between progress lines, if standard error is not a terminal."""

    def check(self) -> None:
        if self.workers < 1 or self.log_interval < 1:
            raise ConfigError("--workers and --log-interval must be at least 1.")
        if max(self.workers, self.partitions) > _MOST_PROCESSES:
            raise ConfigError(f"--workers and --partitions must be at most {_MOST_PROCESSES}.")
        if not self.input or not self.json_keys:
            raise ConfigError("--input and --json-keys need at least one value each.")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError("--json-keys names a key twice: name each once.")
        refuse_urls({"--output-prefix": self.output_prefix}, "name a local prefix, and copy the result")
        if self.partitions < 1:
            raise ConfigError(f"--partitions {self.partitions} must be at least 1.")
        if self.partition is not None and not 0 <= self.partition < self.partitions:
            raise ConfigError(
                f"--partition {self.partition} is none of 0..{self.partitions - 1}: set --partitions to their number."
            )
        datasets = [name for name in self.input if name.startswith(DATASET_PREFIX)]
        if self.partitions > 1 and datasets:
            raise ConfigError(f"--partitions cannot cut {datasets[0]}: remove the flag, or give its files as --input.")

    def job(self) -> Job:
        form = InputFormat(self.json_keys, self.text_documents, self.dataset_config, self.dataset_split)
        task = EncodeTask(self.tokenizer, form, self.append_eod, self.skip_bad_documents)
        return Job(tuple(list_sources(self.input)), task, self.output_prefix, self.workers)


def preprocess(config: PreprocessConfig) -> Counts:
    """Tokenize all inputs and write the outputs, which appear only when complete."""
    config.check()
    job = config.job()
    vocab_size = shared_tokenizer(config.tokenizer).vocab_size
    plain = [source.path for source in job.sources if is_plain_text(source.path)]
    if plain and len(job.task.form.keys) > 1:
        raise ConfigError(
            f"--json-keys names several keys, but {plain[0]} is plain text: name one, or convert the file."
        )
    progress = partial(Progress, log_interval=config.log_interval)
    if config.partitions > 1:
        return run_partitions(job, config.partitions, config.partition, vocab_size, progress)
    ranges = whole_ranges(list(job.sources))
    work = Work(tuple(ranges), job.task, job.output_prefix, vocab_size, config.workers)
    with progress(work.stored_bytes) as shown:
        return work.run(shown.add)


def run(config: PreprocessConfig) -> None:
    if config.workers > 1 or config.partitions > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    print(preprocess(config).summary())


main = partial(run_tool, PreprocessConfig, run, __doc__, interrupted="no incomplete output has")
