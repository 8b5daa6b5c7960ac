"""Weight gradients that add to their buffer, and the three FP8 GEMMs of a linear layer, against fp64."""

from typing import Literal

import pytest
import torch

from megatron.config.precision import FP8_BLOCK, PrecisionConfig
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Gemm, Fp8Scaling
from megatron.core.ops.fp8 import Fp8Kernels, scaled_gemm_reference
from megatron.core.ops.matmul import weight_gradient
from megatron.core.precision import Layout
from tests.gpu.kernels_of_runs import assert_close, implementations, kernels_with, on_cpu, random

# Output and input width: of 8B, of ranks of 70B and 405B, the largest of 405B on one rank.
WIDTHS = [(256, 4096), (6144, 4096), (28672, 4096), (2560, 8192), (13312, 16384), (16384, 6656), (53248, 16384)]
SMALL = [(32, 48), (16, 80)]


@pytest.mark.parametrize(("n", "k"), [*WIDTHS, *(on_cpu(*one) for one in SMALL)])
@pytest.mark.parametrize("name", implementations("weight_gradient"))
def test_weight_gradients_add_to_their_buffer(device: torch.device, name: str, n: int, k: int) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    kernel = kernels_with(device, dtype, "--kernel", f"weight_gradient={name}").weight_gradient
    wide = torch.promote_types(dtype, torch.float32)
    buffer = torch.full((n, k), torch.nan, dtype=wide, device=device)
    wanted = torch.zeros(n, k, dtype=torch.float64, device=device)
    for step in range(2):
        grad = random(1024, 1, n, device=device, dtype=dtype, seed=2 * step)
        inputs = random(1024, 1, k, device=device, dtype=dtype, seed=2 * step + 1)
        kernel.write(buffer, grad, inputs, accumulate=step > 0)
        wanted += weight_gradient(grad.double(), inputs.double())
    # Separate products are rounded to bf16 before they are added.
    assert_close(buffer, wanted, dtype if name == "separate" else wide)


def linear_layer(device: torch.device, config: PrecisionConfig, kernels: Fp8Kernels | None) -> Fp8Gemm:
    alone = Communicator((0,), 0)
    return Fp8Scaling(config, alone, device, kernels=kernels).gemm("linear", torch.bfloat16, alone, (), ())


@pytest.mark.parametrize(("n", "k"), [*WIDTHS[:5], *(on_cpu(*one) for one in [*SMALL, (128, 384)])])
@pytest.mark.parametrize(
    ("fp8_format", "recipe"), [("hybrid", "tensorwise"), ("e4m3", "tensorwise"), ("e4m3", "blockwise")]
)
def test_fp8_products(
    device: torch.device,
    fp8_format: Literal["hybrid", "e4m3"],
    recipe: Literal["tensorwise", "blockwise"],
    n: int,
    k: int,
) -> None:
    """The quantised numbers are the same for both: only products and roundings differ."""
    if recipe == "blockwise" and (n % FP8_BLOCK or k % FP8_BLOCK):
        pytest.skip("no whole blocks")
    in_blocks = ("--seq-length", "128", "--kv-channels", "32")
    flags = ("--fp8-format", fp8_format, "--fp8-recipe", recipe, *in_blocks)
    kernels = kernels_with(device, torch.bfloat16, *flags).fp8
    config = PrecisionConfig(bf16=True, fp8_format=fp8_format, fp8_recipe=recipe)
    inputs = random(2048, 1, k, device=device, dtype=torch.bfloat16)
    grad = random(2048, 1, n, device=device, dtype=torch.bfloat16, seed=1).mul_(1e-3)
    weight = random(n, k, device=device, dtype=torch.bfloat16, seed=2)
    results = []
    for chosen in (kernels, Fp8Kernels.eager(scaled_gemm_reference)):
        gemm = linear_layer(device, config, chosen)
        x, dy = gemm.quantize("input", inputs, Layout.BOTH), gemm.quantize("output_gradient", grad, Layout.BOTH)
        buffer = torch.ones(n, k, device=device)
        gemm.weight_gradient(dy, x).write_to(buffer, accumulate=True)
        results.append((gemm.output(x, weight), gemm.input_gradient(dy, weight), buffer))
    # Hopper accumulates the output's products in fewer bits than fp32.
    tolerances = {"output": 3e-2, "input gradient": 1e-2, "weight gradient": 1e-2}
    for (name, tolerance), found, wanted in zip(tolerances.items(), *results, strict=True):
        assert_close(found, wanted.double(), torch.bfloat16, name, tolerance)
    unquantised = inputs.double() @ weight.double().t()
    error = (results[0][0].double() - unquantised).norm() / unquantised.norm()
    assert error < 0.08, "two factors with 3 bits of fraction each"
