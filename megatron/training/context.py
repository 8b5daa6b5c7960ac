"""The context that all parts of a run share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.features.faults.flags import FaultInjector
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.ranks import SignalWatch
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
