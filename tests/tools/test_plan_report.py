"""The planner's page: every figure of the result is on it, and it works in a browser."""

import dataclasses
import math
import shlex
from dataclasses import replace

import pytest

from megatron.commands.pages import plan_charts
from megatron.commands.pages import plan_report as plan_roofline
from megatron.commands.pages.plan_charts import days, seconds, short
from megatron.commands.pages.plan_report import plan_page
from megatron.planner.search.result import SearchResult, command
from megatron.planner.step_time.workload import TERMS
from megatron.reports.svg import gib, percentage
from tests.reports.load_page import NASTY, WIDTHS, Page, assert_loads_nothing, copied, load, needs_browser
from tests.tools.sample_search import planned, sample_layout, sample_result


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return sample_result()


@pytest.fixture(scope="module")
def page(result: SearchResult) -> Page:
    return Page(plan_page(result))


def tips(page: Page) -> list[str]:
    return page.attributes["data-tip"]


def test_every_figure_of_a_layout_is_on_the_page(result: SearchResult, page: Page) -> None:
    for rank, one in enumerate(result.layouts, start=1):
        tip = next(tip for tip in tips(page) if tip.startswith(f"{rank}: {one.name}\n") and "MFU" in tip)
        for figure in (
            seconds(one.step_time_s),
            *map(seconds, one.interval_s),
            f"{one.tokens_per_s_per_gpu:,.0f}",
            f"{one.mfu:.1%}",
            gib(one.memory_bytes),
            one.limits,
        ):
            assert figure in tip and figure in page.text
        assert f"{one.bubble_fraction:.1%}" in page.text
        for name, term in one.terms.items():
            bar = f"{rank}: {one.name}\n{name}: {seconds(term)}, {term / one.step_time_s:.1%}"
            assert (bar in tips(page)) == (term > 0)
        if one.passes is not None:
            assert seconds(one.step_time_s) in page.text


def test_layouts_are_marked_and_their_flags_can_be_copied(result: SearchResult) -> None:
    text = plan_page(result)
    assert text.count('<span class="badge good">tie</span>') == len(result.ties) == 3
    for name in ("chosen rehearsed", "tie rehearsed", "tie"):  # the first, the second, and the third
        assert text.count(f'class="{name}"') == 1
    assert copied(text) == [shlex.join(command(result.job, one)) for one in result.layouts]


def test_the_run_and_its_cost_are_on_the_page(result: SearchResult, page: Page) -> None:
    cost = result.cost
    assert (short(cost.gpu_hours), days(cost.days)) == (short(cost.days * 24 * 64), days(cost.gpu_hours / 24 / 64))
    for point in result.scaling:
        assert point.price is not None
        for figure in (
            f"{point.num_gpus:,}",
            days(point.days),
            f"{point.gpu_hours:,.0f}",
            f"{point.price:,.0f}",
            percentage(point.goodput),
            f"{point.tokens_per_s_per_gpu:,.0f}",
        ):
            assert figure in page.text
        assert any(tip.startswith(f"{point.num_gpus:,} GPUs: ") for tip in tips(page))
    for sentence in (*result.warnings, f"{result.num_enumerated:,} layouts", f"{result.num_fitting:,} fit"):
        assert sentence in page.text


def test_the_memory_of_every_stage_is_on_the_page(result: SearchResult, page: Page) -> None:
    limit = result.job.config.dry_run.gpu_memory
    for stage, kinds in enumerate(result.best.memory_by_stage):
        total = sum(kinds.values())
        assert f"{gib(total)} GiB ({total / limit:.0%})" in page.text
        for kind, size in kinds.items():
            assert (f"stage {stage}: {kind}\n{gib(size)} GiB, {size / total:.0%}" in tips(page)) == (size > 0)
    assert "GPU: 80.00 GiB" in page.text


def test_the_timeline_has_the_durations_of_the_rehearsal(result: SearchResult, page: Page) -> None:
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
    for tip in (
        "data parallelism\n250 ms, from 1.6 s",
        "optimizer\n125 ms, from 1.9 s",
        "rest of the step\n500 ms, from 2.0 s",
    ):
        assert tip in found


def test_of_a_long_schedule_some_microbatches_are_drawn(result: SearchResult) -> None:
    """128 sequences on a replica: 80 microbatches are 160 boxes."""
    passes = result.layouts[1].passes
    assert passes is not None
    passes = replace(passes, by_virtual_stage=passes.by_virtual_stage[:4])
    one = replace(result.layouts[1], layout=sample_layout(8, 4, 2), passes=passes)
    page = Page(plan_page(replace(result, layouts=(one,), num_fitting=1)))
    assert "Drawn with 80 of the 128 microbatches" in page.text


def test_products_are_below_the_roof(result: SearchResult, page: Page) -> None:
    passes = result.best.passes
    assert passes is not None
    total = sum(product.seconds for product in passes.products)
    dots = plan_roofline.dots(passes.products)
    assert [dot.seconds for dot in dots] == sorted((product.seconds for product in passes.products), reverse=True)
    for product in passes.products:
        m, n, k = product.m, product.n, product.k
        rate = 2 * m * n * k * product.count / product.seconds
        intensity = 2 * m * n * k / (2 * (m * k + k * n + m * n))
        share = percentage(product.seconds / total)
        tip = f"{rate / 1e12:,.0f} TFLOP/s at {intensity:,.0f} FLOP/byte\n"
        found = [text for text in tips(page) if text.startswith(f"{m:,} x {n:,} x {k:,}, bfloat16") and tip in text]
        assert len(found) == 1 and share in found[0]
        assert rate < result.job.cluster.bf16_flops
    assert "bf16 peak 989 TFLOP/s, from 295 FLOP/byte on" in page.text


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


def test_layouts_of_other_sizes_are_compared_with_the_rehearsed_ones(result: SearchResult) -> None:
    copies = [replace(result.layouts[0], is_rehearsed=False)] * 20
    ranks = [
        rank
        for rank, _ in plan_charts.compared(
            replace(result, layouts=(*result.layouts[:2], *copies, *result.layouts[2:]))
        )
    ]
    assert ranks == [1, 2, 23, 24, 25, 26, 27, 28]


def test_a_result_without_rehearsals_price_and_other_numbers_of_gpus(result: SearchResult) -> None:
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
    job = replace(result.job, cluster=dataclasses.replace(result.job.cluster, name=NASTY), arguments=(NASTY,))
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
    text = plan_page(replace(result, layouts=(*result.layouts, *others), num_fitting=len(others)))
    assert len(text) < 2_000_000
    assert "dots that others cover are not drawn" in text and "The first 100 of" in text


@pytest.mark.processes
@needs_browser
@pytest.mark.parametrize(("width", "is_hostile"), [*zip(WIDTHS, (False, True), strict=True)])
def test_the_page_of_a_plan_works_in_a_browser(width: int, is_hostile: bool, result: SearchResult) -> None:
    """Hovering over a layout marks it everywhere, over an entry of a legend fades the rest; flags can be copied."""
    more = """
    const hover = (one) => one.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    const count = (selector) => document.querySelectorAll(selector).length;
    hover(document.querySelector("tr[data-link='layout-2']"));
    const linked = [count("circle.linked"), count(".row.linked"), count("tr.linked")];
    const entry = [...document.querySelectorAll(".legend li")].find((one) => one.dataset.part === "attention");
    hover(entry);
    const faded = [count("figure.fading"), count("rect.linked"), count("tr.linked")];
    hover(document.querySelector("h1"));
    const cleared = count(".linked") + count(".fading");
    const button = document.querySelector("button.copy");
    button.click();
    const wide = [...document.querySelectorAll("figure")].map((one) => one.scrollWidth - one.clientWidth);
    return {linked, faded, cleared, button: button.textContent, wide: Math.max(...wide)};
    """
    shown = load(plan_page(hostile(result) if is_hostile else result), width, more)
    assert shown["title"].endswith(f"({NASTY})") is is_hostile
    found = shown["more"]
    assert found["linked"] == [1, 1, 1]
    assert found["faded"] == [1, len(plan_charts.compared(result)), 0]
    assert found["cleared"] == 0
    assert found["button"] in ("copied", "selected")
    assert found["wide"] <= 0


@needs_browser
def test_no_column_is_cut_off_on_a_usual_screen(result: SearchResult) -> None:
    more = """
    const tables = [...document.querySelectorAll(".scroll")].map((one) => one.scrollWidth - one.clientWidth);
    return {cut: Math.max(...tables), page: document.documentElement.scrollWidth - window.innerWidth};
    """
    long = replace(result.best, limits="context-parallel messages: 12% of the step")
    found = load(plan_page(replace(result, layouts=(long, *result.layouts[1:]))), 1400, more)["more"]
    assert found["cut"] <= 0
    assert found["page"] <= 0
