"""What a user sees of a run: every report of it, told the same everywhere, across a stop and a change of layout."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ExitCode
from megatron.metrics.writer import is_detail
from tests.end_to_end.run_process import (
    MOCK_RUN,
    REPOSITORY,
    START_TIMEOUT,
    VOCABULARY,
    Corpus,
    Outcome,
    assert_close,
    bytes_under,
    call_training,
    environment,
    flags_of,
    fork_training,
    grad_norms,
    iterations,
    latest_iteration,
    losses,
    records,
    wait_until,
    words_of,
)
from tests.megatron_log_parsers import PARSERS, final_loss_and_perplexity, periodic_validation, time_stamps

ITERATION_KEYS = [
    "iteration",
    "consumed_samples",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "global_batch_size",
    "iteration_time_ms",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "skipped",
    "effective_time",
    "num_zeros",
    "params_norm",
    "time",
    "elapsed_s",
]
"""What scripts read from --metrics-jsonl: a fixed interface."""

LENGTH, STOP, EVALUATION = 12, 7, 4
SEQUENCE = 32


# --- one run with everything on ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedRun:
    """Two ranks (TP 2) until the stop, then one alone to the end, with every writer on."""

    directory: Path
    first: Outcome
    second: Outcome

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.directory / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of --save."""
        return self.directory / "checkpoints"

    @property
    def stdout(self) -> str:
        """All that the console showed."""
        return self.first.stdout + self.second.stdout


@pytest.fixture(scope="module")
def watched(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """The run with everything on."""
    directory = tmp_path_factory.mktemp("watched")
    flags = flags_of(
        corpus,
        train_iters=LENGTH,
        eval_interval=EVALUATION,
        eval_iters=2,
        save=directory / "checkpoints",
        load=directory / "checkpoints",
        metrics_jsonl=directory / "metrics.jsonl",
        tensorboard_dir=directory / "tensorboard",
        wandb_project="end-to-end",
        wandb_exp_name="watched",
        log_params_norm=True,
        log_num_zeros_in_grad=True,
        timing_log_level=2,
        peak_tflops=None,
        num_workers=1,
    )
    first_half = [*flags, "--tensor-model-parallel-size", "2", "--exit-interval", str(STOP)]
    first = fork_training(first_half, 2).succeeded()
    run = WatchedRun(directory, first, call_training(flags).succeeded())
    # The service of wandb, a process of its own, may write the end of its file after the run.
    logs = list(run.checkpoints.glob("wandb/offline-run-*/run-*.wandb"))
    wait_until(lambda: all(b"lm loss validation" in log.read_bytes() for log in logs), 30.0)
    return run


def test_loss_falls_from_that_of_a_model_that_knows_nothing(watched: WatchedRun) -> None:
    curve = losses(watched.metrics)
    assert math.isclose(curve[0], math.log(VOCABULARY), rel_tol=0.02)
    assert curve[-1] < curve[0] - 0.8


def test_metrics_file_has_the_fixed_keys_and_consistent_numbers(watched: WatchedRun) -> None:
    found = records(watched.metrics)
    steps = [record for record in found if "lm_loss" in record]
    evaluations = [record for record in found if "lm_loss" not in record]
    assert [record["iteration"] for record in steps] == list(range(1, LENGTH + 1))
    # The first record of each process says what it trains.
    worlds = {record["iteration"]: record.pop("run")["world_size"] for record in steps if "run" in record}
    assert worlds == {1: 2, STOP + 1: 1}
    for record in steps:
        assert [key for key in record if not is_detail(key)] == ITERATION_KEYS
        assert record["consumed_samples"] == 8 * record["iteration"]
        assert (record["global_batch_size"], record["skipped"], record["loss_scale"]) == (8, 0, 1.0)
        ranks = 2 if record["iteration"] <= STOP else 1
        seconds = record["iteration_time_ms"] / 1e3
        assert math.isclose(record["tokens_per_s_per_gpu"], 8 * SEQUENCE / seconds / ranks)
        assert 0.0 < record["mfu"] < 1.0
        assert 0.0 < record["effective_time"] < 1.0
        assert record["num_zeros"] >= 0 and record["params_norm"] > 0
    # Full precision: two layouts can be compared to 1e-9 by this file.
    assert any(len(repr(record["lm_loss"])) > 12 for record in steps)
    clock = ["time", "elapsed_s"]
    assert [list(record) for record in evaluations] == [
        *[["iteration", "validation_loss", "validation_bits_per_byte", *clock]] * 3,
        ["iteration", "test_loss", "test_bits_per_byte", *clock],
    ]
    assert [record["iteration"] for record in evaluations] == [4, 8, 12, 12]


def test_records_say_when_they_were_made_and_elapsed_time_starts_anew_with_each_process(watched: WatchedRun) -> None:
    found = records(watched.metrics)
    now = time.time()
    times = [record["time"] for record in found]
    assert times == sorted(times) and now - 3600 < times[0] and times[-1] <= now
    for are_of_one in (lambda record: record["iteration"] <= STOP, lambda record: record["iteration"] > STOP):
        process = [record for record in found if are_of_one(record)]
        elapsed = [record["elapsed_s"] for record in process]
        assert elapsed == sorted(elapsed) and elapsed[0] > 0
        trained = sum(record.get("iteration_time_ms", 0.0) for record in process) / 1e3
        assert elapsed[-1] >= 0.99 * trained
        # Both clocks run alike, so the process began at one time, whichever record says so.
        begun = [record["time"] - record["elapsed_s"] for record in process]
        assert max(begun) - min(begun) < 1.0
    # The second process did not begin before the first ended.
    first_end = max(record["time"] for record in found if record["iteration"] <= STOP)
    second_begin = min(record["time"] - record["elapsed_s"] for record in found if record["iteration"] > STOP)
    assert second_begin > first_end


def test_parsers_of_megatrons_log_read_this_log(watched: WatchedRun) -> None:
    steps = iterations(watched.metrics)
    wanted = {
        "iteration": [float(step["iteration"]) for step in steps],
        "train iters": [float(LENGTH)] * LENGTH,
        "number of nan iterations": [0.0] * LENGTH,
        "number of skipped iterations": [step["skipped"] for step in steps],
        "throughput per GPU (TFLOP/s/GPU)": [step["tflops_per_gpu"] for step in steps],
        "elapsed time per iteration (ms)": [step["iteration_time_ms"] for step in steps],
        "MFU": [100 * step["mfu"] for step in steps],
        "effective time": [100 * step["effective_time"] for step in steps],
        "tokens/s per GPU": [step["tokens_per_s_per_gpu"] for step in steps],
    }
    for parser in PARSERS:
        for name, values in parser(watched.stdout).items():
            expected = wanted.get(name) or [step[name.replace(" ", "_")] for step in steps]
            assert len(values) == LENGTH, (parser, name)
            # What the line rounds away; of a throughput below 1 it has two digits.
            digit = {"MFU": 0.0051, "effective time": 0.0051, "tokens/s per GPU": 0.051}.get(name, 0.0)
            relative = 0.06 if name.startswith("throughput") else 5e-3
            close = [
                math.isclose(*pair, rel_tol=relative, abs_tol=digit) for pair in zip(values, expected, strict=True)
            ]
            assert all(close), (parser, name, values, expected)
    stamps, seconds = time_stamps(watched.stdout), [step["time"] for step in steps]
    assert all(abs(stamp.timestamp() - second) < 1.0 for stamp, second in zip(stamps, seconds, strict=True))
    validation = [record for record in records(watched.metrics) if "validation_loss" in record]
    assert [iteration for iteration, _ in periodic_validation(watched.stdout)] == [4, 8, 12]
    printed = [loss for _, loss in periodic_validation(watched.stdout)]
    assert_close(printed, [record["validation_loss"] for record in validation], 1e-6)
    loss, perplexity = final_loss_and_perplexity(watched.stdout)
    assert_close([loss, math.log(perplexity)], [validation[-1]["validation_loss"]] * 2, 1e-6)
    assert final_loss_and_perplexity(watched.stdout, "test")[0] != loss


def test_console_says_what_runs_where(watched: WatchedRun) -> None:
    assert "2 ranks on CPU = tensor 2 x pipeline 1 x data 1" in watched.first.stdout
    assert "measured on this CPU" in watched.first.stdout
    assert f"continuing after iteration {STOP}" in watched.second.stdout
    assert "stopped: the run is complete" in watched.second.stdout
    assert watched.first.stdout.count("> trained: ") == 1
    for timer in ("forward-backward", "batch-generator", "grads-reduce", "optimizer"):
        assert re.search(rf"^ +{timer} \.+: \(\d+\.\d\d, \d+\.\d\d\)$", watched.first.stdout, re.MULTILINE)


def test_wandb_continues_under_the_same_id(watched: WatchedRun) -> None:
    run_id = (watched.checkpoints / "wandb_run_id.txt").read_text().strip()
    runs = list((watched.checkpoints / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    for run in runs:
        assert f"-{run_id}" in run.name  # a restart in the same second adds a suffix
        (log,) = (path.read_bytes() for path in run.glob("run-*.wandb"))
        for key in (b"lm loss", b"grad-norm", b"throughput", b"lm loss validation", b"hidden_size"):
            assert key in log
    assert "WARNING" not in watched.stdout


def checkpointed(run: WatchedRun) -> dict[str, Any]:
    """What is in the directory of --save; of wandb's files, which its service may still write, the names."""
    found = bytes_under(run.checkpoints)
    return {name: "" if name.startswith("wandb/") else content for name, content in found.items()}


def test_skip_train_evaluates_and_changes_nothing(watched: WatchedRun, corpus: Corpus) -> None:
    before = checkpointed(watched)
    flags = flags_of(
        corpus, train_iters=LENGTH, lr=None, lr_warmup_iters=0, eval_iters=2, skip_train=True, load=watched.checkpoints
    )
    outcome = call_training([*flags, "--use-checkpoint-opt-param-scheduler"]).succeeded()
    values = re.findall(rf"validation loss at iteration {LENGTH}( on \w+ set)? \| lm loss value: (\S+)", outcome.stdout)
    assert [split for split, _ in values] == [" on validation set", " on test set"]
    assert all(abs(float(loss) - losses(watched.metrics)[-1]) < 0.5 for _, loss in values)
    assert not re.search(r"\] iteration ", outcome.stdout)
    assert checkpointed(watched) == before


# --- single features -----------------------------------------------------------------------------------------


def test_iterations_with_nan_are_skipped_and_counted_on_request(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(
        corpus, lr=1e38, check_for_nan_in_loss_and_grad=False, log_interval=4, metrics_jsonl=metrics, save=tmp_path
    )
    outcome = call_training(flags).succeeded()
    first, second = iterations(metrics)
    assert 0 < first["skipped"] < 4
    assert (second["skipped"], second["lm_loss"], second["grad_norm"]) == (4, None, None)
    assert "number of skipped iterations:   4 |" in outcome.stdout
    assert latest_iteration(tmp_path) == 8
    # Strict JSON: a NaN would break readers in other languages.
    assert not re.search(r"\b(NaN|Infinity)\b", metrics.read_text())


@pytest.mark.slow(reason="products in fp16 on a CPU")
def test_fp16_stays_by_fp32(corpus: Corpus, tmp_path: Path) -> None:
    """Within 5e-5 of the loss over 30 iterations, where bf16 is off by 1e-4, and 2e-3 of the gradient norm (6e-3)."""
    runs: dict[str, dict[str, Any]] = {"fp16": {"fp16": True, "initial_loss_scale": 65536}, "fp32": {}}
    for name, changes in runs.items():
        metrics = tmp_path / name
        flags = flags_of(corpus, train_iters=30, micro_batch_size=8, lr=1e-3, metrics_jsonl=metrics, **changes)
        call_training(flags).succeeded()
    assert_close(losses(tmp_path / "fp16"), losses(tmp_path / "fp32"), 5e-5)
    assert_close(grad_norms(tmp_path / "fp16"), grad_norms(tmp_path / "fp32"), 2e-3)
    assert losses(tmp_path / "fp16")[-1] < losses(tmp_path / "fp16")[0] - 0.3
    assert {record["loss_scale"] for record in iterations(tmp_path / "fp16")} == {65536.0}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "floor": (
        {"initial_loss_scale": 2**31, "min_loss_scale": 2**30, "hysteresis": 1},
        "Iteration 2 has loss 5. ... the loss scale is at --min-loss-scale 1073741824.0: lower that or --lr",
    ),
    "constant": (
        {"loss_scale": 2.0**40},
        "Iteration 1 has loss 5. ... with --loss-scale 1099511627776.0: lower that or --lr",
    ),
    # Not for the scale to mend, which has no part in the loss.
    "loss": (
        {"initial_loss_scale": 1024, "lr": 1e38},
        "has loss nan and gradient norm nan: lower --lr or check the data",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_lower_scale_mends_stops_the_run_or_is_skipped(corpus: Corpus, tmp_path: Path, fault: str) -> None:
    changes, words = FAULTS[fault]
    outcome = call_training(flags_of(corpus, fp16=True, **changes))
    assert outcome.exit_code == 1
    sentence = outcome.refusal("; --no-check-for-nan-in-loss-and-grad skips such iterations.")
    assert re.search(".*".join(re.escape(part) for part in words.split(" ... ")), sentence), sentence
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, fp16=True, check_for_nan_in_loss_and_grad=False, metrics_jsonl=metrics, **changes)
    call_training(flags).succeeded()
    last = iterations(metrics)[-1]
    assert (last["skipped"], last["lm_loss"]) == (1, None)
    assert last["loss_scale"] == changes.get("min_loss_scale", changes.get("loss_scale", 1024))


# --- the console ---------------------------------------------------------------------------------------------

BEGINNINGS = (
    *("> model:", "> layout:", "> run:", "> kernels:", r"  [a-z0-9_]+ +[a-z]+ ", "> memory on this rank:"),
    *("> MFU is relative to", r" \[.*\] iteration ", "> trained:", "> stopped:"),
)


def test_a_run_without_directories_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches over runs of weeks neither writes a file nor prints a line."""
    monkeypatch.chdir(tmp_path)
    outcome = call_training(words_of({**MOCK_RUN, "train_iters": 3})).succeeded()
    lines = outcome.stdout.splitlines()
    assert outcome.stderr == ""
    assert [line for line in lines if not any(re.match(beginning, line) for beginning in BEGINNINGS)] == []
    once = [line.partition(":")[0] for line in lines if line.startswith(">")]
    assert len(once) == len(set(once))
    assert sum("] iteration " in line for line in lines) == 3
    assert "> trained: iteration 3 of 3, 768 tokens, " in outcome.stdout
    assert os.listdir(tmp_path) == []


def test_the_exit_code_of_an_error_survives_a_log_that_cannot_be_written(corpus: Corpus) -> None:
    words = [sys.executable, str(REPOSITORY / "pretrain_llama.py"), *flags_of(corpus, hidden_size=33)]
    run = subprocess.run(["bash", "-c", '"$0" "$@" > /dev/full 2>&1', *words], env=environment(), timeout=START_TIMEOUT)
    assert run.returncode == ExitCode.ACTION_REQUIRED
