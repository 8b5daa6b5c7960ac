"""SwiGLU in Triton writes what SwiGLU in fp32 and a quantisation write, and fits a Hopper GPU."""

import re

import pytest
import torch
from torch import Tensor

from megatron.core.backends.triton.swiglu import quantized_swiglu
from megatron.core.ops.fp8 import E4M3, E5M2, DelayedQuantization, EagerQuantization
from megatron.core.ops.swiglu import swiglu_reference
from megatron.core.quantized import Layout
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes


def quantization(scale: float, step_amax: float, dtype: torch.dtype, layout: Layout) -> DelayedQuantization:
    # As in a table of all layers: not aligned.
    table = torch.tensor([0.0, scale, step_amax])
    return DelayedQuantization(EagerQuantization(), table[1], table[2], dtype, layout)


def random(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, scale: float, step_amax: float) -> None:
    gate_up = random(*shape).bfloat16()
    found_in, expected_in = (quantization(scale, step_amax, dtype, layout) for _ in range(2))
    found, expected = quantized_swiglu(gate_up, found_in), expected_in.quantize(swiglu_reference(gate_up.float()))
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    assert torch.equal(found.inverse_scale, expected.inverse_scale)
    assert torch.allclose(found_in.step_amax, expected_in.step_amax, rtol=1e-6)
    assert (found.transposed is None) == (expected.transposed is None)
    pairs = [(found.data, expected.data), (found.transposed, expected.transposed)]
    for one, other in pairs:
        if one is None or other is None:
            continue
        assert one.shape == other.shape
        # Their exponentials differ in the last bit, which decides ties.
        difference = (one.view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
        assert not one.numel() or (difference.max() <= 1 and (difference > 0).double().mean() < 1e-3)


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH], ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "step_amax"),
    [
        ((128, 1, 256), E4M3, 8.0, 0.0),  # whole tiles
        ((5, 3, 96), E4M3, 1e3, 1e9),  # parts of tiles; saturated; a larger amax before
        ((80, 2, 160), E5M2, 1e-3, 1.0),
    ],
)
def test_it_is_swiglu_and_a_quantisation(
    interpreter: TritonProcess,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    scale: float,
    step_amax: float,
) -> None:
    interpreter.run(check, shape, dtype, layout, scale, step_amax)


def check_overflow(bad: float) -> None:
    gate_up = random(80, 1, 160).bfloat16()
    gate_up[70, 0, 150] = bad
    target = quantization(1.0, 1.0, E4M3, Layout.BOTH)
    found = quantized_swiglu(gate_up, target)
    assert found.inverse_scale is not None
    assert found.inverse_scale.isnan(), "a GEMM must show the overflow"
    assert not target.step_amax.isfinite()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_is_not_hidden_by_saturation(interpreter: TritonProcess, bad: float) -> None:
    interpreter.run(check_overflow, bad)


def compile_swiglu(layout: Layout) -> CompiledLaunch:
    gate_up = torch.empty(64, 2, 256, dtype=torch.bfloat16)
    (launch,) = compile_launches(quantized_swiglu, gate_up, quantization(1.0, 0.0, E4M3, layout))
    return launch


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH], ids=str)
def test_on_hopper_it_fits_and_moves_many_bytes_at_once(compiler: TritonProcess, layout: Layout) -> None:
    launch = compiler.run(compile_swiglu, layout)
    assert launch.spilled_bytes == 0
    assert launch.registers <= 80
    assert launch.shared_bytes <= 16 * 1024
    assert "cvt.rn.satfinite.e4m3x2.f32" in launch.ptx
    assert re.search(r"ld\.global\S*\.v4\.b32", launch.ptx)
    assert re.search(r"st\.global\S*\.v[24]\.b32", launch.ptx)
