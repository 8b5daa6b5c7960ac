"""One training iteration, and one evaluation batch: the microbatches through the pipeline, then the update.

The loss is the mean over all unmasked tokens of the global batch, in every layout: ranks and microbatches add
up losses and token counts, never means.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.pipeline_parallel.executor import PipelineExecutor
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
    """Whether something was not finite, so that no update was made."""
    is_fault: bool
    """Whether it was skipped and a lower loss scale will not mend it."""
    num_zeros: int | None
    num_tokens: float
    """Unmasked tokens in the global batch."""


def evaluate(
    executor: PipelineExecutor,
    microbatches: Iterator[Microbatch],
    num_microbatches: int,
    ranks: Communicator,
) -> TokenLoss:
    """Loss over ``num_microbatches`` on every data-parallel rank, without gradients; ``ranks`` as in
    :func:`train_step`."""
    return TokenLoss(*ranks.all_reduce(executor.evaluate(microbatches, num_microbatches)).tolist())


def train_step(
    executor: PipelineExecutor,
    data_parallel: DataParallel,
    optimizer: Optimizer,
    microbatches: Iterator[Microbatch],
    *,
    num_microbatches: int,
    expected_tokens: int,
    learning_rate: float,
    loss_scaler: LossScaler,
    ranks: Communicator,
    timers: Timers,
    count_zeros: bool = False,
    fp8: Fp8Layers | None = None,
    vocabulary_learning_rate: float | None = None,
    weight_decay: float | None = None,
    before_update: Callable[[], None] | None = None,
) -> StepOutcome:
    """One iteration over ``num_microbatches`` of ``microbatches``; a loss or gradients that are not finite make no
    update.

    ``expected_tokens`` is the number of tokens in the global batch, masked or not: it keeps gradients in a
    good range until the number of unmasked ones is known. ``loss_scaler`` hears whether gradients overflowed; not
    of a loss that is not finite, in which its scale has no part. ``ranks`` are those whose losses add up: the
    data-parallel ranks and the stages, of which only the last has a loss. ``vocabulary_learning_rate`` and
    ``weight_decay`` as in :meth:`Optimizer.step`.
    """
    scale = loss_scaler.scale
    if fp8 is not None:
        fp8.start_step()
    data_parallel.start_gradients(num_microbatches)
    with timers("forward-backward"):
        sums = executor.train(microbatches, num_microbatches, scale / expected_tokens)
    with timers("grads-reduce"):
        # The loss is needed after the gradients only, so nobody waits for it in between.
        pending_loss = ranks.start_all_reduce(sums)
        data_parallel.finish_gradients()
        loss = TokenLoss(*pending_loss.wait().tolist())
    if fp8 is not None:
        # Of a step that is skipped, too: its finite magnitudes tell what the next needs.
        fp8.finish_step()
    if not math.isfinite(loss.mean):
        return StepOutcome(
            loss.mean, math.nan, is_skipped=True, is_fault=True, num_zeros=None, num_tokens=loss.num_tokens
        )
    if before_update is not None:
        before_update()
    with timers("optimizer"):
        result = optimizer.step(
            learning_rate,
            expected_tokens / loss.num_tokens / scale,
            count_zeros,
            vocabulary_learning_rate=vocabulary_learning_rate,
            weight_decay=weight_decay,
        )
    is_in_order = loss_scaler.update(overflowed=not result.is_applied)
    return StepOutcome(
        loss.mean, result.grad_norm, not result.is_applied, not is_in_order, result.num_zeros, loss.num_tokens
    )
