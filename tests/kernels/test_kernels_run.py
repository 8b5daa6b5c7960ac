"""Whole runs with other kernels: the table at the start, and the same losses."""

import re
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.kernels.choice import Choice
from megatron.core.models.kernels import check_kernels_agree
from megatron.errors import ConfigError
from tests.end_to_end.run_process import FlagValue, Outcome, call_training, losses, words_of

pytestmark = pytest.mark.processes

SIZES: dict[str, FlagValue | Path] = {
    "model": "tiny",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "mock_data": True,
    "vocab_size": 61,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "fp64": True,
    "log_interval": 1,
    "device": "cpu",
}
FLAGS = words_of(SIZES)
KERNELS = {
    "linear": "local",
    "attention": "cpu",
    "weight_gradient": "in_place",
    "rms_norm": "eager",
    "swiglu": "eager",
    "rope": "eager",
    "cross_entropy": "eager",
    "adam": "torch",
    "l2_norm": "torch",
}


def told(outcome: Outcome) -> dict[str, str]:
    """The table at the start of a run."""
    table = outcome.succeeded().stdout.partition("> kernels:\n")[2].partition("\n>")[0]
    return dict(re.findall(r"^  (\w+) +(\w+)  +\S", table, re.MULTILINE))


def run(metrics: Path, *flags: str) -> tuple[dict[str, str], list[float]]:
    outcome = call_training([*FLAGS, "--metrics-jsonl", str(metrics), *flags])
    return told(outcome), losses(metrics)


@pytest.mark.slow(reason="compiles kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_run_with_other_kernels_tells_them_and_has_the_same_losses(tmp_path: Path) -> None:
    table, expected = run(tmp_path / "default.jsonl")
    assert table == KERNELS
    compiled = [f"{operation}=compiled" for operation in ("rms_norm", "swiglu", "rope", "cross_entropy")]
    others = ["--no-gradient-accumulation-fusion", "--kernel", "attention=reference", *compiled]
    table, found = run(tmp_path / "others.jsonl", *others)
    forced = dict(entry.split("=") for entry in compiled)
    assert table == KERNELS | forced | {"attention": "reference", "weight_gradient": "separate"}
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-12)


def test_ranks_that_chose_differently_are_refused() -> None:
    first = [Choice("rope", "compiled", "torch.compile fuses it"), Choice("adam", "torch", "torch's fused AdamW")]
    second = [Choice("rope", "eager", "one operation after the other"), first[1]]
    check_kernels_agree(first, mock.Mock(rank=0, **{"all_gather_object.return_value": [first, first]}))
    with pytest.raises(ConfigError) as error:
        check_kernels_agree(first, mock.Mock(rank=0, **{"all_gather_object.return_value": [first, second]}))
    assert "on rank 0 compiled (torch.compile fuses it), on rank 1 eager (one" in str(error.value)
    assert str(error.value).endswith("or choose one with --kernel rope=compiled.")


def test_a_kernel_that_is_not_there_is_refused_before_training() -> None:
    outcome = call_training([*FLAGS, "--kernel", "rms_norm=te"])
    assert outcome.exit_code == 2
    assert "--kernel rms_norm=te is not available: it needs a GPU; available:" in outcome.stderr
