"""Token dispatchers: rows to the ranks of their experts, and the experts' outputs back to the tokens.

A token ``[h]`` of a rank's n has k choices; choice ``i k + j`` is choice j of token i, and a row is the token of one
choice. The rank at ``ep`` = r has the experts ``[r E / EP, (r + 1) E / EP)``; the ranks along ``etp`` divide each
expert, so each receives all of its rows and returns a partial sum. Every dispatcher returns the same sums, also for
experts without rows. Sums over the choices of a token are in the order of the choices and need no atomic additions, so
they are deterministic.

A dispatcher is a class here, with a row in :data:`DISPATCHERS`, whose names are those of
``--moe-token-dispatcher-type``.
"""

# Two ranks with two experts each:
#
#     tokens   t0 t1 (rank 0)   t2 t3 (rank 1)      their experts   t0: 1 3   t1: 0 1   t2: 2 0   t3: 3 1
#     rows     rank 0 | e0: t1 t2 | e1: t0 t1 t3 |          rank 1 | e2: t2 | e3: t0 t3 |
#     outputs  go back the same way, and each token sums the outputs of its choices

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Work
from megatron.core.moe.routing import Routing, count_choices, count_choices_by_set
from megatron.core.moe.transfer import (
    AsyncTransfer,
    BackwardOverlap,
    communicate,
    even_gather,
    row_exchange,
    uneven_gather,
)
from megatron.core.ops.grouped import RowCounts
from megatron.core.topology import Topology
from megatron.torch_compat import FakeTensor


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The order of rows: the choice of each row, and the row of each choice."""

    choices: Tensor
    """The choice of each row: ``[m]`` int64."""
    rows: Tensor
    """The row of each choice, m if this rank has no such row: ``[n, k]`` int64."""

    @classmethod
    def sorted_by(cls, keys: Tensor, num_rows: int | None = None) -> "RowOrder":
        """Rows in the order of the ``keys`` ``[n, k]`` of their choices, equal keys in the order of the choices; only
        the first ``num_rows`` if given."""
        choices = keys.flatten().argsort(stable=True)[:num_rows]
        numbers = torch.arange(choices.numel(), device=keys.device)
        rows = torch.full_like(keys, choices.numel(), dtype=torch.int64)
        rows.view(-1).scatter_(0, choices, numbers)
        return cls(choices, rows)

    @cached_property
    def tokens(self) -> Tensor:
        return self.choices // self.rows.shape[1] if self.rows.shape[1] > 1 else self.choices


def rows_of(tokens: Tensor, order: RowOrder) -> Tensor:
    """The row of every choice: ``tokens`` ``[n, h]`` to ``[m, h]``."""
    rows: Tensor = _RowsOf.apply(tokens, order)
    return rows


def sum_of_choices(rows: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
    """For each token the sum of the rows of its choices, times ``weights`` ``[n, k]`` if given: ``rows`` ``[m, h]`` to
    ``[n, h]``. Choices without a row add nothing. 16-bit rows are added in fp32."""
    if weights is None:
        total: Tensor = _SumOfChoices.apply(rows, order)
    else:
        total = _WeightedSumOfChoices.apply(rows, weights, order)
    return total


def _sum_choices(rows: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
    num_choices = order.rows.shape[1]
    if rows.shape[0] < order.rows.numel():
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # the row of choices that have none
    total = rows.index_select(0, order.rows[:, 0])
    if weights is not None:
        total = total * weights[:, :1]
    elif num_choices > 1 and rows.itemsize == 2:
        total = total.float()
    for choice in range(1, num_choices):
        part = rows.index_select(0, order.rows[:, choice])
        total = total.add_(part) if weights is None else total.addcmul_(part, weights[:, choice : choice + 1])
    return total.to(rows.dtype)


class _RowsOf(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return tokens.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_choices(gradients[0], ctx.order), None


class _SumOfChoices(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return _sum_choices(rows, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.order.tokens), None


class _WeightedSumOfChoices(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return _sum_choices(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order: RowOrder = ctx.order
        gradient = gradients[0].index_select(0, order.tokens)  # [m, h]
        # The gradient of a choice whose row is on another rank is computed there.
        grad_weights = torch.zeros_like(weights)  # [n, k]
        of_rows = (gradient * rows).sum(dim=1, dtype=weights.dtype)  # [m]
        grad_weights.view(-1).index_copy_(0, order.choices, of_rows)
        # In place, in the wider dtype of the two.
        gradient.mul_(weights.flatten().index_select(0, order.choices).unsqueeze(1))
        return gradient, grad_weights, None


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows of this rank's experts."""

    rows: Tensor
    """``[m, h]``, sorted by expert."""
    counts: RowCounts
    """Rows of each expert of this rank."""
    combine: Callable[[Tensor], Tensor]
    """The experts' outputs ``[m, h]``, partial sums over ``etp``, to the weighted sums of this rank's tokens
    ``[n, h]``. Call it once, on all ranks."""
    overlap: BackwardOverlap | None = None
    """Queue of backward work to overlap with the gradient's all-to-all; None if there is none."""


class TokenDispatcher(Protocol):
    """Differentiable in the tokens and in the weights of the routing. All ranks of ``etp`` and ``ep`` call it together,
    each with its own tokens."""

    def start(self, tokens: Tensor, routing: Routing) -> Work[Dispatched]:
        """Send ``tokens`` ``[n, h]`` to the experts that ``routing`` chose. What runs between the start and the wait
        overlaps with the communication, and so does its backward pass; wait once."""


class HostCounts:
    """Copies row counts to the host, which needs them for the sizes of tensors and messages."""

    def read(self, sent: Tensor, received: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """``sent`` and ``received`` as flat lists, from one synchronisation: the rows of this rank for each of all
        experts, ``[E]``, ``num_rows`` in all; and the rows of each source for each expert of this rank,
        ``[sources, E / EP]``."""
        # Every value of a simulated tensor is 1: its rows and their memory would be far too few.
        assert not isinstance(sent, FakeTensor), "a dry run has no row counts: assume a load"
        counts: list[int] = torch.cat([sent, received.flatten()]).tolist()
        assert sum(counts[: sent.numel()]) == num_rows, (counts, num_rows)
        return counts[: sent.numel()], counts[sent.numel() :]


@dataclass(frozen=True)
class AssumedCounts(HostCounts):
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
    """The experts of a rank, and how it reaches the others."""

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

    def start(self, tokens: Tensor, routing: Routing) -> Work[Dispatched]:
        tokens, weights = self.ranks.weigh(tokens, routing)
        counts = count_choices(routing.experts, self.ranks.num_experts)
        host, _ = self.ranks.host_counts.read(counts, counts.unsqueeze(0), routing.experts.numel())
        order = RowOrder.sorted_by(routing.experts)
        rows = rows_of(tokens, order)
        dispatched = Dispatched(
            rows, RowCounts(tuple(host), counts), lambda outputs: sum_of_choices(outputs, order, weights)
        )
        return Work((), lambda: dispatched)


@dataclass(frozen=True, eq=False)
class AllGatherDispatcher:
    """All-gathers tokens and routing over ``etp x ep``. Each rank takes the rows of its experts, and a reduce-scatter
    adds the outputs. The messages have fixed sizes: EP / k times the bytes of an even all-to-all."""

    groups: ClassVar[tuple[tuple[str, ...], ...]] = (("etp", "ep"),)
    ranks: ExpertRanks

    def start(self, tokens: Tensor, routing: Routing) -> Work[Dispatched]:
        ranks, num_local = self.ranks, self.ranks.num_local_experts
        tokens, weights = ranks.weigh(tokens, routing)
        gather = even_gather(ranks.topology.communicator("etp", "ep"))
        gathering_experts = gather.start(routing.experts)
        gathering = AsyncTransfer(gather, tokens)
        gathering_weights = None if weights is None else AsyncTransfer(gather, weights)

        def finish() -> Dispatched:
            experts = gathering_experts.wait()  # [etp ep n, k]
            counts = count_choices_by_set(experts.view(1, gather.ranks.size, -1), ranks.num_experts)  # [etp ep, E]
            first = ranks.topology.coordinates["ep"] * num_local
            received = counts[:, first : first + num_local]
            own, num_rows = counts[gather.ranks.rank], experts.numel() // gather.ranks.size
            _, host = ranks.host_counts.read(own, received, num_rows)
            local = experts - first
            keys = local.where((local >= 0) & (local < num_local), num_local)  # experts of other ranks last
            order = RowOrder.sorted_by(keys, sum(host))
            all_weights = None if gathering_weights is None else gathering_weights.wait()  # [etp ep n, k]

            def combine(outputs: Tensor) -> Tensor:
                return communicate(gather.adjoint, sum_of_choices(outputs, order, all_weights))

            rows = rows_of(gathering.wait(), order)
            return Dispatched(rows, _counts_of_experts(host, received), combine, gathering.overlap)

        return Work((), finish)


@dataclass(frozen=True, eq=False)
class AllToAllDispatcher:
    """Sends each row to the ``ep`` rank of its expert, and all-gathers the rows over ``etp``. On the way back the
    ``etp`` ranks add their partial sums first. The ranks exchange their counts before the rows."""

    groups: ClassVar[tuple[tuple[str, ...], ...]] = (("ep",), ("etp",))
    ranks: ExpertRanks

    def start(self, tokens: Tensor, routing: Routing) -> Work[Dispatched]:
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
        gather = uneven_gather(etp, _sums(of_sources, ep.size))
        exchange = row_exchange(ep, _sums(host_sent, num_local), of_sources[etp.rank * ep.size :][: ep.size])
        exchanging = AsyncTransfer(exchange, rows)
        counts = _counts_of_experts(host_received, received)
        by_expert = _order_by_expert(received, counts.total)  # while the rows are under way

        def finish() -> Dispatched:
            rows = communicate(gather, exchanging.wait())  # sorted by source, then by expert
            rows = rows if by_expert is None else rows_of(rows, by_expert)

            def combine(outputs: Tensor) -> Tensor:
                partial = outputs if by_expert is None else sum_of_choices(outputs, by_expert)
                returned = communicate(exchange.adjoint, communicate(gather.adjoint, partial))
                return sum_of_choices(returned, order, weights)

            return Dispatched(rows, counts, combine, exchanging.overlap)

        return Work((), finish)


def _order_by_expert(counts: Tensor, num_rows: int) -> RowOrder | None:
    """The order by expert of ``num_rows`` rows that are sorted by source, then by expert; None if it is the same order.
    ``counts`` ``[sources, experts]``."""
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
    host_counts = HostCounts()
    if not topology.has_memory:
        host_counts = AssumedCounts(assumed_load, topology.grid.ep, topology.coordinates["ep"])
    ranks = ExpertRanks(num_experts, topology, host_counts, probs_on_input)
    if topology.grid.ep * topology.grid.etp == 1:
        return LocalDispatcher(ranks)
    return DISPATCHERS[name](ranks)
