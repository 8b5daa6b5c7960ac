"""Tokens to rows and back, against plain indexing with autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.moe.dispatch import RowOrder, rows_of, sum_of_choices


def keys_of(num_tokens: int, topk: int, num_keys: int, seed: int) -> Tensor:
    return torch.randint(num_keys, (num_tokens, topk), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_rows_are_sorted_by_key_and_then_by_choice(num_tokens: int, topk: int, num_keys: int, seed: int) -> None:
    keys = keys_of(num_tokens, topk, num_keys, seed)
    order = RowOrder.sorted_by(keys)
    wanted = sorted(range(keys.numel()), key=lambda choice: (keys.flatten()[choice].item(), choice))
    assert order.choices.tolist() == wanted
    assert order.rows.flatten()[order.choices].tolist() == list(range(keys.numel()))
    assert order.tokens.tolist() == [choice // topk for choice in wanted]


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_gradients_are_those_of_plain_indexing(num_tokens: int, topk: int, seed: int, is_weighted: bool) -> None:
    """Also if only the first rows are here, or none."""
    torch.manual_seed(seed)
    keys = keys_of(num_tokens, topk, 3, seed)
    order = RowOrder.sorted_by(keys, int(torch.randint(keys.numel() + 1, ())))
    tokens, weights, direction = randn(num_tokens, 3), randn(num_tokens, topk), torch.randn(num_tokens, 3).double()
    scale = torch.rand(order.choices.numel(), 1).double()
    results = []
    for is_plain in (True, False):
        if is_plain:
            rows = tokens[order.tokens] * scale
            chosen = torch.zeros(keys.numel(), 3).double().index_put((order.choices,), rows).view(num_tokens, topk, 3)
            output = (chosen * weights.unsqueeze(2) if is_weighted else chosen).sum(dim=1)
        else:
            output = sum_of_choices(rows_of(tokens, order) * scale, order, weights if is_weighted else None)
        inputs = (tokens, weights) if is_weighted else (tokens,)
        results.append([output, *torch.autograd.grad(output, inputs, direction)])
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
def test_16_bit_rows_are_added_in_fp32(weighted: bool) -> None:
    """256 + 1 + 1 + … in bf16 would stay 256."""
    rows = torch.ones(9, 1, dtype=torch.bfloat16)
    rows[0] = 256
    order = RowOrder.sorted_by(torch.arange(9).unsqueeze(0))
    total = sum_of_choices(rows, order, torch.ones(1, 9) if weighted else None)
    assert total.dtype == torch.bfloat16
    assert total.item() == 264


def test_weights_of_16_bit_rows_keep_their_precision() -> None:
    """The gradient of fp32 weights is fp32, and rows and their gradients are in bf16."""
    rows = torch.full((2, 4), 3.0, dtype=torch.bfloat16).requires_grad_()
    weights = torch.tensor([[1.001, 0.501]]).requires_grad_()
    order = RowOrder.sorted_by(torch.tensor([[0, 1]]))
    total = sum_of_choices(rows, order, weights)
    total.sum().backward()
    assert total.dtype == torch.bfloat16
    assert total[0, 0].item() == torch.tensor(3 * 1.502).bfloat16().item()
    assert weights.grad is not None and rows.grad is not None
    assert weights.grad.tolist() == [[12.0, 12.0]]
    assert rows.grad.dtype == torch.bfloat16
    assert rows.grad[:, 0].tolist() == torch.tensor([1.001, 0.501]).bfloat16().tolist()
