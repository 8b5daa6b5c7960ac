"""The resolved architecture of a decoder-only transformer, and what follows from it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from megatron.architectures.features import ArchitectureFeatures
from megatron.architectures.layer_pattern import parse_layer_pattern, parse_nope_pattern, parse_window_pattern


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes that every architecture has."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    """Vocabulary padded to a multiple of the tensor-parallel size; no result depends on the padding."""
    max_position_embeddings: int


@dataclass(frozen=True)
class TransformerConfig(ArchitectureFeatures, TransformerSizes):
    """The configuration from which the core builds a model of any architecture: resolved sizes, and features."""

    @property
    def width_mult(self) -> float:
        """The hidden size divided by the base model's under muP; 1 without."""
        if not self.use_mup:
            return 1.0
        assert self.mup_base_hidden_size is not None
        return self.hidden_size / self.mup_base_hidden_size

    @property
    def embedding_multiplier(self) -> float:
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def output_multiplier(self) -> float:
        return 1.0 if self.mup_output_mult is None else self.mup_output_mult

    @property
    def attention_multiplier(self) -> float:
        """Factor of the attention scores beside ``1 / sqrt(head size)``."""
        if not self.use_mup:
            return 1.0
        base = 1.0 if self.mup_base_head_dim is None else math.sqrt(self.mup_base_head_dim)
        return base * math.sqrt(self.kv_channels) / self.kv_channels**self.mup_attn_scale_power

    @property
    def rotary_magnitude(self) -> float:
        """Factor of rotated queries and keys: of muP, and YaRN's attention factor (arXiv 2309.00071, section 3.4)."""
        # The scores are products of both, so that their factor is the square.
        of_mup = math.sqrt(self.attention_multiplier)
        # Llama 4 normalises rotated heads, which removes YaRN's factor (here the norm comes before the rotation).
        if self.position_embedding_type != "yarn" or self.qk_l2_norm:
            return of_mup
        if self.yarn_attention_factor is not None:
            return of_mup * self.yarn_attention_factor
        factor, mscale, all_dim = self.yarn_rotary_scaling_factor, self.yarn_mscale, self.yarn_mscale_all_dim
        assert factor is not None
        if mscale is None or all_dim is None:
            mscale, all_dim = 1.0, 0.0
        of_yarn = (1.0 + 0.1 * mscale * math.log(factor)) / (1.0 + 0.1 * all_dim * math.log(factor))
        return of_mup * of_yarn

    @property
    def query_size(self) -> int:
        """Total width of the queries, ``heads * head size``."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Total width of the keys (and of the values)."""
        return self.num_query_groups * self.kv_channels

    @property
    def qkv_size(self) -> int:
        """Width of the fused query-key-value projection."""
        return self.query_size + 2 * self.key_value_size

    @property
    def hidden_init_std(self) -> float:
        """Initial deviation of the matrices of the layers; under muP their variance falls with the fan-in."""
        return self.init_method_std / math.sqrt(self.width_mult)

    @property
    def residual_init_std(self) -> float:
        """Initial deviation of projections into the residual stream: scaled by ``1 / sqrt(2 layers)`` (GPT-2)."""
        return self.hidden_init_std / math.sqrt(2 * self.num_layers)

    @property
    def router_init_std(self) -> float:
        """Initial deviation of routers, which have a width as fan-in, but not as fan-out. Under muP such a matrix has
        no multiplier here, so its deviation falls with the fan-in (table 3, output weights)."""
        return self.init_method_std / self.width_mult

    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer is an MoE layer, then the layers of multi-token prediction."""
        if self.num_experts is None:
            return (False,) * (self.num_layers + self.mtp_num_layers)
        is_moe = parse_layer_pattern(self.moe_layer_freq, self.num_layers)
        return is_moe + is_moe[-1:] * self.mtp_num_layers

    def rope_layers(self) -> tuple[bool, ...]:
        """Whether each layer has rotary position embedding, then the layers of multi-token prediction."""
        has_rope = tuple(not is_nope for is_nope in parse_nope_pattern(self.no_rope_freq, self.num_layers))
        return has_rope + has_rope[-1:] * self.mtp_num_layers

    def windows(self) -> tuple[int | None, ...]:
        """For each layer, then the layers of multi-token prediction, the number of keys before its own to which a query
        attends; None: all."""
        windows: tuple[int | None, ...] = (None,) * self.num_layers
        if self.window_size is not None:
            left = int(self.window_size.split(",")[0])
            has_window = parse_window_pattern(self.window_attn_skip_freq, self.num_layers)
            windows = tuple(left if has else None for has in has_window)
        return windows + windows[-1:] * self.mtp_num_layers

    def attention_length(self, has_rope: bool, window: int | None, seq_length: int) -> float:
        """The length of a sequence without chunks and windows whose attention takes as many FLOPs per token as that of
        a layer with or without rotary position embedding and with this window in a sequence of ``seq_length``.

        It is ``min(seq_length, attention_chunk_size)`` for whole chunks; a shorter last chunk has shorter attention.
        """

        def square(length: int) -> int:
            # Twice the visible scores, without those of the own keys: length², and with w keys for each query a band
            # of length x w, without the triangle of its first queries.
            keys = length if window is None else min(length, window + 1)
            return keys * (2 * length - keys)

        size = seq_length
        if has_rope and self.attention_chunk_size is not None:
            size = min(self.attention_chunk_size, seq_length)
        # Attention of a chunk takes as long as its square; per token of the sequence, the sum over s.
        chunks, rest = divmod(seq_length, size)
        return (chunks * square(size) + square(rest)) / seq_length

    def largest_expert_load(self, expert_parallel_size: int) -> float:
        """The most rows that one expert-parallel rank can receive, relative to the mean: it has every token's choice,
        as often as it has experts."""
        assert self.num_experts is not None
        most = min(self.moe_router_topk, self.num_experts // expert_parallel_size)
        return most * expert_parallel_size / self.moe_router_topk

    def layer_gemm_parameters(self, experts: int | None = None) -> int:
        """Number of weights of one layer that are GEMM operands: of a dense layer, or of an MoE layer with its router,
        its shared expert and ``experts`` of its experts."""
        attention = self.hidden_size * (self.qkv_size + self.query_size)  # [(n + 2g) d, h] and [h, n d]
        if experts is None:
            return attention + 3 * self.hidden_size * self.ffn_hidden_size  # gate, up and down
        assert self.num_experts is not None
        assert self.moe_ffn_hidden_size is not None
        width = experts * self.moe_ffn_hidden_size + (self.moe_shared_expert_intermediate_size or 0)
        return attention + self.hidden_size * (self.num_experts + 3 * width)  # the router is [E, h]

    def num_active_parameters(self) -> int:
        """Parameters that compute one token: of every MoE layer the shared expert and the chosen ones."""
        return self.num_parameters(self.moe_router_topk)

    def num_parameters(self, experts: int | None = None) -> int:
        """Parameters of the whole model, without the vocabulary's padding; with ``experts``, if it is given, in every
        MoE layer."""
        experts = self.num_experts if experts is None else experts
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        of_layer = norms + (self.qkv_size if self.add_qkv_bias else 0)
        of_layer += self.num_attention_heads if self.softmax_type == "learnable" else 0
        # The last hidden_size is the gain of the final norm; a depth has three norms and eh_proj [h, 2h].
        rest = (self.num_layers + self.mtp_num_layers) * of_layer + self.hidden_size
        rest += self.mtp_num_layers * (3 * self.hidden_size + 2 * self.hidden_size**2)
        tables = 2 if self.untie_embeddings_and_output_weights else 1
        layers = sum(self.layer_gemm_parameters(experts if is_moe else None) for is_moe in self.moe_layers())
        return layers + rest + tables * self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_length: int) -> float:
        """Model FLOPs of forward and backward per token of a sequence; see :meth:`flops_of_layers`."""
        return self.flops_of_layers(range(self.num_layers), seq_length, has_output_layer=True)

    def flops_of_layers(self, layers: Iterable[int], seq_length: int, *, has_output_layer: bool) -> float:
        """Model FLOPs of forward and backward per token of a sequence of ``seq_length``, of some layers.

        Six per active GEMM parameter (two forward, four backward), counting the router and the output layer but neither
        the embedding lookup nor norms and biases, plus ``6 q s`` for the causal attention of a layer, where q is the
        total query width: scores and values take ``2 * 2 q s`` forward over the full square, half of it under the
        causal mask, three times that with backward. See PaLM (Chowdhery et al., 2022), appendix B, there without the
        causal half. Attention inside chunks and windows is shorter (:meth:`attention_length`). An MoE layer counts
        the shared expert and the chosen experts. Multi-token prediction counts with the output layer.
        """
        is_moe, has_rope, windows = self.moe_layers(), self.rope_layers(), self.windows()
        numbers = list(layers)
        if has_output_layer:
            numbers += range(self.num_layers, self.num_layers + self.mtp_num_layers)
        gemm_parameters = sum(
            self.layer_gemm_parameters(self.moe_router_topk if is_moe[number] else None) for number in numbers
        )
        if has_output_layer:
            gemm_parameters += (1 + self.mtp_num_layers) * self.hidden_size * self.vocab_size
            gemm_parameters += self.mtp_num_layers * 2 * self.hidden_size**2
        lengths = sum(self.attention_length(has_rope[number], windows[number], seq_length) for number in numbers)
        return 6.0 * gemm_parameters + 6.0 * self.query_size * lengths


# Fields that only matter with YaRN.
YARN_FIELDS = tuple(field.name for field in fields(TransformerConfig) if field.name.startswith("yarn_"))
