"""Kernels of a simulated_rank: they make and keep what those of the real run make and keep."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.kernels.selection import Kernels, LayerKernels
from megatron.core.models.kernels import build_kernels, needs_log_sum_exp
from megatron.core.ops.attention_kernels import AttentionKernel, ReferenceAttention, choose_attention_kernel
from megatron.core.ops.cross_entropy import GPU_CHUNK_BYTES, EagerCrossEntropy
from megatron.core.ops.fp8 import product_for
from megatron.core.ops.matmul import SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.optimizer.kernels import OptimizerKernels
from megatron.core.precision import number_formats
from megatron.core.topology import Topology
from megatron.planner.memory import MemoryTracker


class _InOneKernel:
    """``kernel`` compiled: what lies between its inputs and its results is in registers."""

    def __init__(self, kernel: object, tracker: MemoryTracker) -> None:
        self._kernel, self._tracker = kernel, tracker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._kernel, name)

        def run(*arguments: Any) -> Any:
            with self._tracker.unseen():
                results = method(*arguments)
            for result in results if isinstance(results, tuple) else (results,):
                if result is not None:
                    self._tracker.note(result)
            return results

        return run


class _FusedCrossEntropy:
    """Widens numbers as it reads them, all rows at once."""

    def log_sum(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """The result alone."""
        return scores.new_empty(scores.shape[:1], dtype=dtype)

    def write_gradient(
        self, scores: Tensor, log_sum: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """Nothing: it is written over the scores."""


class _AddsInPlace:
    """A product that adds to its buffer itself needs no memory."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        """Nothing."""


def simulated_kernels(
    config: RunConfig, topology: Topology, device: torch.device, vocab_size: int, tracker: MemoryTracker
) -> Kernels:
    """For a run on CPUs the run's own; for one on GPUs (``device``) stand-ins, since which packages and compilers are
    there is not known here. Third-party kernels hold what ours hold."""
    if device.type == "cpu":
        return build_kernels(config, topology, vocab_size)

    def is_eager(operation: str) -> bool:
        wanted = config.kernels.wanted(operation)
        return wanted is not None and wanted.implementation == "eager"

    def fused(operation: str, eager: object) -> Any:
        return eager if is_eager(operation) else _InOneKernel(eager, tracker)

    cross_entropy = EagerCrossEntropy(GPU_CHUNK_BYTES) if is_eager("cross_entropy") else _FusedCrossEntropy()

    return Kernels(
        attention=_attention(config, topology, device),
        weight_gradient=_weight_gradient(config),
        # The rotation stays eager: compiled, too, it may hold a copy of what it rotates.
        layers=LayerKernels(
            rms_norm=fused("rms_norm", EagerRMSNorm()),
            swiglu=fused("swiglu", EagerSwiGLU()),
            cross_entropy=cross_entropy,
        ),
        optimizer=OptimizerKernels(),
        fp8_product=product_for(device),
        engine=None,
        choices=(),
    )


def _attention(config: RunConfig, topology: Topology, device: torch.device) -> AttentionKernel:
    wanted = config.kernels.wanted("attention")
    if wanted is not None and wanted.implementation == "reference":
        return ReferenceAttention()
    dtype = number_formats(config.precision, config.optimizer).weight
    tells = needs_log_sum_exp(config, topology)
    return choose_attention_kernel(config.model.attention_backend, device, dtype, needs_log_sum_exp=tells)


def _weight_gradient(config: RunConfig) -> WeightGradientKernel:
    wanted = config.kernels.wanted("weight_gradient")
    is_separate = wanted is not None and wanted.implementation == "separate"
    return SeparateWeightGradient() if is_separate else _AddsInPlace()
