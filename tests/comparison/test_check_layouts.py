"""``megatron-llama check-layouts``: a run scaled down keeps what its layout and its layers are."""

import pytest

from megatron.commands import compare_runs
from megatron.comparison.layouts import one_process, small_layout, small_model
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine

COMMON = "--micro-batch-size 1 --global-batch-size 512 --train-iters 100 --lr 1e-4 --bf16 --seq-length 8192"
LARGE = "--model llama3.1-405b --tensor-model-parallel-size 8 --sequence-parallel"
RUNS = {
    "interleaved": (f"{LARGE} --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 6", 1024),
    "chunks": ("--model llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
               "--num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer", 256),
    "context": (f"{LARGE} --context-parallel-size 16 --cp-comm-type a2a+p2p "
                "--hierarchical-context-parallel-sizes 2 8", 2048),
    "experts": ("--model mixtral-8x7b --expert-model-parallel-size 8 --tensor-model-parallel-size 2 "
                "--sequence-parallel", 64),
    "chunked attention": ("--model llama4-scout --context-parallel-size 4 --expert-model-parallel-size 16", 64),
    "no layout": ("--model llama3-8b", 16),
}  # fmt: skip


@pytest.mark.parametrize("most", [2, 4, 8])
@pytest.mark.parametrize(("words", "world_size"), RUNS.values(), ids=RUNS)
def test_a_run_scaled_down_passes_the_checks(words: str, world_size: int, most: int) -> None:
    given = CommandLine.of(f"{words} {COMMON}".split()).parse().checked()
    layout, size = small_layout(given, world_size, most)
    config = small_model(layout, size)
    assert size <= most
    check_run(config, size)
    alone = one_process(config)
    assert alone.training == config.training and alone.model == config.model
    before, after = given.parallel, config.parallel
    assert config.model.num_experts is None or config.model.num_experts >= 2 * after.expert_model_parallel_size
    assert (after.sharding_strategy, after.sequence_parallel) == (before.sharding_strategy, before.sequence_parallel)
    axes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    assert all(getattr(after, axis) <= getattr(before, axis) for axis in axes)
    if most == 8:  # every kind of parallelism is kept where there is room
        assert after.model_parallel_size >= min(before.model_parallel_size, 4)
    hidden = config.model.hidden_size
    assert hidden is not None and hidden <= 256


@pytest.mark.processes
@pytest.mark.slow(reason="runs in processes")
def test_a_layout_is_compared_with_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--max-ranks 2 --model mixtral-8x7b --expert-model-parallel-size 8 {COMMON} --dry-run --num-gpus 64"
    assert compare_runs.main_check(words.split()) == 0
    assert "equal: the largest difference is" in capsys.readouterr().out
    monkeypatch.setattr(compare_runs, "TOLERANCE", 1e-30)
    assert compare_runs.main_check(words.split()) == 3
    assert "not equal: the first difference is in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--max-ranks 0 --model tiny", "--max-ranks 0 must be at least 1"), ("--no-such-flag 3", "--no-such-flag")],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs.main_check(words.split()) == 2
    assert sentence in capsys.readouterr().err
