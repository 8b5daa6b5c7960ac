"""How something grows: measured points, and the order of growth that follows from them."""

import math
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal, get_args

Kind = Literal["seconds", "bytes"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Point:
    """One measurement."""

    size: float
    seconds: float
    bytes: int
    """Peak memory or size; 0 if not measured."""


@dataclass(frozen=True)
class Curve:
    """Measurements of one quantity over sizes."""

    name: str
    """What grows, for example "order of documents"."""
    unit: str
    """Of the size, for example "documents"."""
    points: tuple[Point, ...]
    goal: str = ""
    order: float = 1.0
    """The largest accepted order of growth, of seconds and of bytes."""


def order_of_growth(curve: Curve, value: Kind) -> float:
    """Slope of the least-squares line through the points in log-log, without values of 0; NaN for fewer than two."""
    known = [(point.size, getattr(point, value)) for point in curve.points if getattr(point, value) > 0]
    if len(known) < 2:
        return math.nan
    sizes, values = ([math.log(number) for number in column] for column in zip(*known, strict=True))
    return linear_regression(sizes, values).slope
