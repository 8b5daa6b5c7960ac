"""Run one line in this process: ``python -m benchmarks.gpu_lines LINE --out DIR --device cuda --seconds 60``, where
``LINE`` is JSON (:class:`~benchmarks.gpu_lines.line.Line`)."""

import argparse
import faulthandler
import importlib
import json
import os
import resource
import shlex
import time
from pathlib import Path

import torch

from benchmarks.gpu_lines.line import PROCESS, Figures, Line, Result, Verdict, append
from benchmarks.gpu_lines.line_run import LineRun, place_of, verdict_of
from benchmarks.lib.results import error_line
from megatron.core.device import device_is_broken, memory_outside_allocator
from megatron.training.initialize import Process, choose_device, prepare_cpu


def run_line(run: LineRun) -> None:
    """Call the line's function. An error outside of its results is a result, too."""
    module, _, function = run.line.function.rpartition(".")
    try:
        # Only the module of the line is imported, so that a package that another line needs may be absent.
        call = getattr(importlib.import_module(module), function)
        call(run, *shlex.split(run.line.flags))
    except ModuleNotFoundError as error:
        append(run.out, Result(run.line.name, run.line.name, Verdict.CRASHED, error=f"it needs {error.name}"))
    except Exception as error:
        verdict, place = verdict_of(error), place_of(error.__traceback__)
        append(run.out, Result(run.line.name, run.line.name, verdict, error=error_line(error), where=place))
    finally:
        append(run.out, Result(run.line.name, PROCESS, Verdict.RIGHT, memory(run.device)))


def memory(device: torch.device) -> Figures:
    """The largest memory of this process: on a GPU of torch's allocator, and what is outside of it now."""
    if device.type != "cuda":
        return {"peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if not torch.cuda.is_initialized() or device_is_broken():
        return {}
    return {
        "peak_memory_bytes": torch.cuda.max_memory_reserved(device),
        "outside_allocator_bytes": memory_outside_allocator(device),
    }


def run_in_this_process(line: Line, out: Path, device_name: str, is_tiny: bool, seconds: float) -> None:
    """Run ``line``, which is ended after ``seconds``. Its stacks are printed if it crashes, and when it is ended
    (SIGABRT, which works while Python waits in a driver)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    process = Process.from_environment(os.environ)
    device = choose_device(device_name, process)
    if device.type == "cpu":
        prepare_cpu(process)
    run_line(LineRun(line, out, device, is_tiny, time.monotonic() + seconds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_lines", description=__doc__)
    parser.add_argument("line", help="the line, in JSON")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="the line is ended after them")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny shapes")
    flags = parser.parse_args()
    run_in_this_process(Line.from_json(json.loads(flags.line)), flags.out, flags.device, flags.tiny, flags.seconds)


if __name__ == "__main__":
    main()
