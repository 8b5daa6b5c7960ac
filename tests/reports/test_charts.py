"""Charts that several reports share: scales, ticks and units, sizes, limits, and colours on which text can be read."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.reports import svg
from megatron.reports.svg import Axis, Bar, Box, Part, Scale, boxes_over_time, dot, plane, stacked_bars

COLOURS = ("teal", "mint", "blue", "sky", "violet", "lilac", "orange", "sand", "red", "rose", "brown", "slate", "grey",
           "forward", "backward", "weight")  # fmt: skip
CSS = (Path(svg.__file__).parent / "charts.css").read_text()
PAGE_CSS = (Path(svg.__file__).parent / "page.css").read_text()


def percent(value: str | None) -> float:
    assert value is not None
    return float(value.removesuffix("%"))


def test_parts_of_a_bar_are_as_wide_as_their_sizes_and_touch() -> None:
    sizes = (3.0, 0.0, 1.5, 4.5)
    parts = [Part(f"part {index}", "teal", size, text="here") for index, size in enumerate(sizes)]
    text = stacked_bars([Bar("bar", "", "9 s", parts)], [(0.0, "0"), (10.0, "10 s")], 12.0, (10.0, "limit"))
    root = ElementTree.fromstring(text)
    rects = list(root.iter("rect"))
    assert [rect.get("data-part") for rect in rects] == ["part 0", "part 2", "part 3"]
    assert [percent(rect.get("width")) for rect in rects] == pytest.approx([25.0, 12.5, 37.5])
    for one, other in pairwise(rects):
        assert percent(one.get("x")) + percent(one.get("width")) == pytest.approx(percent(other.get("x")), abs=0.01)
    limits = [line for line in root.iter("line") if line.get("class") == "limit"]
    assert [percent(line.get("x1")) for line in limits] == pytest.approx([100 * 10 / 12], abs=0.01)


def test_narrow_parts_have_no_text() -> None:
    parts = [Part("wide", "teal", 90.0, text="90 %"), Part("narrow", "blue", 2.0, text="2 %")]
    text = stacked_bars([Bar("bar", "", "92 s", parts)], [], 100.0)
    assert "90 %" in text and "2 %" not in text.replace("92 s", "")


def test_boxes_are_placed_in_time() -> None:
    axis = Axis(Scale(0.0, 4.0), [(0.0, "0"), (4.0, "4 s")], "")
    rows = [("stage 0", [Box(0.0, 1.0, "forward", "blue", text="7"), Box(2.0, 2.01, "forward", "blue", 0.5, "8")])]
    root = ElementTree.fromstring(boxes_over_time(rows, axis, "schedule"))
    idle, first, second = root.iter("rect")
    assert idle.get("class") == "idle-row" and (first.get("x"), first.get("width")) == ("0.000%", "25.000%")
    assert (second.get("x"), second.get("width"), second.get("class")) == ("50.000%", "0.250%", "pass blue")
    assert (first.get("fill-opacity"), second.get("fill-opacity")) == (None, "0.75")
    assert "7" in root.itertext() and "8" not in root.itertext()


def test_a_plane_has_ticks_of_both_axes() -> None:
    x, y = Scale(1.0, 100.0, is_log=True), Scale(0.0, 10.0)
    text = plane(
        Axis(x, [(1.0, "one"), (100.0, "hundred")], "across"),
        Axis(y, [(0.0, "zero"), (10.0, "ten")], "upwards"),
        200.0,
        [dot(x.percent(10.0), y.pixel(5.0, 200.0), 4, "point")],
        "chart",
    )
    root = ElementTree.fromstring(text)
    circle = next(root.iter("circle"))
    assert (circle.get("cx"), circle.get("cy")) == ("50.000%", "100.0")
    assert {"one", "hundred", "across", "zero", "ten", "upwards"} <= set(root.itertext())


def themes() -> list[dict[str, str]]:
    """The colours of the light and of the dark page; the dark ones are stated twice, for the system and the button."""
    found = re.findall(r"(?:^|\n)\s*:root[^{]*\{([^}]*)\}", PAGE_CSS), re.findall(r":root[^{]*\{([^}]*)\}", CSS)
    values = [[dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks] for blocks in found]
    light, dark, chosen = ({**page, **chart} for page, chart in zip(values[0], values[1]))
    assert dark == chosen
    return [light, dark]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", themes(), ids=("light", "dark"))
def test_text_can_be_read_on_its_colour(theme: dict[str, str]) -> None:
    """At least 4.5, as WCAG 2 asks of small text."""
    white = next(line for line in CSS.splitlines() if "svg text.on-teal" in line)
    for colour in COLOURS:
        text = theme["ink"] if colour == "grey" else "#ffffff" if f"on-{colour}" in white else "#14181d"
        assert contrast(text, theme[colour]) >= 4.5, colour
    for text in ("ink", "soft", "accent", "bad"):
        assert contrast(theme[text], theme["paper"]) >= 4.5, text


def test_neighbouring_colours_differ() -> None:
    for theme in themes():
        assert len({theme[colour] for colour in COLOURS}) == len(COLOURS)


# --- scales and shapes ---------------------------------------------------------------------------------------


def test_durations_and_percentages_have_few_digits() -> None:
    durations = {
        0.0: "0 s", 0.0123: "12.3 ms", 0.9999: "1.0 s", 5.03: "5.0 s", 59.7: "60 s", 99.4: "99 s", 100.0: "1.7 min",
        1200.0: "20 min", 7200.0: "2.0 h", 36000.0: "10 h", 172799.0: "2 d", 3 * 86400.0 + 5 * 3600: "3 d 5 h",
        54 * 86400.0: "54 d", -90.0: "-90 s",
    }  # fmt: skip
    assert {seconds: svg.duration(seconds) for seconds in durations} == durations
    shares = {0.945: "94.5 %", 0.9997: "100.0 %", 0.9951: "99.51 %", 1.0: "100.0 %", 0.0: "0.0 %"}
    assert {share: svg.percentage(share) for share in shares} == shares


def test_ticks_are_round_few_and_inside() -> None:
    draws = random.Random(0)
    for _ in range(500):
        low = draws.uniform(-100, 100)
        high = low + 10 ** draws.uniform(-6, 6)
        ticks = svg.nice_ticks(low, high)
        assert 1 <= len(ticks) <= 11
        assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in ticks)
        length = 10 ** draws.uniform(-2, 8)
        durations = svg.duration_ticks(length)
        assert 2 <= len(durations) <= 11
        assert durations[0] == 0.0 and durations[-1] <= length * (1 + 1e-9)


def test_tick_labels_have_one_unit() -> None:
    assert [svg.tick_label(seconds) for seconds in (0.0, 30.0, 120.0, 7200.0, 2 * 86400.0, 90.0)] == [
        *("0", "30 s", "2 min", "2 h", "2 d", "90 s")
    ]


def test_positions_stay_within_the_chart() -> None:
    scale, log = Scale(10.0, 20.0), Scale(1.0, 100.0, is_log=True)
    assert [scale.percent(value) for value in (5.0, 10.0, 15.0, 99.0)] == ["0.000%", "0.000%", "50.000%", "100.000%"]
    assert log.percent(10.0) == "50.000%"
    assert scale.width(5.0, 15.0) == "50.000%" and scale.width(12.0, 11.0) == "0.000%"
    assert scale.pixel(20.0, 100.0) == 0.0 and scale.pixel(10.0, 100.0) == 100.0
    assert Scale(1.0, 1.0).fraction(1.0) == 0.5


def test_a_curve_is_interrupted_where_a_value_is_not_finite() -> None:
    scale = Scale(0.0, 4.0)
    path = svg.curve([(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf)], scale, scale, 100.0)
    assert path.count("M") == 2 and path.count("L") == 1
    assert "nan" not in path and "inf" not in path


def test_thinning_keeps_the_extremes() -> None:
    draws = random.Random(0)
    points = [(float(index), draws.gauss(0, 1)) for index in range(10_000)]
    points[1234] = (1234.0, 50.0)
    thinned = svg.thin(points, 400)
    assert len(thinned.means) == len(thinned.extremes) == 400
    assert max(greatest for _, _, greatest in thinned.extremes) == 50.0
    assert min(least for _, least, _ in thinned.extremes) == min(value for _, value in points)
    assert svg.thin(points[:400], 400).means == points[:400]


def test_shapes_are_well_formed_and_text_is_escaped() -> None:
    scale, nasty = Scale(0.0, 1.0), '"><script>alert(1)</script>&'
    shapes = [
        svg.rect("0%", 0, "5%", 3, "step", nasty),
        svg.vertical("1%", 0, 2, tip=nasty),
        svg.horizontal(3, "grid"),
        svg.dot("1%", 2, 3, tip=nasty),
        svg.text("1%", 2, nasty),
        svg.marker("1%", 2, tip=nasty),
        svg.curve([(0, 0), (1, 1)], scale, scale, 10, "line"),
        svg.area([(0, 0), (1, 1)], scale, scale, 10, "area"),
        svg.band([(0, 0, 1), (1, 0, 1)], scale, scale, 10, "band"),
    ]
    root = ElementTree.fromstring(svg.svg(10, *shapes, label=nasty))
    assert root.get("aria-label") == nasty
    assert [found.get("data-tip") for found in root.iter() if found.get("data-tip")] == [nasty] * 4
    assert not list(root.iter("script"))
