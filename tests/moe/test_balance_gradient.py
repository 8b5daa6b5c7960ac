"""Every router adds the gradient of its own losses, in every stage, with and without recompute."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.moe.balance import BalanceRule, ExpertBalance
from megatron.core.moe.routing import RoutingRule, route
from megatron.core.recompute import Recomputed
from tests.moe.routers import (
    LENGTH,
    MICROBATCH,
    SEQUENCE,
    SEQUENCES,
    SIGMOID,
    SOFTMAX,
    balance_of,
    defined_loss,
    finish,
    logits_of,
    observe,
)


class Router(nn.Module):
    """A router and a stand-in for its experts: output e of a token is expert e's part."""

    last_linear = None

    def __init__(self, balance: ExpertBalance, layer: int, rule: RoutingRule) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layer)
        self.weight = nn.Parameter(torch.randn(rule.num_experts, 6, dtype=torch.float64, generator=generator))
        self.rule, self.balance, self.router = rule, balance, balance.add_router(layer)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s, b, 6]`` to ``[s, b, 6]``."""
        rows = inputs.flatten(0, 1)
        logits = rows @ self.weight.t()
        routing = route(logits, self.rule, self.router.expert_bias)
        weights = routing.weights
        if torch.is_grad_enabled():
            loss = self.router.observe(logits, routing.experts, inputs.shape[1])
            if loss is not None:
                weights = self.balance.with_loss(weights, loss)
        factors = weights * (1 + routing.experts)
        return (rows * factors.sum(dim=1, keepdim=True)).view_as(inputs)


def test_the_identity_adds_the_scaled_gradient_of_the_loss() -> None:
    balance = balance_of(BalanceRule())
    balance.start_step(0.25)
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    result = balance.with_loss(weights, value**2)
    assert torch.equal(result, weights)
    result.backward(torch.full_like(result, 5.0))
    assert weights.grad is not None and (weights.grad == 5.0).all()
    assert value.grad is not None and value.grad.item() == 0.25 * 2 * 3.0


def test_every_stage_computes_the_gradient_of_its_own_loss() -> None:
    """Two stages, of which the first one receives the gradient of its output alone, against one graph."""
    rule = BalanceRule((SEQUENCE,), z_loss_coeff=0.125)
    inputs = torch.randn(LENGTH, SEQUENCES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    scale = 1 / 64

    def stages() -> tuple[ExpertBalance, Router, Router]:
        balance = balance_of(rule, layers=(0, 1))
        balance.start_step(scale)
        return balance, Router(balance, 0, SOFTMAX), Router(balance, 1, SOFTMAX)

    _, first, second = stages()
    output = first(inputs.clone().requires_grad_())
    received = output.detach().requires_grad_()
    second(received).square().sum().mul(scale).backward()
    output.backward(received.grad)

    balance, whole_first, whole_second = stages()
    losses: list[Tensor] = []

    def keep(weights: Tensor, loss: Tensor) -> Tensor:
        losses.append(loss)
        return weights

    balance.with_loss = keep  # type: ignore[method-assign]
    tokens = whole_second(whole_first(inputs.clone().requires_grad_())).square().sum()
    ((tokens + sum(losses)) * scale).backward()
    assert len(losses) == 2
    for stage, whole in ((first, whole_first), (second, whole_second)):
        torch.testing.assert_close(stage.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-15)


def train(recomputes: bool) -> tuple[list[Tensor | None], list[dict[str, float]]]:
    """Three steps of a router: expert bias, gradients of weight and inputs; metrics."""
    rule = BalanceRule((SEQUENCE, MICROBATCH), z_loss_coeff=0.125, bias_update_rate=0.01)
    balance = balance_of(rule, SIGMOID)
    layer = Router(balance, 0, SIGMOID)
    module = Recomputed(layer) if recomputes else layer
    metrics, gradients = [], []
    for step in range(3):
        balance.start_step(1 / 64)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(LENGTH, SEQUENCES, 6, dtype=torch.float64, generator=generator).requires_grad_()
        module(inputs).square().sum().mul(1 / 64).backward()
        with torch.no_grad():
            module(inputs)  # an evaluation
        assert layer.router.counts.sum() == LENGTH * SEQUENCES * SIGMOID.topk
        metrics.append(finish(balance))
        gradients.append(inputs.grad)
    return [layer.router.expert_bias, layer.weight.grad, *gradients], metrics


def test_recompute_changes_no_count_no_bias_and_no_gradient() -> None:
    (tensors, metrics), (recomputed, recomputed_metrics) = train(recomputes=False), train(recomputes=True)
    assert tensors[0] is not None and tensors[0].any()
    for one, other in zip(tensors, recomputed):
        assert one is not None and other is not None and torch.equal(one, other)
    assert metrics == recomputed_metrics


def test_observing_without_a_graph_is_an_error() -> None:
    router = balance_of(BalanceRule()).add_router(0)
    with torch.no_grad(), pytest.raises(AssertionError):
        observe(router, logits_of(SOFTMAX), SOFTMAX)


def test_masked_tokens_count() -> None:
    """The loss mask concerns token losses: the gradient of a balancing loss has no factor of masked tokens."""
    rule = BalanceRule((SEQUENCE,))
    balance = balance_of(rule)
    balance.start_step(1 / (LENGTH * SEQUENCES))
    layer = Router(balance, 0, SOFTMAX)
    inputs = torch.randn(LENGTH, SEQUENCES, 6, dtype=torch.float64).requires_grad_()
    layer(inputs).mul(0.0).sum().backward()  # every token is masked
    weight = layer.weight.detach().requires_grad_()
    logits = inputs.detach() @ weight.t()
    (defined_loss("seq_aux_loss", logits, SOFTMAX) * SEQUENCE[1] / (LENGTH * SEQUENCES)).backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-11, atol=1e-15)
