"""The arithmetic of large-scale training: compute, memory, communication. docs/arithmetic.md has formulas and sources.

python tools/estimate.py compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 400
python tools/estimate.py memory --parameters 175e9 --gradient-bytes 4
python tools/estimate.py communication --size-gb 16 --ranks 64 --gb-per-s 50
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from megatron.errors import UserError
from megatron.flags import require_at_least, require_positive, values_of
from megatron.planner import arithmetic


@dataclass(frozen=True)
class Compute:
    """FLOPs, time and GPU-hours of a training run."""

    parameters: float
    """Parameters of the model; of one with experts the active ones."""
    tokens: float
    """Tokens of the run."""
    gpus: int = 1
    tflops: float = 400.0
    """Average TFLOP/s of a GPU; over a whole run, interruptions included, it is lower than that of a step."""
    price_per_gpu_hour: float | None = None

    def check(self) -> None:
        require_positive(values_of(self, "parameters", "tokens", "tflops", "price_per_gpu_hour"))
        require_at_least(1, values_of(self, "gpus"))

    def lines(self) -> Iterator[tuple[str, str]]:
        flops = arithmetic.training_flops(self.parameters, self.tokens)
        seconds = arithmetic.training_seconds(flops, self.gpus, self.tflops * 1e12)
        hours = arithmetic.gpu_hours(flops, self.tflops * 1e12)
        yield "FLOPs (6 N D)", f"{flops:.4g}"
        yield "days", f"{seconds / arithmetic.DAY:,.1f}"
        yield "GPU-hours", f"{hours:,.0f}"
        if self.price_per_gpu_hour is not None:
            yield "price", f"{hours * self.price_per_gpu_hour:,.0f}"


@dataclass(frozen=True)
class Memory:
    """Bytes of weights, gradients and optimizer state."""

    parameters: float
    """Parameters of the model, or of a rank's part of it."""
    zero: arithmetic.Zero = 0
    """Stage of ZeRO."""
    ranks: int = 1
    """Data-parallel ranks."""
    gradient_bytes: float = 2.0
    """Bytes of a gradient: 4 in fp32."""

    def check(self) -> None:
        require_positive(values_of(self, "parameters", "gradient_bytes"))
        require_at_least(1, values_of(self, "ranks"))

    def lines(self) -> Iterator[tuple[str, str]]:
        per_parameter = arithmetic.state_bytes_per_parameter(self.zero, self.ranks, gradient=self.gradient_bytes)
        total = per_parameter * self.parameters
        yield "bytes per parameter and rank", f"{per_parameter:.4g}"
        yield "bytes per rank", f"{total / 1e12:,.4g} TB = {total / 2**40:,.4g} TiB"


@dataclass(frozen=True)
class Communication:
    """Time of a ring all-reduce."""

    size_gb: float
    """Bytes to reduce, in 1e9."""
    ranks: int
    gb_per_s: float
    """Rate of a rank's link in one direction, in 1e9 bytes."""

    def check(self) -> None:
        require_positive(values_of(self, "size_gb", "gb_per_s"))
        require_at_least(1, values_of(self, "ranks"))

    def lines(self) -> Iterator[tuple[str, str]]:
        seconds = arithmetic.all_reduce_seconds(self.size_gb, self.ranks, self.gb_per_s)
        yield "seconds", f"{seconds:.4g}"


EstimateConfig = (
    Annotated[Compute, tyro.conf.subcommand("compute")]
    | Annotated[Memory, tyro.conf.subcommand("memory")]
    | Annotated[Communication, tyro.conf.subcommand("communication")]
)


def main() -> int:
    """Print the estimate; the exit code."""
    try:
        config: Compute | Memory | Communication = tyro.cli(EstimateConfig, description=__doc__)
        config.check()
        for name, value in config.lines():
            print(f"{name:30}{value}")
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0
