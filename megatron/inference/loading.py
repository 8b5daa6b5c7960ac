"""A trained model for inference: from a checkpoint or a Hugging Face directory, on the ranks of a topology."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.checkpointing import load_checkpoint
from megatron.checkpoint.files import path_of
from megatron.checkpoint.finding import find_checkpoint, missing_checkpoint, read_run_state
from megatron.checkpoint.hugging_face.weights import HuggingFaceModel, fill_from_hugging_face
from megatron.checkpoint.tokenizer_files import tokenizer_of
from megatron.config.data import TokenizerConfig
from megatron.config.inference import LoadedModelConfig
from megatron.config.model import MoEConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.control import run_on_all_ranks, run_on_rank0
from megatron.core.data_parallel.strategy import whole_params
from megatron.core.key_value_cache import KeyValueCache
from megatron.core.models.layer import BuildContext, LocalProvider, RMSNorm
from megatron.core.models.parallelize import build_experts
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention import hardest_mask
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.ops.matmul import linear
from megatron.core.precision import QuantizedActivation
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.topology import Topology
from megatron.data.tokenizers import Tokenizer, build_tokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.cached_model import CachedModel
from megatron.schedules.stages import split_nearly_evenly
from megatron.training.checkpoints.state import bias_tensors, model_tensors
from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu


@dataclass(frozen=True)
class OpenModel:
    """A model with a cache on the ranks of a topology, its tokenizer, and the ids that end a text."""

    model: CachedModel
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    topology: Topology


@contextmanager
def open_model(config: LoadedModelConfig) -> Iterator[OpenModel]:
    """Join the ranks, and load the model of the flags."""
    with join_ranks(config.pipeline_model_parallel_size, config.expert_model_parallel_size) as topology:
        if config.load is not None:
            yield load_model(config.load, topology, config.ckpt_step, config.tokenizer_model)
        else:
            assert config.load_hf is not None
            yield load_hugging_face(Path(config.load_hf), topology, config.load_hf_text_only, config.tokenizer_model)


@contextmanager
def join_ranks(pipeline_size: int = 1, expert_size: int = 1) -> Iterator[Topology]:
    """The processes that torchrun started, or this one alone: ``pipeline_size`` stages, whose ranks are tensor-parallel
    and divide the experts by ``expert_size``."""
    process = Process.from_environment(os.environ)
    device = choose_device("auto", process)
    if device.type == "cpu":
        prepare_cpu(process)
    if process.world_size % pipeline_size:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pipeline_size} does not divide {process.world_size} processes: start a "
            "multiple."
        )
    ranks = process.world_size // pipeline_size
    if ranks % expert_size:
        raise ConfigError(
            f"--expert-model-parallel-size {expert_size} does not divide the {ranks} processes of a stage: use a "
            "divisor."
        )
    parallel = ParallelConfig(
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=pipeline_size,
        expert_model_parallel_size=expert_size,
        expert_tensor_parallel_size=ranks // expert_size,
    )
    with init_distributed(parallel, process, device) as topology:
        yield topology


def load_model(
    load: str, topology: Topology, ckpt_step: int | None = None, tokenizer_model: str | None = None
) -> OpenModel:
    """The model of a checkpoint under the directory or URL ``load``; ``tokenizer_model`` replaces the tokenizer's file.
    Collective."""
    root = path_of(load)
    iteration = run_on_rank0(topology.control, lambda: find_checkpoint(root, ckpt_step))
    if iteration is None:
        raise run_on_rank0(topology.control, lambda: missing_checkpoint(root))
    state = read_run_state(root, iteration)
    if tokenizer_model:
        flags = replace(state.flag_group("tokenizer", TokenizerConfig), tokenizer_model=tokenizer_model)
    else:
        flags = tokenizer_of(state, root, iteration)
    tokenizer = build_tokenizer(flags)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = halves.get(state.flag_group("precision", PrecisionConfig).name, torch.float32)
    model = build_model(state.architecture, topology, dtype)
    tensors = model_tensors(whole_params(model.parameters())) | bias_tensors(model.expert_balance)
    load_checkpoint(root, iteration, tensors, topology.control)
    return _opened(model, tokenizer, state.generation_config, topology)


def load_hugging_face(source: Path, topology: Topology, text_only: bool, tokenizer_model: str | None) -> OpenModel:
    """The model in a Hugging Face directory, of which each rank reads its part; in half precision if all of its weights
    are. Collective."""
    theirs = run_on_all_ranks(topology.control, lambda: HuggingFaceModel(source, text_only, "--load-hf-text-only"))
    flags = theirs.description.tokenizer
    if tokenizer_model:
        flags = replace(
            flags, tokenizer_type=flags.tokenizer_type or "HuggingFaceTokenizer", tokenizer_model=tokenizer_model
        )
    if flags.tokenizer_type is None:
        raise CheckpointError(f"{source} has no tokenizer: add --tokenizer-model with a tokenizer.json.")
    tokenizer = build_tokenizer(flags)
    dtypes = {theirs.weights.entry(name).dtype for name in theirs.weights.shapes}
    is_half = len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}
    model = build_model(theirs.architecture, topology, dtypes.pop() if is_half else torch.float32)
    targets = [(one.info, one.start, one.tensor) for one in whole_params(model.parameters())]
    run_on_all_ranks(
        topology.control, lambda: fill_from_hugging_face(source, theirs.weights, theirs.architecture, targets)
    )
    return _opened(model, tokenizer, theirs.description.generation_config, topology)


def _opened(
    model: TransformerModel, tokenizer: Tokenizer, generation_config: str | None, topology: Topology
) -> OpenModel:
    """A text ends at the tokenizer's end-of-document, and at ``eos_token_id`` of a ``generation_config.json``: one id
    or several."""
    found = None if generation_config is None else json.loads(generation_config).get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    stop_ids = frozenset({tokenizer.eod, *(one for one in ids if isinstance(one, int))})
    return OpenModel(CachedModel(model, topology, tokenizer.vocab_size), tokenizer, stop_ids, topology)


def build_model(
    architecture: TransformerConfig, topology: Topology, dtype: torch.dtype, with_cache: bool = True
) -> TransformerModel:
    """This rank's part of a model whose weights are zero. Collective: it creates process groups."""
    ranks, stages = topology.tensor_parallel.size, topology.pipeline_parallel.size
    _check_layout(architecture, topology)
    # Multi-token prediction is a loss of training.
    padded = -(-architecture.vocab_size // ranks) * ranks
    architecture = replace(architecture, padded_vocab_size=padded, mtp_num_layers=0)
    # Without sequence parallelism every tensor-parallel rank sends the same tokens to the experts: more work than
    # needed, and the same result.
    experts = build_experts(architecture, MoEConfig(), topology)
    has_sinks = architecture.softmax_type != "vanilla"
    context = BuildContext(
        TensorParallel(topology.tensor_parallel),
        dtype,
        topology.device,
        choose_attention_kernel("auto", topology.device, dtype, has_sinks, hardest_mask(architecture)),
        experts=experts,
        provider=ForwardProvider() if with_cache else LocalProvider(),
        cache=KeyValueCache(topology.device, architecture.attention_chunk_size, has_sinks) if with_cache else None,
    )
    virtual_stages = split_nearly_evenly(architecture.num_layers, stages)
    model = TransformerModel(architecture, context, [virtual_stages[topology.pipeline_parallel.rank]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the vocabulary's padding, which is in no checkpoint
    return model


def _check_layout(architecture: TransformerConfig, topology: Topology) -> None:
    """Raise :class:`ConfigError` if the ranks cannot divide the model."""
    ranks, stages = topology.tensor_parallel.size, topology.pipeline_parallel.size
    experts, expert_ranks = architecture.num_experts or 0, topology.grid.ep
    if expert_ranks > 1 and (not experts or experts % expert_ranks):
        raise ConfigError(
            f"--expert-model-parallel-size {expert_ranks} does not divide the {experts} experts of the model: use a "
            "divisor, or remove it."
        )
    # The widths of the MLP of dense layers, of an expert, and of the shared expert, of those that the model has.
    is_moe = architecture.moe_layers()
    expert_widths = [architecture.moe_ffn_hidden_size, architecture.moe_shared_expert_intermediate_size]
    widths = [] if all(is_moe) else [architecture.ffn_hidden_size]
    widths += [width for width in expert_widths if any(is_moe) and width is not None]
    if any(size % ranks for size in (architecture.num_query_groups, *widths)):
        raise ConfigError(
            f"{ranks} processes cannot divide {architecture.num_query_groups} key-value heads and an MLP of width "
            f"{' and '.join(map(str, widths))}: start a divisor of all, times --pipeline-model-parallel-size."
        )
    if stages > architecture.num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} is more than the model has layers: use {architecture.num_layers} "
            "or fewer."
        )


# --- layers -------------------------------------------------------------------------------------------------


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """``inputs [..., k] @ weight [n, k]^T``. For one row torch's matrix-vector product needs no copy of the weight."""
    if inputs.numel() == inputs.shape[-1] and inputs.dtype.itemsize > 2:
        return F.linear(inputs, weight)
    return linear(inputs, weight)


class _Column(ColumnParallelLinear):
    def forward(self, inputs: Tensor | QuantizedActivation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return product(inputs, self.weight)


class _Row(RowParallelLinear):
    def forward(self, inputs: Tensor | QuantizedActivation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return self.op.parallel.reduce_output(product(inputs, self.weight)).wait()


class _Norm(RMSNorm):
    def forward(self, x: Tensor, quantization: DelayedQuantization | None = None) -> Tensor | QuantizedActivation:
        if self.is_zero_centered:
            return super().forward(x)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


class ForwardProvider(LocalProvider):
    """The layers of :class:`LocalProvider` for passes without gradients or sequence parallelism."""

    norm, column, row = _Norm, _Column, _Row
