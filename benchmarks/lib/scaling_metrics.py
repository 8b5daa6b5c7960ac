"""How the metrics of a run grow with its iterations: an iteration, a resume, and a report.

An iteration writes its record to all writers, as rank 0 of a run does. A resume cuts what the last processes wrote
back to a checkpoint 1,000 iterations before the end. Curves of benchmarks/scaling.py.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from benchmarks.lib.scaling_curve import Curve, Point, in_fresh_process, memory, reset_peak
from megatron.config.operation import LoggingConfig
from megatron.metrics.jsonl import JsonlWriter, ValidationHistory, read_history
from megatron.metrics.tensorboard import TensorBoardWriter
from megatron.metrics.timers import Timers, combine, format_timer_report
from megatron.metrics.writer import EvaluationRecord, IterationRecord, ReportedRun, build_writers

_FLAT = 0.3  # order of growth of what does not grow, on a busy machine
_TIMED = 1000  # iterations, of which the mean counts
_LOST = 1000  # iterations between the checkpoint and the end
_EVAL_INTERVAL = 1000
_LINES_AT_ONCE = 10_000  # of a metrics file that is made


def curves(largest: bool) -> list[Curve]:
    """All curves; without ``largest`` in seconds."""
    # From two times _LOST on a resume always discards _LOST iterations, so that its cost can be flat.
    iterations = (2000, 10_000, 100_000, 1_000_000) if largest else (2000, 4000, 8000)
    events = (1000, 10_000, 100_000) if largest else (100, 300, 900)
    return [
        Curve("iteration with metrics", "iterations", tuple(iteration_points(iterations)), "flat", order=_FLAT),
        Curve("iteration with TensorBoard", "iterations", tuple(tensorboard_points(events)), "flat", order=_FLAT),
        Curve("resume of the metrics file", "iterations", tuple(map(resume_point, iterations)), "flat", order=_FLAT),
        Curve("resume of TensorBoard", "iterations", tuple(map(tensorboard_resume_point, events)), "flat", order=_FLAT),
        Curve("report of the metrics file", "iterations", tuple(map(report_point, iterations)), "linear"),
    ]


# --- iterations ----------------------------------------------------------------------------------------------


def iteration_points(sizes: Sequence[int]) -> list[Point]:
    """Mean seconds of the last iterations before each size, and the memory that the run has gained since its start."""
    return in_fresh_process(_run, tuple(sizes), False)


def tensorboard_points(sizes: Sequence[int]) -> list[Point]:
    """Points of a run with TensorBoard, whose 24 points an iteration take most of the time."""
    return in_fresh_process(_run, tuple(sizes), True)


def _run(sizes: Sequence[int], tensorboard: bool) -> list[Point]:
    points = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        metrics, plots = f"{directory}/metrics.jsonl", f"{directory}/plots"
        flags = LoggingConfig(
            metrics_jsonl=metrics,
            tensorboard_dir=plots if tensorboard else None,
            progress_bar=True,
            log_format="megatron",
        )
        console = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        writers = [*build_writers(flags, _reported_run(console, sizes[-1])), ValidationHistory(metrics)]
        for writer in writers:
            stack.callback(writer.close)
        timers, seconds, before = Timers(level=1), 0.0, 0
        for iteration in range(1, sizes[-1] + 1):
            started = time.perf_counter()
            with timers("forward-backward"), timers("optimizer", level=2):
                pass
            elapsed = [timers.elapsed()]
            record = _record(iteration, sizes[-1], elapsed)
            for writer in writers:
                writer.write_iteration(record)
                if iteration % _EVAL_INTERVAL == 0:
                    writer.write_evaluation(_evaluation(iteration))
            following = next(size for size in sizes if size >= iteration)
            timed = min(_TIMED, following // 2)
            seconds = seconds + time.perf_counter() - started if iteration > following - timed else 0.0
            if iteration == sizes[0] // 2:
                before = memory().private
            if iteration == following:
                points.append(Point(iteration, seconds / timed, max(memory().private - before, 0)))
    return points


def _reported_run(console: TextIO, train_iters: int) -> ReportedRun:
    return ReportedRun(
        stream=console,
        train_iters=train_iters,
        resume_iteration=0,
        plot_interval=1,
        save_directory=None,
        flags={"data": {"seq_length": 8192}},
        environment={},
    )


def _record(iteration: int, train_iters: int, elapsed: list[dict[str, float]]) -> IterationRecord:
    """A record with the metrics of a dense model."""
    noise = iteration % 1009 / 1009
    return IterationRecord(
        iteration=iteration,
        consumed_samples=1024 * iteration,
        metrics={
            "lm_loss": 2.0 + noise,
            "grad_norm": 0.5 + noise,
            "learning_rate": 3e-4 * (1 - iteration / (train_iters + 1)),
            "loss_scale": 1.0,
            "global_batch_size": 1024,
            "iteration_time_ms": 5000.0 + noise,
            "tokens_per_s_per_gpu": 10_000.0 + noise,
            "tflops_per_gpu": 400.0 + noise,
            "mfu": 0.4 + noise / 100,
            "skipped": 0,
            "effective_time": 0.97 + noise / 100,
            "peak_memory_gib": 61.25,
        },
        train_iters=train_iters,
        time=1.8e9 + 5.0 * iteration,
        elapsed_s=5.0 * iteration,
        world_size=1024,
        timers=combine(elapsed, "minmax"),
        timer_report=format_timer_report(elapsed, "minmax"),
    )


def _evaluation(iteration: int) -> EvaluationRecord:
    return EvaluationRecord(
        iteration=iteration,
        consumed_samples=1024 * iteration,
        split="validation",
        loss=2.0 + iteration % 1009 / 1009,
        time=1.8e9 + 5.0 * iteration,
        elapsed_s=5.0 * iteration,
    )


# --- resume and report ---------------------------------------------------------------------------------------


def resume_point(iterations: int) -> Point:
    """Seconds and memory of opening a metrics file with ``iterations`` records."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        write_metrics(path, iterations)
        return in_fresh_process(_resume, path, iterations)


def _resume(path: Path, iterations: int) -> Point:
    reset_peak()
    before, started = memory().peak, time.perf_counter()
    JsonlWriter(path, _checkpoint_of(iterations)).close()
    return Point(iterations, time.perf_counter() - started, memory().peak - before)


def report_point(iterations: int) -> Point:
    """Seconds and memory of reading a metrics file for plots and reports, and of one curve."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        write_metrics(path, iterations)
        return in_fresh_process(_report, path, iterations)


def _report(path: Path, iterations: int) -> Point:
    reset_peak()
    before, started = memory().peak, time.perf_counter()
    found = len(read_history(str(path)).curve("lm_loss"))
    assert found == iterations, found
    return Point(iterations, time.perf_counter() - started, memory().peak - before)


def tensorboard_resume_point(iterations: int) -> Point:
    """Seconds and memory of opening a directory with the events of ``iterations``."""
    with tempfile.TemporaryDirectory() as directory:
        return in_fresh_process(_resume_tensorboard, directory, iterations)


def _resume_tensorboard(directory: str, iterations: int) -> Point:
    writer = TensorBoardWriter(directory, interval=1)
    for iteration in range(1, iterations + 1):
        writer.write_iteration(_record(iteration, iterations, []))
    writer.close()
    reset_peak()
    before, started = memory().peak, time.perf_counter()
    TensorBoardWriter(directory, interval=1, resume_iteration=_checkpoint_of(iterations)).close()
    return Point(iterations, time.perf_counter() - started, memory().peak - before)


def _checkpoint_of(iterations: int) -> int:
    return iterations - min(_LOST, iterations // 2)


def write_metrics(path: Path, iterations: int) -> None:
    """A metrics file with a record of every iteration and its evaluations."""
    writer = JsonlWriter(path, 0, {"data": {"seq_length": 8192}})
    writer.write_iteration(_record(1, iterations, []))
    writer.write_iteration(_record(2, iterations, []))
    writer.close()
    line = path.read_text(encoding="utf-8").splitlines()[1]
    _, _, tail = line.partition(", ")
    _, _, tail = tail.partition(", ")
    with path.open("a", encoding="utf-8") as file:
        for start in range(3, iterations + 1, _LINES_AT_ONCE):
            numbers = range(start, min(start + _LINES_AT_ONCE, iterations + 1))
            for number in numbers:
                file.write(f'{{"iteration": {number}, "consumed_samples": {1024 * number}, {tail}\n')
                if number % _EVAL_INTERVAL == 0:
                    file.write(json.dumps({"iteration": number, "validation_loss": 2.5}) + "\n")
