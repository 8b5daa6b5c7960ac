"""Rehearsals of the best layouts by the dry run, and the details of their time."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice

from megatron.config.dry_run import ALLOWANCE
from megatron.planner.plan import Run, make_plan
from megatron.planner.rehearsal.price import PassTimes, StepPrices, pass_times
from megatron.planner.rehearsal.records import Map, UnitRecords
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.result import PlannedLayout, first_of_families
from megatron.planner.search.search import step_of

_MOST_PROCESSES = 8
_MOST_TRIES = 4
"""Rehearsals for each one wanted, if most of them do not fit."""

Report = Callable[[str, int, int], None]
"""Receives what is being done, how much is done, and of how much."""


def no_report(what: str, done: int, total: int) -> None:
    """For callers that do not show progress."""


Memory = tuple[Mapping[str, int], ...]
"""Bytes by kind at the peak of each stage, with the allowance."""


def rehearse(job: Job, layout: Layout) -> Memory:
    """Simulate a step of ``layout``."""
    run = Run.of(layout.apply(job.config, job.given), job.num_gpus, job.vocabulary)
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])
    return tuple({**stage.peak.by_kind, "allowance": ALLOWANCE} for stage in plan.stages)


def rehearse_best(
    job: Job,
    ranked: Sequence[PlannedLayout],
    wanted: int,
    records: UnitRecords,
    report: Report = no_report,
    simulate: Callable[[Job, Layout], Memory] = rehearse,
    in_parallel: bool = True,
) -> tuple[PlannedLayout, ...]:
    """``ranked`` with the first layouts of its first ``wanted`` families rehearsed. Layouts that do not fit by their
    rehearsal are left out, and the next ones are rehearsed instead."""
    limit = job.config.dry_run.gpu_memory
    found: dict[Layout, Memory] = {}
    with parallel_map() if in_parallel else nullcontext(map) as map_in_parallel:
        while len(found) < _MOST_TRIES * wanted:
            kept = (one for one in ranked if one.layout not in found or _needed(found[one.layout])[0] <= limit)
            best = [one.layout for one in islice(first_of_families(kept), wanted)]
            batch = [layout for layout in best if layout not in found]
            if not batch:
                break
            done = wanted - len(batch)
            report("rehearse", done, wanted)
            for number, rehearsal in enumerate(map_in_parallel(partial(simulate, job), batch), start=1):
                found[batch[number - 1]] = rehearsal
                report("rehearse", done + number, wanted)
    prices = StepPrices(job.cluster, job.constants)
    completed = (
        _with_rehearsal(one, found[one.layout], pass_times(prices, step_of(job, one.layout, records), one.step_time_s))
        if one.layout in found
        else one
        for one in ranked
    )
    return tuple(one for one in completed if not one.is_rehearsed or one.memory_bytes <= limit)


def _needed(memory: Memory) -> tuple[int, int]:
    """Bytes of the tightest stage, and the stage."""
    return max((sum(kinds.values()), stage) for stage, kinds in enumerate(memory))


def _with_rehearsal(planned: PlannedLayout, memory: Memory, passes: PassTimes) -> PlannedLayout:
    needed, stage = _needed(memory)
    return replace(
        planned,
        memory_bytes=needed,
        tightest_stage=stage,
        is_rehearsed=True,
        memory_by_stage=memory,
        passes=passes,
    )


@contextmanager
def parallel_map() -> Iterator[Map]:
    """A ``map`` in as many processes as there are cores, in order."""
    workers = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if sys.platform == "linux" else 1
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map
