"""Agreement between the launchers of several nodes, through their shared store, and the nodes that they name.

    RUN_DIR/named_nodes.jsonl    one JSON object each time: {"host", "reason", "attempt", "time"}

The file survives a requeue of the job. A node that two attempts have named is a suspect: a launcher gives its ranks the
last numbers, so that they become spares if there are any. After a repair, remove its lines from the file.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron.errors import ExitCode
from megatron.operation.attempts import append_line
from megatron.operation.causes import Cause
from megatron.torch_compat import connection_to

_PREFIX = "megatron/launch"
_JOIN_SECONDS = 300.0  # for all launchers to begin an attempt


# --- the store -----------------------------------------------------------------------------------------------


class _SharedKeys:
    """The keys of a store below ``prefix``. A store that cannot be reached has no keys, and takes none."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def _set(self, key: str, text: str = "") -> None:
        with suppress(DistError):
            self._store.set(f"{self._prefix}/{key}", text)

    def _get(self, key: str) -> str | None:
        with suppress(DistError):
            if self._store.check([f"{self._prefix}/{key}"]):
                return self._store.get(f"{self._prefix}/{key}").decode()
        return None

    def _add(self, key: str, number: int) -> int:
        """The new value of a counter; raises :class:`DistError`."""
        return int(self._store.add(f"{self._prefix}/{key}", number))

    def _meet(self, key: str, number: Callable[[], int], seconds: float) -> None:
        """Count this launcher at ``key``, and wait for so long until ``number()`` launchers are counted there."""
        deadline = time.monotonic() + seconds
        with suppress(DistError):
            self._add(key, 1)
            while self._add(key, 0) < number() and time.monotonic() < deadline:
                time.sleep(0.1)

    def exit_code(self) -> ExitCode | None:
        """Exit code with which a launcher ended the job; None if none did."""
        text = self._get("exit_code")
        return None if text is None else ExitCode(int(text))


class RunEnd(_SharedKeys):
    """How the run ended, for launchers that wait for a place in the rendezvous and share only its ``store``."""

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__(store, f"{_PREFIX}/end/{run_id}")

    def announce(self) -> None:
        """Announce, once, that this launcher will call :meth:`leave`."""
        with suppress(DistError):
            self._add("announced", 1)

    def publish(self, code: ExitCode) -> None:
        """Publish how the run has ended."""
        with suppress(DistError):
            # Any other code has precedence over 0.
            self._store.compare_set(f"{self._prefix}/exit_code", "", str(int(ExitCode.COMPLETE)))
        if code != ExitCode.COMPLETE:
            self._set("exit_code", str(int(code)))

    def leave(self, seconds: float) -> None:
        """Wait for so long until the other launchers have read the end: this one may take the store with it."""
        self._meet("ended", lambda: self._add("announced", 0), seconds)


class Nodes(_SharedKeys):
    """The launchers of one rendezvous, which share ``store``; ``restarts`` numbers the attempt.

    If the store cannot be reached, its launcher has ended, and torch's own rules apply.
    """

    def __init__(self, store: Store, count: int) -> None:
        super().__init__(store, _PREFIX)
        self.count = count

    def end_job(self, code: ExitCode) -> None:
        self._set("exit_code", str(int(code)))

    def agree(self, rank: int, restarts: int, report: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What the first launcher decides from the reports of all, as JSON; a collective.

        Raises torch's ``RendezvousClosedError`` if a launcher ends the job instead, and
        ``RendezvousTimeoutError`` if one does not begin the attempt.
        """
        prefix = f"{_PREFIX}/agree/{restarts}"
        self._store.set(f"{prefix}/report/{rank}", json.dumps(report))
        if rank == 0:
            reports = [self._wait_for(f"{prefix}/report/{other}") for other in range(self.count)]
            self._store.set(f"{prefix}/decision", json.dumps(decide(reports)))
        return self._wait_for(f"{prefix}/decision")

    def _wait_for(self, key: str) -> Any:
        """The value of ``key``, once a launcher has set it."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while not self._store.check([key]):
            if self.exit_code() is not None:
                raise RendezvousClosedError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError("Another launcher did not begin this attempt in time.")
            time.sleep(0.05)
        return json.loads(self._store.get(key))

    def stop_for_join(self) -> None:
        """Announce that ranks are being stopped because a node joins, so that their exit codes do not end the job."""
        self._set("join")

    def stops_for_join(self) -> bool:
        return self._get("join") is not None

    def restart(self, restarts: int) -> None:
        """Request a restart from all launchers that have restarted ``restarts`` times."""
        self._set(f"restart/{restarts}")

    def must_restart(self, restarts: int) -> bool:
        """Whether another launcher requested this restart."""
        return self._get(f"restart/{restarts}") is not None

    def publish(self, topic: str, restarts: int, node: int, content: Any) -> None:
        """Publish what ``node`` says on ``topic``, as JSON."""
        self._set(f"{topic}/{restarts}/{node}", json.dumps(content))

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
        """Give a sign of life; ``text`` differs from the last one."""
        self._set(f"beat/{restarts}/{node}", text)

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
        """Publish whether a rank of any node waits for storage."""
        self._set(f"waiting/{restarts}", str(int(waits)))

    def is_waiting(self, restarts: int) -> bool:
        return self._get(f"waiting/{restarts}") == "1"

    def is_first(self, topic: str, restarts: int) -> bool:
        """Whether no other launcher has asked this before; also if the store cannot be reached."""
        with suppress(DistError):
            return self._add(f"{topic}/{restarts}/first", 1) == 1
        return True

    def has_started(self, topic: str, restarts: int) -> bool:
        """Whether a launcher has called :meth:`is_first`."""
        return self._get(f"{topic}/{restarts}/first") is not None

    def part(self, seconds: float) -> None:
        """Wait until all launchers have read the end of the job, because one of them hosts the store."""
        self._meet("parting", lambda: self.count, seconds)


# --- nodes that were named -----------------------------------------------------------------------------------

NAMED_NODES = "named_nodes.jsonl"
# Causes that may lie in the node: not an exception of the program, nor lack of memory.
CAUSES = frozenset({Cause.HANG, Cause.STOPPED_PROCESS, Cause.SILENT_CORRUPTION, Cause.STRAGGLER, Cause.NODE_LOST})
# A node is a suspect when so many attempts have named it.
TIMES = 2


@dataclass(frozen=True)
class Naming:
    """A node was named."""

    host: str
    reason: str
    """Cause class of the failure, for example ``hang``."""
    attempt: str
    """A name of the attempt that is the same on all nodes: several launchers may name a node for one failure."""
    time: float
    """Seconds since the epoch."""

    @staticmethod
    def from_json(values: Any) -> "Naming | None":
        """The inverse of ``asdict``; None for anything else."""
        kinds: dict[str, Any] = {"host": str, "reason": str, "attempt": str, "time": int | float}
        if not isinstance(values, Mapping) or not all(isinstance(values.get(name), kinds[name]) for name in kinds):
            return None
        return Naming(values["host"], values["reason"], values["attempt"], float(values["time"]))


class NamedNodes:
    """The named nodes that a launcher has learned of: from the file, from itself, and from other launchers."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._namings: dict[tuple[str, str], Naming] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file again: another launcher may have added to it."""
        if self._directory is None:
            return
        with suppress(OSError):
            for line in (self._directory / NAMED_NODES).read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, RecursionError):  # a damaged line must not stop a job
                    naming = Naming.from_json(json.loads(line))
                    self.add([] if naming is None else [naming])

    @property
    def namings(self) -> list[Naming]:
        """Every naming, at most one for each node and attempt."""
        return list(self._namings.values())

    def add(self, namings: Iterable[Naming]) -> None:
        """Add ``namings`` that others have recorded."""
        for naming in namings:
            self._namings.setdefault((naming.host, naming.attempt), naming)

    def name(self, naming: Naming) -> None:
        """Record ``naming``, also in the file; a file system that fails does not end the job."""
        if (naming.host, naming.attempt) in self._namings:
            return
        self.add([naming])
        if self._directory is not None:
            with suppress(OSError):
                append_line(self._directory / NAMED_NODES, json.dumps(asdict(naming)))

    def suspects(self) -> dict[str, list[str]]:
        """The reasons for which each suspect was named."""
        reasons: dict[str, list[str]] = {}
        for naming in sorted(self._namings.values(), key=lambda naming: naming.time):
            reasons.setdefault(naming.host, []).append(naming.reason)
        return {host: found for host, found in reasons.items() if len(found) >= TIMES}


# --- the order of the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeReport:
    """What a launcher reports to the first one at the start of an attempt."""

    host: str
    num_ranks: int
    namings: tuple[Naming, ...]
    """The nodes that it knows to have been named: the run directory need not be on shared storage."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "NodeReport":
        return NodeReport(values["host"], values["num_ranks"], tuple(Naming(**naming) for naming in values["namings"]))


@dataclass(frozen=True)
class NodeOrder:
    """What the first launcher decides for all."""

    attempt: str
    """A name of the attempt."""
    first_ranks: tuple[int, ...]
    """The global rank of the first process of each node."""
    namings: tuple[Naming, ...]
    """The namings that any launcher has."""
    sentences: tuple[str, ...] = ()
    """Sentences for the log."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "NodeOrder":
        namings = tuple(Naming(**naming) for naming in values["namings"])
        return NodeOrder(values["attempt"], tuple(values["first_ranks"]), namings, tuple(values["sentences"]))


def order_nodes(reports: Sequence[NodeReport], named: NamedNodes) -> NodeOrder:
    """The order of the nodes, suspects last, by the reports of all launchers, whose namings are added to ``named``."""
    for report in reports:
        named.add(report.namings)
    hosts = {report.host for report in reports}
    suspects = {host: reasons for host, reasons in named.suspects().items() if host in hosts}
    sentences = tuple(
        f"Node {host} was named {len(reasons)} times ({', '.join(reasons)}): its ranks are the last, which wait as "
        "spares if there are any."
        for host, reasons in suspects.items()
    )
    order = sorted(range(len(reports)), key=lambda place: reports[place].host in suspects)
    first = dict(zip(order, accumulate((reports[place].num_ranks for place in order), initial=0)))
    first_ranks = tuple(first[place] for place in range(len(reports)))
    return NodeOrder(secrets.token_hex(8), first_ranks, tuple(named.namings), sentences)


# --- waits ---------------------------------------------------------------------------------------------------

# Seconds of a pause, of which the first is one and each further one doubles.
_LONGEST_PAUSE = 30.0


@dataclass
class Backoff:
    """Pauses that grow while attempts fail without progress.

    The first restart is immediate: most failures pass. An attempt that fails at once again and again would otherwise
    load the file system and flood the log. Three attempts without a new checkpoint end the run anyway
    (megatron/operation/attempts.py), if it saves any.
    """

    failures: int = 0
    """Consecutive attempts that failed without progress."""

    def pause_after_failure(self, made_progress: bool) -> float:
        """Seconds to wait after an attempt that has failed; ``made_progress`` says whether it finished an iteration."""
        self.failures = 0 if made_progress else self.failures + 1
        if self.failures < 2:
            return 0.0
        return min(_LONGEST_PAUSE, 2.0 ** (self.failures - 2))


# Seconds between two questions.
ASK_SECONDS = 2.0
_TICK_SECONDS = 0.5
# Seconds of a tick that count: after a longer one this process, and so possibly the whole job, was stopped.
_LONGEST_TICK = 2.0


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
