"""An experiment runs the flags of a run on another machine: in fp64, and where kernels are missing."""

from pathlib import Path

import pytest

from megatron.comparison.bisection import rows
from megatron.comparison.experiment import ExperimentError, Request, recorded
from megatron.comparison.search import operations_of
from megatron.comparison.verdict import judge
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.features.record_tensors.recording import Recording
from tests.comparison.in_process import InProcess, search

COMMON = (
    "--model tiny --mock-data --vocab-size 99 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 9 --lr 1e-3 --bf16"
)
ENGINE = "--bf16 --transformer-impl transformer_engine"


@pytest.mark.parametrize(
    "flags",
    [
        "--transformer-impl transformer_engine --attention-backend flash",
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
        "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16",
        "--grad-reduce-in-bf16 --distributed-backend nccl --device cuda",
        "--num-experts 4 --moe-router-dtype fp32",
    ],
)
def test_flags_of_a_gpu_pass_the_checks_in_fp64(flags: str, tmp_path: Path) -> None:
    given = CommandLine.of(f"{COMMON} {flags}".split()).parse().checked()
    config = recorded(given, tmp_path, Request(), fp64=True)
    check_run(config, 2)
    assert config.precision.fp64 and config.training.device == "auto"
    assert config.parallel.sharding_strategy == given.parallel.sharding_strategy


def test_without_its_kernels_a_run_is_compared_in_fp64_alone(tmp_path: Path) -> None:
    found = search(InProcess({}), tmp_path, ENGINE, f"{ENGINE} --micro-batch-size 4")
    assert not found.causes and not found.operations.is_complete
    assert "in fp64. Not in their own precision: " in found.operations.compared
    verdict = judge([], found)
    assert verdict.kind == "unclear" and verdict.exit_code == 2
    found = search(InProcess({}), tmp_path / "2", ENGINE, f"{ENGINE} --norm-epsilon 1e-2")
    assert [one.what for one in found.causes] == ["--norm-epsilon"]


def test_recordings_without_a_common_tensor_are_not_called_equal() -> None:
    with pytest.raises(ExperimentError, match="no tensor was recorded on both sides"):
        operations_of(list(rows([Recording()], [Recording()])), None, {}, "in fp64")
