"""A metrics writer and a metric value that are defined in this file alone reach the run, its console and its files."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron.config import command_line
from megatron.config.operation import LoggingConfig
from megatron.config.run import RunConfig
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.optimizer import Optimizer, StepResult
from megatron.errors import ConfigError
from megatron.metrics.writer import EvaluationRecord, IterationRecord, MetricsWriter, ReportedRun, WriterFlags
from megatron.training.build import run
from tests.end_to_end.run_process import TINY_RUN, call_training, words_of


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
    monkeypatch.setattr(command_line, "RunConfig", RunWithCsv)
    monkeypatch.setattr(run, "Optimizer", DoublingOptimizer)
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
