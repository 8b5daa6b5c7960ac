"""Faults that make ranks of a real training hang, one after the other, and what the launcher reports of them.

    python -m tests.operation.hang_campaign --faults 200 [--ranks 2] [--seed N] [--quiet-seconds S] [--anywhere]

One launcher restarts the ranks after each fault. Faults are random: kind, rank, and section of the iteration. With
``--anywhere`` the limits are those without flags, every second fault is a kill, and half of the faults come in a save,
an evaluation, the loading or the start, or in the first iterations after a restart. Prints a line for every fault and a
summary; the exit code is 1 if a report is wrong or late.
"""

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.operation.causes import Cause
from megatron.operation.process_states import child_processes
from tests.end_to_end.run_process import REPOSITORY, TINY_RUN, descendants, environment, wait_until, words_of
from tests.forked import fork_context
from tests.operation.forked_ranks import run_launcher
from tests.operation.process_stacks import describe_processes

KINDS = ("stop", "sleep", "gil", "fifo", "loader")
SECTIONS = ("step", "data", "forward-backward", "grads-reduce", "optimizer")
PLACES = ("start", "load", "evaluation", "save", "first iterations")
"""Where half of the faults of ``--anywhere`` come."""
LIMIT = 2.0
LEARNED_LIMIT = 60.0
"""Without flags the limits are learned, and at least so long."""
PATIENCE = 1200.0
"""Seconds for a report: longer than the limits that are learned on a busy machine."""
START_LIMIT = 180.0
"""Limit of the watchdog for a start and the first iterations: shorter than the patience, so that it reports first."""
STACKS_AFTER = 100.0
"""Seconds of waiting after which the campaign prints what all processes do."""
_QUIET_ITERATIONS = 20
"""Iterations of an attempt before a fault: the first ones have the limit of the start."""
_QUIET_SECONDS = 1.0
"""The launcher samples the heartbeats every 0.2 s, and must have seen some of these iterations."""


@dataclass(frozen=True)
class Fault:
    """A rank that hangs."""

    kind: str
    rank: int
    section: str
    """Where it hangs; a stopped loader is noticed in the section ``data``."""
    before: int = 0
    """How often the rank has entered the section in its attempt."""
    is_next_attempt: bool = False
    """Whether it comes in the attempt that the last fault has caused, however early."""

    @staticmethod
    def draw(chance: random.Random, ranks: int) -> "Fault":
        kind = chance.choice(KINDS)
        return Fault(kind, chance.randrange(ranks), "data" if kind == "loader" else chance.choice(SECTIONS))

    @staticmethod
    def draw_anywhere(chance: random.Random, ranks: int, number: int) -> "Fault":
        """Of two faults one is a kill, of four two come outside of quiet iterations."""
        kind = "kill" if number % 2 else chance.choice([one for one in KINDS if one != "loader"])
        rank = chance.randrange(ranks)
        if number % 4 < 2:  # not data: a rank that waits for data has ten minutes
            return Fault(kind, rank, chance.choice([one for one in SECTIONS if one != "data"]))
        place = chance.choice(PLACES)
        if place == "first iterations":
            return Fault(kind, rank, "forward-backward", chance.randrange(5), is_next_attempt=True)
        return Fault(kind, rank, place, is_next_attempt=place in ("start", "load"))

    @property
    def cause(self) -> Cause:
        if self.kind == "kill":
            return Cause.KILLED
        return Cause.STOPPED_PROCESS if self.kind in ("stop", "loader") else Cause.HANG

    def __str__(self) -> str:
        when = f", {self.before} times after a restart" if self.is_next_attempt else ""
        return f"{self.kind} of rank {self.rank} in {self.section}{when}"


@dataclass(frozen=True)
class Report:
    """What the launcher made of a fault."""

    fault: Fault
    content: dict[str, Any]
    """failure.json"""
    seconds: float
    """From the fault to the report."""

    @property
    def limit(self) -> float:
        found = re.search(r"the limit is ([\d.]+) s", self.content["message"])
        return float(found[1]) if found else 0.0

    @property
    def is_right(self) -> bool:
        return self.content["rank"] == self.fault.rank and self.content["cause"] == self.fault.cause

    def __str__(self) -> str:
        verdict = "right" if self.is_right else "WRONG"
        return f"{verdict}: {self.fault}: after {self.seconds:.1f} s: {self.content['message']}"


class Campaign:
    """A launcher whose ranks train until they are told to break."""

    def __init__(
        self, directory: Path, faults: int, ranks: int = 2, forks: bool = True, limit: float | None = LIMIT
    ) -> None:
        """``limit`` is that of the flags; without one, limits are learned, and the ranks also save and evaluate."""
        self._directory, self._ranks = directory, ranks
        self.log, self._run = directory / "log", directory / "run"
        launcher = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(faults)]
        script = [str(REPOSITORY / "tests" / "operation" / "faulty_training.py"), str(directory)]
        flags = {
            **TINY_RUN,
            "mock_data": True,
            "vocab_size": 384,
            "train_iters": 1_000_000,
            "num_workers": 1,
            "global_batch_size": 4 * ranks,
            "run_dir": self._run,
        }
        if limit is None:
            flags |= {"save": directory / "checkpoints", "load": directory / "checkpoints"}
            flags |= {"save_interval": 5, "eval_interval": 5, "eval_iters": 1}
        else:
            flags |= {"hang_limit_s": limit, "hang_limit_data_s": limit, "hang_limit_start_s": START_LIMIT}
        self.log.touch()
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        variables = {**environment(), "PYTHONPATH": path}
        arguments = ([*launcher, *script, *words_of(flags)], variables, self.log, forks)
        self.process = fork_context().Process(target=run_launcher, args=arguments)
        self.process.start()
        self._read = 0

    def __enter__(self) -> "Campaign":
        return self

    def __exit__(self, *error: object) -> None:
        for pid in [self._pid, *descendants(self._pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_until_quiet(self) -> None:
        """Wait until all ranks of an attempt have trained for a while."""
        self._wait(lambda: self._iterations() > 0)
        first = time.monotonic()
        self._wait(
            lambda: self._iterations() >= _QUIET_ITERATIONS and time.monotonic() - first > _QUIET_SECONDS,
        )

    def _iterations(self) -> int:
        """Iterations logged since the last report."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            return log.read().count(b"] iteration ")

    def _wait(self, condition: Any) -> None:
        stacks_at = time.monotonic() + STACKS_AFTER

        def holds() -> bool:
            nonlocal stacks_at
            assert self.process.is_alive(), self.log.read_text()[-5000:]
            if time.monotonic() > stacks_at:
                stacks_at = math.inf
                waiting = [self.log.read_text()[-2000:], describe_processes(self._pid)]
                print(f"Waiting for {STACKS_AFTER:.0f} s:", *waiting, sep="\n", file=sys.stderr, flush=True)
            return bool(condition())

        wait_until(holds, PATIENCE)

    def inject(self, fault: Fault) -> Report:
        """Break a rank, and wait for the report."""
        reports = self._reports()
        began = self._directory / "began"
        began.unlink(missing_ok=True)
        if fault.kind == "loader":
            pid = int((self._directory / f"pid.{fault.rank}").read_text())
            loader = loader_process(pid)
            began.write_text(repr(time.time()))
            os.kill(loader, signal.SIGSTOP)
        else:
            draft = self._directory / "draft"
            attempt = len(reports) if fault.is_next_attempt else 0
            draft.write_text(f"{fault.kind} {fault.section} {fault.before if attempt else 0} {attempt}")
            draft.replace(self._directory / f"fault.{fault.rank}")
        self._wait(lambda: len(self._reports()) > len(reports))
        (new,) = self._reports()[len(reports) :]
        self._read = self.log.stat().st_size
        content = json.loads(new.read_text())
        return Report(fault, content, content["time"] - float(began.read_text()))

    def false_alarms(self) -> int:
        """Reports so far; there must be none that a fault has not caused."""
        return len(self._reports())

    def newest_report(self) -> str:
        """Of an alarm without a fault."""
        return self._reports()[-1].read_text()

    def _reports(self) -> list[Path]:
        return sorted((self._run / "failures").glob("[0-9]*.json"))


def loader_process(rank_pid: int) -> int:
    """The process that loads the data of a rank: a fork of it. Rank 0 may also still run git for the run files."""
    rank_program = os.readlink(f"/proc/{rank_pid}/exe")
    found = []
    for child in child_processes(rank_pid):
        with suppress(FileNotFoundError):  # the child has ended
            if os.readlink(f"/proc/{child.pid}/exe") == rank_program:
                found.append(child.pid)
    (loader,) = found
    return loader


def run_campaign(
    directory: Path,
    faults: Sequence[Fault],
    ranks: int,
    quiet_seconds: float = 0.0,
    forks: bool = True,
    limit: float | None = LIMIT,
) -> list[Report]:
    """Inject the faults in one job; with ``quiet_seconds`` of training before, in which nothing may be reported."""
    with Campaign(directory, len(faults), ranks, forks, limit) as campaign:
        if quiet_seconds:
            campaign.wait_until_quiet()
            time.sleep(quiet_seconds)
            assert campaign.false_alarms() == 0, campaign.log.read_text()[-5000:]
        reports: list[Report] = []
        for fault in faults:
            if not (fault.is_next_attempt and reports):
                campaign.wait_until_quiet()
            assert campaign.false_alarms() == len(reports), campaign.newest_report()
            reports.append(campaign.inject(fault))
            print(reports[-1], flush=True)
        return reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-seconds", type=float, default=0.0)
    parser.add_argument("--no-fork", action="store_true", help="start the ranks as usual: 3 s of CPU each")
    parser.add_argument("--anywhere", action="store_true", help="also kills, and outside of quiet iterations")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    faults = [
        Fault.draw_anywhere(chance, options.ranks, number) if options.anywhere else Fault.draw(chance, options.ranks)
        for number in range(options.faults)
    ]
    with tempfile.TemporaryDirectory() as directory:
        limit = None if options.anywhere else LIMIT
        reports = run_campaign(
            Path(directory), faults, options.ranks, options.quiet_seconds, not options.no_fork, limit
        )
    right = Counter(report.fault.kind for report in reports if report.is_right)
    drawn = Counter(fault.kind for fault in faults)
    print(f"right: {right.total()} of {len(reports)}", {kind: f"{right[kind]} of {drawn[kind]}" for kind in drawn})
    least = LEARNED_LIMIT if options.anywhere else 0.0
    beyond = sorted(report.seconds - max(report.limit, least) for report in reports)
    late = sum(seconds > 2.0 for seconds in beyond)
    print(f"seconds beyond the limit: median {statistics.median(beyond):.2f}, longest {beyond[-1]:.2f}; {late} above 2")
    return int(right.total() < len(reports) or late > 0)


if __name__ == "__main__":
    sys.exit(main())
