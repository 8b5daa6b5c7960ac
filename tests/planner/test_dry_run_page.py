"""``--dry-run-html``: the page shows the figures of the JSON report, and works in a browser."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.planner.memory_chart import gib
from tests.end_to_end.run_process import call_training
from tests.reports.load_page import WIDTHS, Page, assert_loads_nothing, copied, load, needs_browser

pytestmark = pytest.mark.processes

TINY = (
    "--model tiny --mock-data --vocab-size 1000 --bf16 --seq-length 256 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --dry-run"
)
LAYOUT = "--num-gpus 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --global-batch-size 48"


def dry_run(flags: str, directory: Path) -> tuple[str, dict[str, Any]]:
    """The page and the JSON report."""
    page, report = directory / "page.html", directory / "report.json"
    words = ["--dry-run-html", str(page), "--dry-run-json", str(report)]
    outcome = call_training([*TINY.split(), *flags.split(), *words])
    assert outcome.exit_code == 0, outcome.stderr
    return page.read_text(), json.loads(report.read_text())


def test_the_page_has_the_figures_of_the_report(tmp_path: Path) -> None:
    text, report = dry_run(LAYOUT, tmp_path)
    assert_loads_nothing(text)
    page = Page(text)
    for sizes in report["memory_bytes"].values():
        for kind, size in sizes.items():
            assert gib(size) in page.text
            assert kind == "total" or not size or kind in page.text
        assert f"{gib(sizes['total'])} GiB ({sizes['total'] / report['gpu_memory_bytes']:.0%})" in page.text
    for sizes in report["bytes_sent"].values():
        assert all(gib(size) in page.text for axis, size in sizes.items() if axis != "several")
    for sizes in report["bytes_sent_by_link"].values():
        tips = page.attributes["data-tip"]
        for link, name in (("in node", "inside a node"), ("across", "across nodes")):
            assert any(f"{name}\n{gib(sizes[link])} GiB" in tip for tip in tips)
    for axis, group in report["layout"].items():
        assert f"({axis})" in page.text and " ".join(map(str, group["ranks"])) in page.text
    assert f"{report['bubble_fraction']:.1%}" in page.text
    assert f"GPU: {gib(report['gpu_memory_bytes'])} GiB" in page.text
    for stage, count in report["parameters_per_rank"].items():
        assert f"{count:,}" in page.text and f"stage {stage}" in page.text


def test_the_timeline_has_a_box_for_every_pass(tmp_path: Path) -> None:
    text, report = dry_run(LAYOUT, tmp_path)
    tips = Page(text).attributes["data-tip"]
    for kind in ("forward", "backward"):
        for microbatch in range(report["num_microbatches"]):
            assert sum(tip.startswith(f"{kind}, microbatch {microbatch}\n") for tip in tips) == 2


def test_flags_that_make_it_fit_can_be_copied(tmp_path: Path) -> None:
    flags = "--num-gpus 4 --pipeline-model-parallel-size 2 --global-batch-size 16"
    _, whole = dry_run(flags, tmp_path)
    limit = (whole["memory_bytes"]["0"]["total"] - 200_000) / 2**30
    text, report = dry_run(f"{flags} --gpu-memory-gb {limit}", tmp_path)
    assert not report["fits"] and "Does not fit" in text
    assert copied(text) == [remedy["flags"] for remedy in report["remedies"]]
    for remedy in report["remedies"]:
        assert f"fits: {gib(remedy['needed'])} GiB on stage {remedy['stage']}" in text


@needs_browser
def test_the_page_of_a_dry_run_works_in_a_browser(tmp_path: Path) -> None:
    text, _ = dry_run(f"{LAYOUT} --gpu-memory-gb 4", tmp_path)
    for width in WIDTHS:
        assert load(text, width)["tip"]
    cut = """
    return Math.max(...[...document.querySelectorAll(".scroll")].map((one) => one.scrollWidth - one.clientWidth));
    """
    assert load(text, 1400, cut)["more"] <= 0


def test_a_page_that_cannot_be_written_is_named() -> None:
    outcome = call_training([*TINY.split(), "--num-gpus", "1", "--dry-run-html", "nowhere/page.html"])
    assert outcome.exit_code == 2
    assert "--dry-run-html nowhere/page.html cannot be written" in outcome.stderr
