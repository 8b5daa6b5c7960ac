"""The losses of two sides by iteration: the first one that differs by more than rounding."""

import math
from collections.abc import Mapping

from megatron.comparison.finding import Comparison, Difference
from megatron.comparison.flags import config_for
from megatron.comparison.side import Side

SPREAD: Mapping[str, tuple[float, float]] = {
    "fp64": (1e-15, 3e-17),
    "fp32": (1e-7, 1e-8),
    "fp16": (1e-6, 3e-5),
    "bf16": (1e-5, 1e-4),
    "fp8": (1e-5, 4e-4),
}
"""The relative difference of two losses of other summation orders: at first, and its growth with each iteration.

Measured on 2026-11-29 on a CPU: 200 iterations of a Llama of 4 layers and width 64 (length 64, batches of 8, learning
rate 3e-3), with microbatches of 8 and of 2 samples, and in tensor-parallel layers of 2 ranks. fp16 is measured from the
first step that its loss scale does not skip; which one that is depends on the order, too.
"""
MARGIN = 8.0
"""Other models and learning rates have other spreads: so many times this one is no rounding."""
PRINTED = 1e-6
"""The resolution of a loss in Megatron-LM's log, which has seven digits."""


def expected_spread(precision: str, iteration: int) -> float:
    """The largest relative difference of the losses of an iteration that rounding explains."""
    first, growth = SPREAD[precision]
    return MARGIN * (first + growth * iteration)


def compare_curves(a: Side, b: Side) -> Comparison:
    """The first iteration whose losses differ by more than the expected spread."""
    if a.curve is None or b.curve is None:
        missing = " and ".join(side.label for side in (a, b) if side.curve is None)
        return Comparison("curves", f"No curve of losses for {missing}.", is_complete=False)
    one, other = _losses(a), _losses(b)
    # A record has the mean of the iterations since the record before.
    common = sorted(iteration for iteration in one.keys() & other.keys() if one[iteration][0] == other[iteration][0])
    precision = max(map(_precision, (a, b)), key=lambda name: SPREAD[name])
    ended = ""
    if precision == "fp16":
        # Rounding decides whether a gradient near the largest number overflows, and an update is skipped.
        skips = [{one["iteration"] for one in curve.iterations if one.get("skipped")} for curve in (a.curve, b.curve)]
        alone = min((skips[0] ^ skips[1]) & set(common), default=None)
        if alone is not None:
            common = [iteration for iteration in common if iteration < alone]
            ended = f", up to iteration {alone}, which one side alone skipped"
    if not common:
        return Comparison("curves", "No record of both curves is of the same iterations.", is_complete=False)
    resolution = PRINTED if "megatron-lm" in (a.kind, b.kind) else 0.0
    expected = [max(expected_spread(precision, iteration), resolution) for iteration in common]
    figures = {
        "iterations": common,
        "a": [one[iteration][1] for iteration in common],
        "b": [other[iteration][1] for iteration in common],
        "expected": expected,
    }
    compared = (
        f"{len(common)} iterations{ended}, beside {MARGIN:g} times the measured spread of two summation orders in "
        f"{precision}"
    )
    sizes = [_samples(side) for side in (a, b)]
    differing = [iteration for iteration in common if sizes[0].get(iteration) != sizes[1].get(iteration)]
    if differing and sizes[0] and sizes[1]:
        values = [str(size.get(differing[0])) for size in sizes]
        remark = f"iteration {differing[0]}, so the losses are of other samples"
        found = Difference("curves", "consumed samples", values[0], values[1], remark)
        return Comparison("curves", f"{compared}.", (found,), figures=figures)
    for iteration, spread in zip(common, expected):
        left, right = one[iteration][1], other[iteration][1]
        distance = abs(left - right) / max(abs(left), 1e-300)
        if not distance <= spread and not (math.isnan(left) and math.isnan(right)):
            remark = f"iteration {iteration}: {distance:.1e} apart, {spread:.1e} is expected"
            found = Difference("curves", "lm_loss", f"{left:.7g}", f"{right:.7g}", remark)
            return Comparison("curves", f"{compared}.", (found,), figures={**figures, "first": iteration})
    return Comparison("curves", f"{compared}.", figures=figures)


def _losses(side: Side) -> dict[int, tuple[int, float]]:
    """The mean loss of each record, with the iteration of the record before it, by iteration; of a resumed run the
    later record counts. NaN: a record without a loss."""
    assert side.curve is not None
    found: dict[int, tuple[int, float]] = {}
    before = 0
    for one in side.curve.iterations:
        iteration, loss = one["iteration"], one["lm_loss"]
        found[iteration] = min(before, iteration - 1), math.nan if loss is None else float(loss)
        before = iteration
    return found


def _samples(side: Side) -> dict[int, int]:
    assert side.curve is not None
    records = side.curve.iterations
    return {one["iteration"]: one["consumed_samples"] for one in records if one.get("consumed_samples") is not None}


def _precision(side: Side) -> str:
    config = None if side.kind == "hugging-face" else config_for(side)
    return "bf16" if config is None else config.precision.product_name
