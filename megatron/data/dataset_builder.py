"""The corpora of each split, from the flags and the files that they name, and the datasets built from them."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.gpt_dataset import BlendedDataset, CorpusDataset, Dataset, GPTDataset, MockDataset, SampleSettings
from megatron.data.indexed_dataset import (
    FILES_OF_CORPUS,
    FILES_OF_ORDER,
    IndexedDataset,
    allow_open_files,
    check_document_ends,
    check_token_range,
)
from megatron.data.order_cache import Description
from megatron.data.packed_dataset import PackedDataset
from megatron.data.sample_order import SPLIT_NAMES, blend_order, blend_targets, normalize, parse_split
from megatron.errors import ConfigError, DataError
from megatron.urls import check_place, is_url

_VALIDATION = SPLIT_NAMES.index("valid")
_MAX_CORPORA = 32_767  # the number of a corpus is stored as int16

# --- which corpora -------------------------------------------------------------------------------------------


class Blend(NamedTuple):
    """Corpora of a split."""

    prefixes: list[str]
    weights: list[float] | None  # None: in proportion to the number of samples of each corpus


class Sources(NamedTuple):
    """Corpora of train, validation and test."""

    blends: tuple[Blend | None, ...]
    split: str | None  # weights by which every corpus is split; None: each split has separate corpora

    def has(self, split_index: int) -> bool:
        if self.split is not None and parse_split(self.split)[split_index] is None:
            return False
        return self.blends[split_index] is not None

    def prefixes(self, splits: Iterable[int] = range(len(SPLIT_NAMES))) -> list[str]:
        """The corpora of ``splits``, each once."""
        blends = [blend for index in splits if (blend := self.blends[index]) is not None]
        return list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))


def read_sources(data: DataConfig) -> Sources:
    """The corpora of the flags and their files; none with ``--mock-data``. Raises :class:`ConfigError`."""
    if not data.sources:
        raise ConfigError("There is no corpus: set --data-path, or add --mock-data for synthetic samples.")
    if data.mock_data:
        return Sources((Blend([], None),) * len(SPLIT_NAMES), data.split)
    if data.loader is not None and not data.is_per_split:
        return Sources((None,) * len(SPLIT_NAMES), None)
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
        for word in data_path:
            # A number among prefixes is a mistake, unless there is a corpus with this name.
            if _number(word) is not None and not os.path.exists(f"{word}.idx"):
                raise ConfigError(
                    f"{source} {' '.join(data_path)} has the weight {word} without a prefix after it: write a weight "
                    "before every prefix, such as 0.7 corpus_a 0.3 corpus_b, or none."
                )
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
    values = {name: content.get(name) or () for name in SPLIT_NAMES}
    return {name: value.split() if isinstance(value, str) else [*map(str, value)] for name, value in values.items()}


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


# --- datasets of them ----------------------------------------------------------------------------------------


class RunFacts(TypedDict):
    """What datasets need to know of a run beside its data flags."""

    vocab_size: int  # number of valid ids
    eod: int  # end-of-document token
    seed: int
    tokenizer_description: Description | None
    inspect: NotRequired[bool]  # whether to check a part of the tokens (default), which one process may do for all


def build_datasets(
    data: DataConfig, *, sample_counts: tuple[int, int | None, int | None], **facts: Unpack[RunFacts]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The train, validation and test datasets with ``sample_counts`` samples each (None: all samples once).

    A dataset of 0 samples is None. Builds sample orders that are not cached, so one process of a run should call this
    before the others. Raises :class:`ConfigError` and :class:`DataError`.
    """
    if data.seq_length is None:
        raise ConfigError("--seq-length is missing: set it to the tokens per sample.")
    sources = read_sources(data)
    used = [index for index, count in enumerate(sample_counts) if count != 0 and sources.has(index)]
    if used and not data.mock_data:
        builder = _open_builder(data, sources, used, facts)
    datasets: list[Dataset | None] = []
    for index, count in enumerate(sample_counts):
        if count == 0:
            datasets.append(None)
        elif data.mock_data:
            assert count is not None  # --full-validation refuses mock data
            eod = facts["eod"]
            masked_token, end = eod if data.eod_mask_loss else None, eod if data.marks_documents else None
            place: dict[str, Any] = {"split_index": index, "masked_token": masked_token, "document_end": end}
            datasets.append(MockDataset(facts["seed"], data.seq_length, facts["vocab_size"], count, **place))
        else:
            datasets.append(builder(index).build(sources, count))
    train, valid, test = datasets
    return train, valid, test


def build_validation_sets(data: DataConfig, count: int | None, **facts: Unpack[RunFacts]) -> list[CorpusDataset]:
    """A dataset of every validation corpus with ``count`` samples (None: all samples once), in the order of the
    flags."""
    sources = read_sources(data)
    blend = sources.blends[_VALIDATION]
    assert blend is not None
    if blend.weights is not None and sources.split is None:
        raise ConfigError(
            "--multiple-validation-sets evaluates every corpus of --valid-data-path by itself: remove the weights."
        )
    builder = _open_builder(data, sources, [_VALIDATION], facts)
    return [builder(_VALIDATION).single(prefix, count) for prefix in blend.prefixes]


def _open_builder(
    data: DataConfig, sources: Sources, used: Sequence[int], facts: RunFacts
) -> "Callable[[int], _SplitBuilder]":
    """Open and check the corpora of the ``used`` splits; returns the builder of a split by its index."""
    assert data.seq_length is not None
    eod = facts["eod"]
    document_end = eod if data.marks_documents else None
    settings = SampleSettings(
        seq_length=data.seq_length,
        seed=facts["seed"],
        split=sources.split,
        tokenizer=facts["tokenizer_description"],
        cache_directory=_cache_directory(data, sources),
        masked_token=eod if data.eod_mask_loss else None,
        extendable=data.sample_order == "extendable",
        document_end=document_end,
        padding=eod if data.sample_order == "best-fit" else None,
    )
    corpora = _open_corpora(data, sources, used)
    if facts.get("inspect", True):
        for corpus in corpora.values():
            check_token_range(corpus, facts["vocab_size"], corpus.prefix, len(corpora))
            if document_end is not None:
                check_document_ends(corpus, document_end)
    return partial(
        _SplitBuilder,
        corpora=corpora,
        settings=settings,
        surplus=data.mid_level_dataset_surplus,
        num_threads=data.num_dataset_builder_threads,
    )


def _cache_directory(data: DataConfig, sources: Sources) -> str:
    if data.data_cache_path is not None:
        return data.data_cache_path
    first = sources.prefixes()[0]
    if is_url(first):
        raise ConfigError(
            f"The corpus {first} is remote: set --data-cache-path to a local directory for the sample order."
        )
    return os.path.join(os.path.dirname(first), "cache", "GPTDataset_indices")


def _open_corpora(data: DataConfig, sources: Sources, used: Sequence[int]) -> dict[str, IndexedDataset]:
    """The corpora of the ``used`` splits, by prefix."""
    for blend in sources.blends:
        if blend is not None and len(blend.prefixes) > _MAX_CORPORA:
            raise ConfigError(f"--data-path names {len(blend.prefixes)} corpora: blend at most {_MAX_CORPORA}.")
    prefixes = sources.prefixes(used)
    allow_open_files(len(prefixes), FILES_OF_CORPUS + FILES_OF_ORDER * len(used))
    index_cache = data.index_cache_path
    with ThreadPoolExecutor(data.num_dataset_builder_threads) as threads:
        corpora = threads.map(lambda prefix: IndexedDataset(prefix, data.mmap_bin_files, index_cache), prefixes)
        return dict(zip(prefixes, corpora, strict=True))


@dataclass(frozen=True)
class _SplitBuilder:
    """Builds the dataset of a split from open corpora."""

    index: int  # of the split
    corpora: Mapping[str, IndexedDataset]  # by prefix
    settings: SampleSettings
    surplus: float
    num_threads: int

    def build(self, sources: Sources, count: int | None) -> Dataset:
        """``count`` samples (None: all once) of the corpora of the split."""
        split, blend = SPLIT_NAMES[self.index], sources.blends[self.index]
        if not sources.has(self.index) or blend is None:
            where = f"--{split}-data-path" if sources.split is None else f"--split {sources.split!r}"
            remedy = "give it corpora" if sources.split is None else "give it a weight"
            raise DataError(
                f"{count} samples of the {split} split are needed, but {where} gives it nothing: {remedy}, or ask for "
                "no samples of it."
            )
        if count is None:
            if blend.weights is not None and sources.split is None:
                raise ConfigError(
                    f"--full-validation reads every sample once, so the weights in --{split}-data-path have no effect: "
                    "remove them."
                )
            return self._whole(blend.prefixes)
        if blend.weights is not None:
            return self._weighted(blend.prefixes, normalize(blend.weights), count)
        if len(blend.prefixes) == 1:
            return self.single(blend.prefixes[0], count)
        return self._proportional(blend.prefixes, count)

    def single(self, prefix: str, count: int | None) -> CorpusDataset:
        """One corpus; ``count`` None: one epoch."""
        kind = GPTDataset if self.settings.padding is None else PackedDataset
        return kind(self.corpora[prefix], self.index, count, self.settings)

    def _each(self, prefixes: list[str], counts: Sequence[int | None]) -> list[CorpusDataset]:
        with ThreadPoolExecutor(self.num_threads) as threads:
            return list(threads.map(self.single, prefixes, counts))

    def _blend(self, children: Sequence[CorpusDataset], weights: Sequence[float], size: int | None) -> BlendedDataset:
        return BlendedDataset(children, weights, size, self.index, self.settings.cache_directory)

    def _whole(self, prefixes: list[str]) -> Dataset:
        """All samples of all corpora once."""
        children = [child for child in self._each(prefixes, [None] * len(prefixes)) if len(child)]
        self._check_samples(sum(map(len, children)))
        return children[0] if len(children) == 1 else self._blend(children, [*map(len, children)], None)

    def _weighted(self, prefixes: list[str], weights: list[float], count: int) -> BlendedDataset:
        """A blend with normalised weights."""
        targets, counts = blend_targets(weights, count, self.surplus)
        size = sum(targets)
        children = self._each(prefixes, counts)
        # A corpus is never a whole sample ahead of its share. But rounded-up targets can make a share larger than the
        # surplus allows; such a corpus is built again, with enough samples.
        if any(len(child) < math.ceil(weight * size) for child, weight in zip(children, weights, strict=True)):
            served = np.bincount(blend_order(weights, size)[0], minlength=len(prefixes)).tolist()
            children = [
                child if len(child) >= n else self.single(prefix, n)
                for prefix, child, n in zip(prefixes, children, served, strict=True)
            ]
        return self._blend(children, weights, size)

    def _proportional(self, prefixes: list[str], count: int) -> BlendedDataset:
        """A blend with weights proportional to the number of samples of each corpus."""
        children = self._each(prefixes, [None] * len(prefixes))
        lengths = [float(len(child)) for child in children]
        self._check_samples(sum(lengths))
        if count <= sum(lengths):
            return self._blend(children, lengths, count)
        # Megatron-LM would stop at the end of the first epoch, but continues with equal explicit weights.
        used = [prefix for prefix, length in zip(prefixes, lengths, strict=True) if length]
        return self._weighted(used, normalize([n for n in lengths if n]), count)

    def _check_samples(self, count: float) -> None:
        """Raise :class:`DataError` if no corpus has a sample."""
        if not count:
            split = self.settings.split
            remedy = "give it more data" if split is None else f"give it a larger share in --split {split!r}"
            raise DataError(
                f"No corpus of --data-path has tokens for one sample in its {SPLIT_NAMES[self.index]} split: "
                f"{remedy}, or use a shorter --seq-length."
            )
