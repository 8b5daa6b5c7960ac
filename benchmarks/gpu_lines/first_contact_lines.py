"""The two calls of benchmarks/first_contact.py: the lines in the order of their value, each with the seconds that it is
expected to take on an H100, and its limit."""

from benchmarks.gpu_lines.line import Expectation, Line
from benchmarks.lib.step_sweep import LENGTH, SLICES

CALL_SECONDS = {1: 530.0, 2: 210.0}
"""Seconds for all lines of a call: a command may take 600 s on the machine, of which start and copies take some."""

_STEP = f"{LENGTH} --bf16 --warmup 2 --repeats 6"
_SLICES = {
    "8b": f"{SLICES['8B']} {_STEP} --microbatches 4",
    "70b-tp4": f"{SLICES['70B TP4']} {_STEP} --microbatches 4",
    "405b-tp8": f"{SLICES['405B TP8']} {_STEP} --microbatches 4",
}
_DELAYED = "--fp8-format hybrid --fp8-recipe delayed"
_TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"


def _step(
    name: str, flags: str, seconds: float, limit: float, expects: Expectation | None = None, answers: str = ""
) -> Line:
    return Line(name, "benchmarks.gpu_lines.steps.run", flags, seconds, limit, expects, answers=answers)


def _mfu(least: float, most: float) -> Expectation:
    return Expectation("mfu", least, most)


def _faster_than(line: str, least: float, most: float) -> Expectation:
    return Expectation("tokens_per_s", least, most, relative_to=line)


_REAL = "--model llama3.1-8b --num-layers 4 --vocab-size 128256 --seq-length 8192"
_PRECISIONS = "bf16 'FP8 delayed' fp64 'bf16, documents' 'FP8 tensorwise'"

CALL_1 = [
    Line("facts", "benchmarks.gpu_lines.facts.run", "", 25, 50, answers="the card's rates; compilers, disk, memlock"),
    Line(
        "tiny", "benchmarks.gpu_lines.tiny.run", _PRECISIONS, 65, 110, answers="a real run's losses are those of a CPU"
    ),
    _step("8b", f"{_SLICES['8b']} --compare transformers", 60, 90, _mfu(0.53, 0.62), "8B beside transformers"),
    _step("70b-tp4", _SLICES["70b-tp4"], 40, 60, _mfu(0.56, 0.68), "a rank of 70B"),
    _step("405b-tp8", _SLICES["405b-tp8"], 40, 60, _mfu(0.58, 0.71), "a rank of 405B"),
    _step("8b-fp8", f"{_SLICES['8b']} {_DELAYED}", 28, 45, _faster_than("8b", 1.2, 1.35), "FP8, delayed scaling"),
    _step("405b-fp8", f"{_SLICES['405b-tp8']} {_DELAYED}", 28, 45, _faster_than("405b-tp8", 1.3, 1.5)),
    _step("8b-tensorwise", f"{_SLICES['8b']} {_TENSORWISE}", 28, 45, _faster_than("8b", 1.1, 1.35)),
    _step(
        "8b-fp8-triton",
        f"{_SLICES['8b']} {_DELAYED} --kernel fp8_weight_gradient=triton",
        28,
        45,
        _faster_than("8b-fp8", 0.9, 1.1),
        "is Triton's accumulating weight gradient faster",
    ),
    Line(
        "real",
        "benchmarks.gpu_lines.real.profiled",
        _REAL,
        55,
        85,
        _mfu(0.45, 0.62),
        answers="a run at size: memory beside its plan, the GPU's busy share",
    ),
    Line(
        "experts", "benchmarks.gpu_lines.steps.experts", "mixtral-8x7b qwen3-30b-a3b", 25, 45, answers="grouped GEMMs"
    ),
    _step(
        "documents",
        f"{SLICES['8B']} {_STEP} --documents 1000",
        30,
        45,
        Expectation("speed / without documents", 0.9, 1.1),
        "attention inside documents",
    ),
    _step(
        "short",
        f"{SLICES['8B']} --seq-length 1024 --bf16 --warmup 2 --repeats 6",
        20,
        35,
        Expectation("ms_per_layer", 0.0, 4.0, better="lower"),
        "the host's time to launch a layer",
    ),
]


def _tests(name: str, rehearsal: str, arguments: str, answers: str) -> Line:
    flags = f"'{rehearsal}' {arguments}"
    return Line(name, "benchmarks.gpu_lines.pytest_lines.run", flags, 40, 60, resumes=True, answers=answers)


_WHOLE = "(flash or cudnn) and not varlen and whole and (8x4-1x8192 or 1x16-1x8192 or 8x4-2x1000)"
_IN_DOCUMENTS = "(flash or cudnn_varlen) and documents and 8x4-1x8192"

CALL_2 = [
    _tests(
        "products",
        "rehearsed and test_quantization",
        "tests/gpu/test_products.py tests/gpu/test_quantization.py",
        "weight gradients in place, FP8 GEMMs, quantisation bit for bit",
    ),
    _tests(
        "runs",
        "rehearsed and Adam",
        "tests/gpu/test_runs.py tests/gpu/test_staging_copies.py",
        "steps against fp64, NCCL of one rank, offload, pinned copies",
    ),
    _tests(
        "attention",
        "rehearsed and cpu and 1x2-1x24",
        f"tests/gpu/test_attention_of_runs.py -k '(({_WHOLE}) or ({_IN_DOCUMENTS}))'",
        "attention kernels at the sizes of runs",
    ),
    _tests(
        "determinism",
        "rehearsed and eager",
        "tests/gpu/test_repeated_bits.py",
        "kernels, forward and backward, whose bits repeat under --deterministic-mode",
    ),
    _tests(
        "ranks",
        "rehearsed and sequence",
        "tests/parallel/test_staged_layouts.py -k rehearsed",
        "two ranks on one GPU over gloo and pinned copies",
    ),
]

CALLS = {1: CALL_1, 2: CALL_2}
