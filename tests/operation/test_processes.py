"""The environment variables that the layout decides, before torch is imported."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.activations import ActivationConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.operation.processes import (
    COMPILE_THREADS,
    CONNECTIONS,
    LAZY_CONNECTIONS,
    choose_hardware_queues,
    compile_threads,
    prepare_environment,
)

TP: dict[str, Any] = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
OVERLAP = TP | {"tp_comm_overlap": True}
CP: dict[str, Any] = {"context_parallel_size": 2}
FSDP: dict[str, Any] = {"use_torch_fsdp2": True}
OTHERS: dict[str, Any] = {"pipeline_model_parallel_size": 4, "overlap_grad_reduce": True, "tp_comm_overlap": True}
OFFLOAD = ActivationConfig(cpu_offloading_num_layers=2)
ENGINE = ModelConfig(transformer_impl="transformer_engine")
FP8 = PrecisionConfig(bf16=True, fp8_format="hybrid")


def run_with(layout: dict[str, Any], **groups: Any) -> RunConfig:
    return replace(RunConfig(), parallel=ParallelConfig(**layout), **groups)


OF_USER, LATE = "set by the user", "with it tensor parallelism may start late"
UNSET = "unset CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("config", "given", "connections", "reason", "remark"),
    [
        (run_with(OTHERS), None, 8, "for no overlap in particular", ""),
        (run_with(OTHERS), "1", 1, OF_USER, ""),
        (run_with(TP), None, 1, "for tensor parallelism", ""),
        (run_with(TP), "1", 1, OF_USER, ""),
        (run_with(TP), "32", 32, OF_USER, f"{LATE}: {UNSET}"),
        (run_with(CP), None, 1, "for context parallelism", ""),
        (run_with(TP | CP), None, 1, "for tensor parallelism, context parallelism", ""),
        (run_with(FSDP), None, 8, "for FSDP2", ""),
        (run_with(FSDP), "1", 1, OF_USER, f"with it FSDP2 does not overlap: {UNSET}"),
        (run_with(FSDP | TP), None, 8, "for FSDP2", LATE),
        # Either number hinders one of the two, so the user may have measured.
        (run_with(FSDP | TP), "1", 1, OF_USER, "with it FSDP2 does not overlap"),
        (run_with(OVERLAP), None, 8, "for --tp-comm-overlap", ""),
        (run_with(OVERLAP | CP), None, 8, "for --tp-comm-overlap", "with it context parallelism may start late"),
        (run_with(OVERLAP, model=ENGINE), None, 1, "for tensor parallelism", ""),
        (run_with(OVERLAP, precision=FP8), None, 1, "for tensor parallelism", ""),
        (run_with(TP, activations=OFFLOAD), None, 8, "for --cpu-offloading-num-layers", LATE),
    ],
)
def test_queues_of_a_layout(config: RunConfig, given: str | None, connections: int, reason: str, remark: str) -> None:
    queues = choose_hardware_queues(config, given)
    assert queues.connections == connections
    assert queues.is_mistake == (UNSET in remark)
    named = f"hardware queues of the GPU: {connections} (CUDA_DEVICE_MAX_CONNECTIONS, {reason})"
    assert queues.describe() == (f"{named}; {remark}" if remark else named)


@pytest.mark.parametrize("given", ["", "many", "0", "33", "-1", "٣"])
def test_a_number_that_cuda_does_not_accept_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{CONNECTIONS}={given} is not a number from 1 to 32: unset it"):
        choose_hardware_queues(run_with(TP), given)


def test_variables_are_set_unless_the_user_has_set_them() -> None:
    environment: dict[str, str] = {}
    prepare_environment(run_with(TP), environment, num_cores=96, local_world_size=8)
    assert environment == {CONNECTIONS: "1", COMPILE_THREADS: "12", LAZY_CONNECTIONS: "1"}
    given = {CONNECTIONS: "4", COMPILE_THREADS: "3", LAZY_CONNECTIONS: "0"}
    assert prepare_environment(run_with(TP), given, num_cores=96, local_world_size=8).is_given
    assert given == {CONNECTIONS: "4", COMPILE_THREADS: "3", LAZY_CONNECTIONS: "0"}


def test_the_ranks_of_a_node_share_its_cores() -> None:
    assert [compile_threads(cores, 8) for cores in (4, 8, 96, 512)] == [1, 1, 12, 32]


@pytest.mark.processes
def test_they_are_set_before_torch_is_imported() -> None:
    code = """
import sys
from megatron.commands import pretrain_llama

def prepare(config, environment, num_cores, local_world_size):
    print(config.parallel.tensor_model_parallel_size, num_cores > 0, local_world_size, "torch" in sys.modules)
    sys.exit()

pretrain_llama.prepare_environment = prepare
pretrain_llama.train(sys.argv[1:], 0, 1, pretrain_llama.Heartbeat())
"""
    flags = "--model tiny --mock-data --vocab-size 64 --seq-length 16 --micro-batch-size 1 --global-batch-size 1 "
    flags += "--train-iters 1 --lr 1e-3"
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, *flags.split()]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1:] == ["1 True 1 False"], ended.stderr
