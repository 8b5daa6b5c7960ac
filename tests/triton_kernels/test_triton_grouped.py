"""The grouped weight-gradient kernel equals a GEMM per expert, and compiles for Hopper."""

import math
from collections.abc import Sequence

import pytest
import torch

from megatron.core.backends.triton_grouped import TritonGroupedGemm
from megatron.core.ops.grouped import LoopGroupedGemm, RowCounts
from tests.triton_kernels.compiled import CompiledLaunch, compile_launches
from tests.triton_kernels.worker import TritonProcess

BF16 = torch.bfloat16


def check_gradients(rows: Sequence[int], n: int, k: int, buffer_dtype: torch.dtype) -> None:
    """Sums of small whole numbers are exact, so all bits are compared; a NaN must be overwritten, and then added to.

    In fp16, because the interpreter does not multiply bf16 numbers.
    """
    counts, generator = RowCounts.of(rows), torch.Generator().manual_seed(sum(rows))
    dy, x = (torch.randint(-3, 4, (counts.total, width), generator=generator).half() for width in (n, k))
    wide = LoopGroupedGemm().weight_gradient(dy.float(), x.float(), counts).value()
    product = TritonGroupedGemm().weight_gradient(dy, x, counts)
    assert torch.equal(product.value(), wide.half())
    buffer = torch.full((len(rows) * n, k), math.nan, dtype=buffer_dtype)
    for times in (1, 2):
        product.write_to(buffer, accumulate=times > 1)
        assert torch.equal(buffer, (times * wide).to(buffer_dtype))


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [
        ((5, 0, 77, 16), 48, 32, torch.float32),
        ((0, 130, 1, 0), 130, 40, torch.float32),
        ((3, 64, 65), 16, 129, BF16),
        # Two groups of tiles, the second lower than the first.
        ((2, 3), 128 * 9 + 1, 16, torch.float32),
    ],
)
def test_every_group_has_the_gradient_of_its_own_rows(
    interpreter: TritonProcess, rows: Sequence[int], n: int, k: int, dtype: torch.dtype
) -> None:
    interpreter.run(check_gradients, rows, n, k, dtype)


def compile_gradient(accumulate: bool) -> list[CompiledLaunch]:
    """A layer of Qwen3-30B-A3B: 1,536 outputs and 2,048 inputs."""
    counts = RowCounts.of((4096, 4096))
    dy, x = (torch.zeros(counts.total, width, dtype=BF16) for width in (1536, 2048))
    product = TritonGroupedGemm().weight_gradient(dy, x, counts)
    return compile_launches(product.write_to, torch.zeros(2 * 1536, 2048), accumulate)


@pytest.mark.parametrize("accumulate", [True, False])
def test_hoppers_tensor_cores_multiply_and_no_register_spills(compiler: TritonProcess, accumulate: bool) -> None:
    (launch,) = compiler.run(compile_gradient, accumulate)
    # 256 threads: one program on a multiprocessor has 255 registers for each, and 227 KiB of shared memory.
    assert launch.registers <= 208
    assert launch.spilled_bytes == 0
    assert launch.shared_bytes <= 160 * 1024
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in launch.ptx
    assert "cp.async.cg.shared.global" in launch.ptx, "reads overlap with products"
