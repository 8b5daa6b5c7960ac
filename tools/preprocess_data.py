#!/usr/bin/env python3
"""Tokenize text into the .bin/.idx files that training reads: PREFIX_KEY_document.bin/.idx.

Inputs are jsonl files (every line a JSON object, whose text becomes one document), parquet files, plain-text files,
folders and globs of such, or a Hugging Face dataset. The output does not depend on --workers and --partitions.
"""

import functools
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.config.data import TokenizerConfig
from megatron.config.errors import ConfigError, UserError
from megatron.data.encoding import EncodeTask, shared_tokenizer
from megatron.data.text_inputs import DATASET_PREFIX, InputFormat, Separation, is_plain_text, list_sources, whole_pieces
from tools.preprocess_partitions import Job, Partitioning, run_partitions
from tools.preprocess_progress import Counts, Progress
from tools.preprocess_work import Work


@dataclass(frozen=True)
class PreprocessConfig:
    """Which files to tokenize, and how."""

    input: tuple[str, ...]
    """Files, folders, globs, or URLs of these; .parquet is read as such, .txt, .text and .md as plain text, all else
    as jsonl; .gz and .zst are unpacked. dataset:NAME is a Hugging Face dataset, or a folder of one. Documents keep
    their order; files of a folder have that of their names."""
    output_prefix: str
    """Start of the output names: PREFIX_KEY_document.bin and .idx."""
    tokenizer: tyro.conf.OmitArgPrefixes[TokenizerConfig] = field(default_factory=TokenizerConfig)
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON objects (columns of parquet files and datasets) whose text to tokenize; each gets its own
    output."""
    text_documents: Separation = "file"
    """What a document of a plain-text file is: the file, a paragraph (lines up to a blank one), or a line."""
    dataset_config: str | None = None
    """Configuration of a Hugging Face dataset that has several."""
    dataset_split: str = "train"
    """Split of a Hugging Face dataset."""
    workers: int = 1
    """Processes that tokenize; 1 works in this process."""
    partitions: int = 1
    """Cut the inputs in so many parts of about the same size, tokenize them at the same time, each with its share of
    --workers (no more parts than workers at a time), and merge the results. A run that is started again skips those
    that are complete."""
    partition: int | None = None
    """Tokenize this one of the --partitions (0..N-1), as on one of several nodes; the last to end merges all."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-document token."""
    skip_bad_documents: bool = False
    """Leave out documents that cannot be read or tokenized, and tell how many and where, instead of stopping."""
    log_interval: int = 1000
    """Documents between progress reports when standard error is not a terminal."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        if self.workers < 1 or self.log_interval < 1:
            raise ConfigError("--workers and --log-interval must be at least 1.")
        if not self.input or not self.json_keys:
            raise ConfigError("--input and --json-keys need at least one value each.")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError("--json-keys names a key twice: name each once.")
        self._check_partitions()

    def _check_partitions(self) -> None:
        if self.partitions < 1:
            raise ConfigError(f"--partitions {self.partitions} must be at least 1.")
        if self.partition is not None and not 0 <= self.partition < self.partitions:
            raise ConfigError(
                f"--partition {self.partition} is none of 0..{self.partitions - 1}: set --partitions to their number."
            )
        datasets = [name for name in self.input if name.startswith(DATASET_PREFIX)]
        if self.partitions > 1 and datasets:
            raise ConfigError(f"--partitions cannot cut {datasets[0]}: drop the flag, or give its files as --input.")

    def job(self) -> Job:
        """The work that the flags describe."""
        form = InputFormat(self.json_keys, self.text_documents, self.dataset_config, self.dataset_split)
        task = EncodeTask(self.tokenizer, self.json_keys, self.append_eod, self.skip_bad_documents)
        return Job(tuple(list_sources(self.input)), form, task, self.output_prefix, self.workers)


def preprocess(config: PreprocessConfig) -> Counts:
    """Tokenize all inputs and write the outputs, which appear only when complete."""
    config.check()
    job = config.job()
    vocab_size = shared_tokenizer(config.tokenizer).vocab_size
    _check_keys(job)
    progress = functools.partial(Progress, log_interval=config.log_interval)
    if config.partitions > 1:
        return run_partitions(job, Partitioning(config.partitions, config.partition), vocab_size, progress)
    pieces = whole_pieces(list(job.sources))
    work = Work(tuple(pieces), job.form, job.task, job.output_prefix, vocab_size, config.workers)
    with progress(work.stored_bytes) as shown:
        return work.run(shown.add)


def _check_keys(job: Job) -> None:
    plain = [source.path for source in job.sources if is_plain_text(source.path)]
    if plain and len(job.form.keys) > 1:
        raise ConfigError(
            f"--json-keys names several keys, but {plain[0]} is plain text: name one, or convert the file."
        )


def main() -> int:
    """Run the tool; returns the exit status."""
    config = tyro.cli(PreprocessConfig, description=__doc__)
    # A terminated run, too, removes its incomplete files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if config.workers > 1 or config.partitions > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    try:
        counts = preprocess(config)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = "only complete partitions have" if config.partitions > 1 else "nothing has"
        print(f"ERROR: interrupted; {kept} been written.", file=sys.stderr)
        return 130
    print(counts.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
