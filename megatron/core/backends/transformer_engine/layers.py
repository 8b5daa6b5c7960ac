"""Linear layers, with the norms before them, that are modules of Transformer Engine.

Transformer Engine only computes. Parameters are ours, with the same names, facts and layout as in our own layers, so
that initial weights, checkpoints, norms and data parallelism are the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.backends.transformer_engine import (
    TransformerEngine,
    TransformerEngineFp8,
    column_overlap,
    row_overlap,
)
from megatron.core.gradient import MainGrad, accumulate_main_grad, main_grad_of
from megatron.core.parameter import ParameterInfo
from megatron.core.tensor_parallel.layers import LayerContext


class _OwnGraph(Function):
    """Runs a module under its own autograd graph, so that we know when Transformer Engine writes ``weight.main_grad``:
    its kernel accumulates there and returns no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: "_Linear", weight: Tensor, gain: Tensor | None) -> Tensor:
        # The graph begins at the edge of `inputs` and not at a copy, so the module decides what is saved.
        with torch.enable_grad():
            outputs = layer.compute(inputs)
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

    @property
    def last_linear(self) -> "_Linear":
        """The module itself: the norm and the linear layer are one module."""
        return self

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
            **self._arguments(context),
            **(column_overlap(name) if self.overlaps else {}),
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
            **self._arguments(context),
            **(row_overlap(name) if self.overlaps else {}),
        )
        return _Linear(self, module, infos, context)

    def _arguments(self, context: LayerContext) -> dict[str, Any]:
        """Arguments of both modules; ``meta`` because the weights are replaced by ours."""
        parallel = context.parallel
        return {
            "bias": False,
            "fuse_wgrad_accumulation": self.fuses_weight_gradient,
            "params_dtype": context.dtype,
            "device": "meta",
            "sequence_parallel": parallel.sequence_parallel,
            "tp_size": parallel.size,
            "tp_group": parallel.communicator.process_group if parallel.size > 1 else None,
        }
