"""The memory of a stage from the records of its units is that of the dry run, which simulates the whole stage.

The dry run's allowance is left out of both. The share of activations is large here.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.dry_run import ALLOWANCE
from megatron.config.run import RunConfig
from megatron.planner.plan import Run, live_peaks, simulate_rank
from megatron.planner.rehearsal.records import UnitRecords
from megatron.planner.search.layout import Layout
from megatron.planner.search.stage_memory import StageMemory, moments_of
from megatron.schedules.catalog import build_schedule
from megatron.training.build.vocabulary import planned_vocabulary
from tests.covering import Factors, each_factor_by_default, flags_of

REQUIRED = "--mock-data --train-iters 10 --lr 1e-3 --micro-batch-size 1"
SMALL = (
    "--hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 4 --vocab-size 4096 "
    "--seq-length 2048 --global-batch-size 64 --untie-embeddings-and-output-weights"
)
EXPERTS = "--bf16 --num-experts 8 --moe-ffn-hidden-size 704 --moe-router-topk 2 --moe-token-dispatcher-type"
LLAMA_4 = (
    "--bf16 --no-rope-freq 4 --attention-chunk-size 512 --qk-l2-norm --attention-temperature-tuning "
    "--attention-temperature-floor 512"
)
SCOUT = (
    f"{LLAMA_4} --num-experts 8 --moe-ffn-hidden-size 704 --moe-router-topk 1 --moe-router-score-function sigmoid "
    "--moe-apply-probs-on-input --moe-shared-expert-intermediate-size 704 --moe-token-dispatcher-type"
)
MAVERICK = SCOUT.replace("--qk-l2-norm", "--moe-layer-freq [0,1]*4")
STATE = ("weights", "gradients", "master weights", "moments")


@dataclass(frozen=True)
class Case:
    """A layout of a small model with as many layers as 1F1B has on two or one stage."""

    sizes: dict[str, Any]
    flags: str = "--bf16"
    layers: int = 2
    stages: tuple[int, ...] = (0,)
    given: tuple[str, ...] = ()
    model: str = field(default=SMALL)

    def factors(self) -> Factors:
        return {"stages": self.stages, **self.sizes, **flags_of(self.flags), **flags_of(self.model)}

    @property
    def layout(self) -> Layout:
        sizes = dict.fromkeys(("tp", "pp", "cp", "dp", "vp", "micro_batch_size"), 1)
        return Layout(**{**sizes, "schedule": "1f1b", "sharding": "optim", "recompute": "none", **self.sizes})

    def config(self) -> RunConfig:
        layers = "" if self.model is not SMALL else f"--num-layers {self.layers}"
        return parse_command_line(f"{REQUIRED} {self.model} {layers} {self.flags}".split())

    def run(self) -> Run:
        applied = self.layout.apply(self.config(), self.given)
        check_run(applied, self.layout.num_gpus)
        return Run.of(applied, self.layout.num_gpus, planned_vocabulary(applied))

    def memory(self) -> StageMemory:
        return StageMemory(self.config(), UnitRecords(self.run().vocabulary.size), self.given)


def experts(dispatcher: str, sizes: dict[str, Any], flags: str = EXPERTS, **more: Any) -> Case:
    return Case(sizes, f"{flags} {dispatcher}", given=("moe_token_dispatcher_type",), **more)


TIED = f"{SMALL} --num-layers 2".replace("--untie-embeddings-and-output-weights", "")
FSDP: dict[str, Any] = {"dp": 8, "sharding": "optim_grads_params"}
PIPED: dict[str, Any] = {"layers": 4, "stages": (0, 1)}
CASES = {
    "one stage": Case({"sharding": "no_shard"}),
    "two sequences, documents": Case({"dp": 2, "micro_batch_size": 2}, "--bf16 --reset-attention-mask"),
    "tied, ZeRO-1": Case({"dp": 4}, model=TIED),
    "fp32": Case({"dp": 2}, ""),
    "bf16 gradients": Case({"dp": 4, "reduces_in_bf16": True}),
    "biases and QK-norm": Case({"dp": 2}, "--bf16 --add-qkv-bias --qk-layernorm"),
    "FP8": Case({"dp": 2}, "--bf16 --fp8-format hybrid"),
    "FP8 in blocks": Case({"dp": 2}, "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"),
    "FP8, first stage": Case({"tp": 2, "pp": 2, "dp": 2}, "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"),
    "sequence parallel": Case({"tp": 4, "sharding": "no_shard"}),
    "tensor parallel": Case({"tp": 2, "sharding": "no_shard", "sequence_parallel": False}),
    "1F1B": Case({"pp": 3, "dp": 2}, layers=3, stages=(0, 1, 2)),
    "1F1B, ends count": Case({"pp": 2, "dp": 2, "counts_ends": True}, **PIPED),
    "tied ends of a pipeline": Case({"pp": 2, "dp": 2}, model=TIED, stages=(0, 1)),
    "interleaved": Case({"pp": 2, "dp": 2, "vp": 2, "schedule": "interleaved"}, **PIPED),
    "interleaved, sequence parallel": Case({"tp": 2, "pp": 2, "vp": 2, "schedule": "interleaved"}, **PIPED),
    "zb-h1": Case({"pp": 2, "tp": 2, "schedule": "zb-h1"}, layers=2, stages=(0, 1)),
    "zb-v": Case({"pp": 2, "dp": 2, "vp": 2, "schedule": "zb-v"}, **PIPED),
    "recompute of norms and SwiGLU": Case({"pp": 2, "dp": 2, "recompute": "layernorm+mlp_act"}, stages=(0, 1)),
    "recompute of attention": Case({"tp": 2, "recompute": "core_attn"}),
    "recompute of the MLP": Case({"dp": 2, "recompute": "mlp"}),
    "full recompute": Case({"tp": 2, "pp": 2, "dp": 2, "recompute": "full", "recompute_layers": 2}, **PIPED),
    "full recompute of half": Case({"dp": 2, "recompute": "full", "recompute_layers": 1}),
    "full recompute in units": Case({"dp": 2, "recompute": "uniform", "recompute_layers": 2}),
    "context parallel": Case({"cp": 2}),
    "context parallel on four": Case({"cp": 4, "dp": 2}),
    "context parallel, gathered": Case({"cp": 4}, "--bf16 --cp-comm-type allgather"),
    "context parallel, exchanged": Case({"cp": 4}, "--bf16 --cp-comm-type a2a"),
    "ZeRO-2": Case({"dp": 8, "sharding": "optim_grads"}),
    "ZeRO-2, pipeline": Case({"dp": 8, "pp": 2, "sharding": "optim_grads"}, stages=(0, 1)),
    "FSDP": Case(FSDP),
    "state on the host": Case({"dp": 4}, "--bf16 --optimizer-cpu-offload --ema-decay 0.9"),
    # Many shards: the two microbatches of the dry run do not show the shards that are reduced from one to the next.
    "HSDP": Case({"dp": 32, "sharding": "optim_grads_params", "replicas": 2}),
    "FSDP, full recompute": Case({**FSDP, "recompute": "full", "recompute_layers": 2}),
    "experts on one rank": experts("alltoall", {"dp": 2, "recompute": "moe_act"}),
    "experts, all-to-all": experts("alltoall", {"dp": 4, "ep": 4}),
    "experts, all-gather": experts("allgather", {"dp": 4, "ep": 2}),
    "experts, divided": experts("alltoall", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    "experts, recompute": experts("alltoall", {"pp": 2, "dp": 2, "ep": 2, "recompute": "moe"}, stages=(0, 1)),
    "Llama 4's attention": Case({"dp": 2, "micro_batch_size": 2}, LLAMA_4, layers=4),
    "Llama 4's attention, ring": Case({"cp": 4}, LLAMA_4, layers=4),
    "Llama 4's attention, exchanged": Case({"cp": 4}, f"{LLAMA_4} --cp-comm-type a2a", layers=4),
    "Llama 4's attention, full recompute": Case({"dp": 2, "recompute": "uniform", "recompute_layers": 4}, LLAMA_4, 4),
    "Scout": experts("alltoall", {"dp": 4, "ep": 4}, SCOUT, layers=4),
    "Scout, all-gather": experts("allgather", {"dp": 4, "ep": 2}, SCOUT, layers=4),
    "Maverick": experts("alltoall", {"tp": 2, "pp": 2, "dp": 4, "ep": 4}, MAVERICK, layers=8, stages=(0, 1)),
    "multi-token prediction": Case({"tp": 2, "dp": 2}, "--bf16 --mtp-num-layers 1"),
    "multi-token prediction, pipeline": Case({"pp": 2, "dp": 2}, "--bf16 --mtp-num-layers 2", stages=(0, 1)),
    "multi-token prediction, tied": Case({"pp": 2}, "--bf16 --mtp-num-layers 1", model=TIED, stages=(0, 1)),
    "multi-token prediction, experts": experts("alltoall", {"dp": 4, "ep": 4}, f"--mtp-num-layers 1 {EXPERTS}"),
    "experts, FSDP": experts("alltoall", {"dp": 32, "ep": 2, "sharding": "optim_grads_params"}),
}


def measured(case: Case, stage: int) -> tuple[int, int, int]:
    """Bytes of a stage by the dry run and by its units, without the allowance, and of its state."""
    run = case.run()
    simulated = simulate_rank(run, run.rank_of_stage(stage))
    state = sum(simulated.steady.by_kind[kind] for kind in STATE)  # type: ignore[index, misc]
    found = case.memory().by_stage(case.layout, run.num_microbatches)[stage] - ALLOWANCE
    return simulated.peak.total, found, state


@pytest.mark.parametrize("name", each_factor_by_default(CASES, lambda name: CASES[name].factors()))
def test_a_stage_needs_what_the_dry_run_measures(name: str) -> None:
    for stage in CASES[name].stages:
        total, found, state = measured(CASES[name], stage)
        assert found == pytest.approx(total, rel=0.02), stage
        assert found - state == pytest.approx(total - state, rel=0.04), stage


MODELS = {
    "8B": "--model llama3-8b --seq-length 8192",
    "70B": "--model llama3-70b --seq-length 8192 --global-batch-size 64",
    "405B": "--model llama3.1-405b --seq-length 8192 --global-batch-size 2048",
    "Mixtral": "--model mixtral-8x22b --seq-length 4096 --global-batch-size 1024",
}
OF_405B: dict[str, Any] = {"tp": 8, "pp": 16, "dp": 128, "counts_ends": True}
LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "8B, FSDP": ({"dp": 16, "sharding": "optim_grads_params"}, 0),
    "8B, ZeRO-1, full recompute": ({"dp": 8, "recompute": "full", "recompute_layers": 32}, 0),
    "70B, interleaved": ({"tp": 4, "pp": 4, "cp": 2, "dp": 2, "vp": 5, "schedule": "interleaved"}, 1),
    "405B, inner stage": ({**OF_405B, "recompute": "mlp_act"}, 1),
    "405B, last stage, gradients sharded": ({**OF_405B, "sharding": "optim_grads"}, 15),
    "Mixtral": ({"tp": 4, "pp": 8, "dp": 4, "ep": 8}, 1),
}
"""Sizes, and a stage."""
_slow = pytest.mark.slow(reason="simulates whole stages of large models")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if "405B, last" in one else _slow) for one in LARGE])
def test_a_stage_of_a_large_model_is_never_much_too_low(name: str) -> None:
    sizes, stage = LARGE[name]
    total, found, _ = measured(Case(sizes, model=MODELS[name.partition(",")[0]]), stage)
    assert found == pytest.approx(total, rel=0.03)
    assert found > total - 2**29


def test_what_layouts_share_is_computed_once_and_not_mixed_up() -> None:
    case = CASES["1F1B"]
    run, shared = case.run(), case.memory()
    same = [name for name, one in CASES.items() if one.layers == 3 or one == Case(one.sizes)]
    for name in same:
        layout = CASES[name].layout
        if run.architecture.num_layers % (layout.pp * layout.vp) == 0 and layout.recompute_layers <= 3:
            alone = case.memory().by_stage(layout, 16)
            assert shared.by_stage(layout, 16) == alone == shared.by_stage(layout, 16), name


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1)])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_moments_hold_as_much_as_the_whole_schedule(schedule: str, chunks: int, stages: int) -> None:
    for microbatches in (1, 3, 4, 7, 22, 64):
        for stage in range(stages):
            moments = moments_of(schedule, stages, microbatches, chunks, stage)
            kinds, chunk = np.divmod(moments.passes, chunks)
            held = moments.held[:, :chunks] + np.eye(chunks, dtype=int)[chunk] * (kinds < 2)[:, None]
            whole = live_peaks(build_schedule(schedule, stages, microbatches, chunks), stage)
            splits = len(next(iter(whole))) > chunks
            # With split passes the peaks are by chunk before B and before W.
            most = {tuple(one[:: 2 if splits else 1]) for one in whole}
            assert held.max(axis=0).tolist() == [max(one[place] for one in most) for place in range(chunks)]
