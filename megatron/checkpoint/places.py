"""Parts of tensors and their intersections."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
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


def ranges(firsts: Numbers, counts: Numbers) -> Numbers:
    """The numbers ``first, first + 1, ...`` of every range, ``counts`` of each, one range after another."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(firsts - starts, counts)


def boxes_are_disjoint(starts: Numbers, stops: Numbers, groups: Numbers | None = None) -> bool:
    """Whether no two boxes ``[starts, stops)`` (``[boxes, dims]`` each) share an element.

    Only boxes of one of the ``groups`` ``[boxes]`` are compared; by default all are. Groups are divided along one dim
    after the other, all at once. For shards of a tensor they end up as single boxes; groups that no dim divides are
    compared pair by pair.
    """
    groups = np.zeros(len(starts), np.int64) if groups is None else groups
    chosen = np.flatnonzero((stops > starts).all(axis=1))
    starts, stops, groups = starts[chosen], stops[chosen], groups[chosen]
    divided = True
    while divided:
        divided = False
        for dim in range(starts.shape[1]):
            groups, order, cuts = _divided(starts[:, dim], stops[:, dim], groups)
            divided |= cuts
            # Boxes that are alone in their group are done.
            starts, stops = starts[order], stops[order]
            together = np.zeros(len(groups), bool)
            same = groups[1:] == groups[:-1]
            together[1:] |= same
            together[:-1] |= same
            starts, stops, groups = starts[together], stops[together], groups[together]
    borders = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    return all(
        _pairwise_disjoint(*group) for group in zip(np.split(starts, borders), np.split(stops, borders)) if len(groups)
    )


def _divided(starts: Numbers, stops: Numbers, groups: Numbers) -> tuple[Numbers, Numbers, bool]:
    """Divide groups of ranges ``[starts, stops)`` where no range crosses a border.

    Returns the new group of each range in a new order, that order, and whether there was such a border.
    """
    order = np.lexsort((starts, groups))
    starts, stops, groups = starts[order], stops[order], groups[order]
    if len(order) < 2:
        return groups, order, False
    length = int(stops.max()) + 1
    if length * len(order) >= 1 << 62:
        # Places among all coordinates instead, so that the sums below cannot overflow.
        coordinates, places = np.unique(np.concatenate((starts, stops)), return_inverse=True)
        starts, stops = np.split(places, 2)
        length = len(coordinates)
    is_first = np.concatenate(([True], groups[1:] != groups[:-1]))
    number = np.cumsum(is_first)
    # The furthest end of the earlier ranges of the group: later groups have larger numbers.
    reached = np.maximum.accumulate(number * length + stops)
    is_border = np.concatenate(([False], starts[1:] + number[1:] * length >= reached[:-1]))
    return np.cumsum(is_first | is_border), order, bool((is_border & ~is_first).any())


def _pairwise_disjoint(starts: Numbers, stops: Numbers) -> bool:
    for box in range(len(starts) - 1):
        others = slice(box + 1, None)
        if ((starts[box] < stops[others]) & (starts[others] < stops[box])).all(axis=1).any():
            return False
    return True
