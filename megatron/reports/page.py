"""The frame of a report: one HTML file with its style and script in it, which loads nothing from anywhere.

All functions escape the text that they are given; functions that take parts of a page take HTML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_LONGEST_FLAG = 46
"""Characters that fit in a line on a narrow screen."""

Mood = Literal["", "good", "warn", "bad"]


def page(
    title: str, subtitle: str, parts: Iterable[str], footer: str = "", more_style: str = "", more_script: str = ""
) -> str:
    """The whole file; ``more_style`` and ``more_script`` follow those of all pages."""
    style = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "charts.css")) + more_style
    script = (_HERE / "page.js").read_text(encoding="utf-8") + more_script
    end = f"<footer>{escape(footer)}</footer>" if footer else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header><div><h1>{escape(title)}</h1><span class="subtitle">{escape(subtitle)}</span></div>
<button id="theme" type="button">light / dark</button></header>
{"".join(f"{part}{chr(10)}" for part in parts)}{end}
</main>
<div id="tip" role="tooltip"></div>
<script>
{script}</script>
</body>
</html>
"""


def section(title: str, *parts: str, note: str = "") -> str:
    """A heading, a sentence about it, and its parts."""
    explained = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explained}{''.join(parts)}</section>"


def paragraph(text: str, css: str = "") -> str:
    return f"<p{_class(css)}>{escape(text)}</p>"


@dataclass(frozen=True)
class Tile:
    """A figure with its name above and a remark below."""

    label: str
    value: str
    detail: str = ""
    is_main: bool = False


def tiles(items: Sequence[Tile]) -> str:
    """Figures beside each other."""
    cells = (
        f'<div class="tile{" main" if item.is_main else ""}"><div class="label">{escape(item.label)}</div>'
        f'<div class="value">{escape(item.value)}</div><div class="detail">{escape(item.detail)}</div></div>'
        for item in items
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


@dataclass(frozen=True)
class Share:
    """A part of a whole: its colour (a CSS class), its size, and how it is written."""

    css: str
    name: str
    size: float
    text: str
    explanation: str = ""


def shares(items: Sequence[Share]) -> str:
    """A whole as a bar of its parts, and their legend; parts without a size are left out."""
    total = sum(item.size for item in items)
    shown = [item for item in items if item.size > 0]
    bar = "".join(
        f'<span class="{item.css}" style="flex:{item.size / total:.6f} 1 0" data-tip="{_tip(item)}"></span>'
        for item in shown
    )
    entries = "".join(
        f'<li data-tip="{_tip(item)}"><i class="{item.css}"></i>{escape(item.name)}<b>{escape(item.text)}</b>'
        f"<span>{100 * item.size / total:.1f} %</span></li>"
        for item in shown
    )
    return f'<div class="share">{bar}</div><ul class="legend">{entries}</ul>'


def _tip(item: Share) -> str:
    return escape(f"{item.name}: {item.text}" + (f"\n{item.explanation}" if item.explanation else ""))


def legend(items: Iterable[tuple[str, str]]) -> str:
    """(CSS class, name) of colours. In a :func:`figure`, hovering over a name fades what is not a part of that name."""
    entries = "".join(f'<li data-part="{escape(name)}"><i class="{css}"></i>{escape(name)}</li>' for css, name in items)
    return f'<ul class="legend">{entries}</ul>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the number by which the column is sorted."""

    text: str
    value: float | None = None
    mood: Mood = ""
    """Shown as a badge."""
    is_number: bool = False
    is_line: bool = False
    """Whether the text stays on one line."""

    def html(self) -> str:
        sorting = "" if self.value is None else f' data-value="{self.value!r}"'
        content = escape(self.text)
        if self.mood:
            content = f'<span class="badge {self.mood}">{content}</span>'
        css = "number" if self.is_number else "nowrap" if self.is_line else ""
        return f"<td{_class(css)}{sorting}>{content}</td>"


def number(text: str, value: float | None) -> Cell:
    """A cell with a number; empty cells are sorted last."""
    return Cell(text, value, is_number=True)


_MOST_COLUMNS = 10
"""Columns of a table that fits the column of the text. A wider one extends over the page's margins."""


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], is_sortable: bool = True, links: Sequence[str] = ()
) -> str:
    """A table, sorted by a click on a heading; headings of columns of numbers are above the numbers. ``links`` are the
    names by row under which charts mark the same thing."""
    # The first row says which columns have numbers.
    are_numbers = [bool(rows) and rows[0][index].is_number for index in range(len(headings))]
    head = "".join(
        f"<th{_class('number' if is_number else '')}>{escape(heading)}</th>"
        for heading, is_number in zip(headings, are_numbers)
    )
    names = [f' data-link="{escape(link)}"' for link in links] or [""] * len(rows)
    body = "".join(f"<tr{name}>{''.join(cell.html() for cell in row)}</tr>" for name, row in zip(names, rows))
    css = ' class="sortable"' if is_sortable and len(rows) > 1 else ""
    scroll = "scroll wide" if len(headings) > _MOST_COLUMNS else "scroll"
    return f'<div class="{scroll}"><table{css}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Card:
    """Something that went wrong: heading, sentences, and text that is shown on request."""

    heading: str
    sentences: Sequence[str]
    details: str = ""


def cards(items: Sequence[Card]) -> str:
    def html(item: Card) -> str:
        sentences = "".join(paragraph(sentence) for sentence in item.sentences if sentence)
        details = (
            f"<details><summary>stack</summary><pre>{escape(item.details)}</pre></details>" if item.details else ""
        )
        return f'<div class="card"><h3>{escape(item.heading)}</h3>{sentences}{details}</div>'

    return f'<div class="cards">{"".join(map(html, items))}</div>'


@dataclass(frozen=True)
class Lane:
    """A chart that shares its horizontal axis with the lanes above and below."""

    name: str
    chart: str
    """SVG."""
    values: Sequence[tuple[float, str]] = ()
    """(pixels from the top, label) of the vertical axis."""


def columns(*parts: str) -> str:
    """Parts beside each other, or below each other on a narrow screen."""
    return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def lanes(items: Sequence[Lane], has_cursor: bool = True, css: str = "") -> str:
    """Charts below each other with one cursor over all of them; names are on the left, or above vertical axes."""

    def html(item: Lane) -> str:
        if not item.values:
            return f'<div class="name">{escape(item.name)}</div>{item.chart}'
        labels = "".join(f'<span style="top:{place:.1f}px">{escape(label)}</span>' for place, label in item.values)
        return f'<div class="caption">{escape(item.name)}</div><div class="values">{labels}</div>{item.chart}'

    cursor = '<div class="cursor"></div>' if has_cursor else ""
    rows = '<div class="gap"></div>'.join(map(html, items))
    return f'<div class="{f"lanes {css}".strip()}">{rows}{cursor}</div>'


def figure(*parts: str) -> str:
    """A chart with its legend."""
    return f"<figure>{''.join(parts)}</figure>"


def copyable(text: str) -> str:
    """A command in a fixed width, with a button that copies it; lines end between two flags, or between two words."""
    flags: list[list[str]] = []
    for word in text.split(" "):
        # A new line for each flag, and where its values would be too long.
        is_separate = not flags or word.startswith("--") or len(" ".join([*flags[-1], word])) > _LONGEST_FLAG
        flags.append([word]) if is_separate else flags[-1].append(word)
    spans = " ".join(f"<span>{escape(' '.join(words))}</span>" for words in flags)
    return f'<div class="copyable"><pre>{spans}</pre><button class="copy" type="button">copy</button></div>'


def link(text: str, address: str) -> str:
    """A link to another page that lies beside this one."""
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def fold(summary: str, *parts: str) -> str:
    """Parts that are shown on request."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def notes(sentences: Iterable[str]) -> str:
    """Remarks that a reader must not miss."""
    return "".join(f'<p class="remark">{escape(sentence)}</p>' for sentence in sentences)


def plural(count: int, noun: str, ending: str = "s") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun}{ending * (count != 1)}"


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""
