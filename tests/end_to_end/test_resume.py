"""A run that stops, by whatever means, and starts again is the run that never stopped; also in another layout, and
under other flags.

The long way round is always real: a tokenized corpus, processes, gloo, checkpoints on disk. The comparison is of every
number in the metrics file that does not come from a clock, and of every tensor of the last checkpoint.
"""

import gc
import json
import math
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.manifest import read_checkpoint
from megatron.schedules.catalog import build_schedule
from megatron.training.pipeline_trace import from_chrome_trace
from tests.end_to_end.run_process import (
    PROMPT,
    Corpus,
    Flags,
    FlagValue,
    Outcome,
    RunningTraining,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    fork_training,
    iterations,
    latest_iteration,
    losses,
    saving_in,
)

LENGTH, HALF = 8, 4
TOLERANCE = 1e-9
RAMPED: Flags = {
    "micro_batch_size": 1,
    "rampup_batch_size": (4, 4, 12),
    "train_iters": LENGTH,
    "eval_interval": 3,
    "eval_iters": 1,
}
"""Batches of 4 and, from iteration 4 on, of 8 samples; evaluations after iterations 3 and 6, and at the end."""


# --- the same layout: every bit ------------------------------------------------------------------------------

ONE_PROCESS: dict[str, Flags] = {
    # A loss scale that goes up and down all the time.
    "fp16": {"fp16": True, "initial_loss_scale": 2**22, "loss_scale_window": 2, "lr_warmup_iters": 0},
    "fp8": {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_amax_history_len": 4,
        "fp8_amax_compute_algo": "max",
        "use_distributed_optimizer": True,
        "fp8_param_gather": True,
        "optimizer_cpu_offload": True,
    },
    "muon": {
        "optimizer": "muon",
        "muon_extra_scale_factor": 0.2,
        "decoupled_lr": 2e-2,
        "bf16": True,
        "async_save": True,
    },
}
SHARDED: Flags = {
    **RAMPED,
    "bf16": True,
    "context_parallel_size": 2,
    "reset_attention_mask": True,
    "use_torch_fsdp2": True,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
    "adam_beta2": 0.95,
}
"""Ranks that share a sequence shard weights, gradients and narrow moments."""


def whole_run(corpus: Corpus, directory: Path, flags: Flags, processes: int) -> list[str]:
    """Train without a stop, with a checkpoint half-way; the flags."""
    words = flags_of(corpus, **flags, save_interval=HALF)
    where = ["--save", str(directory), "--metrics-jsonl", str(directory / "metrics.jsonl")]
    train(words + where, processes).succeeded()
    return words


def train(words: Sequence[str], processes: int) -> Outcome:
    return call_training(words) if processes == 1 else fork_training(words, processes)


@pytest.mark.parametrize(
    ("flags", "processes", "of_resumed"),
    [
        *(pytest.param(flags, 1, "", id=name) for name, flags in ONE_PROCESS.items() if name != "fp8"),
        pytest.param(ONE_PROCESS["fp8"], 1, "--no-optimizer-cpu-offload", id="fp8"),
        pytest.param(SHARDED, 2, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5", id="fully sharded"),
    ],
)
def test_a_resumed_run_is_the_whole_run(
    corpus: Corpus, tmp_path: Path, flags: Flags, processes: int, of_resumed: str
) -> None:
    """Also in the random state: nothing of ours draws from the global generators, but a user's code may. The optimizer
    state may go to the host, or leave it."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    words = whole_run(corpus, whole, flags, processes)
    words += ["--load", str(whole), "--ckpt-step", str(HALF), "--save", str(resumed), *of_resumed.split()]
    outcome = train([*words, "--metrics-jsonl", str(resumed / "metrics.jsonl")], processes).succeeded()
    assert f"continuing after iteration {HALF}" in outcome.stdout
    assert computed(resumed / "metrics.jsonl") == [
        record for record in computed(whole / "metrics.jsonl") if record["iteration"] > HALF
    ]
    names = ("model/", "optimizer/", "fp8/", "random/")
    assert_same_tensors(checkpoint_of(resumed, LENGTH), checkpoint_of(whole, LENGTH), names)
    found, wanted = (read_checkpoint(root, LENGTH).state for root in (resumed, whole))
    assert found["loss_scaler"] == wanted["loss_scaler"] and found["optimizer_steps"] == wanted["optimizer_steps"]
    # The comparison says nothing unless the run learns, ramps up, or skips steps on both sides of the stop.
    records = iterations(whole / "metrics.jsonl")
    if "fp16" in flags:
        assert all({record["skipped"] for record in part} == {0, 1} for part in (records[:HALF], records[HALF:]))
        assert wanted["optimizer_steps"] == LENGTH - sum(record["skipped"] for record in records)
        assert wanted["loss_scaler"]["scale"] == records[-1]["loss_scale"]
    else:
        assert records[-1]["lm_loss"] < records[0]["lm_loss"] - 0.3
    if "rampup_batch_size" in flags:
        assert [record["global_batch_size"] for record in records] == [4] * 3 + [8] * 5


def test_a_checkpoint_of_muon_is_refused_by_adam_unless_it_starts_afresh(corpus: Corpus, tmp_path: Path) -> None:
    call_training(flags_of(corpus, **ONE_PROCESS["muon"], exit_interval=2, save=tmp_path)).succeeded()
    flags = flags_of(corpus, bf16=True, load=tmp_path)
    call_training(flags).refusal("--optimizer muon, not adam", "--no-load-optim")
    call_training([*flags, "--no-load-optim"]).succeeded()


# --- one layout after the other ------------------------------------------------------------------------------

Leg = tuple[int, int, str]
"""Ranks, the iteration up to which they train, and their layout."""
DENSE: Flags = {
    **RAMPED,
    "num_layers": 4,
    "untie_embeddings_and_output_weights": False,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
}
DENSE_LEGS: list[Leg] = [
    (
        4,
        3,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
    ),
    (
        4,
        6,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL --use-distributed-optimizer "
        "--overlap-grad-reduce --profile-pipeline TRACE",
    ),
    (1, LENGTH, ""),
]
EXPERTS: Flags = {
    "num_layers": 4,
    "no_rope_freq": "4",
    "attention_chunk_size": 8,
    "qk_l2_norm": True,
    "attention_temperature_tuning": True,
    "attention_temperature_floor": 4,
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]*2",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_apply_probs_on_input": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_per_layer_logging": True,
}
"""The layers of Llama 4, with an expert bias: without its saved bias a run would choose other experts."""
EXPERT_LEGS: list[Leg] = [
    (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1 --use-distributed-optimizer --moe-token-dispatcher-type alltoall"),
    (2, 4, "--context-parallel-size 2 --expert-model-parallel-size 2 --use-torch-fsdp2"),
    (2, 6, "--pipeline-model-parallel-size 2"),
    (1, LENGTH, ""),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "legs"), [(DENSE, DENSE_LEGS), (EXPERTS, EXPERT_LEGS)], ids=["dense", "experts"])
def test_run_handed_from_layout_to_layout_equals_one_process(
    corpus: Corpus, tmp_path: Path, flags: Flags, legs: list[Leg]
) -> None:
    """In fp64, with every number of the metrics file, and zeros in the gradient and the norm of the weights, which
    count a tied weight once."""
    alone, relay, save, trace = (tmp_path / name for name in ("alone.jsonl", "relay.jsonl", "save", "trace.json"))
    whole = call_training(flags_of(corpus, fp64=True, metrics_jsonl=alone, **flags)).succeeded()
    common, said = flags_of(corpus, fp64=True, metrics_jsonl=relay, save=save, load=save, **flags), ""
    for ranks, stop, layout in legs:
        words = layout.replace("TRACE", str(trace)).split()
        said += train([*common, *words, "--exit-interval", str(stop)], ranks).succeeded().stdout
        assert latest_iteration(save) == stop
    found, wanted = computed(relay), computed(alone)
    assert [list(record) for record in found] == [list(record) for record in wanted]
    for one, other in zip(found, wanted):
        for key, value in other.items():
            assert math.isclose(one[key], value, rel_tol=TOLERANCE), f"{key}: {one} instead of {other}"
    assert losses(alone)[-1] < losses(alone)[0] - 0.3
    if trace.exists():
        ran, timeline = from_chrome_trace(json.loads(trace.read_text()))
        assert ran == build_schedule("1f1b", 2, 4) and len(timeline.spans) == 2 * 2 * 4
    counts = re.compile(r"num zeros: +(\d+) \| params norm: +([0-9.]+) \|")
    assert counts.findall(said) == counts.findall(whole.stdout)


# --- under other flags ---------------------------------------------------------------------------------------


def test_a_run_past_its_ramp_goes_on_where_the_small_batches_would_not_divide(corpus: Corpus, tmp_path: Path) -> None:
    """Sizes that lie in the past need not fit the new micro-batch size; the learning rate of a ramp ends at its
    minimum."""
    ramp: Flags = {"rampup_batch_size": (2, 2, 12), "override_opt_param_scheduler": True, "train_iters": 20}
    ramp |= {"lr_decay_style": "cosine", "min_lr": 1e-4}
    call_training(flags_of(corpus, save=tmp_path, exit_interval=5, **ramp)).succeeded()
    metrics = tmp_path / "metrics.jsonl"
    call_training(flags_of(corpus, load=tmp_path, micro_batch_size=8, metrics_jsonl=metrics, **ramp)).succeeded()
    assert [record["global_batch_size"] for record in iterations(metrics)] == [8] * 15
    assert iterations(metrics)[-1]["learning_rate"] < 3e-4


def test_a_smaller_batch_after_a_resume_does_not_run_out_of_samples(corpus: Corpus, tmp_path: Path) -> None:
    call_training(flags_of(corpus, save=tmp_path, exit_interval=4, global_batch_size=16)).succeeded()
    metrics = tmp_path / "metrics.jsonl"
    changes = {"global_batch_size": 4, "override_opt_param_scheduler": True}
    call_training(flags_of(corpus, load=tmp_path, metrics_jsonl=metrics, **changes)).succeeded()
    assert [record["consumed_samples"] for record in iterations(metrics)] == [68, 72, 76, 80]


def test_a_change_of_precision_keeps_the_wider_weights(corpus: Corpus, tmp_path: Path) -> None:
    """Going on in another precision gives the losses of a run that never left fp32, nearly; fp16 starts a fresh loss
    scale."""
    precisions: dict[str, Flags] = {
        "fp32": {},
        "bf16": {"bf16": True},
        "fp16": {"fp16": True, "initial_loss_scale": 4096},
    }
    straight = tmp_path / "straight.jsonl"
    call_training(flags_of(corpus, metrics_jsonl=straight)).succeeded()
    for first, then in (("fp32", "bf16"), ("bf16", "fp16")):
        save, metrics = tmp_path / f"{first} {then}", tmp_path / f"{first} {then}.jsonl"
        call_training(flags_of(corpus, save=save, exit_interval=4, **precisions[first])).succeeded()
        call_training(flags_of(corpus, load=save, metrics_jsonl=metrics, **precisions[then])).succeeded()
        assert_close(losses(metrics), losses(straight)[4:], 0.02)
        assert iterations(metrics)[0]["loss_scale"] == precisions[then].get("initial_loss_scale", 1)


@pytest.mark.parametrize("how", ["finetune", "no_load_optim"])
def test_master_weights_start_from_the_widest_that_a_checkpoint_has(corpus: Corpus, tmp_path: Path, how: str) -> None:
    """Also where the optimizer's state is left out: in bf16 the model alone would have lost bits."""
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    call_training(flags_of(corpus, save=wide, train_iters=2, save_optim=how != "finetune")).succeeded()
    changes: Flags = {"lr": 0.0, "bf16": True, "lr_decay_iters": 8, "override_opt_param_scheduler": True}
    changes |= {"finetune": True, "train_iters": 1} if how == "finetune" else {"load_optim": False, "train_iters": 3}
    call_training(flags_of(corpus, load=wide, save=narrow, **changes)).succeeded()
    before, after = (
        load_file(checkpoint_of(root, latest_iteration(root)) / "rank_00000.safetensors") for root in (wide, narrow)
    )
    weights = {key.removeprefix("model/"): tensor for key, tensor in before.items() if key.startswith("model/")}
    assert weights
    for key, tensor in weights.items():
        assert torch.equal(after[f"optimizer/master/{key}"], tensor), key
        assert torch.equal(after[f"model/{key}"], tensor.bfloat16()), key


def test_collecting_garbage_by_hand_ends_with_the_run(corpus: Corpus) -> None:
    call_training(flags_of(corpus, manual_gc=True, manual_gc_interval=3, train_iters=3)).succeeded()
    assert gc.isenabled()


# --- graceful stops ------------------------------------------------------------------------------------------


def endless_flags(corpus: Corpus, directory: Path, **changes: FlagValue) -> list[str]:
    """One process, many more iterations than anybody waits for, and a loader thread in it."""
    return flags_of(corpus, **{"train_iters": 20_000, "num_workers": 1, **saving_in(directory), **changes})


def test_signal_saves_the_finished_iteration_and_the_run_goes_on_from_it(corpus: Corpus, tmp_path: Path) -> None:
    """SIGTERM, as from a batch system, and then SIGINT, as from a keyboard."""
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    done = 0
    for name in ("SIGTERM", "SIGINT"):
        run = RunningTraining(endless_flags(corpus, interrupted))
        run.wait_for_records(interrupted / "metrics.jsonl", done + 3)
        run.process.send_signal(signal.Signals[name])
        outcome = run.finish(timeout=PROMPT).succeeded()
        assert f"stopped: signal {name}" in outcome.stdout and not outcome.errors
        done = int(iterations(interrupted / "metrics.jsonl")[-1]["iteration"])
        assert latest_iteration(interrupted) == done and checkpoint_of(interrupted, done).is_dir()
    call_training(endless_flags(corpus, interrupted, exit_interval=done + 2)).succeeded()
    call_training(endless_flags(corpus, whole, exit_interval=done + 2)).succeeded()
    assert computed(interrupted / "metrics.jsonl") == computed(whole / "metrics.jsonl")
    assert_same_tensors(checkpoint_of(interrupted, done + 2), checkpoint_of(whole, done + 2))
