"""Writes the checkpoints under ``tests/checkpoint/megatron_core/`` with the PyPI package megatron-core 0.16.1.

    pip install --no-deps --target /tmp/megatron_core megatron-core==0.16.1 && pip install psutil
    for ranks in 1 2 4; do
        PYTHONPATH=/tmp/megatron_core torchrun --standalone --nproc-per-node $ranks \\
            tests/checkpoint/write_megatron_core.py tests/checkpoint/megatron_core
    done

    (cd tests/checkpoint/megatron_core && tar cJf ../megatron_core.tar.xz *)

Each start writes the fixtures of its number of ranks that do not exist. The package is called ``megatron``, too, so
this script imports nothing of this repository. ``logits.npy`` has the logits of megatron-core's own model on
``TOKENS``, in fp32 on a CPU.
"""

# Its package named megatron is not the one of this repository.
# mypy: ignore-errors

import contextlib
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

TOKENS = [5, 17, 3, 2, 26, 8, 8, 21, 0, 28, 23, 11]
VOCABULARY, PADDED, LENGTH = 29, 32, 64
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "rotary_base": 777,
    "qk_layernorm": False,
    "tied": False,
    "add_qkv_bias": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
}
CASES: dict[str, dict[str, Any]] = {
    # Llama 3.1: the longest of the frequencies are scaled.
    "llama": {"rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    "qwen2": {"tied": True, "add_qkv_bias": True, "num_query_groups": 4},
    "qwen3": {"tied": True, "qk_layernorm": True},
    "mixtral": {"num_experts": 4, "moe_ffn_hidden_size": 8},
    # One dense layer before the layer of experts.
    "qwen3_moe": {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": [0, 1], "qk_layernorm": True},
}
FORMS: dict[str, dict[str, Any]] = {
    # Layers stacked in one tensor, as Megatron-LM saves equal layers.
    "stacked": {"singleton_local_shards": False},
    # A tensor for each layer.
    "layers": {"singleton_local_shards": False, "non_homogeneous_layers": True},
    # A tensor for each layer, expert, gate and up projection.
    "singletons": {"singleton_local_shards": True},
}


class Fixture(NamedTuple):
    name: str
    case: str
    form: str
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1
    is_grouped: bool = False
    """The experts of a layer are one module (GroupedMLP); it computes only on GPUs."""
    has_optimizer: bool = False
    source: str | None = None
    """The fixture with the weights, which megatron-core loads; None draws them and records the logits."""

    @property
    def ranks(self) -> int:
        return max(self.tensor * self.pipeline, self.experts)


FIXTURES = (
    Fixture("llama", "llama", "stacked"),
    Fixture("qwen2", "qwen2", "stacked", has_optimizer=True),
    Fixture("qwen3", "qwen3", "singletons"),
    Fixture("mixtral", "mixtral", "stacked"),
    Fixture("qwen3_moe", "qwen3_moe", "layers"),
    Fixture("mixtral_ep2", "mixtral", "singletons", experts=2, source="mixtral"),
    Fixture("mixtral_grouped_ep2", "mixtral", "stacked", experts=2, is_grouped=True, source="mixtral"),
    Fixture("llama_tp2_pp2", "llama", "stacked", tensor=2, pipeline=2, source="llama"),
)


def pretend_gpu() -> None:
    """megatron-core moves some tensors to the current CUDA device; there is none."""
    experts.gg.assert_grouped_gemm_is_available = lambda: None
    # A name that the module defines only with Transformer Engine.
    moe_utils.te_general_gemm = None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


def build(sizes: dict[str, Any], fixture: Fixture) -> GPTModel:
    """megatron-core's model of this rank."""
    more = {}
    if sizes["num_experts"]:
        names = ("moe_layer_freq", "moe_router_topk", "moe_ffn_hidden_size")
        more = {name: sizes[name] for name in names}
        more |= {
            "num_moe_experts": sizes["num_experts"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    config = TransformerConfig(
        **{name: sizes[name] for name in (*same, "qk_layernorm", "add_qkv_bias")},
        tensor_model_parallel_size=fixture.tensor,
        pipeline_model_parallel_size=fixture.pipeline,
        expert_model_parallel_size=fixture.experts,
        sequence_parallel=bool(sizes["num_experts"]) and fixture.tensor > 1,
        normalization="RMSNorm",
        layernorm_epsilon=1e-4,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
        **more,
    )
    if isinstance(sizes["moe_layer_freq"], list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=sizes["num_experts"],
            moe_grouped_gemm=fixture.is_grouped,
            qk_layernorm=sizes["qk_layernorm"],
            normalization="RMSNorm",
        )
    return GPTModel(
        config,
        spec,
        PADDED,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=sizes["rotary_base"],
        rope_scaling=sizes["use_rope_scaling"],
        rope_scaling_factor=sizes["rope_scaling_factor"],
        share_embeddings_and_output_weights=sizes["tied"],
        parallel_output=False,
    )


@torch.no_grad()
def randomize(model: GPTModel) -> None:
    """Weights with which a wrong row, gain or norm changes the logits."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + torch.linspace(-0.4, 0.4, parameter.numel()) * (1 + len(name) % 3))
        else:
            parameter.copy_(torch.randn(parameter.shape) * 0.5)


@torch.no_grad()
def logits_of(model: GPTModel) -> np.ndarray:
    """``[tokens, vocabulary]``"""
    tokens = torch.tensor([TOKENS])
    count = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, count, count, dtype=torch.bool), 1)
    model.eval()
    return model(tokens, torch.arange(count)[None], mask)[0, :, :VOCABULARY].numpy()


def optimizer_of(model: GPTModel) -> FP32Optimizer:
    """AdamW after one step."""
    adam = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    tensor = torch.tensor
    # megatron-core's optimizer keeps its scale on the GPU.
    with mock.patch.object(torch, "tensor", lambda *values, device=None, **more: tensor(*values, **more)):
        return FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=0.0), lambda *_: None)


def arguments_of(sizes: dict[str, Any], fixture: Fixture) -> Namespace:
    """The arguments of Megatron-LM that describe the model, and some with values of other kinds."""
    names = sizes.keys() - {"tied"}
    return Namespace(
        **{name: sizes[name] for name in sorted(names)},
        group_query_attention=sizes["num_query_groups"] != sizes["num_attention_heads"],
        max_position_embeddings=LENGTH,
        seq_length=LENGTH,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_interleaved=False,
        norm_epsilon=1e-4,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        apply_layernorm_1p=False,
        untie_embeddings_and_output_weights=not sizes["tied"],
        make_vocab_size_divisible_by=4,
        padded_vocab_size=PADDED,
        init_method_std=0.02,
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        vocab_size=VOCABULARY - 1,
        vocab_file=None,
        merge_file=None,
        params_dtype=torch.float32,
        bf16=False,
        fp16=False,
        iteration=7,
        tensor_model_parallel_size=fixture.tensor,
        pipeline_model_parallel_size=fixture.pipeline,
        expert_model_parallel_size=fixture.experts,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        model_type=ModelType.encoder_or_decoder,
        data_path=["1.0", "corpus"],
        rank=0,
    )


def save(fixture: Fixture, root: Path) -> None:
    """Write one fixture; a collective of all ranks."""
    sizes = COMMON | CASES[fixture.case]
    parallel_state.initialize_model_parallel(
        fixture.tensor, fixture.pipeline, expert_model_parallel_size=fixture.experts
    )
    model = build(sizes, fixture)
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    directory = root / fixture.name / "iter_0000007"
    if fixture.source is None:
        randomize(model)
    else:
        source = next(one for one in FIXTURES if one.name == fixture.source)
        wanted = {"model": model.sharded_state_dict(metadata=FORMS[source.form] | group)}
        model.load_state_dict(dist_checkpointing.load(wanted, str(root / source.name / directory.name))["model"])
    state = {
        "args": arguments_of(sizes, fixture),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": FORMS[fixture.form],
        "model": model.sharded_state_dict(metadata=FORMS[fixture.form] | group),
    }
    if fixture.has_optimizer:
        state["optimizer"] = optimizer_of(model).sharded_state_dict(state["model"])
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
        (directory.parent / "latest_checkpointed_iteration.txt").write_text("7")
        if fixture.source is None:
            np.save(directory.parent / "logits.npy", logits_of(model), allow_pickle=False)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(directory), ("torch_dist", 1))
    parallel_state.destroy_model_parallel()


def main(root: Path) -> None:
    torch.distributed.init_process_group("gloo")
    pretend_gpu()
    for fixture in FIXTURES:
        if fixture.ranks == torch.distributed.get_world_size() and not (root / fixture.name).exists():
            save(fixture, root)
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
