"""Grouped GEMMs are those of each group."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, RowCounts, TorchGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient

STALE = 1e6
"""What the last step left in a gradient buffer."""

COUNTS = {
    "uneven": (5, 1, 33, 16),
    "empty first and last": (0, 7, 40, 0),
    "empty in between": (3, 0, 0, 24),
    "all in one": (0, 0, 50, 0),
    "no rows": (0, 0, 0, 0),
}
OUT, IN = 24, 40


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(counts: RowCounts, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and output gradient."""
    groups, rows = len(counts.host), counts.total
    return random(rows, IN, dtype=dtype), random(groups * OUT, IN, dtype=dtype, seed=1), random(rows, OUT, dtype=dtype)


def definition(x: Tensor, weight: Tensor, dy: Tensor, counts: RowCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient in fp64, row by row."""
    matrices, x, dy = weight.double().view(-1, OUT, IN), x.double(), dy.double()
    of_row = torch.repeat_interleave(torch.arange(len(counts.host)), counts.device)  # [m]
    output = torch.einsum("rnk,rk->rn", matrices[of_row], x)
    input_gradient = torch.einsum("rnk,rn->rk", matrices[of_row], dy)
    outer = torch.einsum("rn,rk->rnk", dy, x)
    return output, input_gradient, torch.zeros_like(matrices).index_add_(0, of_row, outer).flatten(0, 1)


GEMMS: dict[str, GroupedGemm] = {
    "loop": LoopGroupedGemm(),
    "loop in place": LoopGroupedGemm(InPlaceWeightGradient()),
    "padded": PaddedGroupedGemm(),
    "grouped_mm": TorchGroupedGemm(),
    "grouped_mm, then loop": TorchGroupedGemm(SeparateWeightGradient()),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


DTYPES = {gemm: (torch.bfloat16,) if gemm.startswith("grouped_mm") else tuple(TOLERANCE) for gemm in GEMMS}
DTYPES["loop in place"] = (torch.float64,)
"""What each multiplies."""


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("gemm", "dtype"), [(gemm, dtype) for gemm in GEMMS for dtype in DTYPES[gemm]])
def test_all_three_gemms_are_those_of_each_group(gemm: str, dtype: torch.dtype, name: str) -> None:
    kernel = GEMMS[gemm]
    counts = RowCounts.of(COUNTS[name])
    x, weight, dy = operands(counts, dtype)
    expected = definition(x, weight, dy, counts)
    product = kernel.weight_gradient(dy, x, counts)
    found = (kernel.output(x, weight, counts), kernel.input_gradient(dy, weight, counts), product.value())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("gemm", GEMMS)
def test_weight_gradients_overwrite_then_add_also_for_groups_without_rows(gemm: str, name: str) -> None:
    counts = RowCounts.of(COUNTS[name])
    dtype = torch.float64 if torch.float64 in DTYPES[gemm] else torch.bfloat16
    x, weight, dy = operands(counts, dtype)
    expected = definition(x, weight, dy, counts)[2]
    buffer = torch.full(weight.shape, STALE, dtype=torch.promote_types(dtype, torch.float32))
    product = GEMMS[gemm].weight_gradient(dy, x, counts)
    product.write_to(buffer, accumulate=False)
    torch.testing.assert_close(buffer.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])
    product.write_to(buffer, accumulate=True)
    torch.testing.assert_close(buffer.double(), 2 * expected, rtol=0.0, atol=2 * TOLERANCE[dtype])


def test_a_wide_buffer_sums_half_precision_products_in_fp32() -> None:
    counts = RowCounts.of((4, 0, 9))
    x, weight, dy = operands(counts, torch.bfloat16)
    buffer = torch.full(weight.shape, 1e-3)
    LoopGroupedGemm().weight_gradient(dy, x, counts).write_to(buffer, accumulate=True)
    assert torch.equal(buffer[OUT : 2 * OUT], torch.full((OUT, IN), 1e-3))
    product = LoopGroupedGemm().weight_gradient(dy, x, counts).value()
    assert torch.equal(buffer, product.float() + 1e-3)


def test_counts_on_the_device_are_those_on_the_host() -> None:
    counts = RowCounts.of((3, 0, 2))
    assert counts.total == 5
    assert counts.ends.tolist() == [3, 3, 5]
    assert counts.ends.dtype == torch.int32
    assert [list(range(10)[rows]) for rows in counts.slices()] == [[0, 1, 2], [], [3, 4]]


def test_padded_gemms_have_few_shapes() -> None:
    """Also at the end of the rows; a new shape costs oneDNN more than the GEMM."""
    rows: list[int] = []

    class Recording(SeparateWeightGradient):
        def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
            rows.extend((grad_outputs.shape[0], inputs.shape[0]))

    for sizes in ((5, 1, 33, 61), (90, 0, 3, 7), (0, 0, 100, 0)):
        counts = RowCounts.of(sizes)
        x, weight, dy = operands(counts, torch.float32)
        PaddedGroupedGemm(Recording()).weight_gradient(dy, x, counts).write_to(weight, accumulate=True)
    assert set(rows) == {32, 64, 96, 100}
