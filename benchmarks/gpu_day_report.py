#!/usr/bin/env python3
"""Write what benchmarks/gpu_day.py has measured into the section "GPUs" of docs/performance.md:

    python benchmarks/gpu_day_report.py --out DIR

It replaces what is between the two marks of the page; nothing there is written by hand.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.gpu_day_stages.checks import FILE, Check, read_checks
from benchmarks.gpu_day_stages.summary import GOALS, brief, figures_of
from megatron.errors import ConfigError, UserError
from megatron.urls import refuse_urls

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN = "<!-- Written by benchmarks/gpu_day_report.py: begin -->"
END = "<!-- Written by benchmarks/gpu_day_report.py: end -->"


@dataclass(frozen=True)
class ReportConfig:
    """From where, to where."""

    out: str
    """Directory that benchmarks/gpu_day.py has written."""
    page: str = str(PAGE)
    """Page whose section is replaced."""


def section(checks: Sequence[Check], day: str) -> str:
    """The section in Markdown, measured on ``day``."""
    facts = {**(figures_of(checks, "facts", "versions") or {}), **(figures_of(checks, "facts", "device") or {})}
    versions = ", ".join(
        f"{name} {facts[name]}" for name in ("torch", "driver_version", "power.limit") if name in facts
    )
    failed = [check for check in checks if not check.ok]
    lines = [f"Measured {day} on {facts.get('name', 'an unknown device')} ({versions or 'versions unknown'}):"]
    lines += ["", "| goal | at least | measured |", "| --- | --- | --- |"]
    for goal in GOALS:
        found = goal.found(checks)
        lines.append(f"| {goal.name} | {goal.least:.2f} | {'not measured' if found is None else f'{found:.3f}'} |")
    for stage in ("bench", "fp8"):
        lines += _steps(stage, [check for check in checks if check.stage == stage and "step_ms" in check.figures])
    lines += ["", "| stage | check | figures |", "| --- | --- | --- |"]
    others = [check for check in checks if check.ok and check.stage not in ("bench", "selection")]
    lines += [f"| {one.stage} | {one.name} | {brief(one.figures)} |" for one in others if "step_ms" not in one.figures]
    if failed:
        lines += ["", "Failed:", "", "| stage | check | error |", "| --- | --- | --- |"]
        lines += [f"| {check.stage} | {check.name} | {_cell(check.error or '')} |" for check in failed]
    return "\n".join(lines)


def _steps(stage: str, checks: Sequence[Check]) -> list[str]:
    """The rows of a sweep, a table; empty without rows."""
    if not checks:
        return []
    header = f"| {stage} | step ms | TFLOP/s | share of the peak | of the bound with our kernels | MiB of a step |"
    lines = ["", header, "| --- | --- | --- | --- | --- | --- |"]
    for check in checks:
        figures = check.figures
        mfu = "" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
        bound = figures["our_speed_relative_to"]["bound, our kernels"]
        sizes = f"{figures['step_ms']:.2f} | {figures['tflops']:.1f} | {mfu} | {bound:.3f}"
        lines.append(f"| {check.name} | {sizes} | {figures['step_bytes'] / 2**20:,.0f} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write_section(page: Path, text: str) -> None:
    """Replace what is between the marks of ``page``."""
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no section to replace: add the lines {BEGIN} and {END}.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the section; the exit code."""
    config = tyro.cli(ReportConfig, args=arguments, description=__doc__)
    try:
        refuse_urls({"--out": config.out, "--page": config.page}, "name a local one")
        file = Path(config.out) / FILE
        if not file.exists():
            raise ConfigError(f"{file} does not exist: run python benchmarks/gpu_day.py --out {config.out} first.")
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
        write_section(Path(config.page), section(read_checks(Path(config.out)), day))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
