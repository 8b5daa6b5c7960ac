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
    y: Tensor = Operator.apply(x, lambda x: x.clone(), lambda dy: communicator.all_reduce(dy.clone()))
    return y


def reduce_from_ranks(communicator: Communicator, x: Tensor) -> Tensor:
    """g: the sum of the ``x`` of all ranks, with which every rank computes the same."""
    y: Tensor = Operator.apply(x, lambda x: communicator.all_reduce(x.clone()), lambda dy: dy)
    return y


def gather_rows(communicator: Communicator, x: Tensor) -> Tensor:
    """f of sequence parallelism: all rows ``[s, h]`` of the ``[s / n, h]`` of each rank; every rank computes another
    part of what follows."""
    y: Tensor = Operator.apply(x, communicator.all_gather, communicator.reduce_scatter)
    return y


def scatter_rows(communicator: Communicator, x: Tensor) -> Tensor:
    """g of sequence parallelism: the sum of the ``x`` ``[s, h]`` of all ranks, of which each rank has its rows
    ``[s / n, h]``."""
    y: Tensor = Operator.apply(x, communicator.reduce_scatter, communicator.all_gather)
    return y


def shard(communicator: Communicator, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's parts of the weights ``[2 f, h]`` (gate above up) and ``[h, f]``: ``[2 f / n, h]``, gate above up,
    and ``[h, f / n]``. ``communicator.own_part(t)`` is this rank's part of dim 0."""
    gate, up = gate_up.chunk(2)
    rows = torch.cat([communicator.own_part(gate), communicator.own_part(up)])
    return rows, communicator.own_part(down.T).T


def block(
    communicator: Communicator, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, sequence_parallel: bool
) -> Tensor:
    """``x + (silu(y @ gate.T) * (y @ up.T)) @ down.T`` for ``y = rms_norm(x, norm)``, with weights of :func:`shard`.

    ``x`` and the result are ``[s, h]``, the same on all ranks; with ``sequence_parallel`` they are ``[s / n, h]``, this
    rank's rows. Every rank has the whole ``norm`` ``[h]``, whose gradient must be that of all rows.
    """
    if sequence_parallel:
        y = gather_rows(communicator, rms_norm(x, copy_to_ranks(communicator, norm)))
    else:
        y = copy_to_ranks(communicator, rms_norm(x, norm))
    gate, up = (y @ gate_up.T).chunk(2, dim=-1)  # [s, f / n] each
    partial = (torch.nn.functional.silu(gate) * up) @ down.T  # [s, h], of this rank's part of f
    return x + (scatter_rows if sequence_parallel else reduce_from_ranks)(communicator, partial)
