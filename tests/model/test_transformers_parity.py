"""Our architectures are those of transformers: logits, loss and every gradient agree in fp64, at TP 1, 2 and 4."""

import pytest
import torch

from megatron.architectures.registry import ARCHITECTURES, PRESET_VOCABULARIES, PRESETS
from megatron.checkpoint.hugging_face.config import config_fields
from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping, copies_of_section
from megatron.config.model import preset
from tests.checkpoint.models import assembled, numbered
from tests.model.reference import (
    EXPERTS,
    TOLERANCE,
    architecture,
    as_published,
    compare_on_rank,
    expected,
    hugging_face_model,
    relative_error,
    to_global,
    transformers,
)
from tests.rank_pool import RankPool


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", False),
        ("llama", True),
        *((name, False) for name in ARCHITECTURES if name not in ("llama", "llama4_text", *EXPERTS)),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_logits_loss_and_gradients_equal_transformers(
    four_ranks: RankPool, family: str, scaling: bool, tied: bool, tp: int, sequence_parallel: bool
) -> None:
    config = architecture(scaling=scaling, tied=tied, tp=tp, family=family)
    if tp == 1:
        errors = [compare_on_rank(config, 1, False)]
    else:
        errors = four_ranks.run(compare_on_rank, config, tp, sequence_parallel, world_size=tp)
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("family", [name for name in ARCHITECTURES if name != "llama4_text"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_conversion_maps_every_element_both_ways(family: str, tied: bool) -> None:
    config = architecture(scaling=False, tied=tied, tp=1, family=family)
    parameters = as_published(dict(hugging_face_model(config).named_parameters()), family)
    theirs = numbered({name: parameter.shape for name, parameter in parameters.items()})
    ours, mapping = to_global(theirs, config), HuggingFaceMapping.of(config)
    assert mapping.ours.keys() == ours.keys() and mapping.theirs.keys() == theirs.keys()
    for name, tensor in mapping.ours.items():
        corner = (0,) * len(tensor.shape)
        assert torch.equal(assembled(tensor.copies(corner, tensor.shape), theirs, tensor.shape), ours[name]), name
    for name, section in mapping.theirs.items():
        corner = (0,) * len(section.shape)
        found = assembled(copies_of_section(section, corner, section.shape), ours, section.shape)
        assert torch.equal(found, theirs[name]), name


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
