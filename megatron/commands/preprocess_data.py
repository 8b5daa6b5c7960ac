"""Tokenize text into the .bin/.idx files that training reads: PREFIX_KEY_document.bin/.idx.

Inputs are jsonl files (every line a JSON object, whose text becomes one document), parquet files, plain-text files,
folders and globs of such, or a Hugging Face dataset. The output does not depend on --workers and --partitions.
"""

import functools
import os
import signal
import sys
from dataclasses import dataclass, field

import tyro

from megatron.commands.preprocess_data import Job, Partitioning, run_partitions
from megatron.commands.preprocess_work import Counts, EncodeTask, Progress, Work
from megatron.config.data import TokenizerConfig
from megatron.data.text_inputs import DATASET_PREFIX, InputFormat, Separation, is_plain_text, list_sources, whole_ranges
from megatron.data.tokenizers import shared_tokenizer
from megatron.errors import ConfigError, UserError
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class PreprocessConfig:
    """Inputs, tokenization and outputs."""

    input: tuple[str, ...]
    """Files, directories, globs, or URLs of these. .parquet files are read as parquet, .txt, .text and .md as plain
    text, all others as jsonl; .gz and .zst are decompressed. dataset:NAME is a Hugging Face dataset, or a directory of
    one. Documents keep their order; files of a directory are sorted by name."""
    output_prefix: str
    """Prefix of the outputs: PREFIX_KEY_document.bin and .idx."""
    tokenizer: tyro.conf.OmitArgPrefixes[TokenizerConfig] = field(default_factory=TokenizerConfig)
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
        if not self.input or not self.json_keys:
            raise ConfigError("--input and --json-keys need at least one value each.")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError("--json-keys names a key twice: name each once.")
        refuse_urls({"--output-prefix": self.output_prefix}, "name a local prefix, and copy the result")
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
            raise ConfigError(f"--partitions cannot cut {datasets[0]}: remove the flag, or give its files as --input.")

    def job(self) -> Job:
        """The work that the flags describe."""
        form = InputFormat(self.json_keys, self.text_documents, self.dataset_config, self.dataset_split)
        task = EncodeTask(self.tokenizer, form, self.append_eod, self.skip_bad_documents)
        return Job(tuple(list_sources(self.input)), task, self.output_prefix, self.workers)


def preprocess(config: PreprocessConfig) -> Counts:
    """Tokenize all inputs and write the outputs, which appear only when complete."""
    config.check()
    job = config.job()
    vocab_size = shared_tokenizer(config.tokenizer).vocab_size
    _check_keys(job)
    progress = functools.partial(Progress, log_interval=config.log_interval)
    if config.partitions > 1:
        return run_partitions(job, Partitioning(config.partitions, config.partition), vocab_size, progress)
    ranges = whole_ranges(list(job.sources))
    work = Work(tuple(ranges), job.task, job.output_prefix, vocab_size, config.workers)
    with progress(work.stored_bytes) as shown:
        return work.run(shown.add)


def _check_keys(job: Job) -> None:
    plain = [source.path for source in job.sources if is_plain_text(source.path)]
    if plain and len(job.task.form.keys) > 1:
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
