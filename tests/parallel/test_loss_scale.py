"""A loss scale keeps gradients in fp16's range and is nowhere else to be seen, on however many ranks."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.config.compute import PrecisionConfig
from megatron.config.training import OptimizerConfig
from tests.parallel.layout_run import DEEP_MODEL, FP64, Layout, LocalTensor, Task, Trace, overflow_on_last_rank, train
from tests.rank_pool import RankPool

ADAM = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.05), steps=3)
SGD = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.0), steps=3)
DEEP = replace(ADAM, model=DEEP_MODEL)

TENSOR = Layout(2, sequence_parallel=True, microbatches=2)
PIPELINE = Layout(pp=2, schedule="zb-h1", microbatches=4)
FSDP = Layout(1, 2, strategy="optim_grads_params", microbatches=2, overlap_grad_reduce=True)
DATA = Layout(1, 2, microbatches=2)
CONTEXT = Layout(cp=2, microbatches=2)

OVERFLOW_IN_STEP = 2
"""Counted from 0."""
SCALE = 2.0**10
FP16_ERROR = 1e-3


def same(one: list[list[LocalTensor]], other: list[list[LocalTensor]]) -> bool:
    """Whether the tensors are the same bits, step by step."""
    return all(
        torch.equal(tensor, twin)
        for step, twins in zip(one, other, strict=True)
        for (*_, tensor), (*_, twin) in zip(step, twins, strict=True)
    )


def assert_same_run(traces: list[Trace], expected: list[Trace]) -> None:
    for trace, twin in zip(traces, expected, strict=True):
        assert (trace.losses, trace.grad_norms) == (twin.losses, twin.grad_norms)
        assert same(trace.gradients, twin.gradients)
        assert same(trace.weights, twin.weights)


FP32 = PrecisionConfig()


@pytest.mark.parametrize(
    ("task", "layout", "precision"),
    [
        *((task, Layout(microbatches=2), precision) for task in (ADAM, SGD) for precision in (FP32, FP64)),
        (ADAM, TENSOR, FP32),
        (DEEP, PIPELINE, FP32),
        (SGD, FSDP, FP64),
        (SGD, DATA, PrecisionConfig(grad_reduce_in_bf16=True)),
    ],
)
def test_scale_by_a_power_of_two_changes_no_bit(
    four_ranks: RankPool, task: Task, layout: Layout, precision: PrecisionConfig
) -> None:
    plain, scaled = (
        four_ranks.run(train, replace(task, precision=one), layout, world_size=layout.world_size)
        for one in (precision, replace(precision, loss_scale=2.0**20))
    )
    assert_same_run(scaled, plain)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        (ADAM, TENSOR),
        (DEEP, PIPELINE),
        (ADAM, DATA),
        (ADAM, replace(DATA, strategy="optim")),
        (SGD, FSDP),
        (SGD, CONTEXT),
    ],
    ids=["tensor", "zb-h1", "data", "zero-1", "fsdp", "context"],
)
def test_overflow_on_one_rank_skips_the_step_on_all(four_ranks: RankPool, task: Task, layout: Layout) -> None:
    """The run goes on, bit by bit, as one that never made the step, and where its patience is over with half the
    scale."""
    patient = PrecisionConfig(fp16=True, initial_loss_scale=SCALE, hysteresis=2)
    task = replace(task, precision=patient)
    clean: list[Trace] = four_ranks.run(train, task, layout, world_size=2)
    disturb = partial(overflow_on_last_rank, (OVERFLOW_IN_STEP + 1) * layout.microbatches)
    longer = replace(task, steps=task.steps + 1)
    for trace, twin in zip(four_ranks.run(train, longer, layout, disturb, world_size=2), clean, strict=True):
        assert [math.isfinite(norm) for norm in trace.grad_norms] == [True, True, False, True]
        assert trace.loss_scales == [SCALE] * 4
        assert same([trace.weights[OVERFLOW_IN_STEP]], [trace.weights[OVERFLOW_IN_STEP - 1]])
        for mine, theirs in ((trace.grad_norms, twin.grad_norms), (trace.losses, twin.losses)):
            assert without_overflow(mine) == theirs
        assert same(without_overflow(trace.weights), twin.weights)
    impatient = replace(longer, precision=replace(patient, hysteresis=1))
    for trace in four_ranks.run(train, impatient, layout, disturb, world_size=2):
        assert trace.loss_scales == [SCALE, SCALE, SCALE / 2, SCALE / 2]
        assert same([trace.weights[OVERFLOW_IN_STEP]], [trace.weights[OVERFLOW_IN_STEP - 1]])
    wide = train(replace(task, precision=FP32), Layout())
    assert clean[0].losses == pytest.approx(wide.losses, rel=FP16_ERROR)
    assert clean[0].grad_norms == pytest.approx(wide.grad_norms, rel=10 * FP16_ERROR)


def without_overflow(steps: list[Any]) -> list[Any]:
    return steps[:OVERFLOW_IN_STEP] + steps[OVERFLOW_IN_STEP + 1 :]
