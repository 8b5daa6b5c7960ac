"""Flags for what a forward pass keeps for its backward pass: recomputation, and the host's memory."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least

RecomputeGranularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp_act", "mlp"]


@dataclass(frozen=True)
class LayerUnit:
    """Layers of a chunk that are run as one, by their places in the chunk."""

    layers: range
    is_recomputed: bool
    """Whether only the input of the first is kept, and all run again before their backward pass."""
    is_offloaded: bool
    """Whether what is kept goes to the host's memory."""


@dataclass(frozen=True)
class ActivationConfig:
    """Activations that are computed again in the backward pass, or kept in the host's memory, instead of on the
    device; see docs/memory.md."""

    recompute_granularity: RecomputeGranularity | None = None
    """Compute activations again in the backward pass: those of --recompute-modules (selective), or whole layers, of
    which only inputs are kept (full)."""
    recompute_activations: bool = False
    """The usual spelling of --recompute-granularity selective."""
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    """Selective: what is computed again in every layer (default: core_attn): all between the query-key-value projection
    and the output projection (core_attn), the outputs of both norms (layernorm), the output of SwiGLU (mlp_act), or
    the MLP from its input on (mlp)."""
    recompute_method: RecomputeMethod | None = None
    """Full: cut the layers of each pipeline chunk into units of --recompute-num-layers, each of which keeps its input
    alone (uniform), or recompute the first --recompute-num-layers of each chunk one by one and keep the others'
    activations (block)."""
    recompute_num_layers: int | None = None
    """Full: layers of a unit (uniform), or layers recomputed in each pipeline chunk (block)."""
    distribute_saved_activations: bool = False
    """Full: divide the inputs that are kept over the tensor-parallel ranks and gather each again when it is needed.
    With --sequence-parallel they are divided already."""
    cpu_offloading_num_layers: int = 0
    """Keep the activations of this many layers, the first of each pipeline chunk, in the host's memory: they are copied
    there behind the forward pass, and back while the layer behind them goes backward."""

    @property
    def granularity(self) -> RecomputeGranularity | None:
        """The granularity in force."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def modules(self) -> frozenset[RecomputeModule]:
        """What is recomputed inside every layer."""
        if self.granularity != "selective":
            return frozenset()
        return frozenset(("core_attn",) if self.recompute_modules is None else self.recompute_modules)

    def units(self, num_layers: int) -> tuple[LayerUnit, ...]:
        """How the ``num_layers`` layers of a chunk are run, in their order.

        What a unit keeps belongs to its first layer, which says whether it is offloaded.
        """
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
        """Raise :class:`ConfigError` on a value, or on flags of this group together, that cannot be honoured."""
        require_at_least(1, {"--recompute-num-layers": self.recompute_num_layers})
        require_at_least(0, {"--cpu-offloading-num-layers": self.cpu_offloading_num_layers})
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations means --recompute-granularity selective and contradicts full: remove one."
            )
        if self.granularity == "full":
            self._check_full()
        self._check_that_nothing_is_idle()

    def _check_full(self) -> None:
        for flag, value, choice in (
            ("--recompute-method", self.recompute_method, "uniform or block"),
            ("--recompute-num-layers", self.recompute_num_layers, "for example 1"),
        ):
            if value is None:
                raise ConfigError(f"--recompute-granularity full needs {flag}: add it, {choice}.")

    def _check_that_nothing_is_idle(self) -> None:
        """Every flag that is given has a meaning with the others."""
        for flag, is_given, granularity in (
            ("--recompute-modules", self.recompute_modules is not None, "selective"),
            ("--recompute-method", self.recompute_method is not None, "full"),
            ("--recompute-num-layers", self.recompute_num_layers is not None, "full"),
            ("--distribute-saved-activations", self.distribute_saved_activations, "full"),
        ):
            if is_given and self.granularity != granularity:
                raise ConfigError(f"{flag} belongs to --recompute-granularity {granularity}: add that, or remove it.")
        if self.recompute_modules == ():
            raise ConfigError("--recompute-modules names no module: name one, such as core_attn, or remove it.")
        if {"mlp", "mlp_act"} <= self.modules:
            raise ConfigError("--recompute-modules mlp recomputes what mlp_act does, too: remove mlp_act.")
