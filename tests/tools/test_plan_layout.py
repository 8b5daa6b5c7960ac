"""The search of layouts from the command line: what it prints and writes, and what it refuses."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import planning as plan_layout
from megatron.commands import pretrain_llama
from megatron.config.command_line import parse_command_line
from megatron.config.words import without_flags
from megatron.errors import ConfigError, ExitCode
from megatron.flags import words_of

TINY = ["--model", "tiny", "--vocab-size", "1024", "--seq-length", "256", "--global-batch-size", "8"]
FEW = ["--use-distributed-optimizer", "--no-grad-reduce-in-bf16", "--micro-batch-size", "1"]
FEW += ["--pipeline-model-parallel-size", "1"]
"""Constraints that leave few layouts."""


def call(*words: str | Path) -> int:
    return plan_layout.main([str(word) for word in words])


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The JSON, the page and the text of a search with two dry runs."""
    directory = tmp_path_factory.mktemp("plan")
    files = "--json", directory / "plan.json", "--html", directory / "plan.html"
    words = ["--cluster", "h100", "--num-gpus", "4", "--rehearse", "2", "--tokens", "1e9", *TINY, *FEW]
    with redirect_stdout(StringIO()) as printed:
        assert call(*words, *files) == ExitCode.COMPLETE
    return json.loads((directory / "plan.json").read_text()), (directory / "plan.html").read_text(), printed.getvalue()


def test_the_json_ranks_layouts(planned: tuple[dict[str, Any], str, str]) -> None:
    layouts = planned[0]["layouts"]
    assert len(layouts) == planned[0]["num_fitting"] <= planned[0]["num_enumerated"]
    for one in layouts:
        low, high = one["interval_s"]
        assert 0 < low < one["step_time_s"] < high
        assert one["step_time_s"] == pytest.approx(sum(one["terms_s"].values()))
        assert one["tokens_per_s_per_gpu"] == pytest.approx(8 * 256 / 4 / one["step_time_s"])
        assert 0 < one["mfu"] < 1 and 4 < one["memory_gib"] < 5
        assert one["limits"] and one["advice"]
        assert one["flags"]["micro-batch-size"] == 1 and not one["changes_numerics"]
    ties, others = ([one["step_time_s"] for one in layouts if one["is_tie"] is tie] for tie in (True, False))
    assert max(ties) <= 1.02 * min(ties) and (not others or min(others) > 1.02 * min(ties))
    assert others == sorted(others)


def test_the_best_layouts_are_simulated(planned: tuple[dict[str, Any], str, str]) -> None:
    rehearsed = [one for one in planned[0]["layouts"] if one["is_rehearsed"]]
    assert len(rehearsed) == 2 and planned[0]["layouts"][0]["is_rehearsed"]
    for one in rehearsed:
        stages = [sum(kinds.values()) for kinds in one["memory_by_stage"]]
        assert max(stages) / 2**30 == pytest.approx(one["memory_gib"])
        assert stages.index(max(stages)) == one["tightest_stage"]


def test_the_flags_start_a_dry_run(
    planned: tuple[dict[str, Any], str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = planned[0]["layouts"][0]["flags"]
    words = [
        word
        for name, value in flags.items()
        for word in words_of(name.replace("-", "_"), tuple(value) if isinstance(value, list) else value)
    ]
    arguments = [*TINY, "--bf16", *words, "--lr", "1e-4", "--train-iters", "1", "--mock-data"]
    parse_command_line(arguments)
    assert pretrain_llama.main([*arguments, "--dry-run", "--num-gpus", "4", "--device", "cuda"]) == ExitCode.COMPLETE
    assert "fits" in capsys.readouterr().out


def test_the_text_and_the_page_show_the_best_layout(planned: tuple[dict[str, Any], str, str]) -> None:
    result, page, text = planned
    best = result["layouts"][0]
    assert f"{best['step_time_s']:.3f} s per step" in text
    assert f"limited by {best['limits']}" in text
    assert "pretrain_llama.py --model tiny" in text and "--micro-batch-size 1" in text
    assert page.startswith("<!DOCTYPE html>") and "</html>" in page


def test_the_scaling_points_add_up(planned: tuple[dict[str, Any], str, str]) -> None:
    points = planned[0]["scaling"]
    sizes = [point["num_gpus"] for point in points]
    assert sizes == sorted(sizes) and 4 in sizes and len(sizes) >= 3
    for point in points:
        steps = 1e9 / (8 * 256)
        assert point["days"] * 86_400 * point["goodput"] == pytest.approx(steps * point["step_time_s"])
        assert point["gpu_hours"] == pytest.approx(point["days"] * 24 * point["num_gpus"])
        assert point["price"] == pytest.approx(point["gpu_hours"] * 4.916)
        assert 0.9 < point["goodput"] < 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-gpus", "0"], "--num-gpus 0 must be at least 1"),
        (["--num-gpus", "4", "--tokens", "0"], "--tokens 0.0 must be positive"),
        (["--num-gpus", "4", "--price-per-gpu-hour", "-1"], "--price-per-gpu-hour -1.0 must be finite"),
        (["--num-gpus", "4", "--cluster", "abacus"], "There is no cluster abacus: use the path"),
        (["--num-gpus", "4", "--tensor-paralel-size", "2"], "--tensor-paralel-size is not a flag of pretrain_llama.py"),
        (["--num-gpus", "4", "--measured", "none.jsonl"], "--measured none.jsonl cannot be read"),
        (["--num-gpus", "4", "--tensor-model-parallel-size", "3"], "No layout on --num-gpus 4 satisfies the flags"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*TINY, *words) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"ERROR: {sentence}") and said.count("\n") == 1


def test_plan_is_a_flag_of_the_training_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, *FEW, "--bf16", "--plan", "--plan-json", str(tmp_path / "plan.json")]
    words += ["--plan-tokens", "3e9", "--plan-price-per-gpu-hour", "2"]
    assert pretrain_llama.main([*words, "--tensor-model-parallel-size", "2", "--num-gpus", "2"]) == ExitCode.COMPLETE
    result = json.loads((tmp_path / "plan.json").read_text())
    for point in result["scaling"]:
        assert point["days"] * 86_400 * point["goodput"] == pytest.approx(3e9 / (8 * 256) * point["step_time_s"])
        assert point["price"] == pytest.approx(2 * point["gpu_hours"])
    layouts = result["layouts"]
    assert layouts and {one["flags"]["tensor-model-parallel-size"] for one in layouts} == {2}
    text = capsys.readouterr().out
    assert "--plan" not in text and "--num-gpus" not in text and "--tensor-model-parallel-size 2" in text
    assert pretrain_llama.main(words) == ExitCode.ACTION_REQUIRED
    assert "--plan needs --num-gpus" in capsys.readouterr().err
    assert pretrain_llama.main([*words, "--num-gpus", "2", "--plan-measured", "none.jsonl"]) != ExitCode.COMPLETE
    assert "--plan-measured none.jsonl cannot be read" in capsys.readouterr().err


def test_a_flag_of_the_job_is_not_repeated() -> None:
    words = ["--num-gpus", "4", *TINY, "--bf16", "--tensor-model-parallel-size", "2"]
    _, found = plan_layout.parse(words)
    assert found.count("--bf16") == 1 and "--tensor-model-parallel-size" in found
    assert found.count("--fp8-format") == 0
    _, found = plan_layout.parse([*words, "--precision", "fp8", "--fp8-format", "hybrid"])
    assert (found.count("--bf16"), found.count("--fp8-format")) == (1, 1)


def test_without_a_terminal_each_part_of_a_search_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with plan_layout.progress_bar() as report:
        for what, done, total in (("enumerate layouts", 0, 1), ("price layouts", 0, 1), ("dry run", 1, 5)):
            report(what, done, total)
            report(what, done, total)
    assert capsys.readouterr().err == "> price layouts ...\n> dry run: 1 of 5 ...\n"


def test_flags_are_left_out_with_their_values() -> None:
    words = ["--a", "--num-gpus", "8", "--b=1", "--plan-json=x", "--c", "1", "2"]
    assert without_flags(words, {"num_gpus", "plan_json"}) == ["--a", "--b=1", "--c", "1", "2"]
    with pytest.raises(ConfigError, match="--plan-html needs --plan"):
        parse_command_line(["--plan-html", "x"]).plan.check()
