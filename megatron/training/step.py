"""One training iteration, and one evaluation batch: forward and backward over the microbatches, then the update.

The loss is the mean over all unmasked tokens of the global batch, in every layout: ranks and microbatches add
up losses and token counts, never means.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.data.loader import Microbatch
from megatron.training.timers import Timers


@dataclass(frozen=True)
class TokenLoss:
    """Sum of the losses of unmasked tokens, and their number."""

    total: float
    num_tokens: float

    @property
    def mean(self) -> float:
        """Loss per token; NaN without tokens."""
        return self.total / self.num_tokens if self.num_tokens else float("nan")


@dataclass(frozen=True)
class StepOutcome:
    """What an iteration tells."""

    loss: float
    grad_norm: float
    is_skipped: bool
    num_zeros: int | None


def masked_loss(model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """(sum of the losses of the unmasked tokens, number of them) of a microbatch."""
    losses = model(microbatch["tokens"], microbatch["labels"])
    mask = microbatch["loss_mask"].to(losses.dtype)
    return (losses * mask).sum(), mask.sum()


def accumulate_gradients(
    model: nn.Module, microbatches: Iterable[Microbatch], scale: float, device: torch.device
) -> Tensor:
    """Forward and backward over ``microbatches``.

    Adds the gradients of ``scale`` times the summed loss to the buffers; returns this rank's sum of losses and
    number of unmasked tokens, ``[2]`` in fp64.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for microbatch in microbatches:
        total, num_tokens = masked_loss(model, to_device(microbatch, device))
        (total * scale).backward()
        sums += torch.stack((total.detach(), num_tokens)).double()
        # It holds the graph, and with it activations, which should not live into the next forward.
        del total
    return sums


@torch.no_grad()
def evaluate_batches(
    model: nn.Module, microbatches: Iterable[Microbatch], ranks: Communicator, device: torch.device
) -> TokenLoss:
    """Loss over ``microbatches`` of all data-parallel ``ranks``, without gradients."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for microbatch in microbatches:
        sums += torch.stack(masked_loss(model, to_device(microbatch, device))).double()
    return TokenLoss(*ranks.all_reduce(sums).tolist())


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch on ``device``, copied without blocking where the loader pinned it."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in microbatch.items()}


def train_step(
    model: nn.Module,
    data_parallel: DataParallel,
    optimizer: Optimizer,
    microbatches: Iterator[Microbatch],
    *,
    expected_tokens: int,
    learning_rate: float,
    ranks: Communicator,
    device: torch.device,
    timers: Timers,
    count_zeros: bool = False,
) -> StepOutcome:
    """One iteration over this rank's ``microbatches``; a loss that is not finite makes no update.

    ``expected_tokens`` is the number of tokens in the global batch, masked or not: it keeps gradients in a
    good range until the number of unmasked ones is known. ``ranks`` are the data-parallel ranks.
    """
    with timers("forward-backward"):
        sums = accumulate_gradients(model, microbatches, 1.0 / expected_tokens, device)
    with timers("grads-reduce"):
        # The loss is needed after the gradients only, so nobody waits for it in between.
        pending_loss = ranks.start_all_reduce(sums)
        data_parallel.finish_gradients()
        loss = TokenLoss(*pending_loss.wait().tolist())
    if not math.isfinite(loss.mean):
        return StepOutcome(loss.mean, math.nan, is_skipped=True, num_zeros=None)
    with timers("optimizer"):
        result = optimizer.step(learning_rate, expected_tokens / loss.num_tokens, count_zeros)
    return StepOutcome(loss.mean, result.grad_norm, not result.is_applied, result.num_zeros)
