#!/usr/bin/env python3
"""A training run of seconds in every precision, whose losses on a CPU are stored in the repository.

A GPU must reproduce them: benchmarks/first_contact.py and gpu_day.py compare. The run trains 20 steps of a Llama with
two layers through pretrain_llama.py, on --mock-data, whose samples are a pure function of seed and index. Write the
losses again with

    OMP_NUM_THREADS=1 python benchmarks/tiny_run.py
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.lib.results import complete_records
from megatron.commands import pretrain_llama
from megatron.errors import ExitCode

LOSSES = Path(__file__).parent / "data" / "tiny_run.json"
STEPS = 20

_RUN = f"""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
    --mock-data --vocab-size 120 --make-vocab-size-divisible-by 16 --seq-length 64 --num-workers 0
    --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} --lr 1e-2 --lr-warmup-iters 4 --weight-decay 0.1
    --log-interval 1 --peak-tflops 1
"""
_DOCUMENTS = "--reset-attention-mask --reset-position-ids"
_FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"


@dataclass(frozen=True)
class Variant:
    """Flags of a run, and how far its losses may be from stored losses."""

    flags: str
    reference: str
    """The variant whose stored losses it must have."""
    tolerance: float | None = None
    """Relative, of every loss; None: :func:`band` of the stored losses."""


VARIANTS: Mapping[str, Variant] = {
    "fp64": Variant("--fp64", "fp64", 1e-9),
    "fp64, documents": Variant(f"--fp64 {_DOCUMENTS}", "fp64, documents", 1e-9),
    # What is recomputed or copied to the host and back is the same number.
    "fp64, recompute": Variant("--fp64 --recompute-granularity full --recompute-method uniform", "fp64", 1e-9),
    "fp64, offload": Variant("--fp64 --cpu-offloading-num-layers 2", "fp64", 1e-9),
    "fp32": Variant("", "fp64", 1e-4),
    "bf16": Variant("--bf16", "bf16"),
    "bf16, documents": Variant(f"--bf16 {_DOCUMENTS}", "bf16, documents"),
    "bf16, offload": Variant("--bf16 --cpu-offloading-num-layers 2", "bf16"),
    "bf16, recompute": Variant("--bf16 --recompute-granularity selective --recompute-modules core_attn mlp", "bf16"),
    "FP8 delayed": Variant(f"{_FP8} delayed", "FP8 delayed"),
    "FP8 tensorwise": Variant(f"{_FP8} tensorwise", "FP8 tensorwise"),
}
"""Kernels sum in different orders, so in bf16 and FP8 the losses of two devices agree no better than the precision's
losses agree with fp64's (:func:`band`)."""


def flags_of(variant: str, device: str, *more: object) -> list[str]:
    """The command line of a variant."""
    words = f"{_RUN} {VARIANTS[variant].flags} --device {device}".split()
    if "uniform" in words:
        words += ["--recompute-num-layers", "1"]
    return [*words, *map(str, more)]


def losses_of(metrics: Path) -> list[float]:
    """The loss of every step that a metrics file has; the run may be writing it, or not have begun to."""
    return [record["lm_loss"] for record in complete_records(metrics) if "lm_loss" in record]


def train(variant: str, device: str, *more: object) -> list[float]:
    """Losses of the steps of a variant, with further flags; run in this process."""
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        call(flags_of(variant, device, "--metrics-jsonl", metrics, *more))
        return losses_of(metrics)


class Echo(io.StringIO):
    """Keeps what is written, and writes it to ``stream`` at once, so that the output of a run that hangs is not
    lost."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


def call(flags: Sequence[str]) -> str:
    """Run pretrain_llama.py in this process; what it has printed. Raises :class:`RuntimeError` unless it completes."""
    # Functions that were compiled for another precision count for torch's limit of recompilations.
    torch.compiler.reset()
    printed, errors = Echo(sys.stdout), Echo(sys.stderr)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        exit_code = pretrain_llama.main(flags)
    if exit_code != ExitCode.COMPLETE:
        last = errors.getvalue().strip().splitlines()[-1:]
        raise RuntimeError(f"the run ended with exit code {exit_code}: {' '.join(last)}")
    return printed.getvalue()


def stored_losses() -> dict[str, list[float]]:
    """The losses on a CPU, by variant."""
    losses: dict[str, list[float]] = json.loads(LOSSES.read_text(encoding="utf-8"))["losses"]
    return losses


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; infinite if one is not finite or their lengths differ."""
    if len(found) != len(wanted):
        return float("inf")
    largest = max(abs(one - other) / abs(other) for one, other in zip(found, wanted))
    return largest if largest == largest else float("inf")


def band(variant: str, stored: Mapping[str, Sequence[float]]) -> float:
    """The tolerance of a variant's losses.

    In bf16 and FP8: twice the largest difference of the precision's stored losses from fp64's. Both devices round as
    often, so each is about as far from fp64 as the other, in directions of its own; a run without its document mask is
    much farther.
    """
    tolerance = VARIANTS[variant].tolerance
    if tolerance is not None:
        return tolerance
    precision = VARIANTS[variant].reference[:3]
    exact = {name: stored["fp64, documents" if "documents" in name else "fp64"] for name in stored}
    return 2.0 * max(difference(stored[name], exact[name]) for name in stored if name.startswith(precision))


def main() -> int:
    """Write :data:`LOSSES`."""
    references = dict.fromkeys(variant.reference for variant in VARIANTS.values())
    losses = {name: train(name, "cpu") for name in references}
    content = {"command": "OMP_NUM_THREADS=1 python benchmarks/tiny_run.py", "torch": torch.__version__}
    LOSSES.write_text(json.dumps(content | {"losses": losses}, indent=1) + "\n", encoding="utf-8")
    for name, variant in VARIANTS.items():
        found = losses.get(name) or train(name, "cpu")
        off = difference(found, losses[variant.reference])
        allowed = band(name, losses)
        print(f"{name}: {found[0]:.4f} to {found[-1]:.4f}, {off:.1e} from the stored losses, allowed {allowed:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
