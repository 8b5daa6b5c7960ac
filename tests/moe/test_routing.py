"""Routers: choice, weights, counts and losses against slow code without tensors, and against transformers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.moe import routing
from megatron.core.moe.routing import (
    RoutingRule,
    balanced_routing,
    balancing_probabilities,
    count_choices,
    count_choices_by_set,
    load_balancing_loss,
    route,
    z_loss,
)

MIXTRAL = RoutingRule(num_experts=8, topk=2)
PRE_SOFTMAX = RoutingRule(num_experts=16, topk=4, pre_softmax=True)
LLAMA4 = RoutingRule(num_experts=16, topk=1, score_function="sigmoid")
DEEPSEEK = RoutingRule(32, 6, score_function="sigmoid", scaling_factor=2.5, num_groups=8, group_topk=3)
UNEVEN_GROUPS = RoutingRule(16, 3, score_function="sigmoid", scaling_factor=2.5, num_groups=4, group_topk=2)
SOFTMAX_GROUPS = RoutingRule(12, 2, num_groups=3, group_topk=1)
ALL_EXPERTS = RoutingRule(num_experts=4, topk=4, score_function="sigmoid")
RULES = (
    MIXTRAL,
    PRE_SOFTMAX,
    LLAMA4,
    DEEPSEEK,
    UNEVEN_GROUPS,
    SOFTMAX_GROUPS,
    replace(SOFTMAX_GROUPS, pre_softmax=True),
    ALL_EXPERTS,
)


def random_logits(rule: RoutingRule, tokens: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, rule.num_experts, dtype=torch.float64, generator=generator)


def random_bias(rule: RoutingRule) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rule.num_experts, generator=generator) / 4 if rule.score_function == "sigmoid" else None


def slow_route(row: Sequence[float], rule: RoutingRule, bias: Sequence[float]) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, from the definitions."""
    exponentials = [math.exp(value) for value in row]
    sigmoids = [1 / (1 + math.exp(-value)) for value in row]
    if rule.score_function == "sigmoid":
        scores = [sigmoid + addend for sigmoid, addend in zip(sigmoids, bias)]
    elif rule.pre_softmax:
        scores = [value / sum(exponentials) for value in exponentials]
    else:
        scores = list(row)
    allowed = list(range(rule.num_experts))
    if rule.num_groups is not None and rule.group_topk is not None:
        size = rule.num_experts // rule.num_groups
        groups = [allowed[start : start + size] for start in range(0, rule.num_experts, size)]
        counted = rule.topk // rule.group_topk
        totals = [sum(sorted((scores[expert] for expert in group), reverse=True)[:counted]) for group in groups]
        order = sorted(range(rule.num_groups), key=lambda group: (-totals[group], group))
        allowed = [expert for group in order[: rule.group_topk] for expert in groups[group]]
    experts = sorted(allowed, key=lambda expert: (-scores[expert], expert))[: rule.topk]
    values = sigmoids if rule.score_function == "sigmoid" else exponentials
    divisor = sum(values) if rule.pre_softmax else sum(values[expert] for expert in experts)
    if rule.score_function == "sigmoid" and rule.topk == 1:
        divisor = 1.0
    return experts, [values[expert] / divisor * (rule.scaling_factor or 1.0) for expert in experts]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_experts_and_weights_are_those_of_the_definition(rule: RoutingRule) -> None:
    logits, bias = random_logits(rule), random_bias(rule)
    routing = route(logits, rule, bias)
    assert routing.experts.dtype == torch.int64 and routing.weights.dtype == torch.float64
    addends = [0.0] * rule.num_experts if bias is None else bias.tolist()
    for token, row in enumerate(logits.tolist()):
        experts, weights = slow_route(row, rule, addends)
        assert routing.experts[token].tolist() == experts
        assert routing.weights[token].tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_the_weights(rule: RoutingRule) -> None:
    logits, bias = random_logits(rule, tokens=3).requires_grad_(), random_bias(rule)
    assert torch.autograd.gradcheck(lambda values: route(values, rule, bias).weights, (logits,))
    assert torch.autograd.gradcheck(lambda values: balanced_routing(values, rule).weights, (logits,))


def test_a_score_function_is_a_row_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    name: Any = "sqrtsoftplus"
    monkeypatch.setattr(routing, "SCORES", {name: lambda logits: torch.nn.functional.softplus(logits).sqrt()})
    rule = RoutingRule(4, 2, score_function=name)
    logits = random_logits(rule)
    scores = logits.exp().log1p().sqrt()
    chosen = route(logits, rule)
    assert torch.equal(chosen.experts, logits.topk(2, dim=1).indices)
    best = scores.gather(1, chosen.experts)
    torch.testing.assert_close(chosen.weights, best / best.sum(dim=1, keepdim=True))
    torch.testing.assert_close(balancing_probabilities(logits, name), scores / scores.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("rule", (*RULES, RoutingRule(512, 8), RoutingRule(4096, 3)), ids=str)
def test_of_equal_scores_the_lowest_ids_are_chosen(rule: RoutingRule, dtype: torch.dtype) -> None:
    """With an all-zero router; single ties are in :func:`test_properties_of_a_choice`."""
    zeros = torch.zeros(300, rule.num_experts, dtype=dtype)
    group = rule.num_experts if rule.num_groups is None else rule.num_experts // rule.num_groups
    assert rule.topk <= group * (rule.group_topk or 1)
    assert (route(zeros, rule).experts == torch.arange(rule.topk)).all()


@given(
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 6),
    data=st.data(),
    sigmoid=st.booleans(),
    pre_softmax=st.booleans(),
)
@settings(max_examples=60)
def test_properties_of_a_choice(
    num_groups: int, group_size: int, data: st.DataObject, sigmoid: bool, pre_softmax: bool
) -> None:
    group_topk = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(group_topk, group_topk * group_size))
    rule = RoutingRule(
        num_groups * group_size,
        topk,
        score_function="sigmoid" if sigmoid else "softmax",
        pre_softmax=pre_softmax and not sigmoid,
        num_groups=num_groups,
        group_topk=group_topk,
    )
    # Few values, so that many scores are equal.
    seed = data.draw(st.integers(0, 2**32))
    logits = torch.randint(-2, 3, (12, rule.num_experts), generator=torch.Generator().manual_seed(seed)).double()
    routing = route(logits, rule)
    if topk // group_topk <= 2:  # the order of three summands may decide between groups whose sums are equal
        for row, experts in zip(logits.tolist(), routing.experts.tolist()):
            assert experts == slow_route(row, rule, [0.0] * rule.num_experts)[0]
    assert all(len(set(row)) == topk for row in routing.experts.tolist())
    groups = routing.experts // group_size
    assert all(len(set(row)) <= group_topk for row in groups.tolist())
    counts = count_choices(routing.experts, rule.num_experts)
    assert counts.sum() == routing.experts.numel()
    assert (routing.weights > 0).all()
    if not rule.pre_softmax and (rule.score_function == "softmax" or topk > 1):
        torch.testing.assert_close(routing.weights.sum(dim=1), torch.ones(12, dtype=torch.float64))
    if num_groups == 1:
        ungrouped = route(logits, replace(rule, num_groups=None, group_topk=None))
        assert torch.equal(routing.experts, ungrouped.experts)
    # The choice of a token does not depend on other tokens.
    assert torch.equal(route(logits[5:6], rule).experts, routing.experts[5:6])


@pytest.mark.parametrize("rule", (MIXTRAL, DEEPSEEK, LLAMA4), ids=str)
def test_balanced_routing_gives_every_expert_the_same_number_of_rows(rule: RoutingRule) -> None:
    logits = random_logits(rule, tokens=64).requires_grad_()
    routing = balanced_routing(logits, rule)
    assert set(count_choices(routing.experts, rule.num_experts).tolist()) == {64 * rule.topk // rule.num_experts}
    assert all(len(set(row)) == rule.topk for row in routing.experts.tolist())
    routing.weights.square().sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0
    uneven = count_choices(balanced_routing(logits[:61], rule).experts, rule.num_experts)
    assert uneven.max() - uneven.min() == 1


def test_counts() -> None:
    experts = torch.tensor([[0, 2], [2, 3], [0, 1], [3, 2], [2, 0], [3, 0]])  # [s, b] = [3, 2]
    assert count_choices(experts, 5).tolist() == [4, 1, 4, 3, 0]
    by_sequence = count_choices_by_set(experts.view(-1, 2, experts.shape[1]), 5)
    assert by_sequence.tolist() == [[3, 1, 2, 0, 0], [1, 0, 2, 3, 0]]
    assert by_sequence.dtype == torch.int64
    # bf16 counts stop at 256, fp32 counts at 2^24.
    assert count_choices(torch.zeros(1, 1, dtype=torch.int64).expand(2**24 + 1, 1), 1).tolist() == [2**24 + 1]


class LargestOutput(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [output.numel() for output in outputs if isinstance(output, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("rule", (RoutingRule(64, 8), replace(DEEPSEEK, num_experts=64), PRE_SOFTMAX), ids=str)
def test_no_tensor_has_tokens_times_choices_times_experts_elements(rule: RoutingRule) -> None:
    logits = random_logits(rule, tokens=32).requires_grad_()
    with LargestOutput() as largest:
        routing = route(logits, rule)
        counts = count_choices_by_set(routing.experts.view(-1, 4, rule.topk), rule.num_experts).sum(dim=0)
        probabilities = balancing_probabilities(logits, rule.score_function)
        balancing = load_balancing_loss(counts, probabilities.sum(dim=0), rule.topk, 32)
        torch.autograd.backward(routing.weights.sum() + balancing + z_loss(logits))
    assert largest.elements == logits.numel()


# --- transformers -----------------------------------------------------------------------------------------------------


def routers() -> Iterator[tuple[str, Any, RoutingRule]]:
    """(name, router of transformers, our rule)."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    mixtral = MixtralConfig(hidden_size=24, num_local_experts=8, num_experts_per_tok=2)
    yield "mixtral", MixtralTopKRouter(mixtral), RoutingRule(8, 2)
    for normalised in (True, False):
        qwen = Qwen3MoeConfig(hidden_size=24, num_experts=64, num_experts_per_tok=8, norm_topk_prob=normalised)
        yield f"qwen3 {normalised}", Qwen3MoeTopKRouter(qwen), RoutingRule(64, 8, pre_softmax=not normalised)
    # Two experts of a group count there, so k must be twice the number of chosen groups.
    deepseek = DeepseekV3Config(
        hidden_size=24, n_routed_experts=32, num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5
    )
    rule = RoutingRule(32, 8, score_function="sigmoid", scaling_factor=2.5, num_groups=8, group_topk=4)
    yield "deepseek", DeepseekV3TopkRouter(deepseek), rule


def test_routers_of_transformers_choose_the_same() -> None:
    for name, router, rule in routers():
        generator = torch.Generator().manual_seed(3)
        router.weight.data = torch.randn(router.weight.shape, generator=generator)
        bias = None
        if rule.score_function == "sigmoid":
            bias = torch.randn(rule.num_experts, generator=generator) / 8
            router.e_score_correction_bias = bias
        hidden = torch.randn(200, 24, generator=generator)
        logits, theirs, chosen = router(hidden)
        ours = route(logits, rule, bias)
        order = chosen.sort(dim=1)
        our_order = ours.experts.sort(dim=1)
        assert torch.equal(our_order.values, order.values), name
        torch.testing.assert_close(ours.weights.gather(1, our_order.indices), theirs.gather(1, order.indices))
        (ours.weights * ours.experts.sin()).sum().backward(retain_graph=True)
        gradient, router.weight.grad = router.weight.grad.clone(), None
        (theirs * chosen.sin()).sum().backward()
        torch.testing.assert_close(gradient, router.weight.grad, msg=name)


def test_balancing_loss_of_transformers_is_k_times_ours() -> None:
    modeling: Any = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    for rule in (MIXTRAL, RoutingRule(64, 8)):
        logits = random_logits(rule, tokens=96)
        theirs = modeling.load_balancing_loss_func((logits,), rule.num_experts, rule.topk)
        counts = count_choices(route(logits, rule).experts, rule.num_experts)
        ours = load_balancing_loss(counts, balancing_probabilities(logits, "softmax").sum(dim=0), rule.topk, 96)
        assert theirs.item() == pytest.approx(rule.topk * ours.item(), rel=1e-6)
