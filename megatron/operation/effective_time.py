"""How much of a run's time failures and checkpoints leave for training, and the save interval that leaves most.

All times are in seconds. M is the mean time between failures of the job, R the time from a failure to the first new
step (detection, restart, load), C the time for which a save blocks the training loop, T the training time between two
saves. The effective time is the share of the wall time in steps that need not be repeated ("effective training time
ratio", ETTR).

- J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# Llama 3 405B: 16,384 GPUs, 54 days, 419 unexpected interruptions (The Llama 3 Herd of Models, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_700.0


@dataclass(frozen=True)
class Costs:
    """What failures and saves cost a job."""

    mtbf_s: float
    """M: mean time between failures of the job."""
    restart_s: float
    """R: time from a failure to the first new step."""
    save_s: float
    """C: time for which a save blocks the training loop."""


def job_mtbf_s(num_gpus: int, gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE) -> float:
    """Mean time between failures of a job, which any GPU's failure interrupts."""
    return gpu_hours_per_failure / num_gpus * 3600.0


def young_interval_s(costs: Costs) -> float:
    """Young's save interval, sqrt(2 C M): the first order for C, T << M."""
    return math.sqrt(2.0 * costs.save_s * costs.mtbf_s)


def nvidia_interval_s(costs: Costs) -> float:
    """Save interval of greatest availability with the restart in it, C + sqrt(2 (M + R) C + C²) (NVIDIA)."""
    save = costs.save_s
    return save + math.sqrt(2.0 * (costs.mtbf_s + costs.restart_s) * save + save * save)


def daly_interval_s(costs: Costs) -> float:
    """The interval that maximizes :func:`effective_time`, of which Young's is the first order.

    The derivative is zero where (1 - T / M) e^((T + C) / M) = 1. The left side decreases in T, so bisection finds the
    root; R does not change it.
    """
    mtbf, save = costs.mtbf_s, costs.save_s
    low, high = 0.0, mtbf  # the left side is at least 1 at 0, and 0 at M
    for _ in range(100):
        middle = 0.5 * (low + high)
        # The logarithm of the left side, which does not overflow.
        if math.log1p(-middle / mtbf) + (middle + save) / mtbf > 0.0:
            low = middle
        else:
            high = middle
    return low


def effective_time(interval_s: float, costs: Costs) -> float:
    """Daly's effective time, exact for exponentially distributed failures, also during restarts and saves:

    T / (M e^(R/M) (e^((T+C)/M) - 1)).
    """
    mtbf = costs.mtbf_s
    exponent = (interval_s + costs.save_s) / mtbf
    if exponent > 700.0:
        return 0.0  # e^700 is close to the largest float
    return interval_s / (mtbf * math.exp(costs.restart_s / mtbf) * math.expm1(exponent))


def mean_bounds(total: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of ``total / count``, the mean time between ``count`` failures, if failures are a Poisson process.

    The upper bound is infinite without a failure. With c failures the expected number is between the values at which
    c or more, or c or fewer, have the probability (1 - confidence) / 2 (Garwood, 1936).
    """
    tail = (1.0 - confidence) / 2.0
    most = _root(lambda mean: _poisson_at_most(count, mean) - tail)
    if count == 0:
        return total / most, math.inf
    least = _root(lambda mean: _poisson_at_most(count - 1, mean) - (1.0 - tail))
    return total / most, total / least


def _poisson_at_most(count: int, mean: float) -> float:
    terms = (math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count + 1))
    return math.fsum(terms)


def _root(decreasing: Callable[[float], float]) -> float:
    """The root of a decreasing function of a positive number."""
    low, high = 1e-9, 1.0
    while decreasing(high) > 0.0:
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if decreasing(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)
