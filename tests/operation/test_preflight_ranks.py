"""The checks before a run on four real ranks, with and without faults."""

import os
import secrets
from pathlib import Path

import pytest

from megatron.operation.preflight.result import Verdict
from megatron.operation.preflight.run import TOTAL_SECONDS, Preflight
from megatron.operation.preflight.table import CHECKS
from tests.operation.preflight_faults import FAULTS, run_checks
from tests.rank_pool import RankPool

QUICK = 0.3
"""Seconds of the product."""


def results_of(ranks: RankPool, directory: Path, fault: str | None, duration: float = QUICK) -> Preflight:
    """The results, which must be equal on all ranks."""
    outcomes = ranks.run(run_checks, str(directory), secrets.token_hex(4), fault, duration, world_size=4, timeout=120.0)
    assert all(one.results == outcomes[0].results for one in outcomes)
    first: Preflight = outcomes[0]
    return first


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(four_ranks: RankPool, tmp_path: Path, fault: str) -> None:
    expected = FAULTS[fault]
    results = results_of(four_ranks, tmp_path, fault).results
    named = [one for one in results if one.verdict is not Verdict.OK and one.check == expected.check]
    assert [(one.check, one.rank) for one in named] == [(expected.check, expected.rank)], results
    assert expected.value in named[0].value
    assert named[0].remedy
    assert named[0].host == ("node0" if expected.place else f"node{expected.rank}")


def test_a_healthy_job_passes_and_nothing_stays_on_the_disk(four_ranks: RankPool, tmp_path: Path) -> None:
    preflight = results_of(four_ranks, tmp_path, None, duration=1.0)
    assert [(one.check, one.verdict) for one in preflight.results] == [(check.name, "ok") for check in CHECKS]
    assert [node.host for node in preflight.nodes] == ["node0", "node1", "node2", "node3"]
    assert preflight.seconds < TOTAL_SECONDS
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".store")] == []


@pytest.mark.slow("a minute: no false alarm in 100 repetitions")
def test_a_healthy_job_raises_no_alarm(four_ranks: RankPool, tmp_path: Path) -> None:
    alarms = []
    for _ in range(100):
        results = results_of(four_ranks, tmp_path, None).results
        alarms += [one.sentence() for one in results if one.verdict is not Verdict.OK]
    assert alarms == []
