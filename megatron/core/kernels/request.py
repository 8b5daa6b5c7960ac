"""What a run asks of kernels, and what the machine has for them."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.device import Compiler
from megatron.core.kernels.trials import Trials, TrialSizes

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine import TransformerEngine


Find = Callable[[str], object]
"""Finds a program or a module by its name; None if the machine does not have it."""


def missing_for_triton(find_program: Find = shutil.which, find_module: Find = importlib.util.find_spec) -> str | None:
    """What Triton's kernels need and the machine does not have; None if nothing."""
    if find_module("triton") is None:
        return "Triton, which is not installed"
    # Triton compiles its launchers.
    return _missing_compiler(find_program, "gcc", "clang", "cc")


def missing_for_inductor(
    on_gpu: bool, find_program: Find = shutil.which, find_module: Find = importlib.util.find_spec
) -> str | None:
    """What the kernels of ``torch.compile`` need and the machine does not have; None if nothing."""
    if on_gpu:
        return missing_for_triton(find_program, find_module)
    return _missing_compiler(find_program, "g++", "clang++", "c++")


def _missing_compiler(find_program: Find, *names: str) -> str | None:
    return None if any(find_program(name) for name in names) else f"a compiler ({', '.join(names)})"


@dataclass(frozen=True)
class Machine:
    """A device, and what this process has for kernels on it."""

    device: torch.device
    can_try: bool = False
    """Whether this process can run kernels on the GPU."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability, if this process can run kernels on the GPU."""
    missing_for_triton: str | None = None
    """What Triton's kernels need and the machine does not have; None if nothing."""
    missing_for_inductor: str | None = None
    """What the kernels of ``torch.compile`` need and the machine does not have; None if nothing."""
    simulated_compiler: Compiler | None = None
    """Makes one launch of a function on tensors without memory: kernels are simulated for a machine that is not here,
    whose packages and compilers are taken to be there. None: kernels run."""

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        """This machine."""
        on_gpu = device.type == "cuda"
        can_try = on_gpu and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if can_try else (0, 0)
        return cls(device, can_try, capability, missing_for_triton(), missing_for_inductor(on_gpu))

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def is_hopper(self) -> bool:
        """Whether the device is a Hopper GPU."""
        return self.capability[0] == 9


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer on one rank."""

    count: int
    hidden_size: int
    width: int
    """``f / etp``."""


@dataclass(frozen=True)
class KernelRequest:
    """The machine, dtypes and sizes that kernels must support."""

    machine: Machine
    weight: torch.dtype
    """Dtype of weights and activations."""
    gradient: torch.dtype
    """Dtype of gradient buffers."""
    sizes: TrialSizes
    needs_log_sum_exp: bool = False
    """Whether attention must return the log-sum-exp (context parallelism, CPU offload)."""
    masks_attention: bool = False
    """Whether attention stays inside documents, whose lengths differ in every microbatch, or inside chunks."""
    resets_positions: bool = False
    """Whether positions restart at documents, so that each sequence of a microbatch has its own rotations."""
    attention_backend: str = "auto"
    engine: "TransformerEngine | None" = None
    fp8: bool = False
    """Whether linear layers of this project compute in FP8."""
    has_delayed_scales: bool = False
    """Whether FP8 linear layers of this project quantise inputs with scales that are known before the inputs."""
    experts: ExpertSizes | None = None
    """The experts of a layer on this rank; None: the model has no experts."""
    trials: Trials = field(default_factory=Trials)

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.on_gpu

    def trial(self, trial: Callable[..., None], *arguments: Any) -> Callable[[Any], None] | None:
        """The ``trial`` of a kernel with further ``arguments``, if this process can run it."""
        return (lambda kernel: trial(kernel, *arguments)) if self.machine.can_try else None

    @cached_property
    def compiler_obstacle(self) -> str | None:
        """What ``torch.compile`` lacks, or why it fails on the device; None if it works. Tried once for all
        operations."""
        if self.machine.missing_for_inductor is not None:
            return f"torch.compile needs {self.machine.missing_for_inductor}"
        return self.trials.compiler(self.device) if self.machine.can_try else None
