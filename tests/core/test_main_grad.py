"""Gradients accumulated in ``main_grad`` are those that autograd would have given."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.data_parallel.buffer import ParameterBuffer
from megatron.core.gradient import MainGrad, accumulate_main_grad, attach_main_grad, main_grad_of
from megatron.core.models.parallelize import build_model
from megatron.core.parameter import info_of
from megatron.core.topology import single_process
from tests.parallel.layout_run import MODEL, SEED, TIED_MODEL, Layout, context, microbatches
from tests.whole_model import token_losses_of

STALE = 1e6
"""What the last step left in the buffer."""


# One main gradient


def test_rows_add_up_where_ids_repeat_and_overwrite_what_was_there() -> None:
    main_grad = MainGrad(torch.full((4, 2), STALE))
    rows, values = torch.tensor([2, 0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    main_grad.add_rows(rows, values)
    once = torch.tensor([[3.0, 4.0], [0.0, 0.0], [11.0, 22.0], [0.0, 0.0]])
    assert torch.equal(main_grad.buffer, once)
    main_grad.add_rows(rows, values)
    assert torch.equal(main_grad.buffer, 2 * once)


def test_a_bf16_buffer_gets_one_rounded_sum_of_a_row() -> None:
    """Added one by one, 4096 ones are 256 in bf16."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 4, (4096,), generator=generator)
    values = torch.cat((torch.ones(4096, 1), torch.randn(4096, 1, generator=generator)), dim=1)
    expected = torch.zeros(8, 2, dtype=torch.float64).index_add_(0, rows, values.double())
    main_grad = MainGrad(torch.full((8, 2), STALE, dtype=torch.bfloat16))
    main_grad.add_rows(rows, values)
    assert torch.equal(main_grad.buffer, expected.bfloat16())
    main_grad.add_rows(rows, values)
    assert torch.equal(main_grad.buffer, 2 * expected.bfloat16())


def test_dense_and_row_gradients_of_one_parameter_add_up_in_either_order() -> None:
    dense = torch.arange(8.0).view(4, 2)
    rows, values = torch.tensor([1]), torch.tensor([[5.0, 6.0]])
    expected = dense.clone()
    expected[1] += values[0]
    for dense_first in (True, False):
        main_grad = MainGrad(torch.full((4, 2), STALE))
        if dense_first:
            main_grad.add(dense)
            main_grad.add_rows(rows, values)
        else:
            main_grad.add_rows(rows, values)
            main_grad.add(dense)
        assert torch.equal(main_grad.buffer, expected)


def test_completing_zeroes_only_what_took_no_part_and_starts_a_new_step() -> None:
    used, unused = MainGrad(torch.full((2,), STALE)), MainGrad(torch.full((2,), STALE))
    used.add(torch.ones(2))
    for main_grad in (used, unused):
        main_grad.complete()
    assert torch.equal(used.buffer, torch.ones(2))
    assert torch.equal(unused.buffer, torch.zeros(2))
    for main_grad in (used, unused):
        main_grad.add(torch.full((2,), 7.0))
        assert torch.equal(main_grad.buffer, torch.full((2,), 7.0))
    used.complete()
    used.complete()
    assert torch.equal(used.buffer, torch.zeros(2))


def test_an_fp32_slot_keeps_what_bf16_would_lose() -> None:
    """256 + 1 is 256 in bf16."""
    main_grad = MainGrad(torch.zeros(1, dtype=torch.float32))
    main_grad.add(torch.tensor([256.0], dtype=torch.bfloat16))
    for _ in range(8):
        main_grad.add(torch.ones(1, dtype=torch.bfloat16))
    assert main_grad.buffer.tolist() == [264.0]
    main_grad.add_rows(torch.tensor([0, 0]), torch.ones(2, dtype=torch.bfloat16))
    assert main_grad.buffer.tolist() == [266.0]


def test_a_gradient_goes_to_the_slot_or_else_to_autograd() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(3)), torch.ones(3)
    assert main_grad_of(parameter) is None
    assert accumulate_main_grad(parameter, gradient) is gradient
    main_grad = MainGrad(torch.zeros(3))
    attach_main_grad(parameter, main_grad)
    assert main_grad_of(parameter) is main_grad
    assert accumulate_main_grad(parameter, gradient) is None
    assert torch.equal(main_grad.buffer, gradient)


def test_what_autograd_computes_goes_to_the_slot_at_once_and_nothing_of_a_frozen_parameter_is_computed() -> None:
    parameter = nn.Parameter(torch.full((3,), 2.0))
    main_grad = MainGrad(torch.zeros(3, dtype=torch.float64))
    attach_main_grad(parameter, main_grad)
    for _ in range(2):
        (parameter * parameter).sum().backward()
        assert parameter.grad is None
    assert main_grad.buffer.tolist() == [8.0] * 3
    parameter.requires_grad_(False)

    class NeverComputed:
        def value(self) -> Tensor:
            raise AssertionError

        def write_to(self, buffer: Tensor, accumulate: bool) -> None:
            raise AssertionError

    assert accumulate_main_grad(parameter, NeverComputed()) is None


# A whole model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_slots_collect_over_microbatches_what_autograd_would(tied: bool) -> None:
    """Two microbatches, over the last step's leftovers; a tied weight gets both of its contributions."""
    config = TIED_MODEL if tied else MODEL
    plain, slotted = (build_model(config, context(single_process(), Layout()), SEED) for _ in range(2))
    buffer = ParameterBuffer(list(slotted.parameters()), torch.float64, shards=1)
    buffer.gradients.fill_(STALE)
    for microbatch in microbatches(0, Layout(microbatches=2), 0):
        for model in (plain, slotted):
            token_losses_of(model, microbatch["tokens"], microbatch["labels"]).sum().backward()
    assert all(parameter.grad is None for parameter in slotted.parameters())
    found = {info_of(one).name: main_grad.buffer for one, main_grad in zip(buffer.parameters, buffer.main_grads)}
    expected = {info_of(parameter).name: parameter.grad for parameter in plain.parameters()}
    assert found.keys() == expected.keys()
    assert ("output_layer.weight" in found) is not tied
    for name, gradient in expected.items():
        assert gradient is not None and gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
