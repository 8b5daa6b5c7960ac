"""The listener that finds slow ranks (megatron/features/stragglers/flags.py)."""

import socket
import time
from dataclasses import dataclass, field

import torch

from megatron.features.stragglers.flags import Straggler, StragglerDetector, excess_section
from megatron.operation.heartbeat import STEP_SECTIONS, Section
from megatron.operation.waits import Stopwatch
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

_TRAINING = (*STEP_SECTIONS, Section.DATA)
METRIC = "operation/slowest_rank_ratio"
"""Largest busy time of a rank, relative to the median of the ranks with the same work."""


@dataclass
class Stragglers(Listener):
    """Compares the ranks once per log interval after the first, and warns of those that are slow.

    Busy time is measured in the last iteration of the interval on a GPU, and in all its iterations on a CPU. The
    collectives are one all-gather of two numbers, and one of objects whenever a slow rank is found.
    """

    detector: StragglerDetector
    stopwatch: Stopwatch
    interval: int
    _before: dict[Section, int] | None = None
    """The busy time of each section when the measurement began."""
    _compared: float = 0.0
    """Reading of the monotonic clock at the last comparison."""
    _is_warm: bool = False
    _measures_always: bool = field(init=False)

    def __post_init__(self) -> None:
        self._measures_always = self.stopwatch.is_on

    def on_iteration_start(self, trainer: Trainer) -> None:
        if not self._is_warm:
            return
        is_last = (trainer.state.progress.iteration + 1) % self.interval == 0
        if is_last and not self._measures_always:
            self.stopwatch.is_on = True
            self._before = None
        if self._before is None and (is_last or self._measures_always):
            self._before = trainer.context.heartbeat.busy_ns()

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if trainer.state.progress.iteration % self.interval != 0:
            return
        self._is_warm = True
        before, self._compared = self._compared, time.monotonic()
        if self._before is None:
            return
        context = trainer.context
        self.stopwatch.collect()
        self.stopwatch.is_on = self._measures_always
        now, began = context.heartbeat.busy_ns(), self._before
        busy = {section.label: (now[section] - began[section]) / 1e9 for section in _TRAINING}
        own = torch.tensor([sum(busy.values()), self._compared - before], dtype=torch.float64)
        gathered = context.topology.world.all_gather(own.to(context.topology.device)).view(-1, 2)
        of_ranks, seconds = gathered[:, 0].tolist(), float(gathered[:, 1].max())
        result.outcome.metrics[METRIC] = self.detector.largest_ratio(of_ranks)
        for straggler in self.detector.observe(of_ranks, seconds):
            self._warn(trainer, straggler, busy)
        # After the collectives: all ranks begin the next measurement together.
        self._before = context.heartbeat.busy_ns() if self._measures_always else None

    def _warn(self, trainer: Trainer, straggler: Straggler, busy: dict[str, float]) -> None:
        context = trainer.context
        ranks = context.control.all_gather_object((socket.gethostname(), busy))
        host, own = ranks[straggler.rank]
        section = excess_section(own, [ranks[peer][1] for peer in self.detector.peers_of(straggler.rank)])
        context.warn_rank0(
            f"Rank {straggler.rank} on {host} is slow: in the last interval it was busy {straggler.ratio:.2f} times as "
            f"long as the median of the {straggler.num_peers} ranks with the same work, most of it in {section}."
        )
