"""What the ranks of a calibration need from each other: to start together, and to agree on results."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from megatron.planner.calibration.turns import Sample


class Control(Protocol):
    """Objects of all ranks (:class:`megatron.core.control.ControlGroup`)."""

    def all_gather_object(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Ranks:
    """The processes that measure at the same time, as they would train at the same time."""

    rank: int = 0
    world_size: int = 1
    local_size: int = 1
    """Processes of a node."""
    control: Control | None = None
    """None for one process."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.control is not None:
            self.control.all_gather_object(None)

    def longest(self, seconds: float) -> float:
        """The largest value of a rank."""
        if self.control is None:
            return seconds
        return float(max(self.control.all_gather_object(seconds)))

    def agree(self, samples: list[Sample]) -> list[Sample]:
        """Of each sample the median over the ranks."""
        if self.control is None:
            return samples
        of_ranks = self.control.all_gather_object([one.median for one in samples])
        medians = [median(values) for values in zip(*of_ranks)]
        return [replace(one, median=value) for one, value in zip(samples, medians)]
