"""Runs of a mixture of experts: real processes, a corpus, checkpoints, from layout to layout."""

from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    assert_close,
    call_training,
    computed,
    flags_of,
    fork_training,
    grad_norms,
    iterations,
    latest_iteration,
    losses,
    tiny_corpus,
)

TOLERANCE = 1e-9
EXPERTS: dict[str, FlagValue] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_per_layer_logging": True,
    "moe_token_dispatcher_type": "alltoall",
}

ARCHITECTURE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


def test_a_run_goes_from_layout_to_layout_and_equals_one_process(corpus: Corpus, tmp_path: Path) -> None:
    """Expert parallelism, then expert tensor parallelism with FSDP, then one process, in fp64. Without its saved bias
    a run would choose other experts."""
    alone, relay, save = tmp_path / "alone.jsonl", tmp_path / "relay.jsonl", tmp_path / "checkpoints"
    call_training(flags_of(corpus, fp64=True, metrics_jsonl=alone, **EXPERTS)).succeeded()
    common = flags_of(corpus, fp64=True, metrics_jsonl=relay, save=save, load=save, **EXPERTS)
    expert_parallel = ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--exit-interval", "3"]
    fork_training([*common, *expert_parallel], processes=2).succeeded()
    expert_tensor = ["--expert-tensor-parallel-size", "2", "--use-torch-fsdp2", "--exit-interval", "6"]
    fork_training([*common, *expert_tensor], processes=2).succeeded()
    assert latest_iteration(save) == 6
    call_training(common).succeeded()
    assert_close(losses(relay), losses(alone), TOLERANCE)
    assert_close(grad_norms(relay), grad_norms(alone), TOLERANCE)
    names = ("load_balancing_loss", "z_loss", "expert_load_max", "moe/expert_load_max_layer_1")
    for found, wanted in zip(iterations(relay), iterations(alone), strict=True):
        assert_close([found[name] for name in names], [wanted[name] for name in names], TOLERANCE)


def test_experts_without_an_optimizer_flag_are_saved_and_resumed(corpus: Corpus, tmp_path: Path) -> None:
    """Two expert-parallel ranks without shards: replicas divide the dense parameters, not the experts."""
    alone, divided, save = tmp_path / "alone.jsonl", tmp_path / "divided.jsonl", tmp_path / "checkpoints"
    model: dict[str, FlagValue] = {"model": "tiny-moe", **dict.fromkeys(ARCHITECTURE)}
    common = flags_of(corpus, **model, fp64=True, micro_batch_size=1, global_batch_size=2, train_iters=4)
    call_training([*common, "--metrics-jsonl", str(alone)]).succeeded()
    run = [*common, "--expert-model-parallel-size", "2", "--save", str(save), "--load", str(save)]
    run += ["--metrics-jsonl", str(divided), "--exit-interval"]
    fork_training([*run, "2"], processes=2).succeeded()
    assert latest_iteration(save) == 2
    assert "continuing after iteration 2" in fork_training([*run, "4"], processes=2).succeeded().stdout
    assert_close(losses(divided), losses(alone), TOLERANCE)
    assert_close(grad_norms(divided), grad_norms(alone), TOLERANCE)


def test_forced_balance_is_exact_and_said(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, metrics_jsonl=metrics, train_iters=2, moe_router_force_load_balancing=True, num_experts=4)
    outcome = call_training(flags).succeeded()
    assert "for benchmarks only" in outcome.stdout
    assert [record["expert_load_max"] for record in computed(metrics) if "expert_load_max" in record] == [1.0, 1.0]
