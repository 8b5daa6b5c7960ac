"""Every trial accepts the kernels of this project and refuses kernels that are wrong in the sizes of a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.kernels.trials import (
    TrialSizes,
    try_attention,
    try_cross_entropy,
    try_rms_norm,
    try_rotation,
    try_scaled_gemm,
    try_swiglu,
    try_weight_gradient,
)
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.attention_interface import AttentionKernel, AttentionOutput, Gradients
from megatron.core.ops.attention_kernels import CpuFlashAttention, ReferenceAttention
from megatron.core.ops.cross_entropy import EagerCrossEntropy
from megatron.core.ops.documents import PackedSpans
from megatron.core.ops.fp8 import E5M2, scaled_gemm_reference, widened_gemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.rope import Rotation, rotate_
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.packages import Unavailable
from megatron.core.quantized import QuantizedTensor

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = TrialSizes(2, AttentionShape(4, 2, 32), 48, 40, 64, (57, 64), norms_heads=True)
ONE_ROW, ONE_GROUP = replace(SIZES, rows=1), replace(SIZES, attention=AttentionShape(4, 1, 32))
refused = pytest.raises(Unavailable, match=r"a trial (had a relative error of|returned shape)")


def test_sizes_are_those_of_a_rank() -> None:
    model = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=70,
        padded_vocab_size=96,
        max_position_embeddings=8,
        qk_layernorm=True,
    )
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


class IgnoresTheMaskOfOneGroup(ReferenceAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        return super().forward(query, key, value, is_causal and key.shape[1] > 1)


class IgnoresStridesOfOneRow(ReferenceAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        if query.shape[0] == 1:
            query, key, value = (
                part.as_strided(part.shape, torch.empty(part.shape).stride()) for part in (query, key, value)
            )
        return super().forward(query, key, value, is_causal)


class DifferentiatesWithoutDocuments(ReferenceAttention):
    def backward_varlen(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: AttentionOutput,
        spans: PackedSpans,
        out: Gradients | None = None,
    ) -> Gradients:
        whole = PackedSpans(spans.cu_seqlens[[0, -1]], query.shape[0])
        return super().backward_varlen(grad, query, key, value, attended, whole, out)


class WritesNoGradients(ReferenceAttention):
    """But says that it did."""

    def backward(self, *arguments: Any, out: Gradients | None = None, **more: Any) -> Gradients:
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


def test_the_padding_of_the_vocabulary_must_not_change() -> None:
    with refused:
        try_cross_entropy(WritesThePadding(), SIZES, CPU, BF16)


class NormsContiguousHeads(EagerRMSNorm):
    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        inputs = inputs.as_strided(inputs.shape, torch.empty(inputs.shape).stride())
        return super().forward(inputs, weight, epsilon)


class LosesTheGradientOfTheGain(EagerRMSNorm):
    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grads = super().backward(gradient, inputs, inverse_rms, weight)
        return grads[0], grads[1] / 2


@pytest.mark.parametrize("kernel", [NormsContiguousHeads(), LosesTheGradientOfTheGain()])
def test_norms_are_tried_on_the_residual_stream_and_on_heads(kernel: EagerRMSNorm) -> None:
    with refused:
        try_rms_norm(kernel, SIZES, CPU, BF16)


class SwapsTheGradients(EagerSwiGLU):
    def backward(self, gradient: Tensor, gate_and_up: Tensor) -> Tensor:
        return super().backward(gradient, gate_and_up).roll(gate_and_up.shape[-1] // 2, dims=-1)


def test_swiglu_is_tried_forward_and_backward() -> None:
    with refused:
        try_swiglu(SwapsTheGradients(), SIZES, CPU, BF16)


def rotate_forwards(activations: Tensor, table: Tensor) -> Tensor:
    return rotate_(activations, torch.view_as_complex(torch.view_as_real(table.conj() if table.is_conj() else table)))


def rotate_as_one_sequence(activations: Tensor, table: Tensor) -> Tensor:
    return rotate_(activations, table[:, :1])


def rotate_too_much(activations: Tensor, table: Tensor) -> Tensor:
    rotate_(activations.as_strided((*activations.shape[:2], activations.stride(1)), activations.stride()), table)
    return activations


@pytest.mark.parametrize("rotate", [rotate_forwards, rotate_as_one_sequence, rotate_too_much])
def test_a_rotation_is_tried_back_and_on_a_part_of_sequences_with_their_own_positions(rotate: Rotation) -> None:
    with refused:
        try_rotation(rotate, SIZES, CPU, BF16, resets_positions=True)


def fast_only(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    return scaled_gemm_reference(a, b, dtype) if fast else scaled_gemm_reference(a, b, dtype) * 2


def no_e5m2(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    if a.data.dtype == E5M2:
        raise RuntimeError("not supported\nby this build")
    return scaled_gemm_reference(a, b, dtype)


def bf16_only(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
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


def test_weight_gradients_are_tried_in_odd_widths() -> None:
    with refused:
        try_weight_gradient(Aligned(), CPU, BF16, torch.float32)
