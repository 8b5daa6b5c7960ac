"""Scales, ticks and units of charts."""

import math
import random
import xml.etree.ElementTree as ElementTree

import pytest

from megatron.reports import svg
from megatron.reports.svg import Scale


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.0 s"),
        (5.03, "5.0 s"),
        (59.7, "60 s"),
        (99.4, "99 s"),
        (100.0, "1.7 min"),
        (1200.0, "20 min"),
        (7200.0, "2.0 h"),
        (36000.0, "10 h"),
        (172799.0, "2 d"),
        (3 * 86400.0 + 5 * 3600, "3 d 5 h"),
        (54 * 86400.0, "54 d"),
        (-90.0, "-90 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert svg.duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.945, "94.5 %"), (0.9997, "100.0 %"), (0.9951, "99.51 %"), (1.0, "100.0 %"), (0.0, "0.0 %")]
)
def test_percentages(share: float, text: str) -> None:
    assert svg.percentage(share) == text


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
