"""Agreement between the launchers of several nodes, through their shared store."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron.errors import ExitCode

_PREFIX = "megatron/launch"
_JOIN_SECONDS = 300.0  # for all launchers to begin an attempt


class RunEnd:
    """How the run ended, for launchers that wait for a place in the rendezvous and share only its ``store``."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._prefix = f"{_PREFIX}/end/{run_id}"

    def announce(self) -> None:
        """Say, once, that this launcher will call :meth:`leave`."""
        with suppress(DistError):
            self._store.add(f"{self._prefix}/announced", 1)

    def publish(self, code: ExitCode) -> None:
        """Say how the run has ended."""
        with suppress(DistError):
            # Any other code has precedence over 0.
            self._store.compare_set(f"{self._prefix}/exit_code", "", str(int(ExitCode.COMPLETE)))
            if code != ExitCode.COMPLETE:
                self._store.set(f"{self._prefix}/exit_code", str(int(code)))

    def leave(self, seconds: float) -> None:
        """Wait for so long until the other launchers have read the end: this one may take the store with it."""
        deadline = time.monotonic() + seconds
        with suppress(DistError):
            self._store.add(f"{self._prefix}/ended", 1)
            while self._count("ended") < self._count("announced") and time.monotonic() < deadline:
                time.sleep(0.1)

    def read(self) -> ExitCode | None:
        """The exit code of the run; None if it has not ended, or the store is lost."""
        with suppress(DistError):
            if self._store.check([f"{self._prefix}/exit_code"]):
                return ExitCode(int(self._store.get(f"{self._prefix}/exit_code")))
        return None

    def _count(self, name: str) -> int:
        return self._store.add(f"{self._prefix}/{name}", 0)


class Nodes:
    """The launchers of one rendezvous, which share ``store``.

    If the store cannot be reached, its launcher has ended, and torch's own rules apply.
    """

    def __init__(self, store: Store, count: int) -> None:
        self._store = store
        self.count = count

    def end_job(self, code: ExitCode) -> None:
        """End the job on all nodes with this exit code."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/exit_code", str(int(code)))

    def exit_code(self) -> ExitCode | None:
        """Exit code with which another launcher ended the job; None if none did."""
        with suppress(DistError):
            if self._store.check([f"{_PREFIX}/exit_code"]):
                return ExitCode(int(self._store.get(f"{_PREFIX}/exit_code")))
        return None

    def agree(self, rank: int, restarts: int, report: str, decide: Callable[[Sequence[str]], str]) -> str:
        """What the first launcher decides from the reports of all; a collective. ``restarts`` numbers the attempt.

        Raises torch's ``RendezvousClosedError`` if a launcher ends the job instead, and
        ``RendezvousTimeoutError`` if one does not begin the attempt.
        """
        prefix = f"{_PREFIX}/agree/{restarts}"
        self._store.set(f"{prefix}/report/{rank}", report)
        if rank == 0:
            reports = [self._wait_for(f"{prefix}/report/{other}") for other in range(self.count)]
            self._store.set(f"{prefix}/decision", decide(reports))
        return self._wait_for(f"{prefix}/decision")

    def _wait_for(self, key: str) -> str:
        """The value of ``key``, once a launcher has set it."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while not self._store.check([key]):
            if self.exit_code() is not None:
                raise RendezvousClosedError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError("Another launcher did not begin this attempt in time.")
            time.sleep(0.05)
        return self._store.get(key).decode()

    def stop_for_join(self) -> None:
        """Say that ranks are being stopped because a node joins, so that their exit codes do not end the job."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/join", "")

    def stops_for_join(self) -> bool:
        """Whether a launcher has called :meth:`stop_for_join`."""
        with suppress(DistError):
            return bool(self._store.check([f"{_PREFIX}/join"]))
        return False

    def restart(self, restarts: int) -> None:
        """Request a restart from all launchers that have restarted ``restarts`` times."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/restart/{restarts}", "")

    def must_restart(self, restarts: int) -> bool:
        """Whether another launcher requested this restart."""
        with suppress(DistError):
            return bool(self._store.check([f"{_PREFIX}/restart/{restarts}"]))
        return False

    def publish(self, topic: str, restarts: int, node: int, content: Any) -> None:
        """Let the other launchers read what ``node`` says on ``topic``, as JSON."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/{topic}/{restarts}/{node}", json.dumps(content))

    def collect(self, topic: str, restarts: int, seconds: float) -> dict[int, Any]:
        """What the nodes have published on ``topic``; waits up to ``seconds`` for all of them."""
        deadline, found = time.monotonic() + seconds, dict[int, Any]()
        with suppress(DistError):
            while True:
                for node in set(range(self.count)) - found.keys():
                    key = f"{_PREFIX}/{topic}/{restarts}/{node}"
                    if self._store.check([key]):
                        found[node] = json.loads(self._store.get(key))
                if len(found) == self.count or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return found

    def beat(self, restarts: int, node: int, text: str) -> None:
        """Show the first launcher that this one lives; ``text`` differs from the last one."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/beat/{restarts}/{node}", text)

    def beats(self, restarts: int) -> dict[int, str]:
        """The last text of each launcher that has called :meth:`beat`."""
        keys = {node: f"{_PREFIX}/beat/{restarts}/{node}" for node in range(self.count)}
        with suppress(DistError):
            if not self._store.check(list(keys.values())):
                keys = {node: key for node, key in keys.items() if self._store.check([key])}
            if keys:
                return dict(zip(keys, (text.decode() for text in self._store.multi_get(list(keys.values())))))
        return {}

    def set_waiting(self, restarts: int, waits: bool) -> None:
        """Let all launchers know whether a rank of any node waits for storage."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/waiting/{restarts}", str(int(waits)))

    def is_waiting(self, restarts: int) -> bool:
        """What :meth:`set_waiting` has said last."""
        key = f"{_PREFIX}/waiting/{restarts}"
        with suppress(DistError):
            return bool(self._store.check([key]) and self._store.get(key) == b"1")
        return False

    def is_first(self, topic: str, restarts: int) -> bool:
        """Whether no other launcher has asked this before; also if the store cannot be reached."""
        with suppress(DistError):
            return bool(self._store.add(f"{_PREFIX}/{topic}/{restarts}/first", 1) == 1)
        return True

    def has_started(self, topic: str, restarts: int) -> bool:
        """Whether a launcher has called :meth:`is_first`."""
        with suppress(DistError):
            return bool(self._store.check([f"{_PREFIX}/{topic}/{restarts}/first"]))
        return False

    def part(self, seconds: float) -> None:
        """Wait until all launchers have read the end of the job, because one of them hosts the store."""
        deadline = time.monotonic() + seconds
        with suppress(DistError):
            parting = self._store.add(f"{_PREFIX}/parting", 1)
            while parting < self.count and time.monotonic() < deadline:
                time.sleep(0.1)
                parting = self._store.add(f"{_PREFIX}/parting", 0)
