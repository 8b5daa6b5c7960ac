"""Keys and values of earlier tokens, so that generation computes every token once.

The layers of a rank share a cache. :meth:`KeyValueCache.begin` gives the positions of the next pass, whose tokens
attend to the earlier tokens of their rows and to each other. Slot ``p`` of a row has the key, already rotated, and the
value of position ``p``, so rows of different lengths differ in their positions alone. Where a pass is longer than the
tokens of a row, it has padding behind them: no earlier query attends to the padding, and the next tokens are written
over it.

    slot        0 1 2 3 4 5 6 7 ...     prompts of 5 and 3 tokens in one pass, then one token of each row
    row 0       p p p p p n . .         p: prompt, n: new token, at position 5 in row 0 and 3 in row 1
    row 1       p p p n - . . .         -: padding of the first pass; n is written over its first slot
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention import (
    Attention,
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    Gradients,
    LocalAttention,
)
from megatron.core.ops.attention_kernels import masked_attention


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the queries of a pass attend to."""

    slots: slice
    mask: Tensor | None
    """The ``slots`` that a query attends to, ``[1 or b, 1, s, slots]`` bool; None: all."""


@dataclass(frozen=True)
class CachedPass:
    """The positions of the tokens of a pass, and the keys that they attend to."""

    positions: Tensor
    """``[s]``, or ``[s, b]`` if rows differ."""
    first: int | None
    """The first position; None if rows differ."""
    rows: Tensor | None
    """The numbers of the rows ``[b, 1]``, if rows differ."""
    firsts: Sequence[int]
    """The first position of every row."""
    visible: dict[tuple[int | None, int | None], VisibleKeys] = field(default_factory=dict)
    """The keys by the chunk size and the window of a layer."""

    def visible_keys(self, chunk_size: int | None, window: int | None) -> VisibleKeys:
        """The keys that the queries of a layer attend to; computed once for the layers with equal limits."""
        if (chunk_size, window) not in self.visible:
            self.visible[chunk_size, window] = _visible(self.firsts, self.positions, chunk_size, window)
        return self.visible[chunk_size, window]


class KeyValueCache:
    """The keys and values of the layers of a rank, ``[rows, groups / tp, capacity, d]`` each.

    With ``chunk_size`` some layers attend inside chunks of positions. They read the slots of the current chunk, and
    keep all slots, as the other layers do.
    """

    def __init__(self, device: torch.device, chunk_size: int | None = None, needs_log_sum_exp: bool = False) -> None:
        self.device, self.chunk_size, self.needs_log_sum_exp = device, chunk_size, needs_log_sum_exp
        self.capacity = 0
        self.current: CachedPass | None = None
        self._layers: list[CachedAttention] = []

    def attention(self, has_chunks: bool, kernel: AttentionKernel) -> Attention:
        """The attention of a further layer, with chunks or without."""
        layer = CachedAttention(self, has_chunks, kernel)
        self._layers.append(layer)
        return layer

    @property
    def positions(self) -> Tensor:
        """The positions of the current pass, ``[s]`` or ``[s, b]``."""
        assert self.current is not None, "begin() comes before a pass"
        return self.current.positions

    def clear(self, capacity: int) -> None:
        """Drop everything; the rows of the next pass get slots for ``capacity`` positions."""
        self.capacity = capacity
        for layer in self._layers:
            layer.keys = layer.values = None

    def reserve(self, capacity: int) -> None:
        """Have slots for at least ``capacity`` positions of every row."""
        if capacity > self.capacity:
            self.capacity = capacity
            self._change(lambda slots: F.pad(slots, (0, 0, 0, capacity - slots.shape[2])))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        index = torch.tensor(rows, device=self.device)
        self._change(lambda slots: slots.index_select(0, index))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = change(layer.keys)
                layer.values = change(layer.values)

    def begin(self, firsts: Sequence[int], length: int) -> None:
        """The next pass has ``length`` tokens of every row, from position ``firsts[row]`` on. Earlier positions are in
        the cache; later ones are written over."""
        assert max(firsts) + length <= self.capacity, (firsts, length, self.capacity)
        first, rows = firsts[0] if min(firsts) == max(firsts) else None, None
        positions = torch.arange(length, device=self.device)  # [s]
        if first is None:
            positions = positions.unsqueeze(1) + torch.tensor(firsts, device=self.device)  # [s, b]
            rows = torch.arange(len(firsts), device=self.device).unsqueeze(1)  # [b, 1]
        elif first:
            positions += first
        self.current = CachedPass(positions, first, rows, firsts)


def _visible(firsts: Sequence[int], positions: Tensor, chunk_size: int | None, window: int | None) -> VisibleKeys:
    """The keys from the beginning of a query's chunk, or of its window, to its own position."""
    length = positions.shape[0]
    # Whole slots for all rows: from the earliest chunk or window to the last position. The mask excludes the others.
    start = 0 if chunk_size is None else min(firsts) // chunk_size * chunk_size
    start = start if window is None else max(start, min(firsts) - window)
    keys = slice(start, max(firsts) + length)
    if length == 1 and positions.dim() == 1:
        return VisibleKeys(keys, None)
    slots = torch.arange(keys.start, keys.stop, device=positions.device)
    queries = positions.reshape(length, -1).t()[:, None, :, None]  # [1 or b, 1, s, 1]
    mask = slots <= queries
    if chunk_size is not None:
        mask &= slots >= queries - queries % chunk_size
    if window is not None:
        mask &= slots >= queries - window
    return VisibleKeys(keys, mask)


class CachedAttention(Attention):
    """Attention of new tokens to those of the cache and to each other, without a backward pass.

    The tokens of the first pass attend to each other alone, by the kernel of training.
    """

    def __init__(self, cache: KeyValueCache, has_chunks: bool, kernel: AttentionKernel) -> None:
        self._cache, self._has_chunks, self._needs_log_sum_exp = cache, has_chunks, cache.needs_log_sum_exp
        self._first_pass = LocalAttention(kernel)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        """``[b, groups, capacity, d]``; None before the first pass."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        current = self._cache.current
        assert current is not None
        if self.keys is None or self.values is None:
            rows, groups, _, head_size = inputs.key.shape
            # Zeros: a slot that a mask hides has the weight 0, whose product with a NaN would be NaN.
            self.keys, self.values = inputs.key.new_zeros((2, rows, groups, self._cache.capacity, head_size))
        if current.first is None:  # one index per row: a scatter
            slots = current.positions.t()  # [b, s]
            self.keys[current.rows, :, slots] = inputs.key.transpose(1, 2)  # [b, s, groups, d]
            self.values[current.rows, :, slots] = inputs.value.transpose(1, 2)
        else:  # the same slots of all rows: two copies
            written = slice(current.first, current.first + inputs.key.shape[2])
            self.keys[:, :, written] = inputs.key
            self.values[:, :, written] = inputs.value
        if current.first == 0:
            return self._first_pass.forward(inputs)
        chunk_size, cap = self._cache.chunk_size if self._has_chunks else None, inputs.mask.soft_cap
        visible = current.visible_keys(chunk_size, inputs.mask.window)
        keys, values = self.keys[:, :, visible.slots], self.values[:, :, visible.slots]
        if cap is None and not self._needs_log_sum_exp:
            output = F.scaled_dot_product_attention(inputs.query, keys, values, visible.mask, enable_gqa=True)
            return AttentionOutput(inputs, output, None)
        # torch's kernels have neither.
        return AttentionOutput(inputs, *masked_attention(inputs.query, keys, values, visible.mask, cap))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        raise NotImplementedError("generation has no backward pass")
