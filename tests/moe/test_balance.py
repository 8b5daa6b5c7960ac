"""The balance of routers: auxiliary losses that do not depend on the layout, the gradient that every router adds,
metrics, and exact updates of the expert bias."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import MoEConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.activations import Recomputed
from megatron.core.auxiliary_losses import AuxiliaryLosses
from megatron.core.moe.routing import BalanceRule, ExpertBalance, RouterBalance, RoutingRule, count_choices, route
from megatron.core.optimizer import StepResult
from megatron.core.precision import build_loss_scaler
from megatron.core.topology import RankGrid, Topology, single_process
from megatron.metrics.timers import Timers
from megatron.training.context import TrainModule
from megatron.training.loop.step import train_step
from tests.late_transport import LateTopology
from tests.moe.routers import (
    ALONE,
    CPU,
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
from tests.parallel.layout_run import MODEL
from tests.rank_pool import RankPool

RULES = (
    BalanceRule((SEQUENCE,)),
    BalanceRule((MICROBATCH,)),
    BalanceRule((MICROBATCH, SEQUENCE)),
    BalanceRule(z_loss_coeff=0.125),
    BalanceRule((SEQUENCE,), z_loss_coeff=0.125),
)


def loss_and_gradient(rule: BalanceRule, routing_rule: RoutingRule, logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    loss = observe(balance_of(rule, routing_rule).add_router(0), logits, routing_rule)
    assert loss is not None
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("routing_rule", (SOFTMAX, SIGMOID), ids=("softmax", "sigmoid"))
def test_losses_and_gradients_are_those_of_the_definition(routing_rule: RoutingRule) -> None:
    rule = BalanceRule((SEQUENCE, MICROBATCH), z_loss_coeff=0.125)
    logits = logits_of(routing_rule).requires_grad_()
    expected = sum(coeff * defined_loss(kind, logits, routing_rule) for kind, coeff in rule.balancing_losses)
    expected = expected + 0.125 * sum(row.exp().sum().log() ** 2 for row in logits.flatten(0, 1))
    (wanted,) = torch.autograd.grad(expected, logits)
    loss, gradient = loss_and_gradient(rule, routing_rule, logits)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-15)


def test_rules_of_flags() -> None:
    model = replace(
        MODEL,
        num_experts=8,
        moe_router_topk=3,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    )
    assert RoutingRule.of(model) == SIGMOID
    pre_softmax = replace(model, moe_router_score_function="softmax", moe_router_pre_softmax=True)
    assert RoutingRule.of(pre_softmax) == replace(SIGMOID, score_function="softmax", pre_softmax=True)
    # Megatron-LM's defaults: a type without a coefficient.
    assert BalanceRule.of(MoEConfig(), model) == BalanceRule()
    assert BalanceRule.of(MoEConfig(moe_z_loss_coeff=0.0), model) == BalanceRule()
    flags = MoEConfig(
        moe_router_load_balancing_type=("aux_loss", "none", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.5, 1.0, 0.25),
        moe_z_loss_coeff=0.125,
        moe_router_bias_update_rate=0.01,
        moe_per_layer_logging=True,
    )
    biased = replace(model, moe_router_enable_expert_bias=True)
    assert BalanceRule.of(flags, biased) == BalanceRule((MICROBATCH, SEQUENCE), 0.125, 0.01, logs_layers=True)
    assert BalanceRule.of(flags, model).bias_update_rate is None


def test_only_the_loss_of_a_microbatch_depends_on_the_microbatch_size() -> None:
    logits = logits_of(SOFTMAX)

    def gradient_in_microbatches(rule: BalanceRule, size: int) -> Tensor:
        parts = [loss_and_gradient(rule, SOFTMAX, part)[1] for part in logits.split(size, dim=1)]
        return torch.cat(parts, dim=1)

    for rule in (BalanceRule((SEQUENCE,)), BalanceRule(z_loss_coeff=0.125)):
        for size in (1, 2):
            torch.testing.assert_close(
                gradient_in_microbatches(rule, size), gradient_in_microbatches(rule, SEQUENCES), rtol=1e-12, atol=1e-15
            )
    alone, together = (gradient_in_microbatches(BalanceRule((MICROBATCH,)), size) for size in (1, SEQUENCES))
    assert (alone - together).norm() > 0.1 * together.norm()


def case_of_a_divided_sequence(
    kind: type[Topology], grid: RankGrid, rule: BalanceRule, routing_rule: RoutingRule
) -> tuple[Tensor, Tensor, dict[str, float], Tensor]:
    """The loss of this rank, its gradient, the metrics and the expert bias after a step of two microbatches."""
    topology = kind(grid, torch.distributed.get_rank() if grid.world_size > 1 else 0, CPU)
    balance = ExpertBalance(routing_rule, rule, (3,), topology.communicator("tp", "cp"), topology.world, CPU)
    router = balance.add_router(3)
    balance.start_step()
    parts, losses = [], []
    for seed in (0, 1):
        logits = logits_of(routing_rule, seed=seed).chunk(topology.communicator("tp", "cp").size)
        part = logits[topology.communicator("tp", "cp").rank].clone().requires_grad_()
        loss = observe(router, part, routing_rule)
        assert loss is not None
        parts.append(torch.autograd.grad(loss, part)[0])
        losses.append(loss.detach())
    metrics = finish(balance)
    assert router.expert_bias is not None
    return torch.stack(losses), torch.stack(parts), metrics, router.expert_bias


@pytest.mark.parametrize("grid", (RankGrid(tp=2), RankGrid(cp=2), RankGrid(tp=2, cp=2)), ids=("tp2", "cp2", "tp2 cp2"))
@pytest.mark.parametrize("kind", (Topology, LateTopology))
def test_losses_do_not_depend_on_how_a_sequence_is_divided(
    four_ranks: RankPool, grid: RankGrid, kind: type[Topology]
) -> None:
    for rule in RULES:
        for routing_rule in (SOFTMAX, SIGMOID):
            biased = replace(rule, bias_update_rate=0.01, logs_layers=True)
            losses, gradients, metrics, bias = case_of_a_divided_sequence(Topology, RankGrid(), biased, routing_rule)
            case = case_of_a_divided_sequence, kind, grid, biased, routing_rule
            results = four_ranks.run(*case, world_size=grid.world_size)
            torch.testing.assert_close(sum(result[0] for result in results), losses, rtol=1e-13, atol=0.0)
            divided = torch.cat([result[1] for result in results], dim=1)
            torch.testing.assert_close(divided, gradients, rtol=1e-11, atol=1e-15)
            for result in results:
                assert result[2] == pytest.approx(metrics, rel=1e-12)
                assert torch.equal(result[3], bias)


def case_of_stages(rule: BalanceRule) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and biases of three layers with experts, of which two stages have one and two."""
    topology = Topology(RankGrid(pp=2), torch.distributed.get_rank(), CPU)
    layers = ((1,), (3, 5))[topology.rank]
    balance = ExpertBalance(SOFTMAX, rule, (1, 3, 5), topology.communicator("tp", "cp"), topology.world, CPU)
    for layer in layers:
        observe(balance.add_router(layer), logits_of(SOFTMAX, seed=layer), SOFTMAX)
    return finish(balance), balance.state()


def test_every_stage_has_the_metrics_of_all_layers_and_the_biases_of_its_own(four_ranks: RankPool) -> None:
    rule = BalanceRule((SEQUENCE,), z_loss_coeff=0.125, bias_update_rate=0.01, logs_layers=True)
    balance = balance_of(rule, layers=(1, 3, 5))
    for layer in (1, 3, 5):
        observe(balance.add_router(layer), logits_of(SOFTMAX, seed=layer), SOFTMAX)
    metrics = finish(balance)
    (first, first_biases), (second, second_biases) = four_ranks.run(case_of_stages, rule, world_size=2)
    assert first == second == metrics
    name = "layers.{}.mlp.router.expert_bias"
    assert list(first_biases) == [name.format(1)] and list(second_biases) == [name.format(3), name.format(5)]
    for one, bias in (first_biases | second_biases).items():
        assert torch.equal(bias, balance.state()[one])


def test_metrics() -> None:
    rule = BalanceRule((SEQUENCE, MICROBATCH), z_loss_coeff=0.125, logs_layers=True)
    balance = balance_of(rule, layers=(0, 2))
    routers = {layer: balance.add_router(layer) for layer in (0, 2)}
    expected: dict[str, float] = {}
    tokens = 2 * LENGTH * SEQUENCES
    for layer, router in routers.items():
        lbl = squares = 0.0
        counts = torch.zeros(8, dtype=torch.int64)
        for seed in (0, 1):  # microbatches
            logits = logits_of(SOFTMAX, seed=10 * layer + seed)
            observe(router, logits, SOFTMAX)
            shares = {kind: coeff / 0.75 for kind, coeff in rule.balancing_losses}
            lbl += sum(share * defined_loss(kind, logits, SOFTMAX).item() for kind, share in shares.items())
            squares += logits.logsumexp(dim=2).square().sum().item()
            counts += count_choices(route(logits.flatten(0, 1), SOFTMAX).experts, 8)
        expected |= {
            f"moe/load_balancing_loss_layer_{layer}": lbl / tokens,
            f"moe/z_loss_layer_{layer}": squares / tokens,
            f"moe/expert_load_max_layer_{layer}": counts.max().item() / (2 * tokens / 8),
        }
    for name in ("load_balancing_loss", "z_loss"):
        expected[name] = (expected[f"moe/{name}_layer_0"] + expected[f"moe/{name}_layer_2"]) / 2
    expected["expert_load_max"] = max(expected["moe/expert_load_max_layer_0"], expected["moe/expert_load_max_layer_2"])
    metrics = finish(balance)
    assert metrics == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "metrics"),
    [
        (BalanceRule(), set()),
        (BalanceRule((SEQUENCE,)), {"load_balancing_loss"}),
        (BalanceRule(z_loss_coeff=0.125), {"z_loss"}),
    ],
)
def test_losses_that_are_off_have_no_metric(rule: BalanceRule, metrics: set[str]) -> None:
    balance = balance_of(rule)
    assert (observe(balance.add_router(0), logits_of(SOFTMAX), SOFTMAX) is None) == (not metrics)
    assert finish(balance).keys() == {"expert_load_max", *metrics}


def test_a_step_starts_with_no_counts_and_no_losses() -> None:
    balance = balance_of(BalanceRule((SEQUENCE,), z_loss_coeff=1.0))
    router = balance.add_router(0)
    metrics = []
    for _ in range(2):
        balance.start_step()
        observe(router, logits_of(SOFTMAX), SOFTMAX)
        metrics.append(finish(balance))
        assert router.counts.sum() == LENGTH * SEQUENCES * 2
    assert metrics[0] == metrics[1]


# Gradients of losses, in every stage, with and without recompute


class Router(nn.Module):
    """A router and a stand-in for its experts: output e of a token is expert e's part."""

    last_linear = None

    def __init__(self, balance: ExpertBalance, layer: int, rule: RoutingRule) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layer)
        self.weight = nn.Parameter(torch.randn(rule.num_experts, 6, dtype=torch.float64, generator=generator))
        self.rule, self.losses, self.router = rule, AuxiliaryLosses(), balance.add_router(layer)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s, b, 6]`` to ``[s, b, 6]``."""
        rows = inputs.flatten(0, 1)
        logits = rows @ self.weight.t()
        routing = route(logits, self.rule, self.router.expert_bias)
        weights = routing.weights
        if torch.is_grad_enabled():
            loss = self.router.observe(logits, routing.experts, inputs.shape[1])
            if loss is not None:
                weights = self.losses.attach(weights, loss)
        factors = weights * (1 + routing.experts)
        return (rows * factors.sum(dim=1, keepdim=True)).view_as(inputs)


def train(recomputes: bool) -> tuple[list[Tensor | None], list[dict[str, float]]]:
    """Three steps of a router: expert bias, gradients of weight and inputs; metrics."""
    rule = BalanceRule((SEQUENCE, MICROBATCH), z_loss_coeff=0.125, bias_update_rate=0.01)
    balance = balance_of(rule, SIGMOID)
    layer = Router(balance, 0, SIGMOID)
    module = Recomputed(layer) if recomputes else layer
    metrics, gradients = [], []
    for step in range(3):
        balance.start_step()
        layer.losses.start_step(1 / 64)
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
    """The loss mask concerns token losses: the gradient of a balancing loss has no factor of masked tokens. So the
    router's stage alone computes it."""
    rule = BalanceRule((SEQUENCE,))
    balance = balance_of(rule)
    layer = Router(balance, 0, SOFTMAX)
    layer.losses.start_step(1 / (LENGTH * SEQUENCES))
    inputs = torch.randn(LENGTH, SEQUENCES, 6, dtype=torch.float64).requires_grad_()
    layer(inputs).mul(0.0).sum().backward()  # every token is masked
    weight = layer.weight.detach().requires_grad_()
    logits = inputs.detach() @ weight.t()
    (defined_loss("seq_aux_loss", logits, SOFTMAX) * SEQUENCE[1] / (LENGTH * SEQUENCES)).backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-11, atol=1e-15)


# The bias of experts


def biased_router(counts: Sequence[int]) -> tuple[ExpertBalance, RouterBalance]:
    """A router that has counted ``counts``."""
    rule = RoutingRule(len(counts), 1, score_function="sigmoid")
    balance = ExpertBalance(rule, BalanceRule(bias_update_rate=1e-3), (0,), ALONE, ALONE, CPU)
    router = balance.add_router(0)
    router.counts += torch.tensor(counts)
    return balance, router


@pytest.mark.parametrize(
    ("counts", "signs"),
    (
        ((4, 4, 4, 4), (0, 0, 0, 0)),
        ((3, 5, 4, 4), (1, -1, 0, 0)),
        ((3, 3, 4), (1, 1, -1)),  # a mean that no number has: 10/3
        ((0, 0, 0, 7), (1, 1, 1, -1)),
        # Differences that neither fp32 nor bf16 counts have.
        ((2**30, 2**30 + 1, 2**30 - 1), (0, -1, 1)),
        ((257, 256, 258), (0, 1, -1)),
    ),
)
def test_the_bias_moves_by_the_sign_of_exact_counts(counts: Sequence[int], signs: Sequence[int]) -> None:
    balance, router = biased_router(counts)
    assert router.expert_bias is not None
    expected = torch.zeros(len(counts))
    for _ in range(3):
        finish(balance)
        expected += 1e-3 * torch.tensor(signs, dtype=torch.float32)
    assert router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, expected)


@pytest.mark.parametrize(("loss", "is_applied"), ((1.0, True), (1.0, False), (math.nan, True)))
def test_a_skipped_step_changes_no_bias(loss: float, is_applied: bool) -> None:
    balance, router = biased_router((9, 9, 0))  # counts of the step before

    def train(*arguments: object) -> Tensor:
        """All tokens choose the last of three experts."""
        router.observe(torch.zeros(9, 3), torch.full((9, 1), 2), num_sequences=1)
        return torch.tensor([loss, 9.0])

    result = StepResult(grad_norm=1.0, is_applied=is_applied, metrics={"num_zeros": 2.0})
    parts = Mock(**{"train.side_effect": train, "step.return_value": result}, auxiliary_losses=AuxiliaryLosses())
    scaler = build_loss_scaler(PrecisionConfig())
    module = TrainModule(parts, parts, parts, scaler, single_process(), experts=balance)
    outcome = train_step(module, iter(()), Mock(), num_microbatches=1, expected_tokens=9, timers=Timers(0))
    assert router.expert_bias is not None
    is_updated = is_applied and loss == 1.0
    assert outcome.is_skipped is not is_updated
    expected = torch.tensor([1.0, 1.0, -1.0]) * 1e-3 if is_updated else torch.zeros(3)
    assert torch.equal(router.expert_bias, expected)
    assert outcome.metrics == ({} if math.isnan(loss) else {"num_zeros": 2.0, "expert_load_max": 3.0})


def test_the_state_is_the_biases_of_the_routers() -> None:
    balance, router = biased_router((0, 5, 1))
    finish(balance)
    assert list(balance.state()) == ["layers.0.mlp.router.expert_bias"]
    # Checkpoints load in place.
    assert balance.state()["layers.0.mlp.router.expert_bias"] is router.expert_bias
    assert balance_of(BalanceRule((SEQUENCE,))).state() == {}
