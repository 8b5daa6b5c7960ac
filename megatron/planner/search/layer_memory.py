"""What a layer keeps between its forward and its backward pass, and the highest sum of allocations during either.

A pass is a short list of allocations and frees in the order of the code (:mod:`megatron.core.models.layer`): only their
sizes are known, as bytes. Names: ``x`` the input of a layer, ``n`` a norm's output, ``q`` query, ``kv`` key or value,
``f`` the width of the MLP. The kernels are those that the dry run assumes (docs/dry_run.md).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.planner.search.attention_memory import AttentionMemory
from megatron.planner.search.ledger import Ledger


@dataclass(frozen=True)
class UnitMemory:
    """Memory of a unit of a chunk: a layer, recomputed layers, the embedding or the output layer. In bytes."""

    kept: int
    """From the forward pass to the backward pass, with the unit's input and without its output."""
    forward: int
    """Most during the forward pass beyond the input."""
    backward: int
    """Most during the backward pass, with ``kept`` and the output's gradient, until that gradient is freed."""
    late_backward: int = 0
    """As ``backward``, after the output's gradient is freed."""
    deferred: int = 0
    """From the backward pass to the pass of the weight gradients, where that is a pass of its own."""
    experts_end: int = 0
    """In the backward pass, with the last weight gradient of its experts."""
    end: int = 0
    """In the backward pass, with the last weight gradient."""


@dataclass(frozen=True)
class LayerSizes:
    """Bytes of the tensors of a layer on a rank."""

    shard: int
    """A tensor of the residual stream, ``[s/(cp tp), b, h]``."""
    whole: int
    """All its rows, ``[s/cp, b, h]``; equal to ``shard`` without sequence parallelism."""
    statistics: int
    """A number in fp32 for each token of ``shard``."""
    fused: int
    """``[s/cp, b, (n + 2 groups) d / tp]``."""
    attention: AttentionMemory
    activated: int
    """``[s/cp, b, f/tp]``; gate and up together are twice as large."""
    head_norm: int = 0
    """Inverse RMS of all query and key heads; 0 without QK-norm."""
    query_and_key: int = 0
    """Queries and keys, with QK-norm."""

    @property
    def gathers(self) -> bool:
        """Whether linear layers gather rows."""
        return self.whole > self.shard

    @property
    def gathered(self) -> int:
        """The gathered rows of a linear layer's input or output gradient."""
        return self.whole if self.gathers else 0


class AttentionPart:
    """The norm, attention and output projection of a layer."""

    def __init__(self, sizes: LayerSizes, modules: Collection[str], defers: bool) -> None:
        self.s, self.defers = sizes, defers
        self.recomputes_norm, self.recomputes_core = "layernorm" in modules, "core_attn" in modules

    def _norm(self, ledger: Ledger) -> None:
        ledger.add(self.s.shard, self.s.statistics)

    def forward(self, ledger: Ledger, saves: bool) -> None:
        """From ``x`` to ``x`` and ``x + attention``; leaves on the ledger what it keeps, and the sum."""
        s = self.s
        self._norm(ledger)
        ledger.add(s.gathered, s.fused)
        ledger.drop(s.gathered)
        if self.recomputes_norm or not saves:
            ledger.drop(s.shard, s.statistics)
        if s.head_norm:
            ledger.add(s.head_norm, s.query_and_key, s.fused)
            ledger.drop(s.query_and_key)
            if not saves:
                ledger.drop(s.fused, s.head_norm)
        s.attention.forward(ledger)
        linear_output(ledger, s)
        if self.recomputes_core or not saves:
            ledger.drop(s.attention.kept)
        if not saves:
            ledger.drop(s.fused)
        ledger.add(s.shard)  # x + attention
        ledger.drop(s.shard)  # the projection's output

    def backward(self, ledger: Ledger) -> None:
        """From the gradient of ``x + attention`` to the gradient of ``x``."""
        s = self.s
        kept = s.attention.kept
        if self.recomputes_core:
            s.attention.forward(ledger)
        ledger.add(s.gathered, s.attention.output)  # dy of all rows, and the gradient of the attention's output
        ledger.drop(s.gathered)
        s.attention.backward(ledger)  # adds the gradient of the fused projection
        ledger.drop(s.attention.output)
        ledger.drop(kept - s.attention.output if self.defers else kept)
        ledger.drop(s.fused)
        if s.head_norm:
            ledger.add(s.query_and_key, s.fused)
            ledger.drop(s.query_and_key, s.fused, s.head_norm, s.fused)
        if self.recomputes_norm:
            self._norm(ledger)
        input_gradient(ledger, s)
        if not self.defers:
            ledger.drop(s.fused, s.shard)  # of the projection: output gradient and input
        norm_backward(ledger, s)
        if not self.defers:
            ledger.drop(s.shard)  # the output gradient, which the projection's weight gradient reads


class DensePart:
    """The norm and the SwiGLU MLP of a layer."""

    experts_end = 0

    def __init__(self, sizes: LayerSizes, modules: Collection[str], defers: bool) -> None:
        self.s, self.defers = sizes, defers
        self.recomputes_all = "mlp" in modules
        self.recomputes_norm = "layernorm" in modules and not self.recomputes_all
        self.recomputes_activation = "mlp_act" in modules and not self.recomputes_all

    def forward(self, ledger: Ledger, saves: bool) -> None:
        """From ``x`` to ``x`` and the output; leaves what it keeps, and the output."""
        s, saves = self.s, saves and not self.recomputes_all
        self._gate_and_up(ledger)
        if self.recomputes_norm or not saves:
            ledger.drop(s.shard, s.statistics)
        ledger.add(s.activated)
        linear_output(ledger, s)
        if self.recomputes_activation or not saves:
            ledger.drop(s.activated)
        if not saves:
            ledger.drop(2 * s.activated)
        ledger.add(s.shard)
        ledger.drop(s.shard)

    def _gate_and_up(self, ledger: Ledger) -> None:
        s = self.s
        ledger.add(s.shard, s.statistics, s.gathered, 2 * s.activated)
        ledger.drop(s.gathered)

    def rerun(self, ledger: Ledger) -> None:
        """The forward pass of a recomputed layer without its last product."""
        self._gate_and_up(ledger)
        ledger.add(self.s.activated)

    def backward(self, ledger: Ledger) -> int:
        """From the gradient of the output to the gradient of ``x``; returns the peak before the former is freed."""
        s = self.s
        if self.recomputes_all:
            self.rerun(ledger)
        elif self.recomputes_activation:
            ledger.add(s.activated)
        ledger.add(s.gathered, s.activated)  # dy of all rows, gradient of the activation
        ledger.drop(s.gathered)
        if not self.defers:
            ledger.drop(s.activated)
        ledger.add(2 * s.activated)
        ledger.drop(s.activated, 2 * s.activated)
        if self.recomputes_norm:
            ledger.add(s.shard, s.statistics)
        input_gradient(ledger, s)
        if not self.defers:
            ledger.drop(2 * s.activated, s.shard)
        norm_backward(ledger, s)
        early = ledger.restart()
        if not self.defers:
            ledger.drop(s.shard)
        return early


def linear_output(ledger: Ledger, s: LayerSizes) -> None:
    """A row-parallel layer: its output of all rows, of which a rank keeps its shard."""
    ledger.add(s.whole)
    if s.gathers:
        ledger.add(s.shard)
        ledger.drop(s.whole)


def input_gradient(ledger: Ledger, s: LayerSizes) -> None:
    """A column-parallel layer: the gathered input, and the gradient of all its rows, reduced to a shard."""
    ledger.add(s.gathered, s.whole)
    if s.gathers:
        ledger.add(s.shard)
        ledger.drop(s.whole, s.gathered)


def norm_backward(ledger: Ledger, s: LayerSizes) -> None:
    """The gradient of a norm's input, added to the gradient of the residual connection."""
    ledger.add(s.shard)
    ledger.drop(s.shard, s.statistics, s.shard)  # the output's gradient, the statistics, x
    ledger.add(s.shard)  # the sum
    ledger.drop(s.shard)  # the norm's part


class SecondPart(Protocol):
    """The part of a layer after attention, dense or with experts."""

    def forward(self, ledger: Ledger, saves: bool) -> None:
        """From ``x`` to ``x`` and the output; leaves what it keeps, and the output."""

    def rerun(self, ledger: Ledger) -> None:
        """The forward pass of a recomputed layer, without a last product that nothing reads."""

    def backward(self, ledger: Ledger) -> int:
        """From the gradient of the output to the gradient of ``x``; returns the peak before the former is freed."""

    @property
    def experts_end(self) -> int:
        """What the ledger had with the last weight gradient of the experts; 0 without experts."""


@dataclass(frozen=True)
class Layer:
    """A layer without full recompute."""

    attention: AttentionPart
    mlp: SecondPart

    def memory(self) -> UnitMemory:
        shard = self.attention.s.shard
        ledger = Ledger()
        self.attention.forward(ledger, saves=True)
        self.mlp.forward(ledger, saves=True)
        forward, kept = ledger.peak, ledger.now  # with the output instead of the input: both are shards
        ledger = Ledger(kept + shard)
        early = self.mlp.backward(ledger)
        self.attention.backward(ledger)
        # At the end: the input, the projection's and the norm's gradient of it, and the residual connection's.
        return UnitMemory(kept, forward, early, ledger.peak, ledger.now - shard, self.mlp.experts_end, 4 * shard)


def recomputed(layers: Sequence[Layer]) -> UnitMemory:
    """Layers that save the input of the first alone, and run again in the backward pass."""
    shard = layers[0].attention.s.shard
    ledger = Ledger()
    for layer in layers:
        layer.attention.forward(ledger, saves=False)
        layer.mlp.forward(ledger, saves=False)
        ledger.now = shard  # the output of the layer; its input is freed
    forward = ledger.peak
    ledger = Ledger(2 * shard)  # x and the output's gradient
    for layer in layers[:-1]:
        layer.attention.forward(ledger, saves=True)
        layer.mlp.forward(ledger, saves=True)
    layers[-1].attention.forward(ledger, saves=True)
    layers[-1].mlp.rerun(ledger)
    for number, layer in reversed(list(enumerate(layers))):
        layer.mlp.backward(ledger)
        if number == len(layers) - 1:
            ledger.add(shard)  # the gradient of the unit's output is held until the end
        layer.attention.backward(ledger)
    return UnitMemory(shard, forward, ledger.highest, 0, ledger.now - 2 * shard, end=5 * shard)
