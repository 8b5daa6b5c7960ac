"""The features of an architecture, each declared once: its name, type, default and help.

:class:`~megatron.config.model.ModelConfig` has a flag for each, and
:class:`~megatron.architectures.transformer_config.TransformerConfig` the resolved value.
``tests/model/test_architecture_features.py`` fails if a reader of the architecture ignores one.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.architectures.layer_pattern import NO_LAYER

RouterScoreFunction = Literal["softmax", "sigmoid"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
PositionEmbeddingType = Literal["rope", "yarn"]


@dataclass(frozen=True)
class ArchitectureFeatures:
    """What distinguishes architectures beside their sizes."""

    # Rotary position embedding (RoPE)
    position_embedding_type: PositionEmbeddingType = "rope"
    """Position embedding: rope is rotary, yarn is rotary with frequencies and attention for sequences longer than the
    model was trained on (arXiv 2309.00071; docs/recipes.md)."""
    rotary_base: float = 500000.0
    """Base of the rotary position embedding (Llama 2: 10000, Qwen3: 1000000)."""
    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling (Llama 3.1: 8, Llama 3.2: 32)."""
    rope_scaling_original_length: int = 8192
    """Longest sequence without --use-rope-scaling; frequencies with longer wavelengths are divided by the factor."""
    rope_scaling_low_freq_factor: float = 1.0
    """--use-rope-scaling divides the frequencies that turn less often than this in --rope-scaling-original-length by
    the factor ..."""
    rope_scaling_high_freq_factor: float = 4.0
    """... keeps those that turn more often than this, and interpolates between (Llama 3.1: 1 and 4, Llama 4 Scout: 1
    and 1)."""
    # YaRN: RoPE for sequences longer than the model was trained on
    yarn_rotary_scaling_factor: float | None = None
    """Factor of --position-embedding-type yarn, which needs it: the new length over the old one."""
    yarn_original_max_position_embeddings: int | None = None
    """Longest sequence before --position-embedding-type yarn, which needs it."""
    yarn_beta_fast: float = 32.0
    """YaRN keeps the frequencies that turn at least this often in --yarn-original-max-position-embeddings ..."""
    yarn_beta_slow: float = 1.0
    """... divides by the factor those that turn at most this often, and interpolates between."""
    yarn_mscale: float | None = None
    """With --yarn-mscale-all-dim: YaRN multiplies queries and keys by (0.1 * mscale * ln(factor) + 1) / (0.1 *
    mscale_all_dim * ln(factor) + 1) (default: by 0.1 * ln(factor) + 1)."""
    yarn_mscale_all_dim: float | None = None
    """See --yarn-mscale."""
    yarn_attention_factor: float | None = None
    """YaRN multiplies queries and keys by this (default: see --yarn-mscale)."""
    yarn_correction_range_round_to_int: bool = True
    """Widen the range in which YaRN interpolates to whole numbers of pairs."""
    # Norms, and attention that differs between layers
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    qk_layernorm: bool = False
    """RMSNorm of every query and key head before the rotation, as in Qwen3."""
    qk_l2_norm: bool = False
    """RMSNorm without a gain of every query and key head of layers with rotary position embedding, as in Llama 4
    Scout."""
    no_rope_freq: str = NO_LAYER
    """Layers without rotary position embedding: N makes every N-th layer one, beginning with layer N (Llama 4: 4), 0
    none. Or a list with 1 for such a layer, such as "([0]*3+[1])*2" for 8 layers; + appends and * repeats."""
    attention_chunk_size: int | None = None
    """Attention of layers with rotary position embedding stays inside chunks of this many positions, as in Llama 4
    (8192) (default: no chunks). With --reset-position-ids chunks are counted from the beginning of a document."""
    window_size: str | None = None
    """Sliding-window attention: a query attends to LEFT keys before its own, given as LEFT,0, such as 4095,0 for the
    window 4096 of transformers (default: to all). The kernel skips what is outside."""
    window_attn_skip_freq: str = NO_LAYER
    """Layers without the window of --window-size: N makes every N-th layer one, beginning with layer N (Gemma 3: 6), 0
    none. Or a list with 1 for a layer with the window, such as "([1]*5+[0])*2" for 12 layers."""
    attn_logit_softcapping: float | None = None
    """Cap the scores x of attention smoothly: cap * tanh(x / cap), as Gemma 2 does (50) (default: no cap)."""
    softmax_type: SoftmaxType = "vanilla"
    """Softmax of attention: off-by-one adds 1 to the sum of exponentials, so that a head may attend to nothing;
    learnable adds the exponential of a weight of each head, as the attention sinks of GPT-OSS do."""
    attention_temperature_tuning: bool = False
    """Scale the queries of layers without rotary position embedding by 1 + scale * log(1 + floor((position + 1) /
    floor)), positions counted from 0, as Llama 4 does for long contexts."""
    attention_temperature_floor: int = 8192
    """The floor of --attention-temperature-tuning: the scale is 1 at the positions before floor - 1."""
    attention_temperature_scale: float = 0.1
    """The scale of --attention-temperature-tuning."""
    add_qkv_bias: bool = False
    """Bias of the query, key and value projections, as in Qwen2."""
    apply_layernorm_1p: bool = False
    """Store the gain of every RMSNorm as one plus a weight, which starts at 0, so that bf16 weights represent gains
    near 1 more precisely. Checkpoints hold the weight."""
    # The ends of the model
    untie_embeddings_and_output_weights: bool = True
    """Separate weights for the output layer; --no-untie-embeddings-and-output-weights shares the embedding's weights,
    as the small Llama 3.2 and Qwen3 models do."""
    # Mixture of experts: the architecture; MoEConfig has the rest
    num_experts: int | None = None
    """Number of experts of every MoE layer; 0 is a dense model, as without the flag."""
    moe_layer_freq: str = "1"
    """MoE layers: N makes every N-th layer an MoE layer, beginning with the first (1 all of them). Or a list with 1 for
    an MoE layer and 0 for a dense one, such as "([0]*1+[1]*3)*2" for 8 layers; + appends and * repeats."""
    moe_ffn_hidden_size: int | None = None
    """Hidden size of one expert (default: --ffn-hidden-size)."""
    moe_router_topk: int = 2
    """Number of experts that the router chooses for a token."""
    moe_router_score_function: RouterScoreFunction = "softmax"
    """Score of an expert: softmax of the router's logits (Mixtral, Qwen3), or sigmoid of its logit (DeepSeek-V3,
    Llama 4). The weights of the chosen experts are the softmax of their logits, or their sigmoids divided by the sum;
    with --moe-router-topk 1 the sigmoid itself."""
    moe_router_pre_softmax: bool = False
    """Compute the softmax over all experts before the choice: the weights of the chosen experts do not sum to 1."""
    moe_router_topk_scaling_factor: float | None = None
    """Multiply the weights of the chosen experts by this (DeepSeek-V3: 2.5)."""
    moe_router_num_groups: int | None = None
    """Divide the experts into this many groups, and choose the experts of a token only from its best
    --moe-router-group-topk groups, as DeepSeek-V3 does."""
    moe_router_group_topk: int | None = None
    """Number of groups from which the experts of a token are chosen."""
    moe_router_enable_expert_bias: bool = False
    """Balance the load of the experts by a bias of their scores in the choice, as DeepSeek-V3 does without an auxiliary
    loss. Each step moves the bias by --moe-router-bias-update-rate. It needs --moe-router-score-function sigmoid."""
    moe_shared_expert_intermediate_size: int | None = None
    """Hidden size of the shared expert, which every token uses in addition to its chosen experts (default: no shared
    expert)."""
    moe_apply_probs_on_input: bool = False
    """Multiply the input of an expert by its weight, not its output, as Llama 4 does. It needs --moe-router-topk 1."""
    # Multi-token prediction
    mtp_num_layers: int = 0
    """Depths of multi-token prediction (DeepSeek-V3; docs/training.md). Depth k predicts the token k + 1 positions
    ahead with one more layer, of the kind of the last layer, beside the output layer."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * layers) for the output projection of attention and
    the second linear layer of the MLP."""
    # Maximal update parametrization (muP)
    use_mup: bool = False
    """Maximal update parametrization (arXiv 2203.03466): initial weights, learning rates, attention and logits are
    scaled with the width, so that the best learning rate of a narrow model also suits a wide one (docs/mup.md).
    Adam and sgd, and muon with a --muon-scale-mode other than spectral."""
    mup_base_hidden_size: int | None = None
    """Hidden size of the base model of --use-mup, whose learning rate is used (default: --hidden-size). The width
    multiplier is --hidden-size divided by this."""
    mup_embedding_mult: float = 1.0
    """Factor of the embedding's output with --use-mup."""
    mup_output_mult: float | None = None
    """Factor of the logits with --use-mup (default: 1 / width multiplier)."""
    mup_base_head_dim: float | None = None
    """With --use-mup attention scores are sqrt(this) / head size ** --mup-attn-scale-power times query x key. The head
    size of the base model keeps its attention as without --use-mup (default: 1)."""
    mup_attn_scale_power: float = 1.0
    """The power of --mup-base-head-dim: 1 is muP, 0.5 without --mup-base-head-dim is attention as without --use-mup."""
