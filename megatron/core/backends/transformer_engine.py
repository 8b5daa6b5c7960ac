"""Transformer Engine as an optional backend: linear layers, the norms before them, attention, and FP8 recipes.

Written against the sources of versions 2.9.0, the oldest that is accepted, and 2.20.2. ``tests/transformer_engine`` has
the signatures of everything that is used.
"""

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.backends.apex import fused_adam, multi_tensor_norm
from megatron.core.communication import Communicator
from megatron.core.device import Unavailable, load
from megatron.core.fp8 import Fp8Layers
from megatron.core.gradient import MainGrad, accumulate_main_grad, main_grad_of
from megatron.core.ops.attention import AttentionInputs, AttentionOutput, AutogradAttention, HalfPrecisionGpuKernel
from megatron.core.ops.norm import NormThenQuantization
from megatron.core.optimizer import AdamBuilder, SquaredNorm
from megatron.core.parameter import ParameterInfo
from megatron.core.tensor_parallel.layers import LayerContext

OLDEST = (2, 9)
"""The first version with ``autocast`` and ``is_fp8_available``."""


@dataclass(frozen=True)
class TransformerEngine:
    """The modules of the package that are used."""

    pytorch: Any
    """``transformer_engine.pytorch``"""
    recipe: Any
    """``transformer_engine.common.recipe``"""
    version: str

    @classmethod
    def find(cls, device: torch.device) -> "TransformerEngine":
        """The package, for layers on ``device``; raises :class:`Unavailable`."""
        if device.type != "cuda":
            raise Unavailable("has no kernels for a CPU")
        try:
            version = importlib.metadata.version("transformer-engine")
            if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
                raise Unavailable(f"is installed in version {version}, which is too old")
            return cls.load(version)
        # A package built for another torch or CUDA fails in many ways when its libraries are loaded.
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise Unavailable(f"cannot be imported ({reason})") from error

    @classmethod
    def load(cls, version: str) -> "TransformerEngine":
        pytorch = importlib.import_module("transformer_engine.pytorch")
        return cls(pytorch, importlib.import_module("transformer_engine.common.recipe"), version)


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
            # Rows of a history, of which theirs has one more:
            #     theirs  current | oldest | ... | newest
            #     ours    newest | ... | oldest | 0
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


@contextmanager
def shared_buffers(
    engine: TransformerEngine, precision: PrecisionConfig, ranks: Communicator, rows: int, hidden_size: int
) -> Iterator[None]:
    """Allocate the user buffers of ``ranks`` for activations ``[rows, hidden_size]``. Collective over all ranks of the
    run. Raises :class:`Unavailable`."""
    modes = engine.pytorch.UserBufferQuantizationMode
    used = [modes.NONE] if precision.fp8_format is None else [modes.FP8]
    if precision.fp8_format is not None and precision.first_last_layers_bf16:
        used.append(modes.NONE)
    try:
        engine.pytorch.initialize_ub(
            [rows, hidden_size],
            ranks.size,
            quantization_modes=used,
            dtype=torch.bfloat16,
            # The default prefers MPI, which is not available under torchrun.
            bootstrap_backend=dist.get_backend(ranks.process_group),
        )
    # 2.9 asserts where newer versions raise.
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise Unavailable(f"cannot share buffers between GPUs ({reason})") from error
    try:
        yield
    finally:
        engine.pytorch.destroy_ub()


class _OwnGraph(Function):
    """Runs a module under its own autograd graph, whose backward pass begins and ends here: Transformer Engine's kernel
    accumulates in ``weight.main_grad`` and returns no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: "_Linear", weight: Tensor, gain: Tensor | None) -> Tensor:
        # The graph begins at the edge of `inputs` and not at a copy, so the module decides what is saved.
        with torch.enable_grad():
            outputs = layer.compute(inputs)
        # backward goes from `end` to `begin` through the module's own graph, inside the outer one.
        ctx.begin, ctx.end = get_gradient_edge(inputs), get_gradient_edge(outputs)
        ctx.layer, ctx.weight, ctx.gain = layer, weight, gain
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        assert not ctx.layer.context.weight_gradients.is_deferring, "these weight gradients cannot be deferred"
        weight, gain, end = ctx.weight, ctx.gain, ctx.end
        ctx.end = None
        if not ctx.layer.fuses_weight_gradient:
            trained = [one for one in (weight, gain) if one is not None and one.requires_grad]
            grad_inputs, *grads = torch.autograd.grad(end, [ctx.begin, *trained], gradients[0])
            found = {id(one): accumulate_main_grad(one, grad) for one, grad in zip(trained, grads)}
            return grad_inputs, None, found.get(id(weight)), found.get(id(gain))
        main_grad = main_grad_of(weight) or MainGrad(torch.empty_like(weight))
        with main_grad.accumulating() as weight.main_grad:
            wanted = [ctx.begin] if gain is None or not gain.requires_grad else [ctx.begin, gain]
            grad_inputs, *grad_gain = torch.autograd.grad(end, wanted, gradients[0])
        del weight.main_grad  # the buffer may be temporary
        grad_weight = main_grad.buffer if main_grad_of(weight) is None else None
        return grad_inputs, None, grad_weight, accumulate_main_grad(gain, *grad_gain) if grad_gain else None


class _Linear(nn.Module):
    """A module of Transformer Engine with our parameters; ``infos`` by their names in the module."""

    input_quantization = None
    """The module quantises its input itself."""

    def __init__(
        self, provider: "TransformerEngineProvider", module: Any, infos: dict[str, ParameterInfo], context: LayerContext
    ) -> None:
        super().__init__()
        self.engine, self.context = provider.engine, context
        self.fuses_weight_gradient = provider.fuses_weight_gradient
        # A recomputed segment sets skip_output in its second run; the module computes its output even then.
        self.skip_output = False
        for name, info in infos.items():
            assert tuple(getattr(module, name).shape) == info.local_shape, (name, info)
            setattr(module, name, context.empty_parameter(info))
        self.module = module
        fp8 = context.fp8
        assert fp8 is None or isinstance(fp8, TransformerEngineFp8)
        self.fp8 = fp8
        if fp8 is not None:
            fp8.add(infos["weight"].name.removesuffix(".weight"), module)

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(inputs)
        assert inputs.requires_grad
        gain = getattr(self.module, "layer_norm_weight", None)
        output: Tensor = _OwnGraph.apply(inputs, self, self.module.weight, gain)
        return output

    def compute(self, inputs: Tensor) -> Tensor:
        """The module's output."""
        # Without FP8 the layer may be inside the autocast of other layers, which are in FP8.
        with self.engine.pytorch.autocast(enabled=False) if self.fp8 is None else self.fp8.layer_autocast():
            # False: always add to the gradient, and use the FP8 weight of the step.
            output: Tensor = self.module(inputs, is_first_microbatch=False)
        return output


class TransformerEngineProvider:
    """A :class:`megatron.core.models.layer.LayerProvider`. With ``overlaps`` its layers need
    :func:`~megatron.core.backends.transformer_engine.shared_buffers`. Without ``fuses_weight_gradient`` a
    weight gradient is computed in the weight's dtype, and then added to the main gradient."""

    def __init__(self, engine: TransformerEngine, overlaps: bool = False, fuses_weight_gradient: bool = True) -> None:
        self.engine, self.overlaps, self.fuses_weight_gradient = engine, overlaps, fuses_weight_gradient

    def norm_linear(
        self, norm: str, name: str, output_sections: Sequence[int], config: TransformerConfig, context: LayerContext
    ) -> nn.Module:
        infos = {
            "layer_norm_weight": context.gain(
                norm, config.hidden_size, config.apply_layernorm_1p, width_mult=config.width_mult
            ),
            "weight": context.column_weight(
                name, config.hidden_size, output_sections, config.hidden_init_std, config.width_mult
            ),
        }
        module = self.engine.pytorch.LayerNormLinear(
            config.hidden_size,
            sum(output_sections),
            eps=config.norm_epsilon,
            normalization="RMSNorm",
            zero_centered_gamma=config.apply_layernorm_1p,
            parallel_mode="column",
            # All-gather with the forward GEMM, all-gather of the input with dgrad, reduce-scatter with wgrad.
            **self._arguments(name, context, ("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad")),
        )
        return _Linear(self, module, infos, context)

    def row_linear(self, name: str, input_size: int, config: TransformerConfig, context: LayerContext) -> nn.Module:
        infos = {
            "weight": context.row_weight(
                name, input_size, config.hidden_size, config.residual_init_std, config.width_mult
            )
        }
        module = self.engine.pytorch.Linear(
            input_size,
            config.hidden_size,
            parallel_mode="row",
            # Reduce-scatter with the forward GEMM, all-gather with dgrad.
            **self._arguments(name, context, ("ub_overlap_rs", "ub_overlap_ag")),
        )
        return _Linear(self, module, infos, context)

    def _arguments(self, name: str, context: LayerContext, overlaps: Sequence[str]) -> dict[str, Any]:
        """Arguments of both modules; ``meta`` because the weights are replaced by ours."""
        parallel, buffers = context.parallel, {}
        if self.overlaps:
            # Layers share four buffers: qkv, proj, fc1 and fc2.
            buffers = {"ub_name": name.rpartition(".linear_")[2], **dict.fromkeys(overlaps, True)}
        return {
            **buffers,
            "bias": False,
            "fuse_wgrad_accumulation": self.fuses_weight_gradient,
            "params_dtype": context.dtype,
            "device": "meta",
            "sequence_parallel": parallel.sequence_parallel,
            "tp_size": parallel.size,
            "tp_group": parallel.communicator.process_group if parallel.size > 1 else None,
        }


class TransformerEngineAttention(HalfPrecisionGpuKernel, AutogradAttention):
    """``DotProductAttention``; it does not return the log-sum-exp."""

    has_windows = True

    def __init__(self, engine: TransformerEngine) -> None:
        self._engine = engine
        self._modules: dict[tuple[int, int, int], Any] = {}

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        heads, groups, size = shape = inputs.query.shape[1], inputs.key.shape[1], inputs.query.shape[3]
        if shape not in self._modules:
            self._modules[shape] = self._engine.pytorch.DotProductAttention(
                heads, size, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd"
            )
        with torch.enable_grad():
            q, k, v = (one.detach().requires_grad_() for one in (inputs.query, inputs.key, inputs.value))
            by_position = (one.permute(2, 0, 1, 3) for one in (q, k, v))  # [s, b, n, d]
            # Attention is never in FP8.
            with self._engine.pytorch.autocast(enabled=False):
                kind = "causal" if inputs.mask.is_causal else "no_mask"
                # Keys before and after the query's position; None for all.
                window = None if inputs.mask.window is None else (inputs.mask.window, 0)
                joined = self._modules[shape](*by_position, attn_mask_type=kind, window_size=window)
            output = joined.view(*joined.shape[:2], heads, -1).permute(1, 2, 0, 3)  # [b, n, s, d]
        return AttentionOutput(inputs, output.detach(), None, (output, q, k, v))


class RMSNorm(NormThenQuantization):
    """Transformer Engine's fused RMSNorm; the inverse RMS is ``[tokens]``. The gain is rounded to the inputs' dtype,
    which its gradient has."""

    def __init__(self) -> None:
        # The package loads the extension's library, so it is imported first.
        self._formats = load("transformer_engine.pytorch.constants", "Transformer Engine").TE_DType
        self._kernels = load("transformer_engine_torch", "Transformer Engine")

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rows, gain = inputs.contiguous().flatten(0, -2), weight.to(inputs.dtype)
        no_output = no_quantizer = None
        sm_margin, zero_centered = 0, False
        output, _, inverse_rms = self._kernels.rmsnorm_fwd(
            rows, gain, epsilon, no_output, no_quantizer, self._formats[inputs.dtype], sm_margin, zero_centered
        )
        return output.view(inputs.shape), inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, grad_rows = (tensor.contiguous().flatten(0, -2) for tensor in (inputs, gradient))
        sm_margin, zero_centered = 0, False
        grad_inputs, grad_weight = self._kernels.rmsnorm_bwd(
            grad_rows, rows, inverse_rms, weight.to(inputs.dtype), sm_margin, zero_centered
        )
        return grad_inputs.view(inputs.shape), grad_weight


def squared_norm() -> SquaredNorm:
    kernels = load("transformer_engine.pytorch.optimizers", "Transformer Engine")
    return multi_tensor_norm(kernels.multi_tensor_applier, kernels.multi_tensor_l2norm)


def adam() -> AdamBuilder:
    return fused_adam(load("transformer_engine.pytorch.optimizers", "Transformer Engine").FusedAdam)
