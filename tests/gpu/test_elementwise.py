"""Every norm, SwiGLU, rotation and cross-entropy kernel, both passes, against the eager kernel in fp64."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8 import E4M3, DelayedQuantization, EagerQuantization, Fp8Format, dequantize
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.rope import rotary_frequencies, rotary_table, rotate_
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.cross_entropy import EagerCrossEntropy
from tests.gpu.kernels_of_runs import assert_close, implementations, kernels_with, on_cpu, random

# Tokens, rows, width: of runs, and one that no vector width divides.
SHAPES = [(8192, 1, 4096), (1000, 2, 16384), (333, 2, 1003), on_cpu(9, 2, 24), on_cpu(5, 3, 13)]
every_shape = pytest.mark.parametrize(("tokens", "rows", "width"), SHAPES)
HALF = torch.bfloat16
DELAYED = ("--fp8-format", "hybrid", "--fp8-recipe", "delayed")
"""Kernels that quantise their output are chosen with known scales only."""


def with_known_scale(device: torch.device) -> DelayedQuantization:
    scale, step_amax = torch.tensor([16.0, 0.0], device=device)
    return DelayedQuantization(EagerQuantization(), Fp8Format(scale, E4M3, Layout.BOTH), step_amax)


def assert_quantized(output: QuantizedTensor, quantization: DelayedQuantization, wanted: Tensor) -> None:
    """Compare both layouts and the amax with ``wanted`` in fp64. E4M3 rounds to 2^-4, on average to 2.6 %."""
    assert_close(dequantize(output), wanted, HALF, "rows", tolerance=4e-2)
    assert output.transposed is not None
    assert torch.equal(output.transposed.view(torch.uint8), output.data.flatten(0, 1).t().view(torch.uint8))
    assert_close(quantization.step_amax, wanted.abs().max(), HALF, "amax")


@every_shape
@pytest.mark.parametrize("name", implementations("rms_norm"))
def test_norm(device: torch.device, name: str, tokens: int, rows: int, width: int) -> None:
    kernel = kernels_with(device, HALF, *DELAYED, "--kernel", f"rms_norm={name}").layers.rms_norm
    inputs, gradient = (random(tokens, rows, width, device=device, dtype=HALF, seed=seed) for seed in (0, 1))
    weight = random(width, device=device, dtype=HALF, seed=2)
    output, inverse_rms = kernel.forward(inputs, weight, 1e-5)
    grads = kernel.backward(gradient, inputs, inverse_rms, weight)
    exact = EagerRMSNorm()
    wanted, exact_rms = exact.forward(inputs.double(), weight.double(), 1e-5)
    wanted_grads = exact.backward(gradient.double(), inputs.double(), exact_rms, weight.double())
    for name_of, found, one in zip(("output", "input", "weight"), (output, *grads), (wanted, *wanted_grads)):
        assert_close(found, one, HALF, name_of)


@every_shape
@pytest.mark.parametrize("gain_dtype", [HALF, torch.float32])
@pytest.mark.parametrize("name", implementations("rms_norm"))
def test_norm_that_quantises(
    device: torch.device, name: str, gain_dtype: torch.dtype, tokens: int, rows: int, width: int
) -> None:
    kernel = kernels_with(device, HALF, *DELAYED, "--kernel", f"rms_norm={name}").layers.rms_norm
    inputs, gain = (
        random(tokens, rows, width, device=device, dtype=HALF),
        random(width, device=device, dtype=gain_dtype),
    )
    quantization = with_known_scale(device)
    output, inverse_rms = kernel.quantized(inputs, gain, 1e-5, quantization)
    wanted, exact_rms = EagerRMSNorm().forward(inputs.double(), gain.double(), 1e-5)
    assert_quantized(output, quantization, wanted)
    assert_close(inverse_rms.view(exact_rms.shape), exact_rms, torch.float32, "inverse RMS")


@every_shape
@pytest.mark.parametrize("name", implementations("swiglu"))
def test_swiglu_that_quantises(device: torch.device, name: str, tokens: int, rows: int, width: int) -> None:
    kernel = kernels_with(device, HALF, *DELAYED, "--kernel", f"swiglu={name}").layers.swiglu
    inputs, quantization = random(tokens, rows, 2 * width, device=device, dtype=HALF), with_known_scale(device)
    output = kernel.quantized(inputs, quantization)
    assert_quantized(output, quantization, EagerSwiGLU().forward(inputs.double()))


@every_shape
@pytest.mark.parametrize("name", implementations("swiglu"))
def test_swiglu(device: torch.device, name: str, tokens: int, rows: int, width: int) -> None:
    kernel, exact = kernels_with(device, HALF, *DELAYED, "--kernel", f"swiglu={name}").layers.swiglu, EagerSwiGLU()
    inputs = random(tokens, rows, 2 * width, device=device, dtype=HALF)
    gradient = random(tokens, rows, width, device=device, dtype=HALF, seed=1)
    wanted = exact.forward(inputs.double()), exact.backward(gradient.double(), inputs.double())
    assert_close(kernel.forward(inputs), wanted[0], HALF, "output")
    assert_close(kernel.backward(gradient, inputs), wanted[1], HALF, "gradient")


@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "size"), [(8192, 1, 40, 128), (1000, 2, 17, 128), (333, 2, 3, 64), on_cpu(7, 2, 3, 8)]
)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", implementations("rope"))
def test_rotation(
    device: torch.device, name: str, per_row: bool, tokens: int, rows: int, heads: int, size: int
) -> None:
    rotate = kernels_with(device, HALF, "--kernel", f"rope={name}").layers.rotate
    positions = torch.arange(tokens).unsqueeze(1) + 3 * torch.arange(rows) if per_row else torch.arange(tokens)
    frequencies = rotary_frequencies(size, 500_000.0)
    fused = random(tokens, rows, (heads + 2) * size, device=device, dtype=HALF)
    before = fused.clone()
    table, exact = (rotary_table(frequencies, positions.to(device), dtype) for dtype in (HALF, torch.float64))
    for sign in ("forward", "backward"):
        wanted = rotate_(fused[..., : heads * size].double(), exact)
        rotate(fused[..., : heads * size], table)
        assert_close(fused[..., : heads * size], wanted, HALF, sign)
        table, exact = table.conj(), exact.conj()
    assert torch.equal(fused[..., heads * size :], before[..., heads * size :])
    assert_close(fused, before.double(), HALF)


# Columns of the padded vocabulary shard, and of these the ids that exist.
VOCABULARIES = [(8192, 128256, 128256), (1000, 16128, 16032), (333, 32128, 32003), on_cpu(9, 24, 21)]


@pytest.mark.parametrize(("tokens", "padded", "width"), VOCABULARIES)
@pytest.mark.parametrize("name", implementations("cross_entropy"))
def test_cross_entropy(device: torch.device, name: str, tokens: int, padded: int, width: int) -> None:
    kernel = kernels_with(device, HALF, "--kernel", f"cross_entropy={name}").layers.cross_entropy
    logits = random(tokens, padded, device=device, dtype=HALF)
    tail = logits[:, width:].clone()
    scores, exact = logits[:, :width], EagerCrossEntropy()
    wanted = scores.double()
    log_sum_exp, wanted_lse = kernel.log_sum_exp(scores, torch.float32), exact.log_sum_exp(wanted, torch.float64)
    assert_close(log_sum_exp, wanted_lse, torch.float32, "log-sum-exp")
    columns = (torch.arange(tokens) * 7919 % width).to(device)
    gradient = random(tokens, device=device, dtype=torch.float32, seed=1)
    kernel.write_gradient(scores, log_sum_exp, columns, gradient, -gradient)
    exact.write_gradient(wanted, wanted_lse, columns, gradient.double(), -gradient.double())
    assert_close(scores, wanted, HALF, "gradient")
    assert torch.equal(logits[:, width:], tail)
