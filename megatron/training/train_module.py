"""The parts of a rank that compute training steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication import Work
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers
from megatron.core.moe.routing import ExpertBalance
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel import PipelineExecutor
from megatron.core.precision import LossScaler
from megatron.core.topology import Topology


@dataclass(frozen=True)
class TrainModule:
    """A rank's pipeline executor, data parallelism, optimizer and scales."""

    executor: PipelineExecutor
    data_parallel: DataParallel
    optimizer: Optimizer
    loss_scaler: LossScaler
    topology: Topology
    fp8: Fp8Layers | None = None
    experts: ExpertBalance | None = None
    """Losses, loads and biases of the routers; None for a dense model."""

    def start_sum(self, losses: Tensor, flags: Sequence[bool] = ()) -> Work[Tensor]:
        """Sum ``losses`` ``[n]``, as the executor returns them, and count ``flags`` over all ranks: ``[n + flags]``.

        Tensor-parallel ranks have the same losses, so the first of them adds them.
        """
        if self.topology.tensor_parallel.rank > 0:
            losses = torch.zeros_like(losses)
        counts = torch.tensor(flags, dtype=losses.dtype).to(losses.device, non_blocking=True)
        return self.topology.world.start_all_reduce(torch.cat((losses, counts)))
