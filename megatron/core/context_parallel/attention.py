"""Attention over a sequence that several ranks share: three exchanges that bring queries and keys together.

``p2p``: keys and values travel around the ring of ranks, and each rank attends to what is there (ring attention, arXiv
2310.01889, on balanced chunks). ``allgather``: every rank gathers all keys and values (Llama 3, arXiv 2407.21783,
section 3.3.2). ``a2a``: ranks exchange positions for heads, and each attends over the whole sequence with its share of
the heads (DeepSpeed Ulysses, arXiv 2309.14509).

``a2a+p2p`` has two levels (USP, arXiv 2405.07719; LoongTrain, arXiv 2406.18485): ``a2a`` in groups of A neighbouring
ranks, then ring attention over the P groups with each rank's share of the heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.config.context_parallel import CONTEXT_PARALLEL_TYPES, ContextParallelType, Exchange
from megatron.core.communication import Communicator, Work
from megatron.core.context_parallel.split import ContextSplit, diagonal_tiles, earlier_tiles, ring_tiles
from megatron.core.ops.attention import Attention, LocalAttention, TiledAttention, TiledGradients
from megatron.core.ops.attention_kernels import AttentionKernel, Gradients
from megatron.core.ops.documents import Documents, Span, attention_spans


class _AttentionOverRanks:
    """What the ways have in common in which a rank's queries attend to all keys."""

    def __init__(self, kernel: AttentionKernel, ranks: Communicator) -> None:
        self._kernel, self._ranks = kernel, ranks
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _whole(self, query: Tensor, documents: Documents | None) -> tuple[list[Span], int]:
        """What attention goes over, and the length of the whole sequence."""
        length = query.shape[2] * self._ranks.size
        return attention_spans(documents, length), length


class RingAttention(_AttentionOverRanks):
    """Keys and values move on while the rank attends to those that it has; in backward their gradients follow them."""

    def _sources(self) -> list[int]:
        """Whose keys are here, step after step."""
        return [(self._ranks.rank - step) % self._ranks.size for step in range(self._ranks.size)]

    def _pass_on(self, key_value: Tensor, step: int) -> Work[Tensor] | None:
        return self._ranks.start_shift(key_value) if step < self._ranks.size - 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """One step for each rank of the ring."""
        spans, length = self._whole(query, documents)
        tiled = TiledAttention(self._kernel, query)
        key_value = torch.stack((key, value))
        for step, source in enumerate(self._sources()):
            arriving = self._pass_on(key_value, step)
            key, value = key_value
            tiled.add(ring_tiles(self._split, source, spans, length), key, value, is_first=step == 0)
            if arriving is not None:
                key_value = arriving.wait()
        return tiled.output.to(query.dtype), (tiled.log_sum_exp, tiled.kept)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        documents: Documents | None,
        kept: tuple[Any, ...],
    ) -> Gradients:
        """The same steps; what a rank contributes to the gradients of keys is added when they come by."""
        log_sum_exp, rest = kept
        spans, length = self._whole(query, documents)
        gradients = TiledGradients(self._kernel, grad, query, output, log_sum_exp, rest)
        key_value = torch.stack((key, value))
        following: Work[Tensor] | None = None
        for step, source in enumerate(self._sources()):
            arriving = self._pass_on(key_value, step)
            grad_key_value = torch.zeros_like(key_value, dtype=log_sum_exp.dtype)
            gradients.add(ring_tiles(self._split, source, spans, length), *key_value, *grad_key_value)
            if following is not None:
                grad_key_value += following.wait()
            following = self._ranks.start_shift(grad_key_value)
            if arriving is not None:
                key_value = arriving.wait()
        assert following is not None
        grad_key, grad_value = following.wait()
        return gradients.query, grad_key, grad_value


class AllGatherAttention(_AttentionOverRanks):
    """All keys and values on every rank, gathered while it attends to its own chunks."""

    def _start_gather(self, key: Tensor, value: Tensor) -> Work[Tensor]:
        """``[b, groups, s, d]`` of this rank to ``[ranks * s, 2, b, groups, d]``."""
        return self._ranks.start_all_gather(torch.stack((key, value)).movedim(3, 0).contiguous())

    def _natural(self, gathered: Tensor) -> Tensor:
        """Keys and values in the order of the sequence, ``[2, b, groups, s, d]``."""
        return self._split.natural(gathered.unflatten(0, (self._ranks.size, -1))).movedim(0, 3)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The diagonal, then all that lies before it."""
        spans, length = self._whole(query, documents)
        tiled = TiledAttention(self._kernel, query)
        gathering = self._start_gather(key, value)
        tiled.add(diagonal_tiles(self._split, spans, length), key, value, is_first=True)
        tiled.add(earlier_tiles(self._split, spans, length), *self._natural(gathering.wait()))
        return tiled.output.to(query.dtype), (tiled.log_sum_exp, tiled.kept)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        documents: Documents | None,
        kept: tuple[Any, ...],
    ) -> Gradients:
        """Gathers again, and adds up every rank's gradients of all keys and values."""
        log_sum_exp, rest = kept
        spans, length = self._whole(query, documents)
        gradients = TiledGradients(self._kernel, grad, query, output, log_sum_exp, rest)
        gathering = self._start_gather(key, value)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=log_sum_exp.dtype) for tensor in (key, value))
        gradients.add(diagonal_tiles(self._split, spans, length), key, value, grad_key, grad_value)
        natural = self._natural(gathering.wait())
        grad_natural = torch.zeros_like(natural, dtype=log_sum_exp.dtype)
        gradients.add(earlier_tiles(self._split, spans, length), *natural, *grad_natural)
        by_rank = self._split.by_rank(grad_natural.movedim(3, 0)).flatten(0, 1)
        for own, others in zip((grad_key, grad_value), self._ranks.reduce_scatter(by_rank).movedim(0, 3)):
            own += others
        return gradients.query, grad_key, grad_value


class UlyssesAttention:
    """All positions of ``ranks``, for a share of the heads; both kinds of heads must divide evenly over ``ranks``.

    ``inner`` attends with these heads: locally, or over the groups of a hierarchy. Rank a of group p holds the chunks
    pA + a and 2AP - 1 - (pA + a) of 2AP. In the order of the sequence the chunks of a group are therefore two
    contiguous ones, p and 2P - 1 - p of 2P: the zig-zag split over P ranks, which balances the ring of ``inner``.
    """

    def __init__(self, ranks: Communicator, inner: Attention) -> None:
        self._ranks, self._inner = ranks, inner
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """``[b, heads, s of this rank, d]`` each, to ``[b, heads of this rank, s, d]``, in one exchange."""
        ranks = self._ranks.size
        # [ranks, s, heads for that rank, b, d], side by side.
        parts = [tensor.unflatten(1, (ranks, -1)).permute(1, 3, 2, 0, 4) for tensor in tensors]
        received = self._ranks.all_to_all(torch.cat(parts, dim=2))
        heads = [part.shape[2] for part in parts]
        return [part.permute(2, 1, 0, 3) for part in self._split.natural(received).split(heads, dim=1)]

    def _to_positions(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse of :meth:`_to_heads`."""
        together = torch.cat([tensor.permute(2, 1, 0, 3) for tensor in tensors], dim=1)
        received = self._ranks.all_to_all(self._split.by_rank(together))
        heads = [tensor.shape[1] for tensor in tensors]
        # [ranks, s, heads of that rank, b, d] each.
        return [part.permute(3, 0, 2, 1, 4).flatten(1, 2) for part in received.split(heads, dim=2)]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Exchange, attend, exchange back."""
        whole = self._to_heads(query, key, value)
        output, kept = self._inner.forward(whole[0], whole[1], whole[2], documents)
        return self._to_positions(output)[0], (whole, output, kept)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        documents: Documents | None,
        kept: tuple[Any, ...],
    ) -> Gradients:
        """The same with the gradients."""
        whole, whole_output, rest = kept
        (whole_grad,) = self._to_heads(grad)
        whole_query, whole_key, whole_value = whole
        grads = self._inner.backward(whole_grad, whole_query, whole_key, whole_value, whole_output, documents, rest)
        # Complete: the exchange adds nothing up, so that they need not travel in a wider format.
        grad_query, grad_key, grad_value = self._to_positions(*(part.to(grad.dtype) for part in grads))
        return grad_query, grad_key, grad_value


def build_attention(
    levels: Sequence[Exchange], communicators: Sequence[Communicator], kernel: AttentionKernel
) -> Attention:
    """Attention by the exchanges ``levels``, each among its communicator's ranks, from neighbouring ranks outwards."""
    if not levels:
        return LocalAttention(kernel)
    ranks = communicators[0]
    if levels[0] == "a2a":
        return UlyssesAttention(ranks, build_attention(levels[1:], communicators[1:], kernel))
    assert len(levels) == 1, "only a2a leaves each rank whole heads, among which another exchange can follow"
    return RingAttention(kernel, ranks) if levels[0] == "p2p" else AllGatherAttention(kernel, ranks)


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence, and how they attend: in one way, or in one for each layer."""

    ranks: Communicator = field(default_factory=lambda: Communicator((0,), 0))
    comm_types: Sequence[ContextParallelType] = ("p2p",)
    levels: Sequence[Communicator] = ()
    """The levels of the same ranks, for types of several levels."""

    @property
    def split(self) -> ContextSplit:
        """This rank's part of a sequence; the same for all types."""
        return ContextSplit(self.ranks.rank, self.ranks.size)

    def attention(self, layer: int, kernel: AttentionKernel) -> Attention:
        """How layer number ``layer`` attends."""
        if self.ranks.size == 1:
            return LocalAttention(kernel)
        exchanges = CONTEXT_PARALLEL_TYPES[self.comm_types[layer if len(self.comm_types) > 1 else 0]].levels
        return build_attention(exchanges, self.levels if len(exchanges) > 1 else (self.ranks,), kernel)
