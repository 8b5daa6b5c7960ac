"""Models with experts are those of transformers: logits, loss and every gradient, also of the balancing loss."""

from dataclasses import replace

import pytest
import torch

from megatron.config.model import MoEConfig
from megatron.core.topology import single_process
from tests.model.reference import (
    EXPERTS,
    architecture,
    batch,
    compare_on_rank,
    expected,
    fp32_means_fp64,
    gradient_errors,
    our_model,
    random_model,
    relative_error,
    weights_and_gradients,
)
from tests.rank_pool import RankPool
from tests.whole_model import logits_of, token_losses_of

TOLERANCE = 1e-11
FAMILIES = pytest.mark.parametrize("family", EXPERTS)


@FAMILIES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_loss_and_gradients_equal_transformers(family: str, tied: bool) -> None:
    config = architecture(scaling=False, tied=tied, tp=1, family=family)
    assert compare_on_rank(config, 1, False) < TOLERANCE


@FAMILIES
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_they_equal_transformers_on_several_ranks(four_ranks: RankPool, family: str, tp: int, ep: int) -> None:
    config = architecture(scaling=False, tied=False, tp=tp, family=family)
    assert max(four_ranks.run(compare_on_rank, config, tp, True, ep, world_size=tp)) < TOLERANCE


@FAMILIES
def test_in_fp32_they_equal_transformers_to_its_precision(family: str) -> None:
    config = architecture(scaling=False, tied=False, tp=1, family=family)
    assert compare_on_rank(config, 1, False, dtype=torch.float32) < 1e-5


@FAMILIES
def test_the_order_of_gate_and_up_and_of_experts_changes_the_model(family: str) -> None:
    """Otherwise the cases above would prove less than they seem to."""
    config = architecture(scaling=False, tied=False, tp=1, family=family)
    wanted = expected(config)
    name = "layers.1.mlp.experts.linear_fc1.weight"
    experts = wanted.weights[name].unflatten(0, (config.num_experts, 2, -1))  # [E, 2, f, h]
    for other in (experts.flip(0), experts.flip(1)):
        model = our_model(config, wanted.weights | {name: other.flatten(0, 2)}, single_process())
        with torch.no_grad():
            found = logits_of(model, batch(config)[0]).transpose(0, 1)
        assert relative_error(found[..., : config.vocab_size], wanted.logits) > 1e-3


@FAMILIES
def test_the_balancing_loss_is_the_one_of_transformers_divided_by_the_choices_of_a_token(family: str) -> None:
    """In a model with one layer with experts: transformers adds up all layers before it multiplies."""
    config = architecture(scaling=False, tied=False, tp=1, family=family)
    if family == "mixtral":
        config = replace(config, num_layers=1)
    coefficient, topk = 0.3, config.moe_router_topk
    tokens, labels = batch(config)
    with fp32_means_fp64():
        theirs = random_model(config)
        output = theirs(tokens, output_router_logits=True)
        losses = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (losses + tokens.numel() * coefficient * output.aux_loss).backward()
    weights, gradients = weights_and_gradients(theirs, config)

    moe = MoEConfig(moe_router_load_balancing_type=("aux_loss",), moe_aux_loss_coeff=(topk * coefficient,))
    model = our_model(config, weights, single_process(), moe=moe)
    balance = model.expert_balance
    assert balance is not None
    balance.start_step(scale=1.0)
    token_losses_of(model, tokens, labels).sum().backward()
    assert max(gradient_errors(model, single_process(), gradients)) < TOLERANCE
    metrics = balance.finish_sum(balance.start_sum().wait())
    assert topk * metrics["load_balancing_loss"] == pytest.approx(output.aux_loss.item(), rel=TOLERANCE)
