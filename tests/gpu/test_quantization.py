"""Every quantisation kernel gives the bits of the definition, in all layouts, and the amax of the step."""

import pytest
import torch

from megatron.core.ops.fp8 import E4M3, E5M2, EagerQuantization, amax_of, largest_value, scale_from_amax
from megatron.core.precision import Layout
from tests.gpu.kernels_of_runs import implementations, kernels_with, on_cpu, random

# Tokens, rows, width: of 8B and 405B, and one that no tile divides.
SHAPES = [(8192, 1, 4096), (8192, 1, 14336), (2048, 2, 16384), (333, 3, 1040), on_cpu((8, 2, 32)), on_cpu((5, 3, 16))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", implementations("fp8_quantization"))
def test_quantization(device: torch.device, name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    flags = ("--fp8-format", "hybrid", "--kernel", f"fp8_quantization={name}")
    kernel, definition = kernels_with(device, torch.bfloat16, *flags).fp8.quantization, EagerQuantization()
    tensor = random(*shape, device=device, dtype=torch.bfloat16)
    # A scale of earlier steps may be too large for some elements, which saturate.
    scale = scale_from_amax(amax_of(tensor) / 2, largest_value(dtype), 1.0)
    for layout in (Layout.ROWS, Layout.TRANSPOSED, Layout.BOTH):
        results = []
        for one in (kernel, definition):
            step_amax = torch.zeros((), device=device)
            quantized = one.quantize_and_record(tensor, scale, step_amax, dtype, layout)
            again = one.quantize(tensor, scale, amax_of(tensor), dtype, layout)
            results.append((quantized, again, step_amax))
        (found, found_again, amax), (wanted, _, wanted_amax) = results
        assert torch.equal(amax, wanted_amax)
        for one_found in (found, found_again):
            assert one_found.inverse_scale is not None and wanted.inverse_scale is not None
            assert torch.equal(one_found.inverse_scale, wanted.inverse_scale)
            if Layout.ROWS in layout:
                assert torch.equal(one_found.data.view(torch.uint8), wanted.data.view(torch.uint8))
            if Layout.TRANSPOSED in layout:
                assert one_found.transposed is not None and wanted.transposed is not None
                assert torch.equal(one_found.transposed.view(torch.uint8), wanted.transposed.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", implementations("fp8_quantization"))
def test_transpose(device: torch.device, name: str, shape: tuple[int, int, int]) -> None:
    flags = ("--fp8-format", "hybrid", "--kernel", f"fp8_quantization={name}")
    kernel = kernels_with(device, torch.bfloat16, *flags).fp8.quantization
    data = random(*shape, device=device, dtype=torch.bfloat16).flatten(0, -2).to(E4M3)
    found = kernel.transpose(data)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), data.view(torch.uint8).t())


@pytest.mark.parametrize("numel", [4096 * 14336 // 8, 16384 * 16384 // 64, 64 * 333, on_cpu(64 * 33)])
@pytest.mark.parametrize("name", implementations("fp8_quantization"))
def test_a_shard_of_master_weights_in_its_memory(device: torch.device, name: str, numel: int) -> None:
    flags = ("--fp8-format", "hybrid", "--kernel", f"fp8_quantization={name}")
    kernel, definition = kernels_with(device, torch.bfloat16, *flags).fp8.quantization, EagerQuantization()
    shard = random(numel // 64, 64, device=device, dtype=torch.float32)
    amax = amax_of(shard)
    scale = scale_from_amax(amax, largest_value(E4M3), 1.0)
    out = torch.zeros(shard.shape, dtype=torch.uint8, device=device).view(E4M3)
    found = kernel.quantize(shard, scale, amax, E4M3, Layout.ROWS, out)
    expected = definition.quantize(shard, scale, amax, E4M3, Layout.ROWS)
    assert found.data.data_ptr() == out.data_ptr()
    assert torch.equal(out.view(torch.uint8), expected.data.view(torch.uint8))
