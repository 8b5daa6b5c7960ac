"""The search names the cause of a difference: of forty planted ones, each in a layout, a flag or an operation."""

from pathlib import Path

import pytest

from tests.comparison.faults import PAIRS, Pair
from tests.comparison.in_process import InProcess, Ranks, search

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


def test_there_are_forty_pairs() -> None:
    assert len(PAIRS) == 40
    assert sum(bool(pair.harmless) for pair in PAIRS) >= 10
    layouts = {pair.common for pair in PAIRS} | {pair.harmless for pair in PAIRS if pair.harmless}
    assert len(layouts) >= 10
