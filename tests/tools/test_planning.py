"""The search of layouts: its page has every figure of the result and works in a browser; from the command line, what it
prints and writes, and what it refuses."""

import dataclasses
import json
import math
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megatron.command_line.words import Given
from megatron.commands import planning, pretrain_llama
from megatron.commands.pages import plan_charts, plan_report
from megatron.commands.pages.plan_charts import seconds
from megatron.commands.pages.plan_report import plan_page, simulation_command
from megatron.config.command_line import CommandLine, parse_command_line
from megatron.errors import ConfigError, ExitCode
from megatron.flags import words_of
from megatron.planner.search.result import SearchResult, command
from megatron.planner.step_time.workload import TERMS
from megatron.reports.svg import short
from tests.reports.load_page import NASTY, WIDTHS, Page, assert_loads_nothing, copied, cut_off, load, needs_browser
from tests.tools.sample_search import STORED, planned, sample_layout, sample_result, shown


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return sample_result()


@pytest.fixture(scope="module")
def page(result: SearchResult) -> Page:
    return Page(plan_page(result))


def tips(page: Page) -> list[str]:
    return page.attributes["data-tip"]


def test_every_figure_of_the_result_is_on_the_page(result: SearchResult, page: Page) -> None:
    assert shown(page) == STORED.read_text(encoding="utf-8"), "python -m tests.tools.sample_search writes it anew"
    assert result.best.passes is not None
    seconds_of_products = [dot.seconds for dot in plan_report.dots(result.best.passes.products)]
    assert seconds_of_products == sorted(seconds_of_products, reverse=True)


def test_layouts_are_marked_and_their_flags_can_be_copied(result: SearchResult) -> None:
    text = plan_page(result)
    assert text.count('<span class="badge good">tie</span>') == len(result.ties) == 3
    for name in ("chosen simulated", "tie simulated", "tie"):  # the first, the second, and the third
        assert text.count(f'class="{name}"') == 1
    flags, simulation = [shlex.join(command(result.job, one)) for one in result.layouts], simulation_command(result)
    assert copied(text) == [flags[0], f"{simulation} --html simulated.html", *flags[1:]]
    assert "--start-s" not in simulation, "the phases of a restart have the plan's five minutes"
    operation = replace(result.job.operation, restart_s=600.0)
    slow = simulation_command(replace(result, job=replace(result.job, operation=operation)))
    assert slow == f"{simulation} --notice-s 30 --decide-s 90 --start-s 240 --load-s 120 --warm-up-s 120"


def test_the_timeline_has_the_durations_of_its_units(result: SearchResult, page: Page) -> None:
    """5 chunks on 4 stages: 160 boxes of a stage are 16 of 64 microbatches."""
    times = result.best.passes
    assert times is not None
    assert "Drawn with 16 of the 64 microbatches" in page.text
    passes = [tip for tip in tips(page) if ", microbatch " in tip]
    assert len(passes) == 16 * 2 * 20
    forward = 1e3 * times.by_virtual_stage[0][0]
    backward = 1e3 * sum(times.by_virtual_stage[-1][1:])
    assert sum(f"\n{forward:.3g} ms, from 0 s" in tip for tip in passes) == 1
    ends = [tip for tip in passes if f"\n{backward:.3g} ms" in tip]
    assert len(ends) == 16 and all(tip.startswith("backward, microbatch ") and ", chunk 4\n" in tip for tip in ends)


def test_what_a_step_takes_once_is_at_the_end_of_the_timeline(result: SearchResult) -> None:
    """On one stage the passes take the microbatches times their durations."""
    best = result.best
    assert best.passes is not None
    layout = sample_layout(8, 1, 1)  # 16 microbatches
    terms = {"products": 1.6, "data parallelism": 0.25, "optimizer": 0.125, "gaps": 0.5}
    passes = replace(best.passes, by_virtual_stage=((0.03, 0.04, 0.03),))
    one = replace(best, layout=layout, step_time_s=2.475, terms=terms, passes=passes)
    found = tips(Page(plan_page(replace(result, layouts=(one,)))))
    after = (
        "data parallelism\n250 ms, from 1.6 s",
        "optimizer\n125 ms, from 1.9 s",
        "rest of the step\n500 ms, from 2.0 s",
    )
    assert set(after) <= set(found)


def test_fp8_has_a_roof_of_its_own(result: SearchResult) -> None:
    best = result.best
    assert best.passes is not None
    products = tuple(replace(product, dtype="float8_e4m3fn") for product in best.passes.products[:2])
    passes = replace(best.passes, products=(*products, *best.passes.products[2:]))
    text = Page(plan_page(replace(result, layouts=(replace(best, passes=passes),)))).text
    assert "FP8 peak 1,979 TFLOP/s, from 591 FLOP/byte on" in text
    assert "bf16 peak 989 TFLOP/s" in text and "products in float8_e4m3fn" in text


def test_the_front_has_what_no_layout_beats() -> None:
    layout = sample_layout(8, 1, 1)
    memory = (30, 20, 40, 10, 25)
    every = [replace(planned(rank, layout), memory_bytes=size * 2**30) for rank, size in enumerate(memory)]
    front = plan_charts._front(list(enumerate(every, start=1)))
    assert list(front) == [4, 2, 1]


def test_layouts_of_other_sizes_are_compared_with_the_simulated_ones(result: SearchResult) -> None:
    copies = [replace(result.layouts[0], is_simulated=False)] * 20
    many = replace(result, layouts=(*result.layouts[:2], *copies, *result.layouts[2:]))
    assert [rank for rank, _ in plan_charts.compared(many)] == [1, 2, 23, 24, 25, 26, 27, 28]


def test_a_result_without_dry_runs_price_and_other_numbers_of_gpus(result: SearchResult) -> None:
    plain = replace(result.layouts[2], step_time_s=0.05, terms={"products": 0.05})
    point = replace(result.cost, price=None)
    text = plan_page(replace(result, layouts=(plain,), scaling=(point,), warnings=()))
    assert_loads_nothing(text)
    assert "Roofline" not in text and "Strong scaling" not in text and "50 ms" in text
    priceless = tuple(replace(point, price=None) for point in result.scaling)
    assert "<th>price</th>" not in plan_page(replace(result, scaling=priceless))


def test_terms_have_colours_and_numbers_few_digits() -> None:
    assert set(TERMS) == set(plan_charts.TERMS)
    assert len(set(plan_charts.TERMS.values())) == len(TERMS)
    assert [seconds(value) for value in (0.0123, 0.5, 8.2149, 61.26)] == ["12.3 ms", "0.500 s", "8.215 s", "61.26 s"]
    large = {0.999: "0.999", 999.6: "1 k", 12345.0: "12.3 k", 3.55e6: "3.55 M", 2e12: "2 T"}
    assert {value: short(value) for value in large} == large


def hostile(result: SearchResult) -> SearchResult:
    """With markup wherever a name comes from a file or from another module."""
    best = result.best
    assert best.passes is not None
    product = replace(best.passes.products[0], dtype=NASTY)
    passes = replace(best.passes, products=(product, *best.passes.products[1:]))
    terms = {**best.terms, NASTY: 0.1}
    best = replace(best, limits=NASTY, advice=NASTY, passes=passes, terms=terms)
    job = replace(
        result.job, cluster=dataclasses.replace(result.job.cluster, name=NASTY), line=CommandLine((Given(NASTY, ()),))
    )
    return replace(result, job=job, layouts=(best, *result.layouts[1:]), warnings=(NASTY,))


def test_names_are_text(result: SearchResult) -> None:
    text = plan_page(hostile(result))
    assert_loads_nothing(text)
    assert "<script>document" not in text
    assert NASTY in Page(text).text


def test_many_layouts_make_a_page_that_loads_quickly(result: SearchResult) -> None:
    others = [
        replace(one, step_time_s=one.step_time_s * (1 + 0.9 * math.sin(number) ** 2), is_tie=False)
        for number in range(1000)
        for one in result.layouts[2:]
    ]
    text = plan_page(replace(result, layouts=(*result.layouts, *others)))
    assert len(text) < 2_000_000
    assert "dots that others cover are not drawn" in text and "The first 100 of" in text


@pytest.mark.processes
@needs_browser
@pytest.mark.parametrize(("width", "is_hostile"), [*zip(WIDTHS, (False, True), strict=True)])
def test_the_page_of_a_plan_works_in_a_browser(width: int, is_hostile: bool, result: SearchResult) -> None:
    """Hovering over a layout marks it everywhere, over an entry of a legend fades the rest; flags can be copied."""
    more = Path(__file__).with_name("hover_plan.js").read_text()
    seen = load(plan_page(hostile(result) if is_hostile else result), width, more)
    assert seen["title"].endswith(f"({NASTY})") is is_hostile
    found = seen["more"]
    assert found["linked"] == [1, 1, 1]
    assert found["faded"] == [1, len(plan_charts.compared(result)), 0]
    assert found["cleared"] == 0
    assert found["button"] in ("copied", "selected")
    assert found["wide"] <= 0


@needs_browser
def test_no_column_is_cut_off_on_a_usual_screen(result: SearchResult) -> None:
    long = replace(result.best, limits="context-parallel messages: 12% of the step")
    assert cut_off(plan_page(replace(result, layouts=(long, *result.layouts[1:])))) <= 0


# --- from the command line -----------------------------------------------------------------------------------

TINY = ["--model", "tiny", "--vocab-size", "1024", "--seq-length", "256", "--global-batch-size", "8"]
FEW = ["--use-distributed-optimizer", "--no-grad-reduce-in-bf16", "--micro-batch-size", "1"]
FEW += ["--pipeline-model-parallel-size", "1"]
"""Constraints that leave few layouts."""


def call(*words: str | Path) -> int:
    return planning.main([str(word) for word in words])


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The JSON, the page and the text of a search with two dry runs."""
    directory = tmp_path_factory.mktemp("plan")
    files = "--json", directory / "plan.json", "--html", directory / "plan.html"
    words = ["--cluster", "h100", "--num-gpus", "4", "--rehearse", "2", "--tokens", "1e9", *TINY, *FEW]
    with redirect_stdout(StringIO()) as printed:
        assert call(*words, *files) == ExitCode.COMPLETE
    return json.loads((directory / "plan.json").read_text()), (directory / "plan.html").read_text(), printed.getvalue()


def test_the_json_ranks_layouts(searched: tuple[dict[str, Any], str, str]) -> None:
    layouts = searched[0]["layouts"]
    assert len(layouts) == searched[0]["num_fitting"] <= searched[0]["num_enumerated"]
    for one in layouts:
        low, high = one["interval_s"]
        assert 0 < low < one["step_time_s"] < high
        assert one["step_time_s"] == pytest.approx(sum(one["terms_s"].values()))
        assert 0 < one["mfu"] < 1 and 4 < one["memory_gib"] < 5
        assert one["limits"] and one["advice"]
        assert one["flags"]["micro-batch-size"] == 1 and not one["changes_numerics"]
    ties, others = ([one["step_time_s"] for one in layouts if one["is_tie"] is tie] for tie in (True, False))
    assert max(ties) <= 1.02 * min(ties) and (not others or min(others) > 1.02 * min(ties))
    assert others == sorted(others)
    sizes = [point["num_gpus"] for point in searched[0]["scaling"]]
    assert sizes == sorted(sizes) and 4 in sizes and len(sizes) >= 3


def test_the_best_layouts_are_simulated(searched: tuple[dict[str, Any], str, str]) -> None:
    rehearsed = [one for one in searched[0]["layouts"] if one["is_rehearsed"]]
    assert len(rehearsed) == 2 and searched[0]["layouts"][0]["is_rehearsed"]
    for one in rehearsed:
        stages = [sum(kinds.values()) for kinds in one["memory_by_stage"]]
        assert max(stages) / 2**30 == pytest.approx(one["memory_gib"])
        assert stages.index(max(stages)) == one["tightest_stage"]


def test_the_flags_start_a_dry_run(
    searched: tuple[dict[str, Any], str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = searched[0]["layouts"][0]["flags"]
    words = [
        word
        for name, value in flags.items()
        for word in words_of(name.replace("-", "_"), tuple(value) if isinstance(value, list) else value)
    ]
    arguments = [*TINY, "--bf16", *words, "--lr", "1e-4", "--train-iters", "1", "--mock-data"]
    parse_command_line(arguments)
    assert pretrain_llama.main([*arguments, "--dry-run", "--num-gpus", "4", "--device", "cuda"]) == ExitCode.COMPLETE
    assert "fits" in capsys.readouterr().out


def test_the_text_and_the_page_show_the_best_layout(searched: tuple[dict[str, Any], str, str]) -> None:
    result, page, text = searched
    best = result["layouts"][0]
    assert f"{best['step_time_s']:.3f} s per step" in text
    assert f"limited by {best['limits']}" in text
    assert "pretrain_llama.py --model tiny" in text and "--micro-batch-size 1" in text
    assert page.startswith("<!DOCTYPE html>") and "</html>" in page


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
    _, found = planning.parse(words)
    assert found.words.count("--bf16") == 1 and "tensor_model_parallel_size" in found.fields
    assert "fp8_format" not in found.fields
    _, found = planning.parse([*words, "--precision", "fp8", "--fp8-format", "hybrid"])
    assert (found.words.count("--bf16"), found.words.count("--fp8-format")) == (1, 1)


def test_without_a_terminal_each_part_of_a_search_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with planning.progress_bar() as report:
        for what, done, total in (("enumerate layouts", 0, 1), ("price layouts", 0, 1), ("dry run", 1, 5)):
            report(what, done, total)
            report(what, done, total)
    assert capsys.readouterr().err == "> price layouts ...\n> dry run: 1 of 5 ...\n"


def test_flags_are_left_out_with_their_values() -> None:
    line = CommandLine.of(["--a", "--num-gpus", "8", "--b=-x", "--plan-json=x", "--no-bf16", "--c", "1", "2"])
    assert line.fields == {"a", "num_gpus", "b", "plan_json", "bf16", "c"}
    assert line.without({"num_gpus", "plan_json", "bf16"}).words == ["--a", "--b=-x", "--c", "1", "2"]
    with pytest.raises(ConfigError, match="--plan-html needs --plan"):
        parse_command_line(["--plan-html", "x"]).plan.check()
