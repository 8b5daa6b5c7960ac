"""A simulator of a job that fails at random and saves at intervals: its attempts, as a real run records them."""

import math
import random
from dataclasses import dataclass

from megatron.operation.attempts import Attempt, TimeClass
from megatron.operation.run_summary import Costs


@dataclass(frozen=True)
class SimulatedJob:
    """A job for the simulator."""

    costs: Costs
    interval_s: float
    """T: training time between two saves."""
    step_s: float
    """Seconds of an iteration; only the numbers of iterations depend on it."""
    world_size: int = 1
    commit_s: float = 0.0
    """Time from the end of the block to the commit, in the background; a failure before it loses the save, too."""


def simulate(job: SimulatedJob, duration_s: float, seed: int, start: float = 0.0) -> list[Attempt]:
    """The attempts of a job of ``duration_s`` with exponentially distributed failures, for :func:`account`.

    Every attempt begins with a restart (class ``start``), during which it can fail as well. Then training and saves
    alternate. The last attempt is stopped at the end of the duration; its steps are kept.
    """
    draws = random.Random(seed)
    attempts: list[Attempt] = []
    now, iteration, is_last = 0.0, 0, False
    while not is_last:
        life = draws.expovariate(1.0 / job.costs.mtbf_s)
        is_last = now + life >= duration_s
        life = min(life, duration_s - now)
        attempt = _simulated(job, len(attempts) + 1, start + now, life, iteration, is_last)
        attempts.append(attempt)
        now += life
        iteration = attempt.committed_iteration or iteration
    return attempts


def _simulated(job: SimulatedJob, number: int, start: float, life: float, iteration: int, is_last: bool) -> Attempt:
    """An attempt that begins at ``iteration`` and ends after ``life`` seconds."""
    restart = min(life, job.costs.restart_s)
    cycle = job.interval_s + job.costs.save_s
    trained = life - restart
    cycles, rest = divmod(trained, cycle)
    unsaved = min(rest, job.interval_s)
    blocked = cycles * job.costs.save_s + rest - unsaved
    steps = cycles * job.interval_s + unsaved
    commits = max(0, math.floor((trained - job.commit_s) / cycle))
    kept = steps if is_last else commits * job.interval_s
    seconds: dict[TimeClass, float] = {"start": restart, "save": blocked, "step": kept, "lost": steps - kept}
    return Attempt(
        attempt=number,
        start=start,
        end=start + life,
        outcome="stopped" if is_last else "failed",
        seconds=seconds,
        world_size=job.world_size,
        first_iteration=iteration if trained > 0 else None,
        last_iteration=iteration + int(steps / job.step_s) if trained > 0 else None,
        committed_iteration=iteration + int(commits * job.interval_s / job.step_s) if commits else None,
        saves=commits,
        commits=tuple(
            (restart + index * cycle + job.commit_s, iteration + int(index * job.interval_s / job.step_s))
            for index in range(1, commits + 1)
        ),
        cause=None if is_last else "unknown",
    )
