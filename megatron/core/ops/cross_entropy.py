"""The parts of a cross entropy that go over all scores ``[n, v]``; scores of a rank, labels as its columns."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

_CPU_CHUNK_BYTES = 2 << 20  # a CPU's cache holds that
GPU_CHUNK_BYTES = 128 << 20  # enough to keep a GPU busy


class CrossEntropyKernel(Protocol):
    """What forward and backward pass do with the scores; there may be none, ``v`` = 0."""

    def log_sum(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Log of the sum of the exponentials of each row, ``[n]`` in ``dtype``."""

    def write_gradient(
        self, scores: Tensor, log_sum: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """Overwrite ``scores`` with their gradient: ``gradient [n]`` times the probabilities ``exp(scores - log_sum)``,
        and ``at_label [n]`` more in ``columns [n]``."""


class EagerCrossEntropy:
    """Widens some rows at a time, so that no fp32 scores of a whole microbatch ever exist, and on a CPU nothing leaves
    its cache between the operations on it.

    ``chunk_bytes`` are widened at once, by default what suits the device.
    """

    def __init__(self, chunk_bytes: int | None = None) -> None:
        self._chunk_bytes = chunk_bytes

    def log_sum(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """As in the protocol."""
        log_sum = torch.full((scores.shape[0],), -math.inf, dtype=dtype, device=scores.device)
        for part in self._chunks(scores, dtype):
            torch.logsumexp(scores[part].to(dtype), dim=-1, out=log_sum[part])
        return log_sum

    def write_gradient(
        self, scores: Tensor, log_sum: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """As in the protocol."""
        for part in self._chunks(scores, log_sum.dtype):
            some = scores[part]
            # A view of the scores where these are wide, otherwise a copy.
            probabilities = some.to(log_sum.dtype).sub_(log_sum[part, None]).exp_()
            probabilities.mul_(gradient[part, None]).scatter_add_(-1, columns[part, None], at_label[part, None])
            some.copy_(probabilities)

    def _chunks(self, scores: Tensor, dtype: torch.dtype) -> Iterator[slice]:
        """Slices of the rows of ``[n, v]`` that are not too large in ``dtype``; none where there are no columns."""
        tokens, width = scores.shape
        if width == 0:
            return
        size = self._chunk_bytes or (_CPU_CHUNK_BYTES if scores.device.type == "cpu" else GPU_CHUNK_BYTES)
        step = max(1, size // (width * dtype.itemsize))
        for start in range(0, tokens, step):
            yield slice(start, start + step)


class CompiledCrossEntropy:
    """Through ``torch.compile``, whose kernels widen numbers as they read them: all rows at once."""

    def __init__(self) -> None:
        self._log_sum = torch.compile(wide_log_sum, fullgraph=True)
        self._write_gradient = torch.compile(_write_gradient, fullgraph=True)

    def log_sum(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """As in the protocol."""
        if scores.shape[1] == 0:
            return torch.full((scores.shape[0],), -math.inf, dtype=dtype, device=scores.device)
        total: Tensor = self._log_sum(scores, dtype)
        return total

    def write_gradient(
        self, scores: Tensor, log_sum: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """As in the protocol."""
        if scores.shape[1] > 0:
            self._write_gradient(scores, log_sum, columns, gradient, at_label)


def wide_log_sum(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Log of the sum of the exponentials of each row, computed in ``dtype``."""
    return torch.logsumexp(scores.to(dtype), dim=-1)


def compared_with_columns(
    scores: Tensor, log_sum: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
) -> Tensor:
    """The gradient of the scores in the wide format; every column is compared with the label's, since a scatter would
    be a kernel of its own."""
    probabilities = (scores.to(log_sum.dtype) - log_sum[:, None]).exp()
    is_label = torch.arange(scores.shape[1], device=scores.device) == columns[:, None]
    return probabilities * gradient[:, None] + torch.where(is_label, at_label[:, None], 0.0)


def _write_gradient(scores: Tensor, *more: Tensor) -> None:
    scores.copy_(compared_with_columns(scores, *more))
