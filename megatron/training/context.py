"""What all parts of a run share: its context, and the parts of a rank that compute training steps."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.communication import Work
from megatron.core.control import ControlGroup
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers
from megatron.core.kernels.selection import Kernels
from megatron.core.models.parallelize import ParallelModel
from megatron.core.moe.routing import ExpertBalance
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel import PipelineExecutor
from megatron.core.precision import LossScaler, build_loss_scaler
from megatron.core.topology import Topology
from megatron.features.faults.flags import FaultInjector
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.signals import SignalWatch
from megatron.operation.waits import MeteredTopology

_logger = logging.getLogger(__name__)

LogRank0 = Callable[[str], None]
"""Prints a line on rank 0; the other ranks drop it."""


@dataclass(frozen=True)
class RunContext:
    """The flags of a run, the topology with this rank, the signals received, the log, and the heartbeat."""

    config: RunConfig
    topology: MeteredTopology
    signals: SignalWatch
    log_rank0: LogRank0
    heartbeat: Heartbeat
    """What this rank is doing."""
    faults: FaultInjector = field(default_factory=FaultInjector)
    """The faults of ``--inject-fault``."""

    @property
    def control(self) -> ControlGroup:
        """All ranks, for objects and long waits."""
        return self.topology.control

    def warn_rank0(self, text: str) -> None:
        if self.topology.rank == 0:
            _logger.warning("%s", text)


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

    @classmethod
    def of(cls, config: RunConfig, topology: Topology, parallel: ParallelModel, kernels: Kernels) -> Self:
        """The parts for a model on all its ranks, with a new optimizer; weights may still be uninitialised."""
        decides_by_norm = config.operation.decides_by_norm
        optimizer = Optimizer(config.optimizer, parallel.data_parallel, topology, kernels.optimizer, decides_by_norm)
        scaler, model = build_loss_scaler(config.precision), parallel.model
        fp8, experts = model.context.fp8, model.expert_balance
        return cls(parallel.executor, parallel.data_parallel, optimizer, scaler, topology, fp8, experts)

    def start_sum(self, losses: Tensor, flags: Sequence[bool] = (), others: Tensor | None = None) -> Work[Tensor]:
        """Sum ``losses`` ``[n]``, as the executor returns them, count ``flags``, and sum ``others`` over all ranks:
        ``[n + flags + others]``.

        Tensor-parallel ranks have the same losses, so the first of them adds them; all of them add ``others``.
        """
        if self.topology.tensor_parallel.rank > 0:
            losses = torch.zeros_like(losses)
        counts = torch.tensor(flags, dtype=losses.dtype).to(losses.device, non_blocking=True)
        return self.topology.world.start_all_reduce(torch.cat((losses, counts, *([] if others is None else [others]))))
