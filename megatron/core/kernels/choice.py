"""Choosing one of several implementations, and saying why."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from megatron.config.kernels import Wanted
from megatron.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S")


class Unavailable(Exception):
    """Why an implementation cannot be used here: half a sentence."""


def load(module: str, package: str) -> Any:
    """The ``module`` of ``package``; raises :class:`Unavailable`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise Unavailable(f"{package} is not installed (no module {module})") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"{package} is installed but cannot be imported ({error})") from error


def attempt(trial: Callable[[], None]) -> None:
    """Run the trial of a kernel; any error is a reason not to use the kernel."""
    try:
        trial()
    except Unavailable:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n", maxsplit=1)[0]
        raise Unavailable(f"a trial failed ({first_line})") from error


def tried(kernel: T, trial: Callable[[T], None], can_try: bool) -> T:
    """``kernel``, after its trial if this process can run it."""
    if can_try:
        attempt(lambda: trial(kernel))
    return kernel


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    operation: str
    implementation: str
    reason: str
    is_forced: bool = False
    """Whether a flag asked for it."""
    is_stand_in: bool = False
    """Whether a better one is not available here."""


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """An implementation of an operation."""

    name: str
    make: Callable[[], T]
    """The implementation, ready for use; raises :class:`Unavailable`."""
    merit: str
    """Why it is preferred where it is available."""
    is_automatic: bool = True
    """Whether it may be chosen without a flag that requires it."""
    cost: str = ""
    """What it costs in this run, for the log; empty if nothing is to be said."""

    def choice(self, operation: str, reason: str, is_forced: bool = False, is_stand_in: bool = False) -> Choice:
        """The choice of this candidate."""
        reason = f"{reason}; {self.cost}" if self.cost else reason
        return Choice(operation, self.name, reason, is_forced, is_stand_in)


def choose(operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted | None) -> tuple[T, Choice]:
    """The first available one of ``candidates``, or the one that is wanted.

    Raises :class:`ConfigError` if that one is not available, and names those that are.
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
        return made, candidate.choice(operation, candidate.merit + passed_over, is_stand_in=bool(obstacles))
    raise ConfigError(f"No implementation of {operation} is available: {'; '.join(obstacles)}.")


def _choose_wanted(operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted) -> tuple[T, Choice]:
    candidate = next(candidate for candidate in candidates if candidate.name == wanted.implementation)
    try:
        return candidate.make(), candidate.choice(operation, f"asked for by {wanted.flag}", is_forced=True)
    except Unavailable as error:
        available = [other.name for other in candidates if other is not candidate and _is_available(other)]
        raise ConfigError(
            f"{wanted.flag} is not available: {error}; available: {', '.join(available)}: use one of these, or remove "
            "it."
        ) from error


def _is_available(candidate: Candidate[S]) -> bool:
    try:
        candidate.make()
    except Unavailable:
        return False
    return True


def short_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def table(choices: Sequence[Choice]) -> list[str]:
    """A line for each choice, in columns."""
    columns = [
        max((len(getattr(choice, name)) for choice in choices), default=0) for name in ("operation", "implementation")
    ]
    return [
        f"  {choice.operation:{columns[0]}}  {choice.implementation:{columns[1]}}  {choice.reason}"
        for choice in choices
    ]
