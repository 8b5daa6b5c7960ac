"""Merge several .bin/.idx pairs into one."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.corpus_writer import NewCorpus, write_index
from megatron.data.digests import Writable
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError

_COPIED_TOKENS = 1 << 22
_CHUNK = 1 << 20  # numbers of an index array in memory


def merge_datasets(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Concatenate all datasets in order; returns the numbers of sequences and tokens.

    Both files appear only when complete. Memory does not depend on the size of the data. Raises :class:`DataError` for
    a damaged dataset and for different token dtypes.
    """
    with tempfile.TemporaryDirectory() as index_cache:  # of remote datasets
        datasets = [IndexedDataset(prefix, index_cache=index_cache) for prefix in prefixes]
        _check_mergeable(datasets, output)
        with NewCorpus(output) as files:
            for dataset in datasets:
                for start in range(0, dataset.num_tokens, _COPIED_TOKENS):
                    length = min(_COPIED_TOKENS, dataset.num_tokens - start)
                    files.write_tokens(dataset.tokens(start, length).tobytes())
            files.commit(lambda index: _write_index(datasets, index))
        return sum(map(len, datasets)), sum(dataset.num_tokens for dataset in datasets)


def _check_mergeable(datasets: Sequence[IndexedDataset], output: str) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{first.prefix} stores tokens as {first.dtype}, {dataset.prefix} as {dataset.dtype}: datasets of "
                "different tokenizers cannot be merged; list both in --data-path instead."
            )
        if dataset.has_modes:
            raise DataError(f"{dataset.prefix}.idx has sequence modes, which cannot be merged: remove it.")
        if os.path.abspath(dataset.prefix) == os.path.abspath(output):
            raise DataError(f"{output} is also an input: choose another --output-prefix.")


def _write_index(datasets: Sequence[IndexedDataset], index: Writable) -> None:
    bases = np.cumsum([0] + [dataset.num_tokens * dataset.dtype.itemsize for dataset in datasets])
    firsts = np.cumsum([0] + [len(dataset) for dataset in datasets])
    write_index(
        index,
        datasets[0].dtype,
        lengths=(dataset.sequence_lengths for dataset in datasets),
        offsets=(chunk + base for dataset, base in zip(datasets, bases) for chunk in _chunks(dataset.byte_offsets)),
        # The end of a dataset is the start of the next one.
        documents=chain(
            (
                chunk + first
                for dataset, first in zip(datasets, firsts)
                for chunk in _chunks(dataset.document_indices[:-1])
            ),
            [firsts[-1:]],
        ),
        num_sequences=int(firsts[-1]),
        num_documents=sum(len(dataset.document_indices) - 1 for dataset in datasets),
    )


def _chunks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (array[start : start + _CHUNK] for start in range(0, len(array), _CHUNK))
