"""Frozen parameters in a whole run: they keep their weights, checkpoints hold no moments of them, a resumed run is the
same, and the dry run counts no gradients and moments."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_llama as ml
from megatron.checkpoint.manifest import EMA, MASTER, MODEL, read_checkpoint
from megatron.checkpoint.streaming import SavedTensors
from megatron.commands import pretrain_llama
from tests.checkpoint.models import weights_under
from tests.end_to_end.run_process import MOCK_RUN

FLAGS: dict[str, Any] = {name: value for name, value in MOCK_RUN.items() if value is not None}
FLAGS |= {"global_batch_size": 4, "train_iters": 4, "lr_warmup_iters": 0, "weight_decay": 0.1, "bf16": True}
FROZEN = ("embedding.*", "layers.0.*")


def weights_of(run: ml.Run) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for chunk in run.chunks for name, one in chunk.named_parameters()}


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding", "layers.0"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The checkpoint after two of four iterations, and the losses of all."""
    directory = tmp_path_factory.mktemp("frozen")
    with ml.Run(**FLAGS, freeze_parameters=FROZEN) as run:
        before = weights_of(run)
        losses = [step.loss for step in run.steps(2)]
        run.save(directory)
        losses += [step.loss for step in run.steps(2)]
        after = weights_of(run)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == is_frozen(name), name
    return directory, losses


def test_a_checkpoint_has_weights_and_no_moments_of_frozen_parameters(saved: tuple[Path, list[float]]) -> None:
    tensors = read_checkpoint(saved[0], 2).tensors
    assert "model/layers.0.mlp.linear_fc1.weight" in tensors and "model/layers.1.mlp.linear_fc1.weight" in tensors
    states = [name for name in tensors if name.startswith("optimizer/")]
    assert any("layers.1.mlp" in name for name in states)
    assert not [name for name in states if "embedding" in name or "layers.0." in name]


def test_a_resumed_run_is_the_same(saved: tuple[Path, list[float]]) -> None:
    directory, losses = saved
    with ml.Run(**FLAGS, freeze_parameters=FROZEN, load=directory) as run:
        assert [step.loss for step in run.steps()] == losses[2:]


def test_to_train_what_was_frozen_needs_a_new_optimizer_state(saved: tuple[Path, list[float]]) -> None:
    with pytest.raises(ml.CheckpointError, match=r"no optimizer state of .* not trained there: add --no-load-optim"):
        with ml.Run(**FLAGS, load=saved[0]):
            pass
    with ml.Run(**FLAGS, load=saved[0], no_load_optim=True) as run:
        before = weights_of(run)
        assert run.step().loss > 0
        assert not torch.equal(
            before["layers.0.mlp.norm_fc1.linear.weight"], weights_of(run)["layers.0.mlp.norm_fc1.linear.weight"]
        )


def test_more_may_be_frozen_after_a_checkpoint(saved: tuple[Path, list[float]]) -> None:
    with ml.Run(**FLAGS, freeze_parameters=(*FROZEN, "*.linear_fc2.weight"), load=saved[0]) as run:
        before = weights_of(run)
        assert all(step.loss > 0 for step in run.steps())
        after = weights_of(run)
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed and not any(is_frozen(name) or "swiglu_fc2" in name for name in changed)


def test_freezing_a_parameter_of_a_built_run_is_refused_with_the_flag() -> None:
    with ml.Run(**FLAGS) as run:
        next(iter(run.chunks[0].parameters())).requires_grad_(False)
        with pytest.raises(ml.ConfigError, match=r"embedding\.word_embeddings\.weight .*--freeze-parameters"):
            run.step()


def test_the_dry_run_counts_no_gradients_and_moments_of_frozen_parameters(tmp_path: Path) -> None:
    def memory(*more: str) -> dict[str, int]:
        report = tmp_path / "plan.json"
        words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 "
        words += "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --bf16 --dry-run --num-gpus 2"
        with redirect_stdout(StringIO()):
            assert pretrain_llama.main([*words.split(), "--dry-run-json", str(report), *more]) == 0
        found: dict[str, int] = json.loads(report.read_text())["memory_bytes"]["0"]
        return found

    whole, part = memory(), memory("--freeze-parameters", "layers.[0-3].*")
    assert part["weights"] == pytest.approx(whole["weights"], rel=0.02)  # each allocated alone, not in a buffer
    for kind in ("gradients", "moments", "master weights"):
        assert part[kind] < 0.5 * whole[kind], (kind, part, whole)


def test_the_export_takes_master_weights_and_averages_where_there_are_some(tmp_path: Path) -> None:
    with ml.Run(**FLAGS, freeze_parameters=FROZEN, ema_decay=0.5) as run:
        list(run.steps())
        run.save(tmp_path / "saved")
    saved = SavedTensors(tmp_path / "saved", 4)
    for flags, kind in ((("--dtype", "fp32"), MASTER), (("--dtype", "fp32", "--ema"), EMA)):
        target = tmp_path / kind.replace("/", "_")
        ml.command("convert", "to-hf", "--load", str(tmp_path / "saved"), "--hf", str(target), "--no-tokenizer", *flags)
        found = weights_under(target)
        for layer, prefix in ((0, MODEL), (1, kind)):
            stored = prefix + f"layers.{layer}.mlp.linear_fc2.weight"
            wanted = torch.empty(32, 64, dtype=saved.manifest.tensors[stored].dtype)
            saved.read_into(wanted, stored, (slice(0, 32), slice(0, 64)))
            assert torch.equal(found[f"model.layers.{layer}.mlp.down_proj.weight"], wanted.float())
