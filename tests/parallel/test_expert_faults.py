"""Planted faults of expert parallelism: each one is seen by a row of the matrix that runs by default.

The faults are those that users of other frameworks have met: docs/moe.md.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megatron.core.communication import Communicator, Work
from megatron.core.data_parallel.sharing import ModelSharing, Sharing
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.moe import dispatch, permutation, routing, transfer
from megatron.core.moe import layer as moe_layer
from megatron.core.moe.balance import ExpertBalance, RouterBalance
from megatron.core.parameter import ParameterInfo
from tests.parallel.layout_run import Layout, Task, Trace, train
from tests.parallel.test_expert_layouts import DSV, L4, MIX, compare_balance, expert_matrix
from tests.parallel.test_layouts import compare_traces, full, one_process
from tests.rank_pool import RankPool

Patch = AbstractContextManager[Any]


def balancing_loss_times_ranks() -> Patch:
    """Every rank of a sequence adds the loss of the whole sequence."""
    right = RouterBalance._balancing_loss

    def wrong(router: RouterBalance, logits: Tensor, counts: Tensor) -> Tensor:
        return right(router, logits, counts) * router._sequence_ranks.size

    return mock.patch.object(RouterBalance, "_balancing_loss", wrong)


def counts_of_one_rank() -> Patch:
    """The balancing loss counts the tokens of this rank's part of the sequence alone."""
    right = RouterBalance._balancing_loss

    def wrong(router: RouterBalance, logits: Tensor, counts: Tensor) -> Tensor:
        with mock.patch.object(Communicator, "start_all_reduce", lambda ranks, tensor: Work((), lambda: tensor)):
            return right(router, logits, counts)

    return mock.patch.object(RouterBalance, "_balancing_loss", wrong)


def balancing_loss_discarded() -> Patch:
    """The loss is computed and reported, and its gradient is lost."""
    return mock.patch.object(ExpertBalance, "with_loss", lambda balance, weights, loss: weights)


def norm_without_experts() -> Patch:
    right = ModelSharing.is_counted
    return mock.patch.object(
        ModelSharing,
        "is_counted",
        lambda sharing, info, over_all: not info.is_expert and right(sharing, info, over_all),
    )


def expert_gradients_averaged() -> Patch:
    """Gradients of experts are divided by the ranks that share them."""
    right = DataParallel.finish_grad_sync

    def wrong(data_parallel: DataParallel) -> None:
        right(data_parallel)
        for shard in data_parallel.param_shards:
            if shard.info.is_expert:
                shard.gradient.div_(2)

    return mock.patch.object(DataParallel, "finish_grad_sync", wrong)


def experts_reduced_like_dense_weights() -> Patch:
    return mock.patch.object(Sharing, "of_experts", Sharing.of)


def no_sum_of_router_gradients() -> Patch:
    """Under sequence parallelism each rank has the router's gradient of its own tokens."""

    def wrong(*arguments: Any, **keywords: Any) -> ParameterInfo:
        return replace(ParameterInfo(*arguments, **keywords), gradient_is_partial=False)

    return mock.patch.object(moe_layer, "ParameterInfo", wrong)


def outputs_to_other_tokens() -> Patch:
    right = permutation._sum_choices

    def wrong(rows: Tensor, order: permutation.RowOrder, weights: Tensor | None = None) -> Tensor:
        return right(rows, permutation.RowOrder(order.choices, order.rows.flip(0)), weights)

    return mock.patch.object(permutation, "_sum_choices", wrong)


def weights_on_the_output() -> Patch:
    return mock.patch.object(dispatch.ExpertRanks, "weigh", lambda ranks, tokens, routing: (tokens, routing.weights))


def bias_in_the_weights() -> Patch:
    right = routing.route

    def wrong(logits: Tensor, rule: routing.RoutingRule, expert_bias: Tensor | None = None) -> routing.Routing:
        assert expert_bias is not None
        experts = right(logits, rule, expert_bias).experts
        return routing.Routing(experts, routing._weights(logits + expert_bias, experts, rule))

    return mock.patch.object(moe_layer, "route", wrong)


def no_sum_over_expert_tensor_ranks() -> Patch:
    def wrong(gather: transfer.UnevenGather, gradient: Tensor) -> Work[Tensor]:
        part = gradient.split(list(gather.counts))[gather.ranks.rank]
        return Work((), lambda: part)

    return mock.patch.object(transfer.UnevenGather, "start_adjoint", wrong)


def bias_from_one_rank() -> Patch:
    """Every rank updates the bias by its own counts."""
    right = ExpertBalance.start_sum

    def wrong(experts: ExpertBalance) -> Work[Tensor]:
        with mock.patch.object(Communicator, "start_all_reduce", lambda ranks, tensor: Work((), lambda: tensor)):
            return right(experts)

    return mock.patch.object(ExpertBalance, "start_sum", wrong)


TENSOR = Layout(2, etp=1, sequence_parallel=True)
EXPERT = Layout(dp=4, ep=2, strategy="optim_grads_params", microbatches=2)
FAULTS: dict[Callable[[], Patch], tuple[Task, Layout]] = {
    balancing_loss_times_ranks: (MIX, TENSOR),
    counts_of_one_rank: (MIX, TENSOR),
    balancing_loss_discarded: (MIX, EXPERT),
    norm_without_experts: (MIX, EXPERT),
    expert_gradients_averaged: (MIX, EXPERT),
    experts_reduced_like_dense_weights: (MIX, Layout(2, 2, True, ep=4, cp=2, microbatches=2)),
    no_sum_of_router_gradients: (MIX, TENSOR),
    outputs_to_other_tokens: (MIX, EXPERT),
    weights_on_the_output: (L4, Layout(dp=2, ep=2, microbatches=2, activations=full("uniform", 1))),
    bias_in_the_weights: (DSV, Layout(dp=8, ep=8, strategy="optim")),
    no_sum_over_expert_tensor_ranks: (MIX, Layout(etp=2, dp=2)),
    bias_from_one_rank: (DSV, Layout(dp=8, ep=8, strategy="optim")),
}


def train_with(fault: Callable[[], Patch], task: Task, layout: Layout) -> Trace:
    with fault():
        return train(task, layout)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen(sixteen_ranks: RankPool, fault: Callable[[], Patch]) -> None:
    task, layout = FAULTS[fault]
    traces = sixteen_ranks.run(train_with, fault, task, layout, world_size=layout.world_size)
    with pytest.raises(AssertionError):
        compare_traces(traces, one_process(task))
        compare_balance(traces, one_process(task))


def test_the_rows_that_see_faults_run_by_default() -> None:
    layouts = [layout for _, layout in expert_matrix()]
    assert {layout for _, layout in FAULTS.values()} <= set(layouts)
