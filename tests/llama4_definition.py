"""Llama 4's text model by its definition, in fp64: dense masks, one expert after the other, nothing fused or divided.

Rotated layers: rotation, then the norm of every query and key head without a gain, then attention inside chunks.
Layers without a rotation: whole attention, of queries that may be scaled by the temperature of their position.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from megatron.architectures.transformer_config import TransformerConfig

Weights = Mapping[str, Tensor]
SMALLEST_MARGIN = 1e-7
"""Between a token's highest and next score, so that rounding chooses no other expert."""


def token_positions(starts: Tensor, resets_positions: bool) -> Tensor:
    """The position of every token, ``[b, s]``; ``starts`` ``[b, s]`` says where documents begin."""
    positions = torch.zeros(starts.shape, dtype=torch.long)
    for row in range(starts.shape[0]):
        for place in range(1, starts.shape[1]):
            begins = resets_positions and bool(starts[row, place])
            positions[row, place] = 0 if begins else positions[row, place - 1] + 1
    return positions


def visible_pairs(
    starts: Tensor,
    masks_documents: bool = False,
    resets_positions: bool = False,
    chunk_size: int | None = None,
    window: int | None = None,
) -> Tensor:
    """``[b, query, key]``: whether a query attends to a key, pair by pair: neither a chunk nor, if they are masked, a
    document begins after the key and up to the query, and the key is among the ``window`` before the query's own."""
    rows, length = starts.shape
    begins_document, positions = starts.tolist(), token_positions(starts, resets_positions).tolist()
    visible = [[[False] * length for _ in range(length)] for _ in range(rows)]
    for row in range(rows):
        for query in range(length):
            for key in reversed(range(query + 1)):
                if window is not None and query - key > window:
                    break
                visible[row][query][key] = True
                begins_chunk = chunk_size is not None and positions[row][key] % chunk_size == 0
                if begins_chunk or (masks_documents and begins_document[row][key]):
                    break
    return torch.tensor(visible)


def token_logits(
    weights: Weights,
    config: TransformerConfig,
    tokens: Tensor,
    starts: Tensor,
    masks_documents: bool = False,
    resets_positions: bool = False,
) -> Tensor:
    """The logits ``[b, s, v]`` of a model with these ``weights`` by global name."""
    positions = token_positions(starts, resets_positions)
    hidden = weights["embedding.word_embeddings.weight"][tokens]  # [b, s, h]
    for layer, (is_rotated, has_experts) in enumerate(zip(config.rope_layers(), config.moe_layers())):
        of_layer = _Layer(weights, f"layers.{layer}", config)
        chunk_size = config.attention_chunk_size if is_rotated else None
        visible = visible_pairs(starts, masks_documents, resets_positions, chunk_size)
        hidden = hidden + of_layer.attention(hidden, positions, visible, is_rotated)
        normed = rms_norm(hidden, config.norm_epsilon, of_layer["pre_mlp_layernorm"])
        hidden = hidden + (of_layer.experts(normed) if has_experts else of_layer.mlp(normed, "mlp"))
    output = "output_layer" if config.untie_embeddings_and_output_weights else "embedding.word_embeddings"
    normed = rms_norm(hidden, config.norm_epsilon, weights["final_layernorm.weight"])
    return normed @ weights[f"{output}.weight"].t()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token ``[b, s]``."""
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def rms_norm(x: Tensor, epsilon: float, gain: Tensor | None = None) -> Tensor:
    """``x`` over the root of its mean square, times the gain if there is one."""
    normed = x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return normed if gain is None else normed * gain


class _Layer:
    """The computations of one layer, on ``[b, s, h]``."""

    def __init__(self, weights: Weights, name: str, config: TransformerConfig) -> None:
        self._weights, self._name, self._config = weights, name, config

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[f"{self._name}.{name}.weight"]

    def attention(self, hidden: Tensor, positions: Tensor, visible: Tensor, is_rotated: bool) -> Tensor:
        config = self._config
        size, repeats = config.kv_channels, config.num_attention_heads // config.num_query_groups
        normed = rms_norm(hidden, config.norm_epsilon, self["input_layernorm"])
        sections = (config.query_size, config.key_value_size, config.key_value_size)
        query, key, value = (
            part.unflatten(-1, (-1, size))
            for part in (normed @ self["self_attention.linear_qkv"].t()).split(sections, -1)
        )  # [b, s, heads, d]
        if is_rotated:
            query, key = rotate(query, positions, config), rotate(key, positions, config)
            if config.qk_l2_norm:
                query, key = rms_norm(query, config.norm_epsilon), rms_norm(key, config.norm_epsilon)
        elif config.attention_temperature_tuning:
            query = query * temperature(positions, config)[:, :, None, None]
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(size)
        probabilities = scores.masked_fill(~visible[:, None], -math.inf).softmax(dim=-1)
        attended = torch.einsum("bnqk,bknd->bqnd", probabilities, value).flatten(2)
        return attended @ self["self_attention.linear_proj"].t()

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return swiglu(x, self[f"{name}.linear_fc1"], self[f"{name}.linear_fc2"])

    def experts(self, x: Tensor) -> Tensor:
        """Every token goes to the expert with the highest score and to the shared expert; the sigmoid of the score
        multiplies the expert's input."""
        count = self._config.num_experts
        assert count is not None
        logits = x @ self["mlp.router"].t()
        scores, best = logits.max(dim=-1)
        highest = logits.detach().topk(2).values
        assert (highest[..., 0] - highest[..., 1] > SMALLEST_MARGIN).all(), "rounding may choose other experts"
        weighted = x * scores.sigmoid()[..., None]
        first, second = self["mlp.experts.linear_fc1"].chunk(count), self["mlp.experts.linear_fc2"].chunk(count)
        output = self.mlp(x, "mlp.shared_experts")
        for expert in range(count):
            output = output + (best == expert)[..., None] * swiglu(weighted, first[expert], second[expert])
        return output


def swiglu(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The MLP with gate and up projection in ``first`` ``[2 f, h]``."""
    gate, up = (x @ first.t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ second.t()


def temperature(positions: Tensor, config: TransformerConfig) -> Tensor:
    """The factor of the queries at ``positions``."""
    steps = [
        math.floor((position + 1) / config.attention_temperature_floor) for position in positions.flatten().tolist()
    ]
    factors = [1 + config.attention_temperature_scale * math.log1p(step) for step in steps]
    return torch.tensor(factors, dtype=torch.float64).view(positions.shape)


def rotate(heads: Tensor, positions: Tensor, config: TransformerConfig) -> Tensor:
    """Neighbouring elements of ``[b, s, n, d]`` as pairs, turned by the angles of ``positions`` ``[b, s]``."""
    angles = positions[..., None].double() * torch.tensor(frequencies(config), dtype=torch.float64)
    cosine, sine = angles.cos()[:, :, None], angles.sin()[:, :, None]  # [b, s, 1, d / 2]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


def frequencies(config: TransformerConfig) -> list[float]:
    """The angle per position of every pair: slow ones are divided by the scaling factor, between them the mean is
    weighted by the number of turns."""
    size, low, high = config.kv_channels, config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    found = []
    for pair in range(size // 2):
        frequency = config.rotary_base ** (-2 * pair / size)
        turns = config.rope_scaling_original_length * frequency / (2 * math.pi)
        if config.use_rope_scaling and turns < high:
            kept = 0.0 if turns < low else (turns - low) / (high - low)
            frequency *= kept + (1 - kept) / config.rope_scaling_factor
        found.append(frequency)
    return found
