"""The effects of the faults of ``--inject-fault``, and the listener that injects them; ``flags.py`` has the grammar."""

import ctypes
import errno
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.data import loader
from megatron.features.faults.flags import ITERATION, SAVE, Fault, FaultInjector, parse_faults
from megatron.operation.evidence import BACKGROUND_WRITER, child_processes
from megatron.operation.heartbeat import Section
from megatron.training.context import TrainModule
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

_READ = loader.read_sample
_TOO_MUCH = 1 << 60  # bytes; more than an address space


class InjectedError(RuntimeError):
    """The exception of the fault ``exception``, and of a fault that cannot be injected."""


def build_fault_injector(config: RunConfig, rank: int) -> FaultInjector:
    """The faults of this rank; none without ``--inject-fault``."""
    spec, directory = config.operation.inject_fault, config.operation.run_dir or config.checkpoint.save
    if spec is None:
        return FaultInjector()
    assert directory is not None  # checked
    return FaultInjector(parse_faults(spec), rank, Path(directory))


def reach(injector: FaultInjector, moment: str) -> None:
    """Inject the faults of this moment: one of :data:`~megatron.features.faults.flags.EVENTS`."""
    for fault in injector.due(moment):
        EVENT_FAULTS[fault.kind](fault)


# --- faults of the process -----------------------------------------------------------------------------------


def raise_exception(fault: Fault) -> NoReturn:
    raise InjectedError(f"Injected fault: {fault}")


def sleep(fault: Fault) -> None:
    deadline = None if fault.number is None else time.monotonic() + fault.number
    while deadline is None or time.monotonic() < deadline:
        time.sleep(3600.0 if deadline is None else max(0.0, deadline - time.monotonic()))


def hold_interpreter_lock(fault: Fault) -> None:
    """A thread calls C's ``sleep`` without releasing the lock. This thread, which waits for the lock, runs no more."""

    def hold() -> None:
        # Signals go to other threads: one that was delivered here would end the sleep.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            ctypes.PyDLL(None).sleep(1 << 30)

    thread = threading.Thread(target=hold, name="injected fault", daemon=True)
    thread.start()
    thread.join()


def read_silent_file(fault: Fault) -> None:
    """Read a FIFO without a writer. It has no name any more, so nothing remains of it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fifo"
        os.mkfifo(path)
        descriptor = os.open(path, os.O_RDWR)  # without O_RDWR it would wait here, and the FIFO would remain
    while True:
        os.read(descriptor, 1)


def fail(number: int, fault: Fault) -> NoReturn:
    raise OSError(number, os.strerror(number))


EVENT_FAULTS: Mapping[str, Callable[[Fault], object]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "sigterm": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda fault: os._exit(int(fault.number or 0)),
    "exception": raise_exception,
    "oom": lambda fault: torch.empty(
        _TOO_MUCH, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu"
    ),
    "sleep": sleep,
    "gil": hold_interpreter_lock,
    "fifo": read_silent_file,
}
"""Faults that can be injected anywhere."""


# --- faults of an iteration ----------------------------------------------------------------------------------


def flip_bit(fault: Fault, trainer: Trainer) -> None:
    assert fault.number is not None and fault.target is not None
    tensor, index = _choose_element(fault, fault.target, trainer.module)
    if fault.number >= 8 * tensor.itemsize:
        raise InjectedError(f"{fault}: an element has {8 * tensor.itemsize} bits.")
    flip(tensor, index, int(fault.number))


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip ``bit`` (0 is the lowest) of element ``index`` of a 1-D tensor."""
    byte, bit = divmod(bit, 8)
    octet = tensor.detach()[index : index + 1].view(torch.uint8)[byte if sys.byteorder == "little" else -1 - byte]
    octet.bitwise_xor_(1 << bit)


def spoil_gradient(fault: Fault, trainer: Trainer) -> None:
    tensor, index = _choose_element(fault, "gradient", trainer.module)
    tensor[index] = float("nan")


def _choose_element(fault: Fault, target: str, module: TrainModule) -> tuple[Tensor, int]:
    """A 1-D tensor and the index of an element, which is not padding. The choice depends on the fault alone."""
    chance = random.Random(str(fault))
    ranges = [
        (tensor, begin - start, end - start)
        for info, start, tensor in _tensors(target, module)
        for _, begin, end in flat_range_boxes(info, start, start + tensor.numel())
    ]
    if not ranges:
        raise InjectedError(f"{fault}: this rank has no {target}.")
    tensor, begin, end = ranges[chance.randrange(len(ranges))]
    return tensor, chance.randrange(begin, end)


def _tensors(target: str, module: TrainModule) -> list[tuple[ParameterInfo, int, Tensor]]:
    """Parts of flattened parameters that this rank stores: (parameter, first element, 1-D tensor)."""
    if target == "weight":
        return [(local.info, local.start, local.tensor) for local in module.data_parallel.local_params]
    if target == "gradient":
        return [(shard.info, shard.start, shard.gradient) for shard in module.data_parallel.param_shards]
    states = [state for state in module.optimizer.state() if (state.kind == "master") == (target == "master")]
    return [(state.info, state.start, state.tensor.view(-1)) for state in states]


def spoil_reads(effect: Callable[[Fault], object], fault: Fault, trainer: Trainer) -> None:
    """Later reads of samples have this effect; microbatches that are read ahead are still delivered."""
    vars(loader)["read_sample"] = lambda *arguments: effect(fault)


def signal_writer(number: signal.Signals, fault: Fault, trainer: Trainer) -> None:
    pids = [child.pid for child in child_processes(os.getpid()) if child.role == BACKGROUND_WRITER]
    if not pids:
        raise InjectedError(f"{fault}: this rank has no background writer yet.")
    for pid in pids:
        os.kill(pid, number)


def call_collective(fault: Fault, trainer: Trainer) -> None:
    topology = trainer.context.topology
    topology.world.all_reduce(torch.zeros(7, device=topology.device))


ITERATION_FAULTS: Mapping[str, Callable[[Fault, Trainer], object]] = {
    "collective": call_collective,
    "flip": flip_bit,
    "nan": spoil_gradient,
    "stoploader": partial(spoil_reads, sleep),
    "failloader": partial(spoil_reads, partial(fail, errno.EIO)),
    "stopwriter": partial(signal_writer, signal.SIGSTOP),
    "killwriter": partial(signal_writer, signal.SIGKILL),
}
"""Faults that act on the rank's parts of the run. ``slow``, ``delay`` and ``spike`` are in the listener."""


# --- faults of a save ----------------------------------------------------------------------------------------

SAVE_FAULTS: Mapping[str, Callable[[Fault], object]] = {
    **EVENT_FAULTS,
    "enospc": partial(fail, errno.ENOSPC),
    "eio": partial(fail, errno.EIO),
    "slowsave": sleep,
}
"""Faults at the first sync of a file of a synchronous save, when its content is written."""


class SaveFaults:
    """Injects faults into the synchronous saves of this rank: at the first sync of a file below ``root``."""

    def __init__(self, injector: FaultInjector, root: Path) -> None:
        self._injector, self._root = injector, root.resolve()
        self._saves = 0
        self._armed: list[Fault] = []
        self._sync = os.fsync

    # A save writes its files, syncs each, and commits. os.fsync is replaced from begin_save on, so that a fault comes
    # when the content of the first file is written, and nothing is committed.
    def begin_save(self) -> None:
        self._saves += 1
        self._armed = self._injector.due(SAVE, self._saves)
        if self._armed:
            vars(os)["fsync"] = self._synced

    def end_save(self) -> None:
        """After a save; a fault that was not injected is an error, because the record says that it was."""
        armed = self._armed
        self.disarm()
        if armed:
            raise InjectedError(f"{armed[0]}: this rank wrote no file in this save.")

    def disarm(self) -> None:
        vars(os)["fsync"] = self._sync
        self._armed = []

    def _synced(self, descriptor: int) -> None:
        # A checkpoint is a directory below the root; a file in the root, such as the tracker, is none of its files.
        if self._armed and self._root in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.parents:
            armed, self._armed = self._armed, []
            for fault in armed:
                SAVE_FAULTS[fault.kind](fault)
        self._sync(descriptor)


# --- the listener --------------------------------------------------------------------------------------------

# Kinds that are injected before the forward pass of their iteration, like flipped bits of weights and moments.
_AT_START = ("spike", "stoploader", "failloader", "stopwriter", "killwriter")


def is_after_backward(fault: Fault) -> bool:
    """Whether a fault of an iteration is injected between its backward pass and the reduction of the gradients."""
    return fault.kind not in _AT_START and fault.target in (None, "gradient")


@dataclass
class FaultInjection(Listener):
    """Injects faults into iterations and saves; the first listener, so that a save has a fault before it begins."""

    injector: FaultInjector
    config: CheckpointConfig
    sleep: Callable[[float], object] = time.sleep
    # The faults of this iteration.
    _due: list[Fault] = field(default_factory=list, init=False)
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
        # As if the rank were slow, or failed, in its forward and backward passes: the watchdog and the comparison of
        # ranks measure that section.
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
        for fault in filter(is_now, self._due):
            if fault.kind in EVENT_FAULTS:
                EVENT_FAULTS[fault.kind](fault)
            elif fault.kind in ITERATION_FAULTS:
                ITERATION_FAULTS[fault.kind](fault, trainer)

    def _end_save(self) -> None:
        if self._saves is not None:
            self._saves.end_save()

    def close(self) -> None:
        vars(loader)["read_sample"] = _READ
        if self._saves is not None:
            self._saves.disarm()


def _clock(trainer: Trainer) -> Callable[[], float]:
    """The clock of ``slow``: on a CPU the processor time, which does not count waits for other ranks."""
    return time.thread_time if trainer.context.topology.device.type == "cpu" else time.perf_counter
