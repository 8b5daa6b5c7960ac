"""Faults that a run injects into itself (``--inject-fault``): the table of their effects, and when they are due.

``megatron/features/faults/flags.py`` has the grammar. The faults that were injected are recorded in the run directory, so that
a restart does not repeat them:

    RUN_DIR/injected_faults.jsonl    {"fault": "kill@12:rank1", "rank": 1, "number": 12, "time": ..., "monotonic": ...}
"""

import ctypes
import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.features.faults.flags import SAVE, Fault

FILE = "injected_faults.jsonl"
_WRITER = "megatron.checkpoint.background_main"
_TOO_MUCH = 1 << 60  # bytes; more than an address space


class InjectedError(RuntimeError):
    """The exception of the fault ``exception``, and of a fault that cannot be injected."""


@dataclass(frozen=True)
class Site:
    """What faults of an iteration act on: a rank's parts of the run."""

    world: Communicator
    device: torch.device
    data_parallel: DataParallel
    optimizer: Optimizer


@dataclass
class FaultInjector:
    """Decides which faults of this rank are due, and records them."""

    faults: Sequence[Fault] = ()
    rank: int = 0
    directory: Path | None = None
    """Directory of the record; needed if there are faults."""
    _is_active: dict[Fault, bool] = field(default_factory=dict, init=False)
    """Whether this attempt injects a fault, from the first moment at which it was due."""

    def due(self, moment: str, number: int = 1) -> list[Fault]:
        """The faults of this rank at this moment, which are recorded and logged."""
        found = [fault for fault in self.faults if fault.rank in (None, self.rank) and fault.covers(moment, number)]
        return [fault for fault in found if self._begin(fault, number)]

    def reach(self, moment: str) -> None:
        """Inject the faults of ``load`` or ``start``."""
        for fault in self.due(moment):
            EVENT_FAULTS[fault.kind](fault)

    def _begin(self, fault: Fault, number: int) -> bool:
        if fault not in self._is_active:
            assert self.directory is not None
            path = self.directory / FILE
            past = sum(entry == (str(fault), self.rank) for entry in injected(path))
            self._is_active[fault] = fault.times is None or past < fault.times
            if self._is_active[fault]:
                self._record(path, fault, number)
        return self._is_active[fault]

    def _record(self, path: Path, fault: Fault, number: int) -> None:
        """Before the fault, since it may end this process."""
        entry = {"fault": str(fault), "rank": self.rank, "number": number}
        entry |= {"time": time.time(), "monotonic": time.monotonic()}
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, f"{json.dumps(entry)}\n".encode())
        finally:
            os.close(descriptor)
        print(f"INJECTED FAULT: {fault} on rank {self.rank}", file=sys.stderr, flush=True)


def injected(path: Path) -> Iterator[tuple[str, int]]:
    """(fault, rank) of every fault that the file records."""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                yield entry["fault"], entry["rank"]


# --- faults of the process -----------------------------------------------------------------------------------


def signal_self(number: signal.Signals, fault: Fault) -> None:
    os.kill(os.getpid(), number)


def exit_at_once(fault: Fault) -> NoReturn:
    assert fault.number is not None
    os._exit(int(fault.number))


def raise_exception(fault: Fault) -> NoReturn:
    raise InjectedError(f"Injected fault: {fault}")


def run_out_of_memory(fault: Fault) -> None:
    torch.empty(_TOO_MUCH, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")


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
    """Read a FIFO to which nobody writes. It has no name any more, so nothing remains of it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fifo"
        os.mkfifo(path)
        descriptor = os.open(path, os.O_RDWR)  # without O_RDWR it would wait here, and the FIFO would remain
    while True:
        os.read(descriptor, 1)


EVENT_FAULTS: Mapping[str, Callable[[Fault], None]] = {
    "kill": partial(signal_self, signal.SIGKILL),
    "stop": partial(signal_self, signal.SIGSTOP),
    "sigterm": partial(signal_self, signal.SIGTERM),
    "exit": exit_at_once,
    "exception": raise_exception,
    "oom": run_out_of_memory,
    "sleep": sleep,
    "gil": hold_interpreter_lock,
    "fifo": read_silent_file,
}
"""Faults that can be injected anywhere."""


# --- faults of an iteration ----------------------------------------------------------------------------------


def call_wrong_collective(fault: Fault, site: Site) -> None:
    site.world.all_reduce(torch.zeros(7, device=site.device))


def flip_bit(fault: Fault, site: Site) -> None:
    """Flip the bit of one element."""
    assert fault.number is not None and fault.target is not None
    tensor, index = _choose_element(fault, fault.target, site)
    if fault.number >= 8 * tensor.itemsize:
        raise InjectedError(f"{fault}: an element has {8 * tensor.itemsize} bits.")
    flip(tensor, index, int(fault.number))


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip ``bit`` (0 is the lowest) of element ``index`` of a 1-D tensor."""
    byte, bit = divmod(bit, 8)
    octet = tensor.detach()[index : index + 1].view(torch.uint8)[byte if sys.byteorder == "little" else -1 - byte]
    octet.bitwise_xor_(1 << bit)


def spoil_gradient(fault: Fault, site: Site) -> None:
    tensor, index = _choose_element(fault, "gradient", site)
    tensor[index] = float("nan")


def _choose_element(fault: Fault, target: str, site: Site) -> tuple[Tensor, int]:
    """A 1-D tensor and the index of an element, which is not padding. The choice depends on the fault alone."""
    chance = random.Random(str(fault))
    ranges = [
        (tensor, begin - start, end - start)
        for info, start, tensor in _tensors(target, site)
        for _, begin, end in flat_range_boxes(info, start, start + tensor.numel())
    ]
    if not ranges:
        raise InjectedError(f"{fault}: this rank has no {target}.")
    tensor, begin, end = ranges[chance.randrange(len(ranges))]
    return tensor, chance.randrange(begin, end)


def _tensors(target: str, site: Site) -> list[tuple[ParameterInfo, int, Tensor]]:
    """Parts of flattened parameters that this rank stores: (parameter, first element, 1-D tensor)."""
    if target == "weight":
        return [(local.info, local.start, local.tensor) for local in site.data_parallel.local_params]
    if target == "gradient":
        return [(shard.info, shard.start, shard.gradient) for shard in site.data_parallel.param_shards]
    states = [state for state in site.optimizer.state() if (state.kind == "master") == (target == "master")]
    return [(state.info, state.start, state.tensor.view(-1)) for state in states]


def signal_loaders(number: signal.Signals, fault: Fault, site: Site) -> None:
    _signal_all([child.pid for child in multiprocessing.active_children()], number, fault, "loader process")


def signal_writer(number: signal.Signals, fault: Fault, site: Site) -> None:
    _signal_all(_children(_WRITER), number, fault, "background writer")


def _signal_all(pids: Sequence[int | None], number: signal.Signals, fault: Fault, kind: str) -> None:
    if not pids:
        raise InjectedError(f"{fault}: this rank has no {kind} yet.")
    for pid in pids:
        assert pid is not None
        os.kill(pid, number)


def _children(module: str) -> list[int]:
    """Child processes that run this module (Linux)."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.append(int(pid))
    return found


ITERATION_FAULTS: Mapping[str, Callable[[Fault, Site], None]] = {
    "collective": call_wrong_collective,
    "flip": flip_bit,
    "nan": spoil_gradient,
    "stoploader": partial(signal_loaders, signal.SIGSTOP),
    "killloader": partial(signal_loaders, signal.SIGKILL),
    "stopwriter": partial(signal_writer, signal.SIGSTOP),
    "killwriter": partial(signal_writer, signal.SIGKILL),
}
"""Faults that act on the rank's parts of the run. ``slow``, ``delay`` and ``spike`` are in the listener."""


# --- faults of a save ----------------------------------------------------------------------------------------


def fail_sync(number: int, fault: Fault) -> NoReturn:
    raise OSError(number, os.strerror(number))


SAVE_FAULTS: Mapping[str, Callable[[Fault], None]] = {
    **EVENT_FAULTS,
    "enospc": partial(fail_sync, errno.ENOSPC),
    "eio": partial(fail_sync, errno.EIO),
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

    def begin_save(self) -> None:
        """Before a save of this attempt."""
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
        """Inject nothing more."""
        vars(os)["fsync"] = self._sync
        self._armed = []

    def _synced(self, descriptor: int) -> None:
        if self._armed and self._is_in_checkpoint(descriptor):
            armed, self._armed = self._armed, []
            for fault in armed:
                SAVE_FAULTS[fault.kind](fault)
        self._sync(descriptor)

    def _is_in_checkpoint(self, descriptor: int) -> bool:
        """Whether the file lies in a directory below the root: not a file of the run, such as the tracker."""
        return self._root in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.parents
