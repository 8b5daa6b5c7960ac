"""Lines that fail in every way a line can on a GPU."""

import ctypes
import subprocess
import sys
import time
from unittest import mock

import torch

from benchmarks.gpu_lines import line_run
from benchmarks.gpu_lines.line_run import LineRun, require
from megatron.core.kernels.choice import Candidate, choose


def good(run: LineRun) -> None:
    with run.result() as figures:
        figures["mfu"] = 0.5


def slow(run: LineRun) -> None:
    with run.result() as figures:
        figures["mfu"] = 0.3


def hang(run: LineRun) -> None:
    with run.result("before") as figures:
        figures["kept"] = 1
    with run.result():
        time.sleep(600)


def hang_in_a_child(run: LineRun) -> None:
    code = f"import os, pathlib, time; pathlib.Path('{run.out}/child').write_text(str(os.getpid())); time.sleep(600)"
    with run.result():
        subprocess.run([sys.executable, "-c", code], check=True)


def crash(run: LineRun) -> None:
    with run.result():
        ctypes.string_at(0)


def out_of_memory(run: LineRun) -> None:
    with run.result():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def wrong(run: LineRun) -> None:
    with run.result("loss"):
        require(False, "losses differ by 1.0e-01, allowed are 1.0e-03")
    with run.result("after"):
        pass


def broken(run: LineRun) -> None:
    """The trial of a kernel ends with an error after which CUDA fails in the process."""

    def trial(kernel: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    triton = Candidate("triton", lambda: 1, "one pass", trial=trial, is_broken=lambda: True)
    with mock.patch.object(line_run, "device_is_broken", lambda: True):
        with run.result("kernels"):
            choose("rope", [triton, Candidate("eager", lambda: 2, "")], None)
        with run.result("after"):
            raise AssertionError("nothing runs after it")


def without_a_package(run: LineRun) -> None:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401
