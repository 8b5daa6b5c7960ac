"""muP: initial weights, learning rates and multipliers, as in table 8 of arXiv 2203.03466."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_experts, build_model
from megatron.core.parameter import ParameterInfo, info_of
from megatron.core.topology import single_process
from megatron.update_rules.rule import build_rule
from tests.parallel.layout_run import MODEL, NO_BALANCE, SEED, Layout, Task, assemble, context, train

BASE, MULT = 8, 4.0
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_output_mult": 1 / MULT}
DENSE = replace(MODEL, add_qkv_bias=True, **MUP)
EXPERTS = replace(MODEL, num_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=16, **MUP)
STD = 0.02
HIDDEN = STD / math.sqrt(MULT)
RESIDUAL = HIDDEN / math.sqrt(2 * MODEL.num_layers)

TABLE: dict[str, tuple[float | None, float, float]] = {
    # Deviation of the initial weights, factor of Adam's learning rate, factor of SGD's learning rate.
    "embedding.word_embeddings.weight": (STD, 1.0, MULT),
    "output_layer.weight": (STD, 1.0, MULT),
    "layernorm.weight": (None, 1.0, MULT),
    "linear_qkv.bias": (0.0, 1.0, MULT),
    "linear_qkv.weight": (HIDDEN, 1 / MULT, 1.0),
    "linear_proj.weight": (RESIDUAL, 1 / MULT, 1.0),
    "linear_fc1.weight": (HIDDEN, 1 / MULT, 1.0),
    "linear_fc2.weight": (RESIDUAL, 1 / MULT, 1.0),
    # Fan-in h, fan-out E: an output weight of table 3.
    "router.weight": (STD / MULT, 1 / MULT, 1 / MULT),
}


def infos_of(config: Any) -> dict[str, ParameterInfo]:
    built: BuildContext = context(single_process(), Layout())
    if config.num_experts is not None:
        built = replace(built, experts=build_experts(config, NO_BALANCE, single_process()))
    model = build_model(config, built, SEED)
    return {info_of(parameter).name: info_of(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_parameter_is_scaled_as_in_the_table(config: Any) -> None:
    adam, sgd = (build_rule(OptimizerConfig(optimizer=name)) for name in ("adam", "sgd"))
    infos = infos_of(config)
    assert any("qkv.bias" in name for name in infos) or any("router" in name for name in infos)
    for name, info in infos.items():
        expected = next(row for suffix, row in TABLE.items() if name.endswith(suffix))
        found = info.init_std, adam.learning_rate_factor(info), sgd.learning_rate_factor(info)
        assert found == pytest.approx(expected), name


@pytest.mark.parametrize("rule", ["adam", "muon", "sgd"])
def test_without_mup_no_learning_rate_is_scaled(rule: str) -> None:
    built = build_rule(OptimizerConfig(optimizer=rule))
    for info in infos_of(replace(MODEL, add_qkv_bias=True)).values():
        assert built.rule_for(info).learning_rate_factor(info) == 1.0


def test_muon_scales_no_learning_rate() -> None:
    """Its matrices have updates of a constant spectral norm; its other parameters are vectors and tables for AdamW."""
    rule = build_rule(OptimizerConfig(optimizer="muon", muon_scale_mode="unit_rms_norm"))
    assert {rule.rule_for(info).learning_rate_factor(info) for info in infos_of(DENSE).values()} == {1.0}


def test_the_base_model_trains_as_without_mup() -> None:
    task = Task(OptimizerConfig(weight_decay=0.1), steps=3)
    base = replace(MODEL, use_mup=True, mup_base_hidden_size=32, mup_output_mult=1.0, mup_base_head_dim=4.0)
    plain, found = train(task, Layout()), train(replace(task, model=base), Layout())
    assert found.losses == plain.losses
    for mine, theirs in zip(found.weights, plain.weights, strict=True):
        assert all(torch.equal(one[-1], other[-1]) for one, other in zip(mine, theirs, strict=True))


def test_adam_updates_each_parameter_with_its_rate_and_epsilon() -> None:
    """The run's weights are those of torch's AdamW with a group for each parameter, given the run's gradients."""
    flags = OptimizerConfig(weight_decay=0.1, clip_grad=0.0, adam_beta2=0.95, adam_eps=1e-3)
    trace = train(Task(flags, model=DENSE, steps=4), Layout())
    weights = {name: value.clone().requires_grad_() for name, value in assemble(trace.weights[0]).items()}
    factors = {name: next(row[1] for end, row in TABLE.items() if name.endswith(end)) for name in weights}
    groups = [
        {
            "params": [weight],
            "lr": 1e-2 * factors[name],
            "eps": 1e-3 * factors[name],
            "weight_decay": 0.1 if weight.dim() > 1 else 0.0,
        }
        for name, weight in weights.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    start = {info.name: info for info in infos_of(DENSE).values()}
    initial = {
        info_of(one).name: one for one in build_model(DENSE, context(single_process(), Layout()), SEED).parameters()
    }
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(initial[name][: start[name].global_shape[0]])
    for gradients, expected in zip(trace.gradients, trace.weights, strict=True):
        for name, gradient in assemble(gradients).items():
            weights[name].grad = gradient
        optimizer.step()
        for name, value in assemble(expected).items():
            assert torch.allclose(weights[name], value, rtol=1e-10, atol=1e-14), name


@pytest.mark.parametrize("head_size", [4, 16, 64])
def test_the_scores_of_attention_are_those_of_the_base_model_at_its_head_size(head_size: int) -> None:
    config = replace(DENSE, kv_channels=head_size, mup_base_head_dim=16.0)
    scale = config.attention_multiplier / math.sqrt(head_size)
    assert scale == pytest.approx(math.sqrt(16.0) / head_size)
    assert config.rotary_magnitude**2 == pytest.approx(config.attention_multiplier)
    standard = replace(config, mup_base_head_dim=None, mup_attn_scale_power=0.5)
    assert standard.attention_multiplier == pytest.approx(1.0)
