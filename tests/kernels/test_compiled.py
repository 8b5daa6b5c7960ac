"""What is compiled computes what the definition says, for any shape; here with the compiler for CPUs.

The functions that torch.compile takes are compared in all formats as they are; compiled, in one or two.
"""

import random
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.cross_entropy import (
    CompiledCrossEntropy,
    CrossEntropyKernel,
    EagerCrossEntropy,
    compared_with_columns,
    wide_log_sum_exp,
)
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, normalise, normalise_backward
from megatron.core.ops.rope import CompiledRotation, rotary_frequencies, rotary_table, rotate_, rotated
from megatron.core.ops.swiglu import (
    CompiledSwiGLU,
    EagerSwiGLU,
    swiglu_backward,
    swiglu_reference,
)

pytestmark = pytest.mark.processes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
SHAPES = [tuple(random.Random(seed).randint(1, top) for top in (9, 4, 70)) for seed in range(6)]

FEW = [(5, 2, 24), (7, 3, 40)]
"""The first is compiled as it is, the second for any size: a third would cost nothing, compilation does."""


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    scale = max(float(expected.double().abs().max()), 1e-3)
    assert (found.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * scale


def check_norm(forward: Any, backward: Any, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    eager = EagerRMSNorm()
    for shape in shapes:
        inputs, gradient, weight = made(*shape, dtype=dtype), made(*shape, dtype=dtype, seed=1), made(shape[-1])
        weight = weight.to(dtype)
        output, inverse_rms = forward(inputs, weight, 1e-3)
        expected, expected_rms = eager.forward(inputs, weight, 1e-3)
        grads = backward(gradient, inputs, inverse_rms, weight)
        expected_grads = eager.backward(gradient, inputs, expected_rms, weight)
        for found, wanted in zip((output, inverse_rms, *grads), (expected, expected_rms, *expected_grads)):
            assert_close(found, wanted, dtype)


def check_swiglu(forward: Any, backward: Any, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    eager = EagerSwiGLU()
    for rows, batch, width in shapes:
        inputs, gradient = made(rows, batch, 2 * width, dtype=dtype), made(rows, batch, width, dtype=dtype, seed=1)
        assert_close(forward(inputs), eager.forward(inputs), dtype)
        assert_close(backward(gradient, inputs), eager.backward(gradient, inputs), dtype)


def check_cross_entropy(
    kernel: CrossEntropyKernel, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> None:
    eager, wide = EagerCrossEntropy(), torch.promote_types(dtype, torch.float32)
    for rows, _, width in shapes:
        # As of a padded vocabulary: not contiguous.
        scores = made(rows, width + 3, dtype=dtype)[:, :width]
        log_sum_exp = kernel.log_sum_exp(scores, wide)
        assert_close(log_sum_exp, eager.log_sum_exp(scores, wide), wide)
        columns = torch.arange(rows) * 7 % width
        gradient, at_label = made(rows, dtype=wide), made(rows, dtype=wide, seed=2)
        found, expected = scores.clone(), scores.clone()
        kernel.write_gradient(found, log_sum_exp, columns, gradient, at_label)
        eager.write_gradient(expected, log_sum_exp, columns, gradient, at_label)
        assert_close(found, expected, dtype)


class Uncompiled:
    """The functions that :class:`CompiledCrossEntropy` compiles."""

    log_sum_exp = staticmethod(wide_log_sum_exp)

    def write_gradient(self, scores: Tensor, *more: Tensor) -> None:
        scores.copy_(compared_with_columns(scores, *more))


@every_dtype
def test_the_functions_to_be_compiled(dtype: torch.dtype) -> None:
    check_norm(normalise, normalise_backward, dtype)
    check_swiglu(swiglu_reference, swiglu_backward, dtype)
    check_cross_entropy(Uncompiled(), dtype)
    for sign in (1, -1):
        for length, batch, heads in SHAPES:
            activations = made(length, batch, heads % 5 * 8 + 8, dtype=dtype)
            table = rotary_table(rotary_frequencies(8, 100.0), torch.arange(length) + 3, dtype, 1.25)
            expected = rotate_(activations.clone(), table if sign == 1 else table.conj())
            assert_close(rotated(activations, torch.view_as_real(table), sign), expected, dtype)


@compiles
def test_compiled_norm() -> None:
    kernel = CompiledRMSNorm()
    check_norm(kernel.forward, kernel.backward, torch.bfloat16, FEW)


@compiles
def test_compiled_swiglu() -> None:
    kernel = CompiledSwiGLU()
    check_swiglu(kernel.forward, kernel.backward, torch.bfloat16, FEW[:1])


@compiles
def test_compiled_cross_entropy() -> None:
    check_cross_entropy(CompiledCrossEntropy(), torch.bfloat16, FEW[:1])


@compiles
def test_compiled_rotation_of_a_part_of_the_fused_projection_in_place_and_back() -> None:
    kernel = CompiledRotation()
    # Positions of one row, and of each: as where documents reset them.
    for positions, magnitude in ((torch.arange(6), 1.0), (torch.arange(12).view(6, 2), 1.25)):
        table = rotary_table(rotary_frequencies(4, 100.0), positions, torch.float32, magnitude)
        fused = made(6, 2, 20)
        before, expected = fused.clone(), rotate_(fused[..., :12].clone(), table)
        kernel(fused[..., :12], table)
        assert_close(fused[..., :12], expected, torch.float32)
        assert torch.equal(fused[..., 12:], before[..., 12:])
        kernel(fused[..., :12], table.conj())
        before[..., :12] *= magnitude**2
        assert_close(fused, before, torch.float32)
