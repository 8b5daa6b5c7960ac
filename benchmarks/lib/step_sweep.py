"""The rows of ``benchmark_step.py --sweep`` and of gpu_day.py, the most valuable first."""

from dataclasses import dataclass
from typing import Literal, get_args

SweepName = Literal["bf16", "fp8"]
SWEEPS: tuple[SweepName, ...] = get_args(SweepName)

SLICES = {
    "8B": "--model llama3.1-8b --num-layers 4",
    "8B with head and optimizer": "--model llama3.1-8b --num-layers 2 --with-head --with-optimizer",
    "70B TP4": "--model llama3.1-70b --num-layers 4 --tensor-model-parallel-size 4 --sequence-parallel",
    "405B TP8": "--model llama3.1-405b --num-layers 2 --tensor-model-parallel-size 8 --sequence-parallel",
}
"""The slices of the recipes, by the name of their row."""

LENGTH = "--seq-length 8192"

TINY = "--model tiny --num-query-groups 8 --num-layers 2 --seq-length 32 --vocab-size 256"
"""Replaces model and lengths in a rehearsal."""

EAGER = "--kernel rms_norm=eager swiglu=eager rope=eager cross_entropy=eager"


@dataclass(frozen=True)
class Row:
    """A measurement by the flags of benchmark_step.py."""

    name: str
    flags: tuple[str, ...]


def rows(sweep: SweepName, is_tiny: bool = False) -> list[Row]:
    """The rows of a sweep; tiny ones have the same names and tiny shapes."""
    found = _bf16() if sweep == "bf16" else _fp8()
    return [Row(name, tuple((shrunk(flags) if is_tiny else flags).split())) for name, flags in found.items()]


def shrunk(flags: str) -> str:
    """``flags`` with the tiny model in place of theirs."""
    words = flags.split()
    dropped = {"--model", "--num-layers", "--seq-length", "--documents"}
    rest = [
        word
        for place, word in enumerate(words)
        if word not in dropped and (place == 0 or words[place - 1] not in dropped)
    ]
    # Only kernels that a CPU has; a rehearsal compiles nothing.
    kept = " ".join(rest)
    for on_gpu, on_cpu in (
        ("cudnn", "cpu"),
        ("attention=flash", "attention=reference"),
        ("gradient=triton", "gradient=separate"),
    ):
        kept = kept.replace(on_gpu, on_cpu)
    documents = " --documents 8" if "--documents" in words else ""
    return f"{TINY} {kept.replace(' --compile', '')}{documents}"


def _bf16() -> dict[str, str]:
    found = {name: f"{flags} {LENGTH} --bf16" for name, flags in SLICES.items()}
    eight = found["8B"]
    for name in SLICES:
        found[f"{name}, micro-batch 2"] = f"{found[name]} --micro-batch-size 2"
    found["8B, 4 microbatches"] = f"{eight} --microbatches 4"
    for kernel in ("cudnn", "flash", "sdpa"):
        found[f"8B, attention {kernel}"] = f"{eight} --kernel attention={kernel}"
    found["8B, eager kernels"] = f"{eight} {EAGER}"
    found["8B, documents"] = f"{eight} --documents 1000"
    found["8B beside transformers"] = f"{eight} --compare transformers --compile"
    return found


def _fp8() -> dict[str, str]:
    recipes = {"delayed": "hybrid --fp8-recipe delayed", "tensorwise": "hybrid --fp8-recipe tensorwise"}
    found = {}
    # The first step of many microbatches overwrites the gradients, the others add to them.
    for count in (1, 4):
        for name in ("8B", "70B TP4", "405B TP8"):
            flags = f"{SLICES[name]} {LENGTH} --bf16 --microbatches {count}"
            suffix = f", {count} microbatches" if count > 1 else ""
            found[f"{name}, bf16{suffix}"] = flags
            for recipe, words in recipes.items():
                found[f"{name}, {recipe}{suffix}"] = f"{flags} --fp8-format {words}"
    with_optimizer = f"{SLICES['8B with head and optimizer']} {LENGTH} --bf16 --fp8-format {recipes['delayed']}"
    return found | {"8B with head and optimizer, delayed": with_optimizer}
