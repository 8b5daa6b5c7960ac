"""Exercise 4: the operators of tensor and sequence parallelism, and an MLP in two products. The page is
docs/course/4_tensor_parallel.md.

Fill the six holes, then: megatron-llama course check 4
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication import Communicator

Change = Callable[[Tensor], Tensor]


class Operator(torch.autograd.Function):
    """A function of a tensor in the forward pass, and another one of its gradient in the backward pass. Given."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Change, backward: Change) -> Tensor:
        ctx.backward = backward
        return forward(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward(gradient), None, None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Given: each row of ``x`` ``[rows, h]``, divided by its root mean square, times ``weight`` ``[h]``."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


# Each operator is `return Operator.apply(x, what it does in the forward pass, what it does in the backward pass)`.
# communicator.all_reduce(t) overwrites t; all_gather(t) and reduce_scatter(t) join and divide dim 0, the rows.


def copy_to_ranks(communicator: Communicator, x: Tensor) -> Tensor:
    """f: every rank has ``x`` and computes another part of what follows."""
    raise NotImplementedError("fill this hole")


def reduce_from_ranks(communicator: Communicator, x: Tensor) -> Tensor:
    """g: the sum of the ``x`` of all ranks, with which every rank computes the same."""
    raise NotImplementedError("fill this hole")


def gather_rows(communicator: Communicator, x: Tensor) -> Tensor:
    """f of sequence parallelism: all rows ``[s, h]`` of the ``[s / n, h]`` of each rank; every rank computes another
    part of what follows."""
    raise NotImplementedError("fill this hole")


def scatter_rows(communicator: Communicator, x: Tensor) -> Tensor:
    """g of sequence parallelism: the sum of the ``x`` ``[s, h]`` of all ranks, of which each rank has its rows
    ``[s / n, h]``."""
    raise NotImplementedError("fill this hole")


def shard(communicator: Communicator, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's parts of the weights ``[2 f, h]`` (gate above up) and ``[h, f]``: ``[2 f / n, h]``, gate above up,
    and ``[h, f / n]``. ``communicator.own_part(t)`` is this rank's part of dim 0."""
    raise NotImplementedError("fill this hole")


def block(
    communicator: Communicator, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, sequence_parallel: bool
) -> Tensor:
    """``x + (silu(y @ gate.T) * (y @ up.T)) @ down.T`` for ``y = rms_norm(x, norm)``, with weights of :func:`shard`.

    ``x`` and the result are ``[s, h]``, the same on all ranks; with ``sequence_parallel`` they are ``[s / n, h]``, this
    rank's rows. Every rank has the whole ``norm`` ``[h]``, whose gradient must be that of all rows.
    """
    raise NotImplementedError("fill this hole")
