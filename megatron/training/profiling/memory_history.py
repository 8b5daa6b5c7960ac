"""Allocations of a GPU with their call stacks (``--record-memory-history``), for pytorch.org/memory_viz."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron import torch_compat
from megatron.config.logging import LoggingConfig
from megatron.core.topology import Topology
from megatron.errors import ConfigError, RankError
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

_MAX_ENTRIES = 100_000  # as in Megatron-LM; older allocations and frees are dropped
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllocatorCalls:
    """What torch's allocator is asked to do."""

    record: Callable[[int], None] = torch_compat.record_memory_history
    dump: Callable[[str], None] = torch_compat.dump_memory_history
    stop: Callable[[], None] = torch_compat.stop_memory_history


def start_memory_history(
    config: LoggingConfig, topology: Topology, calls: AllocatorCalls = AllocatorCalls()
) -> "MemoryHistory | None":
    """Begin to record on the last rank, as Megatron-LM does; before the model is allocated, so that the snapshot has
    the stacks of the weights. None on other ranks and without the flag. Raises :class:`ConfigError` on a CPU."""
    if not config.record_memory_history:
        return None
    if topology.device.type == "cpu":
        raise ConfigError(
            "--record-memory-history records the allocations of a GPU, and this run is on a CPU: use --profile with "
            "--use-pytorch-profiler, which records allocations there."
        )
    if topology.rank != topology.grid.world_size - 1:
        return None
    path = Path(config.memory_snapshot_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankError(f"--memory-snapshot-path {path} cannot be written ({error.strerror}).") from error
    calls.record(_MAX_ENTRIES)
    return MemoryHistory(path, config.log_interval, calls)


@dataclass
class MemoryHistory(Listener):
    """Writes a snapshot every ``interval`` iterations and at the end of the run, also after an error such as a lack of
    memory; each replaces the last."""

    path: Path
    interval: int
    calls: AllocatorCalls = field(default_factory=AllocatorCalls)

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if trainer.state.progress.iteration % self.interval == 0:
            self._write()

    def close(self) -> None:
        self._write()
        self.calls.stop()

    def _write(self) -> None:
        try:
            self.calls.dump(str(self.path))
        except OSError as error:
            _logger.warning("--record-memory-history could not write %s (%s)", self.path, error)
