"""Parts of tensors, and where two of them meet."""

Place = tuple[slice, ...]
"""A part of a tensor: for every dimension where it starts, where it stops, and its step (positive; None is 1)."""


def overlap(wanted: slice, start: int, size: int) -> tuple[slice, slice]:
    """Where the elements ``wanted`` of a dimension meet ``[start, start + size)``.

    Returns which of the wanted ones they are, counted one by one, and where they lie from ``start`` on; both slices
    are as long, and empty where nothing meets.
    """
    step = wanted.step or 1
    count = len(range(wanted.start, wanted.stop, step))
    first = min(count, max(0, -(-(start - wanted.start) // step)))
    last = min(count, max(first, -(-(start + size - wanted.start) // step)))
    return slice(first, last), strided(wanted.start + first * step - start, last - first, step)


def strided(start: int, count: int, step: int) -> slice:
    """``count`` elements from ``start`` on."""
    return slice(start, start + (count - 1) * step + 1, step) if count else slice(0, 0, step)
