"""Every operation against its definition: in fp64 to 1e-10, outputs and gradients, and in lower precisions."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.ops import matmul
from megatron.core.ops.attention import (
    AttentionInputs,
    AttentionKernel,
    AttentionShape,
    LocalAttention,
    fused_attention,
)
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    TorchAttention,
    choose_attention_kernel,
)
from megatron.core.ops.matmul import linear, weight_gradient
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel, rms_norm
from megatron.core.ops.rope import CompiledRotation, apply_rotary, rotary_frequencies, rotary_table, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel, swiglu
from megatron.core.tensor_parallel.cross_entropy import (
    CompiledCrossEntropy,
    EagerCrossEntropy,
    VocabularyShard,
    vocab_parallel_cross_entropy,
)
from tests.rank_pool import RankPool
from tests.storage_watch import PeakWatch

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error relative to the largest element."""
DTYPES = list(TOLERANCE)
KERNELS: list[AttentionKernel] = [ReferenceAttention(), CpuFlashAttention(), TorchAttention()]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def wide_leaf(tensor: Tensor) -> Tensor:
    """A copy in fp64 that collects a gradient."""
    return tensor.detach().to(torch.float64, copy=True).requires_grad_()


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """``expected`` is in fp64; ``found`` was computed from inputs in ``dtype``."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    scale = expected.abs().max() if expected.any() else 1.0
    error = (found.double() - expected).abs().max() / scale
    assert error < TOLERANCE[dtype], f"off by {error:.1e}"


def compare(operation: Callable[..., Tensor], definition: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Output and gradients of ``operation`` on ``inputs``, which stay as they are, equal those of ``definition`` in
    fp64."""
    dtype = inputs[0].dtype
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [wide_leaf(tensor) for tensor in inputs]
    found, expected = operation(*ours), definition(*theirs)
    assert_close(found.detach(), expected.detach(), dtype)
    gradient = random(*expected.shape, seed=99).to(dtype)
    found.backward(gradient)
    expected.backward(gradient.double())
    for our, their, before in zip(ours, theirs, inputs):
        assert our.grad is not None and their.grad is not None
        assert_close(our.grad, their.grad, dtype)
        assert torch.equal(our.detach(), before)


# RMSNorm and SwiGLU


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves what a compiler fuses as it is; ``tests/gpu/test_elementwise.py`` compiles it."""
    return function


def normed(
    inputs: Tensor, weight: Tensor, epsilon: float, is_zero_centered: bool = False, kernel: RMSNormKernel | None = None
) -> Tensor:
    return cast(Tensor, rms_norm(inputs, weight, epsilon, kernel or EagerRMSNorm(), is_zero_centered))


@every_dtype
@pytest.mark.parametrize("kernel", [EagerRMSNorm(), CompiledRMSNorm(uncompiled)], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 2, 5), (7, 1, 64), (2, 33)])
def test_rms_norm(shape: tuple[int, ...], kernel: RMSNormKernel, dtype: torch.dtype) -> None:
    inputs, deviation = random(*shape, dtype=dtype) * 3, 0.1 * random(shape[-1], dtype=dtype)

    def definition(x: Tensor, w: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-3) * w

    compare(lambda x, w: normed(x, w, 1e-3, kernel=kernel), definition, [inputs, 1 + deviation])
    centred = [inputs, deviation]
    compare(lambda x, w: normed(x, w, 1e-3, True, kernel), lambda x, w: definition(x, 1 + w), centred)


def test_one_plus_a_bf16_weight_is_not_rounded_to_bf16() -> None:
    """bf16 rounds a gain of 1 + 2^-8 to 1."""
    inputs, weight = random(64, 1024, dtype=torch.bfloat16), torch.full((1024,), 2.0**-8, dtype=torch.bfloat16)
    found = normed(inputs, weight, 0.0, is_zero_centered=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, EagerRMSNorm().forward(inputs, 1.0 + weight.float(), 0.0)[0])
    assert not torch.equal(found, normed(inputs, torch.ones_like(weight), 0.0))


def test_rms_norm_of_zeros_is_zero_and_has_finite_gradients() -> None:
    inputs = torch.zeros(2, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    output = normed(inputs, weight, 1e-5)
    output.sum().backward()
    assert torch.equal(output, torch.zeros(2, 8))
    assert inputs.grad is not None and weight.grad is not None
    assert inputs.grad.isfinite().all() and weight.grad.isfinite().all()


def test_rms_norm_in_bf16_takes_its_statistics_in_fp32() -> None:
    """Then nearly every output is the exact one, rounded once; statistics in bf16 would move every other."""
    inputs = random(16, 1024, dtype=torch.bfloat16)
    wide = inputs.double()
    exact = (wide / wide.square().mean(-1, keepdim=True).sqrt()).to(torch.bfloat16)
    found = normed(inputs, torch.ones(1024, dtype=torch.bfloat16), 0.0)
    assert (found != exact).double().mean() < 0.01


@every_dtype
@pytest.mark.parametrize("kernel", [EagerSwiGLU(), CompiledSwiGLU(uncompiled)], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 14), (2, 2, 96)])
def test_swiglu(shape: tuple[int, ...], kernel: SwiGLUKernel, dtype: torch.dtype) -> None:
    inputs = random(*shape, dtype=dtype) * 3

    def definition(x: Tensor) -> Tensor:
        gate, up = x[..., : shape[-1] // 2], x[..., shape[-1] // 2 :]
        return gate / (1 + torch.exp(-gate)) * up

    compare(lambda x: cast(Tensor, swiglu(x, kernel)), definition, [inputs])


# Rotary embedding


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """``[s, b, n, d]``, of which pair (2i, 2i+1) of position p turns by p * 100^(-2i/d)."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    turns = [100.0 ** (-2 * pair / heads.shape[-1]) for pair in range(even.shape[-1])]
    angles = (positions[:, None] * torch.tensor(turns, dtype=torch.float64))[:, None, None]
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


@every_dtype
@pytest.mark.parametrize(("length", "batch", "heads", "size"), [(1, 1, 1, 2), (9, 2, 3, 8), (33, 1, 5, 4)])
def test_rotation_is_written_out(length: int, batch: int, heads: int, size: int, dtype: torch.dtype) -> None:
    positions = torch.arange(length) + 5
    activations = random(length, batch, heads * size, dtype=dtype)
    expected = rotated(activations.double().view(length, batch, heads, size), positions)
    table = rotary_table(rotary_frequencies(size, 100.0), positions, dtype)
    for rotate in (rotate_, CompiledRotation(uncompiled)):
        found = rotate(activations.clone(), table)
        assert_close(found.view_as(expected), expected, dtype)
        back = rotate(found.clone(), table.conj())
        assert_close(back, activations.double(), dtype)


def test_rotation_works_in_place_on_a_part_of_the_fused_projection() -> None:
    for dtype in DTYPES:
        fused = random(6, 2, 20, dtype=dtype)
        before = fused.clone()
        table = rotary_table(rotary_frequencies(4, 100.0), torch.arange(6), dtype)
        part = fused[..., :12]
        assert rotate_(part, table).data_ptr() == fused.data_ptr()
        assert torch.equal(fused[..., :12], rotate_(before[..., :12].contiguous(), table))
        assert torch.equal(fused[..., 12:], before[..., 12:])


def test_far_positions_keep_their_angle_in_fp32() -> None:
    """Angles are taken in fp64; at position 131,071 an fp32 angle would be off by 1e-2."""
    frequencies = rotary_frequencies(64, 500000.0)
    position = torch.tensor([131071])
    wide = rotary_table(frequencies, position, torch.float64)
    narrow = rotary_table(frequencies, position, torch.float32)
    assert narrow.dtype == torch.complex64
    assert (wide - narrow).abs().max() < 1e-6


# Attention


def attention_by_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal grouped-query attention ``[b, n, s, d]``, one query at a time."""
    heads, length = query.shape[1:3]
    repeats = heads // key.shape[1]
    rows = []
    for head in range(heads):
        keys, values = key[:, head // repeats], value[:, head // repeats]
        for place in range(length):
            scores = (query[:, head, place, None] * keys[:, : place + 1]).sum(-1) / math.sqrt(query.shape[-1])
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            rows.append((weights.unsqueeze(-1) * values[:, : place + 1]).sum(1))
    return torch.stack(rows, dim=1).unflatten(1, (heads, length))


ATTENTION_SHAPES = [
    # batch, query heads, key-value heads, length, head size
    (1, 1, 1, 1, 2),
    (2, 4, 4, 7, 8),
    (2, 4, 2, 17, 8),
    (1, 8, 1, 33, 4),
    (1, 6, 2, 5, 16),
    # The CPU's kernel: one block of queries and one more, whole blocks, and more keys than it takes at a time.
    (1, 2, 1, 65, 4),
    (1, 1, 1, 192, 2),
    (1, 1, 1, 513, 2),
]


@every_dtype
@every_kernel
@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=str)
def test_fused_attention_rotates_and_attends(
    kernel: AttentionKernel, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch, heads, groups, length, size = shape
    assert kernel.supports(CPU, dtype)
    positions = torch.arange(length)
    table = rotary_table(rotary_frequencies(size, 100.0), positions, dtype)

    def definition(fused: Tensor) -> Tensor:
        query, key, value = fused.unflatten(-1, (-1, size)).split((heads, groups, groups), dim=2)
        turned = rotated(query, positions), rotated(key, positions), value
        attended = attention_by_rows(*(part.permute(1, 2, 0, 3) for part in turned))
        return attended.permute(2, 0, 1, 3).flatten(2)

    def fresh(fused: Tensor) -> Tensor:
        # The operation overwrites its input, which must be somebody's fresh result.
        attention_shape = AttentionShape(heads, groups, size)
        turned = apply_rotary(fused * 1.0, table, attention_shape.rotated_size)
        return fused_attention(turned, attention_shape, LocalAttention(kernel))

    compare(fresh, definition, [random(length, batch, (heads + 2 * groups) * size, dtype=dtype)])


@every_kernel
def test_large_scores_do_not_overflow(kernel: AttentionKernel) -> None:
    query, key, value = (random(1, 2, 9, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    large = AttentionInputs(query * 1e4, key * 1e4, value)
    part = kernel.forward(large)
    grads = kernel.backward(torch.ones_like(part.output), part)
    assert all(tensor.isfinite().all() for tensor in (part.output, *grads))


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "expected", "merged"),
    [
        *((backend, "cpu", torch.float32, *[CpuFlashAttention] * 2) for backend in ("auto", "flash", "fused")),
        *((backend, "cpu", torch.float32, *[ReferenceAttention] * 2) for backend in ("unfused", "local")),
        ("auto", "cuda", torch.bfloat16, TorchAttention, CudaFlashAttention),
        ("flash", "cuda", torch.bfloat16, CudaFlashAttention, CudaFlashAttention),
        ("fused", "cuda", torch.bfloat16, CudnnAttention, CudnnAttention),
        ("fused", "cuda", torch.float32, TorchAttention, ReferenceAttention),
    ],
)
def test_the_attention_backend_chooses_the_kernel(
    backend: str, device: str, dtype: torch.dtype, expected: type, merged: type
) -> None:
    """Where results are merged, one that returns the log-sum-exp."""
    for needs_log_sum_exp, kernel in ((False, expected), (True, merged)):
        assert type(choose_attention_kernel(backend, torch.device(device), dtype, needs_log_sum_exp)) is kernel


# Cross entropy


def whole_logits(vocab_size: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Logits ``[s, b, v]``; those of padding ids are the largest, so that they would show."""
    logits = (random(5, 3, padded) * 4).to(dtype)
    logits[..., vocab_size:] = 50.0
    return logits


def labels_of(vocab_size: int) -> Tensor:
    """Every id of a small vocabulary occurs, the first and the last included."""
    return (torch.arange(15) * 7 % vocab_size).view(5, 3)


def run_cross_entropy(
    vocab_size: int, padded: int, dtype: torch.dtype, with_log_sum_exp: bool, is_compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp and gradient of this rank's part of the logits."""
    ranks = Communicator(range(dist.get_world_size()), dist.get_rank())
    kernel = CompiledCrossEntropy(uncompiled) if is_compiled else EagerCrossEntropy()
    part = whole_logits(vocab_size, padded, dtype).chunk(ranks.size, dim=-1)[ranks.rank].clone().requires_grad_()
    first = ranks.rank * part.shape[-1]
    shard = VocabularyShard(first, min(part.shape[-1], max(0, vocab_size - first)), ranks, kernel)
    loss, log_sum_exp = vocab_parallel_cross_entropy(part * 1.0, labels_of(vocab_size), shard)
    weighted(loss, log_sum_exp, with_log_sum_exp).backward()
    assert part.grad is not None
    return loss.detach(), log_sum_exp.detach(), part.grad


def weighted(loss: Tensor, log_sum_exp: Tensor, with_log_sum_exp: bool) -> Tensor:
    """Tokens count differently, as under a loss mask."""
    total = loss + 0.5 * log_sum_exp.square() if with_log_sum_exp else loss
    return (total * torch.arange(15).view(5, 3)).sum()


@every_dtype
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("with_log_sum_exp", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("vocab_size", "padded"),
    [(16, 16), (13, 16), (6, 16), (1, 4)],
    ids=["no padding", "padded", "ranks with padding alone", "one id"],
)
def test_cross_entropy_is_torchs(
    four_ranks: RankPool,
    vocab_size: int,
    padded: int,
    world_size: int,
    dtype: torch.dtype,
    with_log_sum_exp: bool,
    is_compiled: bool,
) -> None:
    case = (vocab_size, padded, dtype, with_log_sum_exp, is_compiled)
    parts = four_ranks.run(run_cross_entropy, *case, world_size=world_size)
    logits = wide_leaf(whole_logits(vocab_size, padded, dtype))
    labels = labels_of(vocab_size)
    expected = F.cross_entropy(logits[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none").view(5, 3)
    expected_log_sum_exp = torch.logsumexp(logits[..., :vocab_size], dim=-1)
    weighted(expected, expected_log_sum_exp, with_log_sum_exp).backward()
    assert logits.grad is not None
    loss_dtype = torch.promote_types(dtype, torch.float32)
    for loss, log_sum_exp, _ in parts:
        assert_close(loss, expected.detach(), loss_dtype)
        assert_close(log_sum_exp, expected_log_sum_exp.detach(), loss_dtype)
    gradient = torch.cat([grad for _, _, grad in parts], dim=-1)
    assert_close(gradient, logits.grad, dtype)
    assert not gradient[..., vocab_size:].any(), "padding ids get a gradient"


def alone(width: int) -> VocabularyShard:
    return VocabularyShard(0, width, Communicator((0,), 0), EagerCrossEntropy())


def test_cross_entropy_needs_no_memory_of_the_size_of_the_logits() -> None:
    logits = torch.randn(2048, 4096).bfloat16()
    product = (logits.requires_grad_(True) * 1.0).detach().requires_grad_(True)
    with PeakWatch() as watch:
        loss, _ = vocab_parallel_cross_entropy(product, torch.arange(2048), alone(4096))
        loss.sum().backward()
    assert product.grad is not None and product.grad.data_ptr() == product.data_ptr()
    assert watch.peak < logits.nbytes / 2


def test_cross_entropy_of_large_logits_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss, _ = vocab_parallel_cross_entropy(logits * 1.0, torch.tensor([1]), alone(3))
    loss.sum().backward()
    assert loss.tolist() == [2e4]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


# Matrix products


def test_fp16_products_are_those_of_fp32_rounded_once() -> None:
    """However many numbers are added up, and however large a sum is in between."""
    inputs, weight = random(3, 4096, dtype=torch.float16), random(5, 4096, dtype=torch.float16)
    assert torch.equal(linear(inputs, weight), linear(inputs.float(), weight.float()).half())
    tokens, gradients = random(4096, 8, dtype=torch.float16), random(4096, 4, dtype=torch.float16)
    wide = weight_gradient(gradients.float(), tokens.float())
    assert torch.equal(weight_gradient(gradients, tokens), wide.half())
    large = torch.full((1, 2), 60000.0, dtype=torch.float16)
    assert linear(large, torch.tensor([[2.0, -2.0]], dtype=torch.float16)).item() == 0.0
    assert linear(large, torch.ones(1, 2, dtype=torch.float16)).item() == math.inf


@every_dtype
@pytest.mark.parametrize("has_onednn", [True, False])
def test_linear_is_torchs(has_onednn: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the transposed views that backward passes hand over."""
    if not has_onednn:
        monkeypatch.setattr(matmul, "_ONEDNN_LINEAR", None)
    rows, inner, outer = 7, 24, 10
    inputs, weight = random(rows, inner, dtype=dtype), random(outer, inner, dtype=dtype)
    transposed_inputs = random(inner, rows, dtype=dtype).t()
    transposed_weight = random(inner, outer, dtype=dtype).t()
    assert not transposed_inputs.is_contiguous() and not transposed_weight.is_contiguous()
    for first in (inputs, transposed_inputs):
        for second in (weight, transposed_weight):
            found = linear(first, second)
            assert_close(found, F.linear(first.double(), second.double()), dtype)
            assert found.is_contiguous()
    batched = random(3, 2, inner, dtype=dtype)
    assert_close(linear(batched, weight), F.linear(batched.double(), weight.double()), dtype)
    part = random(4, 2, 2 * inner, dtype=dtype)[..., inner:]
    assert_close(linear(part, weight), F.linear(part.double(), weight.double()), dtype)


@every_dtype
@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(10, 24), (24, 10), (8, 8)])
def test_a_weight_gradient_sums_over_all_tokens(
    outputs: int, inputs: int, has_onednn: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever side is the smaller."""
    if not has_onednn:
        monkeypatch.setattr(matmul, "_ONEDNN_LINEAR", None)
    grad_outputs, activations = random(5, 3, outputs, dtype=dtype), random(5, 3, inputs, seed=1, dtype=dtype)
    expected = torch.einsum("sbo,sbi->oi", grad_outputs.double(), activations.double())
    assert_close(weight_gradient(grad_outputs, activations), expected, dtype)
