"""Launches of Triton kernels that compile for Hopper and run nothing, so that they need no GPU."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class CompiledLaunch:
    """A kernel as it was compiled for one launch."""

    name: str
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread, in local memory."""
    shared_bytes: int
    """Per program."""
    warps: int
    ptx: str


class Hopper:
    """Triton's driver of a Hopper GPU, as far as compilation reads it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(function: Callable[..., Any], *arguments: Any) -> list[CompiledLaunch]:
    """The kernels that ``function(*arguments)`` launches, compiled for these arguments, whose alignment counts.

    Tensors are on the CPU. Runs in a process without ``TRITON_INTERPRET``.
    """
    kernels = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(kernel, *arguments, grid=grid, warmup=True, **options))
        return kernels[-1]

    driver.set_active(Hopper())
    with mock.patch.object(JITFunction, "run", compile_only):
        function(*arguments)
    return [_usage(kernel) for kernel in kernels]


def _usage(kernel: Any) -> CompiledLaunch:
    # Triton itself reads registers and spills from a device.
    with TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [str(CUOBJDUMP), "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    counts = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return CompiledLaunch(
        kernel.name,
        counts["REG"],
        counts["STACK"] + counts["LOCAL"],
        # Shared memory of static size, and of the size that the launch asks for.
        counts["SHARED"] + kernel.metadata.shared,
        kernel.metadata.num_warps,
        kernel.asm["ptx"],
    )
