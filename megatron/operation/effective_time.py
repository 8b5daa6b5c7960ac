"""How much of a run's time failures and checkpoints leave for training, and the save interval that leaves most.

All times are in seconds. M is the mean time between failures of the job, R the time from a failure to the first new
step (detection, restart, load), C the time for which a save blocks the training loop, T the training time between two
saves. The effective time is the share of the wall time in steps that need not be repeated ("effective training time
ratio", ETTR).

- J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron.operation.attempts import Attempt, TimeClass

GPU_HOURS_PER_FAILURE = 50_700.0
"""Llama 3 405B: 16,384 GPUs, 54 days, 419 unexpected interruptions (The Llama 3 Herd of Models, section 3.3.4)."""


@dataclass(frozen=True)
class Costs:
    """What failures and saves cost a job."""

    mtbf_s: float
    """M: mean time between failures of the job."""
    restart_s: float
    """R: from a failure to the first new step."""
    save_s: float
    """C: for which a save blocks the training loop."""


def job_mtbf_s(num_gpus: int, gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE) -> float:
    """Mean time between failures of a job, which any GPU's failure interrupts."""
    return gpu_hours_per_failure / num_gpus * 3600.0


def young_interval_s(costs: Costs) -> float:
    """Young's save interval, sqrt(2 C M): the first order for C, T << M."""
    return math.sqrt(2.0 * costs.save_s * costs.mtbf_s)


def nvidia_interval_s(costs: Costs) -> float:
    """Save interval of greatest availability with the restart in it, C + sqrt(2 (M + R) C + C²) (NVIDIA)."""
    save = costs.save_s
    return save + math.sqrt(2.0 * (costs.mtbf_s + costs.restart_s) * save + save * save)


def daly_interval_s(costs: Costs) -> float:
    """The interval that maximizes :func:`effective_time`, of which Young's is the first order.

    The derivative is zero where (1 - T / M) e^((T + C) / M) = 1. The left side decreases in T, so bisection finds the
    root; R does not change it.
    """
    mtbf, save = costs.mtbf_s, costs.save_s
    low, high = 0.0, mtbf  # the left side is at least 1 at 0, and 0 at M
    for _ in range(100):
        middle = 0.5 * (low + high)
        # The logarithm of the left side, which does not overflow.
        if math.log1p(-middle / mtbf) + (middle + save) / mtbf > 0.0:
            low = middle
        else:
            high = middle
    return low


def effective_time(interval_s: float, costs: Costs) -> float:
    """Daly's effective time, exact for exponentially distributed failures, also during restarts and saves:

    T / (M e^(R/M) (e^((T+C)/M) - 1)).
    """
    mtbf = costs.mtbf_s
    exponent = (interval_s + costs.save_s) / mtbf
    if exponent > 700.0:
        return 0.0  # e^700 is close to the largest float
    return interval_s / (mtbf * math.exp(costs.restart_s / mtbf) * math.expm1(exponent))


def approximate_effective_time(interval_s: float, costs: Costs) -> float:
    """1 - C/(T+C) - (T/2 + R)/M: for T and R much shorter than M."""
    overhead = costs.save_s / (interval_s + costs.save_s)
    return 1.0 - overhead - (interval_s / 2.0 + costs.restart_s) / costs.mtbf_s


def mean_bounds(total: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of ``total / count``, the mean time between ``count`` failures, if failures are a Poisson process.

    The upper bound is infinite without a failure. With c failures the expected number is between the values at which
    c or more, or c or fewer, have the probability (1 - confidence) / 2 (Garwood, 1936).
    """
    tail = (1.0 - confidence) / 2.0
    most = _root(lambda mean: _poisson_at_most(count, mean) - tail)
    if count == 0:
        return total / most, math.inf
    least = _root(lambda mean: _poisson_at_most(count - 1, mean) - (1.0 - tail))
    return total / most, total / least


def _poisson_at_most(count: int, mean: float) -> float:
    terms = (math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count + 1))
    return math.fsum(terms)


def _root(decreasing: Callable[[float], float]) -> float:
    """The root of a decreasing function of a positive number."""
    low, high = 1e-9, 1.0
    while decreasing(high) > 0.0:
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if decreasing(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)


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
        attempt = _simulated_attempt(job, len(attempts) + 1, start + now, life, iteration, is_last)
        attempts.append(attempt)
        now += life
        iteration = attempt.committed_iteration or iteration
    return attempts


def _simulated_attempt(
    job: SimulatedJob, number: int, start: float, life: float, iteration: int, is_last: bool
) -> Attempt:
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
