"""The balance of routers: auxiliary losses that do not depend on the layout, counts and metrics."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe.balance import BalanceRule, ExpertBalance
from megatron.core.moe.routing import RoutingRule, count_choices, route
from megatron.core.topology import RankGrid, Topology
from tests.late_transport import LateTopology
from tests.moe.routers import (
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
    model = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=8,
        vocab_size=8,
        padded_vocab_size=8,
        max_position_embeddings=8,
        num_experts=8,
        moe_ffn_hidden_size=8,
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


def test_without_a_loss_tokens_are_counted_alone() -> None:
    router = balance_of(BalanceRule()).add_router(0)
    logits = logits_of(SOFTMAX)
    assert observe(router, logits, SOFTMAX) is None
    assert torch.equal(router.counts, count_choices(route(logits.flatten(0, 1), SOFTMAX).experts, 8))


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
    topology_class: type[Topology], grid: RankGrid, rank: int, rule: BalanceRule, routing_rule: RoutingRule
) -> tuple[Tensor, Tensor, dict[str, float], Tensor]:
    """The loss of this rank, its gradient, the metrics and the expert bias after a step of two microbatches."""
    topology = topology_class(grid, rank, CPU)
    balance = ExpertBalance(routing_rule, rule, (3,), topology.communicator("tp", "cp"), topology.world, CPU)
    router = balance.add_router(3)
    balance.start_step(1.0)
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


def run_on_ranks(topology_name: str, grid: RankGrid, rule: BalanceRule, routing_rule: RoutingRule) -> object:
    topology_class = {"late": LateTopology, "plain": Topology}[topology_name]
    return case_of_a_divided_sequence(topology_class, grid, torch.distributed.get_rank(), rule, routing_rule)


@pytest.mark.parametrize("grid", (RankGrid(tp=2), RankGrid(cp=2), RankGrid(tp=2, cp=2)), ids=("tp2", "cp2", "tp2 cp2"))
@pytest.mark.parametrize("transport", ("plain", "late"))
def test_losses_do_not_depend_on_how_a_sequence_is_divided(
    four_ranks: RankPool, grid: RankGrid, transport: str
) -> None:
    for rule in RULES:
        for routing_rule in (SOFTMAX, SIGMOID):
            biased = replace(rule, bias_update_rate=0.01, logs_layers=True)
            losses, gradients, metrics, bias = case_of_a_divided_sequence(Topology, RankGrid(), 0, biased, routing_rule)
            results = four_ranks.run(run_on_ranks, transport, grid, biased, routing_rule, world_size=grid.world_size)
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
    ("rule", "names"),
    (
        (BalanceRule(), {"expert_load_max"}),
        (BalanceRule((SEQUENCE,)), {"expert_load_max", "load_balancing_loss"}),
        (BalanceRule(z_loss_coeff=0.125), {"expert_load_max", "z_loss"}),
    ),
)
def test_losses_that_are_off_have_no_metric(rule: BalanceRule, names: set[str]) -> None:
    balance = balance_of(rule)
    observe(balance.add_router(0), logits_of(SOFTMAX), SOFTMAX)
    assert finish(balance).keys() == names


def test_balanced_experts_have_the_smallest_values() -> None:
    balance = balance_of(BalanceRule((SEQUENCE,)))
    router = balance.add_router(0)
    turns = torch.arange(LENGTH * SEQUENCES * 2).view(LENGTH * SEQUENCES, 2) % 8
    router.observe(torch.zeros(LENGTH * SEQUENCES, 8), turns, SEQUENCES)
    metrics = finish(balance)
    assert metrics == pytest.approx({"load_balancing_loss": 1.0, "expert_load_max": 1.0})


def test_a_step_starts_with_no_counts_and_no_losses() -> None:
    balance = balance_of(BalanceRule((SEQUENCE,), z_loss_coeff=1.0))
    router = balance.add_router(0)
    metrics = []
    for _ in range(2):
        balance.start_step(1.0)
        observe(router, logits_of(SOFTMAX), SOFTMAX)
        metrics.append(finish(balance))
        assert router.counts.sum() == LENGTH * SEQUENCES * 2
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_the_losses(rule: BalanceRule) -> None:
    def loss_of(logits: Tensor) -> Tensor:
        loss = observe(balance_of(rule, SIGMOID).add_router(0), logits, SIGMOID)
        assert loss is not None
        return loss

    # The counts are constant near these logits.
    assert torch.autograd.gradcheck(loss_of, (logits_of(SIGMOID, length=4, sequences=2).requires_grad_(),))


def test_balancing_loss_of_transformers_is_k_times_the_metric() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = logits_of(SOFTMAX)
    balance = balance_of(BalanceRule((("aux_loss", 0.01),)))
    observe(balance.add_router(0), logits, SOFTMAX)
    ours = finish(balance)["load_balancing_loss"]
    theirs = modeling.load_balancing_loss_func((logits.flatten(0, 1),), 8, SOFTMAX.topk).item()
    assert math.isclose(theirs, SOFTMAX.topk * ours, rel_tol=1e-6)
