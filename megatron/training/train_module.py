"""What a rank computes training steps with."""

from dataclasses import dataclass

from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.pipeline_parallel.executor import PipelineExecutor


@dataclass(frozen=True)
class TrainModule:
    """A rank's part of the model in its pipeline, its gradients, its optimizer, and the scales of reduced precision."""

    executor: PipelineExecutor
    data_parallel: DataParallel
    optimizer: Optimizer
    loss_scaler: LossScaler
    loss_ranks: Communicator
    """The ranks whose losses add up: data-parallel and context-parallel ranks, and the pipeline stages."""
    fp8: Fp8Layers | None = None
