"""Runs that do not keep their activations tell the same losses, to the bit."""

from pathlib import Path

import pytest

from tests.end_to_end.run_process import TINY_RUN, FlagValue, call_training, grad_norms, losses, words_of

DATA: dict[str, FlagValue] = {
    "mock_data": True,
    "vocab_size": 100,
    "train_iters": 3,
    "num_layers": 4,
    "eval_interval": 2,
    "eval_iters": 1,
}
FULL: dict[str, FlagValue] = {"recompute_granularity": "full"}


def trained(metrics: Path, **flags: FlagValue) -> tuple[list[float], str]:
    """Losses and gradient norms, and what the run said."""
    command = words_of({**TINY_RUN, **DATA, **flags, "metrics_jsonl": metrics})
    return losses(metrics) + grad_norms(metrics), call_training(command).succeeded().stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found, said = trained(tmp_path_factory.mktemp("plain") / "metrics.jsonl")
    assert "activations:" not in said
    return found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"recompute_activations": True}, "activations: core_attn recomputed"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp_act")},
            "activations: layernorm, mlp_act recomputed",
        ),
        (
            {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
            "activations: only the input of every 3 layers is saved",
        ),
        (
            {**FULL, "recompute_method": "block", "recompute_num_layers": 1, "cpu_offloading_num_layers": 2},
            "activations: only the inputs of the first 1 layers of a chunk are saved; the first 2 layers of a chunk "
            "are offloaded to the host",
        ),
        ({"cpu_offloading_num_layers": 4}, "activations: the first 4 layers of a chunk are offloaded to the host"),
    ],
)
def test_the_same_losses(expected: list[float], tmp_path: Path, flags: dict[str, FlagValue], said: str) -> None:
    found, output = trained(tmp_path / "metrics.jsonl", **flags)
    assert found == expected
    assert said in output
