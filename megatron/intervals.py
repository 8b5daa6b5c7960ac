"""Intervals that change over the run, such as ``500@0,2000@1000``."""

import re
from dataclasses import dataclass
from itertools import count

from megatron.errors import ConfigError

_STEP = re.compile(r"(\d+)@(\d+)")


@dataclass(frozen=True)
class IntervalSchedule:
    """What is due at every multiple of an interval, which depends on how far the run is."""

    steps: tuple[tuple[int, int], ...]
    """(interval, iteration after which it is in force), in ascending order from iteration 0."""

    @classmethod
    def parse(cls, flag: str, text: str) -> "IntervalSchedule":
        """Parse a number of iterations, or ``interval@start`` pairs; raises :class:`ConfigError` naming ``flag``."""
        words = [f"{text}@0"] if text.isdecimal() else text.split(",")
        matches = [_STEP.fullmatch(word) for word in words]
        steps = tuple((int(match[1]), int(match[2])) for match in matches if match)
        starts = [start for _, start in steps]
        is_sound = len(steps) == len(words) and starts == sorted(set(starts)) and starts[0] == 0
        if not is_sound or min(interval for interval, _ in steps) < 1:
            raise ConfigError(
                f"{flag} {text} must be a positive number of iterations, or a list INTERVAL@START whose first START is "
                "0: for example 500@0,2000@1000."
            )
        return cls(steps)

    def is_due(self, iteration: int) -> bool:
        """Whether the interval ends at ``iteration``, counted from 1."""
        interval = max((start, interval) for interval, start in self.steps if start < iteration)[1]
        return iteration % interval == 0

    def next_due(self, iteration: int) -> int:
        """The first iteration after ``iteration`` at which an interval ends."""
        return next(number for number in count(iteration + 1) if self.is_due(number))
