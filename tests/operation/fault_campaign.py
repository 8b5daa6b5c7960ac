"""A campaign of random faults: each seed is a job of two ranks that is disturbed, restarted and checked.

    python -m tests.operation.fault_campaign --seeds 20 [--first-seed S] [--writers]

A seed decides the layout, the faults (``--inject-fault``), and what happens to the launcher, or which background
process (of ``--async-save`` or ``--redundant-save``) is killed at which stage of a save. The job runs under
``megatron.operation.launch``, and is started again as a scheduler would, until it is complete. Then these must hold:

- every checkpoint that was ever committed is still there, unchanged;
- every load took the newest committed checkpoint;
- every checkpoint, also the last one, has the bits of an undisturbed run;
- each launch ended with the documented exit code;
- the failure report of an attempt with one fault names its cause and its rank, and no failure is reported twice;
- no process and no temporary file remains;
- a background process that is killed costs at most its save or copy, and no restart;
- the classes of every attempt add up to its duration.

A seed that fails is printed with the command that repeats it. Moments that a fault names repeat exactly, moments of
signals to the launcher only roughly.
"""

import argparse
import getpass
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import TRACKER
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.storage import file_of_rank
from megatron.config.faults import ITERATION, LOAD, SAVE, START, Fault
from megatron.errors import ExitCode
from megatron.operation import accounting, attempts, failure, named_nodes, run_files, stays
from megatron.operation.causes import Cause
from megatron.operation.faults import FILE as INJECTED
from megatron.operation.faults import injected
from tests.end_to_end.run_process import (
    ENVIRONMENT,
    REPOSITORY,
    TINY_RUN,
    FlagValue,
    assert_same_tensors,
    descendants,
    fork_training,
    words_of,
)
from tests.forked import fork_context
from tests.operation.forked_ranks import run_launcher
from tests.operation.jobs import is_alive

RANKS, ITERATIONS, SAVE_INTERVAL = 2, 24, 4
LAST_FAULT = ITERATIONS - SAVE_INTERVAL
"""Faults come before the last save, so that a stop on request always comes before the end."""
PATIENCE = 180.0
"""Seconds for one launch, with its restarts, on a machine that does much else."""
MOST_LAUNCHES = 4
WRITER = b"megatron.checkpoint.background_main"
"""Background processes run this module."""

Flags = Mapping[str, FlagValue | Path]

RUN: Flags = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": ITERATIONS, "eval_iters": 0}
LAYOUTS: dict[str, Flags] = {
    "data": {},
    "zero": {"use_distributed_optimizer": True, "bf16": True},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "background": {"async_save": True, "async_save_timeout": 2, "num_workers": 1},
}
"""``background``: a background writer and a loader process for each rank."""
MIRROR: Flags = {"async_save_timeout": 2}
"""``--redundant-save`` with a copier for each rank; only for kills of copiers."""


@dataclass(frozen=True)
class Blow:
    """What happens to the launcher of the first launch."""

    number: signal.Signals
    iteration: int
    """It comes after this iteration was logged; 0: after the start."""
    delay: float
    """Seconds after that."""

    def __str__(self) -> str:
        return f"{self.number.name} to the launcher {self.delay:.2f} s after iteration {self.iteration}"


STAGES = ("idle", "writing", "committing")
"""Of a background process: without a job; with a file to write; on rank 0 waiting for the others' files to commit, on
another rank with its file written while rank 0 waits."""


@dataclass(frozen=True)
class WriterKill:
    """SIGKILL to the background process of a rank."""

    stage: str
    rank: int
    iteration: int
    """The checkpoint after which it comes, or in the next save."""

    def __str__(self) -> str:
        return f"SIGKILL to the background process of rank {self.rank}, {self.stage}, after iteration {self.iteration}"


@dataclass(frozen=True)
class Plan:
    """What one seed does."""

    seed: int
    layout: str
    faults: tuple[Fault, ...]
    blow: Blow | None = None
    writer: WriterKill | None = None

    @property
    def is_endless(self) -> bool:
        """Whether a fault comes back at every restart, until the run ends with 93."""
        return any(fault.times is None for fault in self.faults)

    def __str__(self) -> str:
        parts = [",".join(map(str, self.faults)), str(self.blow or ""), str(self.writer or "")]
        return f"seed {self.seed} {self.layout}: {'; '.join(part for part in parts if part)}"


# --- what a seed does ----------------------------------------------------------------------------------------

FATAL = ("kill", "exit", "exception", "oom", "nan", "sigterm")
"""Kinds that end an attempt."""
HANGS = ("stop", "sleep", "gil", "fifo")
"""Kinds that the watchdog ends."""
FIRST_LIMITS = 3
"""First iterations of an attempt, which have the watchdog's limit of a start."""
HARMLESS = ("slow", "delay", "slowsave", "enospc", "eio")
"""Kinds that do not; the first two in all layouts, the others for synchronous saves."""
IN_BACKGROUND = ("killloader", "killwriter", "stopwriter")
RARE = ("flip", "collective", "stoploader")
"""Kinds that need a layout of their own."""
NUMBERS = {"exit": 7.0, "slow": 1.5, "delay": 0.02, "slowsave": 0.3}


def make_plan(seed: int, writers: bool = False) -> Plan:
    """The plan of a seed: one or two events that end an attempt, and sometimes one that does not; or the kill of a
    background process, with ``writers`` always."""
    behind = random.Random(f"writer {seed}")
    if behind.random() < 0.1 or writers:
        return _writer_plan(seed, behind)
    rare = random.Random(f"rare {seed}")
    if rare.random() < 0.1:
        return _rare_plan(seed, rare)
    chance = random.Random(seed)
    layout = chance.choice(sorted(LAYOUTS))
    if chance.random() < 0.05:
        fault = Fault("kill", ITERATION, chance.randint(1, LAST_FAULT), rank=chance.randrange(RANKS), times=None)
        return Plan(seed, layout, (fault,))
    blow = None
    if chance.random() < 0.25:
        iteration = chance.choice((0, chance.randint(1, LAST_FAULT)))
        number = chance.choice((signal.SIGKILL, signal.SIGTERM))
        blow = Blow(number, iteration, chance.uniform(0.0, 3.0 if iteration == 0 else 0.3))
    if blow is None and chance.random() < 0.25:
        first = SAVE_INTERVAL * chance.randint(2, LAST_FAULT // SAVE_INTERVAL)
        assert (first - 1) % SAVE_INTERVAL == FIRST_LIMITS  # so many iterations after any checkpoint
        return Plan(seed, layout, (Fault(chance.choice(HANGS), ITERATION, first, rank=chance.randrange(RANKS)),))
    num_fatal = chance.choice((1, 1, 1, 2)) if blow is None else chance.choice((0, 1))
    faults = [_fatal(chance, layout) for _ in range(num_fatal)]
    if chance.random() < 0.5:
        harmless = _harmless(chance, layout)
        # A restart could come before it, and then there is no background writer yet.
        faults = [harmless] if harmless.kind in IN_BACKGROUND else [*faults, harmless]
    return Plan(seed, layout, tuple(dict.fromkeys(faults)), blow)


def _rare_plan(seed: int, chance: random.Random) -> Plan:
    """A flipped bit of a replica, a collective that one rank calls alone, or a stopped loader process."""
    kind, rank = chance.choice(RARE), chance.randrange(RANKS)
    first = SAVE_INTERVAL * chance.randint(2, LAST_FAULT // SAVE_INTERVAL)
    if kind == "flip":
        target, bit = chance.choice(("weight", "moment")), float(chance.randrange(32))
        return Plan(seed, "data", (Fault(kind, ITERATION, first, rank=rank, target=target, number=bit),))
    layout = "background" if kind == "stoploader" else chance.choice(sorted(LAYOUTS))
    return Plan(seed, layout, (Fault(kind, ITERATION, first, rank=rank),))


def _writer_plan(seed: int, chance: random.Random) -> Plan:
    """The kill of a background process. Iterations take longer, so that there is time between saves."""
    iteration = SAVE_INTERVAL * chance.randint(1, LAST_FAULT // SAVE_INTERVAL - 1)
    kill = WriterKill(chance.choice(STAGES), chance.randrange(RANKS), iteration)
    delay = Fault("delay", ITERATION, 1, ITERATIONS, number=0.05)
    return Plan(seed, chance.choice(("background", "mirror")), (delay,), writer=kill)


def _fatal(chance: random.Random, layout: str) -> Fault:
    background = layout == "background"
    kind = chance.choice(FATAL + (IN_BACKGROUND[:1] if background else ()))
    moments = [ITERATION] * 5 if kind in ("nan", "killloader") else [ITERATION] * 3 + [LOAD, START]
    if kind not in ("nan", "killloader", "sigterm") and not background:
        moments.append(SAVE)
    moment = chance.choice(moments)
    # The first iteration has no background processes yet.
    first = {ITERATION: chance.randint(2, LAST_FAULT), SAVE: chance.randint(1, 2)}.get(moment, 1)
    return Fault(kind, moment, first, rank=chance.choice((None, 0, 1, 1)), number=NUMBERS.get(kind))


def _harmless(chance: random.Random, layout: str) -> Fault:
    rank = chance.randrange(RANKS)
    if layout == "background":
        # After the first save, which starts the writer.
        return Fault(
            chance.choice(IN_BACKGROUND[1:]), ITERATION, chance.randint(SAVE_INTERVAL + 1, LAST_FAULT), rank=rank
        )
    kind = chance.choice(HARMLESS)
    if kind in HARMLESS[:2]:
        return Fault(kind, ITERATION, chance.randint(1, LAST_FAULT), 5, rank, number=NUMBERS[kind])
    return Fault(kind, SAVE, chance.randint(1, 2), rank=rank, number=NUMBERS.get(kind))


# --- a job ---------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One start of the launcher, and what was seen of it."""

    exit_code: int | None
    newly_injected: set[str]
    """Faults that this launch was the first to inject."""
    log: str


@dataclass
class Job:
    """A job in a directory of its own."""

    plan: Plan
    directory: Path
    forks: bool = True
    """Whether the launcher forks its ranks, which spares their imports."""
    launches: list[Launch] = field(default_factory=list)
    commits: dict[int, bytes] = field(default_factory=dict)
    """Manifest of every checkpoint that was ever seen, by iteration."""
    violations: list[str] = field(default_factory=list)
    is_writer_killed: bool = False
    _family: set[tuple[int, str]] = field(default_factory=set)
    """Every process of the job that was seen: its number and when it was started."""

    @property
    def save(self) -> Path:
        return self.directory / "save"

    @property
    def written(self) -> Path:
        """Where the background processes write."""
        return self.directory / "mirror" if self.plan.layout == "mirror" else self.save

    @property
    def temporary(self) -> Path:
        return self.directory / "tmp"

    def run(self) -> None:
        """Start the job until it is complete."""
        self.temporary.mkdir(parents=True)
        while len(self.launches) < MOST_LAUNCHES and not self.violations:
            self._launch(is_first=not self.launches)
            code = self.launches[-1].exit_code
            if code == ExitCode.COMPLETE:
                return
            if code == ExitCode.NO_PROGRESS:
                (self.save / attempts.FILE).unlink()
        if not self.violations:
            self.violations.append(f"not complete after {MOST_LAUNCHES} launches")

    def _launch(self, is_first: bool) -> None:
        log, before = self.directory / f"log.{len(self.launches)}", self.injected()
        log.touch()  # the launcher may be killed before it opens it
        process = fork_context().Process(
            target=run_launcher, args=(self._words(), self._environment(), log, self.forks)
        )
        process.start()
        self._watch(process, log, self.plan.blow if is_first else None)
        self._wait_for_orphans()
        self.launches.append(Launch(process.exitcode, self.injected() - before, log.read_text()))

    def _words(self) -> list[str]:
        flags = {**RUN, **layout_flags(self.plan.layout), "save": self.save, "load": self.save}
        flags |= {"save_interval": SAVE_INTERVAL}
        if self.written != self.save:
            flags["redundant_save"] = self.written
        # After a repetition of the endless fault the job must end with 93; then it goes on without it.
        is_over = bool(self.launches) and self.plan.is_endless
        if self.plan.faults and not is_over:
            flags["inject_fault"] = ",".join(map(str, self.plan.faults))
        if self.plan.is_endless:
            flags["max_failed_attempts"] = 1
        # Only where a rank hangs: on a machine that does much else, a healthy one may take seconds.
        if any(fault.kind in (*HANGS, "collective", "stoploader") for fault in self.plan.faults):
            flags |= {"hang_limit_s": 4, "hang_limit_data_s": 4}
        if any(fault.kind == "flip" for fault in self.plan.faults):
            flags["check_replicas_interval"] = 1
        launcher = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "4"]
        launcher += ["--log-dir", str(self.directory / "ranks")]
        return [*launcher, str(REPOSITORY / "pretrain_llama.py"), *words_of(flags)]

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return {**kept, **ENVIRONMENT, "MEGATRON_FAULTS": "1", "TMPDIR": str(self.temporary)}

    def _watch(self, process: BaseProcess, log: Path, blow: Blow | None) -> None:
        """Until the launcher has ended: note commits and processes, and hit it when that is due."""
        assert process.pid is not None
        deadline, due, noted = time.monotonic() + PATIENCE, math.inf, 0.0
        killer = None if self.plan.writer is None else WriterKiller(self.plan.writer, self.written, process.pid)
        while process.is_alive():
            now = time.monotonic()
            if now > deadline:
                self.violations.append(f"the job did not end within {PATIENCE:.0f} s")
                process.kill()
            if blow is not None and due == math.inf and _has_logged(log, blow.iteration):
                due = now + blow.delay
            if now > noted + 0.2 or now >= due:
                noted = now
                self._family |= {(pid, started_at(pid)) for pid in [process.pid, *descendants(process.pid)]}
            if blow is not None and now >= due:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, blow.number)
                blow, due = None, math.inf
            if killer is not None and not self.is_writer_killed:
                self.is_writer_killed = killer.act()
            self.note_commits()
            process.join(0.02)
        self.note_commits()

    def note_commits(self) -> None:
        """Note the checkpoints that are visible now."""
        for manifest in self.save.glob("iter_*/manifest.json"):
            iteration = int(manifest.parent.name[5:])
            if iteration not in self.commits:
                self.commits[iteration] = manifest.read_bytes()

    def _wait_for_orphans(self) -> None:
        """Nothing of the job may run 10 s after its launcher."""
        deadline = time.monotonic() + 10.0
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            self.violations.append(f"process {pid} remains: {Path(f'/proc/{pid}/cmdline').read_text()!r}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        return [pid for pid, start in self._family if is_alive(pid) and started_at(pid) == start]

    def injected(self) -> set[str]:
        """The faults that were injected."""
        return {fault for fault, _ in injected(self.save / INJECTED)}


class WriterKiller:
    """Kills the background process of a rank below ``launcher``, which writes to ``root``."""

    def __init__(self, kill: WriterKill, root: Path, launcher: int) -> None:
        self._kill, self._root, self._launcher = kill, root, launcher
        self._stopped: int | None = None
        """A process that must not go on before the kill: its own while it has a file to write; while a commit is waited
        for, the other rank's."""
        self._due = math.inf

    def act(self) -> bool:
        """Do what is due; whether the kill has happened."""
        if self._stopped is None:
            if not (self._root / f"iter_{self._kill.iteration:07d}").exists():
                return False
            if self._kill.stage == "idle":
                return self._signal(self._kill.rank, signal.SIGKILL) is not None
            other = self._kill.rank if self._kill.stage == "writing" else 1 - self._kill.rank
            self._stopped = self._signal(other, signal.SIGSTOP)
            return False
        if not self._is_at_stage():
            return False
        self._signal(self._kill.rank, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self._stopped, signal.SIGCONT)
        return True

    def _is_at_stage(self) -> bool:
        """Some time after the directory of the save is there, or the file of the rank that has to write it."""
        sign = "" if self._kill.stage == "writing" else f"/{file_of_rank(self._kill.rank)}"
        if self._due == math.inf and list(self._root.glob(f".iter_*.saving-*{sign}")):
            self._due = time.monotonic() + 0.15
        return time.monotonic() >= self._due

    def _signal(self, rank: int, number: signal.Signals) -> int | None:
        """Send a signal to the background process of ``rank``; its number, if it exists."""
        for pid in descendants(self._launcher):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if WRITER in words and f"RANK={rank}".encode() in variables:
                    os.kill(pid, number)
                    return pid
        return None


def layout_flags(layout: str) -> Flags:
    return MIRROR if layout == "mirror" else LAYOUTS[layout]


def _has_logged(log: Path, iteration: int) -> bool:
    return iteration == 0 or (log.exists() and f"] iteration {iteration:8d}/" in log.read_text())


def started_at(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


# --- what must hold ------------------------------------------------------------------------------------------


def check(job: Job, reference: Path) -> list[str]:
    """The violations of a job that has ended."""
    found = list(job.violations)
    found += check_commits(job.commits, job.save)
    found += check_bits(job.save, reference)
    found += check_leftovers(job.save, job.temporary)
    for number, one in enumerate(job.launches):
        found += check_exit_code(one, job.plan, is_first=number == 0)
        found += check_loads(one.log, set(job.commits))
    found += check_injected(job.plan, job.injected())
    found += check_attempts(job.save)
    found += check_report(job.plan, read_reports(job.save))
    if job.plan.writer is not None:
        found += check_writer(job, reference)
    return found


def check_writer(job: Job, reference: Path) -> list[str]:
    """The kill of a background process costs at most one save, or two copies: its own, and the one that would have
    begun meanwhile. Nothing restarts, and the last checkpoint is complete."""
    found = [] if job.is_writer_killed else ["the background process was never killed"]
    if len(attempts := accounting.read_attempts(job.save)) != 1:
        found.append(f"{len(attempts)} attempts after the kill of a background process")
    if job.written != job.save:
        found += check_bits(job.written, reference)
        found += check_leftovers(job.written, job.temporary)
    missing = {path.name for path in reference.glob("iter_*")} - {path.name for path in job.written.glob("iter_*")}
    if len(missing) > (1 if job.written == job.save else 2):
        found.append(f"after the kill of one background process {sorted(missing)} are missing in {job.written}")
    return found


def check_commits(commits: Mapping[int, bytes], save: Path) -> list[str]:
    """A committed checkpoint is never lost or changed."""
    found = []
    for iteration, manifest in sorted(commits.items()):
        path = save / f"iter_{iteration:07d}" / "manifest.json"
        if not path.exists():
            found.append(f"the checkpoint of iteration {iteration} is lost")
        elif path.read_bytes() != manifest:
            found.append(f"the checkpoint of iteration {iteration} was replaced")
    return found


def check_bits(save: Path, reference: Path) -> list[str]:
    """All tensors of all checkpoints are those of the undisturbed run, and its last one exists."""
    found = []
    wanted = {path.name for path in reference.glob("iter_*")}
    names = {path.name for path in save.glob("iter_*")}
    if max(wanted) not in names:
        found.append(f"the last checkpoint {max(wanted)} is missing")
    for name in sorted(names & wanted):
        try:
            assert_same_tensors(save / name, reference / name, prefix=("",))
        except AssertionError as error:
            found.append(f"{name} differs from the undisturbed run: {str(error).splitlines()[0]}")
        if state_of(save / name) != state_of(reference / name):
            found.append(f"{name} has another state than in the undisturbed run")
    return found


def state_of(checkpoint: Path) -> dict[str, object]:
    """The state in a manifest, without the flags, which have paths and faults."""
    state = dict(json.loads((checkpoint / "manifest.json").read_text())["manifest"]["state"])
    state.pop("flags", None)
    return state


PERMANENT = {
    TRACKER,
    LOCK,
    INJECTED,
    accounting.ATTEMPTS,
    failure.FILE,
    failure.DIRECTORY,
    named_nodes.FILE,
    *run_files.FILES,
    run_files.EARLIER,
    stays.FILE,
}
"""What remains beside the checkpoints."""


def check_leftovers(save: Path, temporary: Path) -> list[str]:
    """No temporary file or directory remains, after a start that could clear up."""
    # A job that did not get so far has no save directory; its violation is another one.
    names = {path.name for path in save.glob("*")} - PERMANENT
    left = sorted(name for name in names if not re.fullmatch(r"iter_\d{7}", name))
    # torch's cache of compiled kernels is one directory per user.
    kept = {path.name for path in temporary.iterdir()} - {f"torchinductor_{getpass.getuser()}"}
    left += [f"{temporary.name}/{name}" for name in sorted(kept)]
    return [f"files remain: {', '.join(left)}"] if left else []


def check_exit_code(one: Launch, plan: Plan, is_first: bool) -> list[str]:
    """The exit code is the documented one."""
    stops = {str(fault) for fault in plan.faults if fault.kind == "sigterm" and fault.moment != START}
    if is_first and plan.blow is not None and plan.blow.number == signal.SIGKILL:
        # Unless it came first to its end.
        allowed = {-signal.SIGKILL, ExitCode.STOPPED if stops & one.newly_injected else ExitCode.COMPLETE}
    elif is_first and plan.blow is not None:
        # 1: before the ranks listen to signals there is nothing to save.
        allowed = {ExitCode.STOPPED, ExitCode.CRASH, ExitCode.COMPLETE}
        if plan.blow.iteration == 0 and "> layout: " not in one.log:
            allowed.add(-signal.SIGTERM)  # nor before the launcher handles them
    elif is_first and plan.is_endless:
        allowed = {ExitCode.NO_PROGRESS}
    else:
        allowed = {ExitCode.STOPPED if stops & one.newly_injected else ExitCode.COMPLETE}
    if one.exit_code in allowed:
        return []
    return [f"exit code {one.exit_code} instead of {' or '.join(str(int(code)) for code in allowed)}"]


def check_loads(log: str, commits: set[int]) -> list[str]:
    """Every attempt loads a committed checkpoint, none older than the newest that was reported."""
    found, newest = [], 0
    for event, number in re.findall(r"(saved checkpoint \S*iter_|continuing after iteration )(\d+)", log):
        iteration = int(number)
        if event.startswith("saved"):
            newest = max(newest, iteration)
        elif iteration not in commits or iteration < newest:
            found.append(f"iteration {iteration} was loaded; saved until then: {newest}, committed: {sorted(commits)}")
    return found


def check_injected(plan: Plan, injected_faults: set[str]) -> list[str]:
    """The campaign did what it says. A number of a save may never be reached by an attempt."""
    missing = {str(fault) for fault in plan.faults if fault.moment != SAVE} - injected_faults
    return [f"never injected: {', '.join(sorted(missing))}"] if missing else []


def check_attempts(run_dir: Path) -> list[str]:
    """The classes of every attempt add up to its duration."""
    found = []
    for attempt in accounting.read_attempts(run_dir):
        total = sum(attempt.seconds.values())
        # A stop at the start makes attempts of a few hundredths of a second, and the file has whole milliseconds: half
        # of one may be missing in each class, in the start and in the end.
        rounding = 0.0005 * (sum(seconds > 0 for seconds in attempt.seconds.values()) + 2)
        if abs(total - attempt.wall_s) > 0.01 * attempt.wall_s + rounding:
            found.append(f"attempt {attempt.attempt} took {attempt.wall_s:.3f} s, its classes {total:.3f} s")
    return found


CAUSES: Mapping[str, set[Cause]] = {
    "kill": {Cause.KILLED},
    "exit": {Cause.UNKNOWN, Cause.EXCEPTION},
    "exception": {Cause.EXCEPTION},
    "oom": {Cause.OUT_OF_MEMORY},
    "nan": {Cause.NOT_FINITE},
    "killloader": {Cause.DATA},
    "stop": {Cause.STOPPED_PROCESS},
    "sleep": {Cause.HANG},
    "gil": {Cause.HANG},
    "fifo": {Cause.HANG},
    "flip": {Cause.SILENT_CORRUPTION},
    # Of another size, gloo aborts the process that receives it, and ranks that share memory refuse it.
    "collective": {Cause.HANG, Cause.KILLED, Cause.EXCEPTION},
    "stoploader": {Cause.STOPPED_PROCESS},
}
"""The cause that the failure report must name, by the kind of the fault."""


def read_reports(run_dir: Path) -> list[dict[str, Any]]:
    """The failure reports of all attempts, in their order."""
    return [json.loads(path.read_text()) for path in sorted((run_dir / failure.DIRECTORY).glob("*.json"))]


def check_report(plan: Plan, reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The failure of a plan with one fatal fault is reported with its cause and its rank.

    There is one report. A fault without a rank is a fault of every rank, injected in the first attempt in which *this*
    rank reaches it (docs/operations.md): if the first rank has failed before another one got there, the other one fails
    in the next attempt. So there may be one report for each rank, but none names a rank a second time.
    """
    fatal = [fault for fault in plan.faults if fault.kind not in (*HARMLESS, *IN_BACKGROUND[1:])]
    if not fatal and plan.blow is None:
        return [f"a failure is reported: {one['message']}" for one in reports]
    fault = fatal[0] if len(fatal) == 1 and fatal[0].kind in CAUSES else None
    if plan.blow is not None or fault is None or fault.times is None or fault.moment == SAVE:
        return []
    most = len({report["rank"] for report in reports}) if fault.rank is None else 1
    if not reports or len(reports) > most:
        return [f"{len(reports)} failure reports after {fault}: {[report['message'] for report in reports]}"]
    found = []
    for one in reports:
        cause, rank = one["cause"], one["rank"]
        if cause not in CAUSES[fault.kind]:
            found.append(f"cause {cause} reported after {fault}: {one['message']}")
        # All ranks see NaN. Two replicas, and two ranks in different collectives, do not say which one is wrong.
        unnamed = fault.kind in ("nan", "collective") or (fault.kind == "flip" and rank is None)
        if fault.rank is not None and not unnamed and rank != fault.rank:
            found.append(f"rank {rank} named after {fault}: {one['message']}")
    return found


# --- the campaign --------------------------------------------------------------------------------------------


class References:
    """The undisturbed runs, one of each layout."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def checkpoints(self, layout: str) -> Path:
        """The directory with the checkpoints of the undisturbed run."""
        save = self._directory / layout
        if not (save / TRACKER).exists():
            flags = {**RUN, **layout_flags(layout), "save": save, "save_interval": SAVE_INTERVAL}
            fork_training(words_of(flags), RANKS).succeeded()
        return save


def run_seed(
    seed: int, directory: Path, references: References, forks: bool = True, writers: bool = False
) -> tuple[Job, list[str]]:
    """Run the job of a seed; its violations."""
    plan = make_plan(seed, writers)
    reference = references.checkpoints(plan.layout)
    job = Job(plan, directory, forks)
    job.run()
    return job, check(job, reference)


def report(job: Job, violations: Sequence[str]) -> str:
    """What a failing seed has done, and how to repeat it."""
    lines = [f"FAILED: {job.plan}", *(f"  - {violation}" for violation in violations)]
    writers = " --writers" if job.plan.writer is not None else ""
    again = f"python -m tests.operation.fault_campaign --seeds 1 --first-seed {job.plan.seed} --keep{writers}"
    lines += [f"  repeat it: {again}"]
    lines += [f"  exit codes: {[one.exit_code for one in job.launches]}"]
    lines += [line for one in job.launches for line in one.log.splitlines()[-40:]]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the campaign; 1 if a seed failed."""
    parser = argparse.ArgumentParser(description="A campaign of random faults.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the files of failed seeds")
    parser.add_argument("--no-fork", action="store_true", help="start the ranks as usual: 5 s of CPU each")
    parser.add_argument("--writers", action="store_true", help="only kills of background processes")
    options = parser.parse_args(arguments)
    base, failed, started = Path(tempfile.mkdtemp(prefix="faults-")), [], time.monotonic()
    references = References(base / "references")
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        began = time.monotonic()
        job, violations = run_seed(seed, base / str(seed), references, not options.no_fork, options.writers)
        codes = "/".join(str(one.exit_code) for one in job.launches)
        print(f"{job.plan}: exit {codes}, {time.monotonic() - began:.1f} s", flush=True)
        if violations:
            failed.append(seed)
            print(report(job, violations), flush=True)
        if not (violations and options.keep):
            shutil.rmtree(base / str(seed))
    print(f"{options.seeds} seeds, {len(failed)} failed {failed or ''} in {time.monotonic() - started:.0f} s")
    if not (failed and options.keep):
        shutil.rmtree(base)
    else:
        print(f"files: {base}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
