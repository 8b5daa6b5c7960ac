"""Injection of the faults of ``--inject-fault`` into a run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.features.faults.flags import ITERATION, Fault, parse_faults
from megatron.features.faults.listener import EVENT_FAULTS, ITERATION_FAULTS, FaultInjector, SaveFaults, Site
from megatron.operation.heartbeat import Section
from megatron.training.loop.trainer import IterationResult, Listener, Trainer


def build_fault_injector(config: RunConfig, rank: int) -> FaultInjector:
    """The faults of this rank; none without ``--inject-fault``."""
    spec, directory = config.operation.inject_fault, config.operation.run_dir or config.checkpoint.save
    if spec is None:
        return FaultInjector()
    assert directory is not None  # checked
    return FaultInjector(parse_faults(spec), rank, Path(directory))


_AT_START = ("spike", "stoploader", "killloader", "stopwriter", "killwriter")
"""Kinds that are injected before the forward pass of their iteration, like flipped bits of weights and moments."""


def is_after_backward(fault: Fault) -> bool:
    """Whether a fault of an iteration is injected between its backward pass and the reduction of the gradients."""
    return fault.kind not in _AT_START and fault.target in (None, "gradient")


@dataclass
class FaultInjection(Listener):
    """Injects faults into iterations and saves; the first listener, so that a save has a fault before it begins."""

    injector: FaultInjector
    config: CheckpointConfig
    sleep: Callable[[float], object] = time.sleep
    _due: list[Fault] = field(default_factory=list, init=False)
    """The faults of this iteration."""
    _saves: SaveFaults | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.config.save is not None and not self.config.async_save:
            self._saves = SaveFaults(self.injector, Path(self.config.save))

    def on_iteration_start(self, trainer: Trainer) -> None:
        self._end_save()
        self._due = self.injector.due(ITERATION, trainer.state.progress.iteration + 1)
        spikes = [fault.number for fault in self._due if fault.kind == "spike"]
        trainer.state.learning_rate_factor = spikes[0] or 1.0 if spikes else 1.0
        self._inject(trainer, lambda fault: not is_after_backward(fault))
        self._started = _clock(trainer)()

    def after_backward(self, trainer: Trainer) -> None:
        seconds = _clock(trainer)() - self._started
        # As if the rank were slow, or failed, in its forward and backward passes.
        with trainer.context.heartbeat.section(Section.FORWARD_BACKWARD):
            for fault in self._due:
                if fault.kind == "slow" and fault.number is not None:
                    self.sleep(seconds * (fault.number - 1.0))
                elif fault.kind == "delay" and fault.number is not None:
                    self.sleep(fault.number)
            self._inject(trainer, is_after_backward)

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        schedule = self.config.save_schedule
        if self._saves is not None and schedule is not None and schedule.is_due(trainer.state.progress.iteration):
            self._saves.begin_save()

    def on_end(self, trainer: Trainer, reason: str) -> None:
        self._end_save()

    def _inject(self, trainer: Trainer, is_now: Callable[[Fault], bool]) -> None:
        site = Site(
            trainer.context.topology.world,
            trainer.context.topology.device,
            trainer.module.data_parallel,
            trainer.module.optimizer,
        )
        for fault in filter(is_now, self._due):
            if fault.kind in EVENT_FAULTS:
                EVENT_FAULTS[fault.kind](fault)
            elif fault.kind in ITERATION_FAULTS:
                ITERATION_FAULTS[fault.kind](fault, site)

    def _end_save(self) -> None:
        if self._saves is not None:
            self._saves.end_save()

    def close(self) -> None:
        if self._saves is not None:
            self._saves.disarm()


def _clock(trainer: Trainer) -> Callable[[], float]:
    """The clock of ``slow``: on a CPU the processor time, which does not count waits for other ranks."""
    return time.thread_time if trainer.context.topology.device.type == "cpu" else time.perf_counter
