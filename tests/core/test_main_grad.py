"""Gradients accumulated in ``main_grad`` are those that autograd would have given; products that add to it are those of
a product and a sum, without memory for the product."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megatron.core.communication import Communicator, Work
from megatron.core.gradient import MainGrad, WeightGradStore, accumulate_main_grad, attach_main_grad, compute_deferred
from megatron.core.ops.matmul import (
    InPlaceWeightGradient,
    SeparateWeightGradient,
    WeightGradientKernel,
    WeightGradientProduct,
)
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from tests.storage_watch import StorageWatch

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


# Products that add to their buffer

KERNELS: list[WeightGradientKernel] = [SeparateWeightGradient(), InPlaceWeightGradient()]
ALONE = TensorParallel(Communicator((0,), 0))


def operands(tokens: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(tokens, 2, width, generator=generator, dtype=torch.float64) for width in (n, k)]
    return whole[0].to(dtype), whole[1].to(dtype)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (16, 8, 40), (3, 33, 2)])
def test_the_first_overwrites_and_later_ones_add(
    shape: tuple[int, int, int], dtype: torch.dtype, kernel: WeightGradientKernel
) -> None:
    # What the last step left, be it not a number.
    main_grad = MainGrad(torch.full(shape[1:], torch.nan, dtype=dtype))
    expected = torch.zeros(shape[1:], dtype=torch.float64)
    for seed in range(3):
        grad_outputs, inputs = operands(*shape, dtype, seed)
        main_grad.add(WeightGradientProduct(grad_outputs, inputs, kernel))
        expected += torch.einsum("tbn,tbk->nk", grad_outputs.double(), inputs.double())
        error = (main_grad.buffer.double() - expected).abs().max() / expected.abs().max()
        assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    main_grad.complete()
    main_grad.add(WeightGradientProduct(*operands(*shape, dtype, 0), kernel))
    grad_outputs, inputs = operands(*shape, dtype, 0)
    torch.testing.assert_close(main_grad.buffer, torch.einsum("tbn,tbk->nk", grad_outputs, inputs))


def made_bytes(kernel: WeightGradientKernel, accumulate: bool) -> int:
    """Memory that a product into a buffer of 512 KiB takes."""
    buffer = torch.zeros(256, 256, dtype=torch.float64)
    grad_outputs, inputs = operands(4, 256, 256, torch.float64, 0)
    with StorageWatch() as watch:
        kernel.write(buffer, grad_outputs, inputs, accumulate)
    return sum(size for _, size in watch.made.values())


@pytest.mark.parametrize("accumulate", [False, True])
def test_in_place_there_is_no_memory_for_the_product(accumulate: bool) -> None:
    assert made_bytes(InPlaceWeightGradient(), accumulate) == 0
    assert made_bytes(SeparateWeightGradient(), accumulate) == 256 * 256 * 8


def test_torch_has_products_of_half_precision_that_add_to_fp32() -> None:
    """Which it computes on GPUs alone; their arguments, at least, are these."""
    for operator in (torch.ops.aten.addmm.dtype_out, torch.ops.aten.mm.dtype_out):
        names = [argument.name for argument in operator._schema.arguments]
        assert names[-1] == "out" and "out_dtype" in names


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear_layers_use_the_kernel_of_their_context_at_once_or_deferred(kind: str, is_deferred: bool) -> None:
    kernel = Mock(wraps=SeparateWeightGradient())
    context = LayerContext(ALONE, torch.float64, torch.device("cpu"), weight_gradient=kernel)
    layer: nn.Module
    if kind == "column":
        layer = ColumnParallelLinear(context.column_weight("linear", 6, (4,), 0.02), context)
    else:
        layer = RowParallelLinear(context.row_weight("linear", 6, 4, 0.02), context)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    nn.init.normal_(weight)
    main_grad = MainGrad(torch.full_like(weight, torch.nan))
    attach_main_grad(weight, main_grad)
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for seed in range(2):
        grad_outputs, inputs = operands(3, 4, 6, torch.float64, seed)
        expected += torch.einsum("tbn,tbk->nk", grad_outputs, inputs)
        output = layer(inputs.requires_grad_())
        if is_deferred:
            with context.weight_gradients.deferring() as deferred:
                output.backward(grad_outputs)
            assert kernel.write.call_count == seed
            compute_deferred(deferred)
        else:
            output.backward(grad_outputs)
    assert [call.args[-1] for call in kernel.write.call_args_list] == [False, True]
    torch.testing.assert_close(main_grad.buffer, expected)


def test_deferred_gradients_are_computed_in_the_order_of_the_backward_pass_and_gathered_one_ahead() -> None:
    """So that a bucket is reduced as soon as its gradients are there, and two gathered inputs are kept at most."""
    events: list[str] = []
    store = WeightGradStore()

    def put(name: str) -> None:
        weight = nn.Parameter(torch.zeros(2, 2))
        attach_main_grad(weight, MainGrad(torch.zeros(2, 2)))

        def gather() -> Work[QuantizedTensor]:
            events.append(f"gather {name}")
            return Work((), lambda: QuantizedTensor(torch.ones(2, 2)))

        def product(gathered: QuantizedTensor) -> Tensor:
            events.append(f"multiply {name}")
            return gathered.data

        store.put(weight, gather, product)

    with store.deferring() as deferred:
        for name in "abc":
            put(name)
    compute_deferred(deferred)
    assert ", ".join(events) == "gather a, gather b, multiply a, gather c, multiply b, multiply c"
