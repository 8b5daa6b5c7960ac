"""Ranks of a real training that hang are ended, named and restarted."""

import random
from pathlib import Path

import pytest

from megatron.operation.causes import Cause
from tests.operation.broken_job import LIMIT, SECTIONS, Break, BreakableJob, break_one_after_the_other
from tests.operation.jobs import ended


@pytest.mark.parametrize("hangs", [2, pytest.param(20, marks=pytest.mark.slow(reason="five minutes of waits"))])
def test_a_rank_that_hangs_is_named_and_all_are_restarted(tmp_path: Path, chance: random.Random, hangs: int) -> None:
    """Then one raises an exception: it is named, not the other, which loses its connection to it."""
    drawn = [
        Break("gil", chance.randrange(2), chance.choice(SECTIONS)),
        *(Break.draw(chance) for _ in range(hangs - 1)),
    ]
    with ended() as jobs:
        # Twice the limit of the campaign by command: two healthy ranks may wait 2 s for each other beside other tests.
        jobs.append(job := BreakableJob(tmp_path, len(drawn) + 1, 2 * LIMIT))
        *reports, last = break_one_after_the_other(job, [*drawn, Break("exception", 1, "optimizer")])
        # How long it takes depends on the machine: the campaign by command reports it.
        assert all(report.is_right and report.seconds > LIMIT for report in reports), reports
        assert last.is_right and last.content["cause"] == Cause.EXCEPTION and last.content["rank"] == 1
        assert last.content["section"] == "optimizer" and "Injected fault" in last.content["message"]
        job.wait_until_quiet()
        assert len(job.reports()) == len(drawn) + 1
