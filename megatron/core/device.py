"""A device: its name, the memory that torch has allocated on it, copies to it, and what kernels need there."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def peak_memory(device: torch.device) -> dict[str, float]:
    """``peak_memory_gib``: the most that torch's GPU allocator has handed out so far; empty on a CPU."""
    return {} if device.type == "cpu" else {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}


def device_memory(device: torch.device) -> dict[str, float]:
    """Statistics of torch's GPU allocator under Megatron-LM's keys; empty on a CPU."""
    if device.type == "cpu":
        return {}
    counts = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": counts["reserved_bytes.all.current"],
        "mem-allocated-bytes": counts["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": counts["allocated_bytes.all.peak"],
        "mem-allocated-count": counts["allocation.all.current"],
    }


def memory_outside_allocator(device: torch.device) -> int:
    """Bytes in use on a GPU outside of torch's allocator: CUDA's context and kernels, NCCL, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def device_is_broken() -> bool:
    """Whether CUDA has failed in this process with an error that it returns from now on (an illegal address, an
    assertion in a kernel): only a new process can use the GPU again."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type != "cpu" else None


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to ``device``. The host does not wait, since the source of the copy is pinned."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Unavailable(Exception):
    """Why an implementation cannot be used here: half a sentence."""


def load(module: str, package: str) -> Any:
    """The ``module`` of ``package``; raises :class:`Unavailable`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise Unavailable(f"{package} is not installed (no module {module})") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"{package} is installed but cannot be imported ({error})") from error


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function with the same results that launches one kernel; its arguments are positional."""


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through ``torch.compile``."""
    return torch.compile(function, fullgraph=True)


Find = Callable[[str], object]
"""Finds a program or a module by its name; None if there is none."""


def missing_for_triton(find_program: Find = shutil.which, find_module: Find = importlib.util.find_spec) -> str | None:
    """The program or package that Triton's kernels lack on this machine; None if they run."""
    if find_module("triton") is None:
        return "Triton, which is not installed"
    # Triton compiles its launchers.
    return _missing_compiler(find_program, "gcc", "clang", "cc")


def missing_for_inductor(
    on_gpu: bool, find_program: Find = shutil.which, find_module: Find = importlib.util.find_spec
) -> str | None:
    """The program or package that ``torch.compile`` lacks on this machine; None if it works."""
    if on_gpu:
        return missing_for_triton(find_program, find_module)
    return _missing_compiler(find_program, "g++", "clang++", "c++")


def _missing_compiler(find_program: Find, *names: str) -> str | None:
    return None if any(find_program(name) for name in names) else f"a compiler ({', '.join(names)})"


@dataclass(frozen=True)
class Machine:
    """A device, and the compilers for kernels on it."""

    device: torch.device
    can_try: bool = False
    """Whether this process can run kernels on the GPU."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability, if this process can run kernels on the GPU."""
    missing_for_triton: str | None = None
    """See :func:`missing_for_triton`."""
    missing_for_inductor: str | None = None
    simulated_compiler: Compiler | None = None
    """Makes one launch of a function on tensors without memory: kernels are simulated for another machine, which is
    assumed to have all packages and compilers. None: kernels run."""

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        on_gpu = device.type == "cuda"
        can_try = on_gpu and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if can_try else (0, 0)
        return cls(device, can_try, capability, missing_for_triton(), missing_for_inductor(on_gpu))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_hopper(self) -> bool:
        return self.capability[0] == 9
