"""What Triton and ``torch.compile`` need on a machine."""

import importlib.util
import shutil


def missing_for_triton() -> str | None:
    """What Triton's kernels need and the machine does not have; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton, which is not installed"
    # Triton compiles its launchers.
    return _missing_compiler("gcc", "clang", "cc")


def missing_for_inductor(on_gpu: bool) -> str | None:
    """What the kernels of ``torch.compile`` need and the machine does not have; None if nothing."""
    return missing_for_triton() if on_gpu else _missing_compiler("g++", "clang++", "c++")


def _missing_compiler(*names: str) -> str | None:
    return None if any(shutil.which(name) for name in names) else f"a compiler ({', '.join(names)})"
