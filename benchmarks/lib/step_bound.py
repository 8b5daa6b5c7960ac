"""What a training step takes at the least: its matrix products and its attention, and nothing else."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.ops.attention import AttentionInputs, AttentionKernel, AttentionOutput
from megatron.core.ops.attention_kernels import TorchAttention
from megatron.core.ops.fp8 import BLOCK, E4M3, E5M2, ScaledGemm
from megatron.core.precision import QuantizedTensor

Product = Callable[[Tensor, Tensor], Tensor]
"""A product ``[t, k] x [n, k] -> [t, n]``."""


def linear_shapes(
    model: TransformerConfig, tensor_parallel_size: int = 1, with_head: bool = True
) -> list[tuple[int, int]]:
    """Widths ``(in, out)`` of every linear layer, as one tensor-parallel rank has it."""
    size = tensor_parallel_size
    layer = [
        (model.hidden_size, (model.query_size + 2 * model.key_value_size) // size),
        (model.query_size // size, model.hidden_size),
        (model.hidden_size, 2 * model.ffn_hidden_size // size),
        (model.ffn_hidden_size // size, model.hidden_size),
    ]
    head = [(model.hidden_size, model.padded_vocab_size // size)] if with_head else []
    return layer * model.num_layers + head


class BareProducts:
    """The products of linear layers of ``shapes`` (in, out) with so many tokens; equal shapes share their operands."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        product: Product = F.linear,
    ) -> None:
        self._shapes, self._product = shapes, product

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device)

        self._inputs = {shape: random(tokens, shape[0]) for shape in shapes}
        self._outputs = {shape: random(tokens, shape[1]) for shape in shapes}
        self._weights = {shape: random(shape[1], shape[0]) for shape in shapes}

    def forward(self) -> None:
        """Outputs."""
        for shape in self._shapes:
            self._product(self._inputs[shape], self._weights[shape])

    def backward(self) -> None:
        """Gradients of inputs and of weights."""
        for shape in reversed(self._shapes):
            self._product(self._outputs[shape], self._weights[shape].t())
            self._product(self._outputs[shape].t(), self._inputs[shape].t())


class BareFp8Products:
    """As :class:`BareProducts` with FP8 GEMMs, whose operands and their transposes are quantised already."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        tokens: int,
        multiply: ScaledGemm,
        dtype: torch.dtype,
        device: torch.device,
        has_blocks: bool = False,
    ) -> None:
        self._shapes, self._multiply, self._dtype = shapes, multiply, dtype

        def random(rows: int, columns: int, fp8: torch.dtype = E4M3, height: int = 1) -> QuantizedTensor:
            data = torch.randn(rows, columns, dtype=torch.bfloat16, device=device).to(fp8)
            scales = (rows // height, columns // BLOCK) if has_blocks else ()
            return QuantizedTensor(data, torch.ones(scales, device=device))

        gradient = E4M3 if has_blocks else E5M2
        self._inputs = {(k, n): (random(tokens, k), random(k, tokens)) for k, n in shapes}
        self._weights = {(k, n): (random(n, k, height=BLOCK), random(k, n, height=BLOCK)) for k, n in shapes}
        self._grads = {(k, n): (random(tokens, n, gradient), random(n, tokens, gradient)) for k, n in shapes}

    def forward(self) -> None:
        """Outputs, which alone may accumulate fast."""
        for shape in self._shapes:
            self._multiply(self._inputs[shape][0], self._weights[shape][0], self._dtype, fast=True)

    def backward(self) -> None:
        """Gradients of inputs, and of weights in fp32."""
        for shape in reversed(self._shapes):
            self._multiply(self._grads[shape][0], self._weights[shape][1], self._dtype)
            self._multiply(self._grads[shape][1], self._inputs[shape][1], torch.float32)


class BareAttention:
    """Causal attention of every layer, by torch's own function or a kernel of ours."""

    def __init__(
        self,
        model: TransformerConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tensor_parallel_size: int = 1,
        kernel: AttentionKernel | None = None,
    ) -> None:
        def random(heads: int) -> Tensor:
            shape = (batch, heads // tensor_parallel_size, length, model.kv_channels)
            return torch.randn(shape, dtype=dtype, device=device)

        self._num_layers = model.num_layers
        self._kernel = kernel or TorchAttention()
        heads, groups = model.num_attention_heads, model.num_query_groups
        self._inputs, self._grad = AttentionInputs(random(heads), random(groups), random(groups)), random(heads)
        self._attended: list[AttentionOutput] = []

    def forward(self) -> None:
        """Outputs, kept for backward."""
        for _ in range(self._num_layers):
            self._attended.append(self._kernel.forward(self._inputs))

    def backward(self) -> None:
        """Gradients of queries, keys and values."""
        while self._attended:
            self._kernel.backward(self._grad, self._attended.pop())
