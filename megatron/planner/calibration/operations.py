"""The operations to measure on one device: products of a model, its attention, and copies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.matmul import InPlaceWeightGradient, linear


@dataclass(frozen=True)
class ProductShape:
    """A product ``[rows, depth] x [depth, columns]``."""

    rows: int
    columns: int
    depth: int
    is_weight_gradient: bool = False
    """Whether it is added to fp32 main gradients."""


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention of ``batch`` sequences, forward and backward."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def forward_flops(self) -> float:
        """Causal FLOPs of the forward pass."""
        return 2.0 * self.batch * self.length**2 * self.heads * self.head_size


def product_shapes(model: TransformerConfig, seq_length: int, batches: Sequence[int]) -> list[ProductShape]:
    """The products of a layer and of the output layer: forward, input gradient, weight gradient. On one rank for every
    number of sequences in ``batches``, and on one of two tensor-parallel ranks for the largest."""
    shapes = []
    for batch, tp in [*((batch, 1) for batch in batches), (max(batches), 2)]:
        tokens = batch * seq_length
        for inputs, outputs in _linears(model, tp):
            shapes += [
                ProductShape(tokens, outputs, inputs),
                ProductShape(tokens, inputs, outputs),
                ProductShape(inputs, outputs, tokens, is_weight_gradient=True),
            ]
    return list(dict.fromkeys(shapes))


def _linears(model: TransformerConfig, tp: int) -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of a tensor-parallel rank's linear layers; sizes that do not divide are left whole."""

    def divided(size: int) -> int:
        return size // tp if size % tp == 0 else size

    yield model.hidden_size, divided(model.query_size + 2 * model.key_value_size)
    yield divided(model.query_size), model.hidden_size
    yield model.hidden_size, divided(2 * model.ffn_hidden_size)
    yield divided(model.ffn_hidden_size), model.hidden_size
    yield model.hidden_size, divided(model.padded_vocab_size)


def product_action(shape: ProductShape, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """The product as our linear layers compute it."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    if not shape.is_weight_gradient:
        inputs, weight = random(shape.rows, shape.depth), random(shape.columns, shape.depth)
        return lambda: linear(inputs, weight)
    inputs, grad_outputs = random(shape.depth, shape.rows), random(shape.depth, shape.columns)
    main_grad, kernel = torch.zeros(shape.columns, shape.rows, device=device), InPlaceWeightGradient()
    return lambda: kernel.write(main_grad, grad_outputs, inputs, accumulate=True)


def attention_shapes(model: TransformerConfig, seq_length: int, batch: int) -> list[AttentionShape]:
    """Three lengths up to ``seq_length`` with equally many tokens."""
    heads, kv_heads = model.num_attention_heads, model.num_query_groups
    return [
        AttentionShape(batch * 2**halvings, seq_length // 2**halvings, heads, kv_heads, model.kv_channels)
        for halvings in (2, 1, 0)
    ]


def attention_action(
    shape: AttentionShape, kernel: AttentionKernel, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Forward and backward."""

    def random(heads: int) -> Tensor:
        return torch.randn(shape.batch, heads, shape.length, shape.head_size, device=device).to(dtype)

    query, grad = random(shape.heads), random(shape.heads)
    key, value = random(shape.kv_heads), random(shape.kv_heads)

    def run() -> None:
        attended = kernel.forward(query, key, value, is_causal=True)
        kernel.backward(grad, query, key, value, attended, is_causal=True)

    return run


def copy_action(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A copy, which reads and writes ``num_bytes``."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
