"""Triton's kernels on tensors without memory: what each launches and allocates, in torch's operations.

A :data:`~megatron.core.device.Compiler` says what one kernel is.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.device import Compiler
from megatron.core.ops.fp8 import DelayedQuantization, EagerQuantization, ScaledGemm, SeparateFp8WeightGradient
from megatron.core.ops.norm import CompiledRMSNorm, normalise
from megatron.core.ops.swiglu import CompiledSwiGLU, swiglu_reference
from megatron.core.precision import Layout, QuantizedTensor


class SimulatedSwiGLU(CompiledSwiGLU):
    """:class:`~megatron.core.backends.triton.elementwise.TritonSwiGLU`: the reciprocal of the scale, and one kernel."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        eagerly = replace(quantization, quantization=EagerQuantization())

        def write(gate_and_up: Tensor) -> tuple[Tensor | None, ...]:
            found = eagerly.quantize(swiglu_reference(gate_and_up))
            return found.data, found.transposed

        inverse_scale = quantization.scale.reciprocal()
        data, transposed = self._compiler(write)(gate_and_up)
        return QuantizedTensor(data, inverse_scale, transposed)


class SimulatedRMSNorm(CompiledRMSNorm):
    """:class:`~megatron.core.backends.triton.elementwise.TritonRMSNorm`: the reciprocal of the scale, a kernel for the
    inverse RMS and the rows, and one for the transpose."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        eagerly = replace(quantization, quantization=EagerQuantization(), layout=Layout.BOTH)

        def write_rows(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            output, inverse_rms = normalise(inputs, weight, epsilon)
            data = eagerly.quantize(output).data
            return data if Layout.ROWS in quantization.layout else data.new_empty(0), inverse_rms

        def write_transpose(inputs: Tensor, weight: Tensor, inverse_rms: Tensor) -> Tensor | None:
            return eagerly.quantize(inputs * inverse_rms * weight).transposed

        inverse_scale = quantization.scale.reciprocal()
        data, inverse_rms = self._compiler(write_rows)(inputs, weight)
        transposed = None
        if Layout.TRANSPOSED in quantization.layout:
            transposed = self._compiler(write_transpose)(inputs, weight, inverse_rms)
        return QuantizedTensor(data, inverse_scale, transposed), inverse_rms


class SimulatedQuantization:
    """:class:`~megatron.core.backends.triton.fp8.TritonQuantization`: one kernel, and under delayed scaling the
    reciprocal of the scale before."""

    def __init__(self, compiler: Compiler) -> None:
        eager = EagerQuantization()
        self._eager, self._compiler = eager, compiler
        self.current_scale, self.transpose = compiler(eager.current_scale), compiler(eager.transpose)

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        amax: Tensor,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        def write(tensor: Tensor, scale: Tensor, out: Tensor | None) -> tuple[Tensor | None, ...]:
            found = self._eager.quantize(tensor, scale, amax, dtype, layout, out)
            return found.data, found.inverse_scale, found.transposed

        return QuantizedTensor(*self._compiler(write)(tensor, scale, out))

    def quantize_and_record(
        self, tensor: Tensor, scale: Tensor, step_amax: Tensor, dtype: torch.dtype, layout: Layout
    ) -> QuantizedTensor:
        inverse_scale = scale.reciprocal()
        return replace(self.quantize(tensor, scale, step_amax, dtype, layout), inverse_scale=inverse_scale)


class SimulatedFp8WeightGradient:
    """:class:`~megatron.core.backends.triton.fp8.TritonFp8WeightGradient`: one kernel."""

    def __init__(self, gemm: ScaledGemm, compiler: Compiler) -> None:
        self.write = compiler(SeparateFp8WeightGradient(gemm).write)
