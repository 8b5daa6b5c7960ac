"""Kill ranks at random moments and measure the time until the first new iteration.

    python -m tests.operation.kill_campaign --kills 200

A restart fails if the launcher ends, if the ranks are not back in time, or if it takes more than one attempt. With
``--modes cold warm`` the modes take turns, each with a job of its own for ``--block`` kills; with warm processes each
kill waits until they are ready.
"""

import argparse
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

from megatron.operation.heartbeat import Section, Snapshot
from tests.operation.jobs import LAUNCH, Job, has_imported, rendezvous, standby_processes


@dataclass(frozen=True)
class Restart:
    """Seconds of the phases of one restart."""

    total: float
    """From the kill to the end of the first new iteration."""
    spawn: float
    """To the start of the new process: detect, end the others, rendezvous."""
    attach: float
    """The interpreter, and the imports of the flags."""
    start: float
    """The flags, the import of torch, process groups, building the model and the data."""
    load: float
    step: float
    """The first iteration, and whatever is in no other phase."""


class Campaign:
    """Jobs with two ranks whose ranks are killed."""

    def __init__(self, directory: Path, chance: random.Random, limit: float, second_kills: float) -> None:
        self._directory, self._chance, self._limit, self._second_kills = directory, chance, limit, second_kills
        self._numbers = count()
        self.failures: list[str] = []

    def run(self, mode: str, kind: str, kills: int, earliest: float, latest: float) -> Iterator[Restart]:
        """Start a job and kill ranks of it, each time after some seconds of training."""
        flags = [*rendezvous(kind), "--max-restarts", str(2 * kills + 10)]
        flags += ["--warm-processes" if mode == "warm" else "--no-warm-processes"]
        place = self._directory / str(next(self._numbers))
        place.mkdir()
        job = Job(place, LAUNCH, flags, save_interval=5, max_failed_attempts=0)
        try:
            job.wait_for_training()
            for number in range(kills):
                if mode == "warm":
                    job.wait_for(lambda: sum(map(has_imported, standby_processes(job.process.pid))) >= len(job.ranks()))
                time.sleep(self._chance.uniform(earliest, latest))
                try:
                    yield self.kill(job)
                except RestartFailed as failure:
                    text = f"{mode} {kind}: kill {number + 1}: {failure}"
                    print(text, file=sys.stderr, flush=True)
                    self.failures.append(text)
                    (self._directory / f"failure.{len(self.failures)}.log").write_bytes(job.log.read_bytes())
                    return
        finally:
            job.end()

    def kill(self, job: Job) -> Restart:
        """Kill one rank and wait until all have finished an iteration. In some cases kill another one meanwhile, from
        which the time then counts."""
        ours = set(job.ranks().values())
        num_ranks = len(ours)
        at = self._kill_one(job)
        again = at + self._chance.uniform(0.5, 4.0) if self._chance.random() < self._second_kills else None
        seen: set[int] = set()
        while (now := time.monotonic()) - at < self._limit:
            if job.process.poll() is not None:
                raise RestartFailed(f"the launcher ended with {job.process.returncode}")
            found = [beat for beat in job.heartbeats().values() if beat.pid not in ours]
            seen |= {beat.pid for beat in found}
            if len(seen) > num_ranks:
                raise RestartFailed("the first attempt failed")
            if len(found) == num_ranks and all(has_finished_an_iteration(beat) for beat in found):
                return phases(found[0], at, now)
            if again is not None and now > again and set(job.ranks().values()) - ours:
                ours |= set(job.ranks().values())
                at, again, seen = self._kill_one(job), None, set()
            time.sleep(0.01)
        raise RestartFailed(f"not back after {self._limit:g} s")

    def _kill_one(self, job: Job) -> float:
        os.kill(self._chance.choice(sorted(job.ranks().values())), signal.SIGKILL)
        return time.monotonic()


class RestartFailed(Exception):
    """A restart did not succeed at once."""


def has_finished_an_iteration(beat: Snapshot) -> bool:
    """Whether a rank has made a step in its attempt."""
    return beat.section_ns[Section.OPTIMIZER] > 0 and beat.section != Section.OPTIMIZER


def phases(beat: Snapshot, killed: float, now: float) -> Restart:
    """The seconds of a restart, by the heartbeat of a rank."""
    ticks = float(Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[19])
    # Ticks count from the boot, as this clock does.
    started = ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
    attached = beat.attached_ns / 1e9
    # A warm process was started long before.
    spawn = max(0.0, started - killed)
    times = {section: nanoseconds / 1e9 for section, nanoseconds in beat.section_ns.items()}
    start, load = times[Section.START], times[Section.LOAD]
    total = now - killed
    attach = attached - max(started, killed)
    return Restart(total, spawn, attach, start, load, total - spawn - attach - start - load)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below ``share`` of them."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 100) // 100) - 1)]


def report(mode: str, restarts: Sequence[Restart]) -> None:
    """Print the distribution of each phase."""
    for phase in fields(Restart):
        values = [getattr(restart, phase.name) for restart in restarts]
        middle, late = statistics.median(values), percentile(values, 0.95)
        print(
            f"{mode} {phase.name:>6}: median {middle:5.2f} s, p95 {late:5.2f} s, max {max(values):5.2f} s", flush=True
        )


def main() -> int:
    """Run the campaign; 1 if a restart failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="for each mode")
    parser.add_argument("--modes", nargs="+", default=["cold"], choices=("cold", "warm"))
    parser.add_argument("--rendezvous", nargs="+", default=["c10d", "static", "standalone"])
    parser.add_argument("--block", type=int, default=10, help="kills of a job")
    parser.add_argument("--earliest", type=float, default=0.0, help="shortest training before a kill, in seconds")
    parser.add_argument("--latest", type=float, default=3.0, help="longest training before a kill, in seconds")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a restart has failed")
    parser.add_argument("--second-kills", type=float, default=0.2, help="share of restarts with another kill meanwhile")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    found: dict[str, list[Restart]] = {mode: [] for mode in options.modes}
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    campaign = Campaign(place, random.Random(options.seed), options.limit, options.second_kills)
    for number in range(-(-options.kills // options.block)):
        kind = options.rendezvous[number % len(options.rendezvous)]
        for mode in options.modes:
            kills = min(options.block, options.kills - number * options.block)
            for restart in campaign.run(mode, kind, kills, options.earliest, options.latest):
                found[mode].append(restart)
                print(f"{mode} {kind}: back after {restart.total:.2f} s", flush=True)
    for mode, restarts in found.items():
        if restarts:
            report(mode, restarts)
    print(f"{sum(map(len, found.values()))} restarts, {len(campaign.failures)} failures", flush=True)
    if campaign.failures:
        print(f"Logs: {place}/failure.*.log")
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
