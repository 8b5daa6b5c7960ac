"""Tokenized datasets (.bin/.idx): inspect one, merge several."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from megatron.commands.tool import import_pyplot, run_tool, write_figure
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_digests import (
    check_blocks,
    check_file,
    compute_digests,
    digests_path,
    read_digests,
    write_digests,
)
from megatron.data.corpus_writer import merge_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers import build_tokenizer
from megatron.errors import ConfigError, DataError
from megatron.flags import Argument
from megatron.urls import is_url, refuse_urls

# --- inspect -------------------------------------------------------------------------------------------------

_CHUNK = 1 << 22  # tokens checked at a time
_BAR = 40


@dataclass(frozen=True)
class InspectConfig:
    """Dataset to inspect."""

    prefix: Annotated[str, Argument(is_positional=True)]
    """P for P.bin and P.idx; may be a URL."""
    plot: Path | None = None
    """PNG or SVG file for the histogram of lengths; printed by default."""
    documents: tuple[int, ...] = ()
    """Documents to print, counted from 0; as text if there is a tokenizer."""
    max_tokens: int = 200
    """Maximum number of tokens to print per document."""
    check: bool = False
    """Read everything and check offsets, document boundaries and digests; with a tokenizer (or --vocab-size with
    NullTokenizer) also that every id is in the vocabulary."""
    write_digests: bool = False
    """Write P.digests.json from the present P.bin and P.idx, for a corpus that another program wrote or changed."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


def document_lengths(dataset: IndexedDataset) -> npt.NDArray[np.int64]:
    """Tokens of each document, [documents]."""
    ends = np.concatenate(([0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)))
    return np.diff(ends[dataset.document_indices])


def describe(dataset: IndexedDataset, lengths: npt.NDArray[np.int64]) -> Iterator[str]:
    """Counts, a line each."""
    yield f"documents  {len(lengths):,}"
    yield f"sequences  {len(dataset):,}"
    yield f"tokens     {dataset.num_tokens:,} ({dataset.dtype}, {dataset.num_tokens * dataset.dtype.itemsize:,} bytes)"
    if len(lengths):
        shares = (0, 25, 50, 75, 95, 100)
        values = (f"{share} % {value:,.0f}" for share, value in zip(shares, np.percentile(lengths, shares)))
        yield f"length     mean {lengths.mean():,.1f}; up to: {', '.join(values)}"


def print_histogram(lengths: npt.NDArray[np.int64]) -> Iterator[str]:
    """Documents by length as bars of text, in powers of two."""
    edges = [0, *(1 << power for power in range(int(lengths.max(initial=0)).bit_length() + 1))]
    counts = np.histogram(lengths, [*edges])[0].tolist()
    most = max(counts) or 1
    for low, high, count in zip(edges, edges[1:], counts):
        yield f"{low:>12,} .. {high - 1:<12,} {count:>12,} {'#' * round(_BAR * count / most)}".rstrip()


def draw_histogram(lengths: npt.NDArray[np.int64], title: str, path: Path) -> None:
    """Documents, and tokens in them, by length."""
    plt = import_pyplot("--plot")
    edges = np.geomspace(1, max(int(lengths.max(initial=0)), 2), 60).tolist()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.hist(lengths, edges, weights=np.full(len(lengths), 1 / max(len(lengths), 1)), alpha=0.6, label="documents")
    axes.hist(lengths, edges, weights=lengths / max(lengths.sum(), 1), alpha=0.6, label="tokens")
    axes.set(xscale="log", xlabel="tokens in the document", ylabel="share", title=title)
    axes.legend(frameon=False)
    write_figure("--plot", path, figure)


def check_whole(dataset: IndexedDataset, vocab_size: int | None) -> None:
    """Raise :class:`DataError` at the first thing that is wrong."""
    prefix, itemsize = dataset.prefix, dataset.dtype.itemsize
    lengths = dataset.sequence_lengths.astype(np.int64)
    expected = np.concatenate(([0], np.cumsum(lengths)[:-1])) * itemsize if len(lengths) else lengths
    wrong = np.flatnonzero((dataset.byte_offsets != expected) | (lengths < 0))
    if wrong.size:
        raise DataError(f"{prefix}.idx: sequence {wrong[0]} does not begin where the one before ends: {_REMEDY}.")
    documents = dataset.document_indices
    if documents[0] != 0 or (np.diff(documents) < 0).any():
        raise DataError(f"{prefix}.idx: its documents do not begin in order, from sequence 0: {_REMEDY}.")
    size, needed = dataset.stored_bytes, int(lengths.sum()) * itemsize
    if size != needed:
        raise DataError(f"{prefix}.bin has {size} bytes, but {prefix}.idx requires {needed}: copy it again.")
    # All ids, by reading .bin once.
    for start in range(0, dataset.num_tokens, _CHUNK):
        tokens = dataset.tokens(start, min(_CHUNK, dataset.num_tokens - start))
        bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size)) if vocab_size else np.flatnonzero(tokens < 0)
        if bad.size:
            sequence = int(np.searchsorted(np.cumsum(lengths), start + int(bad[0]), side="right"))
            document = int(np.searchsorted(documents, sequence, side="right")) - 1
            raise DataError(
                f"{prefix}.bin: document {document} holds token id {tokens[bad[0]]}, which is not in the vocabulary"
                f"{f' of {vocab_size} ids' if vocab_size else ''}: give the tokenizer that the data was made with, or "
                "write the data again."
            )


_REMEDY = "write the data again with tools/preprocess_data.py"


def write_present_digests(prefix: str) -> None:
    if is_url(prefix):
        raise ConfigError(f"--write-digests cannot write beside {prefix}: make the digests where the files are local.")
    try:
        write_digests(prefix, compute_digests(prefix))
    except OSError as error:
        raise DataError(f"{digests_path(prefix)} cannot be written ({error.strerror}): make it writable.") from error


def print_document(dataset: IndexedDataset, number: int, max_tokens: int, tokenizer: Any) -> Iterator[str]:
    """The first tokens of a document, as text where there is a tokenizer."""
    starts = dataset.document_indices
    if not 0 <= number < len(starts) - 1:
        raise ConfigError(f"--documents {number} is none of 0..{len(starts) - 2}: choose one of these.")
    sequences = [dataset.get(sequence) for sequence in range(int(starts[number]), int(starts[number + 1]))]
    tokens = np.concatenate(sequences) if sequences else np.zeros(0, dataset.dtype)
    ids = tokens[:max_tokens].tolist()
    more = f", the first {max_tokens:,} of them" if len(tokens) > max_tokens else ""
    yield f"--- document {number}: {len(tokens):,} tokens{more}"
    yield tokenizer.detokenize(ids) if tokenizer is not None else " ".join(map(str, ids))


def inspect(config: InspectConfig) -> Iterator[str]:
    """The lines of the report; each is printed as soon as it is known."""
    refuse_urls({"--plot": config.plot}, "name a local file")
    with tempfile.TemporaryDirectory() as index_cache:  # for the index of a remote dataset
        dataset = IndexedDataset(config.prefix, index_cache=index_cache)
        tokenizer = build_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type else None
        lengths = document_lengths(dataset)
        if config.write_digests:
            write_present_digests(config.prefix)
        yield from describe(dataset, lengths)
        digests = read_digests(config.prefix)
        if digests is None:
            yield "digests    none: training cannot notice damaged tokens (--write-digests makes them)"
        else:
            yield f"digests    fingerprint {digests.fingerprint()} (--check compares them)"
        if config.plot is None:
            yield from print_histogram(lengths)
        else:
            draw_histogram(lengths, config.prefix, config.plot)
            yield f"histogram  {config.plot}"
        for number in config.documents:
            yield from print_document(dataset, number, config.max_tokens, tokenizer)
        if config.check:
            check_whole(dataset, tokenizer.vocab_size if tokenizer else None)
            ids = f"all ids below {tokenizer.vocab_size:,}" if tokenizer else "ids not compared with a vocabulary"
            yield f"whole      yes: offsets, documents and sizes fit; {ids}"
            if digests is not None:
                check_file(dataset.index_path, digests.index, name=f"{dataset.prefix}.idx")
                check_blocks(f"{dataset.prefix}.bin", digests.tokens, dataset.stored_bytes, dataset.stored)
                yield "digests    match every byte of both files"


def print_lines(config: InspectConfig) -> None:
    for line in inspect(config):
        print(line, flush=True)


main_inspect = partial(
    run_tool,
    InspectConfig,
    print_lines,
    "Inspect a .bin/.idx dataset: counts, a histogram of lengths, documents as text, and damage.",
)


# --- merge ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeConfig:
    """Datasets to merge, and the result."""

    input: tuple[str, ...]
    """Prefixes (P for P.bin and P.idx; also URLs), or directories for all datasets in them."""
    output_prefix: str
    """The result is PREFIX.bin and PREFIX.idx."""


def find_prefixes(inputs: tuple[str, ...]) -> list[str]:
    """The datasets that --input means; :class:`DataError` where there is none."""
    prefixes: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            prefixes.append(name)
            continue
        found = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
        if not found:
            raise DataError(f"{name} has no .idx file: check --input.")
        prefixes += found
    if not prefixes:
        raise DataError("--input needs at least one prefix or folder.")
    return prefixes


def merge(config: MergeConfig) -> None:
    refuse_urls({"--output-prefix": config.output_prefix}, "name a local prefix, and copy the result")
    prefixes = find_prefixes(config.input)
    sequences, tokens = merge_datasets(prefixes, config.output_prefix)
    print(f"{config.output_prefix}: {len(prefixes)} datasets, {sequences:,} sequences, {tokens:,} tokens")


main_merge = partial(
    run_tool,
    MergeConfig,
    merge,
    "Merge .bin/.idx datasets of one tokenizer, in the given order; datasets of a directory are sorted by name.",
)
