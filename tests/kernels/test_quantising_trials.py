"""The trials of kernels that quantise their output find what is wrong."""

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.trials import TrialSizes, try_quantized_rms_norm, try_quantized_swiglu
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.packages import Unavailable
from megatron.core.quantized import QuantizedTensor

SIZES = TrialSizes(2, AttentionShape(8, 2, 128), 112, 48, 64, (64,))
IN_BF16 = (SIZES, torch.device("cpu"), torch.bfloat16)


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
IN_EACH = [
    ("numbers", OTHER_NUMBERS),
    ("transpose", "a transpose with other numbers than the rows"),
    ("amax", ERROR),
]


@pytest.mark.parametrize(("fault", "message"), IN_EACH)
def test_swiglu_that_quantises_is_tried_in_all_that_it_writes(fault: str, message: str) -> None:
    try_quantized_swiglu(BadSwiGLU("none"), *IN_BF16)
    with pytest.raises(Unavailable, match=message):
        try_quantized_swiglu(BadSwiGLU(fault), *IN_BF16)


@pytest.mark.parametrize(("fault", "message"), [*IN_EACH, ("wide gain", OTHER_NUMBERS), ("inverse RMS", ERROR)])
def test_a_norm_that_quantises_is_tried_in_all_that_it_writes(fault: str, message: str) -> None:
    try_quantized_rms_norm(BadRMSNorm("none"), *IN_BF16)
    with pytest.raises(Unavailable, match=message):
        try_quantized_rms_norm(BadRMSNorm(fault), *IN_BF16)
