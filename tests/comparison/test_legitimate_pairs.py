"""No alarm for a hundred pairs of runs that compute the same: layouts, kernels, precisions, orders of summation."""

from itertools import product
from pathlib import Path

import pytest

import megatron_llama as ml
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.compare import compare
from megatron.comparison.experiment import Request
from megatron.features.record_tensors.recording import load_recording
from tests.comparison.in_process import MODEL, InProcess, Ranks, search, side

LAYOUTS = (
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type allgather",
    "--context-parallel-size 2 --cp-comm-type a2a",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce",
)
ALONE = (
    "--micro-batch-size 4",
    "--micro-batch-size 8",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn",
    "--recompute-granularity selective --recompute-modules layernorm mlp_act",
    "--loss-chunk-size 16",
    "--attention-backend unfused",
    "--no-gradient-accumulation-fusion",
    "--cpu-offloading-num-layers 1",
)
PRECISIONS = ("", "--fp64", "--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --fp8-format hybrid")
"""The first is fp32."""
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    # Its loss does not depend on the microbatches, as the one over all tokens does.
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss"
)
EXPERT_LAYOUTS = ("--expert-model-parallel-size 2", LAYOUTS[1], LAYOUTS[5], "--micro-batch-size 4")
BETWEEN = (
    (LAYOUTS[1], LAYOUTS[3]),
    (LAYOUTS[4], LAYOUTS[9]),
    (f"{LAYOUTS[1]} {LAYOUTS[5]}", LAYOUTS[2]),
    (f"{LAYOUTS[0]} {LAYOUTS[8]}", f"{LAYOUTS[7]} {LAYOUTS[9]}"),
    (f"{LAYOUTS[1]} {LAYOUTS[3]}", f"{LAYOUTS[6]} {ALONE[2]}"),
)
"""Two layouts of two or four ranks."""
CHANCE = (
    "--fp16 --initial-loss-scale 1024 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 24 --seq-length 64"
)
"""Some of its tokens get another expert by rounding, on one side and not on the other."""
PAIRS = (
    *((f"{one} ", f"{one} {b}") for one, b in product(PRECISIONS, ("", *LAYOUTS, *ALONE))),
    *((f"{one} {EXPERTS}", f"{one} {EXPERTS} {b}") for one, b in product(("", "--bf16"), EXPERT_LAYOUTS)),
    *((f"{one} {a}", f"{one} {b}") for one, (a, b) in product(("", "--bf16"), BETWEEN)),
    *((f"{CHANCE} --seed {seed}", f"{CHANCE} --seed {seed} --attention-backend unfused") for seed in (1, 4)),
)
QUICK = (
    ("--bf16 ", f"--bf16 {LAYOUTS[1]}"),
    (" ", f" {LAYOUTS[3]}"),
    ("--bf16 --fp8-format hybrid ", f"--bf16 --fp8-format hybrid {ALONE[0]}"),
    (f"--bf16 {EXPERTS}", f"--bf16 {EXPERTS} {LAYOUTS[1]}"),
    (f" {LAYOUTS[1]}", f" {LAYOUTS[3]}"),
    (f"--bf16 {LAYOUTS[4]}", f"--bf16 {LAYOUTS[9]}"),
    (f"{CHANCE} --seed 1", f"{CHANCE} --seed 1 --attention-backend unfused"),
)
"""Of the default tests."""


def marked() -> list[object]:
    slow = [() if pair in QUICK else (pytest.mark.slow,) for pair in PAIRS]
    return [pytest.param(*pair, marks=marks, id=" and ".join(pair)) for pair, marks in zip(PAIRS, slow)]


@pytest.mark.parametrize(("a", "b"), marked())
def test_no_cause_is_named(a: str, b: str, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    found = search(InProcess(ranks), tmp_path, a, b)
    assert not found.causes, found.causes
    assert not found.operations.differences


RESUMES = (
    ("--bf16", ""),
    ("--fp64", LAYOUTS[1]),
    *((precision, "") for precision in PRECISIONS if precision != "--bf16"),
    *(("--fp64", layout) for layout in (*LAYOUTS[2:4], *LAYOUTS[7:10], f"{LAYOUTS[1]} {LAYOUTS[5]}")),
)


@pytest.mark.parametrize(
    ("common", "layout"),
    [pytest.param(*one, marks=() if one in RESUMES[:2] else (pytest.mark.slow,)) for one in RESUMES],
)
def test_a_resumed_run_computes_the_steps_of_one_that_went_on(
    common: str, layout: str, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    """The same bits in the same layout; in another one, in fp64, no operation that differs."""

    def flags(name: str) -> str:
        return f"{common} --record-tensors {tmp_path / name} --record-tensors-iterations 3 4"

    with ml.Run.from_flags(f"{MODEL} {flags('on')}") as run:
        list(run.steps(2))
        run.save(tmp_path / "saved")
        list(run.steps(2))
    resumed = side(f"{flags('resumed')} {layout} --load {tmp_path / 'saved'}")
    InProcess(ranks)("B", *resumed, Request(), tmp_path / "experiment")
    steps = [
        [load_recording(tmp_path / name / f"iter_000000{step}.safetensors") for step in (3, 4)]
        for name in ("on", "resumed")
    ]
    found = list(rows(steps[0], steps[1]))
    assert len(found) == 2 * len(steps[0][0].tensors)
    assert first_beyond(found) is None
    assert layout or all(row.distance == 0 for row in found)


def test_a_resumed_run_raises_no_alarm(tmp_path: Path) -> None:
    def train(name: str, *counts: int) -> None:
        place = f"--save {tmp_path / name} --save-interval 2 --metrics-jsonl {tmp_path / name}.jsonl --log-interval 1"
        for number, count in enumerate(counts):
            load = f"--load {tmp_path / name}" if number else ""
            with ml.Run.from_flags(f"{MODEL} {place} {load}") as run:
                list(run.steps(count))

    train("on", 4)
    train("resumed", 2, 2)
    names = str(tmp_path / "on"), str(tmp_path / "resumed")
    verdict = compare(names, InProcess({}), tmp_path, 1, lambda text: None)
    assert verdict.exit_code == 0 and not verdict.causes, verdict
    assert [one.what for one in verdict.others] == ["--load"]  # it differs, and does not explain
    curves, weights = (next(one for one in verdict.parts if one.part == part) for part in ("curves", "weights"))
    assert curves.is_complete and weights.is_complete and not curves.differences and not weights.differences


def test_there_are_a_hundred_pairs() -> None:
    assert len(set(PAIRS)) + len(RESUMES) >= 100 and set(PAIRS) > set(QUICK)
