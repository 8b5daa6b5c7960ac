"""The lines of benchmarks/gpu_day.py by stage, the most valuable stages first."""

from dataclasses import replace

from benchmarks import tiny_run
from benchmarks.benchmark_experts import SHAPES
from benchmarks.gpu_lines.line import Expectation, Line
from benchmarks.lib.step_sweep import SLICES, SweepName, rows

_TURNS = "--warmup 3 --repeats 10"
_DOCUMENTS = "--documents 1000"
_LAYOUTS = "tests/parallel/test_staged_layouts.py"
_AVOID_PLANS = {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}


def _line(name: str, function: str, flags: str, seconds: float, variables: dict[str, str] | None = None) -> Line:
    path = f"benchmarks.gpu_lines.{function}"
    return Line(name, path, flags, seconds, 2.5 * seconds, variables=variables or {})


def _tests(name: str, rehearsal: str, arguments: str, seconds: float, variables: dict[str, str] | None = None) -> Line:
    flags = f"'{rehearsal}' {arguments}"
    path = "benchmarks.gpu_lines.pytest_lines.run"
    return Line(name, path, flags, seconds, 2.5 * seconds, variables=variables or {}, resumes=True)


def _goals() -> dict[str, Expectation]:
    """What this code should reach on a Hopper GPU, whose dense peak in bf16 is 989 TFLOP/s."""
    found = {
        "bench/8B": Expectation("mfu", 0.60, 0.75),
        "bench/70B TP4": Expectation("mfu", 0.64, 0.75),
        "bench/405B TP8": Expectation("mfu", 0.67, 0.75),
        "bench/8B, documents": Expectation("speed / without documents", 0.95, 1.1),
    }
    for name, least in (("8B", 1.28), ("70B TP4", 1.40), ("405B TP8", 1.45)):
        in_bf16 = f"fp8/{name}, bf16, 4 microbatches"
        found[f"fp8/{name}, delayed, 4 microbatches"] = Expectation("tokens_per_s", least, 1.7, relative_to=in_bf16)
    return found


def _sweep(stage: str, sweep: SweepName) -> list[Line]:
    goals, lines = _goals(), []
    for row in rows(sweep):
        seconds = 120 if "--compile" in row.flags else 35
        line = _line(f"{stage}/{row.name}", "steps.run", f"{' '.join(row.flags)} {_TURNS}", seconds)
        lines.append(replace(line, expects=goals.get(line.name)))
    return lines


def _gpu_tests() -> list[Line]:
    attention = "tests/gpu/test_attention_of_runs.py"
    return [
        _tests("tests/products", "rehearsed and test_products", "tests/gpu/test_products.py", 25),
        _tests("tests/quantization", "rehearsed", "tests/gpu/test_quantization.py", 25),
        _tests(
            "tests/runs",
            "rehearsed and Muon",
            "tests/gpu/test_runs.py tests/gpu/test_staging_copies.py",
            50,
        ),
        _tests("tests/elementwise", "rehearsed and 24", "tests/gpu/test_elementwise.py", 80),
        _tests("tests/flash", "rehearsed and cpu and 1x2-1x24", f"{attention} -k flash", 60),
        _tests("tests/sdpa", "rehearsed and sdpa and 1x2-1x24", f"{attention} -k sdpa", 120),
        _tests("tests/cudnn", "rehearsed and reference and 1x2-1x24", f"{attention} -k cudnn", 200),
    ]


def _documents() -> list[Line]:
    cases: dict[str, tuple[str, dict[str, str]]] = {
        "whole sequences": ("", {}),
        "the kernel of a run": (_DOCUMENTS, {}),
        "flash": (f"{_DOCUMENTS} --kernel attention=flash", {}),
        "cudnn": (f"{_DOCUMENTS} --kernel attention=cudnn", {}),
        "cudnn, fewer plans": (f"{_DOCUMENTS} --kernel attention=cudnn", _AVOID_PLANS),
        "cudnn_varlen": (f"{_DOCUMENTS} --kernel attention=cudnn_varlen", {}),
        "sdpa": (f"{_DOCUMENTS} --kernel attention=sdpa", {}),
    }
    return [_line(f"documents/{name}", "steps.documents", flags, 60, more) for name, (flags, more) in cases.items()]


STAGES: dict[str, list[Line]] = {
    "facts": [_line("facts", "facts.run", "", 30)],
    "tests": _gpu_tests(),
    "tiny": [
        *(_line(f"tiny/{name}", "tiny.run", f"'{name}'", 20) for name in tiny_run.VARIANTS),
        _line("tiny/deterministic mode", "tiny.deterministic", "", 25),
        _line("tiny/killed and resumed", "tiny.killed", "", 40),
        _line("tiny/profile", "tiny.profiled", "", 25),
    ],
    "selection": [_line(f"selection/{name}", "steps.kernel_choices", flags, 40) for name, flags in SLICES.items()],
    "bench": _sweep("bench", "bf16"),
    "fp8": [
        # Widths of the first layer of the MLP.
        _line("fp8/parts of 8B", "steps.parts", f"4096 28672 {SLICES['8B']}", 20),
        _line("fp8/parts of 405B TP8", "steps.parts", f"16384 13312 {SLICES['405B TP8']}", 20),
        *_sweep("fp8", "fp8"),
    ],
    "experts": [_line(f"experts/{name}", "steps.experts", name, 20) for name in list(SHAPES)[2:]],
    "documents": _documents(),
    "ranks": [
        _tests("ranks/layouts", "rehearsed and sequence", f"{_LAYOUTS} --whole-matrix", 240),
        # Kernels one by one: what differs only without this is a missing order of streams.
        _tests(
            "ranks/blocking", "rehearsed and sequence", f"{_LAYOUTS} -k rehearsed", 60, {"CUDA_LAUNCH_BLOCKING": "1"}
        ),
        _tests(
            "ranks/sanitizer", "rehearsed and sequence", f"{_LAYOUTS} -k rehearsed", 90, {"TORCH_CUDA_SANITIZER": "1"}
        ),
    ],
    # Two layers and 16,000 ids, so that two checkpoints fit on the disk: 8 GB each.
    "real": [
        _line(
            "real/saves", "real.saved", "--model llama3.1-8b --num-layers 2 --seq-length 8192 --vocab-size 16000", 150
        ),
    ],
}
"""The lines of every stage; their names begin with the stage's."""
LINES = [line for lines in STAGES.values() for line in lines]
