"""Exercise 3: the ZeRO-1 update of a rank. The page is docs/course/3_zero.md.

Fill the two holes, then: megatron-llama course check 3
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication import Communicator


@dataclass
class State:
    """The optimizer state of one rank: its shard of the model, padded to a multiple of the ranks."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor  # each [ceil(length / ranks)]
    step: int = 0
    """Updates so far."""


@dataclass(frozen=True)
class Adam:
    """AdamW with decoupled weight decay, after clipping as by torch.nn.utils.clip_grad_norm_."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float


def start(communicator: Communicator, weights: Tensor, dtype: torch.dtype) -> State:
    """The state of this rank for the model ``weights`` ``[length]``, in ``dtype``, which may be wider than that of the
    weights. ``communicator.own_part(vector)`` is this rank's part of a vector that the ranks divide."""
    raise NotImplementedError("fill this hole")


def update(communicator: Communicator, weights: Tensor, gradient: Tensor, state: State, adam: Adam) -> float:
    """Write the next weights into ``weights`` ``[length]``, all of them on each rank, and change ``state``.

    ``gradient`` ``[length]`` is that of this rank's samples; the model's is the mean over the ranks. Returns the norm
    of that mean before it is clipped to ``adam.max_norm``. ``communicator.reduce_scatter(t)`` is this rank's part of
    the sum of all ranks, ``all_gather(t)`` joins their parts, and ``all_reduce(t)`` overwrites t with the sum.
    """
    raise NotImplementedError("fill this hole")
