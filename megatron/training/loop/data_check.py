"""Comparison of the corpus with its digests during training; damage ends the run on all ranks together."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.data.corpus_check import BackgroundComparison, BlockComparison, Damage, Digests, Integers, SampleRange
from megatron.data.corpus_digests import digests_path, remedy_of
from megatron.data.gpt_dataset import Dataset
from megatron.errors import DataError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.context import LogRank0

_NAMED_CORPORA = 3


class DataCheck:
    """Compares this rank's share of the corpus blocks in the background, and raises on all ranks if one finds damage.

    ``ranges``: the samples that the run reads, in the order of comparison; ``describe_iteration`` names the iteration
    that trains on the sample at a position.
    """

    def __init__(
        self,
        comparison: BlockComparison,
        ranges: Sequence[SampleRange],
        bytes_per_s: float,
        control: ControlGroup,
        describe_iteration: Callable[[int], str],
    ) -> None:
        self._ranges = ranges
        self._control = control
        self._describe_iteration = describe_iteration
        self._background: BackgroundComparison | None = None
        if bytes_per_s and comparison.remaining:
            # Samples that earlier processes have read come last: they may not have been compared.
            earlier = [wanted._replace(start=0, stop=wanted.start) for wanted in ranges]
            self._background = BackgroundComparison(comparison, [*ranges, *earlier], bytes_per_s)

    @property
    def has_found_damage(self) -> bool:
        return self._background is not None and self._background.found is not None

    def raise_on_all_ranks(self) -> None:
        """Raise :class:`DataError` on every rank if one has found damage; a collective."""
        for sentence in self._control.all_gather_object(self._sentence()):
            if sentence is not None:
                raise DataError(sentence)

    def finish(self) -> None:
        """Compare the remaining ranges, and raise on every rank if one finds damage; a collective."""
        if self._background is not None:
            self._background.finish(self._ranges)
        self.raise_on_all_ranks()

    def close(self) -> None:
        """End the thread."""
        if self._background is not None:
            self._background.close()

    def _sentence(self) -> str | None:
        found = None if self._background is None else self._background.found
        if isinstance(found, DataError):
            return str(found)
        if isinstance(found, Exception):
            raise found
        return None if found is None else self._describe(found)

    def _describe(self, damage: Damage) -> str:
        remedy = remedy_of(damage.path)
        if damage.split != "train":
            return f"{damage.description}; the {damage.split} split reads it: {remedy}."
        return (
            f"{damage.description}; {self._describe_iteration(damage.position)} is the first to train on it: "
            f"{remedy}. Checkpoints from that iteration on depend on it: continue from an earlier one."
        )


def name_those_without_digests(digests: Digests, log_rank0: LogRank0) -> None:
    """Log the corpora without digests, which are not compared."""
    missing = [prefix for prefix, found in digests.items() if found is None]
    if missing:
        more = f" and {len(missing) - _NAMED_CORPORA} more" if len(missing) > _NAMED_CORPORA else ""
        files = ", ".join(digests_path(prefix) for prefix in missing[:_NAMED_CORPORA])
        log_rank0(
            f"no {files}{more}: the tokens are not verified "
            f"(tools/inspect_dataset.py {missing[0]} --write-digests writes the file)"
        )


def consumed_ranges(
    config: RunConfig, data_parallel_size: int, read: Sequence[tuple[str, Dataset, int, int]]
) -> list[SampleRange]:
    """The samples that this process reads: of each split and dataset those from one position to another."""
    return [
        SampleRange(split, dataset, start, stop, consumption_order(config, len(dataset), data_parallel_size))
        for split, dataset, start, stop in read
    ]


def whole_range(split: str, dataset: Dataset) -> SampleRange:
    """All samples of a set that is evaluated completely."""
    return SampleRange(split, dataset, 0, len(dataset), np.arange)


def consumption_order(config: RunConfig, num_samples: int, data_parallel_size: int) -> Callable[[int, int], Integers]:
    """The function from a range of positions to the samples that all ranks together read there."""
    if config.data.dataloader_type == "single":
        return np.arange
    return CyclicOrder(num_samples, config.micro_batch_size, data_parallel_size)


class CyclicOrder:
    """The order of :func:`megatron.data.loader.cyclic_microbatches` over all data-parallel ranks."""

    def __init__(self, num_samples: int, micro_batch_size: int, data_parallel_size: int) -> None:
        chunk = micro_batch_size * data_parallel_size
        self._epoch_samples = num_samples - num_samples % chunk
        self._shape = data_parallel_size, -1, micro_batch_size
        self._epoch, self._samples = -1, np.zeros(0, np.int64)

    def __call__(self, start: int, stop: int) -> Integers:
        positions = np.arange(start, stop)
        epochs = positions // self._epoch_samples
        parts = [
            self._samples_of(epoch)[positions[epochs == epoch] % self._epoch_samples]
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return np.concatenate(parts)

    def _samples_of(self, epoch: int) -> Integers:
        if epoch != self._epoch:
            ranks, size = self._shape[0], self._epoch_samples // self._shape[0]
            permutation = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
            by_rank = permutation + np.arange(ranks)[:, None] * size  # [ranks, size]: the same permutation for each
            self._samples = by_rank.reshape(self._shape).transpose(1, 0, 2).ravel()
            self._epoch = epoch
        return self._samples


def describe_iteration(
    batches: BatchSchedule, iteration: int, consumed_samples: int, first_sample: int, position: int
) -> str:
    """The iteration that reads the training sample at ``position`` of the data stage that began at ``first_sample``.

    The process began after ``iteration`` iterations and ``consumed_samples``.
    """
    if first_sample + position < consumed_samples:
        return f"an iteration before {iteration + 1}"
    return f"iteration {iteration + 1 + batches.iterations_for_samples(first_sample + position, consumed_samples)}"
