"""The command that simulates runs: its text, JSON and page, and what --from takes from records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands import simulate_run
from megatron.operation.attempts import append_attempt
from megatron.operation.recorded_run import lost_gpu_seconds
from megatron.operation.run_summary import Costs
from megatron.operation.simulated_run import of_costs, random_events, simulate
from tests.reports.load_page import Page, assert_loads_nothing


def call(capsys: pytest.CaptureFixture[str], *words: str | float | Path) -> str:
    assert simulate_run.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_changes_are_worth_what_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    """In runs of fixed work, where 400 failures end attempts."""
    words = "--gpus 1024 --steps 400000 --gpu-hours-per-failure 3000 --spares 30 --seeds 3 --json"
    found = json.loads(call(capsys, *words.split()))
    gained = {name: hours for name, hours, _ in found["gains"]}
    values = found["values"]
    events = sum(values["interruptions"]) / 3
    assert 300 < events < 600 and values["days of work"] == pytest.approx([400_000 * 10 / 86400] * 3, rel=1e-6)
    # A minute of every restart; nothing waits for nodes.
    assert gained["1 minute less of --start-s 120"] == pytest.approx(events / 60, rel=0.1)
    assert gained["1 minute less of --hang-s 60"] == pytest.approx(events / 60 * 49 / 466, rel=0.3)
    assert gained["10 % fewer failures"] > gained["1 minute less of --start-s 120"] / 2
    # Eight GPUs more during the run, in which nothing waits for a node.
    (spare,) = (gpu_hours for name, _, gpu_hours in found["gains"] if name == "one more spare node")
    assert spare == pytest.approx(-sum(values["days"]) / 3 * 24 * 8)
    assert found["best_minute"].startswith("Worth most: 1 minute less of --")
    assert [hours for *_, hours in found["gains"]] == sorted((hours for *_, hours in found["gains"]), reverse=True)
    lost, days = sum(hours for *_, hours in found["lost"]), sum(values["days"]) / 3
    assert lost / 24 == pytest.approx((days - 400_000 * 10 / 86400) * 1024 + days * 30 * 8, rel=1e-6)


def test_the_page_shows_every_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    text = call(capsys, "--days", 54, "--seeds", 2, "--gpu-hours-per-straggler", 1e6, "--html", path)
    page = Page(path.read_text())
    assert_loads_nothing(path.read_text())
    for words in ("faulty GPU", "slow node", "16,384 GPUs, 54 days, simulated", "--straggler-factor", "Worth most: "):
        assert words in page.text and words.split(",")[0] in text + page.text
    assert any(tip.startswith("slow node, start: ") for tip in page.attributes["data-tip"])


@pytest.mark.parametrize(
    "words",
    [
        "--save-s 0 --save-interval-s 600",  # of which there is a best interval: a step
        "--gpu-hours-per-failure 1e-4 --days 0.1",  # no attempt comes to a step
        "--gpus 8 --spares 0 --start-s 0 --load-s 0 --warm-up-s 0 --save-interval-s 1e9",  # nothing is lost
    ],
)
def test_extreme_runs_have_a_page(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    call(capsys, "--days", 0.01, "--seeds", 1, *words.split(), "--html", path)
    assert not {"nan", "None", "inf"} & set(Page(path.read_text()).text.split())


def test_equal_runs_are_in_one_interval() -> None:
    assert simulate_run.binned("effective time", [0.9] * 5) == {"90.00 % to 90.00 %": {"runs": 5.0}}
    assert sum(row["runs"] for row in simulate_run.binned("effective time", [0.9, 0.9, 0.90002]).values()) == 3.0


def test_records_give_the_inputs_that_are_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, table = of_costs(Costs(3000.0, 60.0, 4.0), 300.0, days=1, step_s=2.0)
    found = simulate(model, random_events(model, table, seed=1)).attempts
    for attempt in found:
        append_attempt(tmp_path, attempt)
    rows = [line.split() for line in call(capsys, "--from", tmp_path, "--save-s", 7, "--seeds", 2).splitlines()]
    inputs = {row[0]: row[1:] for row in rows if row}
    assert inputs["--save-s"] == ["7", "given"] and inputs["--gpus"][0] == "1"
    assert float(inputs["--start-s"][0]) == pytest.approx(60.0) and float(inputs["--days"][0]) == pytest.approx(1.0)
    assert float(inputs["--save-interval-s"][0]) == pytest.approx(300.0, rel=0.02)
    recorded, replayed = (float(row[3]) for row in rows if row[:2] == ["effective", "time,"] and row[2] != "Daly's")
    assert recorded == pytest.approx(replayed, abs=1.0) and recorded < 95.0
    assert lost_gpu_seconds(found, 1)["unknown", "start"] > 0


def test_a_record_that_ends_before_it_starts_has_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, table = of_costs(Costs(3000.0, 60.0, 4.0), 300.0, days=1)
    damaged = simulate(model, random_events(model, table, seed=1)).attempts[0]
    append_attempt(tmp_path, replace(damaged, end=damaged.start - 5.0))
    assert "The Llama 3 Herd of Models" in call(capsys, "--from", tmp_path, "--seeds", 1)
