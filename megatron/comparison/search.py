"""The search for the cause: experiments, each with fewer differences between the sides.

    as they are, in fp64         samples, initial weights and operations of the first steps
    B with A's samples and       equal: samples or weights are the cause
    weights, in fp64             else: an operation differs
    B with A's flags, too        equal: flags are the cause; each is left out in turn, and those that matter remain
                                 else: the operation is the cause, in the code or the environment
    in their own precision       only if fp64 finds both equal: a kernel, a scale, or rounding

A difference explains only if both sides are equal without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file

from megatron.comparison.bisection import Expected, Row, described, first_beyond, in_fp64, measured_error, rows
from megatron.comparison.experiment import (
    Request,
    batches_of,
    read_steps,
    recorded,
    with_batch_size,
    with_values_of,
)
from megatron.comparison.finding import Comparison, Difference
from megatron.config.run import RunConfig
from megatron.errors import UserError
from megatron.features.record_tensors.recording import Recording

_MOST_FLAGS = 16
"""Flags that are left out in turn."""


class Runner(Protocol):
    """Runs an experiment of a side."""

    def __call__(self, label: str, config: RunConfig, world_size: int, request: Request, directory: Path) -> None: ...


@dataclass(frozen=True)
class Found:
    """The result of the search."""

    operations: Comparison
    causes: tuple[Difference, ...] = ()
    """With these removed, both sides are equal; or the operation that differs."""
    data: Difference | None = None
    """The samples of the first steps, if they differ."""
    weights: Difference | None = None
    """The initial weights, if they differ."""
    is_bitwise: bool = False
    """Whether the losses of the steps are the same bits as the sides are."""


@dataclass
class Search:
    """Experiments on the sides ``A`` and ``B``, which are flags of this code with their numbers of ranks."""

    runner: Runner
    directory: Path
    a: tuple[RunConfig, int]
    b: tuple[RunConfig, int]
    flags: Sequence[Difference]
    """The flags that differ."""
    weights: str | None = None
    """Weights that both sides begin with; None: their own initial weights."""
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, label: str, name: str, side: tuple[RunConfig, int], request: Request, fp64: bool) -> list[Recording]:
        """The recorded steps of an experiment."""
        directory = self.directory / name
        config = recorded(side[0], directory / "records", request, fp64=fp64)
        if request.batches is not None:
            config = with_batch_size(config, self.facts["samples"])
        self.runner(label, config, side[1], request, directory)
        return read_steps(directory / "records")

    def __call__(self) -> Found:
        own_weights = self.weights is None
        saved = str(self.directory / "weights.safetensors") if own_weights else None
        exact_a = self.run("A", "A-fp64", self.a, Request(weights=self.weights, save_weights=saved), fp64=True)
        exact_b = self.run("B", "B-fp64", self.b, Request(weights=self.weights), fp64=True)
        self.facts = exact_a[0].facts
        data, weights = self.samples(), first_beyond(_of(("weight",), exact_a, exact_b))
        same = Request(batches_of(self.directory / "A-fp64" / "records"), self.weights or saved)
        if data is not None or weights is not None:
            exact_b = self.run("B", "B-same-start-fp64", self.b, same, fp64=True)
        found = list(rows(exact_a, exact_b))
        first = first_beyond(found)
        initial = None if weights is None else described(weights, self.facts)
        if first is not None:
            causes = self.blame(exact_a, same, in_fp64, fp64=True) or (described(first, self.facts),)
            return Found(_operations(found, first, self.facts, "in fp64"), causes, data, initial)
        begun = tuple(one for one in (data, initial) if one is not None)
        if begun:
            return Found(_operations(found, None, self.facts, "in fp64"), begun, data, initial)
        return self.in_own_precision(exact_a, exact_b, same, found)

    def in_own_precision(
        self, exact_a: list[Recording], exact_b: list[Recording], same: Request, exact: list[Row]
    ) -> Found:
        """Whether kernels or scales of the sides' precisions differ by more than their rounding."""
        if self.a[0].precision.fp64 and self.b[0].precision.fp64:
            return Found(_operations(exact, None, self.facts, "in fp64"), is_bitwise=_same_bits(exact))
        own_a = self.run("A", "A-own", self.a, same, fp64=False)
        own_b = self.run("B", "B-own", self.b, same, fp64=False)
        expected = measured_error((exact_a, exact_b), (own_a, own_b))
        found = list(rows(own_a, own_b, expected))
        first = first_beyond(found)
        precision = f"in {own_a[0].facts['precision']} and {own_b[0].facts['precision']}"
        operations = _operations(found, first, self.facts | own_b[0].facts, precision)
        if first is None:
            return Found(operations, is_bitwise=_same_bits(found))
        return Found(operations, self.blame(own_a, same, expected, fp64=False) or operations.differences)

    def blame(
        self, wanted: list[Recording], same: Request, expected: Expected, *, fp64: bool
    ) -> tuple[Difference, ...]:
        """The flags without which B is equal to A; none if it never is. Flags that change losses come first: those
        that change rounding alone are to blame only together with a fault of the code."""

        def is_equal(name: str, moved: Sequence[Difference]) -> bool:
            """Whether B with A's values of the flags ``moved`` computes what A does."""
            config = with_values_of(self.b[0], self.a[0], [one.what for one in moved])
            side = config, self.a[1] if any(not one.changes_loss for one in moved) else self.b[1]
            try:
                steps = self.run("B", name, side, same, fp64)
            except (UserError, AssertionError):  # a combination that the checks refuse is none that is equal
                return False
            return first_beyond(rows(wanted, steps, expected)) is None

        for number, candidates in enumerate(([one for one in self.flags if one.changes_loss], list(self.flags))):
            if not candidates or not is_equal(f"B-moved-{number}", candidates):
                continue
            needed = list(candidates)
            for index, one in enumerate(candidates[:_MOST_FLAGS] if len(candidates) > 1 else ()):
                fewer = [other for other in needed if other is not one]
                if fewer and is_equal(f"B-moved-{number}-without-{index}", fewer):
                    needed = fewer
            return tuple(needed)
        return ()

    def samples(self) -> Difference | None:
        """The first token that differs in the samples of the first steps."""
        sides = [batches_of(self.directory / name / "records") for name in ("A-fp64", "B-fp64")]
        for step, (one, other) in enumerate(zip(*(map(load_file, files) for files in sides)), start=1):
            for name in ("tokens", "labels", "loss_mask", "document_starts"):
                if name not in one or name not in other:
                    continue
                left, right = one[name], other[name]
                if left.shape != right.shape:
                    sizes = [f"{shape[0]} samples of {shape[1]}" for shape in (left.shape, right.shape)]
                    return Difference("data", name, sizes[0], sizes[1], f"iteration {step}")
                places = (left != right).nonzero()
                if len(places):
                    sample, position = places[0].tolist()
                    values = f"{left[sample, position]:g}", f"{right[sample, position]:g}"
                    where = f"iteration {step}, sample {sample}, position {position}; {len(places)} in all"
                    return Difference("data", name, *values, where)
        return None


def _of(directions: Sequence[str], a: list[Recording], b: list[Recording]) -> list[Row]:
    return [row for row in rows(a[:1], b[:1]) if row.tensor.direction in directions]


def _same_bits(found: Sequence[Row]) -> bool:
    return all(row.distance == 0 for row in found if row.tensor.name == "loss")


def _operations(found: Sequence[Row], first: Row | None, facts: dict[str, Any], precision: str) -> Comparison:
    """The comparison of all recorded tensors of the first step, for the page."""
    shown = [row for row in found if row.step == (0 if first is None else first.step)]
    listed = [
        {"direction": one.tensor.direction, "name": one.tensor.name, "distance": one.distance, "expected": one.expected}
        for one in shown
    ]
    figures = {"rows": listed, "first": None if first is None else shown.index(first)}
    count = len({row.tensor for row in found})
    compared = f"{count} tensors of two steps from the same weights and samples, {precision}"
    differences = () if first is None else (described(first, facts),)
    return Comparison("operations", f"{compared}.", differences, figures=figures)
