"""Token dispatchers: rows to the ranks of their experts, and the experts' outputs back to the tokens.

A token ``[h]`` of a rank's n becomes a row for each of its k experts. The rank at ``ep`` = r has the experts
``[r E / EP, (r + 1) E / EP)``; the ranks along ``etp`` divide each expert, so each receives all of its rows and returns
a partial sum. Every dispatcher returns the same sums, also for experts without rows.

A dispatcher is a class here, with a row in :data:`DISPATCHERS`, whose names are those of
``--moe-token-dispatcher-type``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatron.core.communication import Work
from megatron.core.moe.dispatch import RowOrder, rows_of, sum_of_choices
from megatron.core.moe.routing import Routing, count_choices, count_choices_by_set
from megatron.core.moe.transfer import (
    Adjoint,
    BackwardOverlap,
    Exchange,
    Gather,
    StartedTransfer,
    UnevenGather,
    communicate,
)
from megatron.core.ops.grouped import RowCounts
from megatron.core.topology import Topology
from megatron.torch_compat import FakeTensor


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows of this rank's experts."""

    rows: Tensor
    """``[m, h]``, sorted by expert."""
    counts: RowCounts
    """Of each expert of this rank."""
    combine: Callable[[Tensor], Tensor]
    """The experts' outputs ``[m, h]``, partial sums over ``etp``, to the weighted sums of this rank's tokens
    ``[n, h]``. Call it once, on all ranks."""
    overlap: BackwardOverlap | None = None
    """For what can be computed while the gradient of the rows is sent back; None if it is not sent."""


@dataclass(frozen=True, eq=False)
class PendingDispatch:
    """A dispatch under way."""

    finish: Callable[[], Dispatched]

    def wait(self) -> Dispatched:
        """The rows; call it once. What runs between the start and this call overlaps with the communication, and so
        does its backward pass."""
        return self.finish()


class TokenDispatcher(Protocol):
    """Differentiable in the tokens and in the weights of the routing. All ranks of ``etp`` and ``ep`` call it together,
    each with its own tokens."""

    def start(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        """Send ``tokens`` ``[n, h]`` to the experts that ``routing`` chose."""


class HostCounts(Protocol):
    """Copies row counts to the host, which needs them for the sizes of tensors and messages."""

    def read(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """``sent`` and ``received`` as flat lists, from one synchronisation: the rows of this rank for each of all
        experts, ``[E]``, ``num_rows`` in all; and the rows of each source for each expert of this rank,
        ``[sources, E / EP]``."""


class CopiedCounts:
    """The counts of the device."""

    def read(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        # Every value of a simulated tensor is 1: its rows and their memory would be far too few.
        assert not isinstance(sent, FakeTensor), "a dry run has no row counts: assume a load"
        counts: list[int] = torch.cat([sent, received.flatten()]).tolist()
        assert sum(counts[: sent.numel()]) == num_rows, (counts, num_rows)
        return counts[: sent.numel()], counts[sent.numel() :]


@dataclass(frozen=True)
class AssumedCounts:
    """The counts of a dry run, which has no values: every source sends ``load`` times as many rows to the experts of
    this rank as with an even load, and equal numbers to the other experts."""

    load: float
    ep: int
    ep_rank: int

    def __post_init__(self) -> None:
        assert 0 <= self.load <= self.ep, f"a load of {self.load} needs more rows than all {self.ep} EP ranks have"
        assert self.load == 1 or self.ep > 1, "a rank with all experts has all rows"

    def read(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        num_sources, num_local = received.shape
        own = round(self.load * num_rows / self.ep)
        here = _spread(own, num_local)
        elsewhere = _spread(num_rows - own, sent.numel() - num_local)
        first = self.ep_rank * num_local
        return [*elsewhere[:first], *here, *elsewhere[first:]], here * num_sources


def _spread(total: int, parts: int) -> list[int]:
    """``total`` as ``parts`` numbers that differ by at most 1."""
    return [total // parts + (part < total % parts) for part in range(parts)]


@dataclass(frozen=True)
class ExpertRanks:
    """What a dispatcher needs to know about its rank."""

    num_experts: int
    topology: Topology
    host_counts: HostCounts
    probs_on_input: bool
    """Whether the weights multiply the tokens before the experts, not the outputs of the experts."""

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.topology.grid.ep

    def weigh(self, tokens: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """The tokens to send, and the weights of the outputs, None if the tokens are weighted."""
        if not self.probs_on_input:
            return tokens, routing.weights
        assert routing.weights.shape[1] == 1, "weights on the input need one expert for each token"
        return (tokens * routing.weights).to(tokens.dtype), None


@dataclass(frozen=True, eq=False)
class LocalDispatcher:
    """All experts are on this rank."""

    ranks: ExpertRanks

    def start(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        tokens, weights = self.ranks.weigh(tokens, routing)
        counts = count_choices(routing.experts, self.ranks.num_experts)
        host, _ = self.ranks.host_counts.read(counts, counts.unsqueeze(0), routing.experts.numel())
        order = RowOrder.sorted_by(routing.experts)
        dispatched = Dispatched(
            rows_of(tokens, order),
            RowCounts(tuple(host), counts),
            lambda outputs: sum_of_choices(outputs, order, weights),
        )
        return PendingDispatch(lambda: dispatched)


@dataclass(frozen=True, eq=False)
class AllGatherDispatcher:
    """All-gathers tokens and routing over ``etp x ep``. Each rank takes the rows of its experts, and a reduce-scatter
    adds the outputs. The messages have fixed sizes: EP / k times the bytes of an even all-to-all."""

    groups: ClassVar[tuple[tuple[str, ...], ...]] = (("etp", "ep"),)
    ranks: ExpertRanks

    def start(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        tokens, weights = self.ranks.weigh(tokens, routing)
        gather = Gather(self.ranks.topology.communicator("etp", "ep"))
        experts = gather.start(routing.experts)
        gathered = StartedTransfer(gather, tokens)
        gathered_weights = None if weights is None else StartedTransfer(gather, weights)
        return PendingDispatch(lambda: self._finish(gather, experts, gathered, gathered_weights))

    def _finish(
        self, gather: Gather, experts: Work[Tensor], tokens: StartedTransfer, weights: StartedTransfer | None
    ) -> Dispatched:
        ranks = self.ranks
        first, num_local = ranks.topology.coordinates["ep"] * ranks.num_local_experts, ranks.num_local_experts
        all_experts = experts.wait()  # [etp ep n, k]
        counts = count_choices_by_set(all_experts.view(1, gather.ranks.size, -1), ranks.num_experts)  # [etp ep, E]
        received = counts[:, first : first + num_local]
        num_rows = all_experts.numel() // gather.ranks.size
        _, host = ranks.host_counts.read(counts[gather.ranks.rank], received, num_rows)
        local = all_experts - first
        keys = local.where((local >= 0) & (local < num_local), num_local)  # experts of other ranks last
        order = RowOrder.sorted_by(keys, sum(host))
        all_weights = None if weights is None else weights.wait()  # [etp ep n, k]

        def combine(outputs: Tensor) -> Tensor:
            return communicate(Adjoint(gather), sum_of_choices(outputs, order, all_weights))

        of_experts = _counts_of_experts(host, received)
        return Dispatched(rows_of(tokens.wait(), order), of_experts, combine, tokens.overlap)


@dataclass(frozen=True, eq=False)
class AllToAllDispatcher:
    """Sends each row to the ``ep`` rank of its expert, and all-gathers the rows over ``etp``. On the way back the
    ``etp`` ranks add their partial sums first. The ranks exchange their counts before the rows."""

    groups: ClassVar[tuple[tuple[str, ...], ...]] = (("ep",), ("etp",))
    ranks: ExpertRanks

    def start(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        tokens, weights = self.ranks.weigh(tokens, routing)
        topology, num_local = self.ranks.topology, self.ranks.num_local_experts
        ep, etp = topology.communicator("ep"), topology.communicator("etp")
        sent = count_choices(routing.experts, self.ranks.num_experts)
        receiving = ep.start_all_to_all(sent)  # [ep E / EP]
        order = RowOrder.sorted_by(routing.experts)
        rows = rows_of(tokens, order)  # while the counts are under way
        # A source is a rank of etp x ep, ep varying fastest.
        received = etp.all_gather(receiving.wait()).view(-1, num_local)  # [etp ep, E / EP]
        host_sent, host_received = self.ranks.host_counts.read(sent, received, routing.experts.numel())
        of_sources = _sums(host_received, num_local)
        gather = UnevenGather(etp, _sums(of_sources, ep.size))
        exchange = Exchange(ep, _sums(host_sent, num_local), of_sources[etp.rank * ep.size :][: ep.size])
        started = StartedTransfer(exchange, rows)
        counts = _counts_of_experts(host_received, received)
        by_expert = _order_by_expert(received, counts.total)  # while the rows are under way

        def finish() -> Dispatched:
            rows = communicate(gather, started.wait())  # sorted by source, then by expert

            def combine(outputs: Tensor) -> Tensor:
                partial = outputs if by_expert is None else sum_of_choices(outputs, by_expert)
                returned = communicate(Adjoint(exchange), communicate(Adjoint(gather), partial))
                return sum_of_choices(returned, order, weights)

            return Dispatched(rows if by_expert is None else rows_of(rows, by_expert), counts, combine, started.overlap)

        return PendingDispatch(finish)


def _order_by_expert(counts: Tensor, num_rows: int) -> RowOrder | None:
    """From ``num_rows`` rows sorted by source, then by expert, to rows sorted by expert; None if they are. ``counts``
    ``[sources, experts]``."""
    num_sources, num_experts = counts.shape
    if num_sources == 1 or num_experts == 1:
        return None
    experts = torch.arange(num_experts, device=counts.device).repeat(num_sources)
    experts = experts.repeat_interleave(counts.flatten(), output_size=num_rows)  # [m]
    return RowOrder.sorted_by(experts.unsqueeze(1))


def _counts_of_experts(host: Sequence[int], device: Tensor) -> RowCounts:
    """The sums over sources of flat ``host`` and of ``device`` ``[sources, experts]``."""
    num_experts = device.shape[1]
    sums = [sum(host[expert::num_experts]) for expert in range(num_experts)]
    return RowCounts(tuple(sums), device.sum(dim=0))


def _sums(numbers: Sequence[int], size: int) -> list[int]:
    """The sums of every ``size`` consecutive numbers."""
    return [sum(numbers[start : start + size]) for start in range(0, len(numbers), size)]


DISPATCHERS: dict[str, type[AllGatherDispatcher] | type[AllToAllDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}


def token_dispatcher(
    name: str, num_experts: int, topology: Topology, probs_on_input: bool = False, assumed_load: float = 1.0
) -> TokenDispatcher:
    """The dispatcher of ``--moe-token-dispatcher-type``. In a dry run, the experts of the simulated rank get
    ``assumed_load`` times the rows of an even load (:class:`AssumedCounts`)."""
    host_counts: HostCounts = CopiedCounts()
    if not topology.has_memory:
        host_counts = AssumedCounts(assumed_load, topology.grid.ep, topology.coordinates["ep"])
    ranks = ExpertRanks(num_experts, topology, host_counts, probs_on_input)
    if topology.grid.ep * topology.grid.etp == 1:
        return LocalDispatcher(ranks)
    return DISPATCHERS[name](ranks)


def dispatcher_groups(name: str) -> tuple[tuple[str, ...], ...]:
    """The axes of the communicators that the dispatcher uses, for :meth:`~megatron.core.topology.Topology.open`."""
    return DISPATCHERS[name].groups
