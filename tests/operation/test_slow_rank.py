"""A rank that really is slower is named soon, and ranks that are not are never named."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.run_process import TINY_RUN, fork_training, iterations, words_of

pytestmark = pytest.mark.slow(reason="compares the times of ranks, which needs a quiet machine")

RUN = {
    **TINY_RUN,
    "mock_data": True,
    "vocab_size": 384,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "seq_length": 128,
    "micro_batch_size": 2,
    "eval_iters": 0,
    "log_interval": 4,
}
"""Iterations of tens of milliseconds: much longer than a time slice of the scheduler."""
SLOW_FROM = 21


def test_a_rank_that_takes_30_percent_longer_is_named_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FAULTS", "1")
    flags = {**RUN, "train_iters": 10**6, "exit_duration_in_mins": 1.5, "log_interval": 20, "run_dir": tmp_path}
    outcome = fork_training(words_of({**flags, "inject_fault": f"slow@{SLOW_FROM}+1000000:rank1:1.3"}), 2)
    named = re.findall(r"Rank (\d) on \S+ is slow", outcome.stdout + outcome.stderr)
    assert named == ["1"], outcome.stdout


def test_ranks_of_1000_clean_steps_are_not_named(tmp_path: Path) -> None:
    # Intervals of a second: other processes and the host take a core for tenths of one.
    flags = {**RUN, "train_iters": 1000, "log_interval": 20, "metrics_jsonl": tmp_path / "metrics.jsonl"}
    outcome = fork_training(words_of(flags), 2).succeeded()
    assert "is slow" not in outcome.stdout + outcome.stderr
    ratios = [record["operation/slowest_rank_ratio"] for record in iterations(tmp_path / "metrics.jsonl")[2:]]
    assert len(ratios) > 40
    print(f"largest ratio of an interval {max(ratios):.2f}, above the threshold: {sum(one >= 1.2 for one in ratios)}")
