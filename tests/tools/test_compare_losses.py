"""A curve that leaves its band is told by the exit code, and so is one that cannot be compared."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import loss_curves
from megatron.errors import ConfigError
from megatron.metrics.jsonl import read_history

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


def run_tool(tmp_path: Path, curves: list[Losses], *flags: str) -> int:
    """The exit code of comparing ``curves`` with FALLING."""
    reference = write(tmp_path / "fp32.jsonl", list(FALLING))
    paths = [str(write(tmp_path / f"run{number}.jsonl", losses)) for number, losses in enumerate(curves)]
    return loss_curves.main_compare(["--reference", str(reference), "--metrics", *paths, *flags])


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
    capsys: pytest.CaptureFixture[str], tmp_path: Path, losses: Losses, band: float, is_inside: bool
) -> None:
    code = run_tool(tmp_path, [losses], "--bands", str(band), "--window", "4")
    assert code == (0 if is_inside else 1)
    assert ("ERROR: outside its band: run0." in capsys.readouterr().err) == (not is_inside)


def test_the_table_says_how_far_a_curve_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    late, skips = scaled(1.01, first=6), [None, *FALLING[1:]]
    assert run_tool(tmp_path, [late, skips], "--bands", "2", "inf", "--window", "4") == 0
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
    capsys: pytest.CaptureFixture[str], tmp_path: Path, losses: Losses, flags: list[str], words: str
) -> None:
    window = [] if "--window" in flags else ["--window", "4"]
    assert run_tool(tmp_path, [losses], *flags, *window) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("ERROR: ") and words in sentence


def test_several_curves_are_drawn_smoothed_under_their_names(tmp_path: Path) -> None:
    paths = tuple(str(write(tmp_path / f"{number}.jsonl", list(FALLING))) for number in range(2))
    picture = tmp_path / "curves.png"
    loss_curves.draw(loss_curves.PlotConfig(paths, str(picture), names=("one", "other"), smooth=4))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    figure: Any = loss_curves.draw_figure(loss_curves.PlotConfig(paths[:1], str(picture), smooth=4))
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([7.85 - 0.1 * place for place in range(7)])


def test_a_plot_is_over_tokens_under_the_name_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "my-run").mkdir()
    path = tmp_path / "my-run" / "metrics.jsonl"
    first: dict[str, Any] = {"run": {"flags": {"data": {"seq_length": 100}}}}
    rows: list[dict[str, Any]] = []
    for iteration in (10, 20, 30):
        if iteration == 30:  # a process with longer sequences
            first = {"run": {"flags": {"data": {"seq_length": 200}}}}
        row = {"iteration": iteration, "consumed_samples": 4 * iteration, "lm_loss": 5.0 - iteration / 10}
        rows.append({**row, "grad_norm": 1.0 + iteration, "learning_rate": 1e-3 / iteration, **first})
        first = {}
    rows += [{"iteration": 25, "validation_loss": 3.0}, {"iteration": 30, "validation_loss": 2.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = read_history(str(path))
    assert history.curve("lm_loss") == [(4000, 4.0), (8000, 3.0), (16000, 2.0)]
    assert history.curve("validation_loss") == [(12000, 3.0), (16000, 2.5)]
    assert history.curve("lm_loss", in_tokens=False)[0] == (10, 4.0)
    figure: Any = loss_curves.draw_figure(loss_curves.PlotConfig((str(path),), str(tmp_path / "a.png")))
    figure.draw_without_rendering()
    assert figure.get_suptitle() == "my-run"
    losses, rates, norms = figure.axes
    assert norms.get_xlabel() == "tokens"
    assert [list(line.get_xdata()) for line in losses.lines] == [[4000, 8000, 16000], [12000, 16000]]
    assert list(rates.lines[0].get_ydata()) == [1e-4, 5e-5, 1e-3 / 30]
    assert list(norms.lines[0].get_ydata()) == [11, 21, 31]
    # The label of the last loss is inside of the frame.
    (label,) = losses.texts
    renderer = figure.canvas.get_renderer()
    assert losses.get_window_extent(renderer).x1 > label.get_window_extent(renderer).x1


@pytest.mark.parametrize(("content", "words"), [("", "is empty"), ('{"iteration": 1}\n', "has no losses")])
def test_a_file_without_losses_is_a_sentence_and_exit_code_2(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "metrics.jsonl", tmp_path / "a.png"
    path.write_text(content)
    assert loss_curves.main_plot(["--metrics", str(path), "--output", str(picture)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"ERROR: --metrics {path} {words}: name the file") and not picture.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"names": ("one",)}, "--names has 1 names for 2 --metrics"), ({"smooth": 0}, "--smooth 0 must be")],
)
def test_a_drawing_that_is_told_wrongly_is_refused(tmp_path: Path, flags: dict[str, tuple[str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loss_curves.draw(loss_curves.PlotConfig(("a", "b"), str(tmp_path / "x.png"), **flags))  # type: ignore[arg-type]
