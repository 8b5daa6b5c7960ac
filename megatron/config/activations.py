"""Flags for the activations saved for the backward pass: recompute and CPU offload."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, values_of

RecomputeGranularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp_act", "mlp", "moe_act", "moe", "shared_experts"]


@dataclass(frozen=True)
class LayerUnit:
    """Layers of a chunk that are recomputed or offloaded as one unit, by their index in the chunk."""

    layers: range
    is_recomputed: bool
    """Whether only the input of the first layer is saved, and the layers run again before their backward pass."""
    is_offloaded: bool
    """Whether saved tensors are copied to host memory."""


@dataclass(frozen=True)
class ActivationConfig:
    """Recompute of activations and their offload to host memory; see docs/memory.md."""

    # Recompute
    recompute_granularity: RecomputeGranularity | None = None
    """Recompute activations in the backward pass: of --recompute-modules (selective), or of whole layers, which save
    only their inputs (full)."""
    recompute_activations: bool = False
    """Same as --recompute-granularity selective."""
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    """Selective: modules to recompute in every layer (default: core_attn): the attention between the query-key-value
    projection and the output projection (core_attn), the norms before query-key-value and dense MLP (layernorm), SwiGLU
    (mlp_act) or the MLP with its norm (mlp) of dense layers, SwiGLU of the experts (moe_act), the shared expert
    (shared_experts), or the whole MoE part of a layer with its norm, its router and the exchange of tokens (moe)."""
    recompute_method: RecomputeMethod | None = None
    """Full: divide each pipeline chunk into units of --recompute-num-layers layers and save only the input of each unit
    (uniform), or recompute the first --recompute-num-layers layers of each chunk one by one and save the activations of
    the others (block)."""
    recompute_num_layers: int | None = None
    """Full: layers per unit (uniform), or recomputed layers per pipeline chunk (block)."""
    distribute_saved_activations: bool = False
    """Full: shard the saved inputs over the tensor-parallel ranks and all-gather each before its recompute. With
    --sequence-parallel they are already sharded."""
    # Offload
    cpu_offloading_num_layers: int = 0
    """Offload the activations of the first this many layers of each pipeline chunk to host memory: copied during the
    forward pass, and prefetched during the backward pass of the following layer."""
    # Logits
    loss_chunk_size: int | None = None
    """Compute logits and loss for this many tokens of a microbatch at a time, and the logits again in the backward pass
    (default: for all tokens). Saves the memory of the other tokens' logits, 2 bytes x --micro-batch-size x --seq-length
    x vocabulary size in bf16, and costs one more matrix multiplication of the output layer (a third more)."""

    @property
    def granularity(self) -> RecomputeGranularity | None:
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def modules(self) -> frozenset[RecomputeModule]:
        """Modules that every layer recomputes."""
        if self.granularity != "selective":
            return frozenset()
        return frozenset(("core_attn",) if self.recompute_modules is None else self.recompute_modules)

    def units(self, num_layers: int) -> tuple[LayerUnit, ...]:
        """The units of a chunk of ``num_layers`` layers, in order.

        The first layer of a unit decides whether the unit is offloaded.
        """
        # uniform, 2 layers: [0 1] [2 3] [4]    block, 2 layers: [0] [1] 2 3 4    in brackets: recomputed
        size, recomputed = 1, 0
        if self.granularity == "full":
            assert self.recompute_num_layers is not None
            is_uniform = self.recompute_method == "uniform"
            size = self.recompute_num_layers if is_uniform else 1
            recomputed = num_layers if is_uniform else self.recompute_num_layers
        return tuple(
            LayerUnit(
                range(first, min(first + size, num_layers)),
                is_recomputed=first < recomputed,
                is_offloaded=first < self.cpu_offloading_num_layers,
            )
            for first in range(0, num_layers, size)
        )

    def check(self) -> None:
        require_at_least(1, values_of(self, "recompute_num_layers", "loss_chunk_size"))
        require_at_least(0, values_of(self, "cpu_offloading_num_layers"))
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations means --recompute-granularity selective and contradicts "
                "--recompute-granularity full: remove one."
            )
        needed = "--recompute-method (uniform or block)" if self.recompute_method is None else "--recompute-num-layers"
        if self.granularity == "full" and None in (self.recompute_method, self.recompute_num_layers):
            raise ConfigError(f"--recompute-granularity full needs {needed}: add it.")
        full = changed_flags(self, "recompute_method", "recompute_num_layers", "distribute_saved_activations")
        selective = changed_flags(self, "recompute_modules")
        require_flag("--recompute-granularity full", self.granularity == "full", full)
        require_flag("--recompute-granularity selective", self.granularity == "selective", selective)
        if self.recompute_modules == ():
            raise ConfigError("--recompute-modules has no value: add one, such as core_attn, or remove the flag.")
        for whole, part in (("mlp", "mlp_act"), ("moe", "moe_act"), ("moe", "shared_experts")):
            if {whole, part} <= self.modules:
                raise ConfigError(f"--recompute-modules {whole} includes {part}: remove {part}.")
