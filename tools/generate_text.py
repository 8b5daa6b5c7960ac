#!/usr/bin/env python3
"""Continue a text with a trained model: architecture and tokenizer come from the checkpoint.

Alone, or with tensor and pipeline parallelism under torchrun --nproc-per-node N.
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

from megatron.config.errors import CheckpointError, ConfigError, UserError, report
from megatron.config.optimizer import PrecisionConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron.core.model.llama import LlamaModel
    from megatron.core.pipeline_parallel.executor import PipelineExecutor
    from megatron.core.topology import Topology
    from megatron.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class GenerateConfig:
    """What to continue, and how."""

    load: str
    """Directory of checkpoints."""
    prompt: str
    """Text to continue."""
    ckpt_step: int | None = None
    """Iteration to load instead of the latest."""
    max_new_tokens: int = 64
    """Tokens to add at most; generation also ends at the end of a document."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 1234
    """Seed of the draw."""
    tokenizer_model: str | None = None
    """Tokenizer file, where it is no longer at the place that the checkpoint remembers."""
    pipeline_model_parallel_size: int = 1
    """Processes that share the layers in stages; each stage's layers are divided over the processes left."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
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
    from megatron.training.launch import Process, choose_device, joined, prepare_cpu

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
    with joined(parallel, process, device) as topology:
        model, tokenizer = load_model(config, topology)
        yield from continue_text(config, model, tokenizer, topology)


def load_model(config: GenerateConfig, topology: "Topology") -> "tuple[LlamaModel, Tokenizer]":
    """This rank's part of the checkpoint's model, which all ranks share, and its tokenizer."""
    import torch

    from megatron.checkpoint.checkpointing import load_checkpoint, read_state
    from megatron.checkpoint.finding import find_checkpoint
    from megatron.config.data import TokenizerConfig
    from megatron.config.model import LlamaConfig
    from megatron.config.stages import split_nearly_evenly
    from megatron.core.data_parallel.strategy import whole_weights
    from megatron.core.model.layer import BuildContext
    from megatron.core.model.llama import LlamaModel
    from megatron.core.ops.attention_kernels import choose_attention_kernel
    from megatron.core.tensor_parallel.collectives import TensorParallel
    from megatron.data.tokenizers import build_tokenizer
    from megatron.training.launch import on_first_rank
    from megatron.training.state import model_tensors

    root = Path(config.load)
    iteration = on_first_rank(topology.world, lambda: find_checkpoint(root, config.ckpt_step))
    if iteration is None:
        raise CheckpointError(f"--load {config.load} holds no checkpoint: check the path.")
    state = read_state(root, iteration)
    moved = {"tokenizer_model": config.tokenizer_model} if config.tokenizer_model else {}
    tokenizer = build_tokenizer(TokenizerConfig(**(state["flags"]["tokenizer"] | moved)))
    ranks, stages = topology.tensor_parallel.size, topology.pipeline_parallel.size
    architecture = LlamaConfig(**state["architecture"])
    if any(size % ranks for size in (architecture.num_query_groups, architecture.ffn_hidden_size)):
        raise ConfigError(
            f"{ranks} processes cannot divide {architecture.num_query_groups} key-value heads and an MLP of width "
            f"{architecture.ffn_hidden_size}: start a divisor of both, times --pipeline-model-parallel-size."
        )
    if stages > architecture.num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} is more than the model has layers: use {architecture.num_layers} "
            "or fewer."
        )
    architecture = replace(architecture, padded_vocab_size=-(-architecture.vocab_size // ranks) * ranks)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = halves.get(PrecisionConfig(**state["flags"]["precision"]).name, torch.float32)
    kernel = choose_attention_kernel("auto", topology.device, dtype)
    context = BuildContext(TensorParallel(topology.tensor_parallel), dtype, topology.device, kernel)
    virtual_stages = split_nearly_evenly(architecture.num_layers, stages)
    model = LlamaModel(architecture, context, [virtual_stages[topology.pipeline_parallel.rank]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the vocabulary's padding, which is in no checkpoint
    load_checkpoint(root, iteration, model_tensors(whole_weights(model.parameters())))
    return model, tokenizer


def continue_text(
    config: GenerateConfig, model: "LlamaModel", tokenizer: "Tokenizer", topology: "Topology"
) -> Iterator[str]:
    """Add token after token; every step computes the whole text again, which short texts can afford."""
    import torch

    from megatron.core.model.pipeline import build_executor
    from megatron.core.pipeline_parallel.schedules import build_schedule

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


def next_logits(model: "LlamaModel", executor: "PipelineExecutor", ids: list[int]) -> "Tensor | None":
    """Logits ``[vocabulary]`` of the token after ``ids``, on the last stage."""
    import torch

    from megatron.core.model.pipeline import activation_format

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
        report(error, rank)
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # At once: with several processes an orderly exit now and then ends in an abort among torch's threads, after all
    # is done (some 2 % of runs with torch 2.13 and gloo).
    os._exit(exit_code)
