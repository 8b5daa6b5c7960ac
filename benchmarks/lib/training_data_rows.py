"""What the data of a run costs: building a sample order, reading on every rank, the loader's share of a step.

One core each. The order is built as a run builds it, without writing it; its memory is what NumPy allocates at the
peak, beside the lengths of the documents. The loader's share is the time that a training process waits for
microbatches. Reading compares tensor-parallel ranks that each read a sample with one that reads it and sends it on.
Rows of benchmarks/benchmark_data.py, apart from it because they need torch.
"""

import json
import multiprocessing
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib.data_rows import Row
from megatron.commands import pretrain_llama
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import build_loader
from megatron.data.sample_order import build_sample_order

_VOCAB_SIZE = 32_000
_SEQ_LENGTH = 8192
_MEGABYTE = 1 << 20


def order_rows(documents: int) -> Iterator[Row]:
    """Seconds and memory of building the order of one epoch, and of both kinds of order over three."""
    for name, epochs, extendable, count in (
        ("order of one epoch", 1, False, documents),
        ("order of three epochs", 3, False, documents // 4),
        ("extendable order of three epochs", 3, True, documents // 4),
    ):
        seconds, megabytes = _in_a_process(_measure_order, count, epochs, extendable)
        yield Row(f"{name}, {count:,} documents", "s", seconds, ours_peak_mb=megabytes)


def _measure_order(documents: int, epochs: int, extendable: bool) -> tuple[float, float]:
    generator = np.random.default_rng(1)
    lengths = np.maximum(generator.lognormal(6.3, 1.12, size=documents), 1).astype(np.int32)
    num_samples = epochs * int(lengths.sum(dtype=np.int64)) // _SEQ_LENGTH - 1
    tracemalloc.start()  # some twenty large arrays: it costs no time
    started = time.perf_counter()
    build_sample_order(
        lengths, (0, documents), seq_length=_SEQ_LENGTH, num_samples=num_samples, seed=1234, extendable=extendable
    )
    seconds = time.perf_counter() - started
    return seconds, tracemalloc.get_traced_memory()[1] / _MEGABYTE


def loader_rows(directory: Path, train_iters: int, num_workers: Sequence[int] = (0, 1, 2)) -> Iterator[Row]:
    """The share of a step that a small Llama waits for its data, by number of workers."""
    prefix = _write_corpus(directory / "loader")
    for workers in num_workers:
        metrics = directory / f"metrics{workers}.jsonl"
        flags = [
            *("--model", "tiny", "--seq-length", "512", "--micro-batch-size", "2", "--global-batch-size", "4"),
            *("--data-path", prefix, "--split", "1", "--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", str(_VOCAB_SIZE - 1), "--lr", "1e-3", "--device", "cpu"),
            *("--num-workers", str(workers), "--train-iters", str(train_iters), "--log-interval", "1"),
            *("--timing-log-level", "2", "--metrics-jsonl", str(metrics)),
        ]
        with redirect_stdout(StringIO()) as console:
            if pretrain_llama.main(flags):
                raise RuntimeError(f"The run with {workers} workers failed.")
        # Without the first steps, which warm up.
        waits = [float(wait) for wait in re.findall(r"batch-generator [.:]*\s*\(([\d.]+)", console.getvalue())][3:]
        steps = [json.loads(line)["iteration_time_ms"] for line in metrics.read_text().splitlines()][3:]
        if len(waits) != len(steps):
            raise RuntimeError(f"{len(waits)} waits for data in {len(steps)} steps: the lines of the run have changed.")
        yield Row(f"loader's share of a step, {workers} workers", "%", 100 * sum(waits) / sum(steps))


def reading_rows(directory: Path, samples: int = 1000) -> Iterator[Row]:
    """Milliseconds for a sample of 8,192 tokens: read, read ahead by a worker, or received from another rank."""
    prefix = _write_corpus(directory / "reading")
    yield Row("sample of 8,192 tokens, read in the process", "ms", _measure_reading(prefix, 0, samples))
    yield Row("sample of 8,192 tokens, read by one worker", "ms", _measure_reading(prefix, 1, samples))
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    store = str(directory / "store")
    ranks = [context.Process(target=_measure_broadcast, args=(rank, store, results, samples)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise RuntimeError("A rank that sends or receives samples failed; see above.")
    yield Row("sample of 8,192 tokens, sent to one rank (gloo)", "ms", results.get())


def _measure_reading(prefix: str, workers: int, samples: int) -> float:
    dataset = GPTDataset(IndexedDataset(prefix), 0, samples + 100, SampleSettings(_SEQ_LENGTH, 1, "1"))
    loader = build_loader(
        dataset,
        vocab_size=_VOCAB_SIZE,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
    )
    for _ in islice(loader, 100):
        pass
    started = time.perf_counter()
    for _ in islice(loader, samples):
        pass
    return (time.perf_counter() - started) / samples * 1e3


def _measure_broadcast(rank: int, store: str, results: Any, samples: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    text, mask = torch.zeros(1, 2, _SEQ_LENGTH, dtype=torch.int64), torch.zeros(1, _SEQ_LENGTH)
    for measured in (False, True):
        started = time.perf_counter()
        for _ in range(samples):
            dist.broadcast(text, 0)
            dist.broadcast(mask, 0)
        dist.barrier()
        if rank == 0 and measured:
            results.put((time.perf_counter() - started) / samples * 1e3)
    dist.destroy_process_group()


def _write_corpus(prefix: Path, documents: int = 10_000) -> str:
    """Random tokens in documents of 1,025 tokens on average."""
    generator = np.random.default_rng(2)
    with IndexedDatasetWriter(str(prefix), _VOCAB_SIZE) as writer:
        lengths = np.maximum(generator.lognormal(6.3, 1.12, size=documents), 1).astype(np.int32)
        writer.add_documents(generator.integers(_VOCAB_SIZE - 1, size=int(lengths.sum())), lengths)
    return str(prefix)


def _in_a_process(task: Callable[..., tuple[float, float]], *arguments: Any) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, arguments)
