"""Our architectures are those of transformers: logits, loss and every gradient agree in fp64, at TP 1, 2 and 4, and
with experts also the balancing loss."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron.architectures.catalog import ARCHITECTURES, PRESET_VOCABULARIES, PRESETS
from megatron.checkpoint.hugging_face.config import config_fields
from megatron.config.model import MoEConfig, preset
from megatron.core.topology import single_process
from tests.model.reference import (
    EXPERTS,
    TOLERANCE,
    architecture,
    batch,
    compare_on_rank,
    expected,
    fp32_means_fp64,
    gradient_errors,
    our_model,
    random_model,
    relative_error,
    transformers,
    weights_and_gradients,
)
from tests.rank_pool import RankPool
from tests.whole_model import logits_of, token_losses_of

OF_EXPERTS = 1e-11
"""The tolerance of families with experts."""


DENSE = [name for name in ARCHITECTURES if name not in ("llama4_text", *EXPERTS)]
CASES = [
    # Family, scaling, tied, TP, sequence parallelism, EP.
    *(
        (family, scaling, tied, *layout, 1)
        for family, scaling in [("llama", True), *((name, False) for name in DENSE)]
        for tied in (False, True)
        for layout in ((1, False), (2, False), (2, True), (4, False), (4, True))
    ),
    *(
        (family, False, tied, *layout)
        for family in EXPERTS
        for tied, layout in product((False, True), [(1, False, 1), (2, True, 1), (2, True, 2), (4, True, 2)])
        if layout[0] == 1 or not tied
    ),
]
every_family_of_experts = pytest.mark.parametrize("family", EXPERTS)


@pytest.mark.parametrize(("family", "scaling", "tied", "tp", "sequence_parallel", "ep"), CASES)
def test_logits_loss_and_gradients_equal_transformers(
    four_ranks: RankPool, family: str, scaling: bool, tied: bool, tp: int, sequence_parallel: bool, ep: int
) -> None:
    config = architecture(scaling=scaling, tied=tied, tp=tp, family=family)
    if tp == 1:
        errors = [compare_on_rank(config, 1, False)]
    else:
        errors = four_ranks.run(compare_on_rank, config, tp, sequence_parallel, ep, world_size=tp)
    assert max(errors) < (OF_EXPERTS if family in EXPERTS else TOLERANCE)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_model_of_transformers(name: str) -> None:
    config = preset(name).resolve(PRESET_VOCABULARIES.get(name, 300), 1, 1)
    settings = transformers.AutoConfig.for_model(**config_fields(config, "float32"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    assert config.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_scaling_and_ties_change_the_model() -> None:
    """Otherwise the cases above would prove less than they seem to."""
    plain = expected(architecture(scaling=False, tied=False, tp=1)).logits
    scaled = expected(architecture(scaling=True, tied=False, tp=1)).logits
    tied = expected(architecture(scaling=False, tied=True, tp=1)).logits
    assert relative_error(scaled, plain) > 1e-3
    assert relative_error(tied, plain) > 1e-3


# Experts


@every_family_of_experts
def test_in_fp32_they_equal_transformers_to_its_precision(family: str) -> None:
    config = architecture(scaling=False, tied=False, tp=1, family=family)
    assert compare_on_rank(config, 1, False, dtype=torch.float32) < 1e-5


@every_family_of_experts
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


@every_family_of_experts
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
    balance.start_step()
    model.context.auxiliary_losses.start_step(scale=1.0)
    token_losses_of(model, tokens, labels).sum().backward()
    assert max(gradient_errors(model, single_process(), gradients)) < OF_EXPERTS
    metrics = balance.finish_sum(balance.start_sum().wait())
    assert topk * metrics["load_balancing_loss"] == pytest.approx(output.aux_loss.item(), rel=OF_EXPERTS)
