"""Several .bin/.idx pairs into one."""

import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.config.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset, write_index

_COPIED_TOKENS = 1 << 22
_CHUNK = 1 << 20  # numbers of an index array in memory


def merge_datasets(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Write the sequences of all datasets, in their order, to one; returns sequences and tokens.

    Both files appear only when complete. Memory does not grow with the data. Raises :class:`DataError` when one is
    damaged, or when they do not store tokens alike.
    """
    with tempfile.TemporaryDirectory() as index_cache:  # for those of remote datasets
        return _merge([IndexedDataset(prefix, index_cache=index_cache) for prefix in prefixes], output)


def _merge(datasets: Sequence[IndexedDataset], output: str) -> tuple[int, int]:
    _check_alike(datasets, output)
    suffix = f".{uuid.uuid4().hex[:8]}.incomplete"
    temporary = {kind: f"{output}{kind}{suffix}" for kind in (".bin", ".idx")}
    try:
        os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
        with open(temporary[".bin"], "wb") as tokens:
            for dataset in datasets:
                _append_tokens(dataset, tokens)
            tokens.flush()
            os.fsync(tokens.fileno())
        with open(temporary[".idx"], "wb") as index:
            _write_index(datasets, index)
            index.flush()
            os.fsync(index.fileno())
        with suppress(FileNotFoundError):  # no reader may pair an old index with new tokens
            os.remove(f"{output}.idx")
        for kind, path in temporary.items():
            os.replace(path, f"{output}{kind}")
    except OSError as error:
        raise DataError(
            f"{output}.bin and .idx cannot be written ({error.strerror}): choose another output."
        ) from error
    finally:
        for path in temporary.values():
            with suppress(FileNotFoundError):
                os.remove(path)
    return sum(map(len, datasets)), sum(dataset.num_tokens for dataset in datasets)


def _check_alike(datasets: Sequence[IndexedDataset], output: str) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{first.prefix} stores tokens as {first.dtype}, {dataset.prefix} as {dataset.dtype}: datasets of "
                "different tokenizers cannot be merged; give both to --data-path instead."
            )
        if dataset.has_modes:
            raise DataError(f"{dataset.prefix}.idx has sequence modes, which cannot be merged: leave it out.")
        if os.path.abspath(dataset.prefix) == os.path.abspath(output):
            raise DataError(f"{output} is an input, too: choose another --output-prefix.")


def _append_tokens(dataset: IndexedDataset, output: BinaryIO) -> None:
    """Copy ``.bin`` as far as the index needs it."""
    for start in range(0, dataset.num_tokens, _COPIED_TOKENS):
        output.write(dataset.tokens(start, min(_COPIED_TOKENS, dataset.num_tokens - start)).tobytes())


def _write_index(datasets: Sequence[IndexedDataset], index: BinaryIO) -> None:
    bases = np.cumsum([0] + [dataset.num_tokens * dataset.dtype.itemsize for dataset in datasets])
    firsts = np.cumsum([0] + [len(dataset) for dataset in datasets])
    write_index(
        index,
        datasets[0].dtype,
        lengths=(dataset.sequence_lengths for dataset in datasets),
        offsets=(chunk + base for dataset, base in zip(datasets, bases) for chunk in _chunks(dataset.byte_offsets)),
        # The end of a dataset's last document is where the next one begins.
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
