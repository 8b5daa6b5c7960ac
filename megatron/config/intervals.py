"""Intervals that change over the run, such as ``500@0,2000@1000``."""

import re
from dataclasses import dataclass

from megatron.config.errors import ConfigError

_STEP = re.compile(r"(\d+)@(\d+)")


@dataclass(frozen=True)
class IntervalSchedule:
    """What is due at every multiple of an interval, which depends on how far the run is."""

    steps: tuple[tuple[int, int], ...]
    """(interval, iteration after which it is in force), in ascending order from iteration 0."""

    @classmethod
    def parse(cls, flag: str, text: str) -> "IntervalSchedule":
        """A number of iterations, or ``interval@iteration`` pairs; raises :class:`ConfigError` naming ``flag``."""
        words = [f"{text}@0"] if text.isdecimal() else text.split(",")
        matches = [_STEP.fullmatch(word) for word in words]
        steps = tuple((int(match[1]), int(match[2])) for match in matches if match)
        starts = [start for _, start in steps]
        is_sound = len(steps) == len(words) and starts == sorted(set(starts)) and starts[0] == 0
        if not is_sound or min(interval for interval, _ in steps) < 1:
            raise ConfigError(
                f"{flag} {text} must be a number of iterations above zero, or such numbers with the iteration from "
                "which each is in force, the first being 0: 500@0,2000@1000."
            )
        return cls(steps)

    def is_due(self, iteration: int) -> bool:
        """Whether ``iteration``, counted from 1, is one."""
        interval = max((start, interval) for interval, start in self.steps if start < iteration)[1]
        return iteration % interval == 0
