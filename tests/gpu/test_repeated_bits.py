"""Under ``--deterministic-mode`` a kernel that runs twice gives the same bits: a row for each kernel and pass."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.selection import Kernels
from megatron.core.ops.attention import AttentionInputs, AttentionShape, LocalAttention
from megatron.core.ops.documents import Documents
from megatron.core.ops.rope import rotary_frequencies, rotary_table
from tests.gpu.kernels_of_runs import implementations, kernels_with, on_cpu, random

Passes = tuple[Callable[[], Sequence[Tensor]], Callable[[], Sequence[Tensor]]]
"""Forward and backward."""


def attention(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    shape, starts = AttentionShape(8, 2, 128), torch.zeros(1, tokens, dtype=torch.bool)
    starts[0, :: tokens // 4] = True
    qkv = random(tokens, 1, 12 * 128, device=device, dtype=dtype)
    grad = shape.query_heads_of(random(tokens, 1, 8 * 128, device=device, dtype=dtype, seed=1))
    inputs = AttentionInputs(*shape.split(qkv), Documents(starts, True, False, device).attention)
    local = LocalAttention(kernels.attention)
    return lambda: (local.forward(inputs).output,), lambda: local.backward(grad, local.forward(inputs))


def rms_norm(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    kernel, gain = kernels.layers.rms_norm, random(4096, device=device, dtype=dtype, seed=2)
    inputs, grad = (random(tokens, 1, 4096, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    inverse_rms = kernel.forward(inputs, gain, 1e-5)[1]
    return lambda: kernel.forward(inputs, gain, 1e-5), lambda: kernel.backward(grad, inputs, inverse_rms, gain)


def swiglu(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    kernel, inputs = kernels.layers.swiglu, random(tokens, 1, 8192, device=device, dtype=dtype)
    grad = random(tokens, 1, 4096, device=device, dtype=dtype, seed=1)
    return lambda: (kernel.forward(inputs),), lambda: (kernel.backward(grad, inputs),)


def rope(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    rotate, heads = kernels.layers.rotate, random(tokens, 1, 1024, device=device, dtype=dtype)
    table = rotary_table(rotary_frequencies(128, 500_000.0), torch.arange(tokens, device=device), dtype)
    return lambda: (rotate(heads.clone(), table),), lambda: (rotate(heads.clone(), table.conj()),)


def cross_entropy(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    kernel, logits = kernels.layers.cross_entropy, random(tokens, 16032, device=device, dtype=dtype)
    columns, grad = (torch.arange(tokens) * 7919 % 16032).to(device), random(tokens, device=device).float()
    log_sum_exp = kernel.log_sum_exp(logits, torch.float32)

    def backward() -> Sequence[Tensor]:
        written = logits.clone()
        kernel.write_gradient(written, log_sum_exp, columns, grad, -grad)
        return (written,)

    return lambda: (kernel.log_sum_exp(logits, torch.float32),), backward


def products(kernels: Kernels, device: torch.device, dtype: torch.dtype, tokens: int) -> Passes:
    inputs, weight = random(tokens, 4096, device=device, dtype=dtype), random(6144, 4096, device=device, dtype=dtype)
    grad, buffer = random(tokens, 6144, device=device, dtype=dtype, seed=1), torch.ones(6144, 4096, device=device)

    def backward() -> Sequence[Tensor]:
        added = buffer.clone()
        kernels.weight_gradient.write(added, grad, inputs, accumulate=True)
        return grad @ weight, added

    return lambda: (inputs @ weight.t(),), backward


OPERATIONS = {
    "attention": attention,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "weight_gradient": products,
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Compiling for a CPU takes seconds.
ROWS = [(one, name) for one in OPERATIONS for name in implementations(one)]
MARKED = [row if row[1] == "compiled" else on_cpu(*row) for row in ROWS]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("operation", "name"), MARKED)
def test_two_runs_have_the_same_bits(
    device: torch.device, deterministic: None, operation: str, name: str, direction: str
) -> None:
    dtype, tokens = (torch.bfloat16, 8192) if device.type == "cuda" else (torch.float32, 64)
    kernels = kernels_with(device, dtype, "--kernel", f"{operation}={name}", "--documents", "16")
    run = OPERATIONS[operation](kernels, device, dtype, tokens)[direction == "backward"]
    first, *others = ([result.clone() for result in run()] for _ in range(3))
    assert all(torch.equal(one, result) for other in others for one, result in zip(first, other, strict=True))
