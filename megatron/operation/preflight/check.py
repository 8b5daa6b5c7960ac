"""What every check provides, and what it may use."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.features.preflight.check import Board, Result, Verdict
from megatron.operation.causes import Cause

T = TypeVar("T")


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
        """The node of this rank."""
        return next(node for node in self.nodes if self.rank in node.ranks)

    @property
    def leads_node(self) -> bool:
        """Whether this rank measures for its node."""
        return self.node.ranks[0] == self.rank

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
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
    """(rank, measurement) of the ranks that measured."""
    return ((rank, value) for rank, value in enumerate(measured) if value is not None)


def within(seconds: float, action: Callable[[], T]) -> T:
    """The result of ``action``; raises :class:`TimeoutError` if it takes longer, for example in a file system that does
    not answer. Its thread, a daemon, is then left behind."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="preflight")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]
