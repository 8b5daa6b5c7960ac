"""Jobs that random faults disturb end as if nothing had happened; and the campaign would notice if they did not."""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from megatron.features.faults.flags import parse_fault, parse_faults
from megatron.operation import attempts
from tests.operation import campaign
from tests.operation.campaign import (
    LAYOUTS,
    Blow,
    DisturbedJob,
    Launch,
    Plan,
    check_exit_code,
    make_plan,
    run_seed,
    undisturbed_run,
)
from tests.operation.campaign_checks import (
    check_attempts,
    check_bits,
    check_commits,
    check_injected,
    check_leftovers,
    check_loads,
    check_reports,
    check_writer,
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


USUAL = (17, 49, 261, 332, 335, 395)
"""Few seeds with every layout and moment. Other tests have what hangs (``test_hang.py``) and writers that die
(``tests/checkpoint/test_background.py``), with the two kills below."""
CASES = [
    *((seed, False) for seed in USUAL),
    # The kill of a background process that commits, and of one that copies; the others are in the campaign.
    *((seed, True) for seed in (5, 6)),
    *(pytest.param(seed, False, marks=pytest.mark.slow("the same again")) for seed in range(20) if seed not in USUAL),
]


@pytest.mark.parametrize(("seed", "writers"), CASES)
def test_a_disturbed_job_ends_as_undisturbed(tmp_path: Path, references: Path, seed: int, writers: bool) -> None:
    job, violations = run_seed(seed, tmp_path / "job", references, writers=writers)
    assert not writers or (job.plan.writer is not None and job.plan.writer.stage != "idle")
    assert not violations, campaign.report(job, violations)
    shutil.rmtree(tmp_path / "job")


# --- what a seed does ----------------------------------------------------------------------------------------


def test_plans_are_repeatable_and_cover_the_table() -> None:
    plans = [make_plan(seed) for seed in range(500)]
    assert plans == [make_plan(seed) for seed in range(500)]
    assert {plan.layout for plan in plans} == {*LAYOUTS, "mirror"}
    kinds = Counter(fault.kind for plan in plans for fault in plan.faults)
    wanted = {*campaign.FATAL, *campaign.HANGS, *campaign.HARMLESS, *campaign.IN_BACKGROUND, *campaign.RARE}
    assert kinds.keys() == wanted and min(kinds.values()) >= 5
    assert {plan.blow.number for plan in plans if plan.blow is not None} == {signal.SIGKILL, signal.SIGTERM}
    kills = [make_plan(seed, writers=True) for seed in range(50)]
    assert {(plan.layout, plan.writer.stage, plan.writer.rank) for plan in kills if plan.writer is not None} == set(
        product(("background", "mirror"), campaign.STAGES, range(campaign.RANKS))
    )
    for plan in plans:
        assert plan.faults or plan.blow
        assert not plan.faults or parse_faults(",".join(map(str, plan.faults))) == plan.faults


# --- what it would notice ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(references: Path) -> Path:
    return undisturbed_run(references, "data")


@pytest.fixture
def save(undisturbed: Path, tmp_path: Path) -> Iterator[Path]:
    """A directory of checkpoints, to be damaged."""
    yield Path(shutil.copytree(undisturbed, tmp_path / "save"))


def test_a_lost_or_replaced_checkpoint_is_noticed(save: Path) -> None:
    job = DisturbedJob(make_plan(0), save.parent)
    job.note_commits()
    assert sorted(job.commits) == [4, 8, 12, 16, 20, 24]
    assert not check_commits(job.commits, save)
    shutil.rmtree(save / "iter_0000008")
    manifest = save / "iter_0000012" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert [text.split()[-1] for text in check_commits(job.commits, save)] == ["lost", "replaced"]


def test_a_changed_bit_or_state_and_a_missing_end_are_noticed(save: Path, undisturbed: Path) -> None:
    assert not check_bits(save, undisturbed)
    shard = save / "iter_0000008" / "rank_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    manifest = save / "iter_0000012" / "manifest.json"
    record = json.loads(manifest.read_text())
    record["manifest"]["state"]["consumed_samples"] += 1
    manifest.write_text(json.dumps(record))
    shutil.rmtree(save / "iter_0000024")
    found = check_bits(save, undisturbed)
    assert len(found) == 3
    assert "iter_0000024 is missing" in found[0]
    assert "iter_0000008 differs" in found[1]
    assert "iter_0000012 has another state" in found[2]


def test_leftovers_are_noticed(save: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert not check_leftovers(save, temporary)
    (save / ".iter_0000004.saving-0123").mkdir()
    (temporary / "tmpabc").mkdir()
    (problem,) = check_leftovers(save, temporary)
    assert ".saving-0123" in problem and "tmp/tmpabc" in problem
    shutil.rmtree(temporary / "tmpabc")
    assert not check_leftovers(save.parent / "never made", temporary)


def plan_of(*specs: str, blow: Blow | None = None) -> Plan:
    return Plan(0, "data", tuple(parse_fault(spec) for spec in specs), blow)


@pytest.mark.parametrize(
    ("plan", "injected", "code", "is_right"),
    [
        (plan_of("kill@3"), {"kill@3"}, 0, True),
        (plan_of("kill@3"), {"kill@3"}, 1, False),
        (plan_of("sigterm@3"), {"sigterm@3"}, 75, True),
        (plan_of("sigterm@3"), {"sigterm@3"}, 0, False),
        (plan_of("sigterm@3"), set(), 0, True),
        (plan_of("sigterm@start"), {"sigterm@start"}, 0, True),
        (plan_of("kill@3:always"), {"kill@3:always"}, 93, True),
        (plan_of("kill@3:always"), {"kill@3:always"}, 0, False),
        (plan_of(blow=Blow(signal.SIGKILL, 3, 0.1)), set(), -9, True),
        (plan_of(blow=Blow(signal.SIGTERM, 3, 0.1)), set(), 75, True),
        (plan_of(blow=Blow(signal.SIGTERM, 3, 0.1)), set(), 2, False),
        (plan_of(blow=Blow(signal.SIGTERM, 3, 0.1)), set(), -15, False),
        (plan_of(blow=Blow(signal.SIGTERM, 0, 0.1)), set(), -15, True),
        (plan_of("kill@3"), set(), None, False),
    ],
)
def test_a_wrong_exit_code_is_noticed(plan: Plan, injected: set[str], code: int | None, is_right: bool) -> None:
    assert (check_exit_code(Launch(code, injected, ""), plan, is_first=True) == []) == is_right


def test_a_load_of_an_older_or_unknown_checkpoint_is_noticed() -> None:
    saved, loaded = "> saved checkpoint /x/iter_{:07d}\n", "> loaded checkpoint /x, continuing after iteration {}\n"
    assert not check_loads(saved.format(4) + saved.format(8) + loaded.format(8), {4, 8})
    # A save that was committed, but not reported before the end.
    assert not check_loads(saved.format(4) + loaded.format(8), {4, 8})
    assert check_loads(saved.format(4) + saved.format(8) + loaded.format(4), {4, 8})
    assert check_loads(saved.format(4) + loaded.format(8), {4})


def test_a_fault_that_was_not_injected_is_noticed() -> None:
    faults = parse_faults("kill@3,eio@save2")
    assert not check_injected(faults, {"kill@3"})
    assert check_injected(faults, {"eio@save2"})


@pytest.mark.parametrize(
    ("spec", "reports", "is_right"),
    [
        ("kill@3:rank1", [("killed", 1)], True),
        ("kill@3:rank1", [("killed", 0)], False),
        ("kill@3:rank1", [("hang", 1)], False),
        ("kill@3:rank1", [], False),
        ("kill@3:rank1", [("killed", 1), ("hang", 0)], False),
        ("kill@3", [("killed", 0)], True),
        # The launcher ended rank 0 before it reached the fault, which it then does in the next attempt.
        ("exit@start:7", [("unknown", 1), ("unknown", 0)], True),
        ("exit@start:7", [("unknown", 1), ("unknown", 1)], False),
        ("exit@start:7", [("unknown", 1), ("killed", 0)], False),
        ("exit@start:7", [], False),
        ("nan@3", [("not_finite", None), ("not_finite", None)], False),
        ("nan@3:rank1", [("not_finite", None)], True),
        ("delay@3:rank1:0.1", [], True),
        ("flip@3:rank1:weight:7", [("silent_corruption", None)], True),
        ("flip@3:rank1:weight:7", [("silent_corruption", 0)], False),
        ("flip@3:rank1:weight:7", [], False),
        ("collective@3:rank1", [("hang", None)], True),
        ("stoploader@3:rank1", [("hang", None)], False),
    ],
)
def test_a_wrong_report_is_noticed(spec: str, reports: list[tuple[str, int | None]], is_right: bool) -> None:
    found = [{"cause": cause, "rank": rank, "message": "..."} for cause, rank in reports]
    assert (check_reports(plan_of(spec).fatal, found) == []) == is_right


def test_what_the_kill_of_a_background_process_must_not_cost_is_noticed(save: Path, undisturbed: Path) -> None:
    shutil.rmtree(save / "iter_0000012")
    assert not check_writer(save, undisturbed, attempts=1, most_missing=1)
    shutil.rmtree(save / "iter_0000016")
    assert not check_writer(save, undisturbed, attempts=1, most_missing=2)
    found = check_writer(save, undisturbed, attempts=2, most_missing=1)
    assert [text.split()[0] for text in found] == ["2", "after"]


def test_seconds_without_a_class_are_noticed(tmp_path: Path) -> None:
    for end, step, is_right in ((10.0, 9.95, True), (10.0, 9.5, False), (0.069, 0.07, True), (0.069, 0.073, False)):
        shutil.rmtree(tmp_path)
        attempt = attempts.Attempt(attempt=1, start=0.0, end=end, outcome="complete", seconds={"step": step})
        attempts.append_attempt(tmp_path, attempt)
        assert (check_attempts(tmp_path) == []) == is_right
