"""A run without directories: what watches over runs of weeks neither writes a file nor prints a line."""

import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.run_process import FlagValue, call_training, words_of

RUN: dict[str, FlagValue] = {
    "model": "tiny",
    "mock_data": True,
    "vocab_size": 512,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 3,
    "lr": 1e-3,
    "num_workers": 0,
    "log_interval": 1,
    "device": "cpu",
}
BEGINNINGS = (
    "> model:",
    "> layout:",
    "> run:",
    "> kernels:",
    r"  [a-z0-9_]+ +[a-z]+ ",
    "> memory on this rank:",
    "> MFU is relative to",
    r" \[.*\] iteration ",
    "> trained:",
    "> stopped:",
)


def test_a_run_without_directories_is_as_quiet_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call_training(words_of(RUN)).succeeded()
    lines = outcome.stdout.splitlines()
    assert outcome.stderr == ""
    assert [line for line in lines if not any(re.match(beginning, line) for beginning in BEGINNINGS)] == []
    once = [line.partition(":")[0] for line in lines if line.startswith(">")]
    assert len(once) == len(set(once))
    assert sum("] iteration " in line for line in lines) == 3
    assert os.listdir(tmp_path) == []
