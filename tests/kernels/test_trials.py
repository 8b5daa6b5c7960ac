"""Every trial accepts the kernels of this project and refuses kernels that are wrong in the sizes of a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.device import Unavailable
from megatron.core.kernels.trials import (
    TrialSizes,
    try_attention,
    try_block_quantization,
    try_block_scaled_gemm,
    try_cross_entropy,
    try_fp8_weight_gradient,
    try_quantization,
    try_quantized_rms_norm,
    try_quantized_swiglu,
    try_rms_norm,
    try_rotation,
    try_scaled_gemm,
    try_swiglu,
    try_weight_gradient,
)
from megatron.core.ops.attention import (
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionOutput,
    AttentionShape,
    Gradients,
)
from megatron.core.ops.attention_kernels import CpuFlashAttention, ReferenceAttention
from megatron.core.ops.documents import AttentionSpans, Span
from megatron.core.ops.fp8 import (
    E5M2,
    BlockQuantization,
    DelayedQuantization,
    EagerQuantization,
    Fp8Format,
    InPlaceFp8WeightGradient,
    SeparateFp8WeightGradient,
    scaled_gemm_reference,
    widened_block_gemm,
    widened_gemm,
)
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.rope import rotate_
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.cross_entropy import EagerCrossEntropy
from tests.parallel.layout_run import MODEL

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = TrialSizes(2, AttentionShape(4, 2, 32), 48, 40, 64, (57, 64), norms_heads=True)
ONE_ROW, ONE_GROUP = replace(SIZES, rows=1), replace(SIZES, attention=AttentionShape(4, 1, 32))
refused = pytest.raises(Unavailable, match=r"a trial (had a relative error of|returned shape)")


def test_sizes_are_those_of_a_rank() -> None:
    model = replace(MODEL, hidden_size=64, ffn_hidden_size=96, kv_channels=16, vocab_size=70, qk_layernorm=True)
    found = TrialSizes.of(model, tensor_parallel_size=4, rows=3)
    # The ranks have 24, 24, 22 and no ids.
    assert found == TrialSizes(3, AttentionShape(2, 1, 16), 64, 24, 24, (22, 24), norms_heads=True)


@pytest.mark.parametrize("sizes", [SIZES, ONE_ROW, ONE_GROUP])
def test_the_kernels_of_this_project_pass(sizes: TrialSizes) -> None:
    kernels: list[AttentionKernel] = [CpuFlashAttention(), ReferenceAttention()]
    for kernel in kernels:
        try_attention(kernel, sizes, CPU, BF16, in_documents=True)
    try_rms_norm(EagerRMSNorm(), sizes, CPU, BF16)
    try_swiglu(EagerSwiGLU(), sizes, CPU, BF16)
    try_rotation(rotate_, sizes, CPU, BF16)
    try_rotation(rotate_, sizes, CPU, BF16, resets_positions=True)
    try_cross_entropy(EagerCrossEntropy(), sizes, CPU, BF16)
    try_weight_gradient(SeparateWeightGradient(), CPU, BF16, torch.float32)
    try_weight_gradient(InPlaceWeightGradient(), CPU, torch.float32, torch.float32)
    try_scaled_gemm(widened_gemm, CPU, BF16)
    for dtype in (BF16, torch.float32):
        try_quantization(EagerQuantization(), CPU, dtype)
        try_fp8_weight_gradient(SeparateFp8WeightGradient(widened_gemm), CPU, dtype)


class IgnoresTheMaskOfOneGroup(ReferenceAttention):
    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        return super().forward(replace(inputs, mask=AttentionMask(is_causal=inputs.key.shape[1] > 1)))


class IgnoresStridesOfOneRow(ReferenceAttention):
    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        if inputs.query.shape[0] == 1:
            heads = (inputs.query, inputs.key, inputs.value)
            query, key, value = (part.as_strided(part.shape, torch.empty(part.shape).stride()) for part in heads)
            inputs = AttentionInputs(query, key, value)
        return super().forward(inputs)


class DifferentiatesWithoutDocuments(ReferenceAttention):
    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        total = attended.inputs.query.shape[0]
        whole = AttentionSpans([Span(slice(1), 0, total)], 1, total, CPU)
        attended = replace(attended, inputs=replace(attended.inputs, spans=whole))
        return super().backward_varlen(grad, attended, out)


class WritesNoGradients(ReferenceAttention):
    """But says that it did."""

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        assert out is not None
        for place in out:
            place.zero_()
        return out


def test_attention_is_tried_with_the_groups_rows_and_documents_of_the_run() -> None:
    try_attention(IgnoresTheMaskOfOneGroup(), SIZES, CPU, BF16)
    with refused:
        try_attention(IgnoresTheMaskOfOneGroup(), ONE_GROUP, CPU, BF16)
    try_attention(IgnoresStridesOfOneRow(), SIZES, CPU, BF16)
    with refused:
        try_attention(IgnoresStridesOfOneRow(), ONE_ROW, CPU, BF16)
    try_attention(DifferentiatesWithoutDocuments(), SIZES, CPU, BF16)
    with refused:
        try_attention(DifferentiatesWithoutDocuments(), SIZES, CPU, BF16, in_documents=True)
    with refused:
        try_attention(WritesNoGradients(), SIZES, CPU, BF16)


class ForgetsTheTail(EagerCrossEntropy):
    """Processes blocks of 16 ids; ``skips`` is what it does only to these."""

    def __init__(self, skips: str) -> None:
        super().__init__()
        self._skips = skips

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        whole = logits.shape[1] // 16 * 16 if self._skips == "log_sum_exp" else None
        return super().log_sum_exp(logits[:, :whole], dtype)

    def write_gradient(self, logits: Tensor, *more: Tensor) -> None:
        before = logits.clone()
        super().write_gradient(logits, *more)
        if logits.shape[1] % 16 and self._skips == "gradient":
            logits[:, -(logits.shape[1] % 16) : -1] = 0.0
        if logits.shape[1] % 16 and self._skips == "last":
            logits[:, -1] = before[:, -1]


@pytest.mark.parametrize("skips", ["log_sum_exp", "gradient", "last"])
def test_cross_entropy_is_tried_with_the_last_ids_of_every_rank(skips: str) -> None:
    try_cross_entropy(ForgetsTheTail(skips), replace(SIZES, vocabularies=(64,)), CPU, BF16)
    with refused:
        try_cross_entropy(ForgetsTheTail(skips), SIZES, CPU, BF16)


class WritesThePadding(EagerCrossEntropy):
    def write_gradient(self, logits: Tensor, *more: Tensor) -> None:
        super().write_gradient(logits, *more)
        logits.as_strided((logits.shape[0], logits.stride(0)), logits.stride())[:, logits.shape[1] :] = 1.0


class NormsContiguousHeads(EagerRMSNorm):
    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        inputs = inputs.as_strided(inputs.shape, torch.empty(inputs.shape).stride())
        return super().forward(inputs, weight, epsilon)


class LosesTheGradientOfTheGain(EagerRMSNorm):
    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = super().backward(gradient, inputs, inverse_rms, weight)
        return grads[0], grads[1] / 2


class SwapsTheGradients(EagerSwiGLU):
    def backward(self, gradient: Tensor, gate_and_up: Tensor) -> Tensor:
        return super().backward(gradient, gate_and_up).roll(gate_and_up.shape[-1] // 2, dims=-1)


def rotate_forwards(activations: Tensor, table: Tensor) -> Tensor:
    return rotate_(activations, torch.view_as_complex(torch.view_as_real(table.conj() if table.is_conj() else table)))


def rotate_as_one_sequence(activations: Tensor, table: Tensor) -> Tensor:
    return rotate_(activations, table[:, :1])


def rotate_too_much(activations: Tensor, table: Tensor) -> Tensor:
    rotate_(activations.as_strided((*activations.shape[:2], activations.stride(1)), activations.stride()), table)
    return activations


def fast_only(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    return scaled_gemm_reference(a, b, dtype) if fast else scaled_gemm_reference(a, b, dtype) * 2


def no_e5m2(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    if a.data.dtype == E5M2:
        raise RuntimeError("not supported\nby this build")
    return scaled_gemm_reference(a, b, dtype)


def bf16_only(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    if dtype == torch.float32:
        raise RuntimeError("not supported")
    return scaled_gemm_reference(a, b, dtype)


@pytest.mark.parametrize("gemm", [fast_only, no_e5m2, bf16_only])
def test_fp8_gemms_are_tried_in_three_roles_and_two_formats(gemm: Callable[..., Tensor]) -> None:
    with pytest.raises((Unavailable, RuntimeError), match=r"relative error|not supported"):
        try_scaled_gemm(gemm, CPU, BF16)


class Aligned(SeparateWeightGradient):
    """Wrong for odd widths."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        super().write(buffer, grad_outputs, inputs, accumulate)
        buffer[:, buffer.shape[1] // 8 * 8 :] = 0.0


@pytest.mark.parametrize(
    ("trial", "kernel", "of_run"),
    [
        (try_cross_entropy, WritesThePadding(), (SIZES, CPU, BF16)),
        # Norms of the residual stream and of heads.
        (try_rms_norm, NormsContiguousHeads(), (SIZES, CPU, BF16)),
        (try_rms_norm, LosesTheGradientOfTheGain(), (SIZES, CPU, BF16)),
        (try_swiglu, SwapsTheGradients(), (SIZES, CPU, BF16)),
        # Back, on a part, and of sequences with their own positions.
        *((try_rotation, one, (SIZES, CPU, BF16, True)) for one in (rotate_forwards, rotate_as_one_sequence)),
        (try_rotation, rotate_too_much, (SIZES, CPU, BF16, True)),
        (try_weight_gradient, Aligned(), (CPU, BF16, torch.float32)),
    ],
)
def test_what_is_wrong_in_the_sizes_of_a_run_is_refused(
    trial: Callable[..., None], kernel: object, of_run: tuple[object, ...]
) -> None:
    with refused:
        trial(kernel, *of_run)


# Kernels that quantise their output

QUANTISING = (TrialSizes(2, AttentionShape(8, 2, 128), 112, 48, 64, (64,)), CPU, BF16)


def faulty(found: QuantizedTensor, quantization: DelayedQuantization, fault: str) -> QuantizedTensor:
    """``found``, which is wrong in one way."""
    if fault == "transpose" and found.transposed is not None:
        found.transposed[-1].zero_()
    if fault == "amax":
        quantization.step_amax.mul_(2.0)
    return found


class BadSwiGLU(EagerSwiGLU):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        if self.fault == "numbers":
            gate_and_up = gate_and_up * 1.05
        return faulty(super().quantized(gate_and_up.float(), quantization), quantization, self.fault)


class BadRMSNorm(EagerRMSNorm):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        if self.fault == "numbers" or (self.fault == "wide gain" and weight.dtype == torch.float32):
            weight = weight * 1.05
        found, inverse_rms = super().quantized(inputs.float(), weight.float(), epsilon, quantization)
        if self.fault == "inverse RMS":
            inverse_rms[-1] *= 2
        return faulty(found, quantization, self.fault), inverse_rms


OTHER_NUMBERS = "a trial quantised .*% of the numbers to others"
ERROR = "a trial had a relative error of"
IN_EACH = [("numbers", OTHER_NUMBERS), ("transpose", "a transpose with other numbers than the rows"), ("amax", ERROR)]


@pytest.mark.parametrize(("fault", "message"), IN_EACH)
def test_swiglu_that_quantises_is_tried_in_all_that_it_writes(fault: str, message: str) -> None:
    try_quantized_swiglu(BadSwiGLU("none"), *QUANTISING)
    with pytest.raises(Unavailable, match=message):
        try_quantized_swiglu(BadSwiGLU(fault), *QUANTISING)


@pytest.mark.parametrize(("fault", "message"), [*IN_EACH, ("wide gain", OTHER_NUMBERS), ("inverse RMS", ERROR)])
def test_a_norm_that_quantises_is_tried_in_all_that_it_writes(fault: str, message: str) -> None:
    try_quantized_rms_norm(BadRMSNorm("none"), *QUANTISING)
    with pytest.raises(Unavailable, match=message):
        try_quantized_rms_norm(BadRMSNorm(fault), *QUANTISING)


# FP8 quantisation and weight gradients


class Wrong(EagerQuantization):
    """The definition, with one change of the result or of the recorded amax."""

    def __init__(self, change: Callable[[QuantizedTensor], QuantizedTensor], amax_factor: float = 1.0) -> None:
        self._change, self._amax_factor = change, amax_factor

    def quantize(self, tensor: Tensor, target: Fp8Format, amax: Tensor, out: Tensor | None = None) -> QuantizedTensor:
        return self._change(super().quantize(tensor, target, amax, out))

    def quantize_and_record(self, tensor: Tensor, target: Fp8Format, step_amax: Tensor) -> QuantizedTensor:
        found = super().quantize_and_record(tensor, target, step_amax)
        step_amax.mul_(self._amax_factor)
        return found


class WithoutMargin(EagerQuantization):
    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        return super().current_scale(amax, dtype, 0)


def last_bit(operand: QuantizedTensor) -> QuantizedTensor:
    data = operand.data.clone()
    data.view(torch.uint8)[130, 250] ^= 1
    return replace(operand, data=data)


def stale_transpose(operand: QuantizedTensor) -> QuantizedTensor:
    assert operand.transposed is not None
    return replace(operand, transposed=operand.transposed.clone().zero_())


def finite(operand: QuantizedTensor) -> QuantizedTensor:
    assert operand.inverse_scale is not None
    return replace(operand, inverse_scale=torch.full_like(operand.inverse_scale, 1.7).reciprocal())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Wrong(last_bit), "other numbers"),
        (Wrong(stale_transpose), "another transpose"),
        (Wrong(finite), "another inverse scale"),
        (Wrong(lambda operand: operand, 1.01), "another amax"),
        (WithoutMargin(), "another scale"),
    ],
)
def test_a_trial_sees_every_bit(wrong: EagerQuantization, message: str) -> None:
    with pytest.raises(Unavailable, match=f"a trial returned {message} than the reference"):
        try_quantization(wrong, CPU, BF16)


def other_order(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """The scales of the second operand in the order of another layout."""
    assert b.inverse_scale is not None
    turned = b.inverse_scale.t().reshape(b.inverse_scale.shape)
    return widened_block_gemm(a, QuantizedTensor(b.data, turned), dtype)


class TransposesTheRows(BlockQuantization):
    """The transpose of the rows, with the scales of blocks along them."""

    def quantize(self, tensor: Tensor, dtype: torch.dtype, layout: Layout) -> QuantizedTensor:
        found = super().quantize(tensor, dtype, layout)
        return replace(found, transposed=found.data.t().contiguous()) if found.transposed is not None else found


def test_trials_see_a_block_that_has_the_scale_of_another() -> None:
    try_block_scaled_gemm(widened_block_gemm, CPU, BF16)
    try_block_quantization(BlockQuantization(), CPU, BF16)
    with pytest.raises(Unavailable, match="relative error"):
        try_block_scaled_gemm(other_order, CPU, BF16)
    with pytest.raises(Unavailable, match="other columns"):
        try_block_quantization(TransposesTheRows(), CPU, BF16)


class OverwritesOnly(SeparateFp8WeightGradient):
    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        super().write(buffer, a, b, accumulate=False)


def test_a_trial_sees_a_gradient_that_is_not_added() -> None:
    with pytest.raises(Unavailable, match="another gradient"):
        try_fp8_weight_gradient(OverwritesOnly(widened_gemm), CPU, torch.float32)


def add_scaled(to: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any) -> Tensor:
    """``scaled_addmm_`` as torch documents it."""
    assert a_kind.name == b_kind.name == "TensorWise"
    return to.addmm_((a.float() * a_scale).to(to.dtype), (b.float() * b_scale).to(to.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_accumulating_gemm_has_the_gradients_of_a_separate_sum(dtype: torch.dtype) -> None:
    try_fp8_weight_gradient(InPlaceFp8WeightGradient(widened_gemm, add_scaled), CPU, dtype)
    with pytest.raises(Unavailable, match="another gradient"):
        try_fp8_weight_gradient(InPlaceFp8WeightGradient(widened_gemm, lambda to, *_: to), CPU, dtype)
