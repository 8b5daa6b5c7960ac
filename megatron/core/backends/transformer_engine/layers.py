"""Linear layers, and norms in front of them, that are modules of Transformer Engine.

Only the computation is theirs. Weights are ours, with the same names, facts and layout as those of the layers that they
stand for, so that initial weights, checkpoints, norms and data parallelism do not see who multiplies.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.core.backends.transformer_engine.fp8 import TransformerEngineFp8
from megatron.core.backends.transformer_engine.overlap import column_overlap, row_overlap
from megatron.core.backends.transformer_engine.package import TransformerEngine
from megatron.core.gradient import MainGrad, accumulate_main_grad, main_grad_of
from megatron.core.parameter import ParameterInfo, columns_box, sharded_boxes
from megatron.core.tensor_parallel.layers import LayerContext


class _OwnGraph(Function):
    """Runs a module under its own autograd graph, so that we know when Transformer Engine writes ``weight.main_grad``:
    its kernel accumulates there and returns no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: "_Linear", weight: Tensor, gain: Tensor | None) -> Tensor:
        # The graph begins with the edge of `inputs`, not with a copy, so that who saves what is the module's affair.
        with torch.enable_grad():
            outputs = layer.compute(inputs)
        ctx.begin, ctx.end = get_gradient_edge(inputs), get_gradient_edge(outputs)
        ctx.layer, ctx.weight, ctx.gain = layer, weight, gain
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        assert not ctx.layer.context.weight_gradients.is_deferring, "these weight gradients cannot wait"
        weight, gain, end = ctx.weight, ctx.gain, ctx.end
        ctx.end = None
        main_grad = main_grad_of(weight) or MainGrad(torch.empty_like(weight))
        with main_grad.accumulating() as weight.main_grad:
            wanted = [ctx.begin] if gain is None else [ctx.begin, gain]
            grad_inputs, *grad_gain = torch.autograd.grad(end, wanted, gradients[0])
        # It may have been allocated.
        del weight.main_grad
        grad_weight = main_grad.buffer if main_grad_of(weight) is None else None
        return grad_inputs, None, grad_weight, accumulate_main_grad(gain, *grad_gain) if gain is not None else None


class _Linear(nn.Module):
    """A module of Transformer Engine with parameters of ours, whose ``infos`` are by their names in the module."""

    def __init__(
        self, engine: TransformerEngine, module: Any, infos: dict[str, ParameterInfo], context: LayerContext
    ) -> None:
        super().__init__()
        self.engine, self.context = engine, context
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
        """The module itself: a norm with a linear layer is one module."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s(/tp), b, in]`` or ``[s, b, in/tp]`` to the output."""
        if not torch.is_grad_enabled():
            return self.compute(inputs)
        assert inputs.requires_grad
        gain = getattr(self.module, "layer_norm_weight", None)
        output: Tensor = _OwnGraph.apply(inputs, self, self.module.weight, gain)
        return output

    def compute(self, inputs: Tensor) -> Tensor:
        """The module's output."""
        with self._format():
            # False: add to the gradient whichever microbatch it is, and multiply with the FP8 weight that is kept.
            output: Tensor = self.module(inputs, is_first_microbatch=False)
        return output

    def _format(self) -> AbstractContextManager[object]:
        if self.fp8 is not None:
            return self.fp8.product()
        # The forward pass may be one of layers in FP8.
        context: AbstractContextManager[object] = self.engine.pytorch.autocast(enabled=False)
        return context


class TransformerEngineProvider:
    """Makes the layers (:class:`megatron.core.models.layer.LayerProvider`). With ``overlaps`` they need
    :func:`~megatron.core.backends.transformer_engine.overlap.shared_buffers`."""

    def __init__(self, engine: TransformerEngine, overlaps: bool = False) -> None:
        self.engine, self.overlaps = engine, overlaps

    def norm_linear(
        self,
        norm: str,
        name: str,
        input_size: int,
        output_sections: Sequence[int],
        context: LayerContext,
        init_std: float,
        epsilon: float,
    ) -> nn.Module:
        """RMSNorm and the product, ``[s(/tp), b, in] -> [s, b, out/tp]``, one ``LayerNormLinear``."""
        parallel = context.parallel
        layout = sharded_boxes(output_sections, (input_size,), parallel.rank, parallel.size)
        gain = ParameterInfo(
            f"{norm}.weight",
            *sharded_boxes((input_size,), (), rank=0, size=1),
            init_std=None,
            weight_decay=False,
            tensor_parallel_sharded=False,
            gradient_is_partial=parallel.sequence_parallel,
        )
        weight = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        module = self.engine.pytorch.LayerNormLinear(
            input_size,
            sum(output_sections),
            eps=epsilon,
            normalization="RMSNorm",
            parallel_mode="column",
            **_arguments(context),
            **(column_overlap(name) if self.overlaps else {}),
        )
        return _Linear(self.engine, module, {"layer_norm_weight": gain, "weight": weight}, context)

    def row_linear(
        self, name: str, input_size: int, output_size: int, context: LayerContext, init_std: float
    ) -> nn.Module:
        """The product and its sum over the ranks, ``[s, b, in/tp] -> [s(/tp), b, out]``, a ``Linear``."""
        parallel = context.parallel
        layout = columns_box(output_size, input_size, parallel.rank, parallel.size)
        weight = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        module = self.engine.pytorch.Linear(
            input_size,
            output_size,
            parallel_mode="row",
            **_arguments(context),
            **(row_overlap(name) if self.overlaps else {}),
        )
        return _Linear(self.engine, module, {"weight": weight}, context)


def _arguments(context: LayerContext) -> dict[str, Any]:
    """What both modules are told; the memory for their weights is ours."""
    parallel = context.parallel
    return {
        "bias": False,
        "fuse_wgrad_accumulation": True,
        "params_dtype": context.dtype,
        "device": "meta",
        "sequence_parallel": parallel.sequence_parallel,
        "tp_size": parallel.size,
        "tp_group": parallel.communicator.process_group if parallel.size > 1 else None,
    }
