"""Which kernels FP8 linear layers get where, what their trials find, and what is refused."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.kernels import KernelConfig
from megatron.core.kernels.request import KernelRequest, Machine
from megatron.core.kernels.selection import choose_kernels
from megatron.core.kernels.trials import Trials, TrialSizes, try_fp8_weight_gradient, try_quantization
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.fp8 import EagerQuantization, SeparateFp8WeightGradient, widened_gemm
from megatron.core.packages import Unavailable
from megatron.core.quantized import Layout, QuantizedTensor
from megatron.errors import ConfigError

CPU = torch.device("cpu")
SIZES = TrialSizes(2, AttentionShape(8, 2, 128), 32, 48, 64, (64,))
ON_CPU = KernelRequest(Machine(CPU), torch.bfloat16, torch.float32, SIZES, fp8=True)
ON_GPU = replace(ON_CPU, machine=Machine(torch.device("cuda")))
WITHOUT_TRITON = replace(ON_GPU, machine=replace(ON_GPU.machine, missing_for_triton="Triton, which is not installed"))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for every Triton kernel of FP8."""
    made = object()
    kernels = SimpleNamespace(TritonQuantization=lambda: made, TritonFp8WeightGradient=lambda: made)
    for module in ("quantize", "fp8_weight_gradient"):
        monkeypatch.setitem(sys.modules, f"megatron.core.backends.triton.{module}", kernels)
    return made


def fp8_rows(request: KernelRequest, *entries: str) -> dict[str, tuple[str, str]]:
    choices = choose_kernels(KernelConfig(kernel=entries), request).choices
    return {one.operation: (one.implementation, one.reason) for one in choices if one.operation.startswith("fp8_")}


SEPARATE = ("separate", "a GEMM, then an addition")
EAGER = "one operation after the other"


def test_the_rows_are_in_the_table_of_a_run_in_fp8_alone() -> None:
    assert fp8_rows(ON_CPU) == {"fp8_quantization": ("eager", EAGER), "fp8_weight_gradient": SEPARATE}
    assert fp8_rows(replace(ON_CPU, fp8=False)) == {}


def test_gpus_quantise_in_triton_where_it_is_installed(triton: Any) -> None:
    found = choose_kernels(KernelConfig(), ON_GPU)
    assert found.fp8.quantization is triton
    assert isinstance(found.fp8.weight_gradient, SeparateFp8WeightGradient), "the Triton GEMM must be asked for"
    asked = choose_kernels(KernelConfig(kernel=("fp8_weight_gradient=triton",)), ON_GPU)
    assert asked.fp8.weight_gradient is triton
    assert fp8_rows(ON_GPU, "fp8_quantization=eager")["fp8_quantization"][0] == "eager"
    reason = "it needs Triton, which is not installed"
    assert fp8_rows(WITHOUT_TRITON)["fp8_quantization"] == ("eager", f"{EAGER} (not triton: {reason})")


def test_a_kernel_that_fails_its_trial_is_not_chosen(triton: Any) -> None:
    def passing(*arguments: Any) -> None:
        pass

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no kernel image\nfor this device")

    passes = Trials(**dict.fromkeys((one.name for one in fields(Trials)), passing))
    request = replace(ON_GPU, machine=replace(ON_GPU.machine, can_try=True, capability=(8, 9)), trials=passes)
    assert fp8_rows(request)["fp8_quantization"][0] == "triton"
    request = replace(request, trials=replace(passes, fp8_quantization=failing, fp8_weight_gradient=failing))
    reason = "a trial failed (no kernel image)"
    assert fp8_rows(request)["fp8_quantization"] == ("eager", f"{EAGER} (not triton: {reason})")
    with pytest.raises(ConfigError) as error:
        fp8_rows(request, "fp8_weight_gradient=triton")
    assert str(error.value) == (
        f"--kernel fp8_weight_gradient=triton is not available: {reason}; available: separate: use one of these, or "
        "remove it."
    )


@pytest.mark.parametrize("operation", ["fp8_quantization", "fp8_weight_gradient"])
def test_without_a_gpu_triton_is_refused(operation: str) -> None:
    with pytest.raises(ConfigError, match="it needs a GPU"):
        fp8_rows(ON_CPU, f"{operation}=triton")


# Trials


class Wrong(EagerQuantization):
    """The definition, with one change of the result or of the recorded amax."""

    def __init__(self, change: Callable[[QuantizedTensor], QuantizedTensor], amax_factor: float = 1.0) -> None:
        self._change, self._amax_factor = change, amax_factor

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        amax: Tensor,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        return self._change(super().quantize(tensor, scale, amax, dtype, layout, out))

    def quantize_and_record(
        self, tensor: Tensor, scale: Tensor, step_amax: Tensor, dtype: torch.dtype, layout: Layout
    ) -> QuantizedTensor:
        found = super().quantize_and_record(tensor, scale, step_amax, dtype, layout)
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


def test_the_definition_passes_its_trial() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        try_quantization(EagerQuantization(), CPU, dtype)
        try_fp8_weight_gradient(SeparateFp8WeightGradient(widened_gemm), CPU, dtype)


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
        try_quantization(wrong, CPU, torch.bfloat16)


class OverwritesOnly(SeparateFp8WeightGradient):
    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        super().write(buffer, a, b, accumulate=False)


def test_a_trial_sees_a_gradient_that_is_not_added() -> None:
    with pytest.raises(Unavailable, match="another gradient"):
        try_fp8_weight_gradient(OverwritesOnly(widened_gemm), CPU, torch.float32)
