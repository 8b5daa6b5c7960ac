"""How the data of a run grows: the order of a corpus, what a rank needs of it, and blends of many corpora.

The corpora are made by formula: the index has the length of every document, and byte offsets and tokens are holes of
sparse files, which read as zeros. An order is built as rank 0 builds it: checked, computed, stored and read again. What
a rank needs is measured in a fresh process that opens the corpus, finds the order in the cache, and reads one
microbatch. Memory that is proportional to documents may lie in mapped files, which the processes of a machine share; so
private memory is a curve of its own. Curves of benchmarks/scaling.py.
"""

import os
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lib.scaling_curve import Curve, Point, in_fresh_process, memory
from megatron.config.data import DataConfig
from megatron.data.dataset_builder import build_datasets
from megatron.data.gpt_dataset import Dataset
from megatron.data.indexed_dataset import _CODE_OF_DTYPE, _HEADER, _MAGIC, _VERSION, token_dtype
from megatron.data.loader import build_loader
from megatron.data.sample_order import blend_order, normalize

_VOCAB_SIZE = 32_000
_SEQ_LENGTH = 8192
_PERIOD = 1_000_003  # documents after which lengths repeat
_MEAN_LENGTH = 512
_LAST_LENGTH = 1024


def curves(largest: bool) -> list[Curve]:
    """All curves; without ``largest`` in seconds."""
    documents = (10**6, 10**7, 10**8, 10**9) if largest else (10**4, 10**5, 10**6)
    corpora = (10, 100, 1000) if largest else (2, 8, 32)
    samples = (10**5, 10**6, 10**7) if largest else (10**4, 10**5, 10**6)
    return [
        *corpus_curves(documents),
        *blend_curves(corpora, 100_000 if largest else 10_000),
        Curve("order of a blend of 100 corpora", "samples", tuple(map(blend_order_point, samples)), "linear"),
    ]


class Cost(NamedTuple):
    """What a task took."""

    seconds: float
    private: int
    """Bytes of memory of the process alone: the peak of what is allocated, or what it keeps."""
    mapped: int = 0
    """Bytes of files that it has mapped and read."""


# --- one corpus ----------------------------------------------------------------------------------------------


def corpus_curves(sizes: Sequence[int]) -> list[Curve]:
    """Building the order of corpora of these numbers of documents, and opening them on any rank afterwards."""
    built, opened = [], []
    for documents in sizes:
        with tempfile.TemporaryDirectory() as directory:
            prefix = write_corpus(Path(directory) / "corpus", documents)
            built.append(in_fresh_process(build_order, prefix))
            opened.append(in_fresh_process(first_microbatch, [prefix], None))
    names = ("order of documents, built by one rank", "first microbatch of a rank", "files mapped by a rank")
    return [
        Curve(names[0], "documents", _points(sizes, built), "linear, once"),
        Curve(names[1], "documents", _points(sizes, opened), "memory flat, seconds of reading the order"),
        Curve(names[2], "documents", _points(sizes, opened, mapped=True), "linear, shared by the ranks of a machine"),
    ]


def _points(sizes: Sequence[int], costs: Sequence[Cost], mapped: bool = False) -> tuple[Point, ...]:
    pairs = zip(sizes, costs, strict=True)
    return tuple(Point(size, cost.seconds, max(0, cost.mapped if mapped else cost.private)) for size, cost in pairs)


def write_corpus(prefix: Path, documents: int) -> str:
    """The files of a corpus of ``documents``, in which only the lengths of documents take space; returns the prefix."""
    lengths = document_lengths(min(documents, _PERIOD))
    dtype = token_dtype(_VOCAB_SIZE)
    total = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF_DTYPE[dtype], documents, documents + 1))
        for start in range(0, documents - 1, len(lengths)):
            part = lengths[: documents - 1 - start]
            file.write(part.tobytes())
            total += int(part.sum()) * dtype.itemsize
        file.write(struct.pack("<i", _LAST_LENGTH))
        # Every document but the last begins at byte 0.
        file.seek(8 * (documents - 1), 1)
        file.write(struct.pack("<q", total))
        file.seek(8 * documents, 1)
        file.write(struct.pack("<q", documents))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(total + _LAST_LENGTH * dtype.itemsize)
    return str(prefix)


def document_lengths(documents: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Tokens of each document: 1 to 1,023, half of them on average."""
    return (1 + np.arange(documents, dtype=np.int64) * 7919 % (2 * _MEAN_LENGTH - 1)).astype("<i4")


def build_order(prefix: str) -> Cost:
    """What the rank takes that builds the order and stores it, with what it allocates at the peak."""
    _warm_up()
    tracemalloc.start()  # some twenty large arrays: it costs no time
    started = time.perf_counter()
    _open([prefix], None, inspect=True)
    return Cost(time.perf_counter() - started, tracemalloc.get_traced_memory()[1])


def first_microbatch(prefixes: Sequence[str], samples: int | None, inspect: bool = False) -> Cost:
    """What a rank takes from the start to its first microbatch, and the memory that it keeps.

    Rank 0 inspects the corpora, and builds the orders that are not in the cache.
    """
    _warm_up()
    before, started = memory(), time.perf_counter()
    dataset = _open(prefixes, samples, inspect)
    _read_one(dataset)
    seconds, after = time.perf_counter() - started, memory()
    return Cost(seconds, after.private - before.private, after.mapped - before.mapped)


def _warm_up() -> None:
    """Import and allocate what the first microbatch of any corpus does."""
    with tempfile.TemporaryDirectory() as directory:
        _read_one(_open([write_corpus(Path(directory) / "corpus", 1000)], None))


def _open(prefixes: Sequence[str], samples: int | None, inspect: bool = False) -> Dataset:
    """The training data of a run; ``samples`` None: almost an epoch of the only corpus."""
    data_path = tuple(prefixes) if samples is None else tuple(word for prefix in prefixes for word in ("1", prefix))
    data = DataConfig(data_path=data_path, split="1", seq_length=_SEQ_LENGTH)
    if samples is None:
        samples = os.path.getsize(f"{prefixes[0]}.bin") // token_dtype(_VOCAB_SIZE).itemsize // _SEQ_LENGTH - 1
    dataset, _, _ = build_datasets(
        data,
        vocab_size=_VOCAB_SIZE,
        eod=_VOCAB_SIZE - 1,
        seed=1234,
        sample_counts=(samples, 0, 0),
        tokenizer_description=None,
        inspect=inspect,
    )
    assert dataset is not None
    return dataset


def _read_one(dataset: Dataset) -> None:
    loader = build_loader(
        dataset,
        vocab_size=_VOCAB_SIZE,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=0,
    )
    next(loader)


# --- blends --------------------------------------------------------------------------------------------------


def blend_curves(sizes: Sequence[int], samples: int) -> list[Curve]:
    """Building ``samples`` of blends of these numbers of corpora, and opening them on any rank afterwards."""
    built, opened = [], []
    with tempfile.TemporaryDirectory() as directory:
        documents = 2 * samples * _SEQ_LENGTH // _MEAN_LENGTH // min(sizes)
        prefixes = [write_corpus(Path(directory) / f"corpus{number}", documents) for number in range(max(sizes))]
        for corpora in sizes:
            built.append(in_fresh_process(first_microbatch, prefixes[:corpora], samples, inspect=True))
            opened.append(in_fresh_process(first_microbatch, prefixes[:corpora], samples))
    name = f"blend of {samples:,} samples, built by one rank"
    return [
        Curve(name, "corpora", _points(sizes, built), "linear, once"),
        Curve("first microbatch of a rank of a blend", "corpora", _points(sizes, opened), "linear in corpora, small"),
    ]


def blend_order_point(samples: int, corpora: int = 100) -> Point:
    """The order of a blend with unequal weights."""
    return in_fresh_process(_blend_order, samples, corpora)


def _blend_order(samples: int, corpora: int) -> Point:
    weights = normalize([1.0 + 0.1 * number for number in range(corpora)])
    tracemalloc.start()
    started = time.perf_counter()
    blend_order(weights, samples)
    return Point(samples, time.perf_counter() - started, tracemalloc.get_traced_memory()[1])
