"""Rehearsals of the best layouts: the dry run's memory, and the priced rehearsal of a step."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

from megatron.config.dry_run import ALLOWANCE
from megatron.errors import ConfigError
from megatron.planner.plan import Run, make_plan
from megatron.planner.priced_rehearsal import PricedStep, price_rehearsal
from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout
from megatron.planner.search.ranking import first_of_families
from megatron.planner.search.result import PlannedLayout

T = TypeVar("T")
R = TypeVar("R")
_MOST_PROCESSES = 8
_MOST_TRIES = 4
"""Rehearsals for each one wanted, if most of them do not fit."""
_AGREEMENT = 0.03
"""Closed form and priced rehearsal should differ by less."""

Report = Callable[[str, int, int], None]
"""Receives what is being done, how much is done, and of how much."""


class ParallelMap(Protocol):
    """As ``map`` of one sequence."""

    def __call__(self, function: Callable[[T], R], values: Iterable[T], /) -> Iterator[R]: ...


def no_report(what: str, done: int, total: int) -> None:
    """For callers that do not show progress."""


@dataclass(frozen=True)
class Rehearsal:
    """What the rehearsal of a layout found."""

    memory_by_stage: tuple[Mapping[str, int], ...]
    """Bytes by kind at the peak of each stage, with the allowance."""
    step: PricedStep | None
    """None for a layout that has no priced rehearsal."""

    @property
    def needed(self) -> tuple[int, int]:
        """Bytes of the tightest stage, and the stage."""
        return max((sum(kinds.values()), stage) for stage, kinds in enumerate(self.memory_by_stage))


def rehearse(job: Job, layout: Layout) -> Rehearsal:
    """Simulate a step of ``layout``."""
    run = Run.of(layout.apply(job.config, job.given), job.num_gpus, job.vocabulary)
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])
    memory = tuple({**stage.peak.by_kind, "allowance": ALLOWANCE} for stage in plan.stages)
    step = None
    with suppress(ConfigError):
        step = price_rehearsal(run, job.cluster, job.constants)
    return Rehearsal(memory, step)


def rehearse_best(
    job: Job,
    ranked: Sequence[PlannedLayout],
    wanted: int,
    report: Report = no_report,
    simulate: Callable[[Job, Layout], Rehearsal] = rehearse,
    in_parallel: bool = True,
) -> tuple[PlannedLayout, ...]:
    """``ranked`` with the first layouts of its first ``wanted`` families rehearsed. Layouts that do not fit by their
    rehearsal are left out, and the next ones are rehearsed instead."""
    limit = job.config.dry_run.gpu_memory
    found: dict[Layout, Rehearsal] = {}
    with parallel_map() if in_parallel else nullcontext(map) as map_in_parallel:
        while len(found) < _MOST_TRIES * wanted:
            kept = (one for one in ranked if one.layout not in found or found[one.layout].needed[0] <= limit)
            best = [one.layout for one in islice(first_of_families(kept), wanted)]
            batch = [layout for layout in best if layout not in found]
            if not batch:
                break
            done = wanted - len(batch)
            report("rehearse", done, wanted)
            for number, rehearsal in enumerate(map_in_parallel(partial(simulate, job), batch), start=1):
                found[batch[number - 1]] = rehearsal
                report("rehearse", done + number, wanted)
    completed = (_with_rehearsal(one, found[one.layout]) if one.layout in found else one for one in ranked)
    return tuple(one for one in completed if not one.is_rehearsed or one.memory_bytes <= limit)


def _with_rehearsal(planned: PlannedLayout, rehearsal: Rehearsal) -> PlannedLayout:
    needed, stage = rehearsal.needed
    return replace(
        planned,
        memory_bytes=needed,
        tightest_stage=stage,
        is_rehearsed=True,
        memory_by_stage=rehearsal.memory_by_stage,
        rehearsal=rehearsal.step,
    )


def disagreements(ranked: Sequence[PlannedLayout]) -> list[str]:
    """Sentences about rehearsed layouts whose two prices differ."""
    sentences = []
    for number, one in enumerate(ranked, start=1):
        if one.rehearsal is None:
            continue
        difference = one.rehearsal.seconds / one.step_time_s - 1
        if abs(difference) > _AGREEMENT:
            sentences.append(
                f"The rehearsal of layout {number} differs by {difference:+.1%} from the closed form, more than "
                f"{_AGREEMENT:.0%}: expect an error of this size."
            )
    return sentences


@contextmanager
def parallel_map() -> Iterator[ParallelMap]:
    """A ``map`` in as many processes as there are cores, in order."""
    workers = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if sys.platform == "linux" else 1
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map
