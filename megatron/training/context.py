"""What the parts of a run share."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.topology import Topology
from megatron.training.signals import SignalWatch

LogRank0 = Callable[[str], None]
"""Prints a line on rank 0; the other ranks drop it."""


@dataclass(frozen=True)
class RunContext:
    """The flags of a run, this rank's place in it, and its log."""

    config: RunConfig
    topology: Topology
    signals: SignalWatch
    log_rank0: LogRank0

    @property
    def world(self) -> Communicator:
        """All ranks."""
        return self.topology.world
