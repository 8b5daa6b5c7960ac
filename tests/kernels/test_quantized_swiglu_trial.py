"""The trial of a SwiGLU that quantises finds what is wrong."""

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.choice import Unavailable
from megatron.core.kernels.trials import try_quantized_swiglu
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.ops.quantized import QuantizedTensor
from megatron.core.ops.swiglu import EagerSwiGLU

CPU = torch.device("cpu")


class BadSwiGLU(EagerSwiGLU):
    """Quantised outputs are wrong in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        if self.fault == "numbers":
            gate_and_up = gate_and_up * 1.05
        found = super().quantized(gate_and_up.float(), quantization)
        if self.fault == "transpose" and found.transposed is not None:
            found.transposed[-1].zero_()
        if self.fault == "amax":
            quantization.step_amax.mul_(2.0)
        return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("numbers", "a trial quantised .*% of the numbers to others"),
        ("transpose", "a transpose with other numbers than the rows"),
        ("amax", "a trial had a relative error of"),
    ],
)
def test_swiglu_that_quantises_is_tried_in_all_that_it_writes(fault: str, message: str) -> None:
    try_quantized_swiglu(BadSwiGLU("none"), CPU)
    with pytest.raises(Unavailable, match=message):
        try_quantized_swiglu(BadSwiGLU(fault), CPU)
