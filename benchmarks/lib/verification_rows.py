"""What it costs to know that data are what was written: digests of a corpus and of a cached sample order.

Processor time of one core, which other processes of the machine hardly change; files come from the page cache. Rows of
benchmarks/benchmark_data.py.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.lib.data_rows import Row
from megatron.config.data import DataConfig
from megatron.data.corpus_digests import BlockComparison, SampleRange, Share, check_indexes
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.digests import new_digests
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import load_or_build
from megatron.data.sample_order import IndexArray

_SEQ_LENGTH = 8192
_VOCAB_SIZE = 128_256
_WRITE_BYTES = 1 << 21  # what preprocessing writes at a time


def verification_rows(directory: Path, megabytes: int = 512) -> Iterator[Row]:
    """Speed of each comparison, and the share of a core that the thread beside training takes at its default rate."""
    digested = megabytes * 10**6 // _WRITE_BYTES * _WRITE_BYTES
    seconds = _processor_seconds(lambda: _digest(digested))
    yield Row("digests of a corpus while it is written", "GB/s", digested / seconds / 1e9)
    yield from _comparison_rows(_write_corpus(directory / "verification", megabytes))
    order = {"order": np.arange(megabytes * 10**6 // 4, dtype=np.int32)}
    description, shapes = {"class": "Benchmark", "split": "train"}, {"order": order["order"].shape}

    def load() -> IndexArray:
        return load_or_build(str(directory), description, shapes=shapes, newer_than=0.0, build=lambda: order)["order"]

    load()
    yield Row(f"a cached sample order of {megabytes} MB, opened", "ms", _processor_seconds(load) * 1e3)
    cached = load()
    seconds = _processor_seconds(lambda: cached[:])
    yield Row("blocks of a cached sample order, mapped and compared", "GB/s", order["order"].nbytes / seconds / 1e9)


def _digest(num_bytes: int) -> None:
    content, digester = bytes(_WRITE_BYTES), new_digests()
    for _ in range(num_bytes // _WRITE_BYTES):
        digester.update(content)


def _comparison_rows(prefix: str) -> Iterator[Row]:
    dataset = GPTDataset(IndexedDataset(prefix), 0, None, SampleSettings(_SEQ_LENGTH, 1, "1"))
    wanted = SampleRange("train", dataset, 0, len(dataset), np.arange)
    comparison = BlockComparison(check_indexes([prefix], None, Share()), Share())
    seconds = _processor_seconds(lambda: list(comparison.compare(wanted)))
    arithmetic = _processor_seconds(lambda: list(comparison.compare(wanted)))  # nothing is left to compare
    bytes_per_s = dataset.corpus.stored_bytes / (seconds - arithmetic)
    yield Row("blocks of tokens, read and compared", "GB/s", bytes_per_s / 1e9)
    yield Row("finding the blocks of a sample of 8,192 tokens", "ms", arithmetic / len(dataset) * 1e3)
    rate = DataConfig().data_verification_rate
    yield Row(f"share of a core at {rate:.0f} MB/s", "%", 100 * rate * 1e6 / bytes_per_s)


def _processor_seconds(task: Callable[[], object]) -> float:
    started = time.process_time()
    task()
    return time.process_time() - started


def _write_corpus(prefix: Path, megabytes: int) -> str:
    """Tokens of four bytes in documents of 1,025 tokens on average."""
    generator = np.random.default_rng(2)
    with IndexedDatasetWriter(str(prefix), _VOCAB_SIZE) as writer:
        for _ in range(max(megabytes // 4, 1)):
            lengths = np.maximum(generator.lognormal(6.3, 1.12, size=1000), 1).astype(np.int32)
            writer.add_documents(generator.integers(_VOCAB_SIZE, size=int(lengths.sum()), dtype=np.int32), lengths)
    return str(prefix)
