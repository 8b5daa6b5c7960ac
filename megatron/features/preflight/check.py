"""What every check of the nodes provides and uses: its result, the place of a rank, values exchanged over a store.

every rank      measure(site) -> JSON            on a thread, within a time limit
all ranks       board.agree(...)                 through the store, no collective
rank 0          judge(measurements) -> results   a pure function
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from megatron.core.communication import Communicator
from megatron.operation.causes import Cause

T = TypeVar("T")

RANKS_AT_ONCE = 1024
"""Keys that are read in one call."""
# Seconds for which the other ranks wait for rank 0 after its own limit.
_PATIENCE = 10.0


class MissingRanksError(Exception):
    """Ranks that did not answer in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from ranks {list(ranks)}")
        self.ranks = list(ranks)


class Board:
    """Small JSON values that the ranks exchange through the store of the job.

    No collective: a rank that hangs or is missing is known by its number, and the others do not wait longer than a
    limit. No earlier attempt may have used the store.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        # A store answers some 10^5 requests per second: many ranks ask less often.
        self._pause = min(0.5, max(0.002, world_size / 20_000))

    def key(self, *parts: str | int) -> str:
        return "/".join(map(str, ("preflight", *parts)))

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


class Verdict(StrEnum):
    """What a result means for the run."""

    OK = "ok"
    WARNING = "warning"
    """The run can start, but something is not as it should be."""
    FAILURE = "failure"
    """The run must not start before somebody has acted."""


@dataclass(frozen=True)
class Result:
    """What a check found, in words for people."""

    check: str
    verdict: Verdict
    value: str
    """What was measured."""
    limit: str = ""
    """What is allowed."""
    remedy: str = ""
    """What to do; empty if the verdict is ok."""
    rank: int | None = None
    """None if the result is about all ranks."""
    host: str = ""
    """The host of the rank; empty if the result is about all ranks."""
    cause: str = ""
    """The cause class (megatron/operation/causes.py) if the node is at fault; empty if something else may be."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Result":
        return cls(**{**record, "verdict": Verdict(record["verdict"])})

    @property
    def place(self) -> str:
        parts = [self.host] if self.host else []
        return ", ".join([*parts, f"rank {self.rank}"] if self.rank is not None else parts) or "all ranks"

    def sentence(self) -> str:
        limit = f" (limit: {self.limit})" if self.limit else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.check}, {self.place}: {self.value}{limit}{remedy}"


def failed_hosts(results: Iterable[Result]) -> list[str]:
    """The hosts with a failure, each once."""
    return list(dict.fromkeys(one.host for one in results if one.verdict is Verdict.FAILURE and one.host))


def worst(results: Iterable[Result]) -> Verdict:
    order = list(Verdict)
    return max((one.verdict for one in results), key=order.index, default=Verdict.OK)


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: a row for each result, with the remedy below it."""
    if not results:
        return []
    rows = [("check", "verdict", "where", "measured", "limit")]
    rows += [(one.check, one.verdict.value, one.place, one.value, one.limit) for one in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for number in range(len(results), 0, -1):
        if results[number - 1].remedy:
            lines.insert(number + 1, f"  -> {results[number - 1].remedy}")
    return lines


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    boot: str = ""
    """Changes at every boot; two machines never have the same one."""
    namespace: str = ""
    """PID namespace of the process."""
    device: str = "cpu"
    """Name of the processor that computes."""


@dataclass(frozen=True)
class Node:
    """A machine, with its ranks in ascending order."""

    host: str
    ranks: tuple[int, ...]


def nodes_of(places: Sequence[Place]) -> list[Node]:
    """The machines, in the order of their first rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault((place.host, place.boot), []).append(rank)
    return [Node(host, tuple(members)) for (host, _), members in ranks.items()]


@dataclass(frozen=True)
class Needs:
    """What the run needs; 0 or None where it is not known."""

    save: Path | None = None
    """Directory of the checkpoints."""
    checkpoint_bytes: int = 0
    """Size of one checkpoint."""
    host_bytes: int = 0
    """Host memory of each rank for asynchronous saves."""


class Network:
    """The communication between the ranks, which tests replace."""

    def __init__(self, world: Communicator) -> None:
        self._world = world

    def all_reduce(self, tensor: Tensor) -> None:
        """Add ``tensor`` over all ranks, in place."""
        self._world.all_reduce(tensor)

    def exchange(self, tensor: Tensor, received: Tensor, peer: int) -> None:
        """Send ``tensor`` to the rank ``peer`` while receiving from it."""
        self._world.start_exchange(tensor, peer, received, peer).wait()


@dataclass(frozen=True)
class Site:
    """This rank and all nodes, for the measurement of a check."""

    rank: int
    place: Place
    nodes: Sequence[Node]
    device: torch.device
    network: Network
    board: Board
    needs: Needs = Needs()

    @property
    def world_size(self) -> int:
        return self.board.world_size

    @property
    def node(self) -> Node:
        return next(node for node in self.nodes if self.rank in node.ranks)

    @property
    def leads_node(self) -> bool:
        """Whether this rank measures for its node."""
        return self.node.ranks[0] == self.rank

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Check(ABC):
    """A check: every rank measures, then rank 0 judges the measurements of all ranks.

    An :class:`OSError` or :class:`RuntimeError` of a measurement is a failure of its rank.
    """

    name: ClassVar[str]
    seconds: ClassVar[float]
    """Time limit of the measurement."""
    remedy: ClassVar[str]
    """What to do if the measurement does not end within its limit."""
    error_remedy: ClassVar[str] = "look at the log and at the node of this rank"
    """What to do if it ends with an error."""
    is_collective: ClassVar[bool] = False
    """Whether the ranks communicate, so that an error of one makes the others wait."""

    @abstractmethod
    def measure(self, site: Site) -> Any:
        """Measure on this rank; returns JSON, or None if this rank has nothing to measure."""

    @abstractmethod
    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        """Judge the measurements in rank order; a pure function. Returns what is not ok, or one result that is."""

    def ok(self, value: str, limit: str = "") -> list[Result]:
        """The result of a check that found nothing."""
        return [Result(self.name, Verdict.OK, value, limit)]

    def result(
        self,
        verdict: Verdict,
        value: str,
        limit: str,
        remedy: str,
        rank: int,
        nodes: Sequence[Node],
        cause: Cause | None = None,
    ) -> Result:
        """The result of a rank."""
        return Result(self.name, verdict, value, limit, remedy, rank, host_of(rank, nodes), cause or "")


def host_of(rank: int, nodes: Sequence[Node]) -> str:
    return next((node.host for node in nodes if rank in node.ranks), "")


def found(measured: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    return ((rank, value) for rank, value in enumerate(measured) if value is not None)


def within(seconds: float, action: Callable[[], T]) -> T:
    """The result of ``action``; raises :class:`TimeoutError` if it takes longer, for example in a file system that does
    not answer. Its thread, a daemon, is then left behind."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="preflight").start()
    return outcome.result(seconds)
