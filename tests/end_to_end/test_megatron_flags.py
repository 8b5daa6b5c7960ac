"""Flags that recipes of Megatron-LM carry do what they say, seen in what a run leaves behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.config.command_line import parse_command_line
from megatron.errors import UserError, report
from megatron.training.loop.trainer import Listener
from megatron.training.profiles import WindowProfile, build_profile
from tests.end_to_end.megatron_recipe import recipe
from tests.end_to_end.run_process import (
    Corpus,
    Flags,
    call_training,
    checkpoint_of,
    flags_of,
    fork_training,
    grad_norms,
    iterations,
    latest_iteration,
    losses,
    records,
)


def test_a_run_starts_from_the_weights_of_another_and_goes_on_from_its_own(corpus: Corpus, tmp_path: Path) -> None:
    base, run, metrics = tmp_path / "base", tmp_path / "run", tmp_path / "metrics.jsonl"
    call_training(flags_of(corpus, save=base, train_iters=3)).succeeded()

    places = {"pretrained_checkpoint": base, "load": run, "save": run, "metrics_jsonl": metrics}
    call_training(flags_of(corpus, **places, train_iters=2, lr_decay_iters=8)).succeeded()
    first = losses(metrics)
    fine_tuned = tmp_path / "fine_tuned.jsonl"
    finetune = flags_of(corpus, load=base, finetune=True, train_iters=2, lr_decay_iters=8, metrics_jsonl=fine_tuned)
    call_training(finetune).succeeded()
    assert first == losses(fine_tuned)
    call_training(flags_of(corpus, **places, train_iters=3, lr_decay_iters=8)).succeeded()
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2, 3]


def weights(save: Path) -> dict[str, Tensor]:
    """The model of the latest checkpoint of one process."""
    files = checkpoint_of(save, latest_iteration(save)).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items() if name.startswith("model/")}


def test_embedding_and_head_have_the_learning_rate_that_is_decoupled(corpus: Corpus, tmp_path: Path) -> None:
    """At zero they stay what they are, while all else is trained."""
    untrained: Flags = {"train_iters": 1, "lr": 0}
    trained: Flags = {"train_iters": 3, "decoupled_lr": 0}
    for name, changes in (("start", untrained), ("end", trained)):
        call_training(flags_of(corpus, save=tmp_path / name, lr_warmup_iters=0, **changes)).succeeded()
    start, end = weights(tmp_path / "start"), weights(tmp_path / "end")
    assert start.keys() == end.keys()
    kept = {name.partition("@")[0] for name in start if torch.equal(start[name], end[name])}
    assert kept == {"model/embedding.word_embeddings.weight", "model/output_layer.weight"}


def test_flags_that_come_to_what_a_run_does_anyway_change_nothing(corpus: Corpus, tmp_path: Path) -> None:
    plain, flagged = tmp_path / "plain.jsonl", tmp_path / "flagged.jsonl"
    common: Flags = {"train_iters": 4, "min_lr": 1e-3, "lr_decay_style": "cosine", "weight_decay": 0.1}
    call_training(flags_of(corpus, **common, metrics_jsonl=plain)).succeeded()
    changes: Flags = {
        "decoupled_lr": 1e-2,
        "decoupled_min_lr": 1e-3,
        "weight_decay": 9.0,
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "deterministic_mode": True,
        "empty_unused_memory_level": 2,
        "log_memory_to_tensorboard": True,
        "use_tp_pp_dp_mapping": True,
        "ddp_num_buckets": 3,
    }
    call_training(flags_of(corpus, **{**common, **changes}, metrics_jsonl=flagged)).succeeded()
    assert losses(plain) == losses(flagged)
    assert grad_norms(plain) == grad_norms(flagged)
    assert not torch.are_deterministic_algorithms_enabled(), "it is over with the run"


def test_iterations_are_skipped_with_their_samples(corpus: Corpus, tmp_path: Path) -> None:
    still, skipping = tmp_path / "still.jsonl", tmp_path / "skipping.jsonl"
    call_training(flags_of(corpus, train_iters=4, lr=0, metrics_jsonl=still)).succeeded()
    run = flags_of(corpus, train_iters=4, iterations_to_skip=(1, 2, 4), lr=0, metrics_jsonl=skipping)
    call_training(run).succeeded()
    (third,) = iterations(skipping)
    # The untrained model meets the third batch.
    assert (third["iteration"], third["consumed_samples"]) == (3, 24)
    assert third["lm_loss"] == iterations(still)[2]["lm_loss"]


def test_evaluation_has_a_batch_size_of_its_own(corpus: Corpus, tmp_path: Path) -> None:
    found = []
    single: Flags = {"train_iters": 1, "lr_warmup_iters": 0}
    for size, batches in ((None, 1), (4, 2), (2, 1)):
        metrics = tmp_path / f"{size}.jsonl"
        evaluation: Flags = {"eval_interval": 1, "eval_iters": batches, "eval_global_batch_size": size}
        call_training(flags_of(corpus, **single, metrics_jsonl=metrics, **evaluation)).succeeded()
        found.append(next(record["validation_loss"] for record in records(metrics) if "validation_loss" in record))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] != pytest.approx(found[0], rel=1e-6)


def test_a_profile_holds_the_iterations_that_were_asked_for(corpus: Corpus, tmp_path: Path) -> None:
    window: Flags = {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 3}
    outcome = call_training(flags_of(corpus, train_iters=4, tensorboard_dir=tmp_path, **window)).succeeded()
    trace = tmp_path / "profile" / "rank_0.pt.trace.json"
    assert f"profile written to {trace}" in outcome.stdout
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2
    # The passes of the four microbatches of both iterations.
    for action in ("F0.0", "F3.0", "B0.0", "B3.0"):
        assert names.count(action) == 2, action

    late = call_training(
        flags_of(corpus, train_iters=1, lr_warmup_iters=0, tensorboard_dir=tmp_path / "late", **window)
    ).succeeded()
    assert "--profile recorded nothing: iterations 2 to 3 are not in this run" in late.stdout


def test_a_rank_that_cannot_write_its_profile_says_so_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Others may be able to, and what rank 0 says is of rank 0."""
    flags = "--profile --use-pytorch-profiler --profile-ranks 3 --tensorboard-dir"

    def profile(directory: Path) -> Listener | None:
        config = parse_command_line([*flags.split(), str(directory)])
        return build_profile(config, 3, torch.device("cpu"), lambda text: None)

    (tmp_path / "file").touch()
    with pytest.raises(UserError) as raised:
        profile(tmp_path / "file")
    report(raised.value, rank=3)
    assert "--profile cannot write" in capsys.readouterr().err

    late = profile(tmp_path / "directory")
    assert isinstance(late, WindowProfile)
    late.begin()
    shutil.rmtree(tmp_path / "directory")
    late.finish()
    assert "--profile could not write" in caplog.text


OTHERS = """
    --normalization RMSNorm --rerun-mode disabled --te-rng-tracker --disable-gloo-process-groups
    --dist-ckpt-optim-fully-reshardable --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-validation-ppl-to-tensorboard
"""
"""Flags of other recipes of Megatron-LM."""


def test_a_recipe_of_megatron_lm_trains_on_two_ranks(tmp_path: Path) -> None:
    small = """
        --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
        --kv-channels 16 --seq-length 32 --max-position-embeddings 32 --vocab-size 500 --global-batch-size 4
        --train-samples 12 --lr-decay-samples 12 --lr-warmup-samples 4 --eval-interval 3 --eval-iters 1
        --num-workers 0 --device cpu --peak-tflops 1
    """
    metrics = tmp_path / "metrics.jsonl"
    flags = [*recipe(tmp_path), *OTHERS.split(), *small.split(), "--metrics-jsonl", str(metrics)]
    outcome = fork_training(flags, processes=2).succeeded()
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2, 3]
    assert latest_iteration(tmp_path) == 3
    assert "--profile without --use-pytorch-profiler needs a GPU and nsys" in outcome.stdout
