"""The kernels that a run with each recipe's shapes uses on this device, and why not others."""

from benchmarks.benchmark_step import parse
from benchmarks.gpu_lines.line_run import LineRun
from benchmarks.lib.step_sweep import LENGTH, shrunk

VARIANTS = {
    "bf16": "--bf16",
    "documents": "--bf16 --documents 1000",
    "FP8 delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "FP8 tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
}


def run(run: LineRun, *flags: str) -> None:
    for name, variant in VARIANTS.items():
        with run.result(name) as figures:
            words = f"{' '.join(flags)} {LENGTH} {variant}"
            config = parse((shrunk(words) if run.is_tiny else words).split()).slice
            config.check()
            chosen = config.choose_kernels(config.topology(run.device))
            figures |= {choice.operation: f"{choice.implementation}: {choice.reason}" for choice in chosen.choices}
