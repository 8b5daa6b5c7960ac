"""Which checkpoints are deleted: never the last good ones, never a damaged one for which another would have to go."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.directory import Retention
from megatron.errors import CheckpointError


class Disk:
    """Says which iterations are damaged, and counts who asks."""

    def __init__(self, damaged: Collection[int] = ()) -> None:
        self.damaged, self.asked = damaged, list[int]()

    def verify(self, iteration: int) -> None:
        self.asked.append(iteration)
        if iteration in self.damaged:
            raise CheckpointError(f"{iteration} is damaged")


@pytest.mark.parametrize(
    ("last", "interval", "damaged", "expected"),
    [
        (2, None, (), [30, 20, 10]),
        (1, None, (), [40, 30, 20, 10]),
        (9, None, (), []),
        (None, 20, (), [30, 10]),
        (2, 20, (), [30, 10]),
        (None, 25, (), [40, 30, 20, 10]),
        # Two broken newer ones do not count for the two that are kept, nor are they deleted.
        (2, None, (50, 40), [10]),
        (1, None, (50,), [30, 20, 10]),
        (2, None, (50, 40, 30, 20), []),
        (None, 30, (50, 40, 30, 20, 10), []),
    ],
)
def test_what_is_deleted(last: int | None, interval: int | None, damaged: tuple[int, ...], expected: list[int]) -> None:
    assert Retention(last, interval, Disk(damaged).verify).superfluous([10, 20, 30, 40, 50]) == expected


@given(
    iterations=st.sets(st.integers(1, 60)).map(sorted),
    last=st.integers(1, 5),
    interval=st.none() | st.integers(1, 10),
    damaged=st.sets(st.integers(1, 60)),
)
def test_the_newest_good_ones_and_the_milestones_stay(
    iterations: list[int], last: int, interval: int | None, damaged: set[int]
) -> None:
    gone = set(Retention(last, interval, Disk(damaged).verify).superfluous(iterations))
    good = [iteration for iteration in iterations if iteration not in damaged]
    assert not gone & set(good[-last:])
    assert not any(iteration % interval == 0 for iteration in gone if interval)
    if gone:
        assert max(gone) < min(good[-last:])


def test_each_is_read_once_and_only_for_a_reason() -> None:
    disk = Disk()
    retention = Retention(2, None, disk.verify)
    assert retention.superfluous([1, 2]) == []
    assert disk.asked == []
    assert retention.superfluous([1, 2, 3]) == [1]
    assert retention.superfluous([2, 3, 4]) == [2]
    assert disk.asked == [3, 2, 4]
