"""A new dense architecture is one file and a row: one that is defined here alone equals its model of transformers, is
converted in both directions, and is trained."""

from pathlib import Path
from typing import Any

import pytest

from megatron.architectures.catalog import ARCHITECTURES
from megatron.architectures.spec import ArchitectureSpec, HFTensor, WeightMapping, dense_layer
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import transformer_config_of
from megatron.errors import CheckpointError
from tests.end_to_end.converted import (
    assert_our_logits_are_theirs,
    assert_same_logits,
    assert_same_weights,
    continued,
    from_hf,
    their_model,
    to_hf,
)
from tests.end_to_end.run_process import call_training
from tests.model.reference import TOLERANCE, architecture, compare_on_rank, transformers
from tests.rank_pool import RankPool

# --- its file ------------------------------------------------------------------------------------------------


def layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    head, attention = config.kv_channels, "self_attention"
    bias = (
        HFTensor("self_attn.q_proj.bias", config.query_size, is_rotary=True),
        HFTensor("self_attn.k_proj.bias", config.key_value_size, is_rotary=True),
        HFTensor("self_attn.v_proj.bias", config.key_value_size),
    )
    return (
        *dense_layer(config, number),
        WeightMapping(f"{attention}.linear_qkv.bias", bias),
        WeightMapping(f"{attention}.q_layernorm.weight", (HFTensor("self_attn.q_norm.weight", head, is_rotary=True),)),
        WeightMapping(f"{attention}.k_layernorm.weight", (HFTensor("self_attn.k_norm.weight", head, is_rotary=True),)),
    )


BIASED = ArchitectureSpec(
    name="biased_qwen3",
    title="BiasedQwen3",
    layer_weights=layer_weights,
    features={"qk_layernorm": True, "add_qkv_bias": True},
    required_fields={"use_sliding_window": (False, "attention has no sliding window here")},
)
"""Qwen3 with the bias of Qwen2: features that layers have, in a combination that no other architecture has."""


# --- its model of transformers ---------------------------------------------------------------------------------


class BiasedQwen3Config(transformers.Qwen3Config):
    model_type = BIASED.name


class BiasedQwen3ForCausalLM(transformers.Qwen3ForCausalLM):
    config_class = BiasedQwen3Config

    def __init__(self, config: Any) -> None:
        config.attention_bias = True
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj.bias = None


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row, and its classes among those of transformers."""
    monkeypatch.setitem(ARCHITECTURES, BIASED.name, BIASED)
    transformers.AutoConfig.register(BIASED.name, BiasedQwen3Config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(BiasedQwen3Config, BiasedQwen3ForCausalLM, exist_ok=True)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


# --- what follows ----------------------------------------------------------------------------------------------


def compare_on_registered_rank(config: TransformerConfig) -> float:
    """Compare on a rank of the pool, which has its own registries."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch)
        return compare_on_rank(config, 2, sequence_parallel=True)


def test_it_equals_its_model_of_transformers(four_ranks: RankPool) -> None:
    config = architecture(scaling=False, tied=False, tp=2, family=BIASED.name)
    errors = [compare_on_rank(config, 1, False), *four_ranks.run(compare_on_registered_rank, config, world_size=2)]
    assert max(errors) < TOLERANCE


def test_it_is_converted_and_trained(tmp_path: Path) -> None:
    model = their_model(tied=False, family=BIASED.name)
    model.save_pretrained(tmp_path / "hf")
    advice = from_hf(tmp_path / "hf", tmp_path / "ours")
    assert_our_logits_are_theirs(tmp_path / "ours", model)
    call_training(continued(advice, tmp_path / "run")).succeeded()
    to_hf(tmp_path / "run", tmp_path / "back")
    assert_same_weights(tmp_path / "back", tmp_path / "hf")
    assert_same_logits(tmp_path / "back", model)


def test_its_required_fields_are_checked() -> None:
    fields = {"model_type": BIASED.name, "use_sliding_window": True}
    with pytest.raises(CheckpointError, match="use_sliding_window is True, not False: attention has no sliding window"):
        transformer_config_of(fields, "config.json")
