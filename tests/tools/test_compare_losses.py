"""A curve that leaves its band is told by the exit code, and so is one that cannot be compared."""

import json
import math
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tools import compare_losses, plot_metrics

FALLING = [8.0 - 0.1 * iteration for iteration in range(10)]
Losses = list[float | None]


def write(path: Path, losses: Losses, validation: float = 7.0) -> Path:
    """A metrics file; None is an iteration that was skipped."""
    records = [
        {"iteration": number, "lm_loss": loss, "skipped": int(loss is None)} for number, loss in enumerate(losses, 1)
    ]
    records.append({"iteration": len(losses), "validation_loss": validation})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def scaled(factor: float, first: int = 0) -> Losses:
    return [loss * (factor if place >= first else 1.0) for place, loss in enumerate(FALLING)]


def run_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, curves: list[Losses], *flags: str) -> int:
    """The exit code of comparing ``curves`` with FALLING."""
    reference = write(tmp_path / "fp32.jsonl", list(FALLING))
    paths = [str(write(tmp_path / f"run{number}.jsonl", losses)) for number, losses in enumerate(curves)]
    command = ["compare_losses", "--reference", str(reference), "--metrics", *paths, *flags]
    monkeypatch.setattr(sys, "argv", command)
    return compare_losses.main()


@pytest.mark.parametrize(
    ("losses", "band", "is_inside"),
    [
        (scaled(1.009), 1.0, True),
        (scaled(0.991), 1.0, True),
        (scaled(1.011), 1.0, False),
        (scaled(0.989), 1.0, False),
        # A tenth of the mean, and a quarter of the last window; lower is not worse.
        (scaled(1.03, first=9), 1.0, True),
        (scaled(1.05, first=9), 1.0, False),
        (scaled(0.95, first=9), 1.0, True),
        (scaled(0.8, first=9), 1.0, False),
        (scaled(1.2), math.inf, True),
        ([*FALLING[:9], math.nan], 1.0, False),
        ([None, *FALLING[1:]], 1.0, True),
        ([None] * 10, 1.0, False),
    ],
)
def test_a_run_may_not_leave_its_band(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    losses: Losses,
    band: float,
    is_inside: bool,
) -> None:
    code = run_tool(monkeypatch, tmp_path, [losses], "--bands", str(band), "--window", "4")
    assert code == (0 if is_inside else 1)
    assert ("ERROR: outside its band: run0." in capsys.readouterr().err) == (not is_inside)


def test_the_table_says_how_far_a_curve_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    late, skips = scaled(1.01, first=6), [None, *FALLING[1:]]
    assert run_tool(monkeypatch, tmp_path, [late, skips], "--bands", "2", "inf", "--window", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| fp32 | 7.2500 | 7.0000 | 0 | - | - | - |"
    assert lines[3] == "| run0 | 7.3225 | 7.0000 | 0 | +0.38% | +0.00% to +1.00% | 2 % |"
    assert lines[4] == "| run1 | 7.2500 | 7.0000 | 1 | +0.00% | +0.00% to +0.00% | none |"


@pytest.mark.parametrize(
    ("losses", "flags", "words"),
    [
        (FALLING, ["--bands", "1", "1"], "--bands has 2 values for 1 --metrics"),
        (FALLING, ["--bands", "0"], "--bands 0 is no width"),
        (FALLING, ["--bands", "nan"], "--bands nan is no width"),
        (FALLING, ["--bands", "1", "--window", "11"], "--window 11 does not fit in the 10 iterations"),
        (FALLING[:9], ["--bands", "1"], "run0 has 9 iterations, fp32 10"),
        ([], ["--bands", "1"], "does not have every iteration from 1 on"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    losses: Losses,
    flags: list[str],
    words: str,
) -> None:
    window = [] if "--window" in flags else ["--window", "4"]
    assert run_tool(monkeypatch, tmp_path, [losses], *flags, *window) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("ERROR: ") and words in sentence


def test_several_curves_are_drawn_smoothed_under_their_names(tmp_path: Path) -> None:
    paths = tuple(str(write(tmp_path / f"{number}.jsonl", list(FALLING))) for number in range(2))
    picture = tmp_path / "curves.png"
    plot_metrics.draw(plot_metrics.PlotConfig(paths, str(picture), names=("one", "other"), smooth=4))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert plot_metrics.moving_mean([1.0, 2.0, 6.0], 2) == [1.5, 4.0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"names": ("one",)}, "--names has 1 names for 2 --metrics"), ({"smooth": 0}, "--smooth 0 must be")],
)
def test_a_drawing_that_is_told_wrongly_is_refused(tmp_path: Path, flags: dict[str, tuple[str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plot_metrics.draw(plot_metrics.PlotConfig(("a", "b"), str(tmp_path / "x.png"), **flags))  # type: ignore[arg-type]
