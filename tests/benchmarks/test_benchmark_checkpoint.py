"""benchmarks/benchmark_checkpoint.py on a state too small to measure speed: what it saves, loads and prints."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import benchmark_checkpoint
from benchmarks.lib.checkpoint_contenders import COMPARISONS, CONTENDERS, KINDS, Tensors, hidden_size, weight_shapes

pytestmark = pytest.mark.slow(reason="a benchmark")


def test_every_row_is_measured_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, output = tmp_path / "files", tmp_path / "figures.json"
    flags = f"--size-mb 4 --repeats 1 --directory {files} --json {output}"
    assert benchmark_checkpoint.main(flags.split()) == 0
    figures = json.loads(output.read_text())
    assert 3e6 < figures["bytes"] < 5e6
    assert figures["flags"]["repeats"] == 1
    check_rows(figures)
    check_comparisons(figures)
    assert list(files.iterdir()) == []
    check_tables(capsys.readouterr().out)


def check_rows(figures: Mapping[str, Any]) -> None:
    """Each has a turn and the speed that follows."""
    assert list(figures["rows"]) == [contender.name for contender in CONTENDERS]
    for row in figures["rows"].values():
        assert row["mb_per_s"] == pytest.approx(figures["bytes"] / 1e6 / row["seconds"][0])
        assert row["cpu_seconds"][0] > 0


def check_comparisons(figures: Mapping[str, Any]) -> None:
    """Each is its two rows' ratio, and its aim decides."""
    seconds = {name: row["seconds"][0] for name, row in figures["rows"].items()}
    for row, wanted in zip(figures["comparisons"], COMPARISONS, strict=True):
        assert (row["name"], row["reference"], row["aim"]) == (wanted.name, wanted.reference, wanted.aim)
        assert row["ratio"] == pytest.approx(seconds[wanted.reference] / seconds[wanted.name])
        assert row["is_met"] == (None if wanted.aim is None else row["ratio"] >= wanted.aim)


def check_tables(printed: str) -> None:
    """Every contender with five figures, every comparison with three and a verdict."""
    for contender in CONTENDERS:
        assert re.search(rf"^{re.escape(contender.name)} +\d+( +\d+\.\d{{3}}){{4}}$", printed, re.MULTILINE)
    for row in COMPARISONS:
        verdict = r"\(information\)" if row.aim is None else rf"at least {row.aim:.2f}.*: (met|MISSED)"
        pair = re.escape(f"{row.name} / {row.reference}")
        assert re.search(rf"^{pair}( +\d+\.\d{{3}}){{3}}  {verdict}$", printed, re.MULTILINE)


@pytest.mark.parametrize("size_mb", [4, 100, 500])
def test_the_state_has_the_size_that_was_asked_for(size_mb: int) -> None:
    shapes = weight_shapes(hidden_size(size_mb * 10**6))
    per_element = sum(dtype.itemsize for dtype in KINDS.values())
    found = per_element * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert found == pytest.approx(size_mb * 10**6, rel=0.2)
    assert 40 <= len(shapes) * len(KINDS) <= 200


def test_two_ranks_hold_the_halves_of_every_tensor() -> None:
    halves = [Tensors(4_000_000, 2, rank) for rank in range(2)]
    for name, whole in Tensors(4_000_000, 1, 0).boxed.items():
        offsets = [tuple(half.boxed[name].boxes[0][0]) for half in halves]  # type: ignore[attr-defined]
        sizes = [half.local[name].shape[0] for half in halves]
        assert all(half.boxed[name].shape == whole.shape for half in halves), name
        assert sizes == [whole.shape[0] // 2] * 2, name
        assert [offset[0] for offset in offsets] == [0, sizes[0]], name


def test_a_wrong_number_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_checkpoint.main(["--repeats", "0"]) == 2
    assert capsys.readouterr().err == "ERROR: --repeats 0 must be at least 1.\n"
