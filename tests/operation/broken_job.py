"""One job of two ranks that is broken again and again: what the launcher reports of ranks that hang, and how long it
takes until new ones train (``python -m tests.operation.campaign``).

Hangs are random: kind, rank, and section of the iteration. A hang that is reported wrongly or late is a failure.

Kills come at random moments, under each rendezvous in turn, sometimes with another one while the ranks start. A restart
fails if the launcher ends, if the ranks are not back in time, or if it takes more than one attempt.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.operation.heartbeat import Section, Snapshot
from tests.end_to_end.run_process import REPOSITORY, Flags
from tests.operation.campaign_checks import CAUSES
from tests.operation.jobs import Job, ended, has_imported, rendezvous, standby_processes

# --- hangs ---------------------------------------------------------------------------------------------------

KINDS = ("stop", "sleep", "gil", "fifo", "stoploader")
SECTIONS = ("step", "data", "forward-backward", "grads-reduce", "optimizer")
LIMIT = 2.0
START_LIMIT = 180.0
"""Limit of the watchdog for a start and the first iterations: shorter than the patience, so that it reports first."""
_QUIET_ITERATIONS = 20
"""Iterations of an attempt before a fault: the first ones have the limit of the start."""
_QUIET_SECONDS = 1.0
"""The launcher samples the heartbeats every 0.2 s, and must have seen some of these iterations."""
_SCRIPT = str(REPOSITORY / "tests" / "operation" / "faulty_training.py")


@dataclass(frozen=True)
class Break:
    """A rank that hangs, or ends."""

    kind: str
    rank: int
    section: str
    """Where; a loader that does not read is noticed in the section ``data``."""

    @staticmethod
    def draw(chance: random.Random) -> "Break":
        kind = chance.choice(KINDS)
        return Break(kind, chance.randrange(2), "data" if kind == "stoploader" else chance.choice(SECTIONS))

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} in {self.section}"


@dataclass(frozen=True)
class Report:
    """What the launcher made of a fault."""

    fault: Break
    content: dict[str, Any]
    """failure.json"""
    seconds: float
    """From the fault to the report."""

    @property
    def limit(self) -> float:
        """The limit that it names, if it names one."""
        found = re.search(r"the limit is ([\d.]+) s", self.content["message"])
        return float(found[1]) if found else 0.0

    @property
    def is_right(self) -> bool:
        return self.content["rank"] == self.fault.rank and self.content["cause"] in CAUSES[self.fault.kind]

    def __str__(self) -> str:
        verdict = "right" if self.is_right else "WRONG"
        return f"{verdict}: {self.fault}: after {self.seconds:.1f} s: {self.content['message']}"


class BreakableJob(Job):
    """A job whose ranks train until :meth:`inject` breaks one."""

    def __init__(self, directory: Path, faults: int, limit: float = LIMIT, forks: bool = True) -> None:
        self._directory, self._read = directory, 0
        flags: Flags = {"num_workers": 1, "run_dir": directory / "run", "max_failed_attempts": 0}
        flags |= {"hang_limit_s": limit, "hang_limit_data_s": limit, "hang_limit_start_s": START_LIMIT}
        flags |= {"save": None, "load": None}
        launcher = ["--standalone", "--max-restarts", str(faults)]
        super().__init__(directory, launcher, forks=forks, script=[_SCRIPT, str(directory)], flags=flags)

    def wait_until_quiet(self) -> None:
        """Wait until all ranks of an attempt have trained for a while."""
        self.wait_for(lambda: self._iterations() > 0)
        first = time.monotonic()
        self.wait_for(lambda: self._iterations() >= _QUIET_ITERATIONS and time.monotonic() - first > _QUIET_SECONDS)

    def _iterations(self) -> int:
        """Iterations logged since the last report."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            return log.read().count(b"] iteration ")

    def inject(self, fault: Break) -> Report:
        """Break a rank, and wait for the report."""
        reports = self.reports()
        began = self._directory / "began"
        began.unlink(missing_ok=True)
        draft = self._directory / "draft"
        draft.write_text(f"{fault.kind} {fault.section}")
        draft.replace(self._directory / f"fault.{fault.rank}")
        self.wait_for(lambda: len(self.reports()) > len(reports))
        (new,) = self.reports()[len(reports) :]
        self._read = self.log.stat().st_size
        content = json.loads(new.read_text())
        return Report(fault, content, content["time"] - float(began.read_text()))

    def reports(self) -> list[Path]:
        """Reports so far; there must be none that a fault has not caused."""
        return sorted((self._directory / "run" / "failures").glob("[0-9]*.json"))


def break_one_after_the_other(job: BreakableJob, faults: Sequence[Break]) -> list[Report]:
    reports: list[Report] = []
    for fault in faults:
        job.wait_until_quiet()
        assert len(job.reports()) == len(reports), job.reports()[-1].read_text()
        reports.append(job.inject(fault))
        print(reports[-1], flush=True)
    return reports


def run_hangs(options: argparse.Namespace, base: Path) -> bool:
    """The campaign of hangs; whether all were reported rightly and in time."""
    chance = random.Random(options.seed)
    faults = [Break.draw(chance) for _ in range(options.count)]
    with ended() as jobs:
        jobs.append(job := BreakableJob(base, len(faults), forks=not options.no_fork))
        reports = break_one_after_the_other(job, faults)
    wrong = [str(report.fault) for report in reports if not report.is_right]
    beyond = sorted(report.seconds - report.limit for report in reports)
    late = sum(seconds > 2.0 for seconds in beyond)
    print(f"right: {len(reports) - len(wrong)} of {len(reports)}; wrong: {wrong}")
    print(f"seconds beyond the limit: median {statistics.median(beyond):.2f}, longest {beyond[-1]:.2f}; {late} above 2")
    return not wrong and not late


# --- kills ---------------------------------------------------------------------------------------------------

_BLOCK = 10
"""Kills of one job."""
_LONGEST_RESTART = 90.0
_SECOND_KILLS = 0.2
"""Share of restarts with another kill meanwhile."""


class RestartFailed(Exception):
    """A restart did not succeed at once."""


def kill_some(
    options: argparse.Namespace, directory: Path, chance: random.Random, kind: str, kills: int
) -> Iterator[float]:
    """Kill ranks of one job, each time after up to three seconds of training; the seconds of the restarts."""
    flags = [*rendezvous(kind), "--max-restarts", str(2 * _BLOCK + 10)]
    flags += ["--warm-processes" if options.warm else "--no-warm-processes"]
    directory.mkdir()
    with ended() as jobs:
        jobs.append(job := Job(directory, flags, forks=False, save_interval=5, max_failed_attempts=0))
        job.wait_for_training()
        for _ in range(kills):
            if options.warm:
                job.wait_for(lambda: sum(map(has_imported, standby_processes(job.pid))) >= 2)
            time.sleep(chance.uniform(0.0, 3.0))
            yield kill(job, chance)


def kill(job: Job, chance: random.Random) -> float:
    """Kill one rank and wait until both have finished an iteration; the seconds. In some cases kill another one
    meanwhile, from which the time then counts."""

    def kill_one() -> float:
        os.kill(chance.choice(sorted(job.ranks().values())), signal.SIGKILL)
        return time.monotonic()

    ours, seen, at = set(job.ranks().values()), set[int](), kill_one()
    again = at + chance.uniform(0.5, 4.0) if chance.random() < _SECOND_KILLS else None
    while (now := time.monotonic()) - at < _LONGEST_RESTART:
        if job.process.exitcode is not None:
            raise RestartFailed(f"the launcher ended with {job.process.exitcode}")
        found = [beat for beat in job.heartbeats().values() if beat.pid not in ours]
        seen |= {beat.pid for beat in found}
        if len(seen) > 2:
            raise RestartFailed("the first attempt failed")
        if len(found) == 2 and all(has_finished_an_iteration(beat) for beat in found):
            return now - at
        if again is not None and now > again and set(job.ranks().values()) - ours:
            ours |= set(job.ranks().values())
            at, again, seen = kill_one(), None, set()
        time.sleep(0.01)
    raise RestartFailed(f"not back after {_LONGEST_RESTART:g} s")


def has_finished_an_iteration(beat: Snapshot) -> bool:
    """Whether a rank has made a step in its attempt."""
    return beat.section_ns[Section.OPTIMIZER] > 0 and beat.section != Section.OPTIMIZER


def run_kills(options: argparse.Namespace, base: Path) -> bool:
    """The campaign of kills; whether all ranks came back."""
    chance, restarts, failures = random.Random(options.seed), [], 0
    for number in range(-(-options.count // _BLOCK)):
        kind = options.rendezvous[number % len(options.rendezvous)]
        try:
            kills = min(_BLOCK, options.count - number * _BLOCK)
            for seconds in kill_some(options, base / str(number), chance, kind, kills):
                restarts.append(seconds)
                print(f"{kind}: back after {seconds:.2f} s", flush=True)
        except RestartFailed as failure:
            failures += 1
            print(f"{kind}: {failure}; see {base}/{number}/log", flush=True)
    if restarts:
        late = sorted(restarts)[-(-len(restarts) * 95 // 100) - 1]
        print(f"median {statistics.median(restarts):.2f} s, p95 {late:.2f} s, max {max(restarts):.2f} s")
    print(f"{len(restarts)} restarts, {failures} failures", flush=True)
    return not failures
