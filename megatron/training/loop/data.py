"""The microbatches that the loop reads."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from megatron.data.loader import Microbatch
from megatron.training.loop.data_check import DataCheck


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
class Data:
    """This rank's infinite microbatches by split; None for an unused split."""

    train: Lookahead
    validation: Iterator[Microbatch] | None
    test: Iterator[Microbatch] | None
    train_epochs: Mapping[str, int]
    """Epochs in the sample order of each training corpus, by prefix."""
    check: DataCheck

    def close(self) -> None:
        """End the loaders' worker processes."""
        self.check.close()
        self.train.close()
        for source in (self.validation, self.test):
            if isinstance(source, Generator):
                source.close()
