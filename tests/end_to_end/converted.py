"""Small models of transformers and of this code, and conversions between them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.finding import find_checkpoint
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.streaming import SavedTensors
from megatron.commands import convert_checkpoint
from megatron.commands.checkpoints import DtypeName
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace
from megatron.core.models.transformer import TransformerModel
from megatron.core.topology import single_process
from tests.checkpoint.models import assert_equal, weights_under
from tests.end_to_end.run_process import FlagValue
from tests.model import reference
from tests.model.reference import architecture, fp32_means_fp64, random_model, relative_error
from tests.whole_model import logits_of

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 61


def their_model(tied: bool, family: str = "llama") -> Any:
    """A small model of transformers in fp32; untied with scaled rotary embeddings."""
    return random_model(architecture(scaling=not tied, tied=tied, tp=1, family=family), torch.float32)


DENSE_RUN: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "mock_data": True,
    "vocab_size": 61,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "train_iters": 2,
    "lr": 1e-2,
    "num_workers": 0,
    "device": "cpu",
}


def from_hf(
    source: Path, save: Path, dtype: DtypeName = "keep", iteration: int = 0, apply_layernorm_1p: bool = False
) -> str:
    return convert_checkpoint.convert(FromHuggingFace(str(source), str(save), dtype, iteration, apply_layernorm_1p))


def to_hf(load: Path, target: Path, tokenizer: bool = False, **flags: Any) -> str:
    return convert_checkpoint.convert(ToHuggingFace(str(load), str(target), tokenizer=tokenizer, **flags))


def assert_same_weights(found: Path, wanted: Path) -> None:
    assert_equal(weights_under(found), weights_under(wanted))


def continued(advice: str, save: Path, **flags: FlagValue) -> list[str]:
    """The command that the tool advised, for a step on mock data that changes no weight."""
    words = shlex.split(advice.splitlines()[-1].partition("pretrain_llama.py ")[2])
    step = "--mock-data --seq-length 32 --micro-batch-size 2 --global-batch-size 2 --num-workers 0 --device cpu --lr 0"
    return [*words, *step.split(), "--train-iters", "1", "--vocab-size", str(VOCABULARY), "--save", str(save)]


def assert_same_logits(exported: Path, model: Any) -> None:
    """transformers loads the files as the class of ``model``, and computes the same bits."""
    again = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(again) is type(model)
    tokens = torch.arange(48).remainder(VOCABULARY).view(2, 24)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def assert_our_logits_are_theirs(converted: Path, model: Any) -> None:
    """The checkpoint in ``converted`` computes what ``model`` does, in fp64."""
    tokens = torch.arange(48).remainder(VOCABULARY).view(2, 24)
    with torch.no_grad(), fp32_means_fp64():
        wide = type(model)(model.config).double()
        wide.load_state_dict(model.state_dict())
        wanted = wide(tokens).logits
    with torch.no_grad():
        found = logits_of(our_model(converted), tokens).transpose(0, 1)
    assert relative_error(found, wanted) < 1e-9


def our_model(root: Path) -> TransformerModel:
    """The converted model in fp64, with the architecture stored in the checkpoint."""
    config = TransformerConfig(**read_checkpoint(root, 0).state["architecture"])
    weights = {name: weight.double() for name, weight in tensors_of(root, iteration=0).items()}
    return reference.our_model(config, weights, single_process())


def tensors_of(root: Path, prefix: str = "model/", iteration: int | None = None) -> dict[str, Tensor]:
    """The global tensors of a checkpoint with ``prefix``; without ``iteration`` of the latest."""
    iteration = find_checkpoint(root) if iteration is None else iteration
    assert iteration is not None
    saved = SavedTensors(root, iteration)
    tensors = {}
    for name, stored in saved.manifest.tensors.items():
        if name.startswith(prefix):
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            saved.read_into(whole, name, tuple(slice(0, size) for size in stored.shape))
            tensors[name.removeprefix(prefix)] = whole
    return tensors
