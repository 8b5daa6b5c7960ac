"""Small models of several architectures, and their tensors on both sides of a conversion; Megatron-LM's checkpoints."""

import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import config_fields
from megatron.checkpoint.hugging_face.mapping import Copy
from megatron.checkpoint.hugging_face.weights import HuggingFaceImport
from megatron.core.parameter import Box, ParameterInfo, columns_box, sharded_boxes

LLAMA = TransformerConfig(
    num_layers=2, hidden_size=12, ffn_hidden_size=10, num_attention_heads=4, num_query_groups=2,
    kv_channels=6, vocab_size=17, padded_vocab_size=17, max_position_embeddings=64,
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, num_layers=3, hidden_size=16, ffn_hidden_size=24, kv_channels=8, num_experts=4, moe_ffn_hidden_size=24
)
QWEN3_MOE = replace(MIXTRAL, qk_layernorm=True, moe_ffn_hidden_size=8, moe_router_topk=3, moe_layer_freq="[1,1,0]")
SCOUT = replace(
    MIXTRAL, num_layers=4, use_rope_scaling=True, rope_scaling_factor=16.0, rope_scaling_high_freq_factor=1.0,
    qk_l2_norm=True, no_rope_freq="4", attention_chunk_size=8, attention_temperature_tuning=True,
    attention_temperature_floor=4, moe_ffn_hidden_size=6, moe_router_topk=1,
    moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=6, moe_apply_probs_on_input=True,
)  # fmt: skip
MAVERICK = replace(SCOUT, use_rope_scaling=False, qk_l2_norm=False, moe_layer_freq="[0,1,0,1]")
MAVERICK = replace(MAVERICK, rope_scaling_factor=8.0, rope_scaling_high_freq_factor=4.0)


def hugging_face_model(config: TransformerConfig) -> Any:
    """The model of transformers, in plain operations of torch."""
    import transformers

    settings = transformers.AutoConfig.for_model(
        **config_fields(config, "float32"), attn_implementation="eager", experts_implementation="eager"
    )
    return transformers.AutoModelForCausalLM.from_config(settings)


def random_model(config: TransformerConfig) -> Any:
    """The model of transformers with random weights, also of norms and of what transformers leaves at zero."""
    return randomized(hugging_face_model(config))


def randomized(model: Any) -> Any:
    """The model with other weights."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def weights_under(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory of Hugging Face's."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def import_of(directory: Path) -> dict[str, Tensor]:
    """The global tensors of this code, assembled from their chunks."""
    found = HuggingFaceImport(directory, None, lambda count: None)
    return {name: torch.cat([found.read(name, rows) for rows in chunks]) for name, chunks in found.chunks.items()}


def place_of(offset: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    """The slices of a rectangle."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors in which every element has a number of its own."""
    tensors, first = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count).view(shape)
        first += count
    return tensors


def assembled(copies: Iterable[Copy], sources: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """A rectangle made of ``copies``; what none of them covers stays -1, what two cover is an error."""
    rectangle = torch.full(shape, -1)
    for copy in copies:
        assert bool((rectangle[copy.place] == -1).all())
        rectangle[copy.place] = copy.across(sources[copy.source][copy.source_place])
    return rectangle


PARTS = {"rows": (12, 6), "fused sections": (16, 6), "columns": (6, 8), "whole vector": (6,)}
"""Shapes of parameters, by how tensor parallelism divides them."""


def rank_part(kind: str, whole: Tensor, rank: int, size: int) -> tuple[ParameterInfo, Tensor]:
    """The facts of one of :data:`PARTS`, and the part of its value ``whole`` that a tensor-parallel rank has."""
    if kind == "rows":
        facts, local = sharded_boxes([12], [6], rank, size), whole.chunk(size)[rank]
    elif kind == "fused sections":
        facts = sharded_boxes([8, 4, 4], [6], rank, size)
        local = torch.cat([section.chunk(size)[rank] for section in whole.split([8, 4, 4])])
    elif kind == "columns":
        facts, local = columns_box(6, 8, rank, size), whole.chunk(size, dim=1)[rank]
    else:
        facts, local = ((6,), (6,), (Box((0,), (0,), (6,)),)), whole
    return ParameterInfo(kind, *facts, None, True, kind != "whole vector"), local


@dataclass(frozen=True)
class Bomb:
    """A pickle that leaves a mark when it is opened."""

    mark: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


# --- the checkpoints that ``write_megatron_core.py`` wrote with megatron-core 0.16.1 ---------------------------

TOKENS = [5, 17, 3, 2, 26, 8, 8, 21, 0, 28, 23, 11]
"""Their input, with which ``logits.npy`` was computed."""
ITERATION = "iter_0000007"


def unpack_fixtures(target: Path) -> Path:
    """The directory with a directory for every fixture."""
    with tarfile.open(Path(__file__).with_name("megatron_core.tar.xz")) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extractall(target, filter="data")
        else:
            archive.extractall(target)
    return target
