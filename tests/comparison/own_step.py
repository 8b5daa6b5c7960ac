"""A recorded step of this code in fp64 in a process of its own, with its samples and weights as files."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron.architectures.transformer_config import TransformerConfig
from megatron.comparison.experiment import Processes, Request, batches_of, read_steps, recorded
from megatron.config.command_line import CommandLine
from megatron.features.record_tensors.recording import Recording

FLAGS = (
    "--device cpu --model tiny --mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--num-query-groups 2 --kv-channels 8 --ffn-hidden-size 24 --vocab-size 61 --make-vocab-size-divisible-by 1 "
    "--seq-length 8 --max-position-embeddings 64 --rotary-base 10000 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 --init-method-std 0.2 "
)
END = 60
"""The token at the end of a document, which every sample has."""


@dataclass(frozen=True)
class OwnStep:
    model: TransformerConfig
    recording: Recording
    batch: Path
    weights: Path


def own_step(directory: Path, flags: str = "") -> OwnStep:
    config = CommandLine.of((FLAGS + flags).split()).parse().checked()
    model = config.model.resolve(61, 1, 8)
    run, weights = directory / "ours", directory / "weights.safetensors"
    processes = Processes({"A": Path(__file__).parents[2]})
    processes("A", recorded(config, run / "records", Request(), fp64=True), 1, Request(save_weights=str(weights)), run)
    # Gains and biases that differ, so that a wrong one shows.
    generator, tensors = torch.Generator().manual_seed(7), load_file(weights)
    for name, one in tensors.items():
        if "norm" in name or name.endswith(".bias"):
            one.add_(0.3 * torch.randn(one.shape, generator=generator, dtype=one.dtype))
    save_file(tensors, weights)
    batches = batches_of(run / "records")
    for path in batches:
        samples = load_file(path)
        samples["tokens"][:, 3] = samples["labels"][:, 2] = END
        save_file(samples, path)
    again, request = directory / "again", Request(batches, str(weights))
    processes("A", recorded(config, again / "records", request, fp64=True), 1, request, again)
    return OwnStep(model, read_steps(again / "records")[0], Path(batches_of(again / "records")[0]), weights)
