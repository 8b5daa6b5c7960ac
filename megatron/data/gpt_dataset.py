"""Datasets of training samples: one split of one corpus, a blend of several, and synthetic data.

Every dataset maps a sample index to a dict of NumPy arrays: ``tokens`` [s] int64, ``labels`` [s] int64 (the
tokens one place on), ``loss_mask`` [s] float32, and ``document_starts`` [s] bool if asked for. A sample depends on the
seed and its index alone.

The order of samples is built once and kept on disk (:mod:`megatron.data.order_cache`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import IndexedDataset, TokenRange
from megatron.data.order_cache import Arrays, Description, load_or_build
from megatron.data.sample_order import (
    SPLIT_NAMES,
    IndexArray,
    SampleOrder,
    blend_order,
    build_sample_order,
    exhaustive_blend_order,
    normalize,
    parse_split,
    plan_epochs,
    split_range,
)
from megatron.errors import DataError

Sample = dict[str, npt.NDArray[Any]]

_MOCK_NOISE = 0.1  # share of mock tokens that are random
_MOCK_STRIDES = 4


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class SampleSettings:
    """Settings that all corpora of a run share."""

    seq_length: int
    seed: int
    # Weights of train, validation and test, as in --split; None: each corpus belongs to one split.
    split: str | None
    tokenizer: Description | None = None  # part of the cache key
    cache_directory: str | None = None  # of the sample orders; None: no cache
    # The loss is masked at this input token (--eod-mask-loss: end-of-document).
    masked_token: int | None = None
    extendable: bool = False  # shuffle every epoch separately (--sample-order extendable)
    # Token that fills up samples of whole documents (--sample-order best-fit); None: documents are cut.
    padding: int | None = None
    # End-of-document token; if set, samples include document boundaries.
    document_end: int | None = None


class DocumentRanges(NamedTuple):
    """The parts of documents that some samples read; a sample has several."""

    # [r] index of the sample among the requested ones
    positions: npt.NDArray[np.int64]
    # [r] sequence number in the corpus
    documents: npt.NDArray[np.int32]
    # [r] first token in the document, and the end of the tokens
    first: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


class CorpusDataset(ABC):
    """Samples of one split of one corpus, in an order that is built once."""

    description: Description  # all parameters of the order
    num_epochs: int  # in the sample order

    def __init__(self, corpus: IndexedDataset, split_index: int, settings: SampleSettings) -> None:
        self.corpus = corpus
        self._masked_token, self._document_end = settings.masked_token, settings.document_end
        bounds = (0.0, 1.0) if settings.split is None else parse_split(settings.split)[split_index]
        # The sequences [first, end) of the split.
        self.sequences = split_range(bounds, len(corpus))

    def _load_order(
        self, settings: SampleSettings, shapes: Mapping[str, tuple[int | None, ...]], build: Callable[..., Any]
    ) -> Mapping[str, IndexArray]:
        """The arrays of the order that ``description`` describes, from the cache or else from ``build``."""
        corpus = self.corpus

        def build_arrays() -> Arrays:
            corpus.check_sequences()
            order = build(corpus.sequence_lengths, self.sequences, seq_length=settings.seq_length, seed=settings.seed)
            return dict(order._asdict())

        return load_or_build(
            settings.cache_directory,
            self.description,
            shapes=shapes,
            newer_than=corpus.modification_time,
            build=build_arrays,
        )

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def document_ranges(self, samples: npt.NDArray[np.int64]) -> DocumentRanges:
        """The tokens that ``samples`` [n] read."""


class GPTDataset(CorpusDataset):
    """Samples of ``seq_length`` tokens from one split (0 train, 1 validation, 2 test) of one corpus.

    Documents are shuffled, concatenated and cut, for as many epochs as ``num_samples`` needs (None: one epoch). All
    samples of these epochs are accessible, so the length may exceed ``num_samples``. Raises :class:`DataError` if
    samples are requested of a split that is shorter than one sample.
    """

    def __init__(
        self, corpus: IndexedDataset, split_index: int, num_samples: int | None, settings: SampleSettings
    ) -> None:
        super().__init__(corpus, split_index, settings)
        first, end = self.sequences
        tokens = int(corpus.sequence_lengths[first:end].sum(dtype=np.int64))
        if tokens <= settings.seq_length and num_samples:
            remedy = "give it more data"
            if settings.split is not None:
                remedy = f"give it a larger share in --split {settings.split!r}"
            raise DataError(
                f"The {SPLIT_NAMES[split_index]} split of {corpus.prefix} has {tokens} tokens in "
                f"{end - first} documents, but one sample needs {settings.seq_length + 1}: {remedy}, "
                "use a shorter --seq-length, or ask for no samples of this split."
            )
        plan = plan_epochs(tokens, settings.seq_length, num_samples or None)
        changes: Description = {}
        if settings.extendable:
            # A run that is extended within an epoch finds the order that it has.
            changes = {"num_samples": None, "sample_order": "extendable", "num_epochs": plan.num_epochs}
        self.description = describe_order(corpus, split_index, num_samples, settings, changes)
        self.num_epochs = plan.num_epochs
        shapes = {
            "document_index": (plan.num_epochs * (end - first),),
            "sample_index": (plan.num_samples + 1, 2),
            "shuffle_index": (plan.num_samples,),
        }
        build = partial(build_sample_order, num_samples=num_samples or None, extendable=settings.extendable)
        self.order = SampleOrder(**self._load_order(settings, shapes, build))

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.order.shuffle_index[index])
        # From a token of the first document to a token of the last one, which the next sample begins with.
        (first, offset), (last, last_offset) = self.order.sample_index[row : row + 2].tolist()
        documents = self.order.document_index[first : last + 1].tolist()
        ranges: list[TokenRange] = [(document, 0, None) for document in documents]
        ranges[-1] = (documents[-1], 0, last_offset + 1)
        ranges[0] = (documents[0], offset, last_offset + 1 - offset if first == last else None)
        text = np.concatenate(self.corpus.ranges(ranges), dtype=np.int64, casting="unsafe")  # [s + 1]
        return build_sample(text, self._masked_token, self._document_end)

    def document_ranges(self, samples: npt.NDArray[np.int64]) -> DocumentRanges:
        # The arithmetic of __getitem__, for many samples at a time.
        order = self.order
        rows = order.shuffle_index[samples].astype(np.int64)
        begin, end = order.sample_index[rows].astype(np.int64), order.sample_index[rows + 1].astype(np.int64)  # [n, 2]
        counts = end[:, 0] - begin[:, 0] + 1  # documents of each sample
        positions = np.repeat(np.arange(len(rows)), counts)  # [r]
        place = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        documents = order.document_index[begin[positions, 0] + place]
        first = np.where(place == 0, begin[positions, 1], 0)
        is_last = place == counts[positions] - 1
        stop = np.where(is_last, end[positions, 1] + 1, self.corpus.sequence_lengths[documents])
        return DocumentRanges(positions, documents, first, stop)


def describe_order(
    corpus: IndexedDataset, split_index: int, num_samples: int | None, settings: SampleSettings, changes: Description
) -> Description:
    """All parameters of a sample order, in Megatron-LM's order and spelling, with the ``changes`` of another order."""
    description: Description = {
        "class": "GPTDataset",
        "dataset_path": corpus.prefix,
        "num_samples": num_samples,
        "index_split": SPLIT_NAMES[split_index],
        "random_seed": settings.seed,
        "sequence_length": settings.seq_length,
        "split": settings.split,
        "split_matrix": None if settings.split is None else parse_split(settings.split),
        "tokenizer": settings.tokenizer,
    }
    description |= changes
    if corpus.version is not None:
        description["dataset_version"] = corpus.version
    return description


class BlendedDataset:
    """Samples from several datasets of one split, interleaved in proportion to ``weights``.

    ``size`` None uses every sample of every dataset once, with weights proportional to their lengths. Raises
    :class:`DataError` if a dataset is shorter than its part of the blend.
    """

    def __init__(
        self,
        datasets: Sequence[CorpusDataset],
        weights: Sequence[float],
        size: int | None,
        split_index: int,
        cache_directory: str | None = None,
    ) -> None:
        self.datasets = datasets
        lengths = [len(dataset) for dataset in datasets]
        self.description: Description = {
            "class": "BlendedDataset",
            "datasets": [dataset.description for dataset in datasets],
            "split": SPLIT_NAMES[split_index],
            "weights": lengths if size is None else normalize(weights),
            "size": size,
        }
        total = sum(lengths) if size is None else size
        arrays = load_or_build(
            cache_directory,
            self.description,
            shapes={"dataset_index": (total,), "dataset_sample_index": (total,)},
            newer_than=0.0,
            build=lambda: self._build_order(lengths, size),
        )
        self.dataset_index, self.dataset_sample_index = arrays["dataset_index"], arrays["dataset_sample_index"]

    def _build_order(self, lengths: list[int], size: int | None) -> Arrays:
        if size is None:
            datasets, samples = exhaustive_blend_order(lengths)
        else:
            datasets, samples = blend_order(self.description["weights"], size)
        served = np.bincount(datasets, minlength=len(lengths)).tolist()
        for description, needed, available in zip(self.description["datasets"], served, lengths, strict=True):
            if needed > available:
                raise DataError(
                    f"The blend takes {needed} samples of {description['dataset_path']}, which has "
                    f"{available}: lower its weight in --data-path."
                )
        return {"dataset_index": datasets, "dataset_sample_index": samples}

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Sample:
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]


def corpus_datasets(dataset: Dataset | None) -> Sequence[CorpusDataset]:
    """The datasets of a blend, or the dataset itself; none for synthetic data."""
    if isinstance(dataset, BlendedDataset):
        return dataset.datasets
    return [dataset] if isinstance(dataset, CorpusDataset) else []


def epochs_of(dataset: Dataset) -> dict[str, int]:
    """Epochs in the sample order of each corpus, by prefix; empty for synthetic data."""
    return {child.corpus.prefix: child.num_epochs for child in corpus_datasets(dataset)}


@dataclass(frozen=True)
class MockDataset:
    """Synthetic samples, a pure function of (seed, split, index): noisy arithmetic progressions.

    Each sample counts up modulo ``vocab_size`` from a random start with a small random stride, and about every tenth
    token is random: a model learns this in a few hundred steps, but the loss never reaches zero.
    """

    seed: int
    seq_length: int
    vocab_size: int
    size: int
    _: KW_ONLY
    split_index: int = 0
    masked_token: int | None = None
    document_end: int | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        key = np.array([self.seed, index], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, self.split_index]))
        length = self.seq_length + 1
        start, stride = random.integers(self.vocab_size), random.integers(1, _MOCK_STRIDES + 1)
        text = (start + stride * np.arange(length, dtype=np.int64)) % self.vocab_size  # [s + 1]
        noisy = random.random(length, dtype=np.float32) < _MOCK_NOISE
        text[noisy] = random.integers(self.vocab_size, size=int(noisy.sum()))
        return build_sample(text, self.masked_token, self.document_end)


def add_future_tokens(sample: Sample, depths: int) -> Sample:
    """``sample`` with the tokens of multi-token prediction: ``future_labels`` [depths, s] int64, the labels k places on
    for k from 1, and ``future_mask`` [depths, s] float32. Depth k has no loss where the token k places on has none,
    lies after the sample, or lies in another document where documents are marked."""
    labels = np.zeros((depths, len(sample["labels"])), dtype=np.int64)
    mask = np.zeros(labels.shape, dtype=np.float32)
    documents = np.cumsum(sample["document_starts"]) if "document_starts" in sample else None
    for row in range(depths):
        places = row + 1
        labels[row, :-places], mask[row, :-places] = sample["labels"][places:], sample["loss_mask"][places:]
        if documents is not None:
            mask[row, :-places] *= documents[places:] == documents[:-places]
    return {**sample, "future_labels": labels, "future_mask": mask}


def build_sample(text: npt.NDArray[np.int64], masked_token: int | None, document_end: int | None) -> Sample:
    """A sample from its s + 1 tokens."""
    tokens = text[:-1]  # [s]
    loss_mask = np.ones(len(tokens), dtype=np.float32)  # [s]
    if masked_token is not None:
        # As in Megatron-LM, at the input token: the token after the end of a document cannot be predicted.
        loss_mask[tokens == masked_token] = 0.0
    sample: Sample = {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask}
    if document_end is not None:
        # A document begins at the first token, and after each end-of-document token.
        starts = np.ones(len(tokens), dtype=np.bool_)  # [s]
        starts[1:] = tokens[:-1] == document_end
        sample["document_starts"] = starts
    return sample
