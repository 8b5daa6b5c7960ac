"""The dry run says when an order of the ranks spreads expert-parallel ranks over nodes, and which order does not."""

import pytest

from megatron.core.topology import RankGrid
from megatron.planner.traffic import expert_placement_advice


def test_the_default_order_spreads_the_experts_of_a_pipeline_over_nodes() -> None:
    grid = RankGrid(tp=2, pp=4, dp=8, ep=8)
    advice = expert_placement_advice(grid)
    assert advice is not None
    assert "0 1 8 9 16 17 24 25" in advice
    assert "--rank-order tp-cp-ep-dp-pp" in advice


@pytest.mark.parametrize(
    "grid",
    [
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="tp-cp-ep-dp-pp"),
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="dp-tp-cp-ep-pp"),
        RankGrid(dp=64, ep=8),
        RankGrid(pp=2, dp=4, ep=4),
        RankGrid(tp=2, pp=4, dp=8, etp=2),
        RankGrid(tp=8, pp=8, dp=8),
        RankGrid(pp=4, dp=32, ep=16),
    ],
    ids=["ordered", "another order", "no pipeline", "one node", "pairs", "dense", "larger than a node"],
)
def test_there_is_no_advice_where_no_order_is_better(grid: RankGrid) -> None:
    assert expert_placement_advice(grid) is None


def test_expert_tensor_parallel_ranks_count() -> None:
    grid = RankGrid(tp=2, pp=4, dp=8, ep=4, etp=2)
    assert expert_placement_advice(grid) is not None
