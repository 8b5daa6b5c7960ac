"""Choosing one of several implementations, and saying why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megatron.config.precision import Wanted
from megatron.core.device import Compiler, Unavailable, device_is_broken
from megatron.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S")


class BrokenDevice(Exception):
    """The first line of an error after which this process cannot use its GPU: another kernel would fail as well."""


def attempt(trial: Callable[[], None], is_broken: Callable[[], bool] = device_is_broken) -> None:
    """Run the trial of a kernel. An error is a reason not to use the kernel (:class:`Unavailable`), unless it is one
    after which no other kernel can run either (:class:`BrokenDevice`)."""
    try:
        trial()
    except Unavailable:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n", maxsplit=1)[0]
        if is_broken():
            raise BrokenDevice(first_line) from error
        raise Unavailable(f"a trial failed ({first_line})") from error


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
    """The implementation; raises :class:`Unavailable`. Quick: it runs nothing on the device."""
    merit: str
    """Why it is preferred where it is available."""
    is_automatic: bool = True
    """Whether it may be chosen without a flag that requires it."""
    trial: Callable[[T], None] | None = None
    """Compares it with the reference on the device, before it is chosen."""
    cost: str = ""
    """What it costs in this run, for the log; empty if nothing is to be said."""
    is_broken: Callable[[], bool] = device_is_broken
    """Whether this process cannot use its GPU any longer, after a trial that ended with an error."""
    simulated: Callable[[Compiler], T] | None = None
    """What stands for it on tensors without memory: torch's operations that launch and allocate as much, if the given
    compiler makes one launch of a function. None: the implementation itself, which needs no package and no compiler."""

    def ready(self, operation: str, compiler: Compiler | None = None) -> T:
        """The implementation, after its trial, or what stands for it if ``compiler`` simulates. Raises
        :class:`Unavailable`, or :class:`ConfigError` if the trial has left the process without a usable GPU."""
        if compiler is not None and self.simulated is not None:
            return self.simulated(compiler)
        try:
            made, trial = self.make(), self.trial
            if trial is not None:
                attempt(lambda: trial(made), self.is_broken)
        except BrokenDevice as error:
            raise ConfigError(
                f"The trial of --kernel {operation}={self.name} ended with an error after which this process cannot "
                f"use its GPU ({error}): start again with another implementation (--kernel {operation}=...)."
            ) from error
        return made

    def choice(self, operation: str, reason: str, is_forced: bool = False, is_stand_in: bool = False) -> Choice:
        """The choice of this candidate."""
        reason = f"{reason}; {self.cost}" if self.cost else reason
        return Choice(operation, self.name, reason, is_forced, is_stand_in)


def choose(
    operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted | None, compiler: Compiler | None = None
) -> tuple[T, Choice]:
    """The first available one of ``candidates``, or the one that is wanted.

    Raises :class:`ConfigError` if that one is not available, and names those that are. On a simulated machine, whose
    ``compiler`` is given, the first available one replaces it: a search over layouts goes on.
    """
    if wanted is not None:
        candidate = next(candidate for candidate in candidates if candidate.name == wanted.implementation)
        try:
            made = candidate.ready(operation, compiler)
            return made, candidate.choice(operation, f"asked for by {wanted.flag}", is_forced=True)
        except Unavailable as error:
            if compiler is None:
                raise _refusal(candidates, wanted, error) from error
    obstacles = []
    for candidate in candidates:
        if not candidate.is_automatic:
            continue
        try:
            made = candidate.ready(operation, compiler)
        except Unavailable as error:
            obstacles.append(f"{candidate.name}: {error}")
            continue
        passed_over = f" (not {'; not '.join(obstacles)})" if obstacles else ""
        return made, candidate.choice(operation, candidate.merit + passed_over, is_stand_in=bool(obstacles))
    raise ConfigError(f"No implementation of {operation} is available: {'; '.join(obstacles)}.")


def _refusal(candidates: Sequence[Candidate[T]], wanted: Wanted, obstacle: Unavailable) -> ConfigError:
    """Why the implementation that is wanted cannot be had, and which can."""
    # Only made, not tried: the trials of all others would cost the caller seconds to word an error.
    others = (one.name for one in candidates if one.name != wanted.implementation and _is_available(one))
    return ConfigError(
        f"{wanted.flag} is not available: {obstacle}; available: {', '.join(others)}: use one of these, or remove it."
    )


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
