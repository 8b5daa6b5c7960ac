"""Small corpora, their datasets and microbatches, and the specification of their sample orders, token by token."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.dataset_builder import build_datasets
from megatron.data.gpt_dataset import SampleSettings
from megatron.data.loader import Microbatch, build_loader
from megatron.data.order_cache import Description

CORPUS_A = [5, 3, 7, 4, 6, 2, 8, 5, 9, 1]
CORPUS_B = [10, 4, 6]


def golden_documents(lengths: list[int], start: int = 0) -> list[list[int]]:
    """Documents that count on modulo 999 from ``start``, each ended by 999."""
    documents = []
    for length in lengths:
        documents.append([(start + place) % 999 for place in range(length - 1)] + [999])
        start += length
    return documents


def write(prefix: Path | str, documents: list[list[int]], vocab_size: int = 1000) -> str:
    with IndexedDatasetWriter(str(prefix), vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def md5(path: str) -> str:
    return hashlib.md5(Path(path).read_bytes()).hexdigest()


NULL_TOKENIZER: Description = {
    "class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText",
    "tokenizer_path": None,
    "vocab_size": "1000",
}


def settings_of(split: str = "100,0,0", cache: str | None = None, **other: Any) -> SampleSettings:
    return SampleSettings(
        seq_length=8, seed=1234, split=split, tokenizer=NULL_TOKENIZER, cache_directory=cache, **other
    )


def build(*data_path: str, counts: Any = (12, 0, 0), eod: int = 999, **flags: Any) -> Any:
    """The datasets of a run of golden corpora with such flags; of a ``data_path`` all documents are for training."""
    of_path = {"data_path": data_path, "split": "100,0,0"} if data_path else {}
    data = DataConfig(**{"seq_length": 8, **of_path, **flags})
    return build_datasets(
        data, vocab_size=eod + 1, eod=eod, seed=1234, sample_counts=counts, tokenizer_description=NULL_TOKENIZER
    )


def load(dataset: Any, **changes: Any) -> Iterator[Microbatch]:
    """Microbatches of one sample of a single rank that reads by itself, but for ``changes``."""
    place = {"consumed_samples": 0, "micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    return build_loader(dataset, **{"vocab_size": 1000, "num_workers": 0, **place, **changes})


def tokens_of(dataset: Any) -> list[list[int]]:
    return [dataset[index]["tokens"].tolist() for index in range(len(dataset))]


def stamps(directory: Path | str) -> dict[str, int]:
    """When each file of a directory was written: equal ones say that nothing was built or copied again."""
    return {path.name: path.stat().st_mtime_ns for path in Path(directory).iterdir()}


def slow_order(lengths: list[int], first: int, end: int, s: int, wanted: int | None, seed: int) -> Any:
    """The specification, token by token."""
    generator = np.random.RandomState(seed)
    tokens = sum(lengths[first:end])
    epochs = 1
    while wanted is not None and epochs * tokens < wanted * s + 1:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // s
    apart = False
    if wanted is not None and epochs > 1:
        apart = wanted - before_last < int(0.80 * ((tokens - 1) // s))
    documents: list[int] = []
    for part in (epochs - 1, 1) if apart else (epochs,):
        shuffled = np.array(list(range(first, end)) * part)
        generator.shuffle(shuffled)
        documents += shuffled.tolist()
    stream = [(place, offset) for place, d in enumerate(documents) for offset in range(lengths[d])]
    count = (len(stream) - 1) // s
    rows = [(0, 0)] + [stream[k * s] for k in range(1, count + 1)]
    order: list[int] = []
    for start, stop in ((0, before_last), (before_last, count)) if apart else ((0, count),):
        shuffled = np.arange(start, stop)
        generator.shuffle(shuffled)
        order += shuffled.tolist()
    return documents, rows, order


def slow_blend(weights: list[float], size: int, limits: list[int] | None = None) -> list[int]:
    counts = [0] * len(weights)
    order = []
    for step in range(size):
        best = None
        for d in range(len(weights)):
            error = weights[d] * max(float(step), 1.0) - counts[d]
            if (limits is None or counts[d] < limits[d]) and (best is None or error > best[0]):
                best = error, d
        assert best is not None
        order.append(best[1])
        counts[best[1]] += 1
    return order


def write_corpus(prefix: Path | str, seed: int, tokens: int) -> str:
    """Documents of 0 to 3,000 random tokens."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), 60_000) as writer:
        while tokens > 0:
            size = int(generator.integers(3000)) if generator.random() < 0.9 else 0
            writer.add_document(generator.integers(60_000, size=size, dtype=np.uint16))
            tokens -= size
    return str(prefix)
