"""What each rank is doing, in a few words of memory that its launcher can read at any time.

The launcher creates one :class:`HeartbeatMemory` for the ranks of its node and passes its path in :data:`HEARTBEATS`.
Each rank writes to its own slot through a :class:`Heartbeat`. The launcher can read the slot of a rank that hangs,
that is stopped, or that has been killed. Without a launcher the memory is private to the rank, which then only counts
its own seconds.

A write costs less than a microsecond: single stores of 8 bytes, no system call, no lock.
"""

import dataclasses
import faulthandler
import json
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from megatron.command_line.words import split_words
from megatron.config.operation import OperationConfig
from megatron.config.run import RunConfig

HEARTBEATS = "MEGATRON_HEARTBEATS"
"""Environment variable with the path of the launcher's :class:`HeartbeatMemory`."""
DUMP_SIGNAL: int | None = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else None
"""At this signal a rank writes the stacks of all its threads. It does so in C, so a thread that holds the GIL cannot
prevent it. Not SIGUSR1 or SIGUSR2, which batch systems send (``--exit-signal``)."""


class Section(IntEnum):
    """The parts of a process's life. Every moment is in exactly one of them."""

    START = 0
    """Imports, process groups, building the model."""
    LOAD = 1
    """Finding, verifying and loading a checkpoint."""
    DATA = 2
    """Waiting for a microbatch."""
    STEP = 3
    """An iteration outside of the sections below: listeners, metrics."""
    FORWARD_BACKWARD = 4
    GRADS_REDUCE = 5
    OPTIMIZER = 6
    EVALUATION = 7
    SAVE = 8
    """The training loop is blocked by a save."""
    SPARE = 9
    """Waiting without a part in the training."""
    END = 10
    """After the last iteration and its save."""

    @property
    def label(self) -> str:
        """The name for people and files, for example ``forward-backward``."""
        return self.name.lower().replace("_", "-")


STEP_SECTIONS = (Section.STEP, Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER)
"""The sections whose seconds are training."""

# The slot of a rank, in words of 8 bytes:
#
#     word 0      pid, last written at the start: a slot with a process id is complete
#          1..12  when the rank attached, section, ... (the names below)
#         16..26  nanoseconds in each section that was left
#         32..42  nanoseconds of them in which the rank waited in a collective
#         64      length of the settings, in bytes
#         65..    the settings as JSON, to the end of the slot
#
# Words are written one after the other, without a lock: a reader may see the first of two and not the second.
_PID, _ATTACHED, _SECTION, _ENTERED, _ITERATION, _MICROBATCH, _COLLECTIVES = range(7)
_COMMITTED, _STEP_AT_COMMIT, _SAVES, _FIRST, _DONE, _DROPPED = range(7, 13)
_SUMS, _WAITS, _SETTINGS = 16, 32, 64
_SLOT_BYTES = 8192
_WORD = 8
_NONE = -1


@dataclass(frozen=True)
class Snapshot:
    """A rank's slot at one moment. Times are readings of the monotonic clock, which all processes of a host share."""

    pid: int
    attached_ns: int
    """When the rank began to write."""
    section: Section
    entered_ns: int
    """When it entered the section."""
    iteration: int
    """The iteration under way; the first one is 1."""
    microbatch: int
    """Microbatches that the rank has read in this iteration."""
    collectives: int
    """Collectives that it has started."""
    committed_iteration: int | None
    """Iteration of the newest checkpoint that this attempt committed."""
    step_ns_at_commit: int
    """:attr:`Heartbeat.step_ns` when the state of that checkpoint was copied."""
    saves: int
    """Checkpoints that this attempt committed."""
    first_iteration: int | None
    """Iteration of the checkpoint from which this attempt trains, 0 without one; the lowest if it has rolled back. None
    before training."""
    done_iteration: int | None
    """Iterations done, also in earlier attempts; None before training."""
    dropped_ns: int
    """Time in :data:`STEP_SECTIONS` that rollbacks to a checkpoint have dropped in this attempt."""
    section_ns: Mapping[Section, int]
    """Time in each section until ``entered_ns``."""
    waited_ns: Mapping[Section, int]
    """The part of it in which the rank waited in collectives."""

    def section_ns_until(self, now_ns: int) -> dict[Section, int]:
        """Time in each section, if the rank has been in the current one until ``now_ns``."""
        times = dict(self.section_ns)
        times[self.section] += max(0, now_ns - self.entered_ns)
        return times

    def position(self) -> dict[str, Any]:
        """Where the rank is, or has ended, as fields of the reports of a failure."""
        return {
            "iteration": self.iteration or None,
            "microbatch": self.microbatch if self.iteration else None,
            "section": self.section.label,
            "committed_iteration": self.committed_iteration or self.first_iteration or None,
        }


class Heartbeat:
    """A rank's own slot. Only its main thread writes, or autograd's thread while the main thread waits for it."""

    def __init__(self, memory: "memoryview | None" = None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._memory = memoryview(bytearray(_SLOT_BYTES)) if memory is None else memory
        self.is_private = memory is None
        """Whether no launcher reads this slot."""
        self.is_watched = not self.is_private
        """Whether a process reads it for hangs."""
        self._words = self._memory.cast("q")
        self._stacks: int | None = None
        self.settings: dict[str, Any] = {}
        """What :meth:`write_settings` has written."""
        self.begin()

    def begin(self) -> None:
        """An attempt begins; the settings stay."""
        self._section = Section.START
        # step_ns at the state of each iteration to which training can return.
        self._step_ns_at: dict[int, int] = {}
        self._words[:_SETTINGS] = memoryview(bytearray(_WORD * _SETTINGS)).cast("q")
        now = self._now_ns()
        self._entered = now
        self._words[_ENTERED] = self._words[_ATTACHED] = now
        self._words[_COMMITTED] = self._words[_FIRST] = self._words[_DONE] = _NONE
        # Last: a slot with a process id is complete.
        self._words[_PID] = os.getpid()

    @classmethod
    def attach(
        cls, environment: Mapping[str, str], local_rank: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> "Heartbeat":
        """The slot that the launcher provides for this rank, else private memory; with a warning if it cannot be
        opened, as in a container of its own."""
        path = environment.get(HEARTBEATS)
        if path is None:
            return cls(now_ns=now_ns)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            print(
                f"WARNING: the launcher's heartbeat memory {path} cannot be opened ({error.strerror}), so a hang of "
                "this rank is not noticed: start the launcher and its ranks in one PID namespace.",
                file=sys.stderr,
                flush=True,
            )
            return cls(now_ns=now_ns)
        return cls(_slot(descriptor, local_rank), now_ns)

    def move_to(self, path: str, local_rank: int) -> None:
        """Write from now on to the slot of ``local_rank`` in the memory ``path``, which is no launcher's
        (:mod:`megatron.operation.side_watch`); raises :class:`OSError`."""
        slot = _slot(os.open(path, os.O_RDWR), local_rank)
        slot[:] = self._memory
        self._memory, self._words, self.is_watched = slot, slot.cast("q"), True

    def enter(self, section: Section) -> Section:
        """Enter ``section``; returns the one that was left."""
        words, left, now = self._words, self._section, self._now_ns()
        words[_SUMS + left] += now - self._entered
        words[_SECTION] = section
        words[_ENTERED] = now
        self._section, self._entered = section, now
        return left

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """A context in ``section``, after which the rank is in the previous one again."""
        previous = self.enter(section)
        yield
        # Not after an error: the rank stays in the section where it failed, for the report.
        self.enter(previous)

    def start_iteration(self, iteration: int) -> None:
        self._words[_ITERATION] = iteration
        self._words[_MICROBATCH] = 0

    def count_microbatch(self) -> None:
        self._words[_MICROBATCH] += 1

    def count_collective(self) -> None:
        self._words[_COLLECTIVES] += 1

    @property
    def current(self) -> Section:
        return self._section

    def add_waited(self, nanoseconds: int, section: Section | None = None) -> None:
        """The rank has waited so long in a collective, in ``section`` or else in the current one."""
        self._words[_WAITS + (self._section if section is None else section)] += nanoseconds

    @property
    def step_ns(self) -> int:
        """Time in :data:`STEP_SECTIONS` until now, without what rollbacks have dropped."""
        open_span = self._now_ns() - self._entered if self._section in STEP_SECTIONS else 0
        finished = sum(self._words[_SUMS + section] for section in STEP_SECTIONS)
        return finished + open_span - self._words[_DROPPED]

    def start_training(self, iteration: int) -> None:
        """Training begins after ``iteration``; a second time in the same process after a rollback, which drops the time
        since then."""
        words, first = self._words, self._words[_FIRST]
        if first == _NONE:
            words[_FIRST] = iteration
            self._step_ns_at[iteration] = self.step_ns
        else:
            words[_FIRST] = min(first, iteration)
            step_ns = self._step_ns_at.setdefault(iteration, 0)
            words[_DROPPED] += max(0, self.step_ns - step_ns)
            words[_STEP_AT_COMMIT] = min(words[_STEP_AT_COMMIT], step_ns)
        words[_DONE] = iteration

    def finish_iteration(self, iteration: int) -> None:
        self._words[_DONE] = iteration

    def busy_ns(self) -> dict[Section, int]:
        """Time in each section until now in which the rank did not wait for others."""
        snapshot = self.snapshot()
        times = snapshot.section_ns_until(self._now_ns())
        return {section: spent - snapshot.waited_ns[section] for section, spent in times.items()}

    def committed(self, iteration: int, step_ns: int) -> None:
        """A checkpoint of ``iteration`` is complete; ``step_ns`` is :attr:`step_ns` when its state was copied."""
        self._step_ns_at[iteration] = step_ns
        self._words[_STEP_AT_COMMIT] = step_ns
        self._words[_COMMITTED] = iteration
        self._words[_SAVES] += 1

    def snapshot(self) -> Snapshot:
        snapshot = _read(self._memory)
        assert snapshot is not None
        return snapshot

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the run for the launcher, as JSON (:class:`RunSettings`)."""
        stacks = {} if self._stacks is None else {"stacks": f"/proc/{os.getpid()}/fd/{self._stacks}"}
        self.settings = {**settings, **stacks}
        text = json.dumps(self.settings).encode()
        start = _WORD * (_SETTINGS + 1)
        assert start + len(text) <= _SLOT_BYTES, "the settings do not fit into the slot"
        self._words[_SETTINGS] = 0
        self._memory[start : start + len(text)] = text
        self._words[_SETTINGS] = len(text)

    def dump_stacks_on_signal(self) -> None:
        """At :data:`DUMP_SIGNAL`, write the stacks of all threads to a file in memory; the settings have its path."""
        if DUMP_SIGNAL is None or not hasattr(os, "memfd_create"):
            return
        self._stacks = os.memfd_create("stacks")
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True, chain=False)


def _slot(descriptor: int, local_rank: int) -> memoryview:
    """The slot of a rank in a file, which is closed."""
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    return memory[local_rank * _SLOT_BYTES : (local_rank + 1) * _SLOT_BYTES]


class HeartbeatMemory:
    """The slots of the ranks of a node, by local rank; the launcher owns it."""

    def __init__(self, num_ranks: int) -> None:
        if hasattr(os, "memfd_create"):
            # Nothing remains of it, however the launcher ends.
            descriptor = os.memfd_create("heartbeats")
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, self.path = tempfile.mkstemp(prefix="heartbeats-")
        self._file = os.fdopen(descriptor, "rb+", buffering=0)
        self._file.truncate(num_ranks * _SLOT_BYTES)
        memory = memoryview(mmap.mmap(self._file.fileno(), 0))
        self._slots = [memory[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES] for rank in range(num_ranks)]

    def snapshots(self) -> list[Snapshot | None]:
        """The slots of all ranks, as of :meth:`read`."""
        return [_read(slot) for slot in self._slots]

    def read(self, local_rank: int) -> Snapshot | None:
        """The slot of a rank; None before the rank has attached."""
        return _read(self._slots[local_rank])

    def settings(self, local_rank: int) -> dict[str, Any]:
        """What the rank wrote with :meth:`Heartbeat.write_settings`; empty before that."""
        slot = self._slots[local_rank]
        length = slot.cast("q")[_SETTINGS]
        start = _WORD * (_SETTINGS + 1)
        with suppress(ValueError):
            return dict(json.loads(bytes(slot[start : start + length]))) if length else {}
        return {}

    def clear(self) -> None:
        """Clear the slots of the last attempt; call it before new ranks start."""
        for slot in self._slots:
            slot.cast("q")[: _SETTINGS + 1] = memoryview(bytearray(_WORD * (_SETTINGS + 1))).cast("q")


def _read(slot: memoryview) -> Snapshot | None:
    words = slot.cast("q")
    if words[_PID] == 0:
        return None

    def iteration_at(place: int) -> int | None:
        return None if words[place] == _NONE else words[place]

    return Snapshot(
        pid=words[_PID],
        attached_ns=words[_ATTACHED],
        section=Section(words[_SECTION]),
        entered_ns=words[_ENTERED],
        iteration=words[_ITERATION],
        microbatch=words[_MICROBATCH],
        collectives=words[_COLLECTIVES],
        committed_iteration=iteration_at(_COMMITTED),
        step_ns_at_commit=words[_STEP_AT_COMMIT],
        saves=words[_SAVES],
        first_iteration=iteration_at(_FIRST),
        done_iteration=iteration_at(_DONE),
        dropped_ns=words[_DROPPED],
        section_ns={section: words[_SUMS + section] for section in Section},
        waited_ns={section: words[_WAITS + section] for section in Section},
    )


def run_directory(config: RunConfig) -> Path | None:
    """The directory for the records of a run: ``--run-dir``, else ``--save``; None without either."""
    place = config.operation.run_dir or config.checkpoint.save
    return None if place is None else Path(place)


def run_directory_in(arguments: Sequence[str]) -> Path | None:
    """:func:`run_directory` in a command line, for the launcher, which does not parse the flags of the run."""
    place = value_in(arguments, "--run-dir") or value_in(arguments, "--save")
    return None if not place else Path(place).absolute()


def value_in(arguments: Sequence[str], flag: str) -> str | None:
    """The value of ``flag``, the last one if it is given several times; None if it is not there."""
    values = [one.values[0] for one in split_words(arguments) if one.flag == flag and one.values]
    return values[-1] if values else None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, which each rank writes into its slot for the launcher."""

    rank: int
    world_size: int
    run_dir: str | None
    """Absolute path of the run directory."""
    operation: OperationConfig
    hosts: tuple[str, ...] = ()
    """Distinct host names (at most 4,000 characters); written by rank 0 only, when it holds the lock of the run."""
    counts_from: int | None = None
    """:attr:`megatron.operation.attempts.Attempt.counts_from`; written by rank 0 only."""
    dataloader_timeout: float | None = None
    """``--dataloader-timeout``, if given."""

    @classmethod
    def of(cls, config: RunConfig, rank: int, world_size: int) -> "RunSettings":
        directory = run_directory(config)
        place = None if directory is None else os.path.abspath(directory)
        return cls(rank, world_size, place, config.operation, dataloader_timeout=config.data.dataloader_timeout)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunSettings | None":
        """The settings of a slot; None before the rank has written them."""
        if "rank" not in values:
            return None
        # The code may have been replaced since the launcher was started: ranks may have other flags.
        known = {item.name for item in dataclasses.fields(OperationConfig)}
        operation = OperationConfig(**{name: value for name, value in values["operation"].items() if name in known})
        hosts, timeout = tuple(values.get("hosts", ())), values.get("dataloader_timeout")
        counts_from = values.get("counts_from")
        return cls(values["rank"], values["world_size"], values["run_dir"], operation, hosts, counts_from, timeout)
