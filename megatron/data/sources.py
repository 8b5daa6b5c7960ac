"""Corpora of each split, from the flags and the files that they name."""

import json
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.config.data import DataConfig
from megatron.data.sample_order import SPLIT_NAMES, parse_split
from megatron.errors import ConfigError
from megatron.urls import check_place


class Blend(NamedTuple):
    """Corpora of a split."""

    prefixes: list[str]
    weights: list[float] | None
    """None: in proportion to the number of samples of each corpus."""


class Sources(NamedTuple):
    """Corpora of train, validation and test."""

    blends: tuple[Blend | None, ...]
    split: str | None
    """Weights by which every corpus is split; None: each split has separate corpora."""

    def has(self, split_index: int) -> bool:
        if self.split is not None and parse_split(self.split)[split_index] is None:
            return False
        return self.blends[split_index] is not None

    @property
    def prefixes(self) -> list[str]:
        """All corpora, each once."""
        return list(dict.fromkeys(prefix for blend in self.blends if blend is not None for prefix in blend.prefixes))


def read_sources(data: DataConfig) -> Sources:
    """The corpora of the flags; none with ``--mock-data``. Raises :class:`ConfigError` for invalid weights and
    unreadable files."""
    if not data.sources:
        raise ConfigError("There is no corpus: set --data-path, or add --mock-data for synthetic samples.")
    if data.mock_data:
        return Sources((Blend([], None),) * len(SPLIT_NAMES), data.split)
    if data.is_per_split:
        words = _read_split_words(data.per_split_data_args_path) if data.per_split_data_args_path else data.split_paths
        blends = [_blend(words[name], f"The {name} path") if words[name] else None for name in SPLIT_NAMES]
        # As in Megatron-LM, the weight of a single corpus is ignored.
        single = [blend is not None and len(blend.prefixes) == 1 for blend in blends]
        return Sources(tuple(b and Blend(b.prefixes, None) if one else b for b, one in zip(blends, single)), None)
    path = tuple(_read_file(data.data_args_path).split()) if data.data_args_path else data.data_path
    if not path:
        raise ConfigError(f"--data-args-path {data.data_args_path} lists no corpus: add prefixes to it.")
    return Sources((_blend(path, "--data-args-path" if data.data_args_path else "--data-path"),) * 3, data.split)


def parse_data_path(data_path: Sequence[str], source: str = "--data-path") -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of ``--data-path``; weights None if there are only prefixes.

    As in Megatron-LM, an even list whose every other word is a number is a list of pairs. A corpus of weight 0 is
    dropped. Errors name the ``source``.
    """
    weights = [weight for word in data_path[::2] if (weight := _number(word)) is not None]
    if 2 * len(weights) < len(data_path) or len(data_path) % 2:
        _refuse_stray_weights(data_path, source)
        return list(data_path), None
    if not all(0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"{source} has weights {weights}: they must not be negative or all zero.")
    pairs = [(prefix, weight) for prefix, weight in zip(data_path[1::2], weights, strict=True) if weight > 0]
    return [prefix for prefix, _ in pairs], [weight for _, weight in pairs]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _refuse_stray_weights(data_path: Sequence[str], source: str) -> None:
    """Raise :class:`ConfigError` for a number among prefixes, unless there is a corpus with this name."""
    for word in data_path:
        if _number(word) is not None and not os.path.exists(f"{word}.idx"):
            raise ConfigError(
                f"{source} {' '.join(data_path)} has the weight {word} without a prefix after it: write a weight "
                "before every prefix, such as 0.7 corpus_a 0.3 corpus_b, or none."
            )


def _blend(words: Sequence[str], source: str) -> Blend:
    blend = Blend(*parse_data_path(words, source))
    for prefix in blend.prefixes:
        check_place(source, prefix)
    return blend


def _read_split_words(path: str) -> dict[str, list[str]]:
    """The corpora of each split from a JSON object; a string is split at spaces, and a split may be missing or null."""
    try:
        content: Any = json.loads(_read_file(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--per-split-data-args-path {path} is not JSON ({error}): correct it.") from error
    known = isinstance(content, dict) and content.get("train") and not content.keys() - set(SPLIT_NAMES)
    if not known or not all(isinstance(words, list | str | None) for words in content.values()):
        raise ConfigError(
            f"--per-split-data-args-path {path} must contain one object with the key train and optionally valid and "
            "test, each with a list in the format of --data-path."
        )
    return {name: _words(content.get(name)) for name in SPLIT_NAMES}


def _words(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else [str(word) for word in value or ()]


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"The file of data arguments {path} cannot be read ({error.strerror}): correct it."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The file of data arguments {path} is not text ({error.reason}): use another.") from error
