"""The loss of some tokens at a time is the loss of all: losses, gradients, evaluation, and the logits beside it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.activations import ActivationConfig
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.models.parallelize import build_model
from megatron.core.models.transformer import TransformerModel
from megatron.core.topology import single_process
from tests.parallel.layout_run import (
    MODEL,
    SEED,
    SEQUENCE,
    TIED_MODEL,
    Layout,
    Task,
    build,
    context,
    microbatches,
    place_in,
)
from tests.parallel.tasks import SGD

TOKENS = 16 * SEQUENCE


def model_of(chunk_size: int | None, tied: bool = False, dtype: torch.dtype = torch.float64) -> TransformerModel:
    built_in = context(single_process(), Layout(), dtype)
    activations = ActivationConfig(loss_chunk_size=chunk_size)
    return build_model(TIED_MODEL if tied else MODEL, built_in, SEED, activations=activations)


def masked_losses(model: TransformerModel) -> Tensor:
    """Losses of the unmasked tokens, and a gradient that differs by token."""
    (batch,) = microbatches(0, Layout(), 0)
    chunk, head = model.transformer_chunks[0], model.output_layer
    assert head is not None
    if head.loss_chunk_size is None:
        losses = head.token_losses(chunk(batch["tokens"]), batch["labels"])
    else:
        losses = chunk(batch["tokens"], None, batch["labels"])
    weights = batch["loss_mask"] * torch.linspace(0.5, 2.0, losses.numel()).view_as(losses)
    (losses * weights).sum().backward()
    return losses.detach()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 37, TOKENS, 10 * TOKENS])
def test_losses_and_gradients_are_those_of_all_tokens_at_once(chunk_size: int, tied: bool) -> None:
    whole, chunked = model_of(None, tied), model_of(chunk_size, tied)
    assert torch.allclose(masked_losses(chunked), masked_losses(whole), rtol=1e-12)
    for one, other in zip(chunked.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-11, atol=1e-13)


def test_a_main_gradient_counts_one_gradient_per_microbatch() -> None:
    whole, model = model_of(None), model_of(37)
    masked_losses(whole)
    weight, expected = (one.output_layer.vocab_weight.weight for one in (model, whole) if one.output_layer is not None)
    main_grad, counts = MainGrad(torch.full_like(weight, torch.nan)), []
    main_grad.on_accumulated = lambda: counts.append(1)
    attach_main_grad(weight, main_grad)
    masked_losses(model)
    masked_losses(model)
    assert weight.grad is None and len(counts) == 2
    assert expected.grad is not None
    assert torch.allclose(main_grad.buffer, 2 * expected.grad, rtol=1e-11, atol=1e-13)


def test_bf16_gradients_are_as_exact_as_those_of_all_tokens_at_once() -> None:
    """The chunks' weight gradients add up in fp32."""
    exact = model_of(None)
    masked_losses(exact)
    errors = []
    for chunk_size in (None, 16):
        model = model_of(chunk_size, dtype=torch.bfloat16)
        masked_losses(model)
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(max(_relative_error(one.grad, other.grad) for one, other in pairs))
    assert errors[1] < 1.2 * errors[0] < 0.1


def _relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found.double() - expected).norm() / expected.norm())


def executor_sums(task: Task, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Sums of an evaluation, and logits of other tokens."""
    executor, _, _ = build(task, layout, place_in(layout))
    sums = executor.evaluate(microbatches(0, layout, 0), layout.microbatches)
    logits = executor.logits(torch.arange(SEQUENCE)[None], replace(executor.activations, shape=(SEQUENCE, 1, 32)))
    return sums, logits


def test_evaluation_and_logits() -> None:
    whole, chunked = (
        executor_sums(SGD, Layout(microbatches=2, activations=ActivationConfig(loss_chunk_size=size)))
        for size in (None, 37)
    )
    assert torch.allclose(chunked[0], whole[0], rtol=1e-12)
    assert whole[1] is not None and chunked[1] is not None
    assert chunked[1].shape == (SEQUENCE, 1, MODEL.padded_vocab_size)
    assert torch.equal(chunked[1], whole[1])
