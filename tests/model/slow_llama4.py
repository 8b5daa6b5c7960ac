"""Llama 4 written out: one sequence, head and token after the other, with dense masks built from positions.

It uses no code of the model and none of transformers. All arithmetic has the dtype of the weights.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig

Weights = dict[str, Tensor]
"""Tensors by the global names of this code."""


@dataclass(frozen=True)
class Row:
    """Where the tokens of one sequence stand, an element for each."""

    positions: list[int]
    """Positions from which rotation, chunks and temperature are computed."""
    documents: list[int]
    """Number of the document inside which attention stays."""

    @classmethod
    def of_documents(cls, lengths: list[int], masks_attention: bool, resets_positions: bool) -> "Row":
        """A row of packed documents of these lengths."""
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        restarted = [place for length in lengths for place in range(length)]
        positions = restarted if resets_positions else list(range(len(numbers)))
        return cls(positions, numbers if masks_attention else [0] * len(numbers))


@dataclass(eq=False)
class SlowLlama4:
    """The model with ``weights``. ``smallest_margin`` is the smallest difference that chose an expert."""

    config: TransformerConfig
    weights: Weights
    smallest_margin: float = math.inf

    def logits(self, tokens: Tensor, rows: list[Row]) -> Tensor:
        """``[b, s]`` to ``[b, s, v]``."""
        return torch.stack([self._row(ids, row) for ids, row in zip(tokens, rows, strict=True)])

    def _row(self, tokens: Tensor, row: Row) -> Tensor:
        table = self.weights["embedding.word_embeddings.weight"]
        hidden = torch.stack([table[int(token)] for token in tokens])  # [s, h]
        for layer in range(self.config.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(hidden, self.weights[f"{name}.input_layernorm.weight"])
            hidden = hidden + self._attention(layer, normed, row)
            normed = self._norm(hidden, self.weights[f"{name}.pre_mlp_layernorm.weight"])
            mlp = self._experts if self.config.moe_layers()[layer] else self._mlp
            hidden = hidden + mlp(f"{name}.mlp", normed)
        last = "output_layer" if self.config.untie_embeddings_and_output_weights else "embedding.word_embeddings"
        return self._norm(hidden, self.weights["final_layernorm.weight"]) @ self.weights[f"{last}.weight"].t()

    def _norm(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        normed = x / ((x * x).mean(dim=-1, keepdim=True) + self.config.norm_epsilon).sqrt()
        return normed if gain is None else normed * gain

    # Attention

    def _attention(self, layer: int, x: Tensor, row: Row) -> Tensor:  # [s, h]
        config, name = self.config, f"layers.{layer}.self_attention"
        has_rope = config.rope_layers()[layer]
        heads = (x @ self.weights[f"{name}.linear_qkv.weight"].t()).split(config.kv_channels, dim=-1)
        queries = [self._positioned(head, row, has_rope) for head in heads[: config.num_attention_heads]]
        keys_values = heads[config.num_attention_heads :]
        keys, values = keys_values[: config.num_query_groups], keys_values[config.num_query_groups :]
        if has_rope:
            keys = tuple(self._rotated_and_normed(head, row) for head in keys)
        visible, attended = self._visible(row, in_chunks=has_rope), []
        for number, query in enumerate(queries):
            group = number * config.num_query_groups // config.num_attention_heads
            scores = (query @ keys[group].t() / math.sqrt(config.kv_channels)).masked_fill(~visible, -math.inf)
            exponentials = (scores - scores.max(dim=-1, keepdim=True).values).exp()  # [s, s]
            attended.append(exponentials / exponentials.sum(dim=-1, keepdim=True) @ values[group])
        return torch.cat(attended, dim=-1) @ self.weights[f"{name}.linear_proj.weight"].t()

    def _visible(self, row: Row, in_chunks: bool) -> Tensor:
        """Which keys (columns) a query (row) attends to: ``[s, s]``."""
        size, places = self.config.attention_chunk_size, range(len(row.positions))
        chunks = list(accumulate(in_chunks and size is not None and place % size == 0 for place in row.positions))
        return torch.tensor(
            [
                [
                    key <= query and row.documents[key] == row.documents[query] and chunks[key] == chunks[query]
                    for key in places
                ]
                for query in places
            ]
        )

    def _positioned(self, queries: Tensor, row: Row, has_rope: bool) -> Tensor:
        """Queries of one head ``[s, d]``, rotated and normed, or scaled by their temperature."""
        config = self.config
        if has_rope:
            return self._rotated_and_normed(queries, row)
        if not config.attention_temperature_tuning:
            return queries
        floor, scale = config.attention_temperature_floor, config.attention_temperature_scale
        factors = [1 + scale * math.log(1 + (position + 1) // floor) for position in row.positions]
        return torch.stack([query * factor for query, factor in zip(queries, factors)])

    def _rotated_and_normed(self, heads: Tensor, row: Row) -> Tensor:
        """Queries or keys of one head ``[s, d]`` in a layer with rotary position embedding."""
        rotated = torch.stack(
            [rotation(self.config, place).to(head) @ head for head, place in zip(heads, row.positions)]
        )
        return self._norm(rotated) if self.config.qk_l2_norm else rotated

    # MLP

    def _mlp(self, name: str, x: Tensor) -> Tensor:  # [..., h]
        return swiglu(x, self.weights[f"{name}.linear_fc1.weight"], self.weights[f"{name}.linear_fc2.weight"])

    def _experts(self, name: str, x: Tensor) -> Tensor:  # [s, h]
        routed = torch.stack([self._chosen_expert(name, token) for token in x])
        return routed + self._mlp(f"{name}.shared_experts", x)

    def _chosen_expert(self, name: str, token: Tensor) -> Tensor:  # [h]
        scores = self.weights[f"{name}.router.weight"] @ token  # [E]
        best, second = scores.detach().topk(2).values.tolist()
        self.smallest_margin = min(self.smallest_margin, best - second)
        chosen = int(scores.argmax())
        weight = 1 / (1 + (-scores[chosen]).exp())
        fc1, fc2 = (self.weights[f"{name}.experts.linear_fc{number}.weight"] for number in (1, 2))
        return swiglu(weight * token, fc1.chunk(len(scores))[chosen], fc2.chunk(len(scores))[chosen])


def swiglu(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """``[..., h] -> [..., h]``; ``fc1`` has the rows of gate, then those of up."""
    gate, up = (x @ fc1.t()).chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up @ fc2.t()


@cache
def rotation(config: TransformerConfig, position: int) -> Tensor:
    """The matrix that rotates pairs of neighbouring elements of a head, ``[d, d]``."""
    matrix = torch.zeros(config.kv_channels, config.kv_channels, dtype=torch.float64)
    for pair in range(config.kv_channels // 2):
        angle, even, odd = position * frequency(config, pair), 2 * pair, 2 * pair + 1
        matrix[even, even], matrix[even, odd] = math.cos(angle), -math.sin(angle)
        matrix[odd, even], matrix[odd, odd] = math.sin(angle), math.cos(angle)
    return matrix


def frequency(config: TransformerConfig, pair: int) -> float:
    """Radians per position, with the scaling of Llama 3.1's model code."""
    plain: float = config.rotary_base ** (-2 * pair / config.kv_channels)
    if not config.use_rope_scaling:
        return plain
    wavelength, length = 2 * math.pi / plain, config.rope_scaling_original_length
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    if wavelength < length / high:
        return plain
    if wavelength > length / low:
        return plain / config.rope_scaling_factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / config.rope_scaling_factor + smooth * plain
