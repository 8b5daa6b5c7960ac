"""Weight gradients that add to their buffer are those of a product and a sum, without memory for the product."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.communication import Communicator, Work
from megatron.core.gradient import MainGrad, WeightGradStore, attach_main_grad, compute_deferred
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


class Recorder:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.accumulated: list[bool] = []

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        """As another."""
        self.accumulated.append(accumulate)
        SeparateWeightGradient().write(buffer, grad_outputs, inputs, accumulate)


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear_layers_use_the_kernel_of_their_context_at_once_or_deferred(kind: str, is_deferred: bool) -> None:
    recorder = Recorder()
    context = LayerContext(ALONE, torch.float64, torch.device("cpu"), weight_gradient=recorder)
    layer: nn.Module
    if kind == "column":
        layer = ColumnParallelLinear("linear", 6, (4,), context, 0.02)
    else:
        layer = RowParallelLinear("linear", 6, 4, context, 0.02)
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
            assert len(recorder.accumulated) == seed
            compute_deferred(deferred)
        else:
            output.backward(grad_outputs)
    assert recorder.accumulated == [False, True]
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
