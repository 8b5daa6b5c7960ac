"""Agreement between the launchers of several nodes, through their shared store."""

import time
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megatron.errors import ExitCode

_PREFIX = "megatron/launch"


class Nodes:
    """The launchers of one rendezvous, which share ``store``.

    If the store cannot be reached, its launcher has ended, and torch's own rules apply.
    """

    def __init__(self, store: Store, count: int) -> None:
        self._store = store
        self._count = count

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

    def restart(self, restarts: int) -> None:
        """Request a restart from all launchers that have restarted ``restarts`` times."""
        with suppress(DistError):
            self._store.set(f"{_PREFIX}/restart/{restarts}", "")

    def must_restart(self, restarts: int) -> bool:
        """Whether another launcher requested this restart."""
        with suppress(DistError):
            return bool(self._store.check([f"{_PREFIX}/restart/{restarts}"]))
        return False

    def part(self, seconds: float) -> None:
        """Wait until all launchers have read the end of the job, because one of them hosts the store."""
        deadline = time.monotonic() + seconds
        with suppress(DistError):
            parting = self._store.add(f"{_PREFIX}/parting", 1)
            while parting < self._count and time.monotonic() < deadline:
                time.sleep(0.1)
                parting = self._store.add(f"{_PREFIX}/parting", 0)
