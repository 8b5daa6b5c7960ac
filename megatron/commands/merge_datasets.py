"""Merge .bin/.idx datasets of one tokenizer, in the given order; datasets of a directory are sorted by name."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron.data.corpus_writer import merge_datasets
from megatron.errors import DataError, UserError
from megatron.urls import refuse_urls


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


def main() -> int:
    """Run the tool; returns the exit status."""
    config = tyro.cli(MergeConfig, description=__doc__)
    try:
        refuse_urls({"--output-prefix": config.output_prefix}, "name a local prefix, and copy the result")
        prefixes = find_prefixes(config.input)
        sequences, tokens = merge_datasets(prefixes, config.output_prefix)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    print(f"{config.output_prefix}: {len(prefixes)} datasets, {sequences:,} sequences, {tokens:,} tokens")
    return 0
