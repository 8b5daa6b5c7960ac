"""Kernels of a simulated rank: they allocate and save what the kernels of the real run allocate and save."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.kernels.grouped import obstacle_to_grouped_mm, torch_grouped_gemm
from megatron.core.kernels.selection import Kernels, LayerKernels
from megatron.core.models.kernels import build_kernels, expert_sizes, needs_log_sum_exp
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.attention_kernels import (
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    choose_attention_kernel,
)
from megatron.core.ops.cross_entropy import GPU_CHUNK_BYTES, EagerCrossEntropy
from megatron.core.ops.fp8 import (
    DelayedQuantization,
    EagerQuantization,
    Fp8Kernels,
    SeparateFp8WeightGradient,
    gemm_for,
)
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import EagerRMSNorm, NormThenQuantization
from megatron.core.ops.rope import Rotation, rotate_, rotated
from megatron.core.ops.swiglu import EagerSwiGLU, SwiGLUThenQuantization
from megatron.core.optimizer.kernels import OptimizerKernels
from megatron.core.precision import number_formats
from megatron.core.quantized import Layout, QuantizedTensor
from megatron.core.topology import Topology
from megatron.planner.memory import MemoryTracker

_ATTENTION: dict[str, Callable[[], AttentionKernel]] = {
    "cudnn": CudnnAttention,
    "flash": CudaFlashAttention,
    "reference": ReferenceAttention,
}
"""Kernels that are simulated as themselves if a flag requires them."""


class _Fused:
    """``kernel`` with every method as one kernel, as if compiled or written in Triton
    (:meth:`~megatron.planner.memory.MemoryTracker.fused`)."""

    def __init__(self, kernel: object, tracker: MemoryTracker) -> None:
        self._kernel, self._tracker = kernel, tracker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._tracker.fused, getattr(self._kernel, name))


class _CompiledSwiGLU(SwiGLUThenQuantization, _Fused):
    """:class:`~megatron.core.ops.swiglu.CompiledSwiGLU`."""


class _TritonSwiGLU(_Fused):
    """:class:`~megatron.core.backends.triton.swiglu.TritonSwiGLU`: the reciprocal of the scale, and one kernel."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        eagerly = replace(quantization, quantization=EagerQuantization())

        def run(gate_and_up: Tensor) -> tuple[Tensor | None, ...]:
            found = EagerSwiGLU().quantized(gate_and_up, eagerly)
            return found.data, found.transposed

        inverse_scale = quantization.scale.reciprocal()
        data, transposed = self._tracker.fused(run, gate_and_up)
        return QuantizedTensor(data, inverse_scale, transposed)


class _CompiledRMSNorm(NormThenQuantization, _Fused):
    """:class:`~megatron.core.ops.norm.CompiledRMSNorm`, whose output is quantised by other kernels."""


class _TritonRMSNorm(_Fused):
    """:class:`~megatron.core.backends.triton.rms_norm.TritonRMSNorm`: the reciprocal of the scale, a kernel for the
    inverse RMS and the rows, and one for the transpose."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        eagerly = replace(quantization, quantization=EagerQuantization(), layout=Layout.BOTH)

        def rows(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            output, inverse_rms = EagerRMSNorm().quantized(inputs, weight, epsilon, eagerly)
            return output.data if Layout.ROWS in quantization.layout else output.data.new_empty(0), inverse_rms

        def transpose(inputs: Tensor, weight: Tensor, inverse_rms: Tensor) -> Tensor | None:
            return eagerly.quantize(inputs * inverse_rms * weight).transposed

        inverse_scale = quantization.scale.reciprocal()
        data, inverse_rms = self._tracker.fused(rows, inputs, weight)
        transposed = None
        if Layout.TRANSPOSED in quantization.layout:
            transposed = self._tracker.fused(transpose, inputs, weight, inverse_rms)
        return QuantizedTensor(data, inverse_scale, transposed), inverse_rms


class _CompiledRotation:
    """:class:`~megatron.core.ops.rope.CompiledRotation`: a kernel writes a temporary, a second one copies it back."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def __call__(self, activations: Tensor, table: Tensor) -> Tensor:
        is_conjugate = table.is_conj()
        plain = table.conj() if is_conjugate else table
        turned = self._tracker.fused(rotated, activations, torch.view_as_real(plain), -1 if is_conjugate else 1)
        return activations.copy_(turned)


class _FusedQuantization:
    """:class:`~megatron.core.backends.triton.quantize.TritonQuantization`: one kernel, and under delayed scaling the
    reciprocal of the scale before."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker, self._eager = tracker, EagerQuantization()

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        amax: Tensor,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        def run(tensor: Tensor, scale: Tensor, out: Tensor | None) -> tuple[Tensor | None, ...]:
            found = self._eager.quantize(tensor, scale, amax, dtype, layout, out)
            return found.data, found.inverse_scale, found.transposed

        return QuantizedTensor(*self._tracker.fused(run, tensor, scale, out))

    def quantize_and_record(
        self, tensor: Tensor, scale: Tensor, step_amax: Tensor, dtype: torch.dtype, layout: Layout
    ) -> QuantizedTensor:
        inverse_scale = scale.reciprocal()
        return replace(self.quantize(tensor, scale, step_amax, dtype, layout), inverse_scale=inverse_scale)

    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        scale: Tensor = self._tracker.fused(self._eager.current_scale, amax, dtype, margin)
        return scale

    def transpose(self, data: Tensor) -> Tensor:
        transposed: Tensor = self._tracker.fused(self._eager.transpose, data)
        return transposed


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

    def chosen(operation: str, eager: object, fused: object) -> Any:
        return eager if is_forced(operation, "eager") else fused

    forced = config.kernels.wanted("attention")
    if forced is not None and forced.implementation in _ATTENTION:
        attention = _ATTENTION[forced.implementation]()
    else:
        attention = choose_attention_kernel(
            config.model.attention_backend,
            device,
            number_formats(config.precision, config.optimizer).weight,
            needs_log_sum_exp=needs_log_sum_exp(config, topology),
            masks_attention=config.masks_attention,
        )
    separate_gradient = is_forced("weight_gradient", "separate")
    weight_gradient: WeightGradientKernel = SeparateWeightGradient() if separate_gradient else InPlaceWeightGradient()
    rotate: Rotation = chosen("rope", rotate_, partial(tracker.fused, rotate_))
    if is_forced("rope", "compiled"):
        rotate = _CompiledRotation(tracker)
    gemm = gemm_for(device)
    fp8_weight_gradient: Any = SeparateFp8WeightGradient(gemm)
    if is_forced("fp8_weight_gradient", "triton"):
        fp8_weight_gradient = _Fused(fp8_weight_gradient, tracker)
    swiglu = (_CompiledSwiGLU if is_forced("swiglu", "compiled") else _TritonSwiGLU)(EagerSwiGLU(), tracker)
    writes_norms = any(is_forced("rms_norm", name) for name in ("compiled", "apex", "te"))
    rms_norm = (_CompiledRMSNorm if writes_norms else _TritonRMSNorm)(EagerRMSNorm(), tracker)
    return Kernels(
        attention=attention,
        weight_gradient=weight_gradient,
        layers=LayerKernels(
            rms_norm=chosen("rms_norm", EagerRMSNorm(), rms_norm),
            swiglu=chosen("swiglu", EagerSwiGLU(), swiglu),
            rotate=rotate,
            cross_entropy=chosen(
                "cross_entropy",
                EagerCrossEntropy(GPU_CHUNK_BYTES),
                _Fused(EagerCrossEntropy(chunk_bytes=sys.maxsize), tracker),
            ),
            grouped_gemm=_grouped_gemm(config, topology, vocab_size, weight_gradient),
        ),
        optimizer=OptimizerKernels(),
        fp8=Fp8Kernels(
            gemm,
            chosen("fp8_quantization", EagerQuantization(), _FusedQuantization(tracker)),
            fp8_weight_gradient,
        ),
        engine=None,
        choices=(),
    )


def _grouped_gemm(
    config: RunConfig, topology: Topology, vocab_size: int, weight_gradient: WeightGradientKernel
) -> GroupedGemm:
    """The grouped GEMM of a run on GPUs."""
    wanted = config.kernels.wanted("grouped_gemm")
    model = config.model.resolve(vocab_size, topology.tensor_parallel.size, config.seq_length)
    experts = expert_sizes(model, config.parallel)
    is_preferred = experts is not None and experts.count > 1
    if wanted is not None:
        is_preferred = wanted.implementation == "grouped_mm"
    dtype = number_formats(config.precision, config.optimizer).weight
    if is_preferred and obstacle_to_grouped_mm(dtype, experts) is None:
        return torch_grouped_gemm(weight_gradient)
    return LoopGroupedGemm(weight_gradient)
