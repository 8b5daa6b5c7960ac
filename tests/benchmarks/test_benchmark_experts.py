"""The benchmark of experts measures every grouped GEMM against a dense MLP of equal FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.benchmark_experts import Options, Shape, build_steps, draw_counts, measure_all
from megatron.core.ops.grouped import RowCounts

SMALL = Shape(experts=4, topk=2, tokens=48, hidden_size=16, width=24)


def test_the_table_has_a_row_for_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    measure_all(Options(shapes=("small",), repeats=2, warmup=1), {"small": SMALL})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    contenders = ["dense MLP", "padded", "loop", "grouped_mm", "loop, the same counts in every turn"]
    assert [line[:3] for line in lines[2:]] == [
        ["small", dtype, one] for dtype in ("fp32", "bf16") for one in contenders
    ]
    assert [line[4] for line in lines if line[2] == "dense MLP"] == ["1.00", "1.00"]
    assert all(float(line[3]) > 0 for line in lines[2:])


def test_experts_and_dense_mlp_have_equal_flops() -> None:
    counts = RowCounts.of((24, 24, 24, 24))
    flops = {}
    for name, step in build_steps(SMALL, torch.bfloat16, torch.device("cpu")).items():
        with FlopCounterMode(display=False) as counter:
            step(counts)
        flops[name] = counter.get_total_flops()
    dense = 3 * 2 * SMALL.tokens * 3 * SMALL.hidden_size * SMALL.topk * SMALL.width
    assert flops["dense MLP"] == flops["loop"] == dense


def test_counts_differ_in_every_turn_and_have_all_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [draw_counts(SMALL, 0.2, torch.device("cpu"), generator) for _ in range(3)]
    assert [one.total for one in counts] == [96, 96, 96]
    assert len({one.host for one in counts}) == 3
