"""What is trained in every layout: dense models, experts, Llama 4; and the activations that are not kept."""

from dataclasses import replace
from typing import Any

from megatron.config.activations import ActivationConfig, RecomputeMethod, RecomputeModule
from megatron.config.model import MoEConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from tests.parallel.layout_run import DEEP_MODEL, DEEP_TIED_MODEL, MODEL, TIED_MODEL, Task


def selective(*modules: RecomputeModule, **more: Any) -> ActivationConfig:
    return ActivationConfig(recompute_granularity="selective", recompute_modules=modules, **more)


def full(method: RecomputeMethod, layers: int, **more: Any) -> ActivationConfig:
    return ActivationConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers, **more)


# --- dense models ---

ADAM = Task(OptimizerConfig(weight_decay=0.1))
ADAM_UNCLIPPED = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.0))
ADAM_CLIPPED_HARD = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.05))
SGD = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.05))
SGD_UNCLIPPED = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.0))
DEEP_SGD = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.05), model=DEEP_MODEL)
DEEP_ADAM = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.05), model=DEEP_MODEL)
DEEP_TIED = Task(OptimizerConfig(weight_decay=0.1), model=DEEP_TIED_MODEL)
CONTEXT = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.05), model=replace(MODEL, num_query_groups=8))
CONTEXT_IN_DOCUMENTS = replace(CONTEXT, masks_documents=True, resets_positions=True)
YARN = replace(
    CONTEXT_IN_DOCUMENTS,
    model=replace(
        CONTEXT.model, use_rope_scaling=False, position_embedding_type="yarn", rotary_base=100.0,
        yarn_rotary_scaling_factor=2.0, yarn_original_max_position_embeddings=8, yarn_beta_fast=2.0, yarn_beta_slow=0.5,
    ),
)  # fmt: skip
TIED = Task(OptimizerConfig(weight_decay=0.1), model=TIED_MODEL)
DELAYED = replace(
    SGD,
    steps=4,
    fp8=PrecisionConfig(
        bf16=True, fp8_format="hybrid", fp8_margin=1, fp8_amax_history_len=2, fp8_amax_compute_algo="max"
    ),
)
TENSORWISE = replace(SGD, fp8=PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise"))
BLOCKWISE = replace(SGD, fp8=PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="blockwise"))
MUON_FLAGS = OptimizerConfig(optimizer="muon", weight_decay=0.1, clip_grad=0.05, muon_extra_scale_factor=0.2)
MUON = Task(MUON_FLAGS)
MUON_TIED = replace(MUON, optimizer=replace(MUON_FLAGS, muon_tp_mode="distributed"), model=TIED_MODEL)
MUON_OTHER = replace(
    MUON,
    optimizer=replace(
        MUON_FLAGS, muon_tp_mode="distributed", muon_nesterov=True, muon_no_split_qkv=True, muon_split_fc1=True,
        muon_coefficient_type="polar_express", muon_num_ns_steps=7, muon_scale_mode="unit_rms_norm",
    ),
)  # fmt: skip
QWEN3 = replace(DEEP_TIED, model=replace(DEEP_TIED_MODEL, qk_layernorm=True, norm_epsilon=1e-6))
QWEN3_1P = replace(QWEN3, model=replace(QWEN3.model, apply_layernorm_1p=True))
EMA = replace(TIED, optimizer=replace(TIED.optimizer, ema_decay=0.7))
Z_LOSS = replace(SGD, z_loss_multiplier=0.1)
QWEN2 = replace(SGD, model=replace(MODEL, add_qkv_bias=True))
# A window of four keys in a sequence of 16: it ends inside a rank's part, or crosses one or two borders.
WINDOWS = replace(SGD, model=replace(MODEL, num_layers=4, window_size="3,0", window_attn_skip_freq="2"))
CAPPED = replace(
    WINDOWS, model=replace(WINDOWS.model, window_size="5,0", attn_logit_softcapping=0.5), masks_documents=True
)
SINKS = replace(SGD, model=replace(MODEL, softmax_type="learnable", window_size="5,0", window_attn_skip_freq="2"))
OFF_BY_ONE = replace(SGD, model=replace(MODEL, softmax_type="off-by-one"))
MUP_FIELDS: dict[str, Any] = {
    "use_mup": True,
    "mup_base_hidden_size": 8,
    "mup_output_mult": 0.25,
    "mup_embedding_mult": 3.0,
    "mup_base_head_dim": 2.0,
}
MUP_SGD = replace(SGD, model=replace(MODEL, add_qkv_bias=True, **MUP_FIELDS))
MUP_ADAM = replace(DEEP_TIED, model=replace(DEEP_TIED_MODEL, qk_layernorm=True, **MUP_FIELDS))
MUP_MUON = replace(MUON_OTHER, model=replace(MODEL, **MUP_FIELDS))
UNEVEN = replace(TIED, model=replace(TIED_MODEL, num_layers=1, hidden_size=16, ffn_hidden_size=23), batch=21)

# --- experts ---

SGD_FLAGS = OptimizerConfig(optimizer="sgd", clip_grad=0.05)
MIX_MODEL = replace(MODEL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24)
MIX_LOSSES = MoEConfig(
    moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(1e-2,), moe_z_loss_coeff=1e-3
)
MIX = Task(SGD_FLAGS, MIX_MODEL, moe=MIX_LOSSES)
MIX_ADAM = replace(MIX, optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=0.05))
MIX_TIED = replace(MIX_ADAM, model=replace(TIED_MODEL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24))
MIX_MUP = replace(MIX_ADAM, model=replace(MIX_MODEL, moe_shared_expert_intermediate_size=40, **MUP_FIELDS))
DEEP_MIX = replace(MIX, model=replace(MIX_MODEL, num_layers=8))
DSV = Task(
    OptimizerConfig(weight_decay=0.1, clip_grad=0.05),
    replace(
        MIX_MODEL,
        moe_router_topk=3,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
    ),
    moe=MoEConfig(moe_router_load_balancing_type=("none",), moe_router_bias_update_rate=1e-2),
)
L4 = Task(
    SGD_FLAGS,
    replace(
        MIX_MODEL,
        num_layers=4,
        moe_layer_freq="[0,1]*2",
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
        moe_shared_expert_intermediate_size=40,
        qk_l2_norm=True,
        no_rope_freq="4",
        # In a sequence of 16, borders lie inside a rank's part, between two parts, and the last chunk is shorter.
        attention_chunk_size=6,
        attention_temperature_tuning=True,
        attention_temperature_floor=3,
        attention_temperature_scale=0.5,
    ),
    moe=MIX_LOSSES,
)
L4_OVERLAP = replace(L4, moe=replace(MIX_LOSSES, moe_shared_expert_overlap=True))

# --- Llama 4 ---

UNEVEN_CHUNKS = replace(L4, model=replace(L4.model, attention_chunk_size=5, qk_l2_norm=False))
MASKED = replace(UNEVEN_CHUNKS, masks_documents=True)
RESTARTED = replace(L4, model=replace(L4.model, attention_chunk_size=3), masks_documents=True, resets_positions=True)
POSITIONS = replace(RESTARTED, masks_documents=False)
LLAMA4_TASKS = (L4, UNEVEN_CHUNKS, MASKED, RESTARTED, POSITIONS)
# Dense layers and layers with experts without a rotation, unevenly over the stages.
DEEP_CHUNKS = replace(
    RESTARTED, model=replace(RESTARTED.model, num_layers=8, moe_layer_freq="[0,1]*4", no_rope_freq="[0,0,1]*2+[1,0]")
)
LLAMA4_ADAM = replace(L4, optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=0.05))
