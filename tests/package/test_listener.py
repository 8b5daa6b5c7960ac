"""A listener as a user writes it, by the public names alone: what it measures reaches every writer."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import megatron_llama as ml

RUN: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0, "device": "cpu",
    "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 99, "lr": 1e-2, "train_iters": 10,
    "log_interval": 5, "eval_iters": 0,
}  # fmt: skip


class GradientNorms(ml.Listener):
    """The gradient norm of every parameter, every three iterations."""

    def before_update(self, trainer: Any, gradient_factor: float) -> None:
        self.norms: dict[str, float] = {}
        if (trainer.state.progress.iteration + 1) % 3 == 0:
            optimizer = trainer.module.optimizer
            norms = optimizer.norms([shard.gradient for shard in optimizer.shards])
            self.norms = {name: norm * gradient_factor for name, norm in norms.items()}

    def after_step(self, trainer: Any, outcome: Any) -> None:
        outcome.metrics.update({f"gradient/{name}": norm for name, norm in self.norms.items()})


def of_prefix(metrics: Any, prefix: str = "gradient/") -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_a_metric_of_an_earlier_iteration_of_the_interval_is_in_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {
        "metrics_jsonl": tmp_path / "metrics.jsonl",
        "tensorboard_dir": tmp_path,
        "tensorboard_log_interval": 10,
    }
    with ml.Run(GradientNorms(), **RUN, **flags) as run:
        steps = list(run.steps())
    given = {step.iteration: of_prefix(step.metrics) for step in steps}
    assert {iteration for iteration, norms in given.items() if norms} == {3, 6, 9}
    # Together they are the norm of the whole gradient.
    assert [math.hypot(*norms.values()) for norms in given.values() if norms] == pytest.approx(
        [steps[number - 1].grad_norm for number in (3, 6, 9)], rel=1e-5
    )
    first, second = records(tmp_path / "metrics.jsonl")
    assert of_prefix(first) == given[3] and of_prefix(second) == given[9]
    assert second["grad_norm"] == steps[-1].grad_norm
    assert points(tmp_path, "gradient/output_layer.weight") == [
        (10, pytest.approx(given[9]["gradient/output_layer.weight"]))
    ]
    assert "gradient/" not in capsys.readouterr().out


def test_the_metrics_of_layers_reach_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorBoard's points are at iteration 8 alone, and show what was measured in iteration 6."""
    flags = {"log_layer_norms_interval": 3, "log_max_attention_logit": True, "log_interval": 4, "train_iters": 8}
    files: dict[str, Any] = {
        "metrics_jsonl": tmp_path / "metrics.jsonl",
        "tensorboard_dir": tmp_path,
        "tensorboard_log_interval": 8,
    }
    with ml.Run(**{**RUN, **flags}, **files) as run:
        steps = list(run.steps())
    kinds = {"grad_norm", "weight_norm", "update_ratio", "max_attention_logit"}
    layers = {"layers.0", "layers.1"}
    assert {name for name in steps[2].metrics if "/" in name} == {
        f"{kind}/{layer}" for kind in kinds for layer in layers
    } | {
        f"{kind}/{part}"
        for kind in kinds - {"max_attention_logit"}
        for part in ("embedding", "final_layernorm", "output_layer")
    }
    first, second = records(tmp_path / "metrics.jsonl")
    for kind in kinds:
        name = f"{kind}/layers.1"
        assert (first[name], second[name]) == (steps[2].metrics[name], steps[5].metrics[name])
        assert points(tmp_path, name) == [(8, pytest.approx(second[name]))]
    console = [line for line in capsys.readouterr().out.splitlines() if "lm loss:" in line]
    assert all("max attention logit:" in line and "layers" not in line for line in console)


def records(path: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def points(directory: Path, key: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(key)]
