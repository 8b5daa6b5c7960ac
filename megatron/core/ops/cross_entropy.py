"""Kernels of cross entropy on a rank's logits ``[n, v]``: ``n`` tokens, ``v`` ids of the rank's vocabulary shard."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.device import Compiler, inductor

_CPU_CHUNK_BYTES = 2 << 20  # fits in a CPU's cache
GPU_CHUNK_BYTES = 128 << 20  # enough to keep a GPU busy


class CrossEntropyKernel(Protocol):
    """The passes over all logits; ``v`` is 0 on a rank whose ids are all padding."""

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Log-sum-exp of each row, ``[n]`` in ``dtype``."""

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """Overwrite ``logits`` with their gradient: ``gradient [n]`` times the probabilities
        ``exp(logits - log_sum_exp)``, plus ``at_label [n]`` at ``columns [n]``."""


class EagerCrossEntropy:
    """Converts ``chunk_bytes`` of rows to fp32 at a time, so that fp32 logits of a whole microbatch are never allocated
    and a CPU finds each chunk in its cache. The default depends on the device."""

    def __init__(self, chunk_bytes: int | None = None) -> None:
        self._chunk_bytes = chunk_bytes

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        log_sum_exp = torch.full((logits.shape[0],), -math.inf, dtype=dtype, device=logits.device)
        for part in self._chunks(logits, dtype):
            torch.logsumexp(logits[part].to(dtype), dim=-1, out=log_sum_exp[part])
        return log_sum_exp

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        for part in self._chunks(logits, log_sum_exp.dtype):
            chunk = logits[part]
            # In place if the logits have this dtype, else a copy.
            probabilities = chunk.to(log_sum_exp.dtype).sub_(log_sum_exp[part, None]).exp_()
            probabilities.mul_(gradient[part, None]).scatter_add_(-1, columns[part, None], at_label[part, None])
            chunk.copy_(probabilities)

    def _chunks(self, logits: Tensor, dtype: torch.dtype) -> Iterator[slice]:
        """Slices of the rows of ``[n, v]``, each of at most ``chunk_bytes`` in ``dtype``; none if ``v`` is 0."""
        tokens, width = logits.shape
        if width == 0:
            return
        size = self._chunk_bytes or (_CPU_CHUNK_BYTES if logits.device.type == "cpu" else GPU_CHUNK_BYTES)
        step = max(1, size // (width * dtype.itemsize))
        for start in range(0, tokens, step):
            yield slice(start, start + step)


class CompiledCrossEntropy:
    """All rows at once through a compiler, which fuses the conversion to fp32."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self._log_sum_exp = compiler(wide_log_sum_exp)
        self._write_gradient = compiler(_write_gradient)

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        if logits.shape[1] == 0:
            return torch.full((logits.shape[0],), -math.inf, dtype=dtype, device=logits.device)
        log_sum_exp: Tensor = self._log_sum_exp(logits, dtype)
        return log_sum_exp

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        if logits.shape[1] > 0:
            self._write_gradient(logits, log_sum_exp, columns, gradient, at_label)


def wide_log_sum_exp(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.logsumexp(logits.to(dtype), dim=-1)


def compared_with_columns(
    logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
) -> Tensor:
    """The gradient of the logits in the dtype of ``log_sum_exp``; compares every column with the label's, since a
    scatter would be a separate kernel."""
    probabilities = (logits.to(log_sum_exp.dtype) - log_sum_exp[:, None]).exp()
    is_label = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    return probabilities * gradient[:, None] + torch.where(is_label, at_label[:, None], 0.0)


def _write_gradient(logits: Tensor, *more: Tensor) -> None:
    logits.copy_(compared_with_columns(logits, *more))
