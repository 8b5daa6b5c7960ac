#!/usr/bin/env python3
"""Speed of everything that concerns data: preprocessing, sample orders, reading, and the loader in training.

    python benchmarks/benchmark_data.py [--only preprocessing] [--megabytes 8] [--documents 20000000] [--json OUT]

preprocessing: tools/preprocess_data.py against one document at a time through multiprocessing.Pool.imap with chunks of
32, every document's ids as a Python list, which is Megatron-LM's design; both with the same tokenizer and workers, and
with the same bytes as result, which is checked. The contenders take turns. Without --input the text is source code
and documentation of installed packages, which do not repeat. Memory is the sum of the peaks of the main process and the
largest worker. The ratio of CPU is that of processor time, which other processes of the machine hardly change.

orders, reading, loader: what the data of a run costs, as benchmarks/training_data_rows.py says; verification: what it
costs to compare them with their digests. Speeds are better when they are higher, times and shares when they are lower.
"""

import ast
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from sysconfig import get_paths
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are the parallelism, of both sides
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before NumPy and torch read them

import numpy as np
import tyro

from benchmarks.data_rows import HEADER, Row
from megatron.config.data import TokenizerConfig
from megatron.data.encoding import EncodeTask, shared_tokenizer
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.text_inputs import InputFormat, list_sources, whole_ranges
from megatron.data.tokenizers import Tokenizer, build_tokenizer
from megatron.errors import DataError, UserError
from megatron.ranges import require_at_least
from megatron.urls import refuse_urls
from tools.support.preprocess_work import Work, output_of
from tools.train_tokenizer import TrainTokenizerConfig, train

Benchmark = Literal["preprocessing", "orders", "reading", "loader", "verification"]


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to measure, and how often."""

    only: tuple[Benchmark, ...] = ()
    """Measure these alone."""
    input: Path | None = None
    """A jsonl file with documents under "text"."""
    megabytes: int = 8
    """Size of the text where there is no --input."""
    workers: int = 2
    """Worker processes of every contender."""
    repeats: int = 3
    """Turns of every contender; the median counts."""
    sentencepiece_model: Path | None = None
    """Model to use; otherwise one of 8,000 ids is trained on a part of the text."""
    tiktoken_model: Path | None = None
    """Model to use, such as Llama 3's; otherwise one of 8,000 ids is trained."""
    documents: int = 20_000_000
    """Documents in the order of one epoch, of 1,025 tokens on average; three epochs are of a quarter of them."""
    train_iters: int = 30
    """Steps of the run whose loader is measured."""
    json: Path | None = None
    """File for the figures."""

    def check(self) -> None:
        require_at_least(1, {"--megabytes": self.megabytes, "--workers": self.workers, "--repeats": self.repeats})
        require_at_least(800, {"--documents": self.documents})
        require_at_least(4, {"--train-iters": self.train_iters})
        models = {"--sentencepiece-model": self.sentencepiece_model, "--tiktoken-model": self.tiktoken_model}
        refuse_urls({"--input": self.input, **models, "--json": self.json}, "name a local file")


class Turn(NamedTuple):
    """What one turn of a contender took."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


# --- text ----------------------------------------------------------------------------------------------------


def write_text(path: Path, num_bytes: int) -> int:
    """Write documents of source code and of documentation, each half of the bytes; returns their number."""
    documents, size = 0, 0
    with open(path, "w", encoding="utf-8") as file:
        for document in _source_texts():
            file.write(json.dumps({"text": document}) + "\n")
            documents, size = documents + 1, size + len(document)
            if size >= num_bytes:
                break
    return documents


def _source_texts() -> Iterator[str]:
    """From each module up to 4,000 characters of code, and its documentation."""
    for root in (get_paths()["purelib"], get_paths()["stdlib"]):
        for path in sorted(Path(root).rglob("*.py"), key=lambda path: hash_of(str(path))):
            code = path.read_text(encoding="utf-8", errors="replace")
            prose = "\n\n".join(_documentation(code))
            for text in (code[:4000], prose[:4000]):
                if len(text) > 500:
                    yield text


def hash_of(text: str) -> int:
    """A number that puts names into an order without meaning, always the same."""
    import zlib

    return zlib.crc32(text.encode())


def _documentation(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


# --- preprocessing -------------------------------------------------------------------------------------------


class _OneDocument:
    """Megatron-LM's encoder: a line in, a list of ids out."""

    tokenizer: Tokenizer

    def __init__(self, config: TokenizerConfig) -> None:
        self.config = config

    def start(self) -> None:
        """Build the tokenizer, once per process."""
        _OneDocument.tokenizer = build_tokenizer(self.config)

    def encode(self, line: str) -> tuple[list[int], int]:
        """The ids of a document, and the bytes of its line."""
        ids = self.tokenizer.tokenize(json.loads(line)["text"])
        return ([*ids, self.tokenizer.eod] if ids else []), len(line)


def preprocess_one_by_one(text: Path, prefix: str, tokenizer: TokenizerConfig, workers: int) -> None:
    """Every document on its own through ``Pool.imap``."""
    encoder = _OneDocument(tokenizer)
    vocab_size = build_tokenizer(tokenizer).vocab_size
    with (
        open(text, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(workers, initializer=encoder.start) as pool,
        IndexedDatasetWriter(output_of(prefix, "text"), vocab_size) as writer,
    ):
        for ids, _ in pool.imap(encoder.encode, lines, 32):
            if ids:
                writer.add_document(np.array(ids, dtype=np.int32))
        pool.close()
        pool.join()


def preprocess_in_batches(text: Path, prefix: str, tokenizer: TokenizerConfig, workers: int) -> None:
    """As tools/preprocess_data.py does."""
    task = EncodeTask(tokenizer, ("text",), append_eod=True, skip_bad_documents=False)
    ranges = tuple(whole_ranges(list_sources([str(text)])))
    Work(ranges, InputFormat(), task, prefix, shared_tokenizer(tokenizer).vocab_size, workers).run(lambda counts: None)


def measure(task: Callable[[], None]) -> Turn:
    """Run a task in a process of its own, whose start does not count."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run_measured, args=(task, theirs))
    process.start()
    theirs.close()
    try:
        turn: Turn = mine.recv()
    except EOFError as error:
        raise DataError("A contender failed; see above.") from error
    process.join()
    return turn


def _run_measured(task: Callable[[], None], result: Any) -> None:
    start, before = time.perf_counter(), _cpu_seconds()
    task()
    seconds = time.perf_counter() - start
    cpu_seconds = _cpu_seconds() - before
    result.send(Turn(seconds, cpu_seconds, _peak_mb(resource.RUSAGE_SELF) + _peak_mb(resource.RUSAGE_CHILDREN)))


def _cpu_seconds() -> float:
    """Processor time of this process and the children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _peak_mb(who: int) -> float:
    """Of this process, or of the largest child."""
    return resource.getrusage(who).ru_maxrss / 1024


def compare_preprocessing(text: Path, documents: int, tokenizer: TokenizerConfig, config: BenchmarkConfig) -> Row:
    """One row: documents per second."""
    contenders = {"ours": preprocess_in_batches, "other": preprocess_one_by_one}
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for repeat in range(config.repeats):
        for name in sorted(contenders, reverse=bool(repeat % 2)):
            prefix = str(text.parent / name)
            turns[name].append(measure(partial(contenders[name], text, prefix, tokenizer, config.workers)))
        _check_equal(text.parent)
    speed = {name: documents / median(turn.seconds for turn in taken) for name, taken in turns.items()}
    peak = {name: max(turn.peak_mb for turn in taken) for name, taken in turns.items()}
    cpu = {name: median(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    name = f"preprocess, {tokenizer.tokenizer_type}, {config.workers} workers"
    return Row(
        name, "documents/s", speed["ours"], speed["other"], peak["ours"], peak["other"], cpu["other"] / cpu["ours"]
    )


def _check_equal(directory: Path) -> None:
    for kind in (".bin", ".idx"):
        ours, other = ((directory / f"{output_of(name, 'text')}{kind}").read_bytes() for name in ("ours", "other"))
        if ours != other:
            raise DataError(f"The {kind} files of the two ways differ: the comparison would say nothing.")


def preprocessing_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Preprocessing with SentencePiece and with tiktoken."""
    text = config.input or directory / "text.jsonl"
    if config.input is None:
        documents = write_text(text, config.megabytes * 10**6)
    else:
        with open(text, "rb") as file:
            documents = sum(1 for line in file if line.strip())
        os.symlink(text.resolve(), directory / "text.jsonl")
        text = directory / "text.jsonl"
    for kind, model in (("sentencepiece", config.sentencepiece_model), ("tiktoken", config.tiktoken_model)):
        path = str(model or _train(kind, text, directory))
        name: Any = {"sentencepiece": "SentencePieceTokenizer", "tiktoken": "TikTokenizer"}[kind]
        yield compare_preprocessing(text, documents, TokenizerConfig(name, path), config)


def _train(kind: Any, text: Path, directory: Path) -> str:
    sample = directory / "sample.jsonl"
    with open(text, encoding="utf-8") as lines, open(sample, "w", encoding="utf-8") as output:
        size = 0
        while size < 1_500_000 and (line := lines.readline()):
            output.write(line)
            size += len(line)
    return train(TrainTokenizerConfig((str(sample),), str(directory / kind), 8000, kind=kind))


# --- all -----------------------------------------------------------------------------------------------------


# training_data_rows imports torch, which would count in the memory of preprocessing; so it is imported behind that.


def order_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Building sample orders."""
    from benchmarks import training_data_rows

    yield from training_data_rows.order_rows(config.documents)


def reading_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Reading a sample on every rank, or sending it."""
    from benchmarks import training_data_rows

    yield from training_data_rows.reading_rows(directory)


def loader_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """The loader's share of a step."""
    from benchmarks import training_data_rows

    yield from training_data_rows.loader_rows(directory, config.train_iters)


# By the name that --only takes: a function of the configuration and a directory for its files gives rows.
def verification_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """What it costs to compare data with their digests."""
    from benchmarks import verification_rows as rows

    return rows.verification_rows(directory)


BENCHMARKS: dict[Benchmark, Callable[[BenchmarkConfig, Path], Iterator[Row]]] = {
    "preprocessing": preprocessing_rows,
    "orders": order_rows,
    "reading": reading_rows,
    "loader": loader_rows,
    "verification": verification_rows,
}


def main() -> int:
    """Run all; the exit status."""
    config = tyro.cli(BenchmarkConfig, description=__doc__)
    rows = []
    try:
        config.check()
        with tempfile.TemporaryDirectory() as directory:
            print(HEADER, flush=True)
            # In this order: a process starts with the peak memory of the one that starts it.
            for rows_of in (rows_of for name, rows_of in BENCHMARKS.items() if name in (config.only or BENCHMARKS)):
                for row in rows_of(config, Path(directory)):
                    rows.append(row)
                    print(row.line(), flush=True)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    if config.json is not None:
        figures = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        settings = {name: str(value) for name, value in asdict(config).items()}
        config.json.write_text(json.dumps({"settings": settings, "rows": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
