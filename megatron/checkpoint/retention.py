"""Choice of checkpoints to delete: the kept ones are verified first, and damaged ones are never deleted."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.errors import CheckpointError

_logger = logging.getLogger(__name__)


@dataclass
class Retention:
    """Keeps the newest ``last`` good checkpoints (default: one) and those at multiples of ``interval``.

    ``verify`` compares a checkpoint with its digests and raises :class:`CheckpointError`; a good result is remembered.
    """

    last: int | None
    interval: int | None
    verify: Callable[[int], None]
    _good: set[int] = field(default_factory=set)

    def confirm(self, iteration: int) -> None:
        """Record that the checkpoint of ``iteration`` has been verified."""
        self._good.add(iteration)

    def superfluous(self, iterations: Sequence[int]) -> list[int]:
        """The ``iterations`` (ascending) that may be deleted."""
        missing = self.last or 1
        newest_first = iterations[::-1]
        if all(self._is_milestone(iteration) for iteration in newest_first[missing:]):
            return []  # without verification, which reads everything
        for place, iteration in enumerate(newest_first):
            missing -= self._is_good(iteration)
            if missing == 0:
                return [older for older in newest_first[place + 1 :] if not self._is_milestone(older)]
        return []

    def _is_milestone(self, iteration: int) -> bool:
        return self.interval is not None and iteration % self.interval == 0

    def _is_good(self, iteration: int) -> bool:
        if iteration not in self._good:
            try:
                self.verify(iteration)
            except CheckpointError as error:
                _logger.warning("The checkpoint of iteration %d is kept, but counts for nothing: %s", iteration, error)
                return False
            self._good.add(iteration)
        return True
