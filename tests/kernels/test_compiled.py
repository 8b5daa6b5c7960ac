"""The functions that torch.compile takes compute what the definition says, for any shape and in all formats.

That they do so once compiled is in ``tests/gpu/test_elementwise.py``, whose small rows run on a CPU.
"""

import random

import pytest
import torch
from torch import Tensor

from megatron.core.ops.cross_entropy import (
    EagerCrossEntropy,
    compared_with_columns,
    wide_log_sum_exp,
)
from megatron.core.ops.norm import EagerRMSNorm, normalise, normalise_backward
from megatron.core.ops.rope import rotary_frequencies, rotary_table, rotate_, rotated
from megatron.core.ops.swiglu import (
    EagerSwiGLU,
    swiglu_backward,
    swiglu_reference,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SHAPES = [tuple(random.Random(seed).randint(1, top) for top in (9, 4, 70)) for seed in range(6)]


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    scale = max(float(expected.double().abs().max()), 1e-3)
    assert (found.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * scale


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    eager = EagerRMSNorm()
    inputs, gradient, weight = (
        made(*one, dtype=dtype, seed=seed) for seed, one in enumerate((shape, shape, shape[-1:]))
    )
    output, inverse_rms = normalise(inputs, weight, 1e-3)
    expected, expected_rms = eager.forward(inputs, weight, 1e-3)
    grads = normalise_backward(gradient, inputs, inverse_rms, weight)
    expected_grads = eager.backward(gradient, inputs, expected_rms, weight)
    for found, wanted in zip((output, inverse_rms, *grads), (expected, expected_rms, *expected_grads)):
        assert_close(found, wanted, dtype)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    eager, (rows, batch, width) = EagerSwiGLU(), shape
    inputs, gradient = made(rows, batch, 2 * width, dtype=dtype), made(rows, batch, width, dtype=dtype, seed=1)
    assert_close(swiglu_reference(inputs), eager.forward(inputs), dtype)
    assert_close(swiglu_backward(gradient, inputs), eager.backward(gradient, inputs), dtype)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    eager, wide, (rows, _, width) = EagerCrossEntropy(), torch.promote_types(dtype, torch.float32), shape
    # As of a padded vocabulary: not contiguous.
    scores = made(rows, width + 3, dtype=dtype)[:, :width]
    log_sum_exp = wide_log_sum_exp(scores, wide)
    assert_close(log_sum_exp, eager.log_sum_exp(scores, wide), wide)
    columns = torch.arange(rows) * 7 % width
    gradient, at_label = made(rows, dtype=wide), made(rows, dtype=wide, seed=2)
    expected = scores.clone()
    eager.write_gradient(expected, log_sum_exp, columns, gradient, at_label)
    found = compared_with_columns(scores, log_sum_exp, columns, gradient, at_label)
    assert_close(found.to(dtype), expected, dtype)


@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation(shape: tuple[int, int, int], sign: int, dtype: torch.dtype) -> None:
    length, batch, heads = shape
    activations = made(length, batch, heads % 5 * 8 + 8, dtype=dtype)
    table = rotary_table(rotary_frequencies(8, 100.0), torch.arange(length) + 3, dtype, 1.25)
    expected = rotate_(activations.clone(), table if sign == 1 else table.conj())
    assert_close(rotated(activations, torch.view_as_real(table), sign), expected, dtype)
