"""The ranks of an attempt meet in a part of the store that no rank of an earlier attempt has written to."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from megatron.operation.namespace import fresh_namespace

PATIENCE = timedelta(seconds=60)
RANKS = 4


class Stopped(Exception):
    """The rank has been killed."""


class MortalStore:
    """A store as one rank sees it; after ``operations`` calls, the rank is dead."""

    def __init__(self, store: Store, operations: int) -> None:
        self._store = store
        self._left = operations

    def __getattr__(self, name: str) -> Callable[..., object]:
        def operation(*arguments: object) -> object:
            self._left -= 1
            if self._left < 0:
                raise Stopped
            result: object = getattr(self._store, name)(*arguments)
            return result

        return operation


def meet(store: Store, delays: Sequence[float]) -> list[Store]:
    """One attempt of all ranks."""

    def join(rank: int) -> Store:
        time.sleep(delays[rank])
        return fresh_namespace(store, rank, len(delays), PATIENCE)

    with ThreadPoolExecutor(len(delays)) as threads:
        return list(threads.map(join, range(len(delays))))


def assert_shared_and_empty(views: list[Store], number: int) -> None:
    assert not any(view.check(["address/0"]) for view in views)
    views[0].set("address/0", str(number))
    assert [view.get("address/0") for view in views] == [str(number).encode()] * len(views)


def test_each_attempt_has_an_empty_namespace_whenever_ranks_of_earlier_ones_died(chance: random.Random) -> None:
    """All keys of the attempts before are still there, as in the store of torchrun's agent. One rank comes late: its
    token of an attempt before lies where the new one will."""
    store = HashStore()
    for attempt in range(9):
        lives = [chance.choice((0, 1, 2, 3, 4, 6)) for _ in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as threads:
            short = timedelta(seconds=0.2)
            for rank, operations in enumerate(lives if attempt else ()):
                threads.submit(fresh_namespace, MortalStore(store, operations), rank, RANKS, short)  # type: ignore[arg-type]
        late = attempt % (RANKS + 1)
        assert_shared_and_empty(meet(store, [0.4 * (rank == late) for rank in range(RANKS)]), attempt)


def test_a_first_rank_that_is_replaced_alone_meets_the_others() -> None:
    """The others have the answer of the one that died, and wait for it to start them."""
    store = HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        followers = [threads.submit(fresh_namespace, store, rank, RANKS, PATIENCE) for rank in range(1, RANKS)]
        # wait for all, get their tokens, answer three of them, and die before looking whether they are ready.
        with pytest.raises(Stopped):
            fresh_namespace(MortalStore(store, 5), 0, RANKS, PATIENCE)  # type: ignore[arg-type]
        leader = fresh_namespace(store, 0, RANKS, PATIENCE)
    assert_shared_and_empty([leader, *(follower.result() for follower in followers)], 0)


def test_missing_ranks_are_named() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        present = threads.submit(fresh_namespace, store, 1, 3, timedelta(seconds=2))
        with pytest.raises(TimeoutError, match="rank 2"):
            fresh_namespace(store, 0, 3, timedelta(seconds=1))
        with pytest.raises(TimeoutError, match="Rank 0"):
            present.result()
