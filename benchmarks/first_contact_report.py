#!/usr/bin/env python3
"""Write what benchmarks/first_contact.py and gpu_day.py have measured into the section "GPUs" of docs/performance.md:

    python benchmarks/first_contact_report.py --out DIR
    python benchmarks/first_contact_report.py --out call1.tgz call2.tgz

It replaces what is between the two marks of the page; nothing there is written by hand.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_lines.line import RESULTS, Result, Verdict, figures_of, own_results, read_results, whole_of
from benchmarks.gpu_lines.runner import SESSIONS, read_archive
from benchmarks.gpu_lines.table import brief, note_of, parts_to_show, peak_memory, verdict_of
from megatron.commands.tool import run_tool
from megatron.errors import ConfigError
from megatron.urls import refuse_urls

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN = "<!-- Written by benchmarks/first_contact_report.py: begin -->"
END = "<!-- Written by benchmarks/first_contact_report.py: end -->"

Results = dict[str, list[Result]]

PREDICTED = {
    "8b": {"matrix products": 15.8, "attention": 4.2, "norm and elementwise": 1.5},
    "70b-tp4": {"matrix products": 15.5, "attention": 2.1, "norm and elementwise": 0.7},
    "405b-tp8": {"matrix products": 28.8, "attention": 2.1, "norm and elementwise": 0.7},
}
"""Milliseconds of a layer and a microbatch of 8,192 tokens, both passes, before anything had run: products at 0.70
PFLOP/s (weight gradients 8 % slower), cuDNN's attention at 560 and 430 TFLOP/s, elementwise operations at 2.6 TB/s of
the bytes in tests/budgets/launches.md."""


@dataclass(frozen=True)
class ReportConfig:
    """From where, to where."""

    out: tuple[str, ...]
    """Directories that the commands have written, or their archives."""
    page: str = str(PAGE)
    """Page whose section is replaced."""


@dataclass(frozen=True)
class Measured:
    """What one directory or archive has."""

    results: Results
    sessions: list[dict[str, Any]]
    """Date and command of each start."""


def read(place: Path) -> Measured:
    """The results of a directory or an archive. Raises :class:`ConfigError` if it has none."""
    if place.is_file():
        with tempfile.TemporaryDirectory() as directory:
            read_archive(place, Path(directory), (RESULTS, SESSIONS))
            return read(Path(directory))
    if not (place / RESULTS).exists():
        raise ConfigError(f"{place} has no {RESULTS}: run python benchmarks/first_contact.py --call 1 --out DIR first.")
    lines = (place / SESSIONS).read_text(encoding="utf-8").splitlines()
    return Measured(read_results(place), [json.loads(line) for line in lines])


def section(measured: Sequence[Measured]) -> str:
    """The section in Markdown."""
    results: Results = {}
    for one in measured:
        results |= one.results
    parts = [_source(measured, results), _lines(results), _layers(results), _memory(results), _others(results)]
    return "\n\n".join(part for part in parts if part)


def _source(measured: Sequence[Measured], results: Results) -> str:
    facts = {**(figures_of(results, "facts", "versions") or {}), **(figures_of(results, "facts", "device") or {})}
    named = [f"{name} {facts[name]}" for name in ("torch", "triton", "driver_version", "power.limit") if name in facts]
    text = f"Measured on {facts.get('name', 'an unknown device')} ({', '.join(named) or 'versions unknown'}):\n"
    starts = [session for one in measured for session in one.sessions]
    return text + "".join(f"\n- {start['started'][:10]}: `{start['command']}`" for start in starts)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown; empty without rows."""
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


def _lines(results: Results) -> str:
    """Every line with its figure beside its expectation."""
    rows = []
    for name, found in results.items():
        whole = whole_of(found)
        figures = {} if whole is None else whole.figures
        figure = f"{figures['figure_name']} {figures['figure']:.3g}" if "figure" in figures else ""
        memory, clock = peak_memory(found), figures.get("least_busy_sm_clock_mhz")
        rows.append(
            (
                name,
                verdict_of(found),
                figure,
                figures.get("expected", ""),
                "" if memory is None else f"{memory / 2**30:.1f}",
                clock or "",
                figures.get("throttle_while_busy", ""),
                "" if whole is None else f"{whole.seconds:.0f}",
            )
        )
    header = ("line", "verdict", "measured", "expected", "peak GiB", "lowest busy MHz", "slowed by", "s")
    return _table(header, rows)


def _layers(results: Results) -> str:
    """Milliseconds of a layer by group of kernels, measured beside predicted."""
    rows = []
    for name, predicted in PREDICTED.items():
        figures = figures_of(results, name)
        if not figures or not figures.get("ms_per_layer"):
            continue
        layers = figures["step_ms"] / figures["ms_per_layer"]
        found = {group: figures["kernel_ms"].get(group, 0.0) / layers for group in predicted}
        cells = [f"{found[group]:.2f} ({predicted[group]})" for group in predicted]
        speeds = [f"{figures[key]:.3f}" for key in figures if key.startswith("speed / ")]
        rows.append((name, *cells, f"{figures['ms_per_layer']:.2f} ({sum(predicted.values()):.1f})", ", ".join(speeds)))
    groups = list(PREDICTED["8b"])
    header = ("ms of a layer, measured (predicted)", *groups, "all", "speed / bound with our kernels, torch's, others")
    return _table(header, rows)


def _memory(results: Results) -> str:
    """Memory of runs beside the plan of the dry run."""
    rows = []
    for name in results:
        own, plan = figures_of(results, name) or {}, figures_of(results, name, "dry run")
        if plan is None or "peak_bytes" not in own:
            continue
        rows += [
            (name, "peak", *_gib(own["peak_bytes"], plan["peak_bytes"])),
            (name, "between iterations", *_gib(own["held_bytes"], plan["held_bytes"])),
            (name, "outside of torch's allocator", *_gib(own["outside_allocator_bytes"], plan["allowance_bytes"])),
        ]
    return _table(("run", "GiB", "measured", "dry run", "measured / dry run"), rows)


def _gib(found: float, planned: float) -> tuple[str, str, str]:
    return f"{found / 2**30:.2f}", f"{planned / 2**30:.2f}", f"{found / planned:.3f}"


def _others(results: Results) -> str:
    """All results that are not right, and the first figures of the others."""
    rows = []
    for name, found in results.items():
        parts = parts_to_show(own_results(found))
        for part in parts:
            rows.append((name, part.name, part.verdict, note_of(part) or brief(part.figures, 12)))
        whole = whole_of(found)
        if whole is not None and whole.error and all(part.verdict == Verdict.RIGHT for part in parts):
            rows.append((name, "", whole.verdict, note_of(whole)))
    return _table(("line", "result", "verdict", "figures, or the error"), rows)


def write_section(page: Path, text: str) -> None:
    """Replace what is between the marks of ``page``."""
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no section to replace: add the lines {BEGIN} and {END}.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def write(config: ReportConfig) -> None:
    """Write the section."""
    for place in config.out:
        refuse_urls({"--out": place, "--page": config.page}, "name a local one")
    write_section(Path(config.page), section([read(Path(place)) for place in config.out]))


main = partial(run_tool, ReportConfig, write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
