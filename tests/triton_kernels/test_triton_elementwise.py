"""RMSNorm and SwiGLU in Triton write what they and a quantisation write in fp32, the rotation is that of the reference,
and all fit a Hopper GPU."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.backends.triton_elementwise import TritonRMSNorm, TritonSwiGLU, rotate
from megatron.core.ops.fp8 import E4M3, E5M2, DelayedQuantization, EagerQuantization, Fp8Format
from megatron.core.ops.norm import normalise
from megatron.core.ops.rope import rotary_frequencies, rotary_table, rotate_
from megatron.core.ops.swiglu import swiglu_reference
from megatron.core.precision import Layout, QuantizedTensor
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes
LAYOUTS = pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH], ids=str)
# Nothing here runs what the classes give to a compiler.
QUANTIZED_RMS_NORM = TritonRMSNorm(lambda function: function).quantized
QUANTIZED_SWIGLU = TritonSwiGLU(lambda function: function).quantized
OPERATIONS = ("SwiGLU", "norm", "norm with an fp32 gain")


def quantization(scale: float, step_amax: float, dtype: torch.dtype, layout: Layout) -> DelayedQuantization:
    # As in a table of all layers: not aligned.
    table = torch.tensor([0.0, scale, step_amax])
    return DelayedQuantization(EagerQuantization(), Fp8Format(table[1], dtype, layout), table[2])


def random(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def compute(operation: str, inputs: Tensor, target: DelayedQuantization) -> QuantizedTensor:
    """By the kernel; the inverse RMS is compared here."""
    if operation == "SwiGLU":
        return QUANTIZED_SWIGLU(inputs, target)
    found, inverse_rms = QUANTIZED_RMS_NORM(inputs, gain_of(operation, inputs), 0.3, target)
    _, expected_rms = normalise(inputs.float(), torch.ones(inputs.shape[-1]), 0.3)
    assert inverse_rms.dtype == torch.float32 and inverse_rms.shape == expected_rms.shape
    assert torch.allclose(inverse_rms, expected_rms, rtol=1e-6, atol=0.0, equal_nan=True)
    return found


def gain_of(operation: str, inputs: Tensor) -> Tensor:
    gain = 1 + 0.1 * random(inputs.shape[-1])
    return gain if operation == "norm with an fp32 gain" else gain.bfloat16()


def definition(operation: str, inputs: Tensor) -> Tensor:
    if operation == "SwiGLU":
        return swiglu_reference(inputs.float())
    return normalise(inputs.float(), gain_of(operation, inputs).float(), 0.3)[0]


def check(
    operation: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, scale: float, step_amax: float
) -> None:
    found_in, expected_in = (quantization(scale, step_amax, dtype, layout) for _ in range(2))
    inputs = random(*shape).bfloat16()
    # The norm's inputs need not be contiguous.
    inputs = inputs if operation == "SwiGLU" else inputs.transpose(0, 1)
    found, expected = compute(operation, inputs, found_in), expected_in.quantize(definition(operation, inputs))
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    assert torch.equal(found.inverse_scale, expected.inverse_scale)
    assert torch.allclose(found_in.step_amax, expected_in.step_amax, rtol=1e-6)
    assert (found.transposed is None) == (expected.transposed is None)
    for one, other in ((found.data, expected.data), (found.transposed, expected.transposed)):
        if one is None or other is None:
            continue
        assert one.shape == other.shape
        # Sums and exponentials differ in the last bit, which decides ties.
        difference = (one.view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
        assert not one.numel() or (difference.max() <= 1 and (difference > 0).double().mean() < 1e-3)
    if layout == Layout.BOTH:
        assert found.transposed is not None
        assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).flatten(0, 1).t())


@LAYOUTS
@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "step_amax"),
    [
        ((128, 1, 256), E4M3, 8.0, 0.0),  # whole tiles
        ((5, 3, 96), E4M3, 1e3, 1e9),  # parts of tiles; saturated; a larger amax before
        ((80, 2, 160), E5M2, 1e-3, 1.0),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_is_the_operation_and_a_quantisation(
    interpreter: TritonProcess,
    operation: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    scale: float,
    step_amax: float,
) -> None:
    interpreter.run(check, operation, shape, dtype, layout, scale, step_amax)


def check_overflow(operation: str, bad: float, layout: Layout) -> None:
    inputs = random(80, 1, 160).bfloat16()
    inputs[70, 0, 150] = bad
    target = quantization(1.0, 1.0, E4M3, layout)
    found = compute(operation, inputs, target)
    assert found.inverse_scale is not None
    assert found.inverse_scale.isnan(), "a GEMM must show the overflow"
    assert not target.step_amax.isfinite()


@LAYOUTS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_overflow_is_not_hidden_by_saturation(
    interpreter: TritonProcess, operation: str, bad: float, layout: Layout
) -> None:
    interpreter.run(check_overflow, operation, bad, layout)


def compile_swiglu(layout: Layout) -> list[CompiledLaunch]:
    gate_up = torch.empty(64, 2, 256, dtype=torch.bfloat16)
    return compile_launches(QUANTIZED_SWIGLU, gate_up, quantization(1.0, 0.0, E4M3, layout))


def compile_rms_norm(layout: Layout, width: int, gain_dtype: torch.dtype) -> list[CompiledLaunch]:
    inputs, gain = torch.empty(64, 2, width, dtype=torch.bfloat16), torch.empty(width, dtype=gain_dtype)
    return compile_launches(QUANTIZED_RMS_NORM, inputs, gain, 1e-5, quantization(1.0, 0.0, E4M3, layout))


@pytest.mark.parametrize(
    ("compile_operation", "arguments", "registers", "shared_bytes"),
    [
        (compile_swiglu, (), 80, 16 * 1024),
        # Triton 3.6 transposes 16-bit numbers, in 17 KiB. Four programs fit into the 227 KiB of a multiprocessor.
        (compile_rms_norm, (4096, torch.bfloat16), 64, 17 * 1024),
        (compile_rms_norm, (8192, torch.bfloat16), 64, 17 * 1024),
        (compile_rms_norm, (16384, torch.float32), 64, 17 * 1024),
    ],
)
@LAYOUTS
def test_on_hopper_it_fits_and_moves_many_bytes_at_once(
    compiler: TritonProcess,
    layout: Layout,
    compile_operation: Callable[..., list[CompiledLaunch]],
    arguments: tuple[object, ...],
    registers: int,
    shared_bytes: int,
) -> None:
    launches = compiler.run(compile_operation, layout, *arguments)
    for launch in launches:
        assert launch.spilled_bytes == 0
        assert launch.registers <= registers
        assert launch.shared_bytes <= shared_bytes
        assert re.search(r"ld\.global\S*\.v4\.b32", launch.ptx)
    writing = launches
    assert len(launches) == 1 or compile_operation is compile_rms_norm
    if compile_operation is compile_rms_norm:
        row, *tiles = launches
        assert len(tiles) == (Layout.TRANSPOSED in layout), "rows are written by the kernel of the inverse RMS"
        assert row.shared_bytes <= 16 * 1024
        writing = [*([row] if Layout.ROWS in layout else []), *tiles]
    for launch in writing:
        assert "cvt.rn.satfinite.e4m3x2.f32" in launch.ptx
        assert re.search(r"st\.global\S*\.v[24]\.b32", launch.ptx)


# The rotation


def table_of(length: int, batch: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """With ``batch`` above 1 each sequence has positions of its own, as documents have, and the magnitude is YaRN's."""
    positions = torch.arange(length) + 1000
    if batch > 1:
        positions = torch.stack([positions // (number + 1) for number in range(batch)], dim=1)
    frequencies = rotary_frequencies(head_size, 500000.0, scaling_factor=8.0)
    return rotary_table(frequencies, positions, dtype, 1.25 if batch > 1 else 1.0)


def check_rotation(length: int, batch: int, heads: int, head_size: int, dtype: torch.dtype, resets: bool) -> None:
    """Both directions, on a part of the fused projection; the rest of it must not change."""
    generator = torch.Generator().manual_seed(heads)
    width = heads * head_size
    fused = torch.randn(length, batch, width + 24, generator=generator, dtype=torch.float64).to(dtype)
    table = table_of(length, batch if resets else 1, head_size, dtype)
    for angles in (table, table.conj()):
        found, expected = fused.clone(), fused.clone()
        rotate(found[..., :width], angles)
        rotate_(expected[..., :width], angles)
        assert torch.equal(found[..., width:], fused[..., width:])
        # A product and a sum may be rounded together or apart before the result is rounded.
        rounding = torch.finfo(dtype).eps * expected.double().abs() + torch.finfo(table.real.dtype).eps * 4
        assert ((found.double() - expected.double()).abs() <= rounding).all()
        assert not torch.equal(found, fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("length", "batch", "heads", "head_size", "resets"),
    [(3, 2, 5, 128, False), (2, 3, 18, 64, True), (3, 1, 3, 80, False), (2, 2, 1, 6, True), (1, 1, 2, 256, False)],
)
def test_it_is_the_reference_in_both_directions(
    interpreter: TritonProcess, length: int, batch: int, heads: int, head_size: int, resets: bool, dtype: torch.dtype
) -> None:
    interpreter.run(check_rotation, length, batch, heads, head_size, dtype, resets)


def compile_rotation(head_size: int, backwards: bool) -> CompiledLaunch:
    """With a batch of two and the widths of a model's query, key and value."""
    fused = torch.empty(4, 2, 48 * head_size, dtype=torch.bfloat16)
    table = table_of(4, 1, head_size, torch.bfloat16)
    rotated_part = fused[..., : 40 * head_size]
    (launch,) = compile_launches(rotate, rotated_part, table.conj() if backwards else table)
    return launch


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("backwards", [False, True])
def test_on_hopper_it_moves_16_bytes_at_once_in_registers(
    compiler: TritonProcess, head_size: int, backwards: bool
) -> None:
    launch = compiler.run(compile_rotation, head_size, backwards)
    assert launch.spilled_bytes == 0
    assert launch.shared_bytes == 0, "pairs of numbers are exchanged between threads"
    assert launch.registers <= 64
    assert re.search(r"ld\.global\S*\.v4\.b32", launch.ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", launch.ptx)
