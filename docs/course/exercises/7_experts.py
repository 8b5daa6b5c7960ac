"""Exercise 7: the dispatch of tokens to experts, and the way back. The page is docs/course/7_experts.md.

Fill the two holes, then: megatron-llama course check 7
"""

from typing import NamedTuple

from torch import Tensor


class Dispatched(NamedTuple):
    """The rows of a rank, sorted by expert: the token of each of its choices."""

    rows: Tensor
    """The rows: ``[n k, h]``."""
    choices: Tensor
    """The choice of each row, int64: ``[n k]``. Choice ``i k + j`` is choice j of token i."""
    rows_of_experts: list[int]
    """The number of rows of each of all experts."""
    rows_for_ranks: list[int]
    """The number of rows to send to each rank: the split sizes of the all-to-all."""


def dispatch(tokens: Tensor, experts: Tensor, num_experts: int, num_ranks: int) -> Dispatched:
    """The rows of ``tokens`` ``[n, h]``, whose token i goes to the k experts ``experts[i]``; ``experts`` is ``[n, k]``.

    Rank r has the experts from ``r * num_experts / num_ranks`` up to those of rank r + 1. Rows of one expert keep the
    order of their choices. An expert may have no tokens.
    """
    raise NotImplementedError("fill this hole")


def combine(outputs: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's outputs times their weights, ``[n, h]``: the output of the layer.

    ``outputs`` ``[n k, h]`` are those of the experts for the rows of :func:`dispatch`, in the same order; ``choices``
    are the choices of these rows. ``weights`` is ``[n, k]``; the router learns through its gradient.
    """
    raise NotImplementedError("fill this hole")
