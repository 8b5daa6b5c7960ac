"""Notices that the store of the launchers does not answer any more.

A call to a store whose host is cut off may never return, and the launcher's main thread may be in one. So one thread
asks the store, over a connection of its own, and another one counts the seconds without an answer.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megatron.torch_compat import connection_to

ASK_SECONDS = 2.0
"""Between two questions."""
_TICK_SECONDS = 0.5
_LONGEST_TICK = 2.0
"""Seconds of a tick that count: after a longer one this process, and so possibly the whole job, was stopped."""


class StoreWatch:
    """Calls ``act(seconds, limit)`` once, in a thread, when ``store`` has not answered for ``limit()`` seconds (0: no
    limit)."""

    def __init__(self, store: Store, limit: Callable[[], float], act: Callable[[float, float], None]) -> None:
        self._store, self._limit, self._act = store, limit, act
        self._silent_seconds = 0.0
        self._is_over = threading.Event()
        for target in (self._ask, self._count):
            threading.Thread(target=target, name="store watch", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._is_over.set()

    def _ask(self) -> None:
        connection: Store | None = None
        while not self._is_over.wait(ASK_SECONDS):
            with suppress(DistError):
                connection = connection or connection_to(self._store)
                connection.check(["megatron/launch/answer"])
                self._silent_seconds = 0.0

    def _count(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(_TICK_SECONDS):
            now = time.monotonic()
            self._silent_seconds += min(now - before, _LONGEST_TICK)
            before, limit = now, self._limit()
            if limit and self._silent_seconds > limit:
                self._act(self._silent_seconds, limit)
                return
