"""Attention within all documents of a batch in one call: what kernels receive, where gradients are written, and GPU
kernels on tensors of real runs without data."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron import torch_compat
from megatron.config.activations import ActivationConfig
from megatron.core.models.parallelize import build_model
from megatron.core.ops.attention import (
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionOutput,
    AttentionShape,
    Gradients,
    LocalAttention,
    fused_attention,
)
from megatron.core.ops.attention_kernels import (
    CudaFlashAttention,
    CudnnAttention,
    CudnnVarlenAttention,
    FlashAttention3,
    ReferenceAttention,
)
from megatron.core.ops.documents import Documents, PackedSpans
from megatron.core.topology import single_process
from megatron.torch_compat import FakeTensorMode
from tests.parallel.layout_run import CPU, MODEL, Layout, context


def in_documents(starts: Sequence[Sequence[int]], length: int) -> Documents:
    """A row for each of ``starts``, in which documents begin there."""
    flags = torch.zeros(len(starts), length, dtype=torch.bool)
    for row, places in zip(flags, starts):
        row[list(places)] = True
    return Documents(flags, masks_attention=True, resets_positions=False, device=CPU)


@given(flags=st.integers(1, 4).flatmap(lambda s: st.lists(st.lists(st.booleans(), min_size=s, max_size=s), min_size=1)))
def test_documents_are_packed_row_by_row(flags: list[list[bool]]) -> None:
    attention = Documents(torch.tensor(flags), True, False, CPU).attention
    assert attention is not None
    packed = attention.packed
    length = len(flags[0])
    starts = [row * length + at for row, one in enumerate(flags) for at in range(length) if at == 0 or one[at]]
    bounds = [*starts, len(flags) * length]
    assert packed.cu_seqlens.tolist() == bounds and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == max(stop - start for start, stop in pairwise(bounds))
    # Few shapes, whatever the documents.
    padded = attention.padded
    assert padded.max_seqlen == length and padded.cu_seqlens.dtype == torch.int32
    count = padded.cu_seqlens.numel() - 1
    assert count >= 16 and count.bit_count() == 1 and count // 2 < max(len(starts), 16)
    assert padded.cu_seqlens.tolist() == bounds + [bounds[-1]] * (count + 1 - len(bounds))


def test_cudnn_takes_all_documents_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators as ``varlen_attn`` calls them, by the definition: the log-sum-exp is ``[total, n, 1]``."""
    spans = in_documents([[0, 3, 9], [5]], 16).attention
    assert spans is not None
    packed, exact, random_state = [], ReferenceAttention(), (torch.tensor(1), torch.tensor(2))

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: None, *options: object) -> tuple[object, ...]:
        packed.append(options)
        attended = exact.forward_varlen(AttentionInputs(query, key, value, spans))
        assert attended.log_sum_exp is not None
        return attended.output, attended.log_sum_exp.t().unsqueeze(-1), *options[:4], *random_state, None

    def backward(grad: Tensor, *given: Any) -> Gradients:
        query, key, value, output, log_sum_exp, seed, offset, bias, *options = given
        packed.append((*options[:4], True, *options[4:]))
        assert (seed, offset) == random_state and bias is None
        assert log_sum_exp.shape == (32, 4, 1) and log_sum_exp.is_contiguous()
        attended = AttentionOutput(AttentionInputs(query, key, value, spans), output, log_sum_exp.squeeze(-1).t())
        return exact.backward_varlen(grad, attended)

    monkeypatch.setattr(torch_compat, "varlen_cudnn_attention", forward)
    monkeypatch.setattr(torch_compat, "varlen_cudnn_attention_backward", backward)
    shape, generator = AttentionShape(4, 2, 8), torch.Generator().manual_seed(0)
    qkv = torch.randn(16, 2, 64, generator=generator, dtype=torch.float64)
    results = []
    for kernel in (CudnnVarlenAttention(), exact):
        leaf = qkv.clone().requires_grad_()
        output = fused_attention(leaf, shape, LocalAttention(kernel), spans)
        output.backward(torch.cos(output.detach()))
        results.append((output.detach(), leaf.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*results))
    starts, length = spans.padded.cu_seqlens, 16
    assert len(packed) == 2 and all(one[0] is one[1] is starts for one in packed)
    assert all(one[2:] == (length, length, True, 0.0, True) for one in packed)


class Recorder(ReferenceAttention):
    """Notes what it receives."""

    def __init__(self) -> None:
        self.spans: list[PackedSpans] = []
        self.received: list[tuple[Tensor, ...]] = []

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        raise AssertionError("documents are computed in one call")

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        self.spans.append(inputs.packed_spans)
        self.received.append((inputs.query, inputs.key, inputs.value))
        return super().forward_varlen(inputs)

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        self.spans.append(attended.inputs.packed_spans)
        self.received.append((grad, *attended.tensors[:4]))
        return super().backward_varlen(grad, attended, out)


def test_one_row_is_packed_without_a_copy() -> None:
    shape, kernel = AttentionShape(4, 2, 8), Recorder()
    qkv = torch.randn(20, 1, 8 * 8, dtype=torch.float64, requires_grad=True)
    output = fused_attention(qkv, shape, LocalAttention(kernel), in_documents([[7, 8]], 20).attention)
    grad = torch.randn_like(output)
    output.backward(grad)
    memory = {tensor.untyped_storage().data_ptr() for tensor in (qkv, output, grad)}
    received = [tensor for call in kernel.received for tensor in call]
    assert len(received) == 8 and {tensor.untyped_storage().data_ptr() for tensor in received} == memory
    assert {tensor.shape for tensor in received} == {(20, 4, 8), (20, 2, 8)}


@pytest.mark.parametrize("recompute", [False, True])
def test_lengths_are_computed_once_for_all_layers_and_passes(recompute: bool) -> None:
    kernel = Recorder()
    activations = ActivationConfig(
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    built_in = context(single_process(), Layout())
    model = build_model(MODEL, type(built_in)(**{**vars(built_in), "attention_kernel": kernel}), 1, None, activations)
    documents = in_documents([[3, 9], [5]], 16)
    logits = model.transformer_chunks[0](torch.zeros(2, 16, dtype=torch.int64), documents)
    logits.sum().backward()
    assert len(kernel.spans) == MODEL.num_layers * (3 if recompute else 2)
    assert documents.attention is not None
    assert {id(one.cu_seqlens) for one in kernel.spans} == {id(documents.attention.packed.cu_seqlens)}


@pytest.fixture
def flash_attention_3(stand_ins: None) -> FlashAttention3:
    """With the stand-in for its interface."""
    return FlashAttention3()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("starts", [None, [0, 5, 17]])
def test_flash_attention_3_writes_gradients_into_the_fused_gradient(
    flash_attention_3: FlashAttention3, starts: list[int] | None, rows: int
) -> None:
    spans = None if starts is None else in_documents([starts] * rows, 24).attention
    shape, generator = AttentionShape(4, 2, 8), torch.Generator().manual_seed(0)
    qkv = torch.randn(24, rows, 64, generator=generator)
    grad = shape.query_heads_of(torch.randn(24, rows, 32, generator=generator))
    inputs = AttentionInputs(*shape.split(qkv), spans)
    attention, reference = LocalAttention(flash_attention_3), LocalAttention(ReferenceAttention())
    views = shape.split(torch.full_like(qkv, torch.nan))
    found = attention.backward(grad, attention.forward(inputs), views)
    expected = reference.backward(grad, reference.forward(inputs), views)
    # Several rows of documents are packed into a copy.
    assert (found is views) == (spans is None or rows == 1)
    assert expected is not views
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


RUNS = {"8B": AttentionShape(32, 8, 128), "70B TP4": AttentionShape(16, 2, 128), "405B TP8": AttentionShape(16, 1, 128)}


LENGTH = 8192
of_runs = pytest.mark.parametrize("shape", RUNS.values(), ids=RUNS)


def empty(*shape: int, device: str = "cpu") -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=device)


@of_runs
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("starts", [None, [0, 1000, 1001]])
@pytest.mark.parametrize("make", [CudaFlashAttention, CudnnAttention, None])
def test_gpu_kernels_attend_in_a_model_of_real_sizes(
    flash_attention_3: FlashAttention3,
    make: Callable[[], AttentionKernel] | None,
    starts: list[int] | None,
    rows: int,
    shape: AttentionShape,
) -> None:
    """On tensors without data: arguments, shapes and strides, not results. Builds of torch without CUDA have no
    autograd for fake CUDA tensors, so these are on the CPU. FlashAttention 3 is its stand-in."""
    kernel = flash_attention_3 if make is None else make()
    spans = None if starts is None else in_documents([starts] * rows, LENGTH).attention
    assert spans is None or spans.packed.max_seqlen == LENGTH - 1001
    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = empty(LENGTH, rows, shape.rotated_size + shape.key_value_heads * shape.head_size).requires_grad_()
        output = fused_attention(qkv, shape, LocalAttention(kernel), spans)
        assert output.shape == (LENGTH, rows, shape.query_heads * shape.head_size)
        assert output.is_contiguous(), "the GEMM after attention would copy it, forward and backward"
        output.backward(torch.empty_like(output))
        assert qkv.grad is not None and qkv.grad.shape == qkv.shape


@of_runs
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kernel", [CudaFlashAttention(), CudnnAttention()], ids=lambda kernel: type(kernel).__name__)
def test_torchs_kernels_take_fake_cuda_tensors_of_real_sizes(
    kernel: AttentionKernel, rows: int, shape: AttentionShape
) -> None:
    with FakeTensorMode(), torch.no_grad():
        qkv = empty(LENGTH, rows, shape.rotated_size + shape.key_value_heads * shape.head_size, device="cuda")
        grad, joined = (
            shape.query_heads_of(empty(LENGTH, rows, shape.query_heads * shape.head_size, device="cuda"))
            for _ in range(2)
        )
        inputs = AttentionInputs(*shape.split(qkv))
        query = inputs.query
        assert kernel.supports(query.device, query.dtype)
        attended = kernel.forward(inputs)
        assert attended.log_sum_exp is not None and attended.log_sum_exp.shape == query.shape[:3]
        assert attended.output.permute(2, 0, 1, 3).flatten(2).is_contiguous()
        saved = AttentionOutput(inputs, joined, attended.log_sum_exp, attended.kept)
        grads = kernel.backward(grad, saved)
        assert [one.shape for one in grads] == [query.shape, inputs.key.shape, inputs.value.shape]
        # A tile of other keys.
        key, value = (empty(rows, shape.key_value_heads, 1024, shape.head_size, device="cuda") for _ in range(2))
        others = AttentionInputs(query, key, value, mask=AttentionMask(is_causal=False))
        tile = kernel.forward(others)
        assert tile.log_sum_exp is not None
        assert (tile.output.shape, tile.log_sum_exp.shape) == (query.shape, query.shape[:3])
        grads = kernel.backward(tile.output, tile)
        assert [one.shape for one in grads] == [query.shape, key.shape, value.shape]
