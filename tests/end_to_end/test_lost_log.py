"""A run whose log cannot be written trains, saves, and keeps its metrics file."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ExitCode
from tests.end_to_end.run_process import (
    REPOSITORY,
    START_TIMEOUT,
    Corpus,
    environment,
    flags_of,
    iterations,
    latest_iteration,
)


@pytest.mark.slow(reason="whole runs in processes of their own")
@pytest.mark.parametrize("redirection", ["> /dev/full 2>&1", "2>&1 | head -n 2"])
def test_a_log_that_cannot_be_written_costs_the_log_alone(corpus: Corpus, tmp_path: Path, redirection: str) -> None:
    metrics, save = tmp_path / "metrics.jsonl", tmp_path / "save"
    flags = flags_of(
        corpus,
        train_iters=6,
        lr_decay_iters=6,
        metrics_jsonl=metrics,
        save=save,
        save_interval=2,
        async_save=True,
        progress_bar="True",
    )
    command = f'"$0" "$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", command, sys.executable, str(REPOSITORY / "pretrain_llama.py"), *flags]
    run = subprocess.run(words, env=environment(), timeout=START_TIMEOUT, stdout=subprocess.DEVNULL)
    assert run.returncode == 0
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2, 3, 4, 5, 6]
    assert latest_iteration(save) == 6


def test_the_exit_code_of_an_error_survives_a_log_that_cannot_be_written(corpus: Corpus) -> None:
    words = [sys.executable, str(REPOSITORY / "pretrain_llama.py"), *flags_of(corpus, hidden_size=33)]
    run = subprocess.run(["bash", "-c", '"$0" "$@" > /dev/full 2>&1', *words], env=environment(), timeout=START_TIMEOUT)
    assert run.returncode == ExitCode.ACTION_REQUIRED
