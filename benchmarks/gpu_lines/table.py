"""The table of a session: a row for each line, its figure beside what is expected, and the first error."""

from collections.abc import Mapping, Sequence

from benchmarks.gpu_lines.line import WHOLE, Figures, Result, Verdict, own_results, whole_of

MOST_ROWS, MOST_WIDTH = 60, 170
"""Rows and characters of a row, the header included."""
MOST_NAME = 42
"""Characters of a result's name, whose end says most about a test."""
MOST_PARTS = 8
"""Results of a line; of more, only those that are not right are shown."""
HEADER = ("line", "", "s", "of", "figure", "expected", "GiB", "MHz", "figures, or the first error")


def as_text(results: Mapping[str, Sequence[Result]]) -> str:
    """The table in plain text, so that a machine without rich can print it."""
    rows = [HEADER, *(row for name, found in results.items() for row in rows_of(name, found))]
    counts: dict[Verdict, int] = {}
    for found in results.values():
        verdict = verdict_of(found)
        counts[verdict] = counts.get(verdict, 0) + 1
    summary = f"{len(results)} lines: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
    left_out = len(rows) - (MOST_ROWS - 2)
    if left_out > 0:
        rows = rows[:-left_out]
        summary = f"... and {left_out} rows more in results.jsonl\n{summary}"
    return "\n".join([*aligned(rows), summary]) + "\n"


def verdict_of(results: Sequence[Result]) -> Verdict:
    """The verdict on a line; one that has not ended is reported as hung."""
    whole = whole_of(results)
    return Verdict.HUNG if whole is None else whole.verdict


def row_text(name: str, results: Sequence[Result]) -> str:
    """One line's row, printed when the line has ended."""
    line, verdict, seconds, of, figure, expected, *_, note = rows_of(name, results)[0]
    beside = f"{figure} ({expected} expected)" if figure and expected else figure
    return "  ".join(filter(None, [f"{line}: {verdict}", f"{seconds} of {of} s" if seconds else "", beside, note]))


def rows_of(name: str, results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The row of a line, then a row for each of its results if there are several."""
    whole = whole_of(results) or Result(name, WHOLE, Verdict.HUNG, error="it has not ended")
    parts, figures = own_results(results), whole.figures
    note = note_of(whole) or (brief(parts[0].figures) if len(parts) == 1 else _counts(parts))
    rows: list[tuple[str, ...]] = [
        (
            name,
            str(whole.verdict),
            f"{whole.seconds:.0f}" if whole.seconds else "",
            _number(figures.get("expected_seconds"), "{:.0f}"),
            _number(figures.get("figure"), "{:.3g}"),
            f"{figures['figure_name']} {figures['expected']}" if "expected" in figures else "",
            _number(peak_memory(results), "{:.1f}", 2**-30),
            _number(figures.get("least_busy_sm_clock_mhz"), "{:.0f}"),
            note,
        )
    ]
    return [*rows, *map(_part_row, parts_to_show(parts))] if len(parts) > 1 else rows


def parts_to_show(parts: Sequence[Result]) -> list[Result]:
    """The results of a line that are not right, and those that have figures unless there are many."""
    return [part for part in parts if part.verdict != Verdict.RIGHT or (part.figures and len(parts) <= MOST_PARTS)]


def _part_row(part: Result) -> tuple[str, ...]:
    note = note_of(part) or brief(part.figures)
    name = part.name if len(part.name) <= MOST_NAME else f"…{part.name[1 - MOST_NAME :]}"
    return f"  {name}", str(part.verdict), f"{part.seconds:.0f}", "", "", "", "", "", note


def _counts(parts: Sequence[Result]) -> str:
    right = sum(part.verdict == Verdict.RIGHT for part in parts)
    return f"{right} of {len(parts)} right"


def peak_memory(results: Sequence[Result]) -> float | None:
    """The largest memory of a line: in use on the GPU, which was read now and then, or of torch's allocator."""
    names = ("most_memory_bytes", "peak_memory_bytes")
    return max((result.figures[name] for result in results for name in names if name in result.figures), default=None)


def note_of(result: Result) -> str:
    """The error and its place; empty without an error."""
    return " ".join(filter(None, [result.error, f"({result.where})" if result.where else ""])) if result.error else ""


def brief(figures: Figures, most: int = 6) -> str:
    """The first plain figures of a result."""
    plain = [(name, value) for name, value in figures.items() if isinstance(value, str | int | float)]
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain[:most]
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """``rows`` in columns, each row cut to :data:`MOST_WIDTH`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [line[:MOST_WIDTH] for line in lines]
