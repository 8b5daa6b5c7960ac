"""The arithmetic of the literature reproduces published figures from their stated inputs."""

import subprocess
import sys

import pytest

from megatron.planner.arithmetic import (
    YEAR,
    activation_bytes,
    all_reduce_seconds,
    arithmetic_intensity,
    average_flops,
    bubble_fraction,
    gpu_hours,
    ridge,
    state_bytes_per_parameter,
    training_flops,
    training_seconds,
)
from megatron.planner.step_time.workload import read_cluster
from megatron.schedules.catalog import build_schedule
from megatron.schedules.simulator import Durations, simulate
from tests.end_to_end.run_process import REPOSITORY

H100 = read_cluster("h100")
LLAMA_405B = training_flops(405e9, 15e12)


@pytest.mark.parametrize(
    ("found", "published", "tolerance"),
    [
        (LLAMA_405B, 3.645e25, 1e-12),
        (training_seconds(LLAMA_405B, 1, H100.bf16_flops) / YEAR, 1170, 0.003),
        # 30.84 million GPU-hours (model card) at 6 N D are 328 TFLOP/s per GPU; 54 days of 16,384 GPUs are fewer hours.
        (average_flops(LLAMA_405B, 30.84e6), 328e12, 0.002),
        (gpu_hours(LLAMA_405B, average_flops(LLAMA_405B, 30.84e6)), 30.84e6, 1e-9),
        (average_flops(LLAMA_405B, 54 * 24 * 16384), 477e12, 0.002),
        (ridge(H100.bf16_flops, H100.hbm_bytes_per_s), 295, 0.0017),
        # 175 billion parameters with gradients in fp32, and without.
        (175e9 * state_bytes_per_parameter(gradient=4) / 2**40, 2.86, 0.0035),
        (175e9 * state_bytes_per_parameter() / 1e12, 2.8, 1e-6),
        (all_reduce_seconds(1.0, 2, 1.0), 1.0, 1e-12),
        (all_reduce_seconds(16e9, 64, 50e9), 2 * 63 / 64 * 16 / 50, 1e-12),
    ],
)
def test_published_figures_follow_from_their_inputs(found: float, published: float, tolerance: float) -> None:
    assert found == pytest.approx(published, rel=tolerance)


def test_a_product_of_few_rows_is_bound_by_memory_and_one_rank_sends_nothing() -> None:
    assert arithmetic_intensity(8192, 8192, 8192) > 295 > arithmetic_intensity(1, 8192, 8192)
    assert all_reduce_seconds(1.0, 1, 1.0) == 0.0


@pytest.mark.parametrize(("zero", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_divides_the_state_as_in_its_paper(zero: int, expected: float) -> None:
    """7.5 billion parameters on 64 ranks (arXiv 1910.02054, figure 1), in 1e9 bytes."""
    found = 7.5 * state_bytes_per_parameter(zero, 64)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=0.02)


def test_activations_are_those_of_table_2() -> None:
    """GPT-3 with a microbatch of one: s 2048, h 12288, a 96, t 8 (arXiv 2205.05198)."""
    outer, attention = 2048 * 12288, 5 * 96 * 2048 / 12288
    shape = (2048, 1, 12288, 96)
    assert attention == 80
    assert activation_bytes(*shape) == outer * 114
    assert activation_bytes(*shape, tp=8) == outer * (10 + 24 / 8 + 80 / 8)
    assert activation_bytes(*shape, tp=8, sequence_parallel=True) == outer * (34 / 8 + 80 / 8)
    assert activation_bytes(*shape, tp=8, sequence_parallel=True, recompute="selective") == outer * 34 / 8
    assert activation_bytes(*shape, recompute="full") == 2 * outer
    # The paper's 70 % that selective recompute saves.
    assert 34 / (34 + attention) == pytest.approx(0.30, abs=0.005)


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), [("1f1b", 8, 32, 1), ("interleaved", 4, 16, 2)])
def test_bubbles_are_those_of_the_schedules(name: str, stages: int, microbatches: int, chunks: int) -> None:
    schedule = build_schedule(name, stages, microbatches, chunks if chunks > 1 else None)
    timeline = simulate(schedule, Durations.uniform(schedule.placement, 1.0, 1.0, 1.0))
    idle = timeline.makespan / (3.0 * microbatches) - 1
    assert bubble_fraction(stages, microbatches, chunks) == pytest.approx(idle)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 400", ["3.645e+25", "64.4", "25,312,500"]),
        ("compute --parameters 8e9 --tokens 1e12 --price-per-gpu-hour 2", ["4.8e+22", "33,333", "66,667"]),
        ("memory --parameters 175e9 --gradient-bytes 4", ["18", "3.15 TB = 2.865 TiB"]),
        ("communication --size-gb 16 --ranks 64 --gb-per-s 50", ["0.63"]),
        ("compute --parameters 0 --tokens 1", []),
    ],
)
def test_the_tool_prints_the_figures_and_refuses_what_is_not_positive(arguments: str, expected: list[str]) -> None:
    command = [sys.executable, "tools/estimate.py", *arguments.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == (0 if expected else 2)
    assert done.stderr.startswith("" if expected else "ERROR: --parameters 0.0")
    assert all(text in done.stdout for text in expected)
