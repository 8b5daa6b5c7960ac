"""Small JSON values that the ranks exchange through the store of the job.

No collective: a rank that hangs or is missing is known by its number, and the others do not wait longer than a limit.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

RANKS_AT_ONCE = 1024
"""Keys that are read in one call."""
_PATIENCE = 10.0
"""Seconds for which the other ranks wait for rank 0 after its own limit."""


class MissingRanksError(Exception):
    """Ranks that did not answer in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from ranks {list(ranks)}")
        self.ranks = list(ranks)


class Board:
    """Values under ``prefix`` in a store that no earlier attempt has used."""

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str = "preflight") -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = prefix
        # A store answers some 10^5 requests per second: many ranks ask less often.
        self._pause = min(0.5, max(0.002, world_size / 20_000))

    def key(self, *parts: str | int) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str, deadline: float) -> Any:
        """The value of ``key``; raises :class:`TimeoutError` at the deadline of the monotonic clock."""
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(self._pause)
        return json.loads(self._store.get(key))

    def agree(self, name: str, value: Any, decide: Callable[[list[Any]], T], seconds: float) -> T:
        """The decision of rank 0 about the values of all ranks; every rank returns it. It must be JSON.

        ``name`` must be new. Raises :class:`MissingRanksError` on every rank that is alive, if ranks do not give their
        value within ``seconds``.
        """
        self.set(self.key(name, self.rank), value)
        deadline = time.monotonic() + seconds
        if self.rank > 0:
            try:
                answer = self.get(self.key(name, "decision"), deadline + _PATIENCE)
            except TimeoutError:
                raise MissingRanksError([0]) from None
        else:
            answer = self._decide(name, decide, deadline)
            self.set(self.key(name, "decision"), answer)
        if "missing" in answer:
            raise MissingRanksError(answer["missing"])
        decided: T = answer["decided"]
        return decided

    def wait_for_rank0(self, name: str) -> None:
        """Wait until rank 0 arrives here too, but not for long; ``name`` must be new."""
        if self.rank == 0:
            self.set(self.key(name), "")
            return
        with suppress(TimeoutError, RuntimeError):  # rank 0 may end with the store
            self.get(self.key(name), time.monotonic() + _PATIENCE)

    def _decide(self, name: str, decide: Callable[[list[Any]], Any], deadline: float) -> dict[str, Any]:
        keys = [self.key(name, rank) for rank in range(self.world_size)]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return {"missing": [rank for rank, key in enumerate(keys) if not self._store.check([key])]}
            time.sleep(self._pause)
        values: list[Any] = []
        for start in range(0, len(keys), RANKS_AT_ONCE):
            values += map(json.loads, self._store.multi_get(keys[start : start + RANKS_AT_ONCE]))
        return {"decided": decide(values)}
