"""Parts of tensors and their intersections."""

import numpy as np
import numpy.typing as npt

Place = tuple[slice, ...]
"""A part of a tensor: start, stop and step of every dim (step positive; None is 1)."""


def overlap(wanted: slice, start: int, size: int) -> tuple[slice, slice]:
    """Intersection of the elements ``wanted`` of a dim with ``[start, start + size)``.

    Returns two slices of equal length: positions among the wanted elements, and positions relative to ``start``.
    """
    step = wanted.step or 1
    count = len(range(wanted.start, wanted.stop, step))
    first = min(count, max(0, -(-(start - wanted.start) // step)))
    last = min(count, max(first, -(-(start + size - wanted.start) // step)))
    return slice(first, last), strided(wanted.start + first * step - start, last - first, step)


def strided(start: int, count: int, step: int) -> slice:
    """Slice of ``count`` elements from ``start`` on."""
    return slice(start, start + (count - 1) * step + 1, step) if count else slice(0, 0, step)


def boxes_are_disjoint(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
    """Whether no two boxes ``[starts, stops)`` (``[boxes, dims]`` each) share an element.

    Boxes are divided into separate groups along one dim after the other. For shards of a tensor, the groups end up as
    single boxes; groups that no dim divides are compared pair by pair.
    """
    has_elements = (stops > starts).all(axis=1)
    groups = [np.flatnonzero(has_elements)]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        divided = _divide(starts[group], stops[group])
        if divided is None:
            if not _pairwise_disjoint(starts[group], stops[group]):
                return False
        else:
            groups += [group[part] for part in divided]
    return True


def _divide(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]] | None:
    """Indices of the boxes in groups that are separate along some dim; None if no dim divides them."""
    for dim in range(starts.shape[1]):
        order = np.argsort(starts[:, dim], kind="stable")
        reached = np.maximum.accumulate(stops[order, dim])
        cuts = np.flatnonzero(starts[order[1:], dim] >= reached[:-1]) + 1
        if len(cuts):
            return np.split(order, cuts)
    return None


def _pairwise_disjoint(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
    for box in range(len(starts) - 1):
        others = slice(box + 1, None)
        if ((starts[box] < stops[others]) & (starts[others] < stops[box])).all(axis=1).any():
            return False
    return True
