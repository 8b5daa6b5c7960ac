"""A model with muP at Hugging Face, which has no multipliers: they are in the weights, and the logits are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_llama as ml
from megatron.errors import CheckpointError
from megatron_llama.run import FlagValue
from tests.model.reference import fp32_means_fp64

transformers: Any = pytest.importorskip("transformers")

RUN: dict[str, FlagValue] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "init_method_std": 0.2}
RUN |= {"num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 60, "seq_length": 16, "mock_data": True}
RUN |= {"micro_batch_size": 2, "global_batch_size": 2, "train_iters": 2, "lr": 1e-2, "num_workers": 0}
RUN |= {"fp64": True, "device": "cpu"}
MUP: dict[str, FlagValue] = {"use_mup": True, "mup_base_hidden_size": 24, "mup_base_head_dim": 5.0}
MUP |= {"mup_embedding_mult": 3.0, "mup_output_mult": 0.7}


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", {}),
        ("llama", {"untie_embeddings_and_output_weights": False}),
        ("qwen2", {"add_qkv_bias": True}),
        ("qwen3", {"qk_layernorm": True, "apply_layernorm_1p": True, "untie_embeddings_and_output_weights": False}),
    ],
    ids=["llama", "tied", "bias", "qk-norm-tied"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, flags: dict[str, FlagValue]) -> None:
    with ml.Run(**RUN, **MUP, **flags) as run:
        run.step()
        run.export(tmp_path / "hf")
        tokens = torch.arange(32).view(2, 16) * 7 % 60
        with torch.no_grad():
            ours = run.chunks[0](tokens).transpose(0, 1)
    with fp32_means_fp64(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
        assert model.config.model_type == family
        theirs = model(tokens).logits
    assert torch.allclose(ours[..., : theirs.shape[-1]], theirs, rtol=1e-9, atol=1e-9)
    assert float(theirs.std()) > 0.05


def test_a_run_continues_only_with_its_own_setting(tmp_path: Path) -> None:
    with ml.Run(**RUN, **MUP) as run:
        run.step()
        run.save(tmp_path)
        second = run.step()
    with ml.Run(**RUN, **MUP, load=tmp_path) as run:
        assert run.step().loss == second.loss
    with pytest.raises(CheckpointError, match="--use-mup is False here and True there"), ml.Run(**RUN, load=tmp_path):
        pass
