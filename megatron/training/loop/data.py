"""The microbatches that the loop reads, and the comparison of the corpus with its digests meanwhile."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.data.corpus_digests import (
    BackgroundComparison,
    BlockComparison,
    Digests,
    Integers,
    SampleRange,
    digests_path,
    remedy_of,
)
from megatron.data.loader import LOADER_STATE, Microbatch
from megatron.errors import DataError, RankError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.context import LogRank0
from megatron.training.loop.step import RankAlarm

T = TypeVar("T")

_NAMED_CORPORA = 3


class NoMicrobatchError(RankError):
    """This rank has no microbatch."""

    cause = "data"


def next_microbatch(microbatches: Iterator[Microbatch], rank: int) -> Microbatch:
    return fetch(lambda: next(microbatches), rank)


def fetch(action: Callable[[], T], rank: int) -> T:
    try:
        return action()
    except DataError as error:
        raise NoMicrobatchError(f"rank {rank}: {error}", error.exit_code) from error


class Lookahead(Iterator[Microbatch]):
    """Microbatches, of which :meth:`fetch` reads the next one ahead."""

    def __init__(self, microbatches: Iterator[Microbatch], loader_state: torch.Tensor | None = None) -> None:
        self._microbatches = microbatches
        self._next: Microbatch | None = None
        self.loader_state = loader_state
        """The state of a user's loader after the last microbatch that was taken, not after one that is read ahead."""
        self.kept: list[Microbatch] | None = None
        """If it is a list: the microbatches that were taken since it was emptied."""

    def fetch(self) -> None:
        if self._next is None:
            self._next = next(self._microbatches)

    def __next__(self) -> Microbatch:
        self.fetch()
        microbatch, self._next = self._next, None
        assert microbatch is not None
        self.loader_state = microbatch.pop(LOADER_STATE, None)
        if self.kept is not None:
            self.kept.append(microbatch)
        return microbatch

    def close(self) -> None:
        if isinstance(self._microbatches, Generator):
            self._microbatches.close()


class DataCheck(RankAlarm):
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
    def has_failed(self) -> bool:
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
        if self._background is not None:
            self._background.close()

    def _sentence(self) -> str | None:
        found = None if self._background is None else self._background.found
        if found is None or isinstance(found, DataError):
            return None if found is None else str(found)
        if isinstance(found, Exception):
            raise found
        remedy = remedy_of(found.path)
        if found.split != "train":
            return f"{found.description}; the {found.split} split reads it: {remedy}."
        return (
            f"{found.description}; {self._describe_iteration(found.position)} is the first to train on it: "
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
            # Each rank has a range of its own, and all permute their ranges alike:
            #
            #     rank 0: 0 1 2 3 4 5   ->  3 0 5 | 1 4 2       microbatches of 3
            #     rank 1: 6 7 8 9 ...   ->  9 6 11 | 7 10 8     read in the order 3 0 5 9 6 11 1 4 2 7 10 8
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


@dataclass(frozen=True)
class EvaluationSet:
    """Samples on which the loss is evaluated."""

    split: Literal["validation", "test"]
    microbatches: Iterator[Microbatch]
    """This rank's; infinite, one evaluation after the other."""
    num_microbatches: int
    """Microbatches of an evaluation on every data-parallel rank."""
    name: str | None = None
    """None: the only set of its split."""
    continues: bool = True
    """Whether every evaluation reads other samples, those after the samples of the last one."""
    num_bytes: int | None = None
    """UTF-8 bytes of the text, if they are known."""


@dataclass(frozen=True)
class Data:
    """This rank's infinite microbatches for training, and the sets to evaluate."""

    train: Lookahead
    evaluated: Sequence[EvaluationSet]
    train_epochs: Mapping[str, int]
    """Epochs in the sample order of each training corpus, by prefix."""
    check: DataCheck

    def close(self) -> None:
        self.check.close()
        self.train.close()
        for one in self.evaluated:
            if isinstance(one.microbatches, Generator):
                one.microbatches.close()
