"""What every contender of benchmarks/peers.py is given, and the parts of a step that several of them share.

The module runs in the environment of each contender, and imports torch and safetensors alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_NORM = 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0


@dataclass(frozen=True)
class Job:
    """What a rank trains."""

    peer: str
    """Name of the module ``benchmarks.lib.peers.NAME``."""
    layout: str
    """one, dp, fsdp, tp, pp or cp."""
    ranks: int
    rank: int
    store: str
    """File through which the ranks find each other."""
    device: str
    """Type of the device: cpu or cuda."""
    dtype: str
    micro_batch_size: int
    """Sequences of a microbatch on one rank."""
    model: dict[str, Any]
    """The fields of Hugging Face's ``config.json``."""
    weights: str
    """Directory with ``model.safetensors`` in Hugging Face's names and ``batches.safetensors`` [batches, b, s + 1]."""
    is_compiled: bool = False
    variant: str = ""
    """What differs from the peer's other contender in the layout."""

    @property
    def autocast(self) -> torch.autocast:
        """Computes in the dtype of the job with weights that are kept in fp32."""
        return torch.autocast(self.device, self.torch_dtype, enabled=self.dtype != "fp32")

    def size(self, layout: str) -> int:
        """Number of ranks along the axis of ``layout``."""
        return self.ranks if self.layout == layout else 1

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return DTYPES[self.dtype]

    def read_weights(self) -> dict[str, Tensor]:
        """The start weights by Hugging Face's names, in the dtype and on the device of the job."""
        weights = _read(f"{self.weights}/model.safetensors")
        return {name: weight.to(self.torch_device, self.torch_dtype) for name, weight in weights.items()}

    def read_batches(self) -> Iterator[Tensor]:
        """The batches ``[b, s + 1]``, again and again."""
        return cycle(_read(f"{self.weights}/batches.safetensors")["batches"].to(self.torch_device))

    def microbatches(self, batch: Tensor) -> tuple[Tensor, ...]:
        """This data-parallel rank's microbatches ``[micro-batch size, s + 1]``."""
        replicas = self.size("dp") * self.size("fsdp")
        mine = batch.chunk(replicas)[self.rank] if replicas > 1 else batch
        return mine.split(self.micro_batch_size)


def _read(path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


Step = Callable[[Tensor], float]
"""Trains on a batch ``[b, s + 1]`` that all ranks have; returns a share of its loss: the shares of all ranks add up to
the mean over the tokens of the batch."""


def adamw(parameters: Iterable[nn.Parameter], fused: bool = True) -> torch.optim.AdamW:
    """torch's AdamW with the hyperparameters of all contenders; norm weights have no weight decay."""
    every = list(parameters)
    groups = [
        {"params": [one for one in every if one.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in every if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=fused)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
