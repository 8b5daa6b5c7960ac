"""The loss scale does what Megatron-LM's does, at every step of any sequence of overflows; it keeps gradients in fp16's
range and is nowhere else to be seen, on however many ranks."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.precision import DynamicLossScaler, LossScaler, build_loss_scaler
from tests.parallel.layout_run import DEEP_MODEL, FP64, Layout, LocalTensor, Task, Trace, overflow_on_last_rank, train
from tests.rank_pool import RankPool


def reference_scales(config: PrecisionConfig, overflows: list[bool]) -> Iterator[float]:
    """The scale after every step, which looks at all steps since the last doubling again instead of counting."""
    scale, doubled, window = config.initial_loss_scale, 0, config.loss_scale_window
    for now in range(1, len(overflows) + 1):
        seen = overflows[doubled:now]
        if seen[-1] and sum(seen) >= config.hysteresis:
            scale = max(scale / 2, config.min_loss_scale)
        elif len(seen) >= window and not any(seen[-window:]):
            scale, doubled = scale * 2, now
        yield scale


def random_case(seed: int) -> tuple[PrecisionConfig, list[bool]]:
    draw = random.Random(seed)
    minimum = draw.choice([0.5, 1.0, 3.0])
    config = PrecisionConfig(
        fp16=True,
        initial_loss_scale=minimum * draw.choice([1.0, 1.5, 16.0, 2.0**32]),
        min_loss_scale=minimum,
        loss_scale_window=draw.randint(1, 5),
        hysteresis=draw.randint(1, 4),
    )
    rate = draw.choice([0.0, 0.1, 0.4, 0.9])
    return config, [draw.random() < rate for _ in range(200)]


@pytest.mark.parametrize("seed", range(200))
def test_scale_is_the_references_after_every_step(seed: int) -> None:
    config, overflows = random_case(seed)
    scaler = build_loss_scaler(config)
    for overflowed, expected in zip(overflows, reference_scales(config, overflows), strict=True):
        scaler.update(overflowed)
        assert scaler.scale == expected


@pytest.mark.parametrize("seed", range(50))
def test_scaler_restored_at_any_step_goes_on_as_if_nothing_had_happened(seed: int) -> None:
    config, overflows = random_case(seed)
    whole, resumed = build_loss_scaler(config), build_loss_scaler(config)
    for overflowed in overflows:
        saved = json.loads(json.dumps(resumed.to_json()))
        resumed = build_loss_scaler(config)
        resumed.restore(saved)
        assert resumed.update(overflowed) == whole.update(overflowed)
        assert resumed == whole


def test_cases_reach_floor_growth_and_hysteresis() -> None:
    """The comparison means nothing if the scale never moves."""
    seen = {"floor": 0, "doubled": 0, "halved": 0, "tolerated": 0}
    for config, overflows in map(random_case, range(200)):
        before = config.initial_loss_scale
        for overflowed, after in zip(overflows, reference_scales(config, overflows)):
            seen["floor"] += overflowed and after == before == config.min_loss_scale
            seen["tolerated"] += overflowed and after == before > config.min_loss_scale
            seen["doubled"] += after > before
            seen["halved"] += after < before
            before = after
    assert min(seen.values()) > 100, seen


def test_defaults_by_hand() -> None:
    scaler = build_loss_scaler(PrecisionConfig(fp16=True))
    # Two overflows are taken before it halves; each later one halves at once.
    overflows = [True] * 3 + [False] * 1000
    scales = [(scaler.update(overflow), scaler.scale)[1] for overflow in overflows]
    assert scales == [2**32, 2**31, 2**30] + [2**30] * 999 + [2**31]


def test_overflow_is_wrong_only_where_the_scale_cannot_fall() -> None:
    scaler = DynamicLossScaler(4.0, minimum=1.0, window=2, hysteresis=2)
    assert [scaler.update(overflowed) for overflowed in (True, True, True, True, False)] == [True] * 3 + [False, True]
    assert scaler.scale == 1.0


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (PrecisionConfig(), 1.0),
        (PrecisionConfig(bf16=True), 1.0),
        (PrecisionConfig(fp16=True, loss_scale=128.0), 128.0),
    ],
    ids=["fp32", "bf16", "fp16 static"],
)
def test_a_constant_scale_stays_and_takes_every_overflow_for_a_fault(config: PrecisionConfig, scale: float) -> None:
    scaler = build_loss_scaler(config)
    assert [scaler.update(False), scaler.update(True), scaler.scale] == [True, False, scale]
    assert scaler.to_json() is None
    scaler.restore({"scale": 8.0, "good_steps": 1, "overflows": 0})
    assert scaler == LossScaler(scale)


def test_the_limits_of_the_flags_outrank_a_restored_state() -> None:
    scaler = DynamicLossScaler(64.0, minimum=16.0, window=3, hysteresis=1)
    scaler.restore({"scale": 2.0, "good_steps": 900, "overflows": 1})
    assert scaler.scale == 16.0
    scaler.update(False)
    assert scaler.scale == 32.0, "a window that was shortened below what was counted must not be missed"
    scaler.restore(None)
    assert scaler.scale == 32.0


# Runs on ranks

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
    for trace, twin in zip(scaled, plain, strict=True):
        assert (trace.losses, trace.grad_norms) == (twin.losses, twin.grad_norms)
        assert same(trace.gradients, twin.gradients)
        assert same(trace.weights, twin.weights)


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
