#!/usr/bin/env python3
"""Generate text with a trained model; architecture and tokenizer come from the checkpoint.

Runs in one process, or with tensor and pipeline parallelism under torchrun --nproc-per-node N.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError, UserError, report
from megatron.urls import check_place, refuse_urls

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron.architectures.transformer_config import TransformerConfig
    from megatron.core.models.transformer import TransformerModel
    from megatron.core.pipeline_parallel.executor import PipelineExecutor
    from megatron.core.topology import Topology
    from megatron.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class GenerateConfig:
    """Checkpoint, prompt and sampling."""

    load: str
    """Directory or URL of checkpoints."""
    prompt: str
    """Text to continue."""
    ckpt_step: int | None = None
    """Iteration to load instead of the latest."""
    max_new_tokens: int = 64
    """Maximum number of new tokens; generation also ends at end-of-document."""
    temperature: float = 0.8
    """Temperature that divides the logits; 0 is greedy."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: all."""
    top_p: float = 0.95
    """Sample from the most likely tokens with this total probability."""
    seed: int = 1234
    """Seed of the sampling."""
    tokenizer_model: str | None = None
    """Tokenizer file, if it is no longer at the path in the checkpoint."""
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size; the tensor-parallel size is the number of processes divided by it."""

    def check(self) -> None:
        check_place("--load", self.load)
        refuse_urls({"--tokenizer-model": self.tokenizer_model}, "copy the tokenizer to a local path")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ConfigError(
                "--temperature and --top-k must not be negative, --top-p must be above 0 and at most 1, and "
                "--max-new-tokens at least 1."
            )
        if self.pipeline_model_parallel_size < 1:
            raise ConfigError("--pipeline-model-parallel-size must be at least 1.")


def sample_next(logits: "Tensor", config: GenerateConfig, generator: "torch.Generator") -> int:
    """Draw the next id from ``logits`` ``[vocabulary]``."""
    import torch

    if config.temperature == 0:
        return int(logits.argmax())
    probabilities, ids = torch.softmax(logits.double() / config.temperature, dim=-1).sort(descending=True)
    # Keep a token while those before it fall short of top_p; the first always stays.
    keep = probabilities.cumsum(0) - probabilities < config.top_p
    if config.top_k:
        keep[config.top_k :] = False
    drawn = torch.multinomial(probabilities * keep, 1, generator=generator)
    return int(ids[drawn])


def generate(config: GenerateConfig) -> Iterator[str]:
    """The prompt and its continuation, in growing parts of text; the same on every rank."""
    from megatron.config.parallel import ParallelConfig
    from megatron.training.initialize import (
        Process,
        choose_device,
        init_distributed,
        prepare_cpu,
    )

    process = Process.from_environment(os.environ)
    device = choose_device("auto", process)
    if device.type == "cpu":
        prepare_cpu(process)
    stages = config.pipeline_model_parallel_size
    if process.world_size % stages:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} does not divide {process.world_size} processes: start a multiple."
        )
    parallel = ParallelConfig(
        tensor_model_parallel_size=process.world_size // stages, pipeline_model_parallel_size=stages
    )
    with init_distributed(parallel, process, device) as topology:
        model, tokenizer = load_model(config, topology)
        yield from continue_text(config, model, tokenizer, topology)


def load_model(config: GenerateConfig, topology: "Topology") -> "tuple[TransformerModel, Tokenizer]":
    """This rank's part of the checkpoint's model, which all ranks share, and its tokenizer."""
    import torch

    from megatron.checkpoint.checkpointing import load_checkpoint, read_run_state
    from megatron.checkpoint.finding import find_checkpoint
    from megatron.checkpoint.remote_path import path_of
    from megatron.config.data import TokenizerConfig
    from megatron.config.moe import MoEConfig
    from megatron.core.data_parallel.strategy import whole_params
    from megatron.core.models.layer import BuildContext
    from megatron.core.models.parallelize import build_experts
    from megatron.core.models.transformer import TransformerModel
    from megatron.core.ops.attention_kernels import choose_attention_kernel
    from megatron.core.run_on_ranks import run_on_rank0
    from megatron.core.tensor_parallel.collectives import TensorParallel
    from megatron.data.tokenizers import build_tokenizer
    from megatron.schedules.stages import split_nearly_evenly
    from megatron.training.checkpoints.tensors import bias_tensors, model_tensors

    root = path_of(config.load)
    iteration = run_on_rank0(topology.control, lambda: find_checkpoint(root, config.ckpt_step))
    if iteration is None:
        raise CheckpointError(f"--load {config.load} holds no checkpoint: check the path.")
    state = read_run_state(root, iteration)
    flags = state.flag_group("tokenizer", TokenizerConfig)
    if config.tokenizer_model:
        flags = replace(flags, tokenizer_model=config.tokenizer_model)
    tokenizer = build_tokenizer(flags)
    ranks, stages = topology.tensor_parallel.size, topology.pipeline_parallel.size
    architecture = state.architecture
    widths = mlp_widths(architecture)
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
    architecture = replace(architecture, padded_vocab_size=-(-architecture.vocab_size // ranks) * ranks)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = halves.get(state.flag_group("precision", PrecisionConfig).name, torch.float32)
    kernel = choose_attention_kernel("auto", topology.device, dtype)
    # Without sequence parallelism every tensor-parallel rank sends the same tokens to the experts: more work than
    # needed, and the same result.
    experts = build_experts(architecture, MoEConfig(), topology)
    context = BuildContext(TensorParallel(topology.tensor_parallel), dtype, topology.device, kernel, experts=experts)
    virtual_stages = split_nearly_evenly(architecture.num_layers, stages)
    model = TransformerModel(architecture, context, [virtual_stages[topology.pipeline_parallel.rank]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the vocabulary's padding, which is in no checkpoint
    tensors = model_tensors(whole_params(model.parameters())) | bias_tensors(model.expert_balance)
    load_checkpoint(root, iteration, tensors, topology.control)
    return model, tokenizer


def mlp_widths(architecture: "TransformerConfig") -> list[int]:
    """The widths of the MLP of dense layers, of an expert, and of the shared expert, of those that the model has."""
    is_moe = architecture.moe_layers()
    expert_widths = [architecture.moe_ffn_hidden_size, architecture.moe_shared_expert_intermediate_size]
    widths = [] if all(is_moe) else [architecture.ffn_hidden_size]
    return [*widths, *(width for width in expert_widths if any(is_moe) and width is not None)]


def continue_text(
    config: GenerateConfig, model: "TransformerModel", tokenizer: "Tokenizer", topology: "Topology"
) -> Iterator[str]:
    """Add token after token; every step computes the whole text again, which short texts can afford."""
    import torch

    from megatron.core.models.parallelize import build_executor
    from megatron.schedules.registry import build_schedule

    schedule = partial(build_schedule, "1f1b", topology.pipeline_parallel.size)
    executor = build_executor(model, topology, schedule, seq_length=1, micro_batch_size=1)
    generator = torch.Generator().manual_seed(config.seed)
    ids = tokenizer.tokenize(config.prompt) or [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    shown = ""
    for _ in range(config.max_new_tokens):
        logits = next_logits(model, executor, ids[-model.config.max_position_embeddings :])
        drawn = torch.tensor(0 if logits is None else sample_next(logits, config, generator))
        # The last stage alone has logits.
        last = topology.pipeline_parallel.size - 1
        ids.append(int(topology.pipeline_parallel.broadcast(drawn.to(topology.device), source=last)))
        if ids[-1] == tokenizer.eod:
            break
        text = tokenizer.detokenize(ids)
        # An unfinished character decodes to U+FFFD: wait for the rest of it.
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield "\n"


def next_logits(model: "TransformerModel", executor: "PipelineExecutor", ids: list[int]) -> "Tensor | None":
    """Logits ``[vocabulary]`` of the token after ``ids``, on the last stage."""
    import torch

    from megatron.core.models.parallelize import activation_format

    tokens = torch.tensor([ids], device=model.context.device)
    logits = executor.logits(tokens, activation_format(model, len(ids), 1))
    if logits is None:
        return None
    whole = model.context.parallel.communicator.all_gather(logits[-1, 0].float().contiguous())
    return whole.cpu()[: model.config.vocab_size]


def main() -> int:
    """Print the text as it grows; the exit code."""
    rank = int(os.environ.get("RANK", 0))
    try:
        config = tyro.cli(GenerateConfig, description=__doc__, console_outputs=rank == 0)
        config.check()
        for part in generate(config):
            if rank == 0:
                print(part, end="", flush=True)
    except UserError as error:
        report(error, rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # At once: with several processes an orderly exit now and then ends in an abort among torch's threads, after all
    # is done (some 2 % of runs with torch 2.13 and gloo).
    os._exit(exit_code)
