"""The fit to published runs: its rows, its errors, the record that the planner reads, and the page that states them.
Layouts of real processes on this machine take about as long as a calibration of the machine predicts."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import fit as fitting
from benchmarks.published import table
from benchmarks.published.fit import Errors, errors
from benchmarks.published.memory import GIB, RUNS, lines
from benchmarks.published.report import Evaluation, Table, main, record
from benchmarks.published.table import TABLE, run_of, sources, split_by_twins, without_doubtful
from megatron.planner.search.accuracy import CORRECTED_ERROR, KNOWN_ERROR, OWN_ERROR, SAME_MODEL_ERROR
from megatron.planner.step_time.prices import CONSTANTS, load_fitted, load_record
from megatron.planner.step_time.published import PublishedRun, predict, read_published
from megatron.planner.step_time.workload import Array
from tests.end_to_end.run_process import REPOSITORY, environment

PAGES = [REPOSITORY / "docs/planner.md", REPOSITORY / "docs/step_times.md"]


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return Evaluation.of_table()


def test_the_table_has_every_run_and_a_fifth_is_held_back(evaluation: Evaluation) -> None:
    runs = read_published(TABLE)
    assert len(runs) == 540
    assert 0.15 < len(evaluation.held_back) / (len(evaluation.known) + len(evaluation.held_back)) < 0.25
    unpriced = {one.reason for one in runs if one.run is None}
    assert unpriced == {"seq is not stated", "layers, heads is not stated"}


def test_the_record_of_the_planner_is_that_of_a_fit_today(evaluation: Evaluation) -> None:
    stored, found = load_record(), json.loads(record(evaluation))
    assert set(stored["constants"]) == set(CONSTANTS)
    for part in ("constants", "errors"):
        assert stored[part] == pytest.approx(found[part], rel=0.02)
    for part in ("fitted", "measured", "table_sha256"):
        assert stored[part] == found[part]
    assert len(found["fitted"]) <= 13  # the others are stated
    stated = CONSTANTS.keys() - found["fitted"]
    assert {name: load_fitted()[name] for name in stated} == {name: CONSTANTS[name].start for name in stated}


def test_a_fit_finds_the_constants_that_made_the_times(evaluation: Evaluation) -> None:
    """Times that the model itself computes, from other constants than those where a fit starts."""
    changed = {"product_hopper": 0.6, "cudnn_hopper": 0.3, "exposed_tensor_parallel": 0.9}
    assert changed.keys() <= set(fitting.fitted_names())
    truth = dict(evaluation.constants) | changed
    made = [
        replace(one, seconds=float(value)) for one, value in zip(evaluation.known, predict(evaluation.known, truth))
    ]
    again = fitting.fit(made)
    assert np.abs(errors(made, again)).max() < 0.03
    assert {name: again[name] for name in changed} == pytest.approx(changed, rel=0.05)


def test_runs_without_a_twin_in_the_fit_are_predicted_within_four_percent_at_the_median(evaluation: Evaluation) -> None:
    twins, others = split_by_twins(evaluation.held_back, evaluation.known)
    assert min(len(twins), len(others)) >= 40
    for runs in (others, evaluation.held_back):
        found = Errors.of(errors(runs, load_fitted()))
        assert found.median <= 0.04
        assert found.p90 <= 0.09


def test_a_twin_differs_in_the_replicas_and_the_batch_alone(evaluation: Evaluation) -> None:
    one = next(one for one in evaluation.known if run_of(one).dp > 1 and run_of(one).tp > 1)
    run = run_of(one)
    twice = replace(
        one, run=replace(run, gpus=2 * run.gpus, dp=2 * run.dp, global_batch_size=6 * run.global_batch_size)
    )
    other = replace(one, run=replace(run, micro_batch_size=2 * run.micro_batch_size))
    assert split_by_twins([twice, other], [one]) == ([twice], [other])
    # Six times the sequences on twice the GPUs in 3.3 times the time: 1.1 times as long as at the twin's rate.
    slower = replace(twice, seconds=3.3 * (one.seconds or 0.0))
    assert fitting.errors_of_copies([slower], [one]) == pytest.approx([1 / 1.1 - 1])


def test_sources_that_were_left_out_are_predicted_within_three_and_a_half_percent(evaluation: Evaluation) -> None:
    """The median and the 90th percentile, in the mean over the sources; and no source is far off."""
    found = {}
    for source in sources(evaluation.known):
        own = fitting.left_out(evaluation.known, source)
        if own:
            found[source] = Errors.of(errors(own, evaluation.without[source]))
    assert len(found) == 7  # torchtitan's GPUs occur nowhere else
    assert np.mean([one.median for one in found.values()]) <= 0.035
    assert np.mean([one.p90 for one in found.values()]) <= 0.09
    for source, one in found.items():
        assert one.median <= 0.07, source
        # Of the nine rows of nemo-25xx, one contradicts the others, and GPT-3 is predicted 10 and 17 % too slow.
        assert one.p90 <= (0.205 if source == "nemo-25xx" else 0.12), source


def test_one_run_of_the_same_job_corrects_the_others(evaluation: Evaluation) -> None:
    """Of sources that were left out of the fit, so that they are unknown software."""
    by_job = fitting.corrected_errors(evaluation.known, evaluation.without, table.same_job)
    together = np.concatenate(list(by_job.values()))
    assert len(together) > 250
    assert np.median(together) <= 0.02
    # Repeated runs of one layout differ by 4 % in bloom; korthikanti-2022 has one model and two kinds of recompute.
    for source in set(by_job) - {"bloom", "korthikanti-2022"}:
        assert np.median(by_job[source]) <= 0.026, source
    by_software = fitting.corrected_errors(evaluation.known, evaluation.without, table.same_software)
    assert np.median(by_software["dgxc-benchmarking"]) <= 0.025


def test_pairs_of_the_same_layout_differ_by_their_times_alone(evaluation: Evaluation) -> None:
    found = fitting.repeats(evaluation.known)
    assert {"same release", "another release", "another source"} == {one.kind for one in found}
    for one in found:
        first, second = map(run_of, one.runs)
        assert (first.heads, first.tp, first.pp, first.vp, first.gpus) == (
            second.heads, second.tp, second.pp, second.vp, second.gpus,
        )  # fmt: skip
        times = sorted(run.seconds or 0.0 for run in one.runs)
        assert one.difference == pytest.approx(times[1] / times[0] - 1)
    slower = [replace(one, seconds=1.1 * (one.seconds or 0.0)) for one in evaluation.known[:1]]
    (own,) = fitting.repeats([*evaluation.known[:1], *slower])
    assert (own.kind, own.difference) == ("same release", pytest.approx(0.1))


def test_the_intervals_of_the_search_are_the_percentiles_of_the_fit(evaluation: Evaluation) -> None:
    found = evaluation.known_errors()
    worst = max(
        Errors.of(errors(rows, evaluation.without[source])).p90
        for source in sources(evaluation.known)
        if (rows := without_doubtful(fitting.left_out(evaluation.known, source)))
    )
    assert found["left_out"] == worst
    used = (KNOWN_ERROR, CORRECTED_ERROR, SAME_MODEL_ERROR)
    for error, interval in zip((worst, found["same_software"], found["same_software_and_model"]), used):
        assert error <= interval < error + 0.012
    page = "\n".join(one.read_text(encoding="utf-8") for one in PAGES)
    assert f"is +-{OWN_ERROR:.0%}:".replace("%", " %") in page
    assert f"These are {KNOWN_ERROR:.0%},".replace("%", " %") in page
    assert f"then +-{CORRECTED_ERROR:.0%}, and +-{SAME_MODEL_ERROR:.0%} if".replace("%", " %") in page


def test_a_level_common_to_all_runs_of_a_source_is_corrected(evaluation: Evaluation) -> None:
    known = [one for one in evaluation.known if one.source == "dgxc-benchmarking"]
    delayed = [replace(one, seconds=1.5 * (one.seconds or 0.0)) for one in known]
    constants = {"dgxc-benchmarking": load_fitted()}
    before, after = (fitting.corrected_errors(runs, constants, table.same_software) for runs in (known, delayed))
    assert after["dgxc-benchmarking"] == pytest.approx(before["dgxc-benchmarking"], rel=1e-9)


@pytest.mark.parametrize("has_seen", [True, False])
def test_in_most_sweeps_the_chosen_layout_is_within_two_percent_of_the_best(
    evaluation: Evaluation, has_seen: bool
) -> None:
    """With constants that were fitted to the source, and with constants of the other sources alone."""

    def predicted(runs: Sequence[PublishedRun]) -> Array:
        return predict(runs, evaluation.constants if has_seen else evaluation.without[runs[0].source])

    found = fitting.sweeps(evaluation.known, predicted)
    assert len(found) >= 25
    assert all(one.spread > 0.02 for one in found)
    assert sum(one.is_good for one in found) / len(found) >= 0.9
    assert np.mean([one.regret for one in found]) <= 0.01


def test_a_model_that_finds_all_layouts_equal_chooses_by_chance(evaluation: Evaluation) -> None:
    """It has the mean regret of all layouts, and not that of the first one of the table."""
    found = fitting.sweeps(evaluation.known, lambda runs: np.ones(len(runs)))
    regrets = [one.seconds.mean() / one.seconds.min() - 1 for one in found]
    assert [one.regret for one in found] == pytest.approx(regrets)
    assert np.mean(regrets) > 0.05


def test_a_sweep_has_layouts_of_one_release_that_differ_by_more_than_two_percent(evaluation: Evaluation) -> None:
    first = next(one for one in evaluation.known if one.source == "dgxc-benchmarking")
    run = run_of(first)
    faster = replace(first, run=replace(run, vp=run.vp + 1), seconds=0.8 * (first.seconds or 0.0))
    close = replace(faster, seconds=0.99 * (first.seconds or 0.0))
    later = replace(faster, row={**first.row, "where": "tables; NeMo 99.1"})
    found = [fitting.sweeps([first, other], lambda runs: np.ones(len(runs))) for other in (faster, close, later)]
    assert [len(one) for one in found] == [1, 0, 0]


def test_every_doubtful_row_exists_and_is_fitted_or_held_back(evaluation: Evaluation) -> None:
    doubtful = [one for one in (*evaluation.known, *evaluation.held_back) if table.is_doubtful(one)]
    assert len(doubtful) == len(table.DOUBTFUL) + 1  # MPT-30B was measured on two GPUs
    assert not any(map(table.is_doubtful, without_doubtful(doubtful)))


def test_the_tables_of_the_page_are_those_of_the_command(evaluation: Evaluation) -> None:
    page = "\n".join(one.read_text(encoding="utf-8") for one in PAGES)
    percentage = re.compile(r"[-+]?\d+\.\d %")
    for one in evaluation.tables():
        computed = one.markdown()
        start = page.find(computed.partition("\n")[0])
        assert start >= 0, one.columns
        stated = page[start:].partition("\n\n")[0]
        assert percentage.sub("x", stated) == percentage.sub("x", computed)
        # Percentages may differ in the last digit between versions of the linear algebra library.
        numbers = [[float(found.rstrip(" %")) for found in percentage.findall(text)] for text in (stated, computed)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_the_command_prints_both_forms_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = Table(("rows", "median"), (("all", "1.0%"),))
    assert found.markdown() == "| rows | median |\n| --- | ---: |\n| all | 1.0% |"
    assert found.text() == "rows  median\nall     1.0%"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--markdown" in capsys.readouterr().out


def test_state_between_two_steps_is_what_other_software_holds() -> None:
    (run,) = [run for run in RUNS if run.between_steps_gib is not None]
    assert run.simulate().steady.total / GIB == pytest.approx(run.between_steps_gib, rel=0.01)


@pytest.mark.slow(reason="simulates four runs")
def test_the_page_has_the_published_peaks() -> None:
    page = "\n".join(one.read_text(encoding="utf-8") for one in PAGES)
    assert "\n".join(lines()) in page


@pytest.mark.alone
@pytest.mark.slow(reason="compares times, which needs two quiet cores for minutes")
def test_ten_layouts_take_as_long_as_predicted(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/benchmark_planner_cpu.py", "--json", str(figures)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    print(done.stdout)
    assert len(found["rows"]) == 10
    assert found["median_error"] <= 0.10
    assert found["pairs_in_order"] >= 0.9 * found["pairs_apart"]
