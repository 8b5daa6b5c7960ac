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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from safetensors.numpy import load_file

from megatron.comparison.bisection import Expected, Row, described, first_beyond, in_fp64, measured_error, rows
from megatron.comparison.data import difference_of
from megatron.comparison.experiment import (
    ExperimentError,
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
from megatron.training.batch_schedule import build_batches

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
    kernels: Comparison | None = None
    """The kernels of both sides in the experiments."""
    begun: tuple[Difference, ...] = ()
    """The samples and the initial weights, if they differ because of the causes."""
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
    moved: Literal["A", "B"] = "B"
    """The side whose flags are moved, and whose code runs then."""
    done: int = 0
    """Iterations that schedules and samples count as done before the recorded ones."""
    checkpoint: str | None = None
    """Checkpoint of A from whose weights both sides begin; None: ``weights``."""
    facts: dict[str, Any] = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def run(self, label: str, name: str, side: tuple[RunConfig, int], request: Request, fp64: bool) -> list[Recording]:
        """The recorded steps of an experiment."""
        directory = self.directory / name
        schedule = build_batches(side[0], side[0].parallel.data_parallel_size(side[1]))
        request = replace(request, progress=(self.done, schedule.total_samples(self.done) if self.done else 0))
        config = recorded(side[0], directory / "records", request, fp64=fp64)
        if request.batches is not None:
            config = with_batch_size(config, self.facts["samples"])
        self.runner(label, config, side[1], request, directory)
        return read_steps(directory / "records", self.done)

    def batches(self, name: str) -> list[str]:
        """The files of the samples of an experiment."""
        return batches_of(self.directory / name / "records", self.done)

    def __call__(self) -> Found:
        saved = str(self.directory / "weights.safetensors") if self.weights is None else None
        start = Request(weights=self.weights, checkpoint=self.checkpoint)
        exact_a = self.run("A", "A-fp64", self.a, replace(start, save_weights=saved), fp64=True)
        exact_b = self.run("B", "B-fp64", self.b, start, fp64=True)
        self.facts = exact_a[0].facts
        same = Request(self.batches("A-fp64"), self.weights or saved)
        data, weights = self.samples(), first_beyond(_of("weight", exact_a, exact_b))
        begun = [] if data is None else [data]
        begun += [] if weights is None else [described(weights, self.facts)]
        found = list(rows(exact_a, exact_b))
        flags = self.blame(exact_a, start) if begun else ()
        if begun:
            exact_b = self.run("B", "B-same-start-fp64", self.b, same, fp64=True)
            found = list(rows(exact_a, exact_b))
        first = first_beyond(found)
        operations = operations_of(found, first, self.facts, "in fp64")
        kernels = _kernels(exact_a[0], exact_b[0])
        if first is None and not begun:
            return self.in_own_precision(exact_a, exact_b, same, found)
        if not flags and first is not None:
            flags = self.blame(exact_a, same) or operations.differences
            return Found(operations, (*begun, *flags), kernels)
        return Found(operations, flags or tuple(begun), kernels, tuple(begun))

    def in_own_precision(
        self, exact_a: list[Recording], exact_b: list[Recording], same: Request, exact: list[Row]
    ) -> Found:
        """Whether kernels or scales of the sides' precisions differ by more than their rounding."""
        if self.a[0].precision.fp64 and self.b[0].precision.fp64:
            operations = operations_of(exact, None, self.facts, "in fp64")
            return Found(operations, (), _kernels(exact_a[0], exact_b[0]), is_bitwise=_same_bits(exact))
        try:
            own_a = self.run("A", "A-own", self.a, same, fp64=False)
            own_b = self.run("B", "B-own", self.b, same, fp64=False)
        except UserError as error:  # such as kernels of another machine
            operations = operations_of(exact, None, self.facts, "in fp64")
            text = f"{operations.compared} Not in their own precision: {error}"
            return Found(replace(operations, compared=text, is_complete=False))
        kernels = _kernels(own_a[0], own_b[0])
        expected = measured_error((exact_a, exact_b), (own_a, own_b))
        found = list(rows(own_a, own_b, expected))
        first = first_beyond(found)
        precisions = dict.fromkeys(str(side[0].facts["precision"]) for side in (own_a, own_b))
        operations = operations_of(found, first, self.facts | own_b[0].facts, f"in {' and '.join(precisions)}")
        if first is None:
            return Found(operations, (), kernels, is_bitwise=_same_bits(found))
        return Found(operations, self.blame(own_a, same, expected, fp64=False) or operations.differences, kernels)

    def blame(
        self, wanted: list[Recording], start: Request, expected: Expected = in_fp64, *, fp64: bool = True
    ) -> tuple[Difference, ...]:
        """The flags without which B, from ``start``, is equal to A; none if it never is. Flags that change losses come
        first: those that change rounding alone are to blame only together with a fault of the code."""

        def is_equal(moved: Sequence[Difference]) -> bool:
            """Whether B with A's values of the flags ``moved`` computes what A does."""
            config = with_values_of(self.b[0], self.a[0], [one.what for one in moved])
            side = config, self.a[1] if any(not one.changes_loss for one in moved) else self.b[1]
            self._count += 1
            try:
                steps = self.run(self.moved, f"{self.moved}-moved-{self._count}", side, start, fp64)
            except (UserError, AssertionError):  # a combination that the checks refuse is none that is equal
                return False
            return first_beyond(rows(wanted, steps, expected)) is None

        for candidates in ([one for one in self.flags if one.changes_loss], list(self.flags)):
            if not candidates or not is_equal(candidates):
                continue
            needed = list(candidates)
            for one in candidates[:_MOST_FLAGS] if len(candidates) > 1 else ():
                fewer = [other for other in needed if other is not one]
                if fewer and is_equal(fewer):
                    needed = fewer
            return tuple(needed)
        return ()

    def samples(self) -> Difference | None:
        """The first token that differs in the samples of the first steps."""
        sides = [map(load_file, self.batches(name)) for name in ("A-fp64", "B-fp64")]
        for step, (one, other) in enumerate(zip(*sides), start=self.done + 1):
            if found := difference_of(one, other, step):
                return found[0]
        return None


def _of(direction: str, a: list[Recording], b: list[Recording]) -> list[Row]:
    return [row for row in rows(a[:1], b[:1]) if row.tensor.direction == direction]


def _kernels(a: Recording, b: Recording) -> Comparison:
    one, other = (side.facts.get("kernels", {}) for side in (a, b))
    found = tuple(
        Difference("kernels", name, one.get(name, "none"), other.get(name, "none"), "", changes_loss=False)
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    )
    return Comparison("kernels", f"{len(one)} operations, in the experiments.", found)


def _same_bits(found: Sequence[Row]) -> bool:
    return all(row.distance == 0 for row in found if row.tensor.name == "loss")


def operations_of(found: Sequence[Row], first: Row | None, facts: dict[str, Any], precision: str) -> Comparison:
    """The comparison of all recorded tensors of the first step, for the page."""
    if not found:
        raise ExperimentError("no tensor was recorded on both sides, so that no operation can be compared.")
    shown = [row for row in found if row.step == (0 if first is None else first.step)]
    listed = [
        {"direction": one.tensor.direction, "name": one.tensor.name, "distance": one.distance, "expected": one.expected}
        for one in shown
    ]
    figures = {"rows": listed, "first": None if first is None else shown.index(first)}
    count, steps = len({row.tensor for row in found}), len({row.step for row in found})
    begin = int(facts["iteration"])
    many = f"iterations {begin} and {begin + 1}" if steps > 1 else "a step"
    compared = f"{count} tensors of {many} from the same weights and samples, {precision}"
    differences = () if first is None else (described(first, facts),)
    return Comparison("operations", f"{compared}.", differences, figures=figures)
