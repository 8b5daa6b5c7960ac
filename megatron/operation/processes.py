"""The process of a rank: its end with its parent, its cores, and the variables that CUDA and torch read when they
start, which follow from the layout of the run."""

import ctypes
import gc
import os
import signal
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.run import RunConfig

# Environment variable with the process id of megatron.operation.launch, for its ranks.
LAUNCHER = "MEGATRON_LAUNCHER_PID"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# Two ranks of a gloo group connect at the first message between them. Otherwise every rank connects to all others: of
# 16,384 ranks each would have 16,383 connections, only for the control group.
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
# CUDA's default.
SEVERAL = 8
# Inductor's default for a process on a machine with as many cores.
MOST_COMPILE_THREADS = 32


def die_with_parent(ancestor: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends for any reason (Linux).

    Exits immediately if the parent, or the process ``ancestor``, has already ended. The kernel acts when the *thread*
    that started this process ends, so that thread must live as long as the parent. Forked children do not inherit the
    setting.
    """
    parent = os.getppid()
    with suppress(AttributeError):  # no prctl in this C library
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent or not (ancestor is None or is_running(ancestor)):
        os._exit(1)


@contextmanager
def collection_paused(freeze: bool) -> Iterator[None]:
    """Import without garbage collection, which finds nothing then and costs a quarter of the time. ``freeze`` also
    excludes from later collections what exists in the end: only for a process in which that stays for good."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


def available_cores() -> int:
    """Cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def stat_of(pid: int | str, proc: str = "/proc") -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third on: state, parent, ... (proc(5)); empty if the process has ended
    or there is no ``/proc``."""
    with suppress(OSError):
        # "pid (name) state parent ...": the name may contain blanks and parentheses.
        return Path(f"{proc}/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


# --- environment ---------------------------------------------------------------------------------------------
#
# CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues of a GPU. In one queue kernels start in the order in
# which the host launched them, and one that waits for another stream blocks all later ones. With several queues, a
# GEMM that was launched after a collective may occupy all multiprocessors before the collective starts.


@dataclass(frozen=True)
class HardwareQueues:
    """The number of hardware queues of a GPU, for the log."""

    connections: int
    is_given: bool
    """Whether the user has set the variable."""
    reasons: tuple[str, ...]
    """Overlaps that need this number."""
    hindered: tuple[str, ...]
    """Overlaps that need another number."""

    @property
    def is_mistake(self) -> bool:
        """Whether another number would be better for all overlaps that need one."""
        return self.is_given and bool(self.hindered) and not self.reasons

    def describe(self) -> str:
        source = "set by the user" if self.is_given else f"for {', '.join(self.reasons) or 'no overlap in particular'}"
        text = f"hardware queues of the GPU: {self.connections} ({CONNECTIONS}, {source})"
        if not self.hindered:
            return text
        effect = "does not overlap" if self.connections == 1 else "may start late"
        remedy = f": unset {CONNECTIONS}" if self.is_mistake else ""
        return f"{text}; with it {', '.join(self.hindered)} {effect}{remedy}"


def choose_hardware_queues(config: "RunConfig", given: str | None = None) -> HardwareQueues:
    """The number of hardware queues for the overlaps of ``config``; ``given`` is the user's value of the variable.

    Megatron-LM requires 1 for tensor and context parallelism up to Hopper, and several for FSDP. If both are used,
    several are better: in one queue all-gathers, reduce-scatters and copies of FSDP and of offloading do not overlap at
    all. Raises :class:`ConfigError` if ``given`` is not a number that CUDA accepts.
    """
    in_order, concurrent = _overlaps_in_order(config), _concurrent_overlaps(config)
    connections = SEVERAL if concurrent or not in_order else 1
    if given is not None:
        if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= 32:
            raise ConfigError(f"{CONNECTIONS}={given} is not a number from 1 to 32: unset it, or correct it.")
        connections = int(given)
    needed, hindered = (in_order, concurrent) if connections == 1 else (concurrent, in_order)
    return HardwareQueues(connections, given is not None, needed, hindered)


def _overlaps_in_order(config: "RunConfig") -> tuple[str, ...]:
    """Collectives that must start before the kernels that are launched after them."""
    parallel, found = config.parallel, []
    if parallel.tensor_model_parallel_size > 1 and not _uses_symmetric_memory(config):
        found.append("tensor parallelism")  # the reduction of the input gradient, before the weight-gradient GEMM
    if parallel.context_parallel_size > 1:
        found.append("context parallelism")  # the exchange of keys and values, before the attention of a tile
    return tuple(found)


def _concurrent_overlaps(config: "RunConfig") -> tuple[str, ...]:
    """Streams that wait for each other while computation continues."""
    found = []
    if config.parallel.sharding_strategy == "optim_grads_params":
        found.append("FSDP2")  # the copies into and out of the buffers of the all-gather, and the reduce-scatter
    if _uses_symmetric_memory(config):
        found.append("--tp-comm-overlap")  # alternates GEMM, barrier and copy on two streams
    if config.activations.cpu_offloading_num_layers:
        found.append("--cpu-offloading-num-layers")  # a copy to the host waits for the copy before it
    return tuple(found)


def _uses_symmetric_memory(config: "RunConfig") -> bool:
    """Whether torch's asynchronous tensor parallelism may run: not under Transformer Engine or in FP8 layers."""
    return (
        config.parallel.tensor_model_parallel_size > 1
        and config.parallel.tp_comm_overlap
        and config.model.transformer_impl == "local"
        and config.precision.fp8_format is None
    )


def compile_threads(num_cores: int, local_world_size: int) -> int:
    """Worker processes with which Inductor compiles kernels, per rank: the ranks of a node share its cores."""
    return max(1, min(MOST_COMPILE_THREADS, num_cores // local_world_size))


def prepare_environment(
    config: "RunConfig", environment: MutableMapping[str, str], num_cores: int, local_world_size: int
) -> HardwareQueues:
    """Set the variables that the user has not set. Call it before torch is imported and CUDA starts."""
    queues = choose_hardware_queues(config, environment.get(CONNECTIONS))
    environment[CONNECTIONS] = str(queues.connections)
    environment.setdefault(LAZY_CONNECTIONS, "1")
    environment.setdefault(COMPILE_THREADS, str(compile_threads(num_cores, local_world_size)))
    return queues
