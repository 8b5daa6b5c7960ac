"""Every writer tells the same story, survives a crash, and cannot end the run."""

import io
import json
import math
import sys
import threading
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.config.operation import LoggingConfig
from megatron.errors import ConfigError
from megatron.metrics import tensorboard
from megatron.metrics.console import (
    CompactConsoleWriter,
    ConsoleWriter,
    ProgressBar,
    format_compact_line,
    format_console_line,
    format_evaluation_lines,
)
from megatron.metrics.jsonl import JsonlWriter
from megatron.metrics.tensorboard import WINDOW, TensorBoardWriter, rewind_events, start_of_search
from megatron.metrics.writer import MetricsWriter, build_writers, print_above_bar
from tests.metrics.reported_run import Terminal, evaluation_record, iteration_record, reported_run

NOW = datetime(2026, 11, 20, 5, 0, 0, 1234)


# Console


def test_the_console_line_is_megatrons_and_our_fields_follow_it() -> None:
    assert format_console_line(iteration_record(), NOW) == (
        " [2026-11-20 05:00:00.001234] iteration        5/     100 | consumed samples:           80 |"
        " elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 0.12 |"
        " learning rate: 1.000000E-04 | global batch size:    16 |"
        " lm loss: 6.912345E+00 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s per GPU: 512.0 | MFU: 41.23% |"
    )


@pytest.mark.parametrize(
    ("tflops", "text"),
    [(412.26, "412.3"), (1.04, "1.0"), (0.96, "1.0"), (0.149, "0.15"), (0.00047, "0.00047"), (0.0, "0.0")],
)
def test_throughput_of_a_cpu_is_not_rounded_to_nothing(tflops: float, text: str) -> None:
    assert f"(TFLOP/s/GPU): {text} |" in format_console_line(iteration_record(tflops_per_gpu=tflops), NOW)


def test_optional_fields_stand_at_megatrons_places() -> None:
    record = iteration_record(skipped_samples=4, params_norm=99.5, num_zeros=12, mfu=None)
    names = [field.split(":")[0].strip() for field in format_console_line(record, NOW).split("|")[1:-1]]
    assert ", ".join(names) == (
        "consumed samples, skipped samples, elapsed time per iteration (ms), throughput per GPU (TFLOP/s/GPU), "
        "learning rate, global batch size, lm loss, loss scale, grad norm, num zeros, params norm, "
        "number of skipped iterations, number of nan iterations, tokens/s per GPU"
    )


def test_balance_of_experts_stands_where_megatron_has_it_without_single_layers() -> None:
    balance: dict[str, Any] = {"load_balancing_loss": 1.25, "z_loss": 4.5, "moe/z_loss_layer_3": 4.25}
    line = format_console_line(iteration_record(**balance, expert_load_max=1.75), NOW)
    assert " lm loss: 6.912345E+00 | load_balancing_loss: 1.250000E+00 | z_loss: 4.500000E+00 | loss scale: " in line
    assert " | grad norm: 1.234 | number of skipped" in line
    assert line.endswith(" MFU: 41.23% | expert load max: 1.750 |")
    assert "layer" not in line


def test_a_skipped_iteration_has_no_loss_and_no_norm() -> None:
    line = format_console_line(iteration_record(lm_loss=None, grad_norm=None, skipped=1, nan_iterations=1), NOW, False)
    assert not any(name in line for name in ("lm loss", "grad norm", "throughput"))
    assert line.endswith("number of skipped iterations:   1 | number of nan iterations:   1 |")


def test_the_evaluation_stands_between_dashes_as_long_as_megatrons() -> None:
    above, line, below = format_evaluation_lines(evaluation_record(100)).split("\n")
    assert line == " validation loss at iteration 100 | lm loss value: 4.512345E+00 | lm loss PPL: 9.113528E+01 | "
    assert above == below == "-" * (len(line) + 1)


def test_the_set_is_named_after_the_last_iteration_as_in_megatron() -> None:
    """Its parsers look for ``iteration N |`` during training, for ``iteration N on validation set |`` at the end."""
    places = {
        (True, False): [" | "],
        (False, True): [" on validation set | "],
        (True, True): [" | ", " on validation set | "],
    }
    for (is_periodic, is_final), wanted in places.items():
        record = evaluation_record(7, is_periodic=is_periodic, is_final=is_final)
        lines = [line for line in format_evaluation_lines(record).split("\n") if not line.startswith("---")]
        found = [line.removeprefix(" validation loss at iteration 7").partition("lm loss")[0] for line in lines]
        assert found == wanted
    test = format_evaluation_lines(evaluation_record(7, split="test", is_periodic=False, is_final=True))
    assert test.count("validation loss at iteration 7 on test set | lm loss value") == 1


def test_a_terminal_gets_one_short_line_for_each_record_and_files_get_megatrons() -> None:
    for stream, flag, is_compact in (
        (Terminal(), None, True),
        (io.StringIO(), None, False),
        (io.StringIO(), "compact", True),
        (Terminal(), "megatron", False),
    ):
        config = LoggingConfig(progress_bar=False, log_format=flag)  # type: ignore[arg-type]
        (console,) = _build(config, stream=stream)
        console.write_iteration(iteration_record())
        console.write_evaluation(evaluation_record(5))
        lines = stream.getvalue().splitlines()
        assert lines[0].startswith(" [") is not is_compact
        assert len(lines) == (2 if is_compact else 4)


def test_the_short_line_fits_a_terminal_and_says_what_is_left() -> None:
    stream = Terminal()
    writer = CompactConsoleWriter(stream, log_throughput=True, train_iters=480_000)
    facts: dict[str, Any] = {"train_iters": 480_000, "tokens_per_s_per_gpu": 12345.6, "iteration_time_ms": 2000.0}
    writer.write_iteration(iteration_record(1000, elapsed_s=2000.0, **facts))
    # With evaluations and saves: 4 s for each of 100 iterations since the first record.
    writer.write_iteration(iteration_record(1100, elapsed_s=2400.0, **facts))
    writer.write_iteration(iteration_record(480_000, elapsed_s=2500.0, **facts))
    first, second, last = stream.getvalue().splitlines()
    assert second == ("  1100/480000  loss 6.9123  lr 1.00e-04  grad 1.234  12,346 tokens/s/GPU  MFU 41.2%  22 d left")
    assert first.endswith("MFU 41.2%  11 d left") and "left" not in last
    assert max(map(len, (first, second, last))) <= 100


def test_the_short_line_shows_what_is_unusual() -> None:
    record = iteration_record(lm_loss=None, grad_norm=None, skipped=2, nan_iterations=1, spike=7.25)
    line = format_compact_line(record, None)
    assert "loss  none   lr" in line and "grad  none" in line
    assert line.endswith("  skipped 2  not finite 1  spike 7.2")
    assert "tokens/s" not in format_compact_line(record, None, log_throughput=False)
    assert "skipped" not in format_compact_line(iteration_record(), None)


def test_timers_follow_the_line() -> None:
    stream = io.StringIO()
    report = "max time across ranks (ms):\n    forward: 1.00"
    ConsoleWriter(stream, log_throughput=True).write_iteration(iteration_record(timer_report=report))
    line, *timers = stream.getvalue().splitlines()
    assert "nan iterations:   0 |" in line and "\n".join(timers) == report


def test_the_bar_draws_nothing_before_the_first_record_and_lines_print_above_it() -> None:
    stream = Terminal()
    bar = ProgressBar(stream, train_iters=10, resume_iteration=4)
    assert stream.getvalue() == ""
    bar.write_iteration(iteration_record(5))
    stream.truncate(0)
    stream.seek(0)
    print_above_bar(stream, "a line of its own")
    before, after = stream.getvalue().split("a line of its own\n")
    bar.close()
    assert before.endswith("\r")  # the bar was wiped first
    assert "5/10" in after  # and drawn again below


@pytest.mark.parametrize(
    ("stream", "flag", "bar"),
    [(io.StringIO(), None, False), (Terminal(), None, True), (Terminal(), False, False), (io.StringIO(), True, True)],
)
def test_a_bar_only_where_a_person_watches(stream: io.StringIO, flag: bool | None, bar: bool) -> None:
    writers = _build(LoggingConfig(progress_bar=flag), stream=stream)
    assert any(isinstance(writer, ProgressBar) for writer in writers) == bar
    for writer in writers:
        writer.close()


# JSONL


def _build(config: LoggingConfig, **changes: Any) -> list[MetricsWriter]:
    return build_writers(config, reported_run(**changes))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_metrics_file_holds_the_agreed_keys_at_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "metrics.jsonl"
    loss = 6.123456789012345
    writer = JsonlWriter(path, resume_iteration=0)
    writer.write_iteration(iteration_record(lm_loss=loss))
    writer.write_evaluation(evaluation_record(5, loss=loss))
    writer.write_evaluation(evaluation_record(6, loss=loss, split="test"))
    iteration, *evaluations = _lines(path)  # before close: each line is flushed as it is written
    writer.close()
    agreed = (
        "iteration consumed_samples lm_loss grad_norm learning_rate loss_scale global_batch_size "
        "iteration_time_ms tokens_per_s_per_gpu tflops_per_gpu mfu skipped time elapsed_s"
    )
    assert list(iteration) == agreed.split()
    values = [iteration[name] for name in ("lm_loss", "mfu", "time", "elapsed_s")]
    assert values == [loss, 0.41234, 1_800_000_000.5, 60.25]
    clock = {"time": 1_800_000_001.5, "elapsed_s": 61.25}
    assert evaluations == [
        {"iteration": 5, "validation_loss": loss} | clock,
        {"iteration": 6, "test_loss": loss} | clock,
    ]


def test_the_first_record_of_a_process_describes_the_run_and_what_json_cannot_hold_is_null(tmp_path: Path) -> None:
    flags = {"parallel": {"tensor_model_parallel_size": 2}, "data": {"path": tmp_path, "limit": math.inf}}
    writer = JsonlWriter(tmp_path / "metrics.jsonl", 0, flags)
    writer.write_evaluation(evaluation_record(0))
    for iteration in (1, 2):
        writer.write_iteration(iteration_record(iteration, lm_loss=math.nan, mfu=None))
    writer.close()
    evaluation, first, second = _lines(tmp_path / "metrics.jsonl")
    stated = {"parallel": {"tensor_model_parallel_size": 2}, "data": {"path": str(tmp_path), "limit": None}}
    assert first["run"] == {"world_size": iteration_record(1).world_size, "flags": stated}
    assert "run" not in evaluation and "run" not in second
    assert second["lm_loss"] is None and second["mfu"] is None


def test_a_resumed_run_continues_the_history_of_its_checkpoint(tmp_path: Path) -> None:
    """Checkpoint at 3, crash while writing 6: after the resume, 4 and 5 were never there."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resume_iteration=0)
    for iteration in range(1, 6):
        writer.write_iteration(iteration_record(iteration))
        if iteration in (3, 4):
            writer.write_evaluation(evaluation_record(iteration))
    writer.close()
    with path.open("a") as file:
        file.write('{"iteration": 6, "consumed_sam')

    resumed = JsonlWriter(path, resume_iteration=3)
    resumed.write_iteration(iteration_record(4, lm_loss=1.0))
    resumed.close()
    found = [(line["iteration"], line.get("lm_loss")) for line in _lines(path)]
    assert found == [(1, 6.912345), (2, 6.912345), (3, 6.912345), (3, None), (4, 1.0)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "tail", ['{"iteration": 2, "lm', '{"iteration": 2, "lm_loss": 1.0}', "\0" * 50, "2", "[" * 100_000]
)
def test_any_torn_last_line_leaves_whole_records(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 2.0}\n' + tail)
    writer = JsonlWriter(path, resume_iteration=2)
    writer.write_iteration(iteration_record(3))
    writer.close()
    iterations = [line["iteration"] for line in _lines(path)]
    assert iterations in ([1, 3], [1, 2, 3])


@pytest.mark.parametrize("resume", [1, 1990, 2000, 2500])
def test_a_resume_does_not_read_what_it_keeps(tmp_path: Path, resume: int) -> None:
    """A run of a million iterations is resumed in milliseconds: before its last records there is a hole of 4 GiB."""
    path, hole = tmp_path / "metrics.jsonl", 1 << 32
    with path.open("wb") as file:
        file.seek(hole)
        file.write(b"\n" + b"".join(b'{"iteration": %d, "lm_loss": 2.0}\n' % number for number in range(1, 2001)))
    JsonlWriter(path, resume).close()
    with path.open("rb") as file:
        file.seek(hole + 1)
        assert [json.loads(line)["iteration"] for line in file] == list(range(1, min(resume, 2000) + 1))


def test_a_resume_before_the_first_record_leaves_an_empty_file_and_a_start_sets_the_old_one_aside(
    tmp_path: Path,
) -> None:
    path, old = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.previous"
    for resume, kept in ((3, 0), (0, 1)):
        path.write_text('{"iteration": 5, "lm_loss": 2.0}\n')
        JsonlWriter(path, resume_iteration=resume).close()
        assert path.read_text() == "" and len(_lines(old) if old.exists() else []) == kept


def test_a_disk_that_fails_during_the_run_costs_one_warning_and_no_training() -> None:
    stream = io.StringIO()
    console, jsonl = _build(LoggingConfig(metrics_jsonl="/dev/full"), stream=stream)
    for iteration in (1, 2):
        jsonl.write_iteration(iteration_record(iteration))
    jsonl.close()
    assert stream.getvalue().count("WARNING: --metrics-jsonl is disabled") == 1
    console.close()


# TensorBoard


def _points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def _tensorboard_run(directory: Path, resume: int, iterations: range, loss: float, interval: int = 1) -> None:
    if directory.exists() and any(directory.iterdir()):
        # TensorBoard reads files in the order of their names, which begin with the second; after it, 10 is before 9.
        time.sleep(1 - time.time() % 1)
    writer = TensorBoardWriter(directory, interval, resume)
    for iteration in iterations:
        writer.write_iteration(iteration_record(iteration, lm_loss=loss))
    writer.write_evaluation(evaluation_record(iterations[-1], loss=loss))
    writer.close()


def test_tensorboard_shows_metrics_over_iterations_and_over_samples(tmp_path: Path) -> None:
    _tensorboard_run(tmp_path, 0, range(1, 5), loss=6.0, interval=2)
    points = _points(tmp_path)
    over_samples = points["lm loss vs samples"], points["lm loss validation vs samples"]
    assert points["lm loss"] == [(2, 6.0), (4, 6.0)] and over_samples == ([(32, 6.0), (64, 6.0)], [(64, 6.0)])
    assert points["grad-norm"][0][1] == pytest.approx(1.2341)
    shown = {"learning-rate", "batch-size", "loss-scale", "world-size", "iteration-time", "throughput"}
    assert shown <= set(points)
    assert "iteration-time vs samples" not in points


def test_tensorboard_forgets_what_lies_beyond_the_checkpoint_in_both_axes(tmp_path: Path) -> None:
    """Two crashes: at 4 with a checkpoint at 3, then at 6 with a rollback to 2 — and a torn last record."""
    _tensorboard_run(tmp_path, 0, range(1, 5), loss=6.0)
    _tensorboard_run(tmp_path, 3, range(4, 7), loss=5.0)
    with sorted(tmp_path.iterdir())[-1].open("ab") as file:
        file.write(b"\x18\0\0\0\0\0\0\0torn")
    _tensorboard_run(tmp_path, 2, range(3, 4), loss=4.0)
    points = _points(tmp_path)
    assert points["lm loss"] == [(1, 6.0), (2, 6.0), (3, 4.0)]
    assert points["lm loss vs samples"] == [(16, 6.0), (32, 6.0), (48, 4.0)]
    assert points["lm loss validation"] == [(3, 4.0)]


@pytest.mark.parametrize("torn", [b"", b"\x18\0\0\0\0\0\0\0torn", bytes(300_000)])
def test_a_resume_finds_the_first_stale_point_without_reading_all(tmp_path: Path, torn: bytes) -> None:
    """Bisection cuts where reading from the start cuts, of some 14,000 points."""
    _tensorboard_run(tmp_path / "run", 0, range(1, 801), loss=6.0)
    (path,) = (tmp_path / "run").iterdir()
    content = path.read_bytes() + torn
    for resume in (1, 2, 333, 400, 799, 800, 900):
        path.write_bytes(content)
        with mock.patch.object(tensorboard, "start_of_search", return_value=0):
            rewind_events(path, resume)
        expected = path.read_bytes()
        path.write_bytes(content)
        with path.open("rb") as file:
            assert len(expected) - start_of_search(file, resume) <= 2 * WINDOW < len(content)
        rewind_events(path, resume)
        assert path.read_bytes() == expected and len(expected) <= len(content) - len(torn)
    path.write_bytes(bytes(12) + content[12:])  # a reading from the start would end here
    rewind_events(path, 900)
    assert path.stat().st_size == len(content) - len(torn)


def test_a_run_from_the_start_hides_the_points_of_the_one_before(tmp_path: Path) -> None:
    _tensorboard_run(tmp_path, 0, range(1, 5), loss=6.0)
    _tensorboard_run(tmp_path, 0, range(1, 3), loss=5.0)
    assert _points(tmp_path)["lm loss"] == [(1, 5.0), (2, 5.0)]


# wandb

WANDB = LoggingConfig(wandb_project="tests", wandb_exp_name="a run")


@pytest.mark.parametrize(
    ("environment", "is_allowed"),
    [
        *(({}, False), ({"WANDB_MODE": "online"}, False), ({"WANDB_API_KEY": ""}, False)),
        *(({"WANDB_API_KEY": "k"}, True), ({"WANDB_MODE": "offline"}, True)),
    ],
)
def test_wandb_without_a_key_is_refused_instead_of_asking_for_one(
    environment: dict[str, str], is_allowed: bool
) -> None:
    with nullcontext() if is_allowed else pytest.raises(ConfigError, match=r"set WANDB_API_KEY .* or WANDB_MODE=off"):
        WANDB.check_environment(environment)


class _FakeWandb:
    """Stands in for the wandb module and its run, and fails at a step, or at the start (0)."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.logged: list[tuple[int, float]] = []
        self.arguments: dict[str, Any] = {}
        self.finished = False

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> "_FakeWandb":
        self.arguments = arguments
        if self.fails_at == 0:
            raise RuntimeError("service is down")
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route")
        self.logged.append((step, scalars["learning-rate"]))

    def finish(self) -> None:
        self.finished = True


def _fake_run(
    monkeypatch: pytest.MonkeyPatch, wandb: Any, directory: Path, first: int = 1, iterations: int = 3
) -> tuple[str, str]:
    """Iterations against ``wandb``; returns the console and the id of the run."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    facts: dict[str, Any] = {"save_directory": str(directory), "resume_iteration": first - 1}
    stream = io.StringIO()
    (_, writer) = _build(WANDB, stream=stream, environment={"WANDB_API_KEY": "secret"}, **facts)
    for iteration in range(first, first + iterations):
        writer.write_iteration(iteration_record(iteration))
    writer.close()
    return stream.getvalue(), (directory / "wandb_run_id.txt").read_text().strip()


def test_the_step_of_wandb_is_the_iteration_and_the_key_stays_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that resumes has the id of the run before, and one from the start has another."""
    wandb, resumed, other = _FakeWandb(), _FakeWandb(), _FakeWandb()
    console, run_id = _fake_run(monkeypatch, wandb, tmp_path)
    assert wandb.logged == [(1, 1e-4), (2, 1e-4), (3, 1e-4)] and wandb.finished
    assert (wandb.arguments["resume"], wandb.arguments["id"]) == ("allow", run_id)
    assert "secret" not in console + str(wandb.arguments)
    assert _fake_run(monkeypatch, resumed, tmp_path, first=3)[1] == resumed.arguments["id"] == run_id
    assert _fake_run(monkeypatch, other, tmp_path)[1] == other.arguments["id"] != run_id


@pytest.mark.parametrize(("fails_at", "reason"), [(0, "service is down"), (2, "no route")])
def test_a_failing_wandb_costs_one_warning_and_no_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails_at: int, reason: str
) -> None:
    console, _ = _fake_run(monkeypatch, _FakeWandb(fails_at), tmp_path)
    assert console.count("WARNING: wandb is disabled") == 1 and reason in console


def test_a_wandb_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    released = threading.Event()

    class Hanging(_FakeWandb):
        def init(self, **arguments: Any) -> _FakeWandb:
            released.wait()
            return self

    console, _ = _fake_run(monkeypatch, Hanging(), tmp_path, iterations=1100)  # more than the queue holds
    released.set()
    assert console.count("WARNING: wandb is disabled") == 1
