"""AdamW in narrow formats against torch's, and against what narrow moments must not do; gradients in bf16."""

import pytest
import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.update_rules import rule
from megatron.update_rules.adam import BF16_SPACING
from megatron.update_rules.rule import Group
from tests.update_rules.bound import bind, run, states

BETAS = (0.9, 0.95)


def config(moments: str = "fp32", gradients: str = "fp32", aware: bool = True) -> OptimizerConfig:
    return OptimizerConfig(
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        use_precision_aware_optimizer=aware,
        main_grads_dtype=gradients,  # type: ignore[arg-type]
        exp_avg_dtype=moments,  # type: ignore[arg-type]
        exp_avg_sq_dtype=moments,  # type: ignore[arg-type]
    )


def train(config: OptimizerConfig, gradient_dtype: torch.dtype, steps: int = 30) -> tuple[Tensor, list[Group]]:
    """A few steps on given gradients, some of whose elements are much smaller than others."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in (1000, 37)]
    scales = [10.0 ** torch.randint(-6, 2, weight.shape, generator=generator) for weight in weights]
    gradients = [torch.zeros_like(weight, dtype=gradient_dtype) for weight in weights]
    groups, update = bind(config, weights, gradients, (0.1, 0.0))

    def next_gradient() -> None:
        for gradient, scale in zip(gradients, scales):
            gradient.copy_(scale * (1 + torch.randn(scale.shape, generator=generator)))

    run(groups, update, range(steps), next_gradient)
    return torch.cat(weights), groups


@pytest.mark.parametrize("part", [1 << 22, 128])
def test_in_fp32_it_is_torchs_adamw_to_the_bit(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "SLICE", part)
    expected, reference = train(config(aware=False), torch.float32)
    found, groups = train(config(), torch.float32)
    assert torch.equal(found, expected)
    for state, other in zip(states(groups), states(reference), strict=True):
        assert all(torch.equal(state[kind], other[kind]) for kind in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(("moments", "gradients"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_narrow_formats_change_updates_by_their_rounding_alone(moments: str, gradients: str) -> None:
    """Thirty updates of about 0.01 each; eight bits are a relative error of up to 0.4 % in each moment."""
    expected, _ = train(config(), torch.float32)
    start, _ = train(config(), torch.float32, steps=0)
    dtype = torch.bfloat16 if gradients == "bf16" else torch.float32
    found, groups = train(config(moments, gradients), dtype)
    moved = (expected - start).abs().mean()
    assert moved > 0.1
    assert 0 < (found - expected).abs().mean() < 0.01 * moved
    for state in states(groups):
        wanted = torch.bfloat16 if moments == "bf16" else torch.float32
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wanted


def second_moment_after_silence(beta: float) -> float:
    """What is left of a second moment of 1 after gradients of zero for long enough that a hundredth should be."""
    weight, gradient = torch.zeros(1), torch.zeros(1)
    narrow = OptimizerConfig(adam_beta2=beta, use_precision_aware_optimizer=True, exp_avg_sq_dtype="bf16")
    groups, update = bind(narrow, [weight], [gradient], [0.0])
    (state,) = states(groups)
    state["exp_avg_sq"].fill_(1.0)
    run(groups, update, range(int(4.6 / (1.0 - beta))), lambda: None)
    return float(state["exp_avg_sq"])


def test_a_narrow_second_moment_forgets_where_its_flag_is_allowed_and_not_beyond() -> None:
    """The reason for the refusal: rounding to nearest would bring back what decayed."""
    for beta in (0.9, 0.95, 0.98, 1.0 - BF16_SPACING):
        OptimizerConfig(adam_beta2=beta, use_precision_aware_optimizer=True, exp_avg_sq_dtype="bf16").check()
        assert second_moment_after_silence(beta) < 0.02
    assert second_moment_after_silence(0.999) > 0.9


# --- gradients in bf16 (--grad-reduce-in-bf16), of every rule -------------------------------------------------

RULES = {
    "adam": OptimizerConfig(),
    "sgd": OptimizerConfig(optimizer="sgd"),
    "muon": OptimizerConfig(optimizer="muon"),
    "muon, nesterov": OptimizerConfig(optimizer="muon", muon_nesterov=True),
}


def trained(config: OptimizerConfig, gradient_dtype: torch.dtype) -> list[Tensor]:
    """Weights after three updates with gradients that bf16 represents."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=generator) for shape in ((24, 16), (37,))]
    gradients = [torch.empty_like(weight, dtype=gradient_dtype) for weight in weights]
    groups, update = bind(config, weights, gradients, (0.1, 0.0))

    def next_gradient() -> None:
        for gradient in gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator).bfloat16())

    run(groups, update, range(3), next_gradient)
    return weights


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_bf16_gradients_are_updates_in_fp32(config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "SLICE", 128)
    for found, wanted in zip(trained(config, torch.bfloat16), trained(config, torch.float32)):
        assert torch.equal(found, wanted)
