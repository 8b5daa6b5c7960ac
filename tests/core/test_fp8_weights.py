"""How often the weights of FP8 linear layers are quantised, by which kernel, and in which memory."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Scaling
from megatron.core.ops.fp8 import E4M3, EagerQuantization, Fp8Kernels, quantize, widened_gemm
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import LayerContext, RowParallelLinear

CPU = torch.device("cpu")
ALONE = Communicator((0,), 0)
EAGER = EagerQuantization()


Call = tuple[torch.Size, Layout, Tensor | None]
"""A call of a kernel of quantisation: shape, layout and output."""


class RecordingQuantization(EagerQuantization):
    """The definition; records its calls, and the shapes of the tensors that it transposes later."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.transposes: list[torch.Size] = []

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        amax: Tensor,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        self.calls.append((tensor.shape, layout, out))
        return EAGER.quantize(tensor, scale, amax, dtype, layout, out)

    def transpose(self, data: Tensor) -> Tensor:
        self.transposes.append(data.shape)
        return EAGER.transpose(data)


def fp8_scaling(config: PrecisionConfig, kernel: RecordingQuantization, keeps_weights: bool = True) -> Fp8Scaling:
    return Fp8Scaling(config, ALONE, CPU, keeps_weights, replace(Fp8Kernels.eager(widened_gemm), quantization=kernel))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize(
    ("keeps_weights", "layouts"),
    [(True, [Layout.BOTH]), (False, 2 * [Layout.ROWS, Layout.TRANSPOSED])],
    ids=["kept", "gathered by FSDP"],
)
def test_a_kept_weight_is_quantised_once_a_step_in_both_layouts(
    recipe: Literal["delayed", "tensorwise"], keeps_weights: bool, layouts: list[Layout]
) -> None:
    """A weight that is not kept is quantised for each GEMM, in the layout of that GEMM."""
    config = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe=recipe)
    kernel = RecordingQuantization()
    scaling = fp8_scaling(config, kernel, keeps_weights)
    context = LayerContext(TensorParallel(ALONE), torch.bfloat16, CPU, fp8=scaling)
    linear = RowParallelLinear("linear", 48, 32, context, init_std=1.0)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        scaling.start_step()
        kernel.calls.clear()
        for _ in range(2):
            linear(torch.ones(16, 1, 48, dtype=torch.bfloat16).requires_grad_()).sum().backward()
        scaling.finish_step()
        assert [layout for shape, layout, _ in kernel.calls if shape == linear.weight.shape] == layouts
    assert not kernel.transposes


@pytest.mark.parametrize("numel", [32 * 48, 32 * 48 - 128, 77])
def test_shards_are_quantised_in_their_memory_by_the_chosen_kernel(numel: int) -> None:
    """In one call for a matrix of the whole shard, whose rows have 64 elements if 64 divides the shard."""
    config = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True)
    kernel = RecordingQuantization()
    scaling = fp8_scaling(config, kernel)
    scaling.gemm("linear", torch.bfloat16, ALONE, ())
    master = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    buffer = torch.zeros(numel + 128, dtype=torch.uint8)
    numbers = buffer[64 : 64 + numel].view(E4M3)
    scaling.quantize_weights({"linear": (master, numbers)}, ALONE)
    ((shape, layout, out),) = kernel.calls
    width = math.gcd(numel, 64)
    assert (shape, layout) == ((numel // width, width), Layout.ROWS)
    assert out is not None and out.data_ptr() == numbers.data_ptr()
    amax = master.abs().max()
    expected = quantize(master, 448.0 / amax, amax, E4M3)
    assert torch.equal(numbers.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scaling.weight_state.inverse_scale[0], (448.0 / amax).reciprocal())
    assert not buffer[:64].any() and not buffer[64 + numel :].any()
