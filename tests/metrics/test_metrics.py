"""A record has the same values for every writer; timers measure what is on, cost nothing when off, and are combined
over ranks as asked; a writer and a value that are defined here alone reach the run, its console and its files."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config import command_line
from megatron.config.operation import LoggingConfig
from megatron.config.run import RunConfig
from megatron.config.run_parser import RunParser
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.optimizer import Optimizer, StepResult
from megatron.errors import ConfigError
from megatron.metrics.timers import Timers, combine, format_timer_report
from megatron.metrics.writer import (
    EvaluationRecord,
    IntervalGate,
    IterationRecord,
    MetricsWriter,
    ReportedRun,
    WriterFlags,
    evaluation_scalars,
    has_sample_axis,
    iteration_scalars,
)
from megatron.training import context
from tests.end_to_end.run_process import TINY_RUN, call_training, words_of
from tests.metrics.reported_run import evaluation_record, iteration_record


def test_plots_carry_megatrons_keys_and_units() -> None:
    scalars = iteration_scalars(
        iteration_record(
            lm_loss=6.5,
            grad_norm=1.25,
            iteration_time_ms=250.0,
            tflops_per_gpu=0.5,
            num_zeros=3,
            params_norm=7.0,
            timers={"optimizer": (1.0, 4.0)},
        )
    )
    expected = {
        "learning-rate": 1e-4,
        "batch-size": 16,
        "lm loss": 6.5,
        "loss-scale": 1.0,
        "grad-norm": 1.25,
        "num-zeros": 3,
        "params-norm": 7.0,
        "world-size": 2,
        "iteration-time": 0.25,  # seconds
        "throughput": 0.5,
        "optimizer-time": 0.004,  # seconds of the slowest rank
    }
    assert {key: scalars[key] for key in expected} == expected


def test_plots_of_the_balance_of_experts_carry_megatrons_keys_and_what_was_not_measured_is_left_out() -> None:
    balance: dict[str, Any] = {"load_balancing_loss": 1.25, "z_loss": 4.5, "moe/z_loss_layer_3": 4.25}
    nothing: dict[str, Any] = {"lm_loss": None, "grad_norm": None, "mfu": None, "num_zeros": None}
    scalars = iteration_scalars(iteration_record(**balance, expert_load_max=1.75, **nothing))
    assert {key: scalars[key] for key in balance} == balance
    assert scalars["expert-load-max"] == 1.75
    assert not {"lm loss", "grad-norm", "mfu", "num-zeros", "params-norm"} & set(scalars)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_split_has_its_own_curves_over_iterations_and_samples(split: Any) -> None:
    scalars = evaluation_scalars(evaluation_record(1, 2.0, split=split))
    assert scalars == {f"lm loss {split}": 2.0, f"lm loss {split} ppl": math.exp(2.0)}
    assert all(map(has_sample_axis, scalars))
    assert evaluation_record(1, 1e6, split=split).perplexity == math.exp(20), "no overflow"


@pytest.mark.parametrize(
    ("interval", "resumed_at", "offered", "passed"),
    [
        (1, 0, [1, 2, 3], [1, 2, 3]),
        (10, 0, [5, 10, 15, 20], [10, 20]),
        (7, 0, [100, 200], [100, 200]),  # coarser records than the interval all pass
        (10, 12, [15, 20], [20]),
        (10, 20, [20, 25, 30], [30]),
    ],
)
def test_an_interval_thins_out(interval: int, resumed_at: int, offered: list[int], passed: list[int]) -> None:
    gate = IntervalGate(interval, resumed_at)
    assert [iteration for iteration in offered if gate.passes(iteration)] == passed


def test_a_point_has_the_latest_value_of_each_key_since_the_last_one() -> None:
    gate = IntervalGate(10, resume_iteration=0)
    given = [({"seen": 1.0, "kept": 2.0}, 4), ({"seen": 3.0}, 8), ({}, 12), ({"seen": 4.0}, 20)]
    points = [gate.scalars(iteration_record(iteration, **values)) for values, iteration in given]
    found = [{key: point[key] for key in ("seen", "kept") if key in point} for point in points]
    assert found == [{}, {}, {"seen": 3.0, "kept": 2.0}, {"seen": 4.0}]
    assert "kept" not in points[3] and points[2]["consumed-samples"] > 0


# --- timers ---------------------------------------------------------------------------------------------------


def test_spans_are_measured_in_milliseconds_and_add_up_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 7.0
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    timers = Timers(level=1)
    for _ in range(2):
        with timers("forward-backward"):
            seconds += 0.02
    assert timers.elapsed(iterations=2) == {"forward-backward": pytest.approx(20)}
    assert timers.elapsed() == {}
    with timers("interval"):
        seconds += 0.01
        assert timers.elapsed() == {}, "a span counts when it ends"
    assert timers.elapsed() == {"interval": pytest.approx(10)}


@pytest.mark.parametrize(("level", "measured"), [(0, set()), (1, {"outer"}), (2, {"outer", "inner"})])
def test_the_level_decides_what_is_measured(level: int, measured: set[str]) -> None:
    timers = Timers(level)
    with timers("outer", level=1), timers("inner", level=2):
        pass
    assert set(timers.elapsed()) == measured


def test_the_accelerator_is_waited_for_at_both_ends_and_never_by_a_timer_that_is_off() -> None:
    waits: list[None] = []
    with Timers(level=1, synchronize=lambda: waits.append(None))("step"):
        assert len(waits) == 1
    assert len(waits) == 2
    timers = Timers(level=0, synchronize=lambda: waits.append(None))
    start = time.process_time()
    for _ in range(10_000):
        with timers("step", level=2):
            pass
    assert len(waits) == 2
    assert (time.process_time() - start) / 10_000 < 20e-6


def test_an_error_inside_a_span_passes_and_leaves_the_timer_usable() -> None:
    timers = Timers(level=1)
    with pytest.raises(ValueError, match="boom"), timers("step"):
        raise ValueError("boom")
    with pytest.raises(RuntimeError, match="'step' is already running"), timers("step"), timers("step"):
        pass
    assert timers.elapsed() == {}
    with timers("step"):
        pass
    assert set(timers.elapsed()) == {"step"}


RANKS = [{"forward": 10.0, "embedding": 1.0}, {"forward": 30.0}, {"forward": 20.0}]


@pytest.mark.parametrize(
    ("option", "forward"), [("max", (30.0, 30.0)), ("minmax", (10.0, 30.0)), ("all", (10.0, 30.0))]
)
def test_ranks_are_combined_over_those_that_ran_the_phase(option: str, forward: tuple[float, float]) -> None:
    assert combine(RANKS, option) == {"forward": forward, "embedding": (1.0, 1.0)}  # type: ignore[arg-type]


def test_reports_read_as_megatrons() -> None:
    dots = "." * 40
    assert format_timer_report(RANKS, "max").splitlines() == [
        "max time across ranks (ms):",
        f"    forward {dots}: 30.00",
        f"    embedding {dots[2:]}: 1.00",
    ]
    assert f"    forward {dots}: (10.00, 30.00)" in format_timer_report(RANKS, "minmax")
    assert format_timer_report(RANKS, "all").splitlines() == [
        "times across ranks (ms):",
        "  forward:",
        "     rank  0: 10.00",
        "     rank  1: 30.00",
        "     rank  2: 20.00",
        "  embedding:",
        "     rank  0: 1.00",
    ]
    assert format_timer_report([{}, {}], "minmax") == ""


# --- an added writer -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFlags(WriterFlags):
    """A writer with one flag of its own."""

    metrics_csv: str | None = None
    """File that receives iteration and doubled gradient norm."""

    def check(self) -> None:
        if self.metrics_csv == "":
            raise ConfigError("--metrics-csv is empty: name a file, or remove it.")

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        return None if self.metrics_csv is None else CsvWriter(Path(self.metrics_csv))


class CsvWriter:
    """Writes a line per iteration."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write_iteration(self, record: IterationRecord) -> None:
        """Iteration and value."""
        print(record.iteration, record.metrics["doubled_grad_norm"], sep=",", file=self._file)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """No line."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class LoggingWithCsv(CsvFlags, LoggingConfig):
    """The writers of a run, and this one: its row."""


@dataclass(frozen=True)
class RunWithCsv(RunConfig):
    """The flags of a run, and this writer's."""

    logging: LoggingWithCsv = field(default_factory=LoggingWithCsv)
    """Metrics and their writers."""


class DoublingOptimizer(Optimizer):
    """Produces a value that nothing else knows."""

    def step(
        self,
        hyperparameters: Hyperparameters,
        gradient_factor: float,
        accepts: Callable[[float], bool] = lambda grad_norm: True,
    ) -> StepResult:
        """Step, and add the value."""
        result = super().step(hyperparameters, gradient_factor, accepts)
        return replace(result, metrics={**result.metrics, "doubled_grad_norm": 2 * result.grad_norm})


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(command_line, "RUN_PARSER", RunParser(RunWithCsv, "pretrain_llama.py"))
    monkeypatch.setattr(context, "Optimizer", DoublingOptimizer)
    data = {"mock_data": True, "vocab_size": 64, "split": None, "train_iters": 3}
    return {**TINY_RUN, **data, "metrics_jsonl": tmp_path / "metrics.jsonl"}


def test_an_added_writer_and_an_added_value_meet(flags: dict[str, object], tmp_path: Path) -> None:
    outcome = call_training(words_of({**flags, "metrics_csv": tmp_path / "metrics.csv"})).succeeded()  # type: ignore[dict-item]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in outcome.stdout.splitlines() if "lm loss:" in line]
    assert len(records) == len(lines) == 3
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        f"{number},{2 * record['grad_norm']}" for number, record in enumerate(records, 1)
    ]
    for record, line in zip(records, lines, strict=True):
        assert record["doubled_grad_norm"] == 2 * record["grad_norm"]
        record.pop("run", None)
        assert list(record)[-4:] == ["skipped", "doubled_grad_norm", "time", "elapsed_s"]
        assert line.rstrip().endswith(f"| doubled grad norm: {record['doubled_grad_norm']:.6E} |")


def test_the_check_of_an_added_writer_is_made(flags: dict[str, object]) -> None:
    outcome = call_training(words_of({**flags, "metrics_csv": ""}))  # type: ignore[dict-item]
    assert outcome.exit_code != 0
    assert "--metrics-csv is empty" in outcome.errors[0]
