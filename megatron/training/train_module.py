"""The parts of a rank that compute training steps."""

from dataclasses import dataclass

from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.pipeline_parallel.executor import PipelineExecutor


@dataclass(frozen=True)
class TrainModule:
    """A rank's pipeline executor, data parallelism, optimizer and scales."""

    executor: PipelineExecutor
    data_parallel: DataParallel
    optimizer: Optimizer
    loss_scaler: LossScaler
    loss_ranks: Communicator
    """Ranks over which the loss is summed: data-parallel, context-parallel and pipeline-parallel."""
    fp8: Fp8Layers | None = None
