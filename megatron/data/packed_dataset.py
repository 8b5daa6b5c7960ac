"""Samples of whole documents, packed by best fit (``--sample-order best-fit``).

Source: "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). A document that fits in a sample is never cut.
A longer one is cut into pieces of a whole sample and a rest, which share a token, as consecutive samples do: the label
of a piece's last input is the first token of the next piece. All pieces are then packed by best-fit decreasing: the
longest first, each into the sample with the least space that suffices.
"""

# Documents A (7 tokens), B (2), C (3) and D (12) in samples of 8 + 1 tokens, whose last token is only a label:
#
#   cut    D = D0 D1 D2 D3 D4 D5 D6 D7 D8 | D8 D9 D10 D11     the pieces share D8
#   pack   |  D0 ... D8  |  A0 ... A6 B0 B1  |  D8 ... D11 C0 C1 C2 pad pad  |

from bisect import bisect_left, insort
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import (
    CorpusDataset,
    Dataset,
    DocumentRanges,
    Sample,
    SampleSettings,
    corpus_datasets,
    describe_order,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_order import SPLIT_NAMES, IndexArray
from megatron.errors import DataError

Integers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Parts of documents that are packed as a whole, in the order of the corpus."""

    # [p] sequence number in the corpus
    documents: Integers
    # [p] first token in the document
    offsets: Integers
    # [p] number of tokens, at most those of a sample
    lengths: Integers


class PackedOrder(NamedTuple):
    """The index arrays of one split of one corpus, for n samples and p pieces of all epochs."""

    # [p] int32: sequence numbers, in the order of the samples
    documents: IndexArray
    # [p] int32: first token of each piece in its document
    offsets: IndexArray
    # [n + 1] int64: the first piece of every sample
    sample_starts: IndexArray
    # [n] uint32: row of sample_starts where sample i starts
    shuffle_index: IndexArray
    # [6] int64: the fields of PackingStatistics
    statistics: IndexArray


class PackingStatistics(NamedTuple):
    """Counts of the packing of a split; all but the number of epochs are of one epoch."""

    num_epochs: int
    num_samples: int
    num_documents: int  # with tokens
    num_cut: int  # longer than a sample
    num_cut_by_concatenation: int  # cut if documents were concatenated in the order of the corpus
    num_padded: int  # tokens that fill up samples


def cut_documents(lengths: Integers, seq_length: int, first: int = 0) -> Pieces:
    """The pieces of documents with ``lengths`` [d], which are numbered from ``first``; empty documents have none.

    Samples have ``seq_length + 1`` tokens.
    """
    # A piece begins at every multiple of the sequence length that has a token after it.
    counts = np.where(lengths > 0, np.maximum(1, -(-(lengths - 1) // seq_length)), 0)
    documents = np.repeat(np.arange(len(lengths)), counts)
    ends = np.cumsum(counts)
    offsets = (np.arange(len(documents)) - (ends - counts)[documents]) * seq_length
    return Pieces(documents + first, offsets, np.minimum(lengths[documents] - offsets, seq_length + 1))


class _Bins:
    """Bins (samples) with space left, by space, so that the best fit is a search in the sorted spaces."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self._by_space: dict[int, deque[Integers]] = {}
        self._spaces: list[int] = []

    def take(self, length: int, num_items: int) -> tuple[int, Integers]:
        """The space of the fullest bins that hold ``length``, and as many of these bins as ``num_items`` items fill,
        each with as many as it holds; new bins if no bin has the space."""
        at = bisect_left(self._spaces, length)
        if at == len(self._spaces):  # no bin has the space
            needed = -(-num_items // (self.capacity // length))
            self.count += needed
            return self.capacity, np.arange(self.count - needed, self.count)
        space = self._spaces[at]
        group, needed, parts = self._by_space[space], -(-num_items // (space // length)), []
        while needed and group:
            part = group.popleft()
            if len(part) > needed:
                group.appendleft(part[needed:])
                part = part[:needed]
            parts.append(part)
            needed -= len(part)
        if not group:
            del self._by_space[space], self._spaces[at]
        return space, np.concatenate(parts)

    def put(self, space: int, bins: Integers) -> None:
        if len(bins) == 0 or space == 0:
            return
        if space not in self._by_space:
            self._by_space[space] = deque()
            insort(self._spaces, space)
        self._by_space[space].append(bins)


def best_fit_decreasing(lengths: Integers, capacity: int) -> tuple[Integers, int]:
    """The bin of each item [n], and the number of bins; items have ``lengths`` [n] of 1 to ``capacity``.

    All items of a length at once: a bin that is the best fit of one stays the best fit of the next until it is too
    full, so bins of one space take as many items each as they hold. Steps in Python are of the order of the distinct
    lengths, and arrays do the rest: O(n log n + capacity log capacity).
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    starts = np.flatnonzero(np.diff(sorted_lengths, prepend=0))
    bin_of, bins = np.empty(len(lengths), dtype=np.int64), _Bins(capacity)
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(lengths)]):
        length, items = int(sorted_lengths[start]), order[start:end]
        while len(items):
            # Each taken bin holds ``each`` more items of this length; the last one may get fewer.
            space, taken = bins.take(length, len(items))
            each = space // length
            placed = min(len(items), each * len(taken))
            bin_of[items[:placed]] = np.repeat(taken, each)[:placed]
            full, rest = divmod(placed, each)
            bins.put(space - each * length, taken[:full])
            bins.put(space - rest * length, taken[full:])
            items = items[placed:]
    return bin_of, bins.count


def build_packed_order(
    sequence_lengths: npt.NDArray[np.int32],
    sequences: tuple[int, int],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> PackedOrder:
    """The order of at least ``num_samples`` samples (None: one epoch) of the sequences [first, end) of a corpus with
    ``sequence_lengths`` [S].

    Every epoch is shuffled and packed by itself, so a longer order begins with the shorter one. Which of several pieces
    of one length share a sample, and their order in it, differ by epoch; the number of samples does not.
    """
    first, end = sequences
    lengths = sequence_lengths[first:end].astype(np.int64)
    pieces = cut_documents(lengths, seq_length, first)
    # One generator for all shuffles, which continue its state.
    generator = np.random.RandomState(seed)
    orders: list[Integers] = []  # of each epoch: pieces in the order of the samples, [p]
    counts: list[Integers] = []  # pieces of each sample, [n]
    rows: list[Integers] = []  # samples in the order of training, [n]
    per_epoch = 0
    while not orders or (num_samples or 0) > len(orders) * per_epoch:
        shuffled = generator.permutation(len(pieces.lengths))
        samples, per_epoch = best_fit_decreasing(pieces.lengths[shuffled], seq_length + 1)
        rows.append(generator.permutation(per_epoch) + len(orders) * per_epoch)
        orders.append(shuffled[np.argsort(samples, kind="stable")])
        counts.append(np.bincount(samples, minlength=per_epoch))
        if per_epoch == 0:
            break
    chosen = np.concatenate(orders)
    # A concatenation cuts a document that begins in one sample and ends after its last token.
    ends = np.cumsum(lengths)
    cut_by_concatenation = ends - 1 > ((ends - lengths) // seq_length + 1) * seq_length
    statistics = PackingStatistics(
        len(orders),
        per_epoch,
        int((lengths > 0).sum()),
        int((lengths > seq_length + 1).sum()),
        int(cut_by_concatenation.sum()),
        per_epoch * (seq_length + 1) - int(pieces.lengths.sum()),
    )
    return PackedOrder(
        pieces.documents[chosen].astype(np.int32),
        pieces.offsets[chosen].astype(np.int32),
        np.concatenate(([0], np.cumsum(np.concatenate(counts)))),
        np.concatenate(rows).astype(np.uint32),
        np.array(statistics, dtype=np.int64),
    )


class PackedDataset(CorpusDataset):
    """Samples of ``seq_length`` tokens from one split (0 train, 1 validation, 2 test) of one corpus: documents, and
    pieces of those that are longer than a sample, filled up with end-of-document tokens.

    The loss is masked where the label is in another document or fills up. All samples of the epochs that
    ``num_samples`` needs are accessible. Raises :class:`DataError` if samples are requested of a split without tokens.
    """

    def __init__(
        self, corpus: IndexedDataset, split_index: int, num_samples: int | None, settings: SampleSettings
    ) -> None:
        super().__init__(corpus, split_index, settings)
        assert settings.padding is not None
        self._padding, self._seq_length = settings.padding, settings.seq_length
        lengths = corpus.sequence_lengths[slice(*self.sequences)]
        if num_samples and not lengths.any():
            raise DataError(
                f"The {SPLIT_NAMES[split_index]} split of {corpus.prefix} has no tokens: give it more data, or ask for "
                "no samples of this split."
            )
        # The sizes of the arrays follow from the lengths of all documents, so a replaced corpus is not known by them.
        kind = {
            "class": "PackedDataset",
            "sample_order": "best-fit",
            "num_sequences": len(lengths),
            "num_tokens": int(lengths.sum(dtype=np.int64)),
        }
        self.description = describe_order(corpus, split_index, num_samples or None, settings, kind)
        shapes = dict.fromkeys(PackedOrder._fields, (None,))
        build = partial(build_packed_order, num_samples=num_samples)
        self.order = PackedOrder(**self._load_order(settings, shapes, build))
        self.statistics = PackingStatistics(*self.order.statistics[:].tolist())
        self.num_epochs = self.statistics.num_epochs

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        row, order = int(self.order.shuffle_index[index]), self.order
        begin, end = order.sample_starts[row : row + 2].tolist()
        lengths = self._piece_lengths(np.arange(begin, end))
        offsets = order.offsets[begin:end].tolist()
        pieces = zip(order.documents[begin:end].tolist(), offsets, lengths.tolist())
        text = np.full(self._seq_length + 1, self._padding, dtype=np.int64)  # [s + 1]
        ends = np.cumsum(lengths)
        np.concatenate(self.corpus.ranges(list(pieces)), out=text[: ends[-1]], casting="unsafe")
        return packed_sample(text, ends, self._masked_token, self._document_end is not None)

    def document_ranges(self, samples: npt.NDArray[np.int64]) -> DocumentRanges:
        rows = self.order.shuffle_index[samples].astype(np.int64)
        begin, end = self.order.sample_starts[rows], self.order.sample_starts[rows + 1]
        counts = end - begin  # pieces of each sample
        positions = np.repeat(np.arange(len(rows)), counts)  # [r], one for each piece
        pieces = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts) + begin[positions]
        first = self.order.offsets[pieces].astype(np.int64)
        return DocumentRanges(positions, self.order.documents[pieces], first, first + self._piece_lengths(pieces))

    def _piece_lengths(self, pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # The rest of the document, up to a whole sample: lengths need not be stored.
        left = self.corpus.sequence_lengths.take(self.order.documents[pieces]) - self.order.offsets[pieces]
        return np.minimum(left, self._seq_length + 1).astype(np.int64)

    def describe(self) -> str:
        """The counts of the packing, as a line of the log."""
        found = self.statistics
        tokens = found.num_samples * (self._seq_length + 1)
        return (
            f"{self.corpus.prefix} ({self.description['index_split']}): {found.num_documents:,} documents packed in "
            f"{found.num_samples:,} samples an epoch; {found.num_cut:,} documents are longer than a sample and cut "
            f"(concatenation cuts {found.num_cut_by_concatenation:,}); "
            f"{found.num_padded / max(tokens, 1):.2%} of the tokens are padding"
        )


def describe_packing(dataset: Dataset | None) -> list[str]:
    """A line for each packed corpus; empty if ``dataset`` is not packed."""
    return [child.describe() for child in corpus_datasets(dataset) if isinstance(child, PackedDataset)]


def packed_sample(
    text: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], masked_token: int | None, marks_documents: bool
) -> Sample:
    """A sample from its s + 1 tokens, whose pieces end at ``ends``; padding follows the last."""
    tokens, length = text[:-1], len(text) - 1
    loss_mask = np.ones(length, dtype=np.float32)  # [s]
    # The label of a piece's last token is in the next piece; behind the last piece all is padding.
    loss_mask[ends[ends <= length] - 1] = 0.0
    loss_mask[ends[-1] :] = 0.0
    if masked_token is not None:
        loss_mask[tokens == masked_token] = 0.0
    sample: dict[str, npt.NDArray[Any]] = {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask}
    if marks_documents:
        starts = np.zeros(length, dtype=np.bool_)
        starts[0] = True
        starts[ends[ends < length]] = True
        sample["document_starts"] = starts
    return sample
