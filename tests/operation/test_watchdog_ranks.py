"""Ranks of a real training that hang are ended, named and restarted."""

import random
from pathlib import Path

import pytest

from megatron.operation.causes import Cause
from tests.operation.hang_campaign import LIMIT, SECTIONS, Campaign, Fault, run_campaign


def test_a_rank_that_hangs_is_named_and_all_are_restarted(tmp_path: Path, chance: random.Random) -> None:
    """Then one raises an exception: it is named, not the other, which loses its connection to it."""
    with Campaign(tmp_path, faults=2) as campaign:
        campaign.wait_until_quiet()
        report = campaign.inject(Fault("gil", chance.randrange(2), chance.choice(SECTIONS)))
        # How long it takes depends on the machine: the campaign by command reports it.
        assert report.is_right and report.seconds > LIMIT, report
        campaign.wait_until_quiet()
        report = campaign.inject(Fault("exception", 1, "optimizer"))
        assert (report.content["rank"], report.content["cause"]) == (1, Cause.EXCEPTION)
        assert report.content["section"] == "optimizer" and "Injected fault" in report.content["message"]
        assert campaign.false_alarms() == 2


@pytest.mark.parametrize("hangs", [6, pytest.param(20, marks=pytest.mark.slow(reason="five minutes of waits"))])
def test_a_campaign_of_hangs(tmp_path: Path, chance: random.Random, hangs: int) -> None:
    faults = [Fault.draw(chance, 2) for _ in range(hangs)]
    # Twice the limit of the campaign by command: two healthy ranks may wait 2 s for each other beside other tests.
    reports = run_campaign(tmp_path, faults, ranks=2, limit=2 * LIMIT)
    assert all(report.is_right for report in reports)
