"""``--inject-fault``: the grammar of its comma-separated list of faults, and when a fault is due.

    KIND@MOMENT[+COUNT][:rankN][:TARGET][:NUMBER][:timesN|:always]

    kill@12:rank1               SIGKILL to rank 1 after the backward pass of iteration 12
    slow@30+10:rank1:1.3        rank 1 takes 1.3 times as long in iterations 30 to 39
    flip@15:rank0:weight:29     bit 29 of one weight of rank 0
    enospc@save2                no space left on the device at the second save of an attempt

``MOMENT`` is an iteration (from 1), ``saveN`` (the Nth save of an attempt at a save interval), ``load`` or ``start``.
Without ``rankN`` the fault is injected on every rank. It is injected in the first attempt that reaches it, with
``timesN`` in the first N, and with ``always`` in all of them. ``KINDS`` is the table of kinds; ``listener.py`` has
their effects. The faults that were injected are recorded in the run directory, so that a restart does not repeat them:

    RUN_DIR/injected_faults.jsonl    {"fault": "kill@12:rank1", "rank": 1, "number": 12, "time": ..., "monotonic": ...}
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import ConfigError
from megatron.urls import is_url

VARIABLE = "MEGATRON_FAULTS"
"""The environment variable that allows ``--inject-fault``, with the value 1. Entry points read it."""
ITERATION, SAVE, LOAD, START = "iteration", "save", "load", "start"
EVENTS = (LOAD, START)
"""Moments without a number, once an attempt. A new one is a word here, and a call of ``listener.reach``."""
TARGETS = ("weight", "gradient", "moment", "master")
FILE = "injected_faults.jsonl"
_LARGEST = 10**9  # the largest iteration, rank or count
_ANYWHERE = frozenset((ITERATION, SAVE, *EVENTS))
_IN_ITERATION, _IN_SAVE = frozenset((ITERATION,)), frozenset((SAVE,))
_LOADERS, _WRITERS = ("stoploader", "failloader"), ("stopwriter", "killwriter")


@dataclass(frozen=True)
class Number:
    """The number of a kind of fault."""

    meaning: str
    least: float
    most: float
    default: float | None
    """None: it has to be given, unless :attr:`is_optional`."""
    is_whole: bool = False
    is_optional: bool = False


_SECONDS = Number("seconds", 0.0, 1e6, default=None)
_FACTOR = Number("factor", 1.0, 1e6, default=None)
_BIT = Number("bit", 0, 63, default=None, is_whole=True)


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault."""

    moments: frozenset[str] = _ANYWHERE
    can_last: bool = False
    """Whether ``+COUNT`` iterations or saves can be given."""
    has_target: bool = False
    number: Number | None = None
    is_on_all_ranks: bool = False
    """Whether a rank cannot be chosen."""


KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind(),  # SIGKILL to the rank
    "stop": FaultKind(),  # SIGSTOP to the rank
    "sigterm": FaultKind(),  # SIGTERM to the rank
    "exit": FaultKind(number=Number("exit code", 1, 255, default=1, is_whole=True)),
    "exception": FaultKind(),
    "oom": FaultKind(),  # an allocation on the rank's device that fails
    "sleep": FaultKind(number=Number("seconds", 0.0, 1e6, default=None, is_optional=True)),  # without seconds for ever
    "gil": FaultKind(),  # a thread of the rank holds Python's interpreter lock for ever
    "fifo": FaultKind(),  # the rank reads a file that never answers
    "collective": FaultKind(_IN_ITERATION),  # the rank calls an all-reduce that no other rank calls
    "slow": FaultKind(_IN_ITERATION, can_last=True, number=_FACTOR),  # the rank takes so many times as long
    "delay": FaultKind(_IN_ITERATION, can_last=True, number=_SECONDS),  # the rank sleeps after its backward pass
    "nan": FaultKind(_IN_ITERATION, can_last=True),  # in a gradient of the rank, before the reduction
    # A flipped bit in one element: of a weight, a moment or a master weight before the forward pass, of a gradient
    # before the reduction.
    "flip": FaultKind(_IN_ITERATION, can_last=True, has_target=True, number=_BIT),
    "spike": FaultKind(_IN_ITERATION, can_last=True, number=_FACTOR, is_on_all_ranks=True),  # of the learning rate
    "stoploader": FaultKind(_IN_ITERATION),  # reads of the rank's loader threads do not return
    "failloader": FaultKind(_IN_ITERATION),  # or fail with an input/output error
    "stopwriter": FaultKind(_IN_ITERATION),  # SIGSTOP to the rank's background writer (--async-save)
    "killwriter": FaultKind(_IN_ITERATION),  # SIGKILL
    "enospc": FaultKind(_IN_SAVE, can_last=True),  # no space left on the device, in a synchronous save
    "eio": FaultKind(_IN_SAVE, can_last=True),  # an input/output error
    "slowsave": FaultKind(_IN_SAVE, can_last=True, number=_SECONDS),
}


@dataclass(frozen=True)
class Fault:
    """One fault of ``--inject-fault``."""

    kind: str
    moment: str
    """:data:`ITERATION`, :data:`SAVE`, :data:`LOAD` or :data:`START`."""
    first: int = 1
    """The iteration, or the number of the save in its attempt."""
    count: int = 1
    """Iterations or saves."""
    rank: int | None = None
    """None: every rank."""
    target: str | None = None
    number: float | None = None
    times: int | None = 1
    """Attempts in which it is injected; None for all."""

    def covers(self, moment: str, number: int) -> bool:
        return moment == self.moment and self.first <= number < self.first + self.count

    def __str__(self) -> str:
        """The fault in the grammar, in one fixed form."""
        moment = {ITERATION: f"{self.first}", SAVE: f"save{self.first}"}.get(self.moment, self.moment)
        words = [f"{self.kind}@{moment}" + (f"+{self.count}" if self.count > 1 else "")]
        words += [] if self.rank is None else [f"rank{self.rank}"]
        words += [] if self.target is None else [self.target]
        words += [] if self.number is None else [f"{self.number:.12g}"]
        words += ["always"] if self.times is None else [f"times{self.times}"] if self.times > 1 else []
        return ":".join(words)


@dataclass(frozen=True)
class FaultFlags:
    """Faults that the run injects into itself."""

    inject_fault: str | None = None
    """For tests of a cluster and of its recovery: break this run on purpose, as in kill@12:rank1,slow@30+10:rank0:1.3
    (docs/fault_cases.md). Refused unless the environment variable MEGATRON_FAULTS is 1."""

    def check(self) -> None:
        if self.inject_fault is not None:
            parse_faults(self.inject_fault)

    def check_faults_in_run(
        self, world_size: int, run_dir: str | None, save: str | None, is_async_save: bool, num_workers: int
    ) -> None:
        """Check against flags of other groups."""
        if self.inject_fault is None:
            return
        local_save = save is not None and not is_url(save)
        if run_dir is None and not local_save:
            raise ConfigError(
                "--inject-fault needs --run-dir: the faults are recorded there, so that a restart does not repeat them."
            )
        for fault in parse_faults(self.inject_fault):
            reason = None
            if fault.rank is not None and fault.rank >= world_size:
                reason = f"the run has ranks 0 to {world_size - 1}"
            elif fault.moment == SAVE and not local_save:
                reason = "it needs --save with a local directory"
            elif fault.moment == SAVE and is_async_save:
                reason = (
                    "with --async-save a background writer writes the files: remove --async-save, or use stopwriter@N"
                )
            elif fault.kind in _LOADERS and num_workers == 0:
                reason = "it needs loader threads: set --num-workers to 1 or more"
            elif fault.kind in _WRITERS and not (save is not None and is_async_save):
                reason = "it needs a background writer: add --async-save"
            if reason is not None:
                raise ConfigError(f"--inject-fault {fault}: {reason}.")


@dataclass
class FaultInjector:
    """Decides which faults of this rank are due, and records them; has none without ``--inject-fault``."""

    faults: Sequence[Fault] = ()
    rank: int = 0
    directory: Path | None = None
    """Directory of the record; needed if there are faults."""
    # Whether this attempt injects a fault, from the first moment at which it was due.
    _is_active: dict[Fault, bool] = field(default_factory=dict, init=False)

    def due(self, moment: str, number: int = 1) -> list[Fault]:
        """The faults of this rank at this moment, which are recorded and logged."""
        found = [fault for fault in self.faults if fault.rank in (None, self.rank) and fault.covers(moment, number)]
        for fault in found:
            if fault not in self._is_active:
                assert self.directory is not None
                path = self.directory / FILE
                past = sum(entry == (str(fault), self.rank) for entry in injected(path))
                self._is_active[fault] = fault.times is None or past < fault.times
                if self._is_active[fault]:
                    # Recorded before it is injected, since it may end this process.
                    entry = {"fault": str(fault), "rank": self.rank, "number": number}
                    entry |= {"time": time.time(), "monotonic": time.monotonic()}
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("a", encoding="utf-8") as file:  # of all ranks: each line is one write, at the end
                        file.write(f"{json.dumps(entry)}\n")
                    print(f"INJECTED FAULT: {fault} on rank {self.rank}", file=sys.stderr, flush=True)
        return [fault for fault in found if self._is_active[fault]]


def injected(path: Path) -> Iterator[tuple[str, int]]:
    """(fault, rank) of every fault that the file records."""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                yield entry["fault"], entry["rank"]


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of ``--inject-fault``; raises :class:`ConfigError` for the first mistake."""
    faults = tuple(parse_fault(word.strip()) for word in text.split(","))
    for number, fault in enumerate(faults):
        if fault in faults[:number]:
            raise ConfigError(f"--inject-fault has {fault} twice: remove one, or add :times2.")
    return faults


def parse_fault(text: str) -> Fault:
    name, separator, rest = text.partition("@")
    kind = KINDS.get(name)
    if kind is None or not separator:
        raise _mistake(text, f"it must be KIND@MOMENT, and KIND one of {', '.join(KINDS)}")
    when, *words = rest.split(":")
    moment, first, count = _parse_moment(text, name, kind, when)
    rank, words = _take(text, words, "rank")
    times, words = _take(text, words, "times")
    is_always = "always" in words
    if is_always:
        words.remove("always")
        if times is not None:
            raise _mistake(text, "give either always or timesN")
    if times == 0:
        raise _mistake(text, "times begins at 1")
    if rank is not None and kind.is_on_all_ranks:
        raise _mistake(text, f"{name} applies to all ranks: remove :rank{rank}")
    target: str | None = None
    if kind.has_target:
        target, *words = words or [""]
        if target not in TARGETS:
            raise _mistake(text, f"it needs one of {', '.join(TARGETS)}, and then a bit")
    number, words = _take_number(text, kind, words)
    if words:
        raise _mistake(text, f"{name} takes no {words[0]!r}")
    return Fault(name, moment, first, count, rank, target, number, None if is_always else times or 1)


def _parse_moment(text: str, name: str, kind: FaultKind, when: str) -> tuple[str, int, int]:
    """(moment, first, count)."""
    events = "|".join(EVENTS)
    found = re.fullmatch(rf"(?:(save)?([0-9]{{1,10}})|({events}))(?:\+([0-9]{{1,10}}))?", when, re.ASCII)
    if found is None:
        raise _mistake(text, f"the moment {when!r} must be an iteration, saveN, {' or '.join(EVENTS)}")
    save, first, event, count = found.groups()
    moment = event or (SAVE if save else ITERATION)
    if moment not in kind.moments:
        allowed = " or ".join({ITERATION: "an iteration", SAVE: "saveN"}.get(one, one) for one in sorted(kind.moments))
        raise _mistake(text, f"the moment of {name} is {allowed}")
    if count is not None and not (kind.can_last and event is None):
        raise _mistake(text, f"{name} has no duration: remove +{count}")
    if not 1 <= int(first or 1) <= _LARGEST or not 1 <= int(count or 1) <= _LARGEST:
        raise _mistake(text, f"the moment {when!r} must be from 1 to {_LARGEST}")
    return moment, int(first or 1), int(count or 1)


def _take(text: str, words: Sequence[str], prefix: str) -> tuple[int | None, list[str]]:
    """The number after ``prefix``, and the other words."""
    found = [word for word in words if re.fullmatch(rf"{prefix}[0-9]{{1,9}}", word, re.ASCII)]
    if len(found) > 1:
        raise _mistake(text, f"{prefix} is given twice")
    return int(found[0].removeprefix(prefix)) if found else None, [word for word in words if word not in found]


def _take_number(text: str, kind: FaultKind, words: list[str]) -> tuple[float | None, list[str]]:
    number = kind.number
    if number is None:
        return None, words
    if not words:
        if number.default is None and not number.is_optional:
            raise _mistake(text, f"the {number.meaning} is missing")
        return number.default, words
    pattern = r"[0-9]{1,9}" if number.is_whole else r"[0-9]{1,9}(?:\.[0-9]{1,6})?"
    if not re.fullmatch(pattern, words[0], re.ASCII) or not number.least <= float(words[0]) <= number.most:
        kind_of_number = "whole number" if number.is_whole else "number"
        raise _mistake(
            text, f"the {number.meaning} must be a {kind_of_number} from {number.least:g} to {number.most:g}"
        )
    return float(words[0]), words[1:]


def _mistake(text: str, reason: str) -> ConfigError:
    return ConfigError(f"--inject-fault {text!r}: {reason}; docs/fault_cases.md lists the faults.")


def check_allowed(spec: str | None, variable: str | None) -> None:
    """Raise :class:`ConfigError` unless the environment allows the faults of ``spec``.

    ``variable`` is the value of :data:`VARIABLE`.
    """
    if spec is not None and variable != "1":
        raise ConfigError(
            f"--inject-fault breaks this run on purpose: set the environment variable {VARIABLE}=1 to allow it, or "
            "remove the flag."
        )
