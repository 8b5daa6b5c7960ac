"""Mixture of experts: every layout computes the same training run as one process, in fp64.

Compared as for dense models, to 1e-9: losses, norms, gradients, weights; besides the balancing loss and the z-loss, and
exactly the experts that every token chooses, the load of every expert and the bias. The run of one process asserts that
no choice is near a tie, where rounding could change it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args
from zlib import crc32

import pytest
import torch
from torch import nn

from megatron.config.activations import RecomputeModule
from megatron.config.moe import MoEConfig, TokenDispatcherType
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ShardingStrategy
from megatron.core.moe.layer import Router
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.topology import Topology
from megatron.schedules.registry import SCHEDULES
from tests.parallel.covering import covering
from tests.parallel.layout_run import BATCH, MODEL, TIED_MODEL, Layout, Task, Trace, train
from tests.parallel.test_layouts import (
    MUP_FIELDS,
    TOLERANCE,
    Case,
    compare_traces,
    compare_with_one_process,
    factors_of,
    full,
    is_late_by_default,
    one_process,
    ranks_of,
    rows_of,
    selective,
)
from tests.rank_pool import RankPool

Disturb = Callable[[PipelineExecutor, Topology], None]

SGD_FLAGS = OptimizerConfig(optimizer="sgd", clip_grad=0.05)
MIX_MODEL = replace(MODEL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24)
MIX_LOSSES = MoEConfig(
    moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(1e-2,), moe_z_loss_coeff=1e-3
)
MIX = Task(SGD_FLAGS, MIX_MODEL, steps=3, moe=MIX_LOSSES)
MIX_ADAM = replace(MIX, optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=0.05))
MIX_TIED = replace(MIX_ADAM, model=replace(TIED_MODEL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24))
MIX_MUP = replace(MIX_ADAM, model=replace(MIX_MODEL, moe_shared_expert_intermediate_size=40, **MUP_FIELDS), steps=2)
DEEP_MIX = replace(MIX, model=replace(MIX_MODEL, num_layers=8), steps=2)
DSV = Task(
    OptimizerConfig(weight_decay=0.1, clip_grad=0.05),
    replace(
        MIX_MODEL,
        moe_router_topk=3,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
    ),
    steps=3,
    moe=MoEConfig(moe_router_load_balancing_type=("none",), moe_router_bias_update_rate=1e-2),
)
L4 = Task(
    SGD_FLAGS,
    replace(
        MIX_MODEL,
        num_layers=4,
        moe_layer_freq="[0,1]*2",
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
        moe_shared_expert_intermediate_size=40,
        qk_l2_norm=True,
        no_rope_freq="4",
        # In a sequence of 16, borders lie inside a rank's part, between two parts, and the last chunk is shorter.
        attention_chunk_size=6,
        attention_temperature_tuning=True,
        attention_temperature_floor=3,
        attention_temperature_scale=0.5,
    ),
    steps=3,
    moe=MIX_LOSSES,
)
L4_OVERLAP = replace(L4, moe=replace(MIX_LOSSES, moe_shared_expert_overlap=True))
TASKS = {"mix": MIX, "dsv": DSV, "l4": L4}
MOE_MODULES: tuple[RecomputeModule, ...] = ("moe_act", "shared_experts", "layernorm", "core_attn")


def expert_product() -> Iterator[Case]:
    """An eighth of all foldings of tensor, expert, context, pipeline and data parallelism on at most sixteen ranks."""
    for case in _all_foldings():
        if crc32(repr(case[1]).encode()) % 8 == 0:
            yield case


def _all_foldings() -> Iterator[Case]:
    for task, tp, etp, ep, cp, pp, dispatcher, count, strategy in product(
        TASKS.values(),
        (1, 2),
        (1, 2),
        (1, 2, 4, 8),
        (1, 2),
        (1, 2),
        get_args(TokenDispatcherType),
        (1, 4),
        get_args(ShardingStrategy),
    ):
        for dp, instances in product((1, 2, 4, 8), (1, 2)):
            edp, rest = divmod(tp * cp * dp, etp * ep)
            if not 1 < tp * cp * pp * dp <= 16 or rest or dp * count > BATCH:
                continue
            if instances > 1 and (strategy == "no_shard" or dp % 2 or edp % 2):
                continue
            layout = Layout(
                tp,
                dp,
                sequence_parallel=tp > 1,
                strategy=strategy,
                instances=instances,
                microbatches=count,
                pp=pp,
                cp=cp,
                ep=ep,
                etp=etp,
                dispatcher=dispatcher,
                bucket_size=3000 if strategy in ("optim", "optim_grads") else None,
                overlap_grad_reduce=count == 4,
                overlap_param_gather=count == 4 and strategy != "no_shard",
            )
            yield task, layout


def expert_matrix() -> Iterator[Case]:
    """What Megatron-LM's users found wrong, and everything that runs again, later, or in another order."""
    yield MIX_MUP, Layout(2, 2, True, etp=2, ep=2, strategy="optim", microbatches=2)
    yield MIX, Layout(etp=2, dp=2)
    yield MIX, Layout(2, etp=1, sequence_parallel=True)
    yield MIX, Layout(2, etp=1, sequence_parallel=True, dispatcher="allgather")
    yield MIX_ADAM, Layout(2, 2, True, ep=4, cp=2, microbatches=2)
    yield DSV, Layout(2, 2, True, etp=2, ep=2, pp=2, microbatches=2)
    yield DSV, Layout(dp=8, ep=8, strategy="optim")
    yield MIX, Layout(dp=4, ep=2, strategy="optim_grads_params", microbatches=2)
    yield L4_OVERLAP, Layout(2, 2, True, ep=2, strategy="optim_grads_params", microbatches=2)
    yield L4_OVERLAP, Layout(2, 2, True, ep=2, etp=2, strategy="optim", dispatcher="allgather")
    yield MIX, Layout(dp=8, ep=2, strategy="optim_grads_params", instances=2, overlap_param_gather=True)
    yield MIX_TIED, Layout(dp=4, ep=2, pp=2, strategy="optim", microbatches=4)
    yield MIX_TIED, Layout(2, 2, True, "optim_grads_params", ep=2, overlap_param_gather=True)
    for schedule in SCHEDULES:
        strategy: ShardingStrategy = "optim_grads" if schedule in ("1f1b", "zb-v") else "no_shard"
        yield DEEP_MIX, Layout(dp=2, ep=2, pp=2, schedule=schedule, microbatches=4, strategy=strategy)
    for order in ("tp-cp-ep-dp-pp", "dp-cp-tp-ep-pp", "pp-dp-tp-cp-ep"):
        yield MIX, Layout(2, 2, True, "optim", ep=2, cp=2, pp=2, microbatches=2, order=order)
    in_documents = replace(MIX, masks_documents=True, resets_positions=True)
    yield in_documents, Layout(dp=2, ep=4, cp=2)
    for activations in (full("uniform", 1), full("uniform", 2), selective("moe"), selective(*MOE_MODULES)):
        yield L4_OVERLAP, Layout(dp=2, ep=2, microbatches=2, activations=activations)
        yield DSV, Layout(2, 1, True, ep=2, etp=1, activations=activations)
    offload = full("uniform", 1, cpu_offloading_num_layers=1)
    yield L4, Layout(dp=2, ep=2, activations=offload)
    yield (
        L4,
        Layout(
            dp=2,
            ep=2,
            activations=replace(offload, recompute_granularity=None, recompute_method=None, recompute_num_layers=None),
        ),
    )
    yield L4_OVERLAP, Layout(2, 2, True, ep=2, pp=2, schedule="zb-h1", microbatches=4, activations=selective("moe"))
    yield L4, Layout(2, 1, True, ep=2, transformer_engine=True)
    # The auxiliary loss of a microbatch depends on its samples, which are the same here.
    of_microbatches = replace(
        MIX,
        moe=MoEConfig(moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"), moe_aux_loss_coeff=(1e-2, 1e-3)),
    )
    yield of_microbatches, Layout(2, 1, True, ep=2, cp=2)


@cache
def default_places() -> frozenset[int]:
    """Rows of the product that have every two factors together."""
    cases = list(expert_product())
    return frozenset(covering(factors_of(cases), [ranks_of(case) for case in cases], strength=2))


def rows() -> list[Any]:
    covered = [(case, place in default_places()) for place, case in enumerate(expert_product())]
    return [
        *rows_of(expert_matrix()),
        *(
            pytest.param(
                task,
                replace(layout, late=is_late_by_default(task, layout)),
                marks=[pytest.mark.whole_matrix] * (not is_default),
            )
            for (task, layout), is_default in sorted(covered, key=lambda row: (ranks_of(row[0]), row[1]))
        ),
    ]


def identifier(value: object) -> str:
    if isinstance(value, Task):
        return next((name for name, task in TASKS.items() if task.model is value.model), "other")
    assert isinstance(value, Layout)
    parts = {"tp": value.tp, "cp": value.cp, "pp": value.pp, "dp": value.dp, "etp": value.etp, "ep": value.ep}
    sizes = "-".join(f"{name}{size}" for name, size in parts.items() if size > 1)
    schedule = f"-{value.schedule}" if value.pp > 1 else ""
    return f"{sizes}-{value.dispatcher}-{value.strategy}-x{value.instances}-micro{value.microbatches}{schedule}"


def compare_balance(traces: list[Trace], expected: Trace) -> None:
    """The balance of the experts, the choices of all tokens and the biases of all layers."""
    assert expected.margin > 1e-7, "a choice of the reference is near a tie: use another seed"
    for step, metrics in enumerate(expected.balance):
        for trace in traces:
            assert trace.balance[step] == pytest.approx(metrics, rel=TOLERANCE)
        # Tensor-parallel ranks of a pipeline stage have other tokens, so each token is recorded once.
        assert sorted(choice for trace in traces for choice in trace.choices[step]) == sorted(expected.choices[step])
        for trace in traces:
            for name, bias in trace.biases[step].items():
                assert torch.equal(bias, expected.biases[step][name]), name
        assert {name for trace in traces for name in trace.biases[step]} == expected.biases[step].keys()


@pytest.mark.parametrize(("task", "layout"), rows(), ids=identifier)
def test_experts_equal_one_process(sixteen_ranks: RankPool, task: Task, layout: Layout) -> None:
    traces = compare_with_one_process(sixteen_ranks, task, layout)
    compare_balance(traces, one_process(task))


def zero_routers(executor: PipelineExecutor, topology: Topology) -> None:
    """All scores are equal: every token chooses the experts with the lowest ids, and the others have no tokens."""
    for router in routers_of(executor):
        router.weight.data.zero_()


def equal_rows(executor: PipelineExecutor, topology: Topology) -> None:
    """Two experts have equal scores for every token."""
    for router in routers_of(executor):
        router.weight.data[5] = router.weight.data[2]


def routers_of(executor: PipelineExecutor) -> Iterator[Router]:
    for chunk in executor.chunks:
        assert isinstance(chunk, nn.Module)
        yield from (module for module in chunk.modules() if isinstance(module, Router))


@pytest.mark.parametrize("disturb", [zero_routers, equal_rows], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dispatcher", get_args(TokenDispatcherType))
def test_ties_choose_the_lowest_id_in_every_layout(
    sixteen_ranks: RankPool, dispatcher: TokenDispatcherType, disturb: Disturb
) -> None:
    # One step: the weights of tied experts differ afterwards, by rounding alone.
    task, layout = replace(MIX, steps=1), Layout(2, 4, True, ep=4, etp=2, dispatcher=dispatcher)
    expected = train(task, Layout(), disturb)
    traces = sixteen_ranks.run(train, task, layout, disturb, world_size=layout.world_size)
    compare_traces(traces, expected)
    chosen = [trace.choices[0] for trace in (*traces, expected)]
    assert sorted(choice for choices in chosen[:-1] for choice in choices) == sorted(chosen[-1])
    if disturb is zero_routers:
        assert {experts for _, _, _, experts in chosen[-1]} == {(0, 1)}
    else:
        assert any(2 in experts for _, _, _, experts in chosen[-1])
        assert all(2 in experts for _, _, _, experts in chosen[-1] if 5 in experts)
