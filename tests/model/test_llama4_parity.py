"""Llama 4 is that of transformers: logits, losses and every gradient. What transformers does not have, packed documents
whose positions restart, is compared with the definition, which ``test_llama4_definition.py`` compares with
transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import transformer_config_of
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.attention_kernels import ReferenceAttention, TorchAttention
from megatron.core.ops.documents import Documents
from tests.checkpoint.models import import_of
from tests.model.llama4 import (
    CASES,
    STARTS,
    config_of,
    llama4_batch,
    random_llama4,
    random_weights,
    results_of_definition,
    results_of_transformers,
)
from tests.model.reference import CPU, Results, largest_error, our_model, topology_of
from tests.rank_pool import RankPool

TOLERANCE = 1e-11
DOCUMENT_MODES = pytest.mark.parametrize(
    ("masks_attention", "resets_positions"),
    [(True, False), (True, True), (False, True), (False, False)],
    ids=["masked", "masked and reset", "reset", "neither"],
)
every_case = pytest.mark.parametrize("case", CASES)


def compare_on_rank(
    config: TransformerConfig,
    wanted: Results,
    tp: int = 1,
    ep: int = 1,
    kernel: AttentionKernel | None = None,
    documents: Documents | None = None,
) -> float:
    """Build this rank's part of our model, and return the largest error of what it computes."""
    topology = topology_of(tp, ep)
    model = our_model(config, wanted.weights, topology, tp > 1, kernel)
    return largest_error(model, wanted, llama4_batch(config, len(wanted.logits)), topology, documents)


@every_case
def test_logits_losses_and_gradients_equal_transformers(case: str) -> None:
    config = config_of(case)
    assert compare_on_rank(config, results_of_transformers(config)) < TOLERANCE


@every_case
def test_in_fp32_they_equal_transformers_to_its_precision(case: str) -> None:
    config = config_of(case)
    assert compare_on_rank(config, results_of_transformers(config, torch.float32)) < 1e-5


@every_case
def test_a_model_that_is_read_from_their_files_equals_transformers(case: str, tmp_path: Path) -> None:
    """Its configuration, too."""
    theirs = config_of(case)
    random_llama4(theirs).save_pretrained(tmp_path)
    ours = transformer_config_of(json.loads((tmp_path / "config.json").read_text()), "config.json")
    weights = {name.removeprefix("model/"): tensor for name, tensor in import_of(tmp_path).items()}
    assert compare_on_rank(ours, replace(results_of_transformers(theirs), weights=weights)) < TOLERANCE


@pytest.mark.parametrize("kernel", [ReferenceAttention(), TorchAttention()], ids=["reference", "torch"])
def test_they_equal_transformers_with_other_attention_kernels(kernel: AttentionKernel) -> None:
    config = config_of("scout")
    assert compare_on_rank(config, results_of_transformers(config), kernel=kernel) < TOLERANCE


@pytest.mark.parametrize("case", ["scout", "maverick with scaling", "a list of layers"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_they_equal_transformers_on_several_ranks(four_ranks: RankPool, case: str, tp: int, ep: int) -> None:
    config = config_of(case)
    wanted = results_of_transformers(config)
    assert max(four_ranks.run(compare_on_rank, config, wanted, tp, ep, world_size=tp)) < TOLERANCE


@DOCUMENT_MODES
@pytest.mark.parametrize("case", ["scout", "maverick with scaling", "a list of layers", "no chunks"])
def test_packed_documents_equal_the_definition(case: str, masks_attention: bool, resets_positions: bool) -> None:
    config = config_of(case)
    wanted = results_of_definition(config, random_weights(config), STARTS, masks_attention, resets_positions)
    documents = Documents(STARTS, masks_attention, resets_positions, CPU)
    assert compare_on_rank(config, wanted, documents=documents) < TOLERANCE
