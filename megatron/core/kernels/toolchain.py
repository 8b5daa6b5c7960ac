"""What Triton and ``torch.compile`` need on a machine."""

import importlib.util
import shutil
from collections.abc import Callable

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
