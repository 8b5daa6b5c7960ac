"""The sizes of a decoder-only transformer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerConfig:
    """The configuration from which the core builds a model of any architecture."""

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
    rotary_base: float = 500000.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_scaling_original_length: int = 8192
    norm_epsilon: float = 1e-5
    untie_embeddings_and_output_weights: bool = True
    init_method_std: float = 0.02
    qk_layernorm: bool = False
    """RMSNorm of every query and key head before the rotation."""
    add_qkv_bias: bool = False
    """Bias of the query, key and value projections."""
    apply_layernorm_1p: bool = False
    """The gain of a norm is one plus its weight, which starts at zero."""

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
    def residual_init_std(self) -> float:
        """Initial deviation of projections into the residual stream: scaled by ``1 / sqrt(2 layers)`` (GPT-2)."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)

    def layer_gemm_parameters(self) -> int:
        """Number of weights of one layer that are GEMM operands."""
        attention = self.hidden_size * (self.qkv_size + self.query_size)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size

    def num_parameters(self) -> int:
        """Parameters of the whole model, without the vocabulary's padding."""
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        layer = self.layer_gemm_parameters() + norms + (self.qkv_size if self.add_qkv_bias else 0)
        tables = 2 if self.untie_embeddings_and_output_weights else 1
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size

    def flops_per_token(self, seq_length: int) -> float:
        """Model FLOPs of forward and backward per token of a sequence of ``seq_length``.

        Six per GEMM parameter (two forward, four backward), counting the output layer but neither the embedding lookup
        nor norms and biases, plus ``6 L q s`` for causal attention, where q is the total query width: scores and values
        take ``2 * 2 q s`` forward over the full square, half of it under the causal mask, three times that with
        backward. See PaLM (Chowdhery et al., 2022), appendix B, there without the causal half.
        """
        gemm_parameters = self.num_layers * self.layer_gemm_parameters() + self.hidden_size * self.vocab_size
        return 6.0 * gemm_parameters + 6.0 * self.num_layers * self.query_size * seq_length
