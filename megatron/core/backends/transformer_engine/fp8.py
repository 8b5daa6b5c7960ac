"""FP8 by Transformer Engine's recipes.

Delayed scaling goes by microbatches there: when a chunk's forward pass ends, and when the backward pass leaves its
first FP8 layer, magnitudes are reduced over the ranks and become scales. The other recipes have no memory.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.backends.transformer_engine.package import TransformerEngine
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Layers

_ROLES = (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))
"""Where a module's ``fp8_meta`` has each of :data:`megatron.core.fp8.ROLES`: input, weight, gradient of the output."""


def build_recipe(engine: TransformerEngine, config: PrecisionConfig, num_ranks: int) -> Any:
    """The recipe of the flags, for layers that ``num_ranks`` compute with."""
    recipes = engine.recipe
    fp8_format = recipes.Format.HYBRID if config.fp8_format == "hybrid" else recipes.Format.E4M3
    if config.fp8_recipe == "delayed":
        return recipes.DelayedScaling(
            margin=config.fp8_margin,
            fp8_format=fp8_format,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
            # Without a group it would take all ranks.
            reduce_amax=num_ranks > 1,
        )
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return kinds[config.fp8_recipe](fp8_format=fp8_format)


def why_unsupported(engine: TransformerEngine, config: PrecisionConfig) -> str | None:
    """Why the GPU has no products for the recipe of the flags, in Transformer Engine's words; None where it has."""
    checks = {
        "blockwise": engine.pytorch.is_fp8_block_scaling_available,
        "mxfp8": engine.pytorch.is_mxfp8_available,
    }
    is_available, reason = checks.get(config.fp8_recipe, engine.pytorch.is_fp8_available)(return_reason=True)
    return None if is_available else str(reason).rstrip(".")


class TransformerEngineFp8(Fp8Layers):
    """A rank's FP8 modules; ``ranks`` are those that compute with the same layers."""

    multiplier = "Transformer Engine"

    def __init__(self, engine: TransformerEngine, config: PrecisionConfig, ranks: Communicator) -> None:
        super().__init__(config)
        self._engine, self._ranks = engine, ranks
        self._recipe = build_recipe(engine, config, ranks.size)
        self._modules: dict[str, Any] = {}

    def _autocast(self) -> AbstractContextManager[object]:
        group = self._ranks.process_group if self.is_delayed and self._ranks.size > 1 else None
        context: AbstractContextManager[object] = self._engine.pytorch.autocast(
            enabled=True, recipe=self._recipe, amax_reduction_group=group
        )
        return context

    def add(self, name: str, module: Any) -> None:
        """Take part in a module that multiplies in FP8, whose global name is ``name``."""
        self._modules[name] = module
        if self.is_delayed:
            with self._autocast():
                module.init_fp8_metadata()

    def forward_pass(self) -> AbstractContextManager[object]:
        """Delayed scaling reduces magnitudes at its end, so that it stands around all layers of a chunk."""
        return self._autocast() if self.is_delayed else nullcontext()

    def product(self) -> AbstractContextManager[object]:
        """Stands around each FP8 module: what has no memory may so run again in the backward pass."""
        return nullcontext() if self.is_delayed else self._autocast()

    def start_step(self) -> None:
        """Weights are others than those that an evaluation has quantised."""
        self._forget_weights()

    def finish_step(self) -> None:
        """Weights will be others."""
        self._forget_weights()

    def _forget_weights(self) -> None:
        for module in self._modules.values():
            module._fp8_workspaces.clear()

    def state(self) -> dict[str, Tensor]:
        """As of all."""
        if not self.is_delayed:
            return {}
        state: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            metas = [(module.fp8_meta[key], column) for key, column in _ROLES]
            state[f"{name}/scale"] = torch.stack([meta.scale[column] for meta, column in metas])
            # Theirs collects in row 0, and has the past behind it, the oldest first.
            past = torch.stack([meta.amax_history[1:, column].flip(0) for meta, column in metas])
            state[f"{name}/amax_history"] = torch.nn.functional.pad(past, (0, 1))
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """As of all."""
        for name, module in self._modules.items() if self.is_delayed else ():
            for role, (key, column) in enumerate(_ROLES):
                meta = module.fp8_meta[key]
                if f"{name}/scale" in saved:
                    scale = saved[f"{name}/scale"][role]
                    # Where there is none yet, theirs is one.
                    meta.scale[column] = torch.where(scale > 0.0, scale, 1.0)
                if f"{name}/amax_history" in saved:
                    past, history = saved[f"{name}/amax_history"][role], meta.amax_history[:, column]
                    length = min(history.shape[0] - 1, past.shape[0])
                    history.zero_()
                    history[history.shape[0] - length :] = past[:length].flip(0)
