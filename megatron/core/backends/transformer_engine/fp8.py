"""FP8 by Transformer Engine's recipes.

Under its delayed scaling every microbatch sets new scales: amaxes are reduced over the ranks at the end of a chunk's
forward pass, and when the backward pass leaves its first FP8 layer. The other recipes have no state.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.backends.transformer_engine import TransformerEngine
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Layers

_ROLES = (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))
"""The place of each of :data:`megatron.core.fp8.ROLES` (input, weight, output gradient) in a module's ``fp8_meta``."""


def build_recipe(engine: TransformerEngine, config: PrecisionConfig, num_ranks: int) -> Any:
    """The recipe of the flags, for layers that ``num_ranks`` ranks share."""
    recipes = engine.recipe
    fp8_format = recipes.Format.HYBRID if config.fp8_format == "hybrid" else recipes.Format.E4M3
    if config.fp8_recipe == "delayed":
        return recipes.DelayedScaling(
            margin=config.fp8_margin,
            fp8_format=fp8_format,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
            # Without a group the reduction would be over all ranks.
            reduce_amax=num_ranks > 1,
        )
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return kinds[config.fp8_recipe](fp8_format=fp8_format)


def why_unsupported(engine: TransformerEngine, config: PrecisionConfig) -> str | None:
    """Transformer Engine's reason why the GPU does not support the recipe of the flags; None if it does."""
    checks = {
        "blockwise": engine.pytorch.is_fp8_block_scaling_available,
        "mxfp8": engine.pytorch.is_mxfp8_available,
    }
    is_available, reason = checks.get(config.fp8_recipe, engine.pytorch.is_fp8_available)(return_reason=True)
    return None if is_available else str(reason).rstrip(".")


class TransformerEngineFp8(Fp8Layers):
    """The FP8 modules of a rank; ``ranks`` compute with the same layers."""

    gemm_name = "Transformer Engine"

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
        """Register an FP8 module with the global name ``name``."""
        self._modules[name] = module
        if self.is_delayed:
            with self._autocast():
                module.init_fp8_metadata()

    def forward_pass(self) -> AbstractContextManager[object]:
        # Delayed scaling reduces amaxes at the end of the context, so one context contains all layers of a chunk.
        return self._autocast() if self.is_delayed else nullcontext()

    def layer_autocast(self) -> AbstractContextManager[object]:
        """The context of each FP8 module; recipes without state can run again in the backward pass."""
        return nullcontext() if self.is_delayed else self._autocast()

    def start_step(self) -> None:
        # An evaluation may have quantised other weights.
        for module in self._modules.values():
            module._fp8_workspaces.clear()

    finish_step = start_step

    def state(self) -> dict[str, Tensor]:
        if not self.is_delayed:
            return {}
        state: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            metas = [(module.fp8_meta[key], column) for key, column in _ROLES]
            state[f"{name}/scale"] = torch.stack([meta.scale[column] for meta, column in metas])
            # Row 0 is the current amax; the history follows, the oldest first. Ours has the newest first.
            past = torch.stack([meta.amax_history[1:, column].flip(0) for meta, column in metas])
            state[f"{name}/amax_history"] = torch.nn.functional.pad(past, (0, 1))
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        for name, module in self._modules.items() if self.is_delayed else ():
            for role, (key, column) in enumerate(_ROLES):
                meta = module.fp8_meta[key]
                if f"{name}/scale" in saved:
                    scale = saved[f"{name}/scale"][role]
                    # Transformer Engine's initial scale is 1, ours is 0.
                    meta.scale[column] = torch.where(scale > 0.0, scale, 1.0)
                if f"{name}/amax_history" in saved:
                    past, history = saved[f"{name}/amax_history"][role], meta.amax_history[:, column]
                    length = min(history.shape[0] - 1, past.shape[0])
                    history.zero_()
                    history[history.shape[0] - length :] = past[:length].flip(0)
