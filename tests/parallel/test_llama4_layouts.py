"""Llama 4: every layout computes the same training run as one process, and one process what the definition says.

Chunks and positions are those of the sequence, or of each document, wherever a rank's part of the sequence lies; which
layers rotate is read with global layer numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, get_args

import pytest

from megatron.config.compute import ActivationConfig
from megatron.config.model import MoEConfig
from megatron.config.parallel import ContextParallelType, ShardingStrategy
from megatron.schedules.catalog import SCHEDULES
from tests.llama4_definition import token_logits, token_losses
from tests.parallel.comparison import TOLERANCE, compare_balance, compare_with_one_process, one_process
from tests.parallel.layout_run import Layout, Task, Trace, assemble, microbatches, train
from tests.parallel.rows import Case, identifier, rows_of
from tests.parallel.tasks import (
    CHUNKS,
    DEEP_CHUNKS,
    LLAMA4_ADAM,
    LLAMA4_TASKS,
    MASKED,
    POSITIONS,
    RESTARTED,
    UNEVEN_CHUNKS,
    full,
    selective,
)
from tests.rank_pool import RankPool

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
    divides_heads = "a2a" in kinds and CHUNKS.model.num_query_groups % (tp * cp)
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
    yield CHUNKS, cp2
    yield UNEVEN_CHUNKS, cp4
    yield MASKED, replace(cp2, cp_comm_type=("allgather",))
    yield RESTARTED, replace(cp2, cp_comm_type=("a2a",), tp=2, sequence_parallel=True)
    yield RESTARTED, replace(cp4, cp_comm_type=("allgather",), strategy="optim")
    yield POSITIONS, replace(cp4, cp_comm_type=MIXED, ep=2)
    yield POSITIONS, replace(cp4, cp_comm_type=("a2a+p2p",), cp_sizes=(2, 2), etp=2)
    # Layer kinds by global number, in stages that have one kind, several, or no layers.
    for schedule in SCHEDULES:
        yield CHUNKS, Layout(pp=2, schedule=schedule, microbatches=4)
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
    compare_with_definition(task, first_step(task))


def first_step(task: Task) -> Trace:
    """Without balancing losses, and without an update, so that the recorded weights are the initial ones."""
    return train(replace(task, steps=1, learning_rate=0.0, moe=MoEConfig()), Layout())


def compare_with_definition(task: Task, trace: Trace) -> None:
    """Compare the loss and all gradients of :func:`first_step`."""
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
