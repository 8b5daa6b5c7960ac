"""The report of a run: the page without a browser, in a browser, and the figures as text and JSON."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands import report_run
from megatron.commands.pages.run_charts import interrupted
from megatron.errors import ExitCode
from megatron.operation.attempts import CURRENT, Attempt, append_attempt, write_current
from megatron.operation.run_summary import Costs, read_run
from megatron.operation.simulated_run import FailureTable, RunModel, of_costs, random_events, simulate
from tests.reports.load_page import NASTY, WIDTHS, Page, assert_loads_nothing, load, needs_browser


def simulated(model: RunModel, table: FailureTable, seed: int) -> list[Attempt]:
    """The attempts of a simulated run that begins in November 2023."""
    found = simulate(model, random_events(model, table, seed)).attempts
    return [replace(one, start=1.7e9 + one.start, end=1.7e9 + one.end) for one in found]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The records of 5 hours with four failures, and metrics."""
    directory = tmp_path / "run-7"
    model, table = of_costs(Costs(2400.0, 60.0, 4.0), 600.0, days=5 / 24, step_s=2.0, commit_s=5.0)
    attempts = [replace(one, world_size=16) for one in simulated(model, table, seed=10)]
    assert len(attempts) == 5
    for attempt in attempts[:-1]:
        append_attempt(directory, with_failure(attempt))
    write_current(directory, replace(attempts[-1], outcome="running"))
    (directory / "failures").mkdir()
    report = {"schema": 1, "time": attempts[1].end, "cause": "hang", "rank": 3, "host": NASTY, "section": "optimizer"}
    report |= {"message": NASTY, "advice": "Replace the host.", "stack": NASTY, "iteration": 5}
    (directory / "failures" / "0002.json").write_text(json.dumps(report))
    with (directory / "metrics.jsonl").open("w") as metrics:
        for index in range(1000):
            record = {"iteration": index, "lm_loss": 3.0 + 5.0 / (1 + index), "time": 1.7e9 + 17 * index}
            metrics.write(json.dumps(record) + "\n")
            if index % 300 == 299:
                metrics.write(json.dumps({**record, "lm_loss": None, "validation_loss": 3.1}) + "\n")
        metrics.write('{"iteration": 1000, "lm_l')  # torn
    return directory


def with_failure(attempt: Attempt) -> Attempt:
    if attempt.attempt == 2:  # its report has the cause
        return replace(attempt, cause=None)
    return replace(attempt, cause="killed", rank=1, host="node1", hosts=("node1", "node2"), exit_code=-9)


def call(*words: str | Path) -> int:
    return report_run.main([str(word) for word in words])


def write_page(run: Path) -> Path:
    target = run.parent / "report.html"
    assert call(run, "--html", target, "--metrics", run / "metrics.jsonl") == 0
    return target


def test_the_page_shows_attempts_faults_saves_and_losses(run: Path) -> None:
    text = write_page(run).read_text()
    assert_loads_nothing(text)
    page, recorded = Page(text), read_run(run).attempts
    tips = page.attributes["data-tip"]
    assert sum("checkpoint of iteration" in tip for tip in tips) == sum(one.saves for one in recorded)
    assert {"attempt 1: killed", "attempt 2: hang"} <= {tip.split("\n")[0] for tip in tips}
    for name, label in (("start", "start"), ("step", "training"), ("save", "saves"), ("lost", "lost work")):
        assert any(tip.startswith(f"attempt 1: {label} ") for tip in tips)
        assert name in page.attributes["class"]
    assert sum("validation loss" in tip for tip in tips) == 3
    assert 'class="line"' in text and "Save interval" in text and "node1" in text


def test_the_page_shows_the_training_over_tokens_and_its_alarms(run: Path) -> None:
    first = {"run": {"flags": {"data": {"seq_length": 100}, "operation": {"straggler_threshold": 1.2}}}}
    with (run / "metrics.jsonl").open("w") as metrics:
        for iteration in range(1, 101):
            record = {"iteration": iteration, "consumed_samples": 1000 * iteration, **first}
            record |= {"lm_loss": 9.0 - iteration / 20}
            record |= {"learning_rate": 1e-4, "grad_norm": 1.5, "tokens_per_s_per_gpu": 9500.0, "mfu": 0.4}
            record |= {"skipped": int(iteration == 20), "peak_memory_gib": 61.5, "time": 1.7e9 + 60 * iteration}
            record |= {"spike": 7.5} if iteration == 40 else {}
            record["operation/slowest_rank_ratio"] = 1.31 if iteration == 60 else 1.19
            metrics.write(json.dumps(record) + "\n")
            first = {}
        metrics.write(json.dumps({"iteration": 50, "validation_loss": 6.75, "time": 1.7e9 + 3000}) + "\n")
    # The file in the run directory is found without --metrics.
    target = run.parent / "page.html"
    assert call(run, "--html", target) == 0
    text = target.read_text()
    page = Page(text)
    training = Page(text.partition("<h2>Training</h2>")[2].partition("</section>")[0])
    assert_loads_nothing(text)
    for words in ("learning rate, last value 0.0001", "gradient norm, last value 1.5", "tokens/s per GPU", "61.5 GiB"):
        assert words in training.text
    assert "MFU, last value 40 %" in training.text and "10 M tokens" in training.text
    # 50 of 100 iterations: half of the axis.
    assert training.attributes["data-tip"].count("validation loss 6.7500") == 1 and 'cx="50.000%"' in text
    tips = [tip.replace("\n", ", ") for tip in page.attributes["data-tip"]]
    unusual = ["1 updates skipped, iteration 20", "spike 7.5, iteration 40"]
    unusual.append("slowest rank 1.31 times the median, iteration 60")
    assert [tips.count(one) for one in unusual] == [2, 2, 2]  # over tokens, and over wall time
    assert sum(tip.startswith("attempt ") and tip.endswith(" failed") for tip in tips) == 4


def test_all_figures_are_in_the_text_and_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run.parent / "out" / "run.json"
    assert call(run, "--json", target) == 0
    figures, text = json.loads(target.read_text()), capsys.readouterr().out
    assert f"effective time      {100 * figures['effective_time']:.1f} %" in text
    assert sum(figures["seconds"].values()) == pytest.approx(figures["wall_s"]) == pytest.approx(5 * 3600.0)
    assert figures["interruptions"] == len(figures["records"]) - 1
    assert f"every {figures['save_interval']['young']['seconds'] / 60:.1f} min" in text
    assert figures["hosts"][0]["host"] == "node1"


def tiles(text: str) -> list[str]:
    """The names of the first figures of a page."""
    return re.findall(r'<div class="label">([^<]*)</div>', text)


def test_the_loss_is_the_first_figure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_page(run).read_text()
    assert tiles(text)[:2] == ["loss", "effective time"] and "lost work" in tiles(text)
    assert text.count('class="tile main"') == 1
    assert '<div class="value">3.0050</div><div class="detail">validation 3.1000</div>' in text
    assert "loss                3.0050 (validation 3.1000)" in capsys.readouterr().out
    (run / "metrics.jsonl").write_text('{"iteration": 5, "validation_loss": 2.5}\n')
    assert '<div class="value">2.5000</div><div class="detail">validation</div>' in write_page(run).read_text()
    # A run whose losses are NaN from the first one has a report, too.
    for content in ("", '{"iteration": 1, "lm_loss": NaN}\n'):
        (run / "metrics.jsonl").write_text(content)
        assert call(run, "--html", run / "page.html") == 0
        text = (run / "page.html").read_text()
        assert tiles(text)[0] == "effective time" and text.count('class="tile main"') == 1
    assert call(run, "--metrics", run / "metrics.jsonl") == 2


@pytest.mark.parametrize(("minutes", "is_advised"), [(59, False), (61, True)])
def test_save_intervals_are_advised_from_an_hour_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: int, is_advised: bool
) -> None:
    model, table = of_costs(Costs(1e9, 60.0, 4.0), 600.0, days=minutes / 1440, step_s=2.0, commit_s=5.0)
    for attempt in simulated(model, table, seed=2):
        append_attempt(tmp_path / "run", attempt)
    assert call(tmp_path / "run", "--html", tmp_path / "page.html") == 0
    assert ("Save interval" in (tmp_path / "page.html").read_text()) is is_advised
    assert ("save, young" in capsys.readouterr().out) is is_advised
    assert "lost work" not in tiles((tmp_path / "page.html").read_text())  # nothing failed


@pytest.mark.parametrize(
    ("place", "experiment", "name"),
    [("llama", None, "llama"), ("llama/checkpoints", None, "llama"), ("llama/checkpoints", "third try", "third try")],
)
def test_a_run_is_called_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, experiment: str | None, name: str
) -> None:
    directory = tmp_path / place
    append_attempt(directory, Attempt(attempt=1, start=5.0, end=6.0, outcome="complete"))
    record = {"iteration": 1, "lm_loss": 2.0, "run": {"flags": {"logging": {"wandb_exp_name": experiment}}}}
    (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    for words, first in (((), name), (("--name", "mine"), "mine")):
        assert call(directory, *words) == 0
        assert capsys.readouterr().out.splitlines()[0] == first


def test_the_curve_of_losses_is_interrupted_where_an_attempt_starts() -> None:
    points = [(float(place), 1.0) for place in range(4)]
    assert [point[0] for point in interrupted(points, [0.0, 1.5, 1.7, 2.0]) if math.isfinite(point[1])] == [0, 1, 2, 3]
    broken = [math.isnan(value) for _, value in interrupted(points, [0.0, 1.5, 1.7, 2.0])]
    assert broken == [False, False, True, False, False]


def test_the_report_of_a_run_under_way_changes_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_page(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert (run / CURRENT).exists()


def test_a_run_of_one_short_attempt(tmp_path: Path) -> None:
    append_attempt(tmp_path, Attempt(attempt=1, start=5.0, end=5.0, outcome="failed", exit_code=2))
    assert call(tmp_path, "--html", tmp_path / "page.html", "--json", tmp_path / "run.json") == 0
    assert "Attempts" in (tmp_path / "page.html").read_text()


def test_mistakes_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("{}\n")
    cases = [
        ((tmp_path,), f"{tmp_path} has no record of an attempt"),
        ((run, "--metrics", tmp_path / "missing"), f"--metrics {tmp_path}/missing cannot be read (No such file"),
        ((run, "--metrics", tmp_path / "empty.jsonl"), f"--metrics {tmp_path}/empty.jsonl has no losses"),
        ((run, "--html", run / "metrics.jsonl" / "page"), f"--html {run}/metrics.jsonl/page cannot be written"),
    ]
    for words, sentence in cases:
        assert call(*words) == ExitCode.ACTION_REQUIRED
        error = capsys.readouterr().err
        assert error.startswith(f"ERROR: {sentence}") and error.count("\n") == 1


@pytest.mark.processes
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_works_in_a_browser(width: int, run: Path) -> None:
    """Its script runs without an error: it sorts tables, shows a tip, and switches between light and dark."""
    rows = "[...document.querySelectorAll('table.sortable')].at(-1).tBodies[0].rows.length"
    bars = "document.querySelectorAll('svg rect.step').length"
    found = load(write_page(run).read_text(), width, f"return [{rows}, {bars}]")
    assert found["title"] == "run-7" and found["tip"] == "validation loss 3.1000"
    recorded = read_run(run).attempts
    assert found["more"] == [len(recorded), sum(one.second("step") > 0 for one in recorded)]
