"""Mixture of experts, and Llama 4: every layout computes the same training run as one process, in fp64.

Compared as for dense models, to 1e-9: losses, norms, gradients, weights; besides the balancing loss and the z-loss, and
exactly the experts that every token chooses, the load of every expert and the bias. The run of one process asserts that
no choice is near a tie, where rounding could change it.

For Llama 4 one process also computes what the definition says. Chunks and positions are those of the sequence, or of
each document, wherever a rank's part of the sequence lies; which layers rotate is read with global layer numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, get_args
from zlib import crc32

import pytest

from megatron.config.activations import ActivationConfig, RecomputeModule
from megatron.config.model import MoEConfig, TokenDispatcherType
from megatron.config.parallel import ContextParallelType, ShardingStrategy
from megatron.schedules.catalog import SCHEDULES
from tests.llama4_definition import token_logits, token_losses
from tests.parallel.comparison import TOLERANCE, compare_balance, compare_traces, compare_with_one_process, one_process
from tests.parallel.layout_run import BATCH, Layout, Task, assemble, equal_rows, microbatches, train, zero_routers
from tests.parallel.rows import Case, identifier, rows_of
from tests.parallel.tasks import (
    DEEP_CHUNKS,
    DEEP_MIX,
    DSV,
    L4,
    L4_OVERLAP,
    LLAMA4_ADAM,
    LLAMA4_TASKS,
    MASKED,
    MIX,
    MIX_ADAM,
    MIX_MUP,
    MIX_TIED,
    POSITIONS,
    RESTARTED,
    UNEVEN_CHUNKS,
    full,
    selective,
)
from tests.rank_pool import RankPool

MOE_MODULES: tuple[RecomputeModule, ...] = ("moe_act", "shared_experts", "layernorm", "core_attn")


def expert_product() -> Iterator[Case]:
    """An eighth of all foldings of tensor, expert, context, pipeline and data parallelism on at most sixteen ranks."""
    for case in _all_foldings():
        if crc32(repr(case[1]).encode()) % 8 == 0:
            yield case


def _all_foldings() -> Iterator[Case]:
    for task, tp, etp, ep, cp, pp, dispatcher, count, strategy in product(
        (MIX, DSV, L4),
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
                tp, dp, tp > 1, strategy, instances, count, pp, cp=cp, ep=ep, etp=etp, dispatcher=dispatcher
            )
            buckets = 3000 if strategy in ("optim", "optim_grads") else None
            gathers = count == 4 and strategy != "no_shard"
            yield (
                task,
                replace(layout, bucket_size=buckets, overlap_grad_reduce=count == 4, overlap_param_gather=gathers),
            )


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
    # Recomputed layers gather their experts again, also with several microbatches in flight.
    recomputed = Layout(dp=4, ep=2, strategy="optim_grads_params", microbatches=2, activations=full("uniform", 2))
    for reshard, ahead in ((True, False), (True, True), (False, True)):
        yield MIX, replace(recomputed, reshard_after_forward=reshard, overlap_param_gather=ahead)
    yield DEEP_MIX, replace(recomputed, dp=2, pp=2, microbatches=4, overlap_param_gather=True)
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
    yield L4, Layout(dp=2, ep=2, activations=ActivationConfig(cpu_offloading_num_layers=1))
    yield L4_OVERLAP, Layout(2, 2, True, ep=2, pp=2, schedule="zb-h1", microbatches=4, activations=selective("moe"))
    yield L4, Layout(2, 1, True, ep=2, transformer_engine=True)
    # The auxiliary loss of a microbatch depends on its samples, which are the same here.
    of_microbatches = replace(
        MIX, moe=MoEConfig(moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"), moe_aux_loss_coeff=(1e-2, 1e-3))
    )
    yield of_microbatches, Layout(2, 1, True, ep=2, cp=2)


@pytest.mark.parametrize(("task", "layout"), rows_of(expert_matrix(), expert_product()), ids=identifier)
def test_experts_equal_one_process(sixteen_ranks: RankPool, task: Task, layout: Layout) -> None:
    traces = compare_with_one_process(sixteen_ranks, task, layout)
    compare_balance(traces, one_process(task))


@pytest.mark.parametrize("disturb", [zero_routers, equal_rows], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dispatcher", get_args(TokenDispatcherType))
def test_ties_choose_the_lowest_id_in_every_layout(
    sixteen_ranks: RankPool, dispatcher: TokenDispatcherType, disturb: Any
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


@pytest.mark.parametrize("task", [MIX, DSV, L4], ids=identifier)
def test_the_gradient_norm_and_the_zeros_are_those_of_all_parameters(task: Task) -> None:
    """Independent of the optimizer: what all layouts agree on must also be right."""
    trace = one_process(task)
    for norm, zeros, parts in zip(trace.grad_norms, trace.zeros, trace.gradients, strict=True):
        gradients = assemble(parts).values()
        assert norm == pytest.approx(math.sqrt(sum(float(one.square().sum()) for one in gradients)), rel=1e-9)
        assert zeros == sum(int((one == 0).sum()) for one in gradients)


# Llama 4

MIXED: tuple[ContextParallelType, ...] = ("p2p", "a2a", "allgather", "p2p")
NOT_KEPT: tuple[ActivationConfig, ...] = (
    ActivationConfig(),
    full("uniform", 1),
    selective("core_attn"),
    selective("moe"),
    selective("core_attn", "layernorm", "moe_act", "shared_experts"),
)

SAMPLES = 600
"""Rows of the product, drawn once for all runs."""


def llama4_product() -> list[Case]:
    """Some of all layouts of up to eight ranks."""
    every = product(
        (MASKED, RESTARTED, POSITIONS),
        (1, 2),
        _exchanges(),
        [(1, "1f1b"), *((2, schedule) for schedule in SCHEDULES)],
        _data_parallel(),
        ((1, 1), (2, 1), (1, 2), (4, 1)),
        NOT_KEPT,
    )
    return [_case(*factors) for factors in Random(0).sample([one for one in every if _fits(*one[1:-1])], SAMPLES)]


def _fits(tp: int, exchange: Any, pipeline: Any, data_parallel: Any, experts: Any) -> bool:
    (cp, kinds, _), (pp, _), (dp, _, instances), (ep, etp) = exchange, pipeline, data_parallel, experts
    divides_heads = "a2a" in kinds and L4.model.num_query_groups % (tp * cp)
    edp, rest = divmod(tp * cp * dp, etp * ep)
    return 1 < tp * cp * pp * dp <= 8 and not (divides_heads or rest or edp % instances)


def _case(
    task: Task, tp: int, exchange: Any, pipeline: Any, data_parallel: Any, experts: Any, activations: ActivationConfig
) -> Case:
    (cp, kinds, sizes), (pp, schedule), (dp, strategy, instances) = exchange, pipeline, data_parallel
    layout = Layout(tp, dp, tp > 1, strategy, instances, 4 if pp > 1 else 2, pp, schedule, cp=cp, cp_comm_type=kinds)
    ep, etp = experts
    return task, replace(layout, cp_sizes=sizes, ep=ep, etp=etp, activations=activations)


def _exchanges() -> Iterator[tuple[int, tuple[ContextParallelType, ...], tuple[int, ...]]]:
    """Context-parallel sizes with every way to attend, one way for all layers or one for each."""
    yield 1, ("p2p",), ()
    kinds: tuple[ContextParallelType, ...] = ("p2p", "allgather", "a2a")
    for cp in (2, 4):
        for kind in kinds:
            yield cp, (kind,), ()
        yield cp, MIXED, ()
    yield 4, ("a2a+p2p",), (2, 2)


def _data_parallel() -> Iterator[tuple[int, ShardingStrategy, int]]:
    for strategy in get_args(ShardingStrategy):
        yield 1, strategy, 1
        yield 2, strategy, 1
    yield 2, "optim", 2
    yield 2, "optim_grads_params", 2
    yield 4, "optim_grads_params", 2


def llama4_matrix() -> Iterator[Case]:
    """What chunks, positions and layers without a rotation can get wrong, each with the division that shows it."""
    cp2, cp4 = Layout(cp=2, microbatches=2), Layout(cp=4)
    yield L4, cp2
    yield UNEVEN_CHUNKS, cp4
    yield MASKED, replace(cp2, cp_comm_type=("allgather",))
    yield RESTARTED, replace(cp2, cp_comm_type=("a2a",), tp=2, sequence_parallel=True)
    yield RESTARTED, replace(cp4, cp_comm_type=("allgather",), strategy="optim")
    yield POSITIONS, replace(cp4, cp_comm_type=MIXED, ep=2)
    yield POSITIONS, replace(cp4, cp_comm_type=("a2a+p2p",), cp_sizes=(2, 2), etp=2)
    # Layer kinds by global number, in stages that have one kind, several, or no layers.
    for schedule in SCHEDULES:
        yield L4, Layout(pp=2, schedule=schedule, microbatches=4)
    interleaved = Layout(pp=2, schedule="interleaved", chunks=4, microbatches=4)
    yield DEEP_CHUNKS, replace(interleaved, activations=selective("core_attn"))
    yield DEEP_CHUNKS, Layout(dp=2, pp=2, ep=2, schedule="zb-v", microbatches=4, strategy="optim_grads")
    yield DEEP_CHUNKS, Layout(pp=4, split="E|tttt|ttt|tL", microbatches=4)
    # Sums over other ranks, and what runs again.
    yield LLAMA4_ADAM, Layout(2, 2, True, "optim_grads_params", ep=2, etp=2, overlap_param_gather=True)
    yield LLAMA4_ADAM, Layout(dp=4, ep=2, strategy="optim_grads_params", instances=2, microbatches=2)
    for activations in NOT_KEPT[1:]:
        yield RESTARTED, Layout(2, 1, True, ep=2, cp=2, microbatches=2, activations=activations)
    # One varlen call for the chunks and documents of all sequences.
    yield RESTARTED, Layout(2, 1, True, attention="unfused", microbatches=2)
    yield UNEVEN_CHUNKS, Layout(cp=2, cp_comm_type=("a2a",), attention="unfused")


# Six factors of which every two would be fifty rows: by default each value of a factor is seen.
@pytest.mark.parametrize(
    ("task", "layout"), rows_of(llama4_matrix(), llama4_product(), strength=1, most_ranks=4), ids=identifier
)
def test_llama4_equals_one_process(sixteen_ranks: RankPool, task: Task, layout: Layout) -> None:
    traces = compare_with_one_process(sixteen_ranks, task, layout)
    compare_balance(traces, one_process(task))


@pytest.mark.parametrize("task", [*LLAMA4_TASKS, DEEP_CHUNKS], ids=identifier)
def test_one_process_computes_what_the_definition_says(task: Task) -> None:
    """The loss and all gradients; without balancing losses, and without an update, so that the recorded weights are the
    initial ones."""
    trace = train(replace(task, steps=1, learning_rate=0.0, moe=MoEConfig()), Layout())
    weights = assemble(trace.weights[0])
    (batch,) = microbatches(0, Layout(), 0)
    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    starts = batch["document_starts"]
    logits = token_logits(leaves, task.model, batch["tokens"], starts, task.masks_documents, task.resets_positions)
    losses = token_losses(logits, batch["labels"])
    mean = losses[batch["loss_mask"] > 0].mean()
    mean.backward()
    assert trace.losses[0] == pytest.approx(mean.item(), rel=TOLERANCE)
    for name, gradient in assemble(trace.gradients[0]).items():
        wanted = leaves[name].grad
        assert wanted is not None
        assert (gradient - wanted).abs().max() < TOLERANCE * wanted.abs().max(), name
