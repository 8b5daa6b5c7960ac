"""A feature of architectures is declared once, in :mod:`megatron.architectures.features`. Every reader of the
architecture reads it, or refuses it: the model, the flags, a resume, and the conversions. A new one needs a
row here."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.architectures.features import ArchitectureFeatures
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import config_fields, transformer_config_of
from megatron.checkpoint.megatron_lm.conversion import architecture_of
from megatron.config.model import ModelConfig, MoEConfig
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_experts, build_model
from megatron.core.ops.attention import hardest_mask
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import single_process
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture, given_architecture
from tests.whole_model import logits_of

Values = dict[str, Any]
SIZES: Values = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 64,
}  # fmt: skip
LENGTH, VOCABULARY = 24, 61
SCALED: Values = {"use_rope_scaling": True, "rope_scaling_original_length": 16}
YARN: Values = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 512,
}  # fmt: skip
NOPE: Values = {"no_rope_freq": "2"}
TUNED: Values = NOPE | {"attention_temperature_tuning": True, "attention_temperature_floor": 4}
WINDOW: Values = {"window_size": "3,0"}
EXPERTS: Values = {"num_experts": 4, "moe_ffn_hidden_size": 24}
SIGMOID: Values = EXPERTS | {"moe_router_score_function": "sigmoid"}
GROUPS: Values = SIGMOID | {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
ONE_EXPERT: Values = SIGMOID | {"moe_router_topk": 1}
MUP: Values = {"use_mup": True, "mup_base_hidden_size": 8}
# The features that another one needs, and a value that is not the default.
ROWS: dict[str, tuple[Values, Any]] = {
    "position_embedding_type": (YARN, "yarn"),
    "rotary_base": ({}, 100.0),
    "use_rope_scaling": (SCALED | {"use_rope_scaling": False}, True),
    "rope_scaling_factor": (SCALED, 3.0),
    "rope_scaling_original_length": (SCALED, 64),
    "rope_scaling_low_freq_factor": (SCALED, 2.0),
    "rope_scaling_high_freq_factor": (SCALED, 8.0),
    "yarn_rotary_scaling_factor": (YARN, 8.0),
    "yarn_original_max_position_embeddings": (YARN, 256),
    "yarn_beta_fast": (YARN, 4.0),
    "yarn_beta_slow": (YARN, 2.0),
    "yarn_mscale": (YARN | {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 0.9}, 0.7),
    "yarn_mscale_all_dim": (YARN | {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 0.9}, 0.7),
    "yarn_attention_factor": (YARN, 1.5),
    "yarn_correction_range_round_to_int": (YARN, False),
    "norm_epsilon": ({}, 0.1),
    "untie_embeddings_and_output_weights": ({}, False),
    "init_method_std": ({}, 0.5),
    "qk_layernorm": ({}, True),
    "qk_l2_norm": ({}, True),
    "no_rope_freq": ({}, "2"),
    "attention_chunk_size": ({}, 8),
    "window_size": ({}, "3,0"),
    "window_attn_skip_freq": (WINDOW, "2"),
    "attn_logit_softcapping": ({}, 0.01),
    "softmax_type": ({}, "learnable"),
    "attention_temperature_tuning": (TUNED | {"attention_temperature_tuning": False}, True),
    "attention_temperature_floor": (TUNED, 8),
    "attention_temperature_scale": (TUNED, 0.5),
    "add_qkv_bias": ({}, True),
    "apply_layernorm_1p": ({}, True),
    "num_experts": (EXPERTS, 8),
    "moe_layer_freq": (EXPERTS, "2"),
    "moe_ffn_hidden_size": (EXPERTS, 40),
    "moe_router_topk": (EXPERTS, 3),
    "moe_router_score_function": (EXPERTS, "sigmoid"),
    "moe_router_pre_softmax": (EXPERTS, True),
    "moe_router_topk_scaling_factor": (EXPERTS, 2.5),
    "moe_router_num_groups": (GROUPS, 2),
    "moe_router_group_topk": (GROUPS, 3),
    "moe_router_enable_expert_bias": (SIGMOID, True),
    "moe_shared_expert_intermediate_size": (EXPERTS, 16),
    "moe_apply_probs_on_input": (ONE_EXPERT, True),
    "mtp_num_layers": ({}, 1),
    "use_mup": (MUP | {"use_mup": False, "mup_base_hidden_size": None}, True),
    "mup_base_hidden_size": (MUP, 16),
    "mup_embedding_mult": (MUP, 3.0),
    "mup_output_mult": (MUP | {"mup_output_mult": 0.5}, 0.25),
    "mup_base_head_dim": (MUP, 4.0),
    "mup_attn_scale_power": (MUP, 0.5),
}
every_feature = pytest.mark.parametrize("name", ROWS)


def with_and_without(name: str) -> tuple[ModelConfig, ModelConfig]:
    others, value = ROWS[name]
    with_it = ModelConfig(**SIZES | others | {name: value})
    # The others of YaRN have no effect without it.
    return ModelConfig(**SIZES | ({} if name == "position_embedding_type" else others)), with_it


def resolved(flags: ModelConfig) -> TransformerConfig:
    return flags.resolve(VOCABULARY, 1, LENGTH)


def test_every_feature_has_a_row() -> None:
    assert set(ROWS) == {field.name for field in fields(ArchitectureFeatures)}


def computed(config: TransformerConfig) -> tuple[dict[str, Tensor], Tensor, list[str]]:
    """The initial weights by name, the logits, and the names of the routers' biases."""
    kernel = choose_attention_kernel("auto", torch.device("cpu"), torch.float64, True, hardest_mask(config))
    parallel, experts = (
        TensorParallel(single_process().tensor_parallel),
        build_experts(config, MoEConfig(), single_process()),
    )
    context = BuildContext(parallel, torch.float64, torch.device("cpu"), kernel, experts=experts)
    model = build_model(config, context, seed=1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = logits_of(model, tokens)
    return weights, logits, [] if model.expert_balance is None else list(model.expert_balance.state())


@every_feature
def test_the_model_and_its_flags_read_it(name: str) -> None:
    without, with_it = with_and_without(name)
    with_it.check()
    assert getattr(resolved(with_it), name) == ROWS[name][1]
    first, second = computed(resolved(without)), computed(resolved(with_it))
    names = first[0].keys() ^ second[0].keys()
    has_other_weights = names or any(not torch.equal(one, second[0][of]) for of, one in first[0].items())
    assert has_other_weights or not torch.equal(first[1], second[1]) or first[2] != second[2]


@every_feature
def test_the_number_of_parameters_reads_it(name: str) -> None:
    """It is counted by a formula, which plans and logs use."""
    config = resolved(with_and_without(name)[1])
    config = replace(config, padded_vocab_size=config.vocab_size)
    assert sum(weight.numel() for weight in computed(config)[0].values()) == config.num_parameters()


FREE = {"init_method_std", "attention_temperature_tuning", "attention_temperature_floor", "attention_temperature_scale"}
"""What a resume may change."""


@every_feature
def test_a_resume_reads_it(name: str) -> None:
    without, with_it = with_and_without(name)
    saved = asdict(resolved(without))
    check_architecture(given_architecture(without), saved, "there")
    if name in FREE:
        check_architecture(given_architecture(with_it), saved, "there")
        return
    with pytest.raises(CheckpointError) as caught:
        check_architecture(given_architecture(with_it), saved, "there")
    assert f"--{name.replace('_', '-')}" in str(caught.value) or name == "num_experts"


FOLDED = {name for name in ROWS if "mup" in name} | {"apply_layernorm_1p", "mtp_num_layers"}
"""What an export computes into the weights, or leaves out with a note."""


@every_feature
def test_an_export_to_hugging_face_reads_it(name: str) -> None:
    config = resolved(with_and_without(name)[1])
    config = replace(config, padded_vocab_size=config.vocab_size)
    try:
        described: Values = {**config_fields(config, "float32")}
    except CheckpointError as error:
        # A refusal names the feature; experts are "MoE layers".
        assert name in str(error) or name in ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk")
        return
    if name not in FOLDED:
        assert getattr(transformer_config_of(described, "here"), name) == ROWS[name][1]


ARGUMENTS: Values = {
    **SIZES, "max_position_embeddings": 64, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "group_query_attention": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
_PARSER = Path(__file__).parents[1] / "config/recipes/megatron_lm_parser.txt"


@every_feature
def test_a_conversion_from_megatron_lm_reads_it(name: str) -> None:
    others, value = ROWS[name]
    if f"--{name.replace('_', '-')}" not in _PARSER.read_text().split():
        pytest.skip("Megatron-LM has no such argument")
    arguments = {**ARGUMENTS, **others, name: value}
    if "window_size" in arguments:
        arguments["window_size"] = [3, 0]
    try:
        found = architecture_of(arguments, VOCABULARY, "here")
    except CheckpointError as error:
        assert name in str(error) or name.startswith(("yarn_", "mup_"))  # YaRN and muP are refused
        return
    assert getattr(found, name) == ROWS[name][1]
