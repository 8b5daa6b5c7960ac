"""Host memory for asynchronous saves, which copy the state of every rank to the host."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, found

_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes of this machine, or of this container, can still allocate; None if it is not known."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max" without a limit
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # The kernel drops clean pages of files before memory is short.
        limits.append(limit - used + int(statistics.get("inactive_file", 0)))
    return min(limits, default=None)


@dataclass(frozen=True)
class HostMemory(Check):
    """Compared with the part of the state that the ranks of a node hold."""

    name = "host memory"
    seconds = 5.0
    remedy = "the node does not answer: look at it"

    available: Callable[[], int | None] = available_memory

    def measure(self, site: Site) -> Any:
        if not site.leads_node:
            return None
        return {"available": self.available(), "needed": site.needs.host_bytes * len(site.node.ranks)}

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        results, free = [], []
        for rank, one in found(measured):
            if one["available"] is None:
                continue
            free.append(one["available"])
            if one["available"] < one["needed"]:
                value, limit = f"{one['available'] / _GIB:.1f} GiB available", f"{one['needed'] / _GIB:.1f} GiB"
                remedy = "end other processes of this node, use more nodes, or remove --async-save"
                results.append(self.result(Verdict.FAILURE, value, limit, remedy, rank, nodes))
        if results:
            return results
        return self.ok(f"at least {min(free) / _GIB:.1f} GiB available on every node" if free else "not known")
