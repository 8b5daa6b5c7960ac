"""Build datasets from flags, and microbatches of tensors from datasets."""

import math
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from megatron.config.data import DataConfig
from megatron.data.dataset_builder import Sources, read_sources
from megatron.data.gpt_dataset import (
    BlendedDataset,
    CorpusDataset,
    Dataset,
    GPTDataset,
    MockDataset,
    Sample,
    SampleSettings,
)
from megatron.data.indexed_dataset import (
    FILES_OF_CORPUS,
    FILES_OF_ORDER,
    IndexedDataset,
    allow_open_files,
    check_document_ends,
    check_token_range,
)
from megatron.data.loader_processes import POLL, UNLIMITED, Patience, Starts, started
from megatron.data.order_cache import Description
from megatron.data.packed_dataset import PackedDataset
from megatron.data.sample_order import SPLIT_NAMES, blend_order, blend_targets, normalize
from megatron.errors import ConfigError, DataError, LoaderError
from megatron.operation.processes import die_with_parent
from megatron.urls import is_url

Microbatch = dict[str, torch.Tensor]

_VALIDATION = SPLIT_NAMES.index("valid")
_MAX_CORPORA = 32_767  # the number of a corpus is stored as int16


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    eod: int,
    seed: int,
    sample_counts: tuple[int, int | None, int | None],
    tokenizer_description: Description | None,
    inspect: bool = True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The train, validation and test datasets with ``sample_counts`` samples each (None: all samples once); None where
    the count is 0.

    ``vocab_size`` is the number of valid ids. Builds sample orders that are not cached, so one process of a run should
    call this before the others. ``inspect`` checks a part of the tokens, which one process may do for all. Raises
    :class:`ConfigError` and :class:`DataError`.
    """
    if data.seq_length is None:
        raise ConfigError("--seq-length is missing: set it to the tokens per sample.")
    sources = read_sources(data)
    masked_token = eod if data.eod_mask_loss else None
    document_end = eod if data.marks_documents else None
    if data.mock_data:
        mock = partial(MockDataset, seed, data.seq_length, vocab_size)

        def build(index: int, count: int | None) -> Dataset:
            assert count is not None  # --full-validation refuses mock data
            return mock(count, split_index=index, masked_token=masked_token, document_end=document_end)

    else:
        used = [index for index, count in enumerate(sample_counts) if count != 0 and sources.has(index)]
        builder = _open_builder(data, sources, used, vocab_size, eod, seed, tokenizer_description, inspect)

        def build(index: int, count: int | None) -> Dataset:
            return _build_split(builder, sources, index, count)

    train, valid, test = (build(index, count) if count != 0 else None for index, count in enumerate(sample_counts))
    return train, valid, test


def build_validation_sets(
    data: DataConfig,
    *,
    vocab_size: int,
    eod: int,
    seed: int,
    count: int | None,
    tokenizer_description: Description | None,
    inspect: bool = True,
) -> list[CorpusDataset]:
    """A dataset of every validation corpus with ``count`` samples (None: all samples once), in the order of the flags.

    The other arguments are those of :func:`build_datasets`.
    """
    sources = read_sources(data)
    blend = sources.blends[_VALIDATION]
    assert blend is not None
    if blend.weights is not None and sources.split is None:
        raise ConfigError(
            "--multiple-validation-sets evaluates every corpus of --valid-data-path by itself: remove the weights."
        )
    builder = _open_builder(data, sources, [_VALIDATION], vocab_size, eod, seed, tokenizer_description, inspect)
    return [builder.single(prefix, _VALIDATION, count) for prefix in blend.prefixes]


def _open_builder(
    data: DataConfig,
    sources: Sources,
    used: Sequence[int],
    vocab_size: int,
    eod: int,
    seed: int,
    tokenizer_description: Description | None,
    inspect: bool,
) -> "_SplitBuilder":
    """Open and check the corpora of the ``used`` splits."""
    assert data.seq_length is not None
    document_end = eod if data.marks_documents else None
    settings = SampleSettings(
        seq_length=data.seq_length,
        seed=seed,
        split=sources.split,
        tokenizer=tokenizer_description,
        cache_directory=_cache_directory(data, sources),
        masked_token=eod if data.eod_mask_loss else None,
        extendable=data.sample_order == "extendable",
        document_end=document_end,
        padding=eod if data.sample_order == "best-fit" else None,
    )
    corpora = _open_corpora(data, sources, used)
    if inspect:
        for corpus in corpora.values():
            check_token_range(corpus, vocab_size, corpus.prefix, len(corpora))
            if document_end is not None:
                check_document_ends(corpus, document_end)
    return _SplitBuilder(corpora, settings, data.mid_level_dataset_surplus, data.num_dataset_builder_threads)


def _cache_directory(data: DataConfig, sources: Sources) -> str:
    if data.data_cache_path is not None:
        return data.data_cache_path
    first = sources.prefixes[0]
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
    blends = [sources.blends[index] for index in used]
    prefixes = list(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))
    allow_open_files(len(prefixes), FILES_OF_CORPUS + FILES_OF_ORDER * len(used))
    index_cache = data.index_cache_path
    with ThreadPoolExecutor(data.num_dataset_builder_threads) as threads:
        corpora = threads.map(lambda prefix: IndexedDataset(prefix, data.mmap_bin_files, index_cache), prefixes)
        return dict(zip(prefixes, corpora, strict=True))


def _build_split(builder: "_SplitBuilder", sources: Sources, split_index: int, count: int | None) -> Dataset:
    split, blend = SPLIT_NAMES[split_index], sources.blends[split_index]
    if not sources.has(split_index) or blend is None:
        where = f"--{split}-data-path" if sources.split is None else f"--split {sources.split!r}"
        remedy = "give it corpora" if sources.split is None else "give it a weight"
        raise DataError(
            f"{count} samples of the {split} split are needed, but {where} gives it nothing: {remedy}, or ask for no "
            "samples of it."
        )
    if count is None:
        if blend.weights is not None and sources.split is None:
            raise ConfigError(
                f"--full-validation reads every sample once, so the weights in --{split}-data-path have no effect: "
                "remove them."
            )
        return builder.whole(blend.prefixes, split_index)
    if blend.weights is not None:
        return builder.weighted(blend.prefixes, normalize(blend.weights), split_index, count)
    if len(blend.prefixes) == 1:
        return builder.single(blend.prefixes[0], split_index, count)
    return builder.proportional(blend.prefixes, split_index, count)


@dataclass(frozen=True)
class _SplitBuilder:
    """Builds the datasets of splits from open corpora."""

    corpora: Mapping[str, IndexedDataset]
    """By prefix."""
    settings: SampleSettings
    surplus: float
    num_threads: int

    def single(self, prefix: str, split_index: int, count: int | None) -> CorpusDataset:
        """One corpus; ``count`` None: one epoch."""
        kind = GPTDataset if self.settings.padding is None else PackedDataset
        return kind(self.corpora[prefix], split_index, count, self.settings)

    def whole(self, prefixes: list[str], split_index: int) -> Dataset:
        """All samples of all corpora once."""
        children = [child for child in self._each(prefixes, split_index, [None] * len(prefixes)) if len(child)]
        if not children:
            raise DataError(self._nothing_in(split_index))
        if len(children) == 1:
            return children[0]
        lengths = [float(len(child)) for child in children]
        return BlendedDataset(children, lengths, None, split_index, self.settings.cache_directory)

    def weighted(self, prefixes: list[str], weights: list[float], split_index: int, count: int) -> BlendedDataset:
        """A blend with normalised weights."""
        targets, counts = blend_targets(weights, count, self.surplus)
        size = sum(targets)
        children = self._each(prefixes, split_index, counts)
        # A corpus is never a whole sample ahead of its share. But rounded-up targets can make a share larger than the
        # surplus allows; such a corpus is built again, with enough samples.
        if any(len(child) < math.ceil(weight * size) for child, weight in zip(children, weights, strict=True)):
            served = np.bincount(blend_order(weights, size)[0], minlength=len(prefixes)).tolist()
            children = [
                child if len(child) >= n else self.single(prefix, split_index, n)
                for prefix, child, n in zip(prefixes, children, served, strict=True)
            ]
        return BlendedDataset(children, weights, size, split_index, self.settings.cache_directory)

    def proportional(self, prefixes: list[str], split_index: int, count: int) -> BlendedDataset:
        """A blend with weights proportional to the number of samples of each corpus."""
        children = self._each(prefixes, split_index, [None] * len(prefixes))
        lengths = [float(len(child)) for child in children]
        if not sum(lengths):
            raise DataError(self._nothing_in(split_index))
        if count <= sum(lengths):
            return BlendedDataset(children, lengths, count, split_index, self.settings.cache_directory)
        # Megatron-LM would stop at the end of the first epoch, but continues with equal explicit weights.
        used = [prefix for prefix, length in zip(prefixes, lengths, strict=True) if length]
        return self.weighted(used, normalize([n for n in lengths if n]), split_index, count)

    def _nothing_in(self, split_index: int) -> str:
        split = self.settings.split
        remedy = "give it more data" if split is None else f"give it a larger share in --split {split!r}"
        return (
            f"No corpus of --data-path has tokens for one sample in its {SPLIT_NAMES[split_index]} split: "
            f"{remedy}, or use a shorter --seq-length."
        )

    def _each(self, prefixes: list[str], split_index: int, counts: Sequence[int | None]) -> list[CorpusDataset]:
        with ThreadPoolExecutor(self.num_threads) as threads:
            return list(threads.map(lambda prefix, n: self.single(prefix, split_index, n), prefixes, counts))


def microbatch_sample_indices(
    start_sample: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> list[int]:
    """The samples of one rank in the microbatch that begins with ``start_sample`` over all ranks."""
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
    first = start_sample + data_parallel_rank * micro_batch_size
    return list(range(first, first + micro_batch_size))


def single_pass_microbatches(
    num_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, in order; an incomplete last one is dropped."""
    chunk = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, num_samples - chunk + 1, chunk):
        yield microbatch_sample_indices(start, micro_batch_size, data_parallel_rank, data_parallel_size)


def cyclic_microbatches(
    num_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, without end, shuffled in every epoch.

    Each rank permutes a contiguous range of samples with a generator seeded by ``seed`` + epoch; seed 0 gives
    Megatron-LM's order. The ranges, and so the order, depend on the data-parallel size.
    """
    chunk = micro_batch_size * data_parallel_size
    epoch_samples = num_samples - num_samples % chunk
    if not epoch_samples:
        raise DataError(
            f"The dataset has {num_samples} samples, fewer than the {chunk} of one microbatch on all "
            "data-parallel ranks: use a smaller --micro-batch-size or more data."
        )
    if consumed_samples % epoch_samples % chunk:
        raise DataError(
            f"--dataloader-type cyclic cannot resume at sample {consumed_samples} with microbatches of "
            f"{chunk} samples over all data-parallel ranks: keep the --micro-batch-size and the "
            "data-parallel size of the saved run."
        )
    bucket = epoch_samples // data_parallel_size
    epoch, consumed_in_epoch = divmod(consumed_samples, epoch_samples)
    start = consumed_in_epoch // data_parallel_size
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(bucket, generator=generator) + data_parallel_rank * bucket
        for first in range(start, bucket, micro_batch_size):
            yield order[first : first + micro_batch_size].tolist()
        epoch, start = epoch + 1, 0


def build_loader(
    dataset: Dataset,
    *,
    vocab_size: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    dataloader_type: Literal["single", "cyclic"] = "single",
    seed: int = 0,
    pin_memory: bool = False,
    positions: npt.NDArray[np.int64] | None = None,
    patience: Patience = UNLIMITED,
) -> Iterator[Microbatch]:
    """This rank's microbatches: ``tokens`` and ``labels`` [mbs, s] int64, ``loss_mask`` [mbs, s] float32.

    With ``positions`` they have only these positions of each sample, for context parallelism; ``document_starts``
    always describes the whole sample. With ``num_workers`` 0 this process reads, and ``patience`` has no effect.
    ``seed`` is for the cyclic order. Raises :class:`DataError` after the last sample.
    """
    place = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)

    def start(starts: Starts | None = None) -> Iterator[Any]:
        cyclic = dataloader_type == "cyclic"
        sampler = cyclic_microbatches(*place, seed) if cyclic else single_pass_microbatches(*place)
        loader: DataLoader[Any] = DataLoader(
            cast(Any, _CheckedSamples(dataset, vocab_size, positions)),
            batch_sampler=cast(Any, sampler),
            collate_fn=partial(_stack, starts=starts),
            num_workers=num_workers,
            worker_init_fn=partial(_prepare_worker, starts=starts),
            pin_memory=pin_memory,
            timeout=POLL if num_workers else 0,
            # Its own generator, so that torch's global generator is not used.
            generator=torch.Generator(),
        )
        return iter(loader)

    return _raise_when_exhausted(
        (lambda: started(start, num_workers, patience)) if num_workers else start, len(dataset)
    )


class _CheckedSamples:
    """Checks that ids are in the vocabulary, and returns errors as values: torch would wrap an error that is raised in
    a loader process in a traceback. Samples have the tokens at ``positions``, or all."""

    def __init__(self, dataset: Dataset, vocab_size: int, positions: npt.NDArray[np.int64] | None = None) -> None:
        self._dataset, self._vocab_size, self._positions = dataset, vocab_size, positions

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample | DataError:
        try:
            sample = self._dataset[index]
        except DataError as error:
            return error
        ids = sample["tokens"], sample["labels"]
        smallest, largest = min(int(part.min()) for part in ids), max(int(part.max()) for part in ids)
        if smallest < 0 or largest >= self._vocab_size:
            bad = smallest if smallest < 0 else largest
            return DataError(
                f"Sample {index} has token id {bad}, but the largest id of the tokenizer is {self._vocab_size - 1}: "
                "set --tokenizer-type and --tokenizer-model to the tokenizer of the corpus."
            )
        if self._positions is None:
            return sample
        return {name: array if name == "document_starts" else array[self._positions] for name, array in sample.items()}


def _raise_when_exhausted(start: Callable[[], Iterator[Any]], num_samples: int) -> Iterator[Microbatch]:
    batches = start()
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise LoaderError(f"A loader process ended ({error}): use fewer --num-workers if memory ran out.") from error
    finally:
        if isinstance(batches, Generator):
            batches.close()
    raise DataError(
        f"All {num_samples} samples of the dataset have been consumed: train for fewer iterations, or let "
        "the run ask for more samples when it builds its datasets."
    )


def _stack(samples: list[Sample | DataError], starts: Starts | None = None) -> Microbatch | DataError:
    """Samples [s] to a microbatch [mbs, s], or the first error among them."""
    if starts is not None:
        starts.end_to_read()
    good: list[Sample] = []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        good.append(sample)
    return {key: torch.from_numpy(np.stack([sample[key] for sample in good])) for key in good[0]}


def _prepare_worker(worker: int, starts: Starts | None = None) -> None:
    torch.set_num_threads(1)
    die_with_parent()
    # Ctrl-C and schedulers signal all processes of a run, but a graceful stop still needs microbatches. Loader
    # processes end when the loader is closed, or with the training process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if starts is not None:
        starts.begin_to_read()
