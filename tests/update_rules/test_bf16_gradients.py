"""Update rules widen bf16 gradients (--grad-reduce-in-bf16) and compute as with the same gradients in fp32."""

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.update_rules import rule
from tests.update_rules.bound import bind, run

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
