"""Kernels of a simulated rank: they allocate and save what the kernels of the real run allocate and save."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.kernels.selection import Kernels, LayerKernels
from megatron.core.models.kernels import build_kernels, needs_log_sum_exp
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.attention_kernels import ReferenceAttention, choose_attention_kernel
from megatron.core.ops.cross_entropy import GPU_CHUNK_BYTES, EagerCrossEntropy
from megatron.core.ops.fp8 import Fp8Kernels, gemm_for
from megatron.core.ops.matmul import SeparateWeightGradient
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.rope import rotate_
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.optimizer.kernels import OptimizerKernels
from megatron.core.precision import number_formats
from megatron.core.topology import Topology
from megatron.planner.memory import MemoryTracker


class _Compiled:
    """``kernel`` as if compiled: only its results are counted, since intermediate values stay in registers."""

    def __init__(self, kernel: object, tracker: MemoryTracker) -> None:
        self._kernel, self._tracker = kernel, tracker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._kernel, name)

        def run(*arguments: Any) -> Any:
            with self._tracker.untracked():
                results = method(*arguments)
            for result in results if isinstance(results, tuple) else (results,):
                if result is not None:
                    self._tracker.track(result)
            return results

        return run


class _FusedCrossEntropy:
    """Allocates only the log-sum-exp: it converts the logits while it reads them."""

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        return logits.new_empty(logits.shape[:1], dtype=dtype)

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """The gradient overwrites the logits."""


def _rotate_in_place(activations: Tensor, table: Tensor) -> Tensor:
    """A rotation in one kernel allocates nothing."""
    return activations


class _InPlaceWeightGradient:
    """A GEMM that accumulates into the main gradient allocates nothing."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        pass


def simulated_kernels(
    config: RunConfig, topology: Topology, device: torch.device, vocab_size: int, tracker: MemoryTracker
) -> Kernels:
    """On CPUs the kernels of the run. On GPUs (``device``) stand-ins, since the packages and compilers there are
    unknown; third-party kernels are taken to save the same tensors."""
    if device.type == "cpu":
        return build_kernels(config, topology, vocab_size)

    def is_forced(operation: str, implementation: str) -> bool:
        wanted = config.kernels.wanted(operation)
        return wanted is not None and wanted.implementation == implementation

    def compiled(operation: str, eager: object) -> Any:
        return eager if is_forced(operation, "eager") else _Compiled(eager, tracker)

    attention: AttentionKernel = ReferenceAttention()
    if not is_forced("attention", "reference"):
        attention = choose_attention_kernel(
            config.model.attention_backend,
            device,
            number_formats(config.precision, config.optimizer).weight,
            needs_log_sum_exp=needs_log_sum_exp(config, topology),
        )
    eager_loss = is_forced("cross_entropy", "eager")
    separate_gradient = is_forced("weight_gradient", "separate")
    # A compiled rotation, too, may allocate a copy of its input.
    copies_rotated = is_forced("rope", "eager") or is_forced("rope", "compiled")
    return Kernels(
        attention=attention,
        weight_gradient=SeparateWeightGradient() if separate_gradient else _InPlaceWeightGradient(),
        layers=LayerKernels(
            rms_norm=compiled("rms_norm", EagerRMSNorm()),
            swiglu=compiled("swiglu", EagerSwiGLU()),
            rotate=rotate_ if copies_rotated else _rotate_in_place,
            cross_entropy=EagerCrossEntropy(GPU_CHUNK_BYTES) if eager_loss else _FusedCrossEntropy(),
        ),
        optimizer=OptimizerKernels(),
        fp8=Fp8Kernels.eager(gemm_for(device)),
        engine=None,
        choices=(),
    )
