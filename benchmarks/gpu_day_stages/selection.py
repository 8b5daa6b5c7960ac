"""The kernels that a run with each recipe's shapes uses on this device, and why not others."""

from benchmarks.benchmark_step import parse
from benchmarks.gpu_day_stages.checks import StageRun
from benchmarks.step_sweep import LENGTH, SLICES, shrunk


def run(stage: StageRun) -> None:
    for name, flags in SLICES.items():
        for documents in ("", " --documents 1000"):
            with stage.check(f"{name}{', documents' if documents else ''}") as figures:
                words = f"{flags} {LENGTH} --bf16{documents}"
                config = parse((shrunk(words) if stage.is_tiny else words).split()).slice
                config.check()
                chosen = config.choose_kernels(config.topology(stage.device))
                figures |= {choice.operation: f"{choice.implementation}: {choice.reason}" for choice in chosen.choices}
