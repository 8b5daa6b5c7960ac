"""From tokens to rows sorted by expert and back, as differentiable functions.

A token ``[h]`` of n has k choices. Choice ``i k + j`` is choice j of token i. A row is the token of one choice, for one
expert. Sums over the choices of a token are in the order of the choices and need no atomic additions, so they are
deterministic.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Which choice each row is, and where the row of each choice is."""

    choices: Tensor
    """The choice of each row: ``[m]`` int64."""
    rows: Tensor
    """The row of each choice, m if this rank has no such row: ``[n, k]`` int64."""

    @classmethod
    def sorted_by(cls, keys: Tensor, num_rows: int | None = None) -> "RowOrder":
        """Rows in the order of the ``keys`` ``[n, k]`` of their choices, equal keys in the order of the choices; only
        the first ``num_rows`` if given."""
        choices = keys.flatten().argsort(stable=True)[:num_rows]
        numbers = torch.arange(choices.numel(), device=keys.device)
        rows = torch.full_like(keys, choices.numel(), dtype=torch.int64)
        rows.view(-1).scatter_(0, choices, numbers)
        return cls(choices, rows)

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row: ``[m]``."""
        return self.choices // self.rows.shape[1] if self.rows.shape[1] > 1 else self.choices


def rows_of(tokens: Tensor, order: RowOrder) -> Tensor:
    """The row of every choice: ``tokens`` ``[n, h]`` to ``[m, h]``."""
    rows: Tensor = _RowsOf.apply(tokens, order)
    return rows


def sum_of_choices(rows: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
    """For each token the sum of the rows of its choices, times ``weights`` ``[n, k]`` if given: ``rows`` ``[m, h]`` to
    ``[n, h]``. Choices without a row add nothing. 16-bit rows are added in fp32."""
    if weights is None:
        total: Tensor = _SumOfChoices.apply(rows, order)
    else:
        total = _WeightedSumOfChoices.apply(rows, weights, order)
    return total


def _take_rows(tokens: Tensor, order: RowOrder) -> Tensor:
    return tokens.index_select(0, order.tokens)


def _sum_choices(rows: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
    num_choices = order.rows.shape[1]
    if rows.shape[0] < order.rows.numel():
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # the row of choices that have none
    total = rows.index_select(0, order.rows[:, 0])
    if weights is not None:
        total = total * weights[:, :1]
    elif num_choices > 1 and rows.itemsize == 2:
        total = total.float()
    for choice in range(1, num_choices):
        part = rows.index_select(0, order.rows[:, choice])
        total = total.add_(part) if weights is None else total.addcmul_(part, weights[:, choice : choice + 1])
    return total.to(rows.dtype)


class _RowsOf(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return _take_rows(tokens, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_choices(gradients[0], ctx.order), None


class _SumOfChoices(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return _sum_choices(rows, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _take_rows(gradients[0], ctx.order), None


class _WeightedSumOfChoices(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return _sum_choices(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order: RowOrder = ctx.order
        gradient = _take_rows(gradients[0], order)  # [m, h]
        # Of choices whose row is on another rank, that rank computes the gradient.
        grad_weights = torch.zeros_like(weights)
        of_rows = (gradient * rows).sum(dim=1, dtype=weights.dtype)  # [m]
        grad_weights.view(-1).index_copy_(0, order.choices, of_rows)
        # In place, in the wider dtype of the two.
        gradient.mul_(weights.flatten().index_select(0, order.choices).unsqueeze(1))
        return gradient, grad_weights, None
