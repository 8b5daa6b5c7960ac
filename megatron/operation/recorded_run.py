"""What the records of a run show, real or simulated: the cost of each cause, and its model and events for the
simulator."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import linear_regression, median
from typing import NamedTuple

from megatron.operation.attempts import Attempt, gaps, settle
from megatron.operation.causes import Cause
from megatron.operation.run_summary import RecordedRun, cause_of, summarize
from megatron.operation.simulated_run import COMPLETE, CUT, Cycle, Event, FailureCause, FailureTable, Kind, RunModel


def lost_gpu_seconds(attempts: Sequence[Attempt], gpus: int) -> defaultdict[tuple[str, str], float]:
    """GPU-seconds of a run, or of a simulated one, that were not in kept steps, by cause and part.

    What is between two attempts, and the start of the second, belongs to the cause that ended the first. Of ``gpus``
    those that smaller sizes left idle count, too: with the kept steps of each attempt, times its ranks, the sum is the
    wall time of all GPUs.
    """
    found = defaultdict[tuple[str, str], float](float)
    settled, before = settle(attempts), "first start"
    for attempt, gap in zip(settled, [0.0, *gaps(settled)]):
        cause = attempt.cause or "end of the run"
        parts = {
            (before, "between attempts"): gap,
            (before, "start"): attempt.second("start"),
            (before, "load"): attempt.second("load"),
            (cause, "repeated steps"): attempt.second("lost"),
            (cause, "hang"): attempt.second("hang"),
            (cause, "end of processes"): attempt.second("idle"),
            ("saves", "saves"): attempt.second("save"),
            ("data and evaluation", "data and evaluation"): attempt.second("data") + attempt.second("evaluation"),
            ("fewer GPUs", "fewer GPUs"): attempt.second("step") * (1.0 - attempt.world_size / gpus),
        }
        for key, seconds in parts.items():
            found[key] += seconds * gpus
        before = cause
    return found


class Estimated(NamedTuple):
    """A run as its records show it: its model, what ended its attempts, and by field from how much it was estimated."""

    run: RunModel
    table: FailureTable
    events: Sequence[Event]
    sources: Mapping[str, str]


def estimate(found: RecordedRun) -> Estimated:
    """The model of a recorded run: means of its records, the defaults where they have nothing.

    A line through the seconds of an attempt's kept steps over their number gives the time of a step, and the warm-up.
    What an attempt lost beyond its steps, and half of one, was the wait of rank 0 until the failure was noticed. The
    records do not say how long after the block a save was committed: 0.
    """
    attempts = [replace(one, cause=cause_of(one, found)) if one.is_failure else one for one in found.attempts]
    trained, summary = [one for one in attempts if _done(one) > 0], summarize(found)
    hung = [one for one in attempts if one.second("hang") > 0]
    kept = [(_kept(one), one.second("step")) for one in trained if _kept(one)]
    step_s, warm_up_s = summary.iteration_s or RunModel.step_s, 0.0
    if len({steps for steps, _ in kept}) > 1:
        line = linear_regression(*zip(*kept))
        if line.slope > 0 and line.intercept > 0:
            step_s, warm_up_s = line.slope, line.intercept
    work_s = step_s * sum(map(_done, trained))
    data_s = math.fsum(one.second("data") + one.second("evaluation") for one in trained)
    intervals = [_kept(one) / one.saves for one in trained if one.saves and _kept(one) > 0]

    def end_s(one: Attempt) -> float:
        waited = 0.0
        if one.is_failure and _done(one):
            waited = one.second("lost") - (_done(one) - _kept(one) + 0.5) * step_s - warm_up_s * (_kept(one) == 0)
        return waited + one.second("idle") + one.second("hang")

    means = {
        "step_s": ([step_s], f"{summary.iterations:,} steps"),
        "save_interval_s": ([median(intervals) * step_s], "median") if intervals else ([1e9], "no save"),
        "save_s": ([summary.save_s or 0.0], f"mean of {summary.saves:,} saves"),
        "commit_s": ([0.0], "not in the records"),
        "start_s": ([one.second("start") for one in trained], ""),
        "load_s": ([one.second("load") for one in trained], ""),
        "warm_up_s": ([warm_up_s], f"line through {len(kept)} attempts"),
        "notice_s": ([end_s(one) for one in attempts if one not in hung], ""),
        "hang_s": ([end_s(one) for one in hung], ""),
        "decide_s": (gaps(attempts), ""),
        "data_share": ([data_s / work_s if work_s else 0.0], f"{data_s:.3g} s"),
    }
    values = {name: max(0.0, math.fsum(each) / len(each)) for name, (each, _) in means.items() if each}
    sources = {name: text or f"mean of {len(each)}" for name, (each, text) in means.items() if each}
    gpus, hosts = (max(sizes) for sizes in zip(*((one.world_size, len(one.hosts) or 1) for one in attempts)))
    run = RunModel(gpus=gpus, gpus_per_node=max(1, gpus // hosts), spares=0, **values)  # type: ignore[arg-type]
    sources |= {"gpus": "largest attempt", "gpus_per_node": "its hosts", "spares": "not in the records"}
    causes = [_ended_by(one) for one in attempts]
    counts = Counter(cause for cause in causes if cause.kind != "end")
    table = tuple(replace(cause, count=float(count)) for cause, count in counts.items())
    source = f"{sum(counts.values())} events in {len(attempts)} attempts"
    events = [Event(_life(run, one) * gpus, cause) for one, cause in zip(attempts, causes)]
    return Estimated(run, FailureTable(table, summary.gpu_hours, source), events, sources)


def _done(attempt: Attempt) -> int:
    return (attempt.last_iteration or 0) - (attempt.first_iteration or 0)


def _kept(attempt: Attempt) -> int:
    """Steps up to the newest checkpoint; all of an attempt that did not fail."""
    newest = attempt.committed_iteration if attempt.is_failure else attempt.last_iteration
    return max(0, (newest or 0) - (attempt.first_iteration or 0))


def _ended_by(attempt: Attempt) -> FailureCause:
    if attempt.is_failure:
        kind: Kind = "hang" if attempt.second("hang") > 0 else "crash"
        return FailureCause(attempt.cause or Cause.UNKNOWN, 0.0, kind, attempt.cause == Cause.NODE_LOST)
    return {"complete": COMPLETE, "running": CUT}.get(attempt.outcome, FailureCause("stop on request", 0.0, "planned"))


def _life(run: RunModel, attempt: Attempt) -> float:
    """Seconds from the start of the processes to the event, from the steps done, with the means of ``run``."""
    if not _done(attempt):
        recorded = attempt.wall_s - attempt.second("hang") - attempt.second("idle")
        return min(recorded, run.start_s + run.load_s)
    cycle, work = Cycle(run, 1.0 + run.data_share), _done(attempt) * run.step_s
    is_saved = attempt.is_failure and attempt.committed_iteration == attempt.last_iteration
    # A failure comes in the middle of a step on average, unless the save before it was not committed.
    is_due = math.isclose(work / run.save_interval_s, round(work / run.save_interval_s) or math.inf)
    part = 0.5 if attempt.is_failure and (is_saved or not is_due) else 1e-6
    steps_s = cycle.seconds_to(work) + run.save_s * is_saved + part * run.step_s
    return run.start_s + run.load_s + run.warm_up_s + steps_s
