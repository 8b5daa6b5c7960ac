"""The figures of a run from the records of its attempts: where its time went, its failures, and the save interval that
its own numbers recommend.

All times are in seconds. The effective time is the share of the wall time in steps that need not be repeated
("effective training time ratio", ETTR): how much failures and checkpoints leave for training.

- J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.operation.attempts import Attempt, RunTime, account, gaps, newest_run, read_attempts, read_current, settle
from megatron.operation.causes import Cause
from megatron.operation.failure import DIRECTORY, read_failure

# Llama 3 405B: 16,384 GPUs, 54 days, 419 unexpected interruptions (The Llama 3 Herd of Models, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_700.0
_SAME_FAILURE_SECONDS = 120.0


# --- effective time ------------------------------------------------------------------------------------------
#
# M is the mean time between failures of the job, R the time from a failure to the first new step (detection, restart,
# load), C the time for which a save blocks the training loop, T the training time between two saves.


@dataclass(frozen=True)
class Costs:
    """What failures and saves cost a job."""

    mtbf_s: float
    """M: mean time between failures of the job."""
    restart_s: float
    """R: time from a failure to the first new step."""
    save_s: float
    """C: time for which a save blocks the training loop."""


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
    # The logarithm of the left side, which does not overflow; the side itself is at least 1 at 0, and 0 at M.
    return _root(lambda interval: math.log1p(-interval / mtbf) + (interval + save) / mtbf, 0.0, mtbf * (1.0 - 1e-15))


def effective_time(interval_s: float, costs: Costs) -> float:
    """Daly's effective time, exact for exponentially distributed failures, also during restarts and saves:

    T / (M e^(R/M) (e^((T+C)/M) - 1)).
    """
    mtbf = costs.mtbf_s
    exponent, restart = (interval_s + costs.save_s) / mtbf, costs.restart_s / mtbf
    if exponent + restart > 700.0:
        return 0.0  # e^700 is close to the largest float
    return interval_s / (mtbf * math.exp(restart) * math.expm1(exponent))


def mean_bounds(total: float, count: int) -> tuple[float, float]:
    """95 % bounds of ``total / count``, the mean time between ``count`` failures, if failures are a Poisson process.

    The upper bound is infinite without a failure. With c failures the expected number is between the values at which
    c or more, or c or fewer, have the probability 2.5 % (Garwood, 1936).
    """
    tail, far = 0.025, 2.0 * count + 20.0  # an expected number for which count is much too small
    most = _root(lambda mean: _poisson_at_most(count, mean) - tail, 1e-9, far)
    if count == 0:
        return total / most, math.inf
    least = _root(lambda mean: _poisson_at_most(count - 1, mean) - (1.0 - tail), 1e-9, far)
    return total / most, total / least


def _poisson_at_most(count: int, mean: float) -> float:
    terms = (math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count + 1))
    return math.fsum(terms)


def _root(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """The root of a decreasing function between ``low`` and ``high``, by bisection."""
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if decreasing(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)


# --- the figures of a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory holds: attempts, and the reports of failures by attempt."""

    attempts: Sequence[Attempt]
    """Settled (:func:`settle`); the last one may run still."""
    failures: Mapping[int, Mapping[str, Any]]
    """Content of ``failures/*.json`` by number of the attempt."""


def read_run(directory: Path) -> RecordedRun:
    """The records in ``directory``; raises :class:`DataError` where there are none."""
    attempts, current = read_attempts(directory), read_current(directory)
    if current is not None and all(current.attempt != attempt.attempt for attempt in attempts):
        attempts.append(current)
    if not attempts:
        raise DataError(
            f"{directory} has no record of an attempt (attempts.jsonl): name the directory that the training got as "
            "--run-dir, or as --save."
        )
    attempts = newest_run(attempts)
    reports = [read_failure(path) for path in sorted((directory / DIRECTORY).glob("*.json"))]
    whole = [report for report in reports if report is not None and isinstance(report.get("time"), int | float)]
    return RecordedRun(settle(attempts), _failures_by_attempt(whole, attempts))


def _failures_by_attempt(
    reports: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]
) -> dict[int, Mapping[str, Any]]:
    """The report of each attempt: by its time, because launchers of several nodes may count differently."""
    found = {}
    for attempt in attempts:
        within = [one for one in reports if attempt.start <= one["time"] <= attempt.end + _SAME_FAILURE_SECONDS]
        if within:
            # Another job may have failed meanwhile, which the lock of the run kept out.
            found[attempt.attempt] = min(within, key=lambda one: abs(one["time"] - attempt.end))
    return found


@dataclass(frozen=True)
class HostRecord:
    """The failures that a host caused."""

    host: str
    failures: int
    causes: Mapping[str, int]
    last: float
    """Time of the last failure, in seconds since the epoch."""


@dataclass(frozen=True)
class SaveIntervals:
    """Training times between two saves, in seconds, and the effective time that each gives by Daly's formula."""

    costs: Costs
    own_s: float | None
    """The run's own interval; None with fewer than two saves."""
    young_s: float
    nvidia_s: float
    daly_s: float

    def share(self, interval_s: float) -> float:
        return effective_time(interval_s, self.costs)


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run."""

    time: RunTime
    num_attempts: int
    interruptions: int
    """Attempts that failed although the same command could continue."""
    gpu_hours: float
    mtbf_s: float | None
    """Mean time between failures, of the time in attempts; None without a failure."""
    mtbf_bounds_s: tuple[float, float]
    """95 % confidence, if failures are a Poisson process; the upper bound is infinite without a failure."""
    restart_s: float | None
    """Mean time from a failure to the first new step; None if the run has never continued after one."""
    save_s: float | None
    """Mean time for which a save blocked training; None without a save."""
    saves: int
    iterations: int
    """Iterations done, of the newest state."""
    lost_iterations: int
    iteration_s: float | None
    """Mean seconds of an iteration."""
    hosts: Sequence[HostRecord]
    """Hosts that caused failures, the worst first."""
    causes: Mapping[str, int]
    """Failed attempts by cause, the most frequent first."""
    intervals: SaveIntervals | None
    """None without a save and a restart to measure."""
    has_assumed_mtbf: bool
    """Whether :attr:`intervals` is based on Llama 3's rate of failures per GPU, for lack of own failures."""


def summarize(run: RecordedRun) -> RunSummary:
    attempts = run.attempts
    interruptions = sum(attempt.is_interruption for attempt in attempts)
    running_s = sum(attempt.wall_s for attempt in attempts)
    time = account(attempts)
    saves = sum(attempt.saves for attempt in attempts)
    save_s = time.seconds["save"] / saves if saves else None
    restart_s = _mean_restart_s(attempts)
    mtbf_s = running_s / interruptions if interruptions else None
    trained, done = _iterations(attempts)
    trained_s = time.seconds["step"] + time.seconds["lost"]
    intervals = None
    if save_s and restart_s is not None:
        mean = mtbf_s or job_mtbf_s(attempts[-1].world_size)
        costs = Costs(mean, restart_s, save_s)
        own_s = trained_s / saves if saves > 1 else None
        intervals = SaveIntervals(
            costs, own_s, young_interval_s(costs), nvidia_interval_s(costs), daly_interval_s(costs)
        )
    return RunSummary(
        time=time,
        num_attempts=len(attempts),
        interruptions=interruptions,
        gpu_hours=sum(attempt.wall_s * attempt.world_size for attempt in attempts) / 3600.0,
        mtbf_s=mtbf_s,
        mtbf_bounds_s=mean_bounds(running_s, interruptions),
        restart_s=restart_s,
        save_s=save_s,
        saves=saves,
        iterations=done,
        lost_iterations=_lost_iterations(attempts),
        iteration_s=trained_s / trained if trained else None,
        hosts=_worst_hosts(run),
        causes=dict(Counter(cause_of(attempt, run) for attempt in attempts if attempt.is_failure).most_common()),
        intervals=intervals,
        has_assumed_mtbf=mtbf_s is None,
    )


def cause_of(attempt: Attempt, run: RecordedRun) -> str:
    if attempt.cause is not None:
        return attempt.cause
    cause = run.failures.get(attempt.attempt, {}).get("cause")
    return cause if isinstance(cause, str) else Cause.NODE_LOST if attempt.outcome == "lost" else Cause.UNKNOWN


def host_of(attempt: Attempt, run: RecordedRun) -> str | None:
    host = attempt.host or run.failures.get(attempt.attempt, {}).get("host")
    return host if isinstance(host, str) else None


def _mean_restart_s(attempts: Sequence[Attempt]) -> float | None:
    """Mean seconds from a failure to the first new step: hang, end of the processes, gap, next start and load.

    Without a failure, start and load of all attempts that came to a step.
    """
    restarts = [
        before.second("hang") + before.second("idle") + gap + after.second("start") + after.second("load")
        for (before, after), gap in zip(pairwise(attempts), gaps(attempts))
        if before.is_interruption
    ]
    if not restarts:
        restarts = [
            attempt.second("start") + attempt.second("load")
            for attempt in attempts
            if attempt.first_iteration is not None
        ]
    return sum(restarts) / len(restarts) if restarts else None


def _iterations(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Iterations trained by all attempts, also repeated ones, and the iteration of the newest state."""
    trained, newest = 0, 0
    for attempt in attempts:
        if attempt.first_iteration is not None and attempt.last_iteration is not None:
            trained += max(0, attempt.last_iteration - attempt.first_iteration)
            newest = attempt.last_iteration
    return trained, newest


def _lost_iterations(attempts: Sequence[Attempt]) -> int:
    """Iterations that later attempts repeated, or that no checkpoint holds."""
    lost, continues_at = 0, None
    for attempt in reversed(attempts):
        first, last = attempt.first_iteration, attempt.last_iteration
        if first is None or last is None:
            continue
        if continues_at is None:
            committed = first if attempt.committed_iteration is None else attempt.committed_iteration
            kept = committed if attempt.is_failure else last
        else:
            kept = continues_at
        lost += max(0, last - max(kept, first))
        continues_at = first if continues_at is None else min(first, continues_at)
    return lost


def _worst_hosts(run: RecordedRun) -> list[HostRecord]:
    by_host: dict[str, list[Attempt]] = {}
    for attempt in run.attempts:
        host = host_of(attempt, run)
        if attempt.is_failure and host is not None:
            by_host.setdefault(host, []).append(attempt)
    records = [
        HostRecord(
            host,
            len(failed),
            dict(Counter(cause_of(attempt, run) for attempt in failed).most_common()),
            max(attempt.end for attempt in failed),
        )
        for host, failed in by_host.items()
    ]
    return sorted(records, key=lambda record: (-record.failures, -record.last))


def to_json(summary: RunSummary) -> dict[str, Any]:
    intervals = summary.intervals
    rate = summary.gpu_hours / summary.interruptions if summary.interruptions else None
    names = ("interruptions", "causes", "gpu_hours", "mtbf_s", "restart_s", "save_s", "saves", "iterations")
    found: dict[str, Any] = {
        "schema": 1,
        "effective_time": summary.time.effective_time,
        "wall_s": summary.time.wall_s,
        "seconds": dict(summary.time.seconds),
        "attempts": summary.num_attempts,
        **{name: getattr(summary, name) for name in (*names, "lost_iterations", "iteration_s")},
        "mtbf_bounds_s": [bound if math.isfinite(bound) else None for bound in summary.mtbf_bounds_s],
        "gpu_hours_per_failure": rate,
        "hosts": [asdict(record) for record in summary.hosts],
        "save_interval": None,
    }
    if intervals is None:
        return found

    def choice(seconds: float | None) -> dict[str, Any] | None:
        if seconds is None:
            return None
        iterations = in_iterations(seconds, summary.iteration_s)
        return {"seconds": seconds, "iterations": iterations, "effective_time": intervals.share(seconds)}

    found["save_interval"] = {"mtbf_s": intervals.costs.mtbf_s, "mtbf_is_assumed": summary.has_assumed_mtbf}
    found["save_interval"] |= {name: choice(seconds) for name, seconds in interval_choices(intervals)}
    return found


def interval_choices(intervals: SaveIntervals) -> list[tuple[str, float | None]]:
    """(name, seconds) of the run's own interval and of the formulas."""
    return [
        ("own", intervals.own_s),
        ("young", intervals.young_s),
        ("nvidia", intervals.nvidia_s),
        ("daly", intervals.daly_s),
    ]


def in_iterations(seconds: float, iteration_s: float | None) -> int | None:
    return max(1, round(seconds / iteration_s)) if iteration_s else None
