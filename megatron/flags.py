"""Flags as fields of a dataclass: their names and values, and the checks of values that the groups share."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron.errors import ConfigError


@dataclass(frozen=True)
class Argument:
    """In ``Annotated``: in what the flag of a field is unlike one with the field's name and docstring."""

    help: str = ""
    """Help that is computed from a table, instead of the docstring."""
    aliases: tuple[str, ...] = ()
    """Further names of the flag."""
    is_positional: bool = False
    """Whether it is a word without a flag."""
    alone: str = ""
    """Value of the flag with no word after it; empty if it needs one."""


def flag_of(name: str) -> str:
    """The flag of the field ``name``; a field ``from_`` cannot have the name of its flag."""
    return "--" + name.rstrip("_").replace("_", "-")


def words_of(name: str, value: Any) -> list[str]:
    """The words of the command line that set the field ``name`` to ``value``."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), *map(str, value if isinstance(value, tuple) else (value,))]


def values_of(group: Any, *names: str) -> dict[str, Any]:
    """Value by flag, of the fields ``names``."""
    return {flag_of(name): getattr(group, name) for name in names}


def changed_flags(group: Any, *names: str) -> list[str]:
    """The flags among the fields ``names`` that are not at their default, without their values."""
    values = {name: getattr(group, name) for name in names}
    defaults = type(group).__dataclass_fields__
    return [words_of(name, value)[0] for name, value in values.items() if value != defaults[name].default]


def changed_words(group: Any, *names: str) -> list[str]:
    """The words of the command line for the fields ``names``, by default all, that are not at their default."""
    wanted = names or tuple(type(group).__dataclass_fields__)
    return [
        word
        for name in wanted
        if changed_flags(group, name) and getattr(group, name) is not None
        for word in words_of(name, getattr(group, name))
    ]


def require_flag(needed: str, is_given: bool, dependent: Iterable[str]) -> None:
    """Raise :class:`ConfigError` for the ``dependent`` flags, unless the flag that they need is given."""
    dependent = tuple(dependent)
    if dependent and not is_given:
        raise ConfigError(*(f"{flag} needs {needed}: add it, or remove {flag}." for flag in dependent))


# Value by flag; None (not given) passes.
Values = Mapping[str, float | int | None]


def require_at_least(minimum: int, values: Values) -> None:
    """Raise :class:`ConfigError` for the values below ``minimum``."""
    bound = "be finite and not negative" if minimum == 0 else f"be at least {minimum}"
    _refuse(values, lambda value: minimum <= value < math.inf, bound)


def require_positive(values: Values) -> None:
    """Raise :class:`ConfigError` for the values that are not above zero."""
    _refuse(values, lambda value: 0 < value < math.inf, "be positive and finite")


def require_fraction(values: Values, with_one: bool = False) -> None:
    """Raise :class:`ConfigError` for the values outside [0, 1), or outside [0, 1] ``with_one``."""
    bound = "be from 0 to 1" if with_one else "be at least 0 and below 1"
    _refuse(values, lambda value: 0 <= value < 1 or (with_one and value == 1), bound)


def _refuse(values: Values, is_in_range: Callable[[float], bool], bound: str) -> None:
    outside = {flag: value for flag, value in values.items() if value is not None and not is_in_range(value)}
    if outside:
        raise ConfigError(*(f"{flag} {value} must {bound}." for flag, value in outside.items()))


_STEP = re.compile(r"(\d+)@(\d+)")


@dataclass(frozen=True)
class IntervalSchedule:
    """What is due at every multiple of an interval, which depends on how far the run is."""

    steps: tuple[tuple[int, int], ...]
    """(interval, iteration after which it is in force), in ascending order from iteration 0."""

    @classmethod
    def parse(cls, flag: str, text: str) -> "IntervalSchedule":
        """Parse a number of iterations, or ``interval@start`` pairs; raises :class:`ConfigError` naming ``flag``."""
        # 500@0,2000@1000: due at 500, 1000, 2000, 4000, 6000 ...
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
