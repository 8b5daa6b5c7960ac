"""The sample order of a corpus, equal to Megatron-LM's: pure functions over NumPy arrays.

A corpus is a list of token sequences. Its split (train, validation or test) is a range of them. The *document index*
lists the split's sequences for all epochs, shuffled; concatenated they form one stream of tokens. The *sample index*
cuts the stream every ``seq_length`` tokens. The *shuffle index* maps sample i to a row of the sample index. A blend
then maps each sample to a corpus.
"""

# Four sequences of 5, 3, 2 and 6 tokens, one epoch, --seq-length 4:
#
#   document index     2   0         3           1
#   stream             a a b b b b b c c c c c c d d d
#   sample index       ^       ^       ^       ^          rows (0, 0), (1, 2), (2, 1), (2, 5)
#   sample of row 1            b b b c c                  5 tokens: 4 inputs, and their labels one place on
#   shuffle index      e.g. 1 0 2: sample 0 is row 1

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
SplitMatrix = list[tuple[float, float] | None]

# If less than this share of the last epoch is needed, it is shuffled separately, so that its few samples do not mix
# with the earlier epochs.
_LAST_EPOCH_APART_BELOW = 0.80

_BLEND_SEGMENT = 2048  # sequential steps of the blend order
_MAX_BLEND_LANES = 4096  # parallel segments ...
_MAX_BLEND_STATES = 1 << 20  # ... but at most this many lanes x corpora

Weights = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class EpochPlan(NamedTuple):
    """Number of epochs for a number of samples."""

    num_epochs: int
    num_samples: int  # all whole samples of these epochs; at least the requested number
    samples_before_last_epoch: int
    last_epoch_apart: bool  # whether the last epoch is shuffled separately, after the others


class IndexArray(Protocol):
    """An array of an order: in memory, or in a cache whose blocks are verified when they are first read."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice | npt.NDArray[np.int64], /) -> Any:
        """The element, or the NumPy array of these rows."""


class SampleOrder(NamedTuple):
    """The three index arrays of one split of one corpus, for n samples."""

    # [epochs x sequences] int32: sequence numbers
    document_index: IndexArray
    # [n + 1, 2]: position in the document index, and token offset there, of the stream's token k x s
    sample_index: IndexArray
    # [n]: row of the sample index where sample i starts
    shuffle_index: IndexArray


def parse_split(split: str) -> SplitMatrix:
    """The part of a corpus for train, validation and test: (start, end) in 0..1, None for an empty one.

    ``969, 30, 1`` gives (0, .969), (.969, .999), (.999, 1). Missing weights are 0. Raises :class:`ConfigError` for
    anything but one to three non-negative numbers.
    """
    # Some recipes quote it twice, '"--split \'99,1,0\'"'; Megatron-LM reads only the digits.
    parts = re.split(r"[\s,;:/]+", split.strip(" '\""))
    weights = [float(part) for part in parts if re.fullmatch(r"\d+\.?\d*|\.\d+", part)]
    if len(weights) != len(parts) or len(weights) > 3 or sum(weights) <= 0:
        raise ConfigError(
            f"--split {split!r} must be one to three weights, not all of them zero, such as '969, 30, 1'."
        )
    shares = normalize(weights + [0.0] * (3 - len(weights)))
    matrix: SplitMatrix = []
    # The first start is the integer 0, because this matrix is part of a cache key.
    start: float = 0
    for share in shares:
        end = start + share
        matrix.append((start, end) if end > start else None)
        start = end
    return matrix


def normalize(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return [float(share) for share in array / np.sum(array)]


def split_range(bounds: tuple[float, float] | None, num_sequences: int) -> tuple[int, int]:
    """The sequences [first, end) of a split with these bounds in a corpus of ``num_sequences``."""
    if bounds is None:
        return 0, 0
    return round(bounds[0] * num_sequences), round(bounds[1] * num_sequences)


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> EpochPlan:
    """The fewest epochs that hold ``num_samples`` samples (None: exactly one epoch).

    A sample needs one token more than ``seq_length``, shared with its neighbour.
    """
    epochs = 1
    if num_samples is not None:
        epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)
    total = max(0, (epochs * tokens_per_epoch - 1) // seq_length)
    if epochs == 1 or num_samples is None:
        return EpochPlan(epochs, total, total, False)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    apart = num_samples - before_last < int(_LAST_EPOCH_APART_BELOW * per_epoch)
    return EpochPlan(epochs, total, before_last, apart)


def build_sample_order(
    sequence_lengths: npt.NDArray[np.int32],
    sequences: tuple[int, int],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extendable: bool = False,
) -> SampleOrder:
    """The order of at least ``num_samples`` samples (None: one epoch) of the sequences [first, end) of a corpus with
    ``sequence_lengths`` [S].

    With ``extendable`` every epoch is shuffled separately, so that a longer order begins with the shorter one. The
    first epoch is Megatron-LM's for a run of one epoch. A sample across two epochs belongs to the later one.
    """
    first, end = sequences
    per_epoch = end - first
    sequence_lengths = np.require(sequence_lengths, requirements="A")  # unaligned gathers are slow
    tokens_per_epoch = int(sequence_lengths[first:end].sum(dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, seq_length, num_samples)
    # One generator for all shuffles, which continue its state.
    generator = np.random.RandomState(seed)
    is_long = plan.num_samples >= np.iinfo(np.uint32).max - 1
    shuffled = np.arange(plan.num_samples, dtype=np.int64 if is_long else np.uint32)
    if extendable:
        documents = np.empty(plan.num_epochs * per_epoch, dtype=np.int32)
        done = 0
        for epoch in range(plan.num_epochs):
            documents[epoch * per_epoch :][:per_epoch] = build_document_index(sequences, 1, False, generator)
            # Samples that end in this epoch; the one across its end belongs to the next epoch.
            complete = max(0, ((epoch + 1) * tokens_per_epoch - 1) // seq_length)
            generator.shuffle(shuffled[done:complete])
            done = complete
    else:
        documents = build_document_index(sequences, plan.num_epochs, plan.last_epoch_apart, generator)
        first_part = plan.samples_before_last_epoch if plan.last_epoch_apart else plan.num_samples
        generator.shuffle(shuffled[:first_part])
        generator.shuffle(shuffled[first_part:])
    samples = build_sample_index(sequence_lengths, documents, seq_length, plan.num_samples)
    return SampleOrder(documents, samples, shuffled)


def build_document_index(
    sequences: tuple[int, int], num_epochs: int, last_epoch_apart: bool, generator: np.random.RandomState
) -> npt.NDArray[np.int32]:
    """The sequences [first, end), once per epoch, shuffled together; or the last epoch separately."""
    # Without a second array of this size: a corpus of a billion documents needs 4 GB for each.
    documents = np.arange(*sequences, dtype=np.int32)
    apart = len(documents) if last_epoch_apart and num_epochs > 1 else 0
    if num_epochs > 1:
        documents = np.tile(documents, num_epochs)
    generator.shuffle(documents[: len(documents) - apart])
    if apart:
        generator.shuffle(documents[-apart:])
    return documents


def build_sample_index(
    sequence_lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    documents_at_once: int = 1 << 22,
) -> npt.NDArray[Any]:
    """Position of token ``k * seq_length`` in the stream, for k in 0..num_samples: [num_samples + 1, 2].

    int32, or int64 if the document index is too long for it. ``documents_at_once`` limits what is in memory.
    """
    dtype = np.int64 if len(document_index) > np.iinfo(np.int32).max else np.int32
    rows = np.zeros((num_samples + 1, 2), dtype=dtype)
    # Row 0 stays (0, 0) even when the first document is empty; the others pass over empty documents.
    done, tokens = 1, 0
    for start in range(0, len(document_index), documents_at_once):
        lengths = sequence_lengths[document_index[start : start + documents_at_once]]
        ends = np.cumsum(lengths, dtype=np.int64) + tokens
        tokens = int(ends[-1])
        complete = max(done, min(num_samples, (tokens - 1) // seq_length) + 1)
        targets = np.arange(done, complete, dtype=np.int64) * seq_length
        # The first document that ends behind the token holds it.
        positions = np.searchsorted(ends, targets, side="right")
        rows[done:complete, 0] = start + positions
        rows[done:complete, 1] = targets - (ends[positions] - lengths[positions])
        done = complete
    return rows


def blend_targets(weights: Sequence[float], size: int, surplus: float) -> tuple[list[int], list[int]]:
    """Samples that each corpus of a blend serves, and the number to build, larger by ``surplus``.

    ``weights`` are normalised. Targets are rounded up, so their sum may exceed ``size`` by less than one per corpus.
    """
    targets = [math.ceil(size * weight) for weight in weights]
    return targets, [math.ceil(target * (1 + surplus)) for target in targets]


def blend_order(weights: Sequence[float], size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """The corpus of each of ``size`` samples, and the sample in it: [size] each.

    Step k takes the corpus with the largest weight * max(k, 1) - samples so far; ties take the lowest index.
    """
    return _greedy_order(np.array(weights, dtype=np.float64), size, np.inf)


def exhaustive_blend_order(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Like :func:`blend_order`, with weights proportional to ``sizes``, until every sample was used once."""
    limits = np.array(sizes, dtype=np.float64)
    return _greedy_order(limits / max(float(sum(sizes)), 1.0), sum(sizes), limits)


def _greedy_order(weights: Weights, size: int, limits: Weights | float) -> tuple[npt.NDArray[np.int16], Integers]:
    """The greedy order, computed in segments in parallel; no corpus serves more samples than its limit.

    Each step depends on the previous one, but the influence of the past is short. The order is divided into segments
    that start from estimated counts; each segment whose estimate differs from the end of its predecessor is computed
    again, until none differs. The result equals the sequential order: the first segment is right, and each one is
    consistent with its predecessor.
    """
    corpora = np.zeros(size, dtype=np.int16)
    corpus_samples = np.zeros(size, dtype=np.int64)
    counts = np.zeros(len(weights))
    segment = max(1, min(_BLEND_SEGMENT, size))
    # A block is as many segments as are walked at a time: lanes of arrays [lanes, corpora].
    block = segment * max(1, min(_MAX_BLEND_LANES, _MAX_BLEND_STATES // len(weights)))
    for begin in range(0, size, block):
        end = min(begin + block, size)
        starts = np.arange(begin, end, segment)
        picks, served, counts = _walk_until_consistent(weights, limits, starts, segment, counts)
        corpora[begin:end] = picks.T.reshape(-1)[: end - begin]
        corpus_samples[begin:end] = served.T.reshape(-1)[: end - begin]
    return corpora, corpus_samples


def _walk_until_consistent(
    weights: Weights, limits: Weights | float, starts: Integers, segment: int, first_counts: Weights
) -> tuple[npt.NDArray[np.int16], Integers, Weights]:
    """Picks and samples served, [segment, starts] each, and the counts [corpora] after the last segment."""
    picks = np.empty((segment, len(starts)), dtype=np.int16)
    served = np.empty((segment, len(starts)), dtype=np.int64)
    # Estimated counts [starts, corpora]: shares rounded down, and the remainder to the largest fractions.
    shares = starts[:, None] * weights
    counts = np.floor(shares)
    rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1, kind="stable")
    counts += rank < (starts - counts.sum(axis=1))[:, None]
    counts[0] = first_counts
    ends = np.empty_like(counts)
    stale = np.arange(len(starts))
    while len(stale):
        walked, samples, ends[stale] = _walk(weights, limits, starts[stale], segment, counts[stale])
        picks[:, stale], served[:, stale] = walked, samples
        # Segments that did not start with the counts with which their predecessors ended.
        stale = 1 + np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1))
        counts[stale] = ends[stale - 1]
    return picks, served, ends[-1]


def _walk(
    weights: Weights, limits: Weights | float, starts: Integers, segment: int, counts: Weights
) -> tuple[npt.NDArray[np.int16], Integers, Weights]:
    """Picks and samples served after each start, from ``counts`` [starts, corpora]; also the last counts."""
    picks = np.empty((segment, len(starts)), dtype=np.int16)
    served = np.empty((segment, len(starts)), dtype=np.int64)
    lanes, steps = np.arange(len(starts)), starts.astype(np.float64)[:, None]
    counts, error = counts.copy(), np.empty_like(counts)
    for row in range(segment):
        # Double precision and this order of operations are part of the format: ties decide.
        np.multiply(weights, np.maximum(steps + row, 1.0), out=error)
        error -= counts
        if isinstance(limits, np.ndarray):
            error[counts >= limits] = -np.inf
        pick = error.argmax(axis=1)
        picks[row] = pick
        served[row] = counts[lanes, pick]
        counts[lanes, pick] += 1
    return picks, served, counts
