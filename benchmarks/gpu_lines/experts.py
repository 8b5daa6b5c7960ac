"""The experts of a layer with every grouped GEMM, beside a dense MLP of equal FLOPs."""

from statistics import median

from benchmarks.benchmark_experts import DTYPES, SHAPES, Options, measure
from benchmarks.gpu_lines.line_run import LineRun

TINY = "E8 k2"


def run(run: LineRun, *shapes: str) -> None:
    repeats, warmup = (1, 1) if run.is_tiny else (15, 4)
    options = Options(device=run.device.type, repeats=repeats, warmup=warmup)
    for name in shapes:
        with run.result(name) as figures:
            times = measure(SHAPES[TINY if run.is_tiny else name], DTYPES["bf16"], options)
            dense = times["dense MLP"]
            for contender, seconds in times.items():
                figures[f"{contender}, ms"] = 1e3 * median(seconds)
                figures[f"{contender}, speed"] = median(one / other for one, other in zip(dense, seconds, strict=True))
