"""``--preflight`` and ``tools/check_node.py`` as a user starts them."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron.commands import machines
from megatron.errors import ExitCode
from megatron.features.preflight.check import Needs, Result, Verdict
from megatron.features.preflight.run import CHECKS, error_of
from megatron.operation.attempts import read_attempts
from megatron.operation.causes import Cause
from tests.end_to_end.run_process import MOCK_RUN, Flags, call_training, fork_training, words_of

SIZES: Flags = {"hidden_size": 64, "ffn_hidden_size": 256, "vocab_size": 512}
RUN: Flags = {**MOCK_RUN, **SIZES, "train_iters": 1, "lr_warmup_iters": 0}


def test_a_run_checks_its_node_and_saves_as_many_bytes_as_it_asked_for(tmp_path: Path) -> None:
    save = tmp_path / "run"
    with mock.patch("megatron.features.preflight.run.Needs", side_effect=Needs) as needs:
        outcome = call_training(words_of({**RUN, "save": save, "preflight": True, "bf16": True})).succeeded()
    assert f"> pre-flight: {len(CHECKS)} checks ok, 0 results not ok" in outcome.stdout
    directory, expected, host = needs.call_args.args
    assert (directory, host) == (save, 0)
    shards = sum(path.stat().st_size for path in save.glob("iter_*/*.safetensors"))
    assert 0.97 < expected / shards < 1.03


def test_a_failed_check_ends_the_run_before_the_model_is_built(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    with mock.patch("shutil.disk_usage", return_value=usage):
        outcome = call_training(words_of({**RUN, "save": tmp_path / "run", "preflight": True}))
    assert outcome.exit_code == ExitCode.ACTION_REQUIRED
    assert "ERROR: --preflight failed: disk, " in outcome.stderr
    assert "0.0 GiB free" in outcome.stdout and "-> delete files" in outcome.stdout
    assert "parameters" not in outcome.stdout
    (attempt,) = read_attempts(tmp_path / "run")
    assert attempt.counts_from == 0 and not attempt.is_without_progress


def test_the_tool_checks_two_ranks(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    flags = ["--save", str(tmp_path), "--json", str(results), "--device", "cpu", "--async-save"]
    outcome = fork_training([*flags, "--checkpoint-gib", "0.001"], 2, machines.main_check)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.splitlines()[0].split() == ["check", "verdict", "where", "measured", "limit"]
    assert "ok after" in outcome.stdout.splitlines()[-1]
    record = json.loads(results.read_text())
    assert [one["check"] for one in record["results"]] == [check.name for check in CHECKS]
    assert record["exit_code"] == 0
    assert "1 nodes, 2 ranks" in record["results"][0]["value"]


def test_the_tool_ends_with_2_on_all_ranks_if_there_is_no_space(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    flags = ["--save", str(tmp_path), "--checkpoint-gib", "1e6", "--json", str(results), "--device", "cpu"]
    outcome = fork_training(flags, 2, machines.main_check)
    assert outcome.exit_code == ExitCode.ACTION_REQUIRED, outcome.stderr
    assert "failure after" in outcome.stdout.splitlines()[-1]
    record = json.loads(results.read_text())
    named = [one for one in record["results"] if one["verdict"] != "ok"]
    assert [(one["check"], one["rank"]) for one in named] == [("disk", 0)]
    assert record["exit_code"] == 2


def test_flags_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert machines.main_check(["--checkpoint-gib", "-1"]) == ExitCode.ACTION_REQUIRED
    assert "ERROR: --checkpoint-gib" in capsys.readouterr().err
    assert machines.main_check(["--save", "s3://bucket/run"]) == ExitCode.ACTION_REQUIRED


def test_the_error_names_the_rank_whose_node_is_at_fault() -> None:
    found = [
        Result("disk", Verdict.FAILURE, "full", rank=0, host="a"),
        Result("product", Verdict.WARNING, "slow", rank=1, host="b", cause=Cause.STRAGGLER),
        Result("product", Verdict.FAILURE, "3 wrong elements", rank=2, host="c", cause=Cause.SILENT_CORRUPTION),
    ]
    error = error_of(found)
    assert error is not None
    assert (error.culprit, error.cause, error.exit_code) == (2, "silent_corruption", 2)
    assert "product, c, rank 2: 3 wrong elements (2 failures" in str(error)
    full = error_of(found[:2])
    assert full is not None
    assert (full.culprit, full.cause) == (None, "user_error")
    assert error_of(found[1:2]) is None
