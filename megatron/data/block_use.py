"""Blocks of the ``.bin`` files that samples read: arithmetic on sample orders and indexes, without reading tokens."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.corpus_digests import BLOCK_BYTES
from megatron.data.gpt_dataset import BlendedDataset, CorpusDataset, Dataset
from megatron.data.indexed_dataset import IndexedDataset

Integers = npt.NDArray[np.int64]

_BLOCK_BITS = 44  # of a number that stands for a corpus and a block


class BlockUses(NamedTuple):
    """Reads of blocks, in the order of the samples; each block once per call of :func:`block_uses`."""

    positions: Integers
    """Index of a sample among the requested ones, [uses]."""
    corpora: Integers
    """Index of the corpus in :func:`corpora_of`, [uses]."""
    blocks: Integers
    """Index of the block in its ``.bin`` file, [uses]."""


def corpora_of(dataset: Dataset) -> list[IndexedDataset]:
    """The corpora of a dataset, each once; none for synthetic data."""
    if isinstance(dataset, BlendedDataset):
        return list({child.corpus.prefix: child.corpus for child in dataset.datasets}.values())
    return [dataset.corpus] if isinstance(dataset, CorpusDataset) else []


def block_uses(dataset: Dataset, samples: Integers) -> BlockUses:
    """The blocks that ``samples`` ``[n]`` of ``dataset`` read, each at the first sample that reads it."""
    if isinstance(dataset, CorpusDataset):
        positions, blocks = _blocks_of_one(dataset, samples)
        uses = BlockUses(positions, np.zeros_like(blocks), blocks)
    elif isinstance(dataset, BlendedDataset):
        uses = _blocks_of_blend(dataset, samples)
    else:
        nothing = np.zeros(0, np.int64)
        uses = BlockUses(nothing, nothing, nothing)
    return _first_uses(uses)


def _blocks_of_blend(blend: BlendedDataset, samples: Integers) -> BlockUses:
    prefixes = [corpus.prefix for corpus in corpora_of(blend)]
    children, rows = blend.dataset_index[samples], blend.dataset_sample_index[samples].astype(np.int64)
    parts = []
    for number in np.unique(children).tolist():
        child = blend.datasets[number]
        (places,) = np.nonzero(children == number)
        positions, blocks = _blocks_of_one(child, rows[places])
        corpora = np.full(len(blocks), prefixes.index(child.corpus.prefix))
        parts.append(BlockUses(places[positions], corpora, blocks))
    return BlockUses(*(np.concatenate(arrays) for arrays in zip(*parts)))


def _blocks_of_one(dataset: CorpusDataset, samples: Integers) -> tuple[Integers, Integers]:
    """For every read of a block: the index of the sample in ``samples``, and the block."""
    positions, starts, stops = _byte_ranges(dataset, samples)
    read = stops > starts
    positions, starts, stops = positions[read], starts[read], stops[read]
    first, last = starts // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES
    counts = last - first + 1
    return np.repeat(positions, counts), np.repeat(first, counts) + _counted(counts)


def _byte_ranges(dataset: CorpusDataset, samples: Integers) -> tuple[Integers, Integers, Integers]:
    """Byte ranges in ``.bin`` of the tokens of ``samples``: for every part of a document the index of the sample in
    ``samples``, the first byte and the end."""
    positions, documents, first, stop = dataset.document_ranges(samples)
    offsets, size = dataset.corpus.byte_offsets[documents], dataset.corpus.dtype.itemsize
    return positions, offsets + first * size, offsets + stop * size


def _counted(counts: Integers) -> Integers:
    """0, 1, ... ``count - 1`` for each of ``counts``, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def _first_uses(uses: BlockUses) -> BlockUses:
    """The first use of every block, in the order of the samples."""
    order = np.argsort(uses.positions, kind="stable")
    keys = (uses.corpora << _BLOCK_BITS) + uses.blocks
    _, first = np.unique(keys[order], return_index=True)
    kept = order[np.sort(first)]
    return BlockUses(uses.positions[kept], uses.corpora[kept], uses.blocks[kept])
