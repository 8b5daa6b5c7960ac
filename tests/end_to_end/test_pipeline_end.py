"""How a run in stages ends: none of its ranks waits for messages that will never come."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    PROMPT,
    REPOSITORY,
    Corpus,
    FlagValue,
    RunningTraining,
    assert_close,
    call_training,
    descendants,
    flags_of,
    fork_training,
    iterations,
    latest_iteration,
    losses,
)

TWO_STAGES: dict[str, FlagValue] = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}


def process_of_rank(run: RunningTraining, rank: int) -> int:
    """The process of a rank."""
    return next(
        pid
        for pid in descendants(run.process.pid)
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )


@pytest.mark.slow(reason="two ranks under torchrun")
def test_signal_to_one_stage_stops_all_and_the_run_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    """All stages stop after the same iteration, so no stage waits for a message that is never sent."""
    metrics, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    flags: dict[str, FlagValue | Path] = {"fp64": True, "train_iters": 20_000, "save": tmp_path, "load": tmp_path}
    run = RunningTraining(flags_of(corpus, **flags, **TWO_STAGES, metrics_jsonl=metrics), processes=2)
    run.wait_for_records(metrics, 3)
    os.kill(process_of_rank(run, 1), signal.SIGTERM)
    outcome = run.finish(timeout=PROMPT).succeeded()
    assert "stopped: signal on another rank" in outcome.stdout
    assert not outcome.errors
    done = latest_iteration(tmp_path)
    assert done == iterations(metrics)[-1]["iteration"]
    flags["num_layers"] = 4
    call_training(flags_of(corpus, **flags, metrics_jsonl=metrics, exit_interval=done + 2)).succeeded()
    flags |= {"save": None, "load": None}
    call_training(flags_of(corpus, **flags, metrics_jsonl=whole, exit_interval=done + 2)).succeeded()
    assert_close(losses(metrics), losses(whole), 1e-9)


CRASHING = """
import os, runpy, sys
sys.argv[0] = {script!r}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from megatron.core.models import transformer

forward, passes = transformer.TransformerChunk.forward, 0


def crash(chunk, *inputs):
    global passes
    passes += 1
    if os.environ["RANK"] == "0" and passes == 20:
        raise RuntimeError("a mistake of ours")
    return forward(chunk, *inputs)


transformer.TransformerChunk.forward = crash
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""In the second iteration of zb-v, when the first stage has sent what the last will take only after what now never
comes."""


@pytest.mark.slow(reason="two ranks under torchrun")
def test_crash_of_one_stage_ends_all_although_not_all_that_it_sent_was_taken(corpus: Corpus, tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING.format(script=str(REPOSITORY / "pretrain_llama.py")))
    outcome = RunningTraining(flags_of(corpus, **TWO_STAGES, micro_batch_size=1), processes=2, script=script).finish()
    assert outcome.exit_code != 0
    assert "[rank0]: RuntimeError: a mistake of ours" in outcome.stderr


def test_loss_that_is_not_finite_stops_the_stage_that_does_not_see_it(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, lr=1e38, pipeline_model_parallel_size=2, save_interval=1, save=tmp_path)
    outcome = fork_training([*flags, "--metrics-jsonl", str(metrics)], 2)
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert "nan" in sentence and "--no-check-for-nan-in-loss-and-grad" in sentence
    assert "Traceback" not in outcome.stderr
    assert f"Iteration {latest_iteration(tmp_path) + 1} has loss" in sentence
    assert all(record["lm_loss"] is not None for record in iterations(metrics))
