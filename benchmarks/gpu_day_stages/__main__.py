"""Run one stage in this process: ``python -m benchmarks.gpu_day_stages STAGE --out DIR --device cuda``."""

import argparse
import importlib
import os
from pathlib import Path

from benchmarks.gpu_day_stages.checks import Check, StageRun, append
from megatron.training.initialize import Process, choose_device, prepare_cpu

RUNS = {
    "facts": ("facts", "run"),
    "tests": ("pytest_stages", "run_tests"),
    "tiny": ("tiny", "run"),
    "selection": ("selection", "run"),
    "bench": ("sweep", "run_bf16"),
    "fp8": ("sweep", "run_fp8"),
    "documents": ("documents", "run"),
    "ranks": ("pytest_stages", "run_ranks"),
    "real": ("real", "run"),
}
"""The module and the function of every stage. Only the module of the stage is imported, so that a package that another
stage needs may be absent."""


def run_stage(stage: StageRun) -> None:
    """Run ``stage``; a package that its module needs and that is not installed is a failed check."""
    module, function = RUNS[stage.name]
    try:
        run = getattr(importlib.import_module(f"benchmarks.gpu_day_stages.{module}"), function)
    except ModuleNotFoundError as error:
        append(stage.out, Check(stage.name, "packages", False, error=f"the stage needs {error.name}: install it"))
    else:
        run(stage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=RUNS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    flags = parser.parse_args()
    process = Process.from_environment(os.environ)
    device = choose_device(flags.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    run_stage(StageRun(flags.stage, flags.out, device, flags.tiny))


if __name__ == "__main__":
    main()
