"""Linear layers of a forward pass alone: without autograd functions, whose cost shows where a pass has one token."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.models.layer import BuildContext, LocalProvider, NormLinear, RMSNorm
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.ops.matmul import linear
from megatron.core.precision import QuantizedActivation
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """``inputs [..., k] @ weight [n, k]^T``. For one row torch's matrix-vector product needs no copy of the weight."""
    if inputs.numel() == inputs.shape[-1] and inputs.dtype.itemsize > 2:
        return F.linear(inputs, weight)
    return linear(inputs, weight)


class _Column(ColumnParallelLinear):
    def forward(self, inputs: Tensor | QuantizedActivation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return product(inputs, self.weight)


class _Row(RowParallelLinear):
    def forward(self, inputs: Tensor | QuantizedActivation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return self.op.parallel.reduce_output(product(inputs, self.weight)).wait()


class _Norm(RMSNorm):
    def forward(self, x: Tensor, quantization: DelayedQuantization | None = None) -> Tensor | QuantizedActivation:
        if self.is_zero_centered:
            return super().forward(x)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


class ForwardProvider(LocalProvider):
    """The layers of :class:`LocalProvider` for passes without gradients or sequence parallelism."""

    def norm_linear(
        self, norm: str, name: str, output_sections: Sequence[int], config: TransformerConfig, context: BuildContext
    ) -> nn.Module:
        return NormLinear(
            _Norm(norm, config.hidden_size, config, context),
            _Column(name, config.hidden_size, output_sections, context, config.init_method_std),
        )

    def row_linear(self, name: str, input_size: int, config: TransformerConfig, context: BuildContext) -> nn.Module:
        return _Row(name, input_size, config.hidden_size, context, config.residual_init_std)
