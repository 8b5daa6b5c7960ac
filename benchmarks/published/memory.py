"""Peaks of GPU memory that other software published, and what a dry run of this code needs for the same layout.

    python -m benchmarks.published.memory

The model, batch and layout are the same, the software is not: kernels, saved tensors and the dtype of the logits
differ. What both hold between two steps is comparable.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.planner.plan import Run, StagePlan, simulate_rank
from megatron.training.build.vocabulary import planned_vocabulary

_COMMON = "--mock-data --bf16 --train-iters 10 --lr 1e-3 --overlap-grad-reduce --overlap-param-gather"
_FSDP = "--use-torch-fsdp2"
_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GIB = 2**30


@dataclass(frozen=True)
class PublishedPeak:
    name: str
    flags: str
    num_gpus: int
    peak_gib: float
    between_steps_gib: float | None
    source: str

    def simulate(self) -> StagePlan:
        """The first rank of this code with the same layout."""
        config = parse_command_line(f"{_COMMON} {self.flags}".split())
        check_run(config, self.num_gpus)
        return simulate_rank(Run.of(config, self.num_gpus, planned_vocabulary(config)), 0)


RUNS = (
    PublishedPeak(
        "8B, DP4 CP2, bf16 gradients",
        "--model llama3-8b --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --context-parallel-size 2 "
        "--use-distributed-optimizer --grad-reduce-in-bf16",
        8,
        70833405952 / GIB,
        44271689728 / GIB,
        "NeMo",
    ),
    PublishedPeak(
        "8B, FSDP 8, selective recompute",
        f"--model llama3-8b --seq-length 8192 --micro-batch-size 2 --global-batch-size 16 {_FSDP} "
        "--recompute-activations",
        8,
        82.4,
        None,
        "torchtitan",
    ),
    PublishedPeak(
        "8B, FSDP 8, FP8, sequences of 32,768, full recompute",
        "--model llama3-8b --seq-length 32768 --max-position-embeddings 32768 --micro-batch-size 1 "
        f"--global-batch-size 8 {_FSDP} {_FP8} {_FULL}",
        8,
        83.9,
        None,
        "torchtitan",
    ),
    PublishedPeak(
        "70B, FSDP 32 x TP 8, FP8, microbatch of 16, full recompute",
        "--model llama3-70b --seq-length 8192 --micro-batch-size 16 --global-batch-size 512 "
        f"--tensor-model-parallel-size 8 --sequence-parallel {_FSDP} {_FP8} {_FULL}",
        256,
        71.9,
        None,
        "torchtitan",
    ),
)


def lines() -> Iterator[str]:
    """The table of docs/planner.md."""
    yield "| layout | software | published, GiB | ours | of it logits and loss | between steps: published | ours |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for run in RUNS:
        found = run.simulate()
        between = "" if run.between_steps_gib is None else f"{run.between_steps_gib:.1f}"
        ours = found.peak.total, found.peak.by_kind["logits and loss"], found.steady.total
        peak, logits, steady = (f"{size / GIB:.1f}" for size in ours)
        yield f"| {run.name} | {run.source} | {run.peak_gib:.1f} | {peak} | {logits} | {between} | {steady} |"


if __name__ == "__main__":
    print("\n".join(lines()))
