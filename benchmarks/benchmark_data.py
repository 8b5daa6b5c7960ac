#!/usr/bin/env python3
"""Speed of everything that concerns data: preprocessing, sample orders, reading, and the loader in training.

    python benchmarks/benchmark_data.py [--only preprocessing] [--megabytes 8] [--documents 20000000] [--json OUT]

preprocessing: tools/preprocess_data.py against one document at a time through multiprocessing.Pool.imap with chunks of
32, every document's ids as a Python list, which is Megatron-LM's design; both with the same tokenizer and workers, and
with the same bytes as result, which is checked. The contenders take turns. Without --input the text is source code
and documentation of installed packages, which do not repeat. Memory is the sum of the peaks of the main process and the
largest worker. The ratio of CPU is that of processor time, which other processes of the machine hardly change.

gigatoken: the same against Megatron-LM's tools/preprocess_data_fast.py, whose design is one call of GigaToken, which
reads the file and tokenizes it in as many threads as workers, and one array of all tokens in memory. Special tokens are
text to both.

orders, reading, loader: what the data of a run costs, as benchmarks/lib/training_data_rows.py says; verification: what
it costs to compare them with their digests. Speeds are better when they are higher, times and shares when they are
lower.
"""

import ast
import filecmp
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

from benchmarks.lib.data_rows import HEADER, Row
from megatron.commands.preprocess_work import EncodeTask, Work, output_of
from megatron.commands.tool import run_tool
from megatron.commands.train_tokenizer import TrainTokenizerConfig, train
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_writer import IndexedDatasetWriter, write_index
from megatron.data.indexed_dataset import token_dtype
from megatron.data.text_inputs import InputFormat, list_sources, whole_ranges
from megatron.data.tokenizer_formats import LLAMA3_SPLIT, parse_ranks
from megatron.data.tokenizers import Tokenizer, build_tokenizer, shared_tokenizer
from megatron.data.verified_encoder import fast_sentencepiece, fast_tiktoken, fast_tokenizer_json
from megatron.errors import DataError
from megatron.flags import require_at_least
from megatron.urls import refuse_urls

Benchmark = Literal["preprocessing", "gigatoken", "orders", "reading", "loader", "verification"]
TokenizerKind = Literal["sentencepiece", "tiktoken", "huggingface"]


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
    tokenizers: tuple[TokenizerKind, ...] = ("sentencepiece", "tiktoken", "huggingface")
    """Kinds of tokenizers to preprocess with."""
    sentencepiece_model: Path | None = None
    """Model to use; otherwise one of 8,000 ids is trained on a part of the text."""
    tiktoken_model: Path | None = None
    """Model to use, such as Llama 3's; otherwise one of 8,000 ids is trained."""
    huggingface_model: Path | None = None
    """A tokenizer.json to use; otherwise one of 8,000 ids is trained."""
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
        models = {
            "--sentencepiece-model": self.sentencepiece_model,
            "--tiktoken-model": self.tiktoken_model,
            "--huggingface-model": self.huggingface_model,
        }
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
    task = EncodeTask(tokenizer, InputFormat(), append_eod=True, skip_bad_documents=False)
    ranges = tuple(whole_ranges(list_sources([str(text)])))
    Work(ranges, task, prefix, shared_tokenizer(tokenizer).vocab_size, workers).run(lambda counts: None)


def preprocess_whole_file(text: Path, prefix: str, tokenizer: TokenizerConfig, workers: int) -> None:
    """GigaToken reads and tokenizes the whole file in threads, before the tokens are written."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    import awkward
    import gigatoken

    trusted = build_tokenizer(tokenizer)
    documents = _gigatoken_of(tokenizer).encode_files(gigatoken.JsonlFileSource([str(text)]), parallel=True)
    dtype = token_dtype(trusted.vocab_size)
    tokens = np.asarray(awkward.flatten(documents), dtype=dtype)
    lengths = np.asarray(awkward.num(documents, axis=1))
    tokens = np.insert(tokens, np.cumsum(lengths), trusted.eod).astype(dtype, copy=False)
    lengths, count = (lengths + 1).astype(np.int32), len(lengths)
    offsets = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64) * dtype.itemsize))
    prefix = output_of(prefix, "text")
    with open(f"{prefix}.bin", "wb") as file:
        file.write(tokens.tobytes())
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file, dtype, [lengths], [offsets], [np.arange(count + 1)], count, count)


def _gigatoken_of(config: TokenizerConfig) -> Any:
    """GigaToken's tokenizer, to which special tokens are text, as they are to ours."""
    path = config.tokenizer_model or ""
    content = Path(path).read_bytes()
    match config.tokenizer_type:
        case "TikTokenizer":
            encoder = fast_tiktoken(parse_ranks(path, content), LLAMA3_SPLIT)
        case "SentencePieceTokenizer":
            encoder = fast_sentencepiece(content)
        case _:
            encoder = fast_tokenizer_json(content)
    if encoder is None:
        raise DataError(f"{path} is no file that gigatoken reads, or gigatoken is not installed.")
    return encoder.tokenizer


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
    """Peak memory of this process, or of the largest child, in MB."""
    return resource.getrusage(who).ru_maxrss / 1024


Contender = Callable[[Path, str, TokenizerConfig, int], None]


def compare_preprocessing(
    text: Path, documents: int, tokenizer: TokenizerConfig, config: BenchmarkConfig, other: Contender
) -> Row:
    """One row: documents per second."""
    contenders: dict[str, Contender] = {"ours": preprocess_in_batches, "other": other}
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for repeat in range(config.repeats):
        for name in sorted(contenders, reverse=bool(repeat % 2)):
            prefix = str(text.parent / name)
            turns[name].append(measure(partial(contenders[name], text, prefix, tokenizer, config.workers)))
        _check_equal(text.parent)
    speed = {name: documents / median(turn.seconds for turn in taken) for name, taken in turns.items()}
    peak = {name: max(turn.peak_mb for turn in taken) for name, taken in turns.items()}
    cpu = {name: median(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    how = "whole file" if other is preprocess_whole_file else "preprocess"
    name = f"{how}, {tokenizer.tokenizer_type}, {config.workers} workers"
    return Row(
        name, "documents/s", speed["ours"], speed["other"], peak["ours"], peak["other"], cpu["other"] / cpu["ours"]
    )


def _check_equal(directory: Path) -> None:
    for kind in (".bin", ".idx"):
        ours, other = (Path(f"{output_of(str(directory / name), 'text')}{kind}") for name in ("ours", "other"))
        if not filecmp.cmp(ours, other, shallow=False):
            raise DataError(f"The {kind} files of the two ways differ: the comparison would say nothing.")


def preprocessing_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Against one document at a time."""
    return _rows_of_tokenizers(config, directory, preprocess_one_by_one)


def gigatoken_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Against the whole file at once."""
    return _rows_of_tokenizers(config, directory, preprocess_whole_file)


def _rows_of_tokenizers(config: BenchmarkConfig, directory: Path, other: Contender) -> Iterator[Row]:
    text = directory / "text.jsonl"
    if not text.exists():
        if config.input is None:
            write_text(text, config.megabytes * 10**6)
        else:
            os.symlink(config.input.resolve(), text)
    with open(text, "rb") as file:
        documents = sum(1 for line in file if line.strip())
    models: dict[TokenizerKind, Path | None] = {
        "sentencepiece": config.sentencepiece_model,
        "tiktoken": config.tiktoken_model,
        "huggingface": config.huggingface_model,
    }
    types: dict[TokenizerKind, Any] = {
        "sentencepiece": "SentencePieceTokenizer",
        "tiktoken": "TikTokenizer",
        "huggingface": "HuggingFaceTokenizer",
    }
    for kind in config.tokenizers:
        tokenizer = TokenizerConfig(types[kind], str(models[kind] or _train(kind, text, directory)))
        yield compare_preprocessing(text, documents, tokenizer, config, other)


def _train(kind: TokenizerKind, text: Path, directory: Path) -> str:
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
    from benchmarks.lib import training_data_rows

    yield from training_data_rows.order_rows(config.documents)


def reading_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """Reading a sample on every rank, or sending it."""
    from benchmarks.lib import training_data_rows

    yield from training_data_rows.reading_rows(directory)


def loader_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """The loader's share of a step."""
    from benchmarks.lib import training_data_rows

    yield from training_data_rows.loader_rows(directory, config.train_iters)


def verification_rows(config: BenchmarkConfig, directory: Path) -> Iterator[Row]:
    """What it costs to compare data with their digests."""
    from benchmarks.lib import verification_rows as rows

    return rows.verification_rows(directory)


# By the name that --only takes: a function of the configuration and a directory for its files gives rows.
BENCHMARKS: dict[Benchmark, Callable[[BenchmarkConfig, Path], Iterator[Row]]] = {
    "preprocessing": preprocessing_rows,
    "gigatoken": gigatoken_rows,
    "orders": order_rows,
    "reading": reading_rows,
    "loader": loader_rows,
    "verification": verification_rows,
}


def measure_all(config: BenchmarkConfig) -> None:
    """Run all."""
    config.check()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        print(HEADER, flush=True)
        # In this order: a process starts with the peak memory of the one that starts it.
        for rows_of in (rows_of for name, rows_of in BENCHMARKS.items() if name in (config.only or BENCHMARKS)):
            for row in rows_of(config, Path(directory)):
                rows.append(row)
                print(row.line(), flush=True)
    if config.json is not None:
        figures = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        settings = {name: str(value) for name, value in asdict(config).items()}
        config.json.write_text(json.dumps({"settings": settings, "rows": figures}, indent=1))


main = partial(run_tool, BenchmarkConfig, measure_all, __doc__)

if __name__ == "__main__":
    sys.exit(main())
