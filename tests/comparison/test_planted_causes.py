"""The search names the cause of a difference: of forty planted ones, each in a layout, a flag or an operation."""

from pathlib import Path

import pytest

from megatron.comparison.compare import experiments
from megatron.comparison.flags import compare_flags
from megatron.comparison.side import Side
from tests.comparison.faults import PAIRS, Pair
from tests.comparison.in_process import InProcess, Ranks, search, side

QUICK = ("--norm-epsilon", "--weight-decay", "--reset-position-ids", "--attn-logit-softcapping", "missing clip",
         "stale FP8 scale", "shifted label", "skipped sample", "mask at a document's border", "permuted head",
         "--tensor-model-parallel-size")  # fmt: skip
"""Pairs of the default tests, by cause or fault."""


def cases() -> list[object]:
    return [
        pytest.param(
            pair, id=pair.fault or pair.cause, marks=[] if {pair.fault, pair.cause} & set(QUICK) else pytest.mark.slow
        )
        for pair in PAIRS
    ]


@pytest.mark.parametrize("pair", cases())
def test_the_cause_is_named(pair: Pair, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    runner = InProcess(ranks, pair.fault)
    found = search(runner, tmp_path, pair.common, f"{pair.common} {pair.harmless} {pair.b}")
    assert [one.what for one in found.causes] == [pair.cause], found
    first, *_ = found.begun or found.operations.differences or found.causes
    assert first.what == (pair.shows or pair.cause), found
    if pair.cause.startswith("--") and not found.begun:
        assert pair.cause in first.remark, first


@pytest.mark.parametrize(
    ("b", "first", "cause"),
    [
        ("--lr-decay-iters 20 --clip-grad 90", 15, "--lr-decay-iters"),
        ("--min-lr 1e-4 --clip-grad 90", None, "--min-lr"),  # at the end, without curves
        ("--clip-grad 90", None, None),
    ],
)
def test_a_cause_that_shows_after_the_first_steps_is_named(
    b: str, first: int | None, cause: str | None, tmp_path: Path
) -> None:
    common = "--train-iters 30 --lr-warmup-iters 10 --lr-decay-style cosine --clip-grad 100"
    configs = side(f"{common} --lr-decay-iters 30")[0], side(f"{common} {b}")[0]
    one, other = Side("A", tmp_path, "run", config=configs[0]), Side("B", tmp_path, "run", config=configs[1])
    found = experiments(one, other, compare_flags(one, other), first, InProcess({}), tmp_path, 1, None)
    assert [one.what for one in found.causes] == ([cause] if cause else []), found
    step = first or 29
    assert "iterations 1 and 2 from the same" in found.operations.compared
    assert f"iterations {step} and {step + 1} from the same" in found.operations.compared
    assert [one.remark.split(",")[0] for one in found.operations.differences] == ([f"step {step}"] if cause else [])


def test_there_are_forty_pairs() -> None:
    assert len(PAIRS) == 40
    assert sum(bool(pair.harmless) for pair in PAIRS) >= 10
    layouts = {pair.common for pair in PAIRS} | {pair.harmless for pair in PAIRS if pair.harmless}
    assert len(layouts) >= 10
