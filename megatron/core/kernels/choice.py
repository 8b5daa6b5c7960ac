"""Choosing one of several implementations, and saying why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.config.kernels import Wanted
from megatron.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S")


class Unavailable(Exception):
    """Why an implementation cannot be used here: half a sentence."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    operation: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """An implementation of an operation."""

    name: str
    make: Callable[[], T]
    """The implementation, ready for use; raises :class:`Unavailable`."""
    merit: str
    """Why it is taken where it goes."""
    is_automatic: bool = True
    """Whether it may be chosen without having been asked for."""


def choose(operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted | None) -> tuple[T, Choice]:
    """The first of ``candidates`` that goes, or the one that is wanted.

    Raises :class:`ConfigError` where that one is not there, naming those that are.
    """
    if wanted is not None:
        return _choose_wanted(operation, candidates, wanted)
    obstacles = []
    for candidate in candidates:
        if not candidate.is_automatic:
            continue
        try:
            made = candidate.make()
        except Unavailable as error:
            obstacles.append(f"{candidate.name}: {error}")
            continue
        passed_over = f" (not {'; not '.join(obstacles)})" if obstacles else ""
        return made, Choice(operation, candidate.name, candidate.merit + passed_over)
    raise ConfigError(f"No implementation of {operation} is available: {'; '.join(obstacles)}.")


def _choose_wanted(operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted) -> tuple[T, Choice]:
    candidate = next(candidate for candidate in candidates if candidate.name == wanted.implementation)
    try:
        return candidate.make(), Choice(operation, candidate.name, f"asked for by {wanted.flag}")
    except Unavailable as error:
        there = [other.name for other in candidates if other is not candidate and _is_there(other)]
        raise ConfigError(
            f"{wanted.flag} is not available: {error}; available: {', '.join(there)}: use one of these, or remove it."
        ) from error


def _is_there(candidate: Candidate[S]) -> bool:
    try:
        candidate.make()
    except Unavailable:
        return False
    return True


def table(choices: Sequence[Choice]) -> list[str]:
    """A line for each choice, in columns."""
    columns = [
        max((len(getattr(choice, name)) for choice in choices), default=0) for name in ("operation", "implementation")
    ]
    return [
        f"  {choice.operation:{columns[0]}}  {choice.implementation:{columns[1]}}  {choice.reason}"
        for choice in choices
    ]
