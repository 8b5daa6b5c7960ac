"""The rotation in one Triton kernel is that of the reference, and reads and writes every number once."""

import re

import pytest
import torch
from torch import Tensor

from megatron.core.backends.triton.elementwise import rotate
from megatron.core.ops.rope import rotary_frequencies, rotary_table, rotate_
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

pytestmark = pytest.mark.processes


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
