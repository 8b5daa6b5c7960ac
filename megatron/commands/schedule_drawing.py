"""Draw pipeline timelines as images and text: one row per stage, one box per pass."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.commands.tool import check_matplotlib
from megatron.schedules.schedule import Kind
from megatron.schedules.simulator import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

PictureFormat = Literal["svg", "png"]
Colour = tuple[float, float, float]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

# From the first chunk's shade to the last one's. Told apart by all three kinds of dichromats, and from white (idle).
_SHADES: dict[Kind, tuple[str, str]] = {
    "F": ("#0072B2", "#9ED0F0"),
    "B": ("#C65102", "#FDBE85"),
    "W": ("#4A4A4A", "#9A9A9A"),
}
_MEANINGS: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradient"}

_WIDTH, _MARGIN_LEFT, _MARGIN_RIGHT = 11.0, 0.75, 0.15
_ROW, _TITLE, _TIME_AXIS, _LEGEND = 0.3, 0.35, 0.5, 0.25
_BOX_HEIGHT = 0.84  # of a row
_EDGE = 0.5  # points, like all below
_NUMBER_SIZE = 7.0
_DIGIT_WIDTH = 0.64  # of the size, in the font that matplotlib brings along
_POINTS_PER_INCH = 72

_STYLE: dict[Any, Any] = {
    # The same picture gives the same file: identifiers are hashes with this salt instead of a random one.
    "svg.hashsalt": "pipeline schedule",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture."""

    title: str
    timeline: Timeline
    num_chunks: int
    splits_backward: bool


def draw(panels: Sequence[Panel], time_label: str, picture_format: PictureFormat) -> bytes:
    """The picture of ``panels`` above each other on one time axis; the same input gives the same bytes."""
    check_matplotlib(f"--{picture_format}")
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        figure, rows = _layout(panels)
        longest = max(panel.timeline.makespan for panel in panels)
        for axes, panel in zip(rows, panels):
            axes.set_xlim(0, longest)
            axes.set_xlabel(time_label, fontsize=8)
            _draw_panel(axes, panel)
        _draw_legend(figure, panels[0])
        output = io.BytesIO()
        # No date and no version, either of which would change the file when the picture has not changed.
        nameless = {"Date": None, "Creator": None} if picture_format == "svg" else {"Software": None}
        figure.savefig(output, format=picture_format, metadata=nameless, dpi=150)
    return output.getvalue() if picture_format == "png" else _shorten(output.getvalue())


def _shorten(svg: bytes) -> bytes:
    """Coordinates to a hundredth of a point, and no rotations by nothing: two thirds of the bytes."""
    svg = re.sub(rb' transform="rotate\(-?0 [^)]*\)"', b"", svg)
    return re.sub(rb"(\.\d\d)\d+", rb"\1", svg)


def _layout(panels: Sequence[Panel]) -> "tuple[Figure, list[Axes]]":
    """A figure with an axes for each panel, so high that rows are alike in all pictures."""
    from matplotlib.figure import Figure

    heights = [_TITLE + _ROW * panel.timeline.num_stages + _TIME_AXIS for panel in panels]
    height = sum(heights) + _LEGEND
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    all_axes, top = [], height
    for panel, below in zip(panels, heights):
        rows = _ROW * panel.timeline.num_stages
        left, bottom, width = _MARGIN_LEFT, top - _TITLE - rows, _axes_width()
        all_axes.append(figure.add_axes((left / _WIDTH, bottom / height, width / _WIDTH, rows / height)))
        top -= below
    return figure, all_axes


def _axes_width() -> float:
    return _WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    stages = panel.timeline.num_stages
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylim(stages - 0.5, -0.5)  # the first stage on top
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    end = panel.timeline.makespan
    idle = [(0.0, stage - _BOX_HEIGHT / 2, end, stage + _BOX_HEIGHT / 2) for stage in range(stages)]
    axes.add_patch(_boxes(idle, "white", "#C8C8C8", _EDGE))
    _draw_passes(axes, panel)


def _draw_passes(axes: "Axes", panel: Panel) -> None:
    origin = min(span.start for span in panel.timeline.spans)
    by_colour: dict[Colour, list[Box]] = defaultdict(list)
    for span in panel.timeline.spans:
        colour = _colour(span.action.kind, span.action.chunk, panel.num_chunks)
        bottom, top = span.stage - _BOX_HEIGHT / 2, span.stage + _BOX_HEIGHT / 2
        by_colour[colour].append((span.start - origin, bottom, span.end - origin, top))
        _write_number(axes, span, origin, "black" if _is_light(colour) else "white")
    shortest = min(_points(axes, span) for span in panel.timeline.spans if span.end > span.start)
    for colour, boxes in by_colour.items():
        axes.add_patch(_boxes(boxes, colour, "white", min(_EDGE, 0.15 * shortest)))


def _points(axes: "Axes", span: Span) -> float:
    """How wide ``span`` is in the picture."""
    return float((span.end - span.start) / axes.get_xlim()[1] * _axes_width() * _POINTS_PER_INCH)


def _boxes(boxes: Sequence[Box], colour: str | Colour, edge: str, linewidth: float) -> "PathPatch":
    """Many rectangles as one path: a fraction of the bytes that a patch for each takes in an SVG."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    corners = [
        corner
        for left, bottom, right, top in boxes
        for corner in ((left, bottom), (right, bottom), (right, top), (left, top), (left, bottom))
    ]
    return PathPatch(Path(corners, codes), facecolor=colour, edgecolor=edge, linewidth=linewidth, clip_on=False)


def _write_number(axes: "Axes", span: Span, origin: float, colour: str) -> None:
    """The microbatch in the middle of its box, where it fits."""
    number = str(span.action.microbatch)
    if _points(axes, span) >= (len(number) * _DIGIT_WIDTH + 0.2) * _NUMBER_SIZE:
        middle = (span.start + span.end) / 2 - origin
        axes.text(middle, span.stage, number, color=colour, size=_NUMBER_SIZE, ha="center", va="center_baseline")


def _draw_legend(figure: "Figure", panel: Panel) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    kinds: tuple[Kind, ...] = ("F", "B", "W") if panel.splits_backward else ("F", "B")
    chunks = range(panel.num_chunks)
    handles: list[Any] = [
        tuple(Patch(facecolor=_colour(kind, chunk, panel.num_chunks)) for chunk in chunks) for kind in kinds
    ]
    idle = Patch(facecolor="white", edgecolor="#C8C8C8", linewidth=_EDGE)
    figure.legend(
        handles=[*handles, (idle,)],
        labels=[*(_legend_label(kind, panel) for kind in kinds), "idle"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower center",
        ncols=len(kinds) + 1,
        frameon=False,
        fontsize=8,
        borderpad=0.2,
    )


def _legend_label(kind: Kind, panel: Panel) -> str:
    meaning = "input gradient" if kind == "B" and panel.splits_backward else _MEANINGS[kind]
    return meaning if panel.num_chunks == 1 else f"{meaning}, chunks 0 to {panel.num_chunks - 1}"


def _colour(kind: Kind, chunk: int, num_chunks: int) -> Colour:
    from matplotlib.colors import to_rgb

    dark, light = (to_rgb(shade) for shade in _SHADES[kind])
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (one + share * (other - one) for one, other in zip(dark, light))
    return red, green, blue


def _is_light(colour: Colour) -> bool:
    """Whether black is easier to read on ``colour`` than white (relative luminance of WCAG 2, gamma taken as 2)."""
    red, green, blue = (part**2 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18


def draw_as_text(timeline: Timeline, num_chunks: int, columns: int) -> list[str] | None:
    """A line per stage, at most ``columns`` wide; None where that leaves no room for the passes' names."""
    names = [_name(*span.action, num_chunks) for span in timeline.spans]
    origin = min(span.start for span in timeline.spans)
    shortest = min(span.end - span.start for span in timeline.spans if span.end > span.start)
    indent = len(f"stage {timeline.num_stages - 1}  ")
    for room in (max(map(len, names)) + 1, max(map(len, names))):
        scale = room / shortest
        if indent + timeline.makespan * scale > columns:
            continue
        rows = [["."] * _column(timeline.makespan, scale) for _ in range(timeline.num_stages)]
        for name, span in zip(names, timeline.spans):
            start, end = _column(span.start - origin, scale), _column(span.end - origin, scale)
            rows[span.stage][start:end] = name.ljust(end - start, "-")[: end - start]
        return [f"stage {stage}".ljust(indent) + "".join(row) for stage, row in enumerate(rows)]
    return None


def _column(time: float, scale: float) -> int:
    # Halves always up: round() to even would give equal passes unequal widths.
    return math.floor(time * scale + 0.5 + 1e-6)


def _name(kind: str, microbatch: int, chunk: int, num_chunks: int) -> str:
    if num_chunks > 2:
        return f"{kind}{microbatch}.{chunk}"
    return f"{kind.lower() if chunk else kind}{microbatch}"
