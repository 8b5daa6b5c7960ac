"""Every attention kernel against the definition in fp64: run shapes, documents, and tiles that are merged."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import (
    CAUSAL,
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionShape,
    LocalAttention,
    Tile,
    TiledAttention,
    TiledGradients,
)
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.ops.documents import Documents
from tests.gpu.kernels_of_runs import assert_close, implementations, kernels_with, on_cpu, random


@dataclass(frozen=True)
class Case:
    """Heads of a rank and sequences of a microbatch."""

    groups: int
    heads_per_group: int
    rows: int
    length: int
    head_size: int = 128

    def __str__(self) -> str:
        return f"{self.groups}x{self.heads_per_group}-{self.rows}x{self.length}"

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.groups * self.heads_per_group, self.groups, self.head_size)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value as views of the fused projection, and the gradient of the output."""
        shape = self.shape
        width = (shape.query_heads + 2 * shape.key_value_heads) * self.head_size
        fused = random(self.length, self.rows, width, device=device, dtype=dtype)
        grad = random(self.length, self.rows, shape.query_heads * self.head_size, device=device, dtype=dtype, seed=1)
        return *shape.split(fused), shape.query_heads_of(grad)

    def documents(self, device: torch.device) -> Documents:
        starts = torch.rand(self.rows, self.length, generator=torch.Generator().manual_seed(2)) < 8 / self.length
        return Documents(starts, masks_attention=True, resets_positions=False, device=device)


# A group for TP8 of 405B, 8 for 8B; ratios of 405B, 70B and 8B.
RUNS = [Case(*one) for one in product((1, 4, 8), (4,), (1, 2), (192, 1000, 8192))]
RUNS += [Case(1, 16, 1, 8192), Case(2, 8, 2, 8192)]
SMALL = [Case(1, 2, 1, 24, 16), Case(2, 2, 2, 70, 16)]
CASES = [*RUNS, *(on_cpu(case) for case in SMALL)]

every_kernel = pytest.mark.parametrize("kernel_name", implementations("attention"))


def dtype_of(case: Case) -> torch.dtype:
    """bf16 as in runs; the small cases are also for a CPU."""
    return torch.float32 if case in SMALL else torch.bfloat16


def kernel_of(name: str, device: torch.device, case: Case, documents: bool = False) -> AttentionKernel:
    if name == "reference" and case.length > 2000:
        pytest.skip("it holds all scores")
    flags = ["--documents", "16"] if documents else []
    return kernels_with(device, dtype_of(case), "--kernel", f"attention={name}", *flags).attention


def compare_some_heads(
    case: Case, inputs: AttentionInputs, documents: Documents | None, grad: Tensor, found: tuple[Tensor, ...]
) -> None:
    """Output and gradients of the first and the last row and group with the definition in fp64."""
    dtype = dtype_of(case)
    exact, ratio = LocalAttention(ReferenceAttention()), case.heads_per_group
    for row, group in {(0, 0), (case.rows - 1, case.groups - 1)}:
        rows, one, where = slice(row, row + 1), slice(group, group + 1), f"of row {row}, group {group}"
        own = None if documents is None else replace(documents, starts=documents.starts[rows]).attention
        key, value = inputs.key[rows, one].double(), inputs.value[rows, one].double()
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        # One head at a time, because the definition holds all scores.
        for head in range(group * ratio, (group + 1) * ratio):
            heads = slice(head, head + 1)
            part = AttentionInputs(inputs.query[rows, heads].double(), key, value, own)
            attended = exact.forward(part)
            grads = exact.backward(grad[rows, heads].double(), attended)
            assert_close(found[0][rows, heads], attended.output, dtype, f"output {where}")
            assert_close(found[1][rows, heads], grads[0], dtype, f"query's gradient {where}")
            grad_key, grad_value = grad_key + grads[1], grad_value + grads[2]
        assert_close(found[2][rows, one], grad_key, dtype, f"key's gradient {where}")
        assert_close(found[3][rows, one], grad_value, dtype, f"value's gradient {where}")


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("in_documents", [False, True], ids=["whole", "documents"])
def test_attention(device: torch.device, kernel_name: str, case: Case, in_documents: bool) -> None:
    attention = LocalAttention(kernel_of(kernel_name, device, case, in_documents))
    query, key, value, grad = case.tensors(device, dtype_of(case))
    documents = case.documents(device) if in_documents else None
    inputs = AttentionInputs(query, key, value, None if documents is None else documents.attention)
    attended = attention.forward(inputs)
    # As the backward pass gets it: the layer saves the joined output.
    joined = case.shape.query_heads_of(attended.output.permute(2, 0, 1, 3).flatten(2))
    grads = attention.backward(grad, replace(attended, output=joined))
    compare_some_heads(case, inputs, documents, grad, (attended.output, *grads))


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_with_other_keys_are_merged(device: torch.device, kernel_name: str, case: Case) -> None:
    kernel = kernel_of(kernel_name, device, case)
    if not kernel.returns_log_sum_exp:
        pytest.skip("it does not return the log-sum-exp")
    query, key, value, grad = case.tensors(device, dtype_of(case))
    half, every = case.length // 2, slice(None)
    begin, end = slice(0, half), slice(half, case.length)
    own = [Tile(every, begin, begin, CAUSAL), Tile(every, end, end, CAUSAL)]
    before = [Tile(every, end, begin, AttentionMask(is_causal=False))]
    inputs = AttentionInputs(query, key, value)
    tiled = TiledAttention(kernel, inputs)
    tiled.add(own, key, value)
    tiled.add(before, key, value)
    attended = tiled.result()
    gradients = TiledGradients(kernel, grad, attended)
    grad_key, grad_value = (torch.zeros_like(one, dtype=gradients.dtype) for one in (key, value))
    gradients.add([*own, *before], key, value, grad_key, grad_value)
    found = attended.output, gradients.query, grad_key, grad_value
    compare_some_heads(case, inputs, None, grad, found)
