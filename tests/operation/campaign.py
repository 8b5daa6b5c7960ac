"""Campaigns of random faults in jobs of two ranks.

    python -m tests.operation.campaign jobs --count 20 [--seed S] [--writers]
    python -m tests.operation.campaign hangs --count 200 [--seed S]
    python -m tests.operation.campaign kills --count 200 [--seed S] [--warm]

``jobs``: each seed is a job that is disturbed, started again as a scheduler would, until it is complete, and checked.
It decides the layout, the faults (``--inject-fault``), and what happens to the launcher, or which background process
(of ``--async-save`` or ``--redundant-save``) is killed at which stage of a save. Moments that a fault names repeat
exactly, moments of signals to the launcher only roughly. docs/fault_cases.md lists what must hold.

``hangs`` and ``kills`` break one job again and again (tests/operation/broken_job.py).
"""

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpoint.checkpointing import file_of_rank
from megatron.checkpoint.directory import TRACKER
from megatron.errors import ExitCode
from megatron.features.faults.flags import FILE as INJECTED
from megatron.features.faults.flags import ITERATION, LOAD, SAVE, START, Fault, injected
from megatron.operation import attempts
from tests.end_to_end.run_process import ENVIRONMENT, TINY_RUN, Flags, descendants, fork_training, words_of
from tests.operation import broken_job, campaign_checks
from tests.operation.jobs import PRETRAIN, Launcher, cmdline, environment_of, is_alive, kill_all, started_at

RANKS, ITERATIONS, SAVE_INTERVAL = 2, 24, 4
LAST_FAULT = ITERATIONS - SAVE_INTERVAL
"""Faults come before the last save, so that a stop on request always comes before the end."""
PATIENCE = 180.0
"""Seconds for one launch, with its restarts, on a machine that does much else."""
MOST_LAUNCHES = 4

RUN: Flags = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": ITERATIONS, "eval_iters": 0}
LAYOUTS: dict[str, Flags] = {
    "data": {},
    "zero": {"use_distributed_optimizer": True, "bf16": True},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "background": {"async_save": True, "async_save_timeout": 2, "num_workers": 1},
}
"""``background``: a background writer and a loader thread for each rank."""
MIRROR: Flags = {"async_save_timeout": 2}
"""``--redundant-save`` with a copier for each rank; only for kills of copiers."""

# --- the table of faults -------------------------------------------------------------------------------------

FATAL = ("kill", "exit", "exception", "oom", "nan", "sigterm")
"""Kinds that end an attempt."""
HANGS = ("stop", "sleep", "gil", "fifo")
"""Kinds that the watchdog ends."""
FIRST_LIMITS = 3
"""First iterations of an attempt, which have the watchdog's limit of a start."""
HARMLESS = ("slow", "delay", "slowsave", "enospc", "eio")
"""Kinds that do not; the first two in all layouts, the others for synchronous saves."""
IN_BACKGROUND = ("failloader", "killwriter", "stopwriter")
RARE = ("flip", "collective", "stoploader")
"""Kinds that need a layout of their own."""
NUMBERS = {"exit": 7.0, "slow": 1.5, "delay": 0.02, "slowsave": 0.3}
STAGES = ("idle", "writing", "committing")
"""Of a background process: without a job; with a file to write; on rank 0 waiting for the others' files to commit, on
another rank with its file written while rank 0 waits."""


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

    @property
    def fatal(self) -> list[Fault]:
        """The faults that end an attempt, or hang it."""
        return [fault for fault in self.faults if fault.kind not in (*HARMLESS, *IN_BACKGROUND[1:])]

    def __str__(self) -> str:
        parts = [",".join(map(str, self.faults)), str(self.blow or ""), str(self.writer or "")]
        return f"seed {self.seed} {self.layout}: {'; '.join(part for part in parts if part)}"


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
    """A flipped bit of a replica, a collective that one rank calls alone, or a loader that does not read."""
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
    moments = [ITERATION] * 5 if kind in ("nan", "failloader") else [ITERATION] * 3 + [LOAD, START]
    if kind not in ("nan", "failloader", "sigterm") and not background:
        moments.append(SAVE)
    moment = chance.choice(moments)
    # The first iteration has no background processes yet.
    first = {ITERATION: chance.randint(2, LAST_FAULT), SAVE: chance.randint(1, 2)}.get(moment, 1)
    return Fault(kind, moment, first, rank=chance.choice((None, 0, 1, 1)), number=NUMBERS.get(kind))


def _harmless(chance: random.Random, layout: str) -> Fault:
    rank = chance.randrange(RANKS)
    if layout == "background":
        # After the first save, which starts the writer.
        first = chance.randint(SAVE_INTERVAL + 1, LAST_FAULT)
        return Fault(chance.choice(IN_BACKGROUND[1:]), ITERATION, first, rank=rank)
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
class DisturbedJob:
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
        if not self.violations:
            self.violations.append(f"not complete after {MOST_LAUNCHES} launches")

    def _launch(self, is_first: bool) -> None:
        before = self.injected()
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        variables = {**kept, **ENVIRONMENT, "MEGATRON_FAULTS": "1", "TMPDIR": str(self.temporary)}
        log = self.directory / f"log.{len(self.launches)}"
        launcher = Launcher(self._words(), log, forks=self.forks, variables=variables)
        self._watch(launcher, self.plan.blow if is_first else None)
        self._wait_for_orphans()
        self.launches.append(Launch(launcher.process.exitcode, self.injected() - before, launcher.text()))

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
            flags["max_failed_attempts"] = 0 if is_over else 1
        # Only where a rank hangs: on a machine that does much else, a healthy one may take seconds.
        if any(fault.kind in (*HANGS, "collective", "stoploader") for fault in self.plan.faults):
            flags |= {"hang_limit_s": 4, "hang_limit_data_s": 4}
        if any(fault.kind == "flip" for fault in self.plan.faults):
            flags["check_replicas_interval"] = 1
        launcher = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "4"]
        return [*launcher, "--log-dir", str(self.directory / "ranks"), PRETRAIN, *words_of(flags)]

    def _watch(self, launcher: Launcher, blow: Blow | None) -> None:
        """Until the launcher has ended: note commits and processes, and hit it when that is due."""
        deadline, due, noted = time.monotonic() + PATIENCE, math.inf, 0.0
        killer = None if self.plan.writer is None else WriterKiller(self.plan.writer, self.written, launcher.pid)
        while launcher.process.exitcode is None:
            now = time.monotonic()
            if now > deadline:
                self.violations.append(f"the job did not end within {PATIENCE:.0f} s")
                kill_all([launcher.pid])
            if blow is not None and due == math.inf and _has_logged(launcher, blow.iteration):
                due = now + blow.delay
            if now > noted + 0.2 or now >= due:
                noted = now
                self._family |= {(pid, started_at(pid)) for pid in [launcher.pid, *descendants(launcher.pid)]}
            if blow is not None and now >= due:
                with suppress(ProcessLookupError):
                    launcher.signal(blow.number)
                blow, due = None, math.inf
            if killer is not None and not self.is_writer_killed:
                self.is_writer_killed = killer.act()
            self.note_commits()
            launcher.process.join(0.02)
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
        self.violations += [f"process {pid} remains: {cmdline(pid)!r}" for pid in left]
        kill_all(left)

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
            is_writer = b"megatron.checkpoint.background_main" in cmdline(pid).split(b"\0")
            if is_writer and environment_of(pid).get("RANK") == str(rank):
                with suppress(OSError):
                    os.kill(pid, number)
                    return pid
        return None


def layout_flags(layout: str) -> Flags:
    return MIRROR if layout == "mirror" else LAYOUTS[layout]


def _has_logged(launcher: Launcher, iteration: int) -> bool:
    return iteration == 0 or f"] iteration {iteration:8d}/" in launcher.text()


def check(job: DisturbedJob, reference: Path) -> list[str]:
    """The violations of a job that has ended."""
    plan, found = job.plan, list(job.violations)
    found += campaign_checks.check_commits(job.commits, job.save)
    found += campaign_checks.check_bits(job.save, reference)
    found += campaign_checks.check_leftovers(job.save, job.temporary)
    for number, one in enumerate(job.launches):
        found += check_exit_code(one, plan, is_first=number == 0)
        found += campaign_checks.check_loads(one.log, job.commits)
    found += campaign_checks.check_injected(plan.faults, job.injected())
    found += campaign_checks.check_attempts(job.save)
    if plan.blow is None:
        found += campaign_checks.check_reports(plan.fatal, campaign_checks.read_reports(job.save))
    if plan.writer is not None:
        if not job.is_writer_killed:
            found.append("the background process was never killed")
        num_attempts = len(attempts.read_attempts(job.save))
        # One save, or two copies: its own, and the one that would have begun meanwhile.
        most_missing = 1 if job.written == job.save else 2
        found += campaign_checks.check_writer(job.written, reference, num_attempts, most_missing)
        if job.written != job.save:
            found += campaign_checks.check_bits(job.written, reference)
            found += campaign_checks.check_leftovers(job.written, job.temporary)
    return found


def check_exit_code(one: Launch, plan: Plan, is_first: bool) -> list[str]:
    """The exit code is the documented one."""
    stops = {str(fault) for fault in plan.faults if fault.kind == "sigterm" and fault.moment != START}
    usual = ExitCode.STOPPED if stops & one.newly_injected else ExitCode.COMPLETE
    allowed: set[int] = {usual}
    if is_first and plan.blow is not None and plan.blow.number == signal.SIGKILL:
        allowed.add(-signal.SIGKILL)  # unless it came first to its end
    elif is_first and plan.blow is not None:
        # 1: before the ranks listen to signals there is nothing to save.
        allowed = {ExitCode.STOPPED, ExitCode.CRASH, ExitCode.COMPLETE}
        if plan.blow.iteration == 0 and "> layout: " not in one.log:
            allowed.add(-signal.SIGTERM)  # nor before the launcher handles them
    elif is_first and plan.is_endless:
        allowed = {ExitCode.NO_PROGRESS}
    if one.exit_code in allowed:
        return []
    return [f"exit code {one.exit_code} instead of {' or '.join(str(int(code)) for code in allowed)}"]


# --- the campaign --------------------------------------------------------------------------------------------


def undisturbed_run(references: Path, layout: str) -> Path:
    """The directory with the checkpoints of the undisturbed run, one of each layout below ``references``."""
    save = references / layout
    if not (save / TRACKER).exists():
        flags = {**RUN, **layout_flags(layout), "save": save, "save_interval": SAVE_INTERVAL}
        fork_training(words_of(flags), RANKS).succeeded()
    return save


def run_seed(
    seed: int, directory: Path, references: Path, forks: bool = True, writers: bool = False
) -> tuple[DisturbedJob, list[str]]:
    """Run the job of a seed; its violations."""
    plan = make_plan(seed, writers)
    reference = undisturbed_run(references, plan.layout)
    job = DisturbedJob(plan, directory, forks)
    job.run()
    return job, check(job, reference)


def report(job: DisturbedJob, violations: Sequence[str]) -> str:
    """What a failing seed has done, and how to repeat it."""
    writers = " --writers" if job.plan.writer is not None else ""
    lines = [f"FAILED: {job.plan}", *(f"  - {violation}" for violation in violations)]
    lines += [f"  repeat it: python -m tests.operation.campaign jobs --count 1 --seed {job.plan.seed} --keep{writers}"]
    lines += [f"  exit codes: {[one.exit_code for one in job.launches]}"]
    lines += [line for one in job.launches for line in one.log.splitlines()[-40:]]
    return "\n".join(lines)


def run_jobs(options: argparse.Namespace, base: Path) -> bool:
    """Run the jobs of some seeds; whether all held."""
    failed, started = [], time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        began = time.monotonic()
        job, violations = run_seed(seed, base / str(seed), base / "references", not options.no_fork, options.writers)
        codes = "/".join(str(one.exit_code) for one in job.launches)
        print(f"{job.plan}: exit {codes}, {time.monotonic() - began:.1f} s", flush=True)
        if violations:
            failed.append(seed)
            print(report(job, violations), flush=True)
        else:
            shutil.rmtree(base / str(seed))
    print(f"{options.count} seeds, {len(failed)} failed {failed or ''} in {time.monotonic() - started:.0f} s")
    return not failed


def main() -> int:
    """Run a campaign; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("jobs", "hangs", "kills"))
    parser.add_argument("--count", type=int, default=20, help="seeds, hangs or kills")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--keep", action="store_true", help="keep the files of what has failed")
    parser.add_argument("--no-fork", action="store_true", help="start the ranks as usual: 3 to 5 s of CPU each")
    parser.add_argument("--writers", action="store_true", help="jobs: only kills of background processes")
    parser.add_argument("--rendezvous", nargs="+", default=["c10d", "static", "standalone"], help="kills")
    parser.add_argument("--warm", action="store_true", help="kills: with warm processes, which each kill waits for")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="campaign-"))
    run = {"jobs": run_jobs, "hangs": broken_job.run_hangs, "kills": broken_job.run_kills}[options.kind]
    is_right = run(options, base)
    if options.keep and not is_right:
        print(f"files: {base}")
    else:
        shutil.rmtree(base)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
