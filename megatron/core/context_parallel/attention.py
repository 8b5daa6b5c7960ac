"""Context-parallel attention: three exchanges, and their combination in levels.

``p2p``: keys and values are sent around the ring of ranks (ring attention, arXiv 2310.01889, on balanced chunks).
``allgather``: every rank gathers all keys and values (Llama 3, arXiv 2407.21783, section 3.3.2). ``a2a``: an all-to-all
exchanges positions for heads, and each rank attends over the whole sequence with its shard of the heads (DeepSpeed
Ulysses, arXiv 2309.14509).

``a2a+p2p`` has two levels (USP, arXiv 2405.07719; LoongTrain, arXiv 2406.18485): ``a2a`` in groups of A neighbouring
ranks, then ring attention over the P groups with each rank's shard of the heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.parallel import CONTEXT_PARALLEL_TYPES, ContextParallelType, Exchange
from megatron.core.communication import Communicator, Work
from megatron.core.context_parallel.attention import ContextSplit, diagonal_tiles, earlier_tiles, ring_tiles
from megatron.core.ops.attention import (
    Attention,
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    Gradients,
    LocalAttention,
    TiledAttention,
    TiledGradients,
)
from megatron.core.ops.documents import Span, spans_of


class _AttentionOverRanks:
    """Attention of a rank's queries to the keys of all ranks."""

    def __init__(self, kernel: AttentionKernel, ranks: Communicator) -> None:
        self._kernel, self._ranks = kernel, ranks
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _whole(self, inputs: AttentionInputs) -> tuple[Sequence[Span], int]:
        """The spans within which attention is causal, and the length of the whole sequence."""
        length = inputs.query.shape[2] * self._ranks.size
        return spans_of(inputs.spans, length), length


class RingAttention(_AttentionOverRanks):
    """Keys and values are sent around the ring while each rank attends to those that it has."""

    def _sources(self) -> list[int]:
        """The rank from which this rank has keys, for each step."""
        return [(self._ranks.rank - step) % self._ranks.size for step in range(self._ranks.size)]

    def _pass_on(self, key_value: Tensor, step: int) -> Work[Tensor] | None:
        return self._ranks.start_shift(key_value) if step < self._ranks.size - 1 else None

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        spans, length = self._whole(inputs)
        tiled = TiledAttention(self._kernel, inputs.query)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
        for step, source in enumerate(self._sources()):
            arriving = self._pass_on(key_value, step)
            key, value = key_value
            tiled.add(ring_tiles(self._split, source, spans, length), key, value, is_first=step == 0)
            if arriving is not None:
                key_value = arriving.wait()
        return tiled.result()

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        # The gradients of keys and values follow them around the ring, a step behind; each rank adds its part. Both are
        # sent in one launch: with one hardware queue a second one would wait for the first and block the attention
        # that is launched after it.
        spans, length = self._whole(inputs)
        gradients = TiledGradients(self._kernel, grad, inputs.query, attended)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
        moving: list[Tensor] = []
        for step, source in enumerate(self._sources()):
            if step < self._ranks.size - 1:
                moving = [key_value, *moving]
            shift = self._ranks.start_shifts(moving)
            grad_key_value = torch.zeros_like(key_value, dtype=gradients.dtype)
            gradients.add(ring_tiles(self._split, source, spans, length), *key_value, *grad_key_value)
            arrived = shift.wait()
            if step < self._ranks.size - 1:
                key_value, *arrived = arrived
            for grads_so_far in arrived:
                grad_key_value += grads_so_far
            moving = [grad_key_value]
        grad_key, grad_value = self._ranks.start_shift(grad_key_value).wait()
        return gradients.query, grad_key, grad_value


class AllGatherAttention(_AttentionOverRanks):
    """All keys and values are gathered while the rank attends to its own chunks."""

    def _start_gather(self, inputs: AttentionInputs) -> Work[Tensor]:
        """All ranks' keys and values in the order of the sequence, ``[2, b, groups, s, d]``."""
        by_position = torch.stack((inputs.key, inputs.value)).movedim(3, 0).contiguous()  # [s/cp, 2, b, groups, d]
        gathering = self._ranks.start_all_gather(by_position)
        ranks = self._ranks.size
        return gathering.then(lambda whole: self._split.natural(whole.unflatten(0, (ranks, -1))).movedim(0, 3))

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        spans, length = self._whole(inputs)
        tiled = TiledAttention(self._kernel, inputs.query)
        gathering = self._start_gather(inputs)
        tiled.add(diagonal_tiles(self._split, spans, length), inputs.key, inputs.value, is_first=True)
        tiled.add(earlier_tiles(self._split, spans, length), *gathering.wait())
        return tiled.result()

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        # Keys and values are gathered again; a reduce-scatter sums their gradients over the ranks.
        spans, length = self._whole(inputs)
        gradients = TiledGradients(self._kernel, grad, inputs.query, attended)
        gathering = self._start_gather(inputs)
        key, value = inputs.key, inputs.value
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=gradients.dtype) for tensor in (key, value))
        gradients.add(diagonal_tiles(self._split, spans, length), key, value, grad_key, grad_value)
        key_value = gathering.wait()
        grad_key_value = torch.zeros_like(key_value, dtype=gradients.dtype)  # [2, b, groups, s, d]
        gradients.add(earlier_tiles(self._split, spans, length), *key_value, *grad_key_value)
        by_rank = self._split.by_rank(grad_key_value.movedim(3, 0)).flatten(0, 1)  # [s, 2, b, groups, d]
        for own, reduced in zip((grad_key, grad_value), self._ranks.reduce_scatter(by_rank).movedim(0, 3)):
            own += reduced
        return gradients.query, grad_key, grad_value


class UlyssesAttention:
    """Attention over the positions of all ``ranks`` with a shard of the heads; both kinds of heads must be divisible.

    ``inner`` attends with these heads: locally, or over the groups of a hierarchy. Rank a of group p holds the chunks
    pA + a and 2AP - 1 - (pA + a) of 2AP. In the order of the sequence the chunks of a group are therefore two
    contiguous ones, p and 2P - 1 - p of 2P: the zig-zag split over P ranks, which balances the ring of ``inner``.
    """

    def __init__(self, ranks: Communicator, inner: Attention) -> None:
        self._ranks, self._inner = ranks, inner
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """``[b, heads, s/cp, d]`` each to ``[b, heads/cp, s, d]``, in one all-to-all."""
        parts = [tensor.unflatten(1, (self._ranks.size, -1)).permute(1, 3, 2, 0, 4) for tensor in tensors]
        received = self._ranks.all_to_all(torch.cat(parts, dim=2))  # [cp, s/cp, all heads/cp, b, d]
        heads = [part.shape[2] for part in parts]
        return [part.permute(2, 1, 0, 3) for part in self._split.natural(received).split(heads, dim=1)]

    def _to_positions(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse of :meth:`_to_heads`."""
        together = torch.cat([tensor.permute(2, 1, 0, 3) for tensor in tensors], dim=1)  # [s, all heads/cp, b, d]
        received = self._ranks.all_to_all(self._split.by_rank(together))  # [cp, s/cp, all heads/cp, b, d]
        heads = [tensor.shape[1] for tensor in tensors]
        return [part.permute(3, 0, 2, 1, 4).flatten(1, 2) for part in received.split(heads, dim=2)]

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key, value = self._to_heads(inputs.query, inputs.key, inputs.value)
        inner = self._inner.forward(AttentionInputs(query, key, value, inputs.spans))
        kept = query, key, value, inner.output, inner.log_sum_exp, inner.kept
        return AttentionOutput(self._to_positions(inner.output)[0], None, kept)

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        query, key, value, *inner = attended.kept
        (inner_grad,) = self._to_heads(grad)
        inner_inputs = AttentionInputs(query, key, value, inputs.spans)
        grads = self._inner.backward(inner_grad, inner_inputs, AttentionOutput(*inner))
        # An all-to-all sums nothing, so gradients need no wider dtype.
        grad_query, grad_key, grad_value = self._to_positions(*(part.to(grad.dtype) for part in grads))
        return grad_query, grad_key, grad_value


def build_attention(
    levels: Sequence[Exchange], communicators: Sequence[Communicator], kernel: AttentionKernel
) -> Attention:
    """Attention by the exchanges ``levels``, each over its communicator, from neighbouring ranks outwards."""
    if not levels:
        return LocalAttention(kernel)
    ranks = communicators[0]
    if levels[0] == "a2a":
        return UlyssesAttention(ranks, build_attention(levels[1:], communicators[1:], kernel))
    assert len(levels) == 1, "only a2a can be combined with a further exchange"
    return RingAttention(kernel, ranks) if levels[0] == "p2p" else AllGatherAttention(kernel, ranks)


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence, and their exchanges: one for all layers, or one for each layer."""

    ranks: Communicator = field(default_factory=lambda: Communicator((0,), 0))
    comm_types: Sequence[ContextParallelType] = ("p2p",)
    levels: Sequence[Communicator] = ()
    """The levels of the same ranks, for types of several levels."""

    @property
    def split(self) -> ContextSplit:
        return ContextSplit(self.ranks.rank, self.ranks.size)

    def attention(self, layer: int, kernel: AttentionKernel) -> Attention:
        """The attention of layer number ``layer``."""
        if self.ranks.size == 1:
            return LocalAttention(kernel)
        exchanges = CONTEXT_PARALLEL_TYPES[self.comm_types[layer if len(self.comm_types) > 1 else 0]].levels
        return build_attention(exchanges, self.levels if len(exchanges) > 1 else (self.ranks,), kernel)
