"""What ``--loss-chunk-size`` saves, in the plan of Llama 3 8B with 8,192 tokens."""

import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.planner.plan import Run, StagePlan, planned_vocabulary, simulate_rank

VOCABULARY, TOKENS, CHUNK = 128256, 8192, 1024


def plan(flags: str, num_gpus: int) -> StagePlan:
    config = parse_command_line(
        f"--model llama3-8b --num-layers 2 --mock-data --bf16 --seq-length {TOKENS} --micro-batch-size 1 "
        f"--train-iters 10 --lr 1e-3 {flags}".split()
    )
    check_run(config, num_gpus)
    return simulate_rank(Run.of(config, num_gpus, planned_vocabulary(config)), 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_saves_the_logits_of_the_other_tokens(tp: int) -> None:
    layout = f"--tensor-model-parallel-size {tp}" + " --sequence-parallel" * (tp > 1)
    whole, chunked = plan(layout, tp), plan(f"{layout} --loss-chunk-size {CHUNK}", tp)
    logits = 2 * VOCABULARY // tp * TOKENS
    assert whole.peak.by_kind["logits and loss"] >= logits
    assert chunked.peak.by_kind["logits and loss"] < logits / 1000
    # The output layer's backward pass also holds its whole input and the gradient of that.
    hidden = 2 * 4096 * TOKENS
    saved = whole.peak.total - chunked.peak.total
    assert logits * (1 - CHUNK / TOKENS) - 2 * hidden <= saved <= logits
