"""The arithmetic of the literature on large-scale training: each formula with its source.

Sizes are bytes, rates are per second, and times are seconds unless a name says otherwise.
"""

from typing import Literal

DAY, YEAR = 86_400.0, 365.25 * 86_400.0

Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]


# Computation.


def training_flops(parameters: float, tokens: float) -> float:
    """FLOPs of training: 6 per parameter and token, 2 forward and 4 backward, without attention (arXiv 2001.08361,
    section 2.1)."""
    return 6 * parameters * tokens


def training_seconds(flops: float, gpus: float, flops_per_gpu: float) -> float:
    """Time at an average rate per GPU."""
    return flops / (gpus * flops_per_gpu)


def gpu_hours(flops: float, flops_per_gpu: float) -> float:
    """GPU-hours at an average rate per GPU, also over interruptions."""
    return flops / flops_per_gpu / 3600


def average_flops(flops: float, hours: float) -> float:
    """The average rate per GPU that a number of GPU-hours implies."""
    return flops / (hours * 3600)


def arithmetic_intensity(rows: float, columns: float, depth: float, element: float = 2) -> float:
    """FLOPs per byte of memory traffic of a product ``[rows, depth] x [depth, columns]``; ``element`` is bytes of an
    element."""
    return 2 * rows * columns * depth / (element * (rows * depth + depth * columns + rows * columns))


def ridge(flops: float, bytes_per_s: float) -> float:
    """FLOPs per byte from which on a GPU computes longer than it reads (roofline model, Williams et al. 2009)."""
    return flops / bytes_per_s


# Memory.


def state_bytes_per_parameter(zero: Zero = 0, ranks: float = 1, weight: float = 2, gradient: float = 2) -> float:
    """Weights, gradients, and 12 bytes of optimizer state (main weight and two moments in fp32); ZeRO divides them over
    ``ranks`` (arXiv 1910.02054, figure 1)."""
    shares = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    return weight / shares[0] + gradient / shares[1] + 12 / shares[2]


def activation_bytes(
    sequence: float,
    microbatch: float,
    hidden: float,
    heads: float,
    tp: float = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Activations of a GPT layer in 16 bits with unfused attention (arXiv 2205.05198, table 2)."""
    outer = sequence * microbatch * hidden
    attention = 5 * heads * sequence / hidden if recompute == "none" else 0.0
    if recompute == "full":
        return 2 * outer
    if sequence_parallel:
        return outer * (34 + attention) / tp
    return outer * (10 + (24 + attention) / tp)


# Communication and the pipeline.


def all_reduce_seconds(size: float, ranks: int, bytes_per_s: float) -> float:
    """A ring all-reduce: every rank sends 2 (n - 1) / n times the size (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * size / bytes_per_s


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over the time of computation: (p - 1) / (v m) for 1F1B and its interleaved form (arXiv 2104.04473,
    section 2.2)."""
    return (stages - 1) / (chunks * microbatches)
