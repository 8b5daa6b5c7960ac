"""Samples of whole documents, packed by best fit (``--sample-order best-fit``)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import (
    BlendedDataset,
    CorpusDataset,
    Dataset,
    DocumentRanges,
    Sample,
    SampleSettings,
    describe_order,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import Arrays, load_or_build
from megatron.data.packed_dataset import PackedOrder, PackingStatistics, build_packed_order
from megatron.data.sample_order import SPLIT_NAMES
from megatron.errors import DataError


class PackedDataset(CorpusDataset):
    """Samples of ``seq_length`` tokens from one split (0 train, 1 validation, 2 test) of one corpus: documents, and
    pieces of those that are longer than a sample, filled up with end-of-document tokens.

    The loss is masked where the label is in another document or fills up. All samples of the epochs that
    ``num_samples`` needs are accessible. Raises :class:`DataError` if samples are requested of a split without tokens.
    """

    def __init__(
        self, corpus: IndexedDataset, split_index: int, num_samples: int | None, settings: SampleSettings
    ) -> None:
        super().__init__(corpus, split_index, num_samples, settings)
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

        def build() -> Arrays:
            corpus.check_sequences()
            return build_packed_order(
                corpus.sequence_lengths,
                self.sequences,
                seq_length=settings.seq_length,
                num_samples=num_samples,
                seed=settings.seed,
            )._asdict()

        shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys(PackedOrder._fields, (None,))
        self.order = PackedOrder(
            **load_or_build(
                settings.cache_directory,
                self.description,
                shapes=shapes,
                newer_than=corpus.modification_time,
                build=build,
            )
        )

    @property
    def statistics(self) -> PackingStatistics:
        return PackingStatistics(*self.order.statistics[:].tolist())

    @property
    def num_epochs(self) -> int:
        return self.statistics.num_epochs

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        row, order = int(self.order.shuffle_index[index]), self.order
        begin, end = order.sample_starts[row : row + 2].tolist()
        lengths = self._piece_lengths(np.arange(begin, end))
        offsets = order.offsets[begin:end].tolist()
        pieces = zip(order.documents[begin:end].tolist(), offsets, lengths.tolist())
        text = np.full(self._seq_length + 1, self._padding, dtype=np.int64)
        ends = np.cumsum(lengths)
        np.concatenate(self.corpus.ranges(list(pieces)), out=text[: ends[-1]], casting="unsafe")
        return packed_sample(text, ends, self._masked_token, self._document_end is not None)

    def document_ranges(self, samples: npt.NDArray[np.int64]) -> DocumentRanges:
        rows = self.order.shuffle_index[samples].astype(np.int64)
        begin, end = self.order.sample_starts[rows], self.order.sample_starts[rows + 1]
        counts = end - begin
        positions = np.repeat(np.arange(len(rows)), counts)
        pieces = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts) + begin[positions]
        first = self.order.offsets[pieces].astype(np.int64)
        return DocumentRanges(positions, self.order.documents[pieces], first, first + self._piece_lengths(pieces))

    def _piece_lengths(self, pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        left = self.corpus.sequence_lengths[self.order.documents[pieces]] - self.order.offsets[pieces]
        return np.minimum(left, self._seq_length + 1).astype(np.int64)

    def describe(self) -> str:
        """What packing did, for the log."""
        found = self.statistics
        tokens = found.num_samples * (self._seq_length + 1)
        return (
            f"{self.corpus.prefix} ({self.description['index_split']}): {found.num_documents:,} documents packed in "
            f"{found.num_samples:,} samples an epoch; {found.num_cut:,} documents are longer than a sample and cut "
            f"(concatenation cuts {found.num_cut_by_concatenation:,}); "
            f"{found.num_padded / max(tokens, 1):.2%} of the tokens are padding"
        )


def describe_packing(dataset: Dataset | None) -> list[str]:
    """What packing did to each corpus; empty if ``dataset`` is not packed."""
    children = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return [child.describe() for child in children if isinstance(child, PackedDataset)]


def packed_sample(
    text: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], masked_token: int | None, marks_documents: bool
) -> Sample:
    """A sample from its s + 1 tokens, whose pieces end at ``ends``; padding follows the last."""
    tokens, length = text[:-1], len(text) - 1
    loss_mask = np.ones(length, dtype=np.float32)
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
