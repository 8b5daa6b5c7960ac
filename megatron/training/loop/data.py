"""The microbatches that the loop reads."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.data.loader import Microbatch
from megatron.training.loop.data import DataCheck


class Lookahead(Iterator[Microbatch]):
    """Microbatches, of which :meth:`fetch` reads the next one ahead."""

    def __init__(self, microbatches: Iterator[Microbatch]) -> None:
        self._microbatches = microbatches
        self._next: Microbatch | None = None
        self.kept: list[Microbatch] | None = None
        """If it is a list: the microbatches that were taken since it was emptied."""

    def fetch(self) -> None:
        """Wait for the next microbatch; raises the loader's error."""
        if self._next is None:
            self._next = next(self._microbatches)

    def __next__(self) -> Microbatch:
        self.fetch()
        microbatch, self._next = self._next, None
        assert microbatch is not None
        if self.kept is not None:
            self.kept.append(microbatch)
        return microbatch

    def close(self) -> None:
        """End the loader's processes."""
        if isinstance(self._microbatches, Generator):
            self._microbatches.close()


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
        """End the loaders' worker processes."""
        self.check.close()
        self.train.close()
        for one in self.evaluated:
            if isinstance(one.microbatches, Generator):
                one.microbatches.close()
