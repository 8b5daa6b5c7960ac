"""A part of a shared store that only the ranks of this attempt use.

torchrun's agent keeps its store when it restarts the ranks. The store then still holds the addresses that the ranks of
the attempt before have written, and gloo would connect to those ("connectFullMesh failed ... Connection refused").
"""

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two checks for new ranks
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two reads of a key
# Ranks of a world with the longest waits; in a smaller one they are shorter, with the same load of the store.
_LARGE_WORLD = 10_000


def fresh_namespace(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """An empty part of ``store`` for all ranks of this attempt; a collective.

    No key of an earlier attempt can be mistaken for one of this attempt, because every key after the first contains a
    token that a live rank has drawn at random:

    1. Every rank writes its token to ``join/RANK``. Rank 0 may read the token of a dead rank there, until the new one
       replaces it.
    2. Rank 0 answers each token that it finds: ``answer/TOKEN`` holds the name of the namespace, which is its own
       token. A rank reads only the answer to its own token.
    3. A rank that has an answer writes ``ready/NAME/RANK``. Only a live rank can.
    4. When all ranks are ready, rank 0 writes ``start/NAME``.

    Raises :class:`TimeoutError`, with the ranks that are missing, after ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    name = _lead(store, world_size, deadline) if rank == 0 else _follow(store, rank, world_size, deadline)
    return PrefixStore(f"attempt/{name}", store)


def _lead(store: Store, world_size: int, deadline: float) -> str:
    name = secrets.token_hex(8)
    joined = [f"join/{other}" for other in range(1, world_size)]
    ready = [f"ready/{name}/{other}" for other in range(1, world_size)]
    answered: set[bytes] = set()

    def answer() -> None:
        for token in store.multi_get(joined) if joined else []:
            if token not in answered:
                store.set(f"answer/{token.decode()}", name)
                answered.add(token)

    _wait_for_ranks(store, joined, deadline)
    _wait_for_ranks(store, ready, deadline, answer)
    store.set(f"start/{name}", "")
    return name


def _follow(store: Store, rank: int, world_size: int, deadline: float) -> str:
    token = secrets.token_hex(8)
    store.set(f"join/{rank}", token)
    while time.monotonic() < deadline:
        if not _wait(store, [f"answer/{token}"], _LONGEST_WAIT, world_size):
            continue
        # Read again: a new rank 0 may have replaced a dead one.
        name = store.get(f"answer/{token}").decode()
        store.set(f"ready/{name}/{rank}", "")
        if _wait(store, [f"start/{name}"], _LONGEST_WAIT, world_size):
            return name
    raise TimeoutError(
        "Rank 0 has not answered within --distributed-timeout-minutes: it is missing, or waits for other ranks, which "
        "it reports."
    )


def _longest(least: float, most: float, world_size: int) -> float:
    """The longest wait: ``most`` in a large world, where all ranks together must not overload the store."""
    return min(most, least + most * world_size / _LARGE_WORLD)


def _wait(store: Store, keys: Sequence[str], seconds: float, world_size: int) -> bool:
    """Whether all ``keys`` exist within ``seconds``. ``store.wait`` is not used: torch 2.13 prints two warnings at each
    timeout."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    longest = _longest(_SHORTEST_PAUSE, _LONGEST_PAUSE, world_size)
    while not (found := store.check(list(keys))) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return found


def _wait_for_ranks(
    store: Store, keys: Sequence[str], deadline: float, before: Callable[[], object] = lambda: None
) -> None:
    """Wait until the ranks from 1 on have set their ``keys``; calls ``before`` each wait, which grow."""
    world_size, wait = len(keys) + 1, _FIRST_WAIT
    while True:
        before()
        if _wait(store, keys, wait, world_size):
            return
        if time.monotonic() >= deadline:
            break
        wait = min(2 * wait, _longest(_FIRST_WAIT, _LONGEST_WAIT, world_size))
    missing = [str(rank) for rank, key in enumerate(keys, 1) if not store.check([key])]
    raise TimeoutError(
        f"{len(missing)} of {world_size} ranks are missing after --distributed-timeout-minutes, the first are rank "
        f"{', '.join(missing[:8])}: start WORLD_SIZE processes, and check which have ended."
    )
