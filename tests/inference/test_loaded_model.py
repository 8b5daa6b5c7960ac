"""Flags of tools that use a trained model: what is wrong with them is said in one sentence."""

from typing import Any

import pytest

from megatron.config.inference import LoadedModelConfig
from megatron.errors import ConfigError

HF: dict[str, Any] = {"load_hf": "model"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "Exactly one of --load and --load-hf is needed, and none of them is given: correct it."),
        (
            {"load": "a", "load_hf": "b"},
            "Exactly one of --load and --load-hf is needed, and both are given: correct it.",
        ),
        ({**HF, "ckpt_step": 3}, "--ckpt-step needs --load: add it, or remove --ckpt-step."),
        (
            {"load": "a", "load_hf_text_only": True},
            "--load-hf-text-only needs --load-hf: add it, or remove --load-hf-text-only.",
        ),
        ({**HF, "pipeline_model_parallel_size": 0}, "--pipeline-model-parallel-size 0 must be at least 1."),
        ({**HF, "expert_model_parallel_size": 0}, "--expert-model-parallel-size 0 must be at least 1."),
    ],
)
def test_mistakes_are_one_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        LoadedModelConfig(**flags).check()
    assert str(found.value) == sentence


def test_a_checkpoint_or_a_directory_is_accepted() -> None:
    LoadedModelConfig(load="s3://bucket/run", ckpt_step=3).check()
    LoadedModelConfig(**HF, load_hf_text_only=True).check()
