"""RMSNorm in Triton writes what RMSNorm in fp32 and a quantisation write, and fits a Hopper GPU."""

import re

import pytest
import torch
from torch import Tensor

from megatron.core.backends.triton.rms_norm import quantized_rms_norm
from megatron.core.ops.fp8 import E4M3, E5M2, DelayedQuantization, EagerQuantization
from megatron.core.ops.norm import normalise
from megatron.core.quantized import Layout
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes
LAYOUTS = pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH], ids=str)


def quantization(scale: float, step_amax: float, dtype: torch.dtype, layout: Layout) -> DelayedQuantization:
    # As in a table of all layers: not aligned.
    table = torch.tensor([0.0, scale, step_amax])
    return DelayedQuantization(EagerQuantization(), table[1], table[2], dtype, layout)


def random(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, scale: float, step_amax: float, wide_gain: bool
) -> None:
    inputs, gain = random(*shape).bfloat16(), 1 + 0.1 * random(shape[-1])
    gain = gain if wide_gain else gain.bfloat16()
    found_in, expected_in = (quantization(scale, step_amax, dtype, layout) for _ in range(2))
    # Not contiguous.
    found, inverse_rms = quantized_rms_norm(inputs.transpose(0, 1), gain, 0.3, found_in)
    output, expected_rms = normalise(inputs.transpose(0, 1).float(), gain.float(), 0.3)
    expected = expected_in.quantize(output)
    assert inverse_rms.dtype == torch.float32 and inverse_rms.shape == expected_rms.shape
    assert torch.allclose(inverse_rms, expected_rms, rtol=1e-6, atol=0.0)
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    assert torch.equal(found.inverse_scale, expected.inverse_scale)
    assert torch.allclose(found_in.step_amax, expected_in.step_amax, rtol=1e-6)
    assert (found.transposed is None) == (expected.transposed is None)
    for one, other in ((found.data, expected.data), (found.transposed, expected.transposed)):
        if one is None or other is None:
            continue
        assert one.shape == other.shape
        # Their sums differ in the last bit, which decides ties.
        difference = (one.view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
        assert not one.numel() or (difference.max() <= 1 and (difference > 0).double().mean() < 1e-3)
    if layout == Layout.BOTH:
        assert found.transposed is not None
        assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).flatten(0, 1).t())


@LAYOUTS
@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "step_amax", "wide_gain"),
    [
        ((1, 128, 256), E4M3, 8.0, 0.0, False),  # whole tiles
        ((5, 3, 96), E4M3, 1e3, 1e9, True),  # parts of tiles; saturated; a larger amax before
        ((80, 2, 160), E5M2, 1e-3, 1.0, False),
    ],
)
def test_it_is_rms_norm_and_a_quantisation(
    interpreter: TritonProcess,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    scale: float,
    step_amax: float,
    wide_gain: bool,
) -> None:
    interpreter.run(check, shape, dtype, layout, scale, step_amax, wide_gain)


def check_overflow(bad: float, layout: Layout) -> None:
    inputs = random(80, 1, 160).bfloat16()
    inputs[70, 0, 150] = bad
    target = quantization(1.0, 1.0, E4M3, layout)
    found, _ = quantized_rms_norm(inputs, torch.ones(160), 1e-5, target)
    assert found.inverse_scale is not None
    assert found.inverse_scale.isnan(), "a GEMM must show the overflow"
    assert not target.step_amax.isfinite()


@LAYOUTS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_is_not_hidden_by_saturation(interpreter: TritonProcess, bad: float, layout: Layout) -> None:
    interpreter.run(check_overflow, bad, layout)


def compile_rms_norm(layout: Layout, width: int, gain_dtype: torch.dtype) -> list[CompiledLaunch]:
    inputs, gain = torch.empty(64, 2, width, dtype=torch.bfloat16), torch.empty(width, dtype=gain_dtype)
    return compile_launches(quantized_rms_norm, inputs, gain, 1e-5, quantization(1.0, 0.0, E4M3, layout))


@pytest.mark.parametrize(
    ("width", "gain_dtype"), [(4096, torch.bfloat16), (8192, torch.bfloat16), (16384, torch.float32)], ids=str
)
@LAYOUTS
def test_on_hopper_it_fits_and_moves_many_bytes_at_once(
    compiler: TritonProcess, layout: Layout, width: int, gain_dtype: torch.dtype
) -> None:
    row, *tiles = compiler.run(compile_rms_norm, layout, width, gain_dtype)
    assert len(tiles) == (Layout.TRANSPOSED in layout), "rows are written by the kernel of the inverse RMS"
    assert row.shared_bytes <= 16 * 1024
    for launch in (row, *tiles):
        assert launch.spilled_bytes == 0
        assert launch.registers <= 64
        # Triton 3.6 transposes 16-bit numbers, in 17 KiB. Four programs fit into the 227 KiB of a multiprocessor.
        assert launch.shared_bytes <= 17 * 1024
        assert re.search(r"ld\.global\S*\.v4\.b32", launch.ptx)
    for launch in (row,) * (Layout.ROWS in layout) + tuple(tiles):
        assert "cvt.rn.satfinite.e4m3x2.f32" in launch.ptx
        assert re.search(r"st\.global\S*\.v[24]\.b32", launch.ptx)
