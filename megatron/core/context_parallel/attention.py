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
from megatron.core.ops.attention import Attention, AttentionInputs, LocalAttention, TiledAttention, TiledGradients
from megatron.core.ops.attention_kernels import AttentionKernel, Gradients
from megatron.core.ops.documents import Span


class _AttentionOverRanks:
    """Attention of a rank's queries to the keys of all ranks."""

    def __init__(self, kernel: AttentionKernel, ranks: Communicator) -> None:
        self._kernel, self._ranks = kernel, ranks
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _whole(self, inputs: AttentionInputs) -> tuple[list[Span], int]:
        """The spans within which attention is causal, and the length of the whole sequence."""
        length = inputs.query.shape[2] * self._ranks.size
        return inputs.spans(length), length


class RingAttention(_AttentionOverRanks):
    """Keys and values move around the ring while each rank attends to those that it has."""

    def _sources(self) -> list[int]:
        """The rank whose keys are here, by step."""
        return [(self._ranks.rank - step) % self._ranks.size for step in range(self._ranks.size)]

    def _pass_on(self, key_value: Tensor, step: int) -> Work[Tensor] | None:
        return self._ranks.start_shift(key_value) if step < self._ranks.size - 1 else None

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, tuple[Any, ...]]:
        spans, length = self._whole(inputs)
        tiled = TiledAttention(self._kernel, inputs.query)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
        for step, source in enumerate(self._sources()):
            arriving = self._pass_on(key_value, step)
            key, value = key_value
            tiled.add(ring_tiles(self._split, source, spans, length), key, value, is_first=step == 0)
            if arriving is not None:
                key_value = arriving.wait()
        return tiled.output.to(inputs.query.dtype), (tiled.log_sum_exp, tiled.kept)

    def backward(self, grad: Tensor, inputs: AttentionInputs, output: Tensor, kept: tuple[Any, ...]) -> Gradients:
        # Each rank adds its part to the gradients of keys and values, which follow these around the ring.
        log_sum_exp, rest = kept
        spans, length = self._whole(inputs)
        gradients = TiledGradients(self._kernel, grad, inputs.query, output, log_sum_exp, rest)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
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

    def _start_gather(self, inputs: AttentionInputs) -> Work[Tensor]:
        """Gather the keys and values of all ranks: ``[ranks * s, 2, b, groups, d]``."""
        return self._ranks.start_all_gather(torch.stack((inputs.key, inputs.value)).movedim(3, 0).contiguous())

    def _natural(self, gathered: Tensor) -> Tensor:
        """Keys and values in the order of the sequence, ``[2, b, groups, s, d]``."""
        return self._split.natural(gathered.unflatten(0, (self._ranks.size, -1))).movedim(0, 3)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, tuple[Any, ...]]:
        spans, length = self._whole(inputs)
        tiled = TiledAttention(self._kernel, inputs.query)
        gathering = self._start_gather(inputs)
        tiled.add(diagonal_tiles(self._split, spans, length), inputs.key, inputs.value, is_first=True)
        tiled.add(earlier_tiles(self._split, spans, length), *self._natural(gathering.wait()))
        return tiled.output.to(inputs.query.dtype), (tiled.log_sum_exp, tiled.kept)

    def backward(self, grad: Tensor, inputs: AttentionInputs, output: Tensor, kept: tuple[Any, ...]) -> Gradients:
        # Keys and values are gathered again; a reduce-scatter sums their gradients over the ranks.
        log_sum_exp, rest = kept
        spans, length = self._whole(inputs)
        gradients = TiledGradients(self._kernel, grad, inputs.query, output, log_sum_exp, rest)
        gathering = self._start_gather(inputs)
        key, value = inputs.key, inputs.value
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

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, tuple[Any, ...]]:
        query, key, value = self._to_heads(inputs.query, inputs.key, inputs.value)
        output, kept = self._inner.forward(AttentionInputs(query, key, value, inputs.documents))
        return self._to_positions(output)[0], ((query, key, value), output, kept)

    def backward(self, grad: Tensor, inputs: AttentionInputs, output: Tensor, kept: tuple[Any, ...]) -> Gradients:
        (query, key, value), whole_output, rest = kept
        (whole_grad,) = self._to_heads(grad)
        whole = AttentionInputs(query, key, value, inputs.documents)
        grads = self._inner.backward(whole_grad, whole, whole_output, rest)
        # The exchange adds nothing up, so gradients need no wider format.
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
