"""Every group of flags reaches what trains: the model, its exchanges, the strategy, the optimizer and its schedules.

The run is built from its command line as the first of four ranks, whose network is fake, and compared with the run
without these flags: what a row names differs, and nothing else. ``tests/parallel`` shows that every layout computes the
numbers of one process, and ``tests/end_to_end/test_resume.py`` that a run goes from layout to layout.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.activations import Offloaded, Recomputed
from megatron.core.control import ControlGroup
from megatron.core.kernels.choice import Choice
from megatron.core.kernels.selection import build_kernels
from megatron.core.models.parallelize import ParallelModel, parallelize
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.signals import watch_signals
from megatron.planner.simulated_rank import ShapeTracker, SimulatedTopology
from megatron.torch_compat import fake_store
from megatron.training.build.description import describe_kernels, describe_run
from megatron.training.build.plan import plan_run
from megatron.training.build.run import build_state
from megatron.training.build.vocabulary import load_vocabulary
from megatron.training.checkpoints.saved_run import find_start
from megatron.training.checkpoints.state import RunState
from megatron.training.context import RunContext
from megatron.training.initialize import rank_grid

RANKS = 4
RUN = (
    "--mock-data --vocab-size 96 --num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 8 "
    "--num-query-groups 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 8 --lr 1e-2 "
    "--lr-warmup-iters 2 --device cpu"
)
Facts = dict[str, Any]


@contextmanager
def fake_group() -> Iterator[None]:
    """torch's process group without a network, which FSDP2 inspects."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def built(flags: str) -> tuple[Facts, list[str]]:
    """What the first of four ranks builds, and what it says of it."""
    config = parse_command_line([*RUN.split(), *flags.split()])
    check_run(config, RANKS)
    grid, said = rank_grid(config.parallel, RANKS), list[str]()
    topology: Any = SimulatedTopology(grid, 0, torch.device("cpu"), ShapeTracker(), lambda ranks: lambda *_: None)
    topology.control = ControlGroup([0], 0)
    with watch_signals(config.training) as signals, fake_group():
        context = RunContext(config, topology, signals, said.append, Heartbeat())
        vocabulary = load_vocabulary(config)
        plan = plan_run(context, vocabulary, find_start(config.checkpoint, topology.control))
        kernels = build_kernels(config, topology, vocabulary.size)
        parallel = parallelize(config, topology, vocabulary.size, kernels)
        state = build_state(context, parallel, kernels, plan)
        describe_run(context, parallel.model, kernels, state, plan)
    (layout,) = re.findall(r"^layout: 4 ranks on CPU = (.*)$", "\n".join(said), re.MULTILINE)
    return {"layout": layout} | facts_of_model(parallel) | facts_of_state(state), said


def facts_of_model(parallel: ParallelModel) -> Facts:
    """The architecture, the layers of the rank, how they exchange, recompute and offload, and the pipeline."""
    model, executor = parallel.model, parallel.executor
    context, chunks, experts = model.context, model.transformer_chunks, model.context.experts
    documents = executor.documents.keywords if isinstance(executor.documents, partial) else {}
    layers, fp8 = range(model.config.num_layers), context.fp8
    return {
        **asdict(model.config),
        "layers": [chunk.num_layers for chunk in chunks],
        "schedule": executor.schedule(4).name,
        "overlaps messages": executor.overlap,
        "exchanges": [type(context.attention(layer, False)).__name__ for layer in layers],
        "levels": [ranks.size for ranks in context.context_parallel.levels],
        "documents": sorted(name for name, value in documents.items() if value is True),
        "sequence parallel": context.parallel.sequence_parallel,
        "overlaps collectives": context.parallel.has_overlap,
        "recomputed": wrapped(model, Recomputed),
        "offloaded": wrapped(model, Offloaded),
        "loss chunk": getattr(model.output_layer, "loss_chunk_size", None),
        "z-loss": executor.z_loss_multiplier,
        "depths": model.future and (len(model.future.depths), model.future.scaling_factor),
        "fp8 layers": [layer for layer in layers if fp8 is not None and fp8.includes(layer, len(layers))],
        "gathers fp8": fp8 is not None and fp8.config.fp8_param_gather,
        "dispatcher": experts and type(experts.dispatcher).__name__,
        "forces balance": experts is not None and experts.forces_balance,
        "frozen": [name for name, weight in model.named_parameters() if not weight.requires_grad],
    }


def wrapped(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """The places in layers of the modules of a kind."""
    return [name.partition("layers.")[2] for name, module in model.named_modules() if type(module) is kind]


def facts_of_state(state: RunState) -> Facts:
    """The strategy and what it divides, number formats, the optimizer's state, and schedules."""
    strategy, scaler, decay = state.module.data_parallel, state.module.loss_scaler, state.weight_decay
    return {
        "strategy": type(strategy).__name__,
        "shards": strategy.sharing.dense.shards.size,
        **vars(strategy.formats),
        **{f"state {one.kind}": one.tensor.dtype for one in state.module.optimizer.state()},
        "shards on the host": len({one.info.name for one in state.module.optimizer.state() if one.is_on_host}),
        "loss scale": (type(scaler).__name__, scaler.scale),
        "learning rates": [round(state.lr_schedule(samples), 6) for samples in (16, 64, 128)],
        "weight decay": None if decay is None else [decay(samples) for samples in (0, 64, 128)],
    }


# --- the table -----------------------------------------------------------------------------------------------


def layout(ranks: str = "tensor 1 x pipeline 1 x data 4", strategy: str = "no_shard", dtype: str = "fp32") -> Facts:
    return {"layout": f"{ranks} ({strategy}), {dtype}"}


BF16 = {**layout(dtype="bf16"), "weight": torch.bfloat16, "state master": torch.float32}
FP16 = {**BF16, **layout(dtype="fp16"), "weight": torch.float16}
STAGES = "--pipeline-model-parallel-size 2"
IN_STAGES = {**layout("tensor 1 x pipeline 2 x data 2"), "layers": [2]}
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32"
WITH_EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32}
RING, ULYSSES, GATHER = "RingAttention", "UlyssesAttention", "AllGatherAttention"

ROWS: list[tuple[Any, ...]] = [
    # Flags, the facts that differ from the plain run's, and what the log says of them, if anything.
    # Tensor, pipeline and context parallelism.
    ("--tensor-model-parallel-size 2", {**layout("tensor 2 x pipeline 1 x data 2"), "padded_vocab_size": 256}),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        {
            **layout("tensor 2, sequence parallel x pipeline 1 x data 2"),
            "padded_vocab_size": 256,
            "sequence parallel": True,
            "overlaps collectives": True,
        },
        "tensor-parallel overlap: pipelined (symmetric memory needs GPUs)",
    ),
    ("--tp-comm-overlap --sequence-parallel", {}, "has no effect with --tensor-model-parallel-size 1"),
    (STAGES, IN_STAGES, "pipeline: 1f1b, 2 stages of 1 chunks with 2-2 layers"),
    (
        f"{STAGES} --pipeline-schedule zb-v",
        {**IN_STAGES, "layers": [1, 1], "schedule": "zb-v"},
        "pipeline: zb-v, 2 stages of 2 chunks with 1-1-1-1 layers",
    ),
    (
        f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        {**IN_STAGES, "layers": [1, 1], "schedule": "interleaved", "overlaps messages": False},
        "pipeline: interleaved, 2 stages of 2 chunks",
    ),
    (
        f"{STAGES} --pipeline-model-parallel-layout Et|tttL",
        {**IN_STAGES, "layers": [1]},
        "pipeline: 1f1b, 2 stages of 1 chunks with 1-3 layers",
    ),
    ("--pipeline-schedule zb-h1", {}, "--pipeline-schedule has no effect with --pipeline-model-parallel-size 1"),
    (
        "--context-parallel-size 2",
        {**layout("tensor 1 x context 2 (p2p) x pipeline 1 x data 2"), "exchanges": [RING] * 4},
    ),
    (
        "--context-parallel-size 2 --cp-comm-type p2p a2a allgather a2a",
        {
            **layout("tensor 1 x context 2 (p2p, a2a, allgather) x pipeline 1 x data 2"),
            "exchanges": [RING, ULYSSES, GATHER, ULYSSES],
        },
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        {
            **layout("tensor 1 x context 4 (a2a+p2p) x pipeline 1 x data 1"),
            "exchanges": [ULYSSES] * 4,
            "levels": [2, 2],
        },
    ),
    ("--reset-attention-mask", {"documents": ["masks_attention"]}),
    ("--dataloader-inter-document-masking", {"documents": ["masks_attention"]}),
    ("--reset-position-ids", {"documents": ["resets_positions"]}),
    # Data parallelism.
    ("--use-distributed-optimizer", {**layout(strategy="optim"), "shards": 4}),
    ("--data-parallel-sharding-strategy optim_grads", {**layout(strategy="optim_grads"), "shards": 4}),
    (
        "--use-torch-fsdp2 --num-distributed-optimizer-instances 2",
        {**layout(strategy="optim_grads_params"), "strategy": "FullyShardedDataParallel", "shards": 2},
    ),
    # Number formats.
    ("--bf16", BF16),
    (
        "--fp64",
        {
            **layout(dtype="fp64"),
            **dict.fromkeys(("weight", "gradient", "master", "state exp_avg", "state exp_avg_sq"), torch.float64),
        },
    ),
    (
        "--bf16 --use-distributed-optimizer --grad-reduce-in-bf16 --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
        {
            **BF16,
            **layout(strategy="optim", dtype="bf16"),
            "shards": 4,
            **dict.fromkeys(("gradient", "state exp_avg", "state exp_avg_sq"), torch.bfloat16),
        },
    ),
    ("--fp16 --initial-loss-scale 1024", {**FP16, "loss scale": ("DynamicLossScaler", 1024.0)}),
    ("--fp16 --loss-scale 256", {**FP16, "loss scale": ("LossScaler", 256.0)}),
    (
        "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
        {**BF16, "fp8 layers": [0, 1, 2, 3]},
        "fp8: hybrid with delayed scaling (amax history of 4, max, margin 0): linear layers of 4 of 4 transformer "
        "layers, by fp32 products of the FP8 numbers; the rest in bf16",
    ),
    (
        "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
        {**BF16, "fp8 layers": [1]},
        "fp8: e4m3 with current (per-tensor) scaling: linear layers of 1 of 4 transformer layers",
    ),
    (
        "--bf16 --fp8-format hybrid --use-distributed-optimizer --fp8-param-gather",
        {
            **BF16,
            **layout(strategy="optim", dtype="bf16"),
            "shards": 4,
            "fp8 layers": [0, 1, 2, 3],
            "gathers fp8": True,
        },
        "fp8: hybrid with delayed scaling (amax history of 1, most_recent, margin 0)",
    ),
    # The optimizer.
    ("--optimizer muon", {"state momentum_buffer": torch.float32}),
    ("--optimizer sgd", {"state exp_avg": None, "state exp_avg_sq": None, "state momentum_buffer": torch.float32}),
    ("--ema-decay 0.9", {"state ema": torch.float32}),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 0.25", {"shards on the host": 7}),
    ("--freeze-parameters embedding.*", {"frozen": ["chunks.0.embedding.weight"]}),
    ("--lr-decay-style cosine --min-lr 1e-3", {"learning rates": [0.005, 0.00775, 0.001]}),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1",
        {"weight decay": [0.0, 0.05, 0.1]},
    ),
    # Activations and the loss.
    (
        "--recompute-activations",
        {"recomputed": [f"{layer}.self_attention.attend_proj" for layer in range(4)]},
        "activations: core_attn recomputed",
    ),
    (
        "--recompute-granularity selective --recompute-modules mlp_act",
        {"recomputed": [f"{layer}.mlp.swiglu_fc2" for layer in range(4)]},
        "activations: mlp_act recomputed",
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        {"recomputed": ["0", "1"]},
        "activations: only the input of every 3 layers is saved",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --cpu-offloading-num-layers 2",
        {"recomputed": ["0.module"], "offloaded": ["0", "1"]},
        "activations: only the inputs of the first 1 layers of a chunk are saved; the first 2 layers of a chunk are "
        "offloaded to the host",
    ),
    ("--loss-chunk-size 16", {"loss chunk": 16}, "activations: logits and loss of 16 tokens at a time"),
    ("--z-loss-multiplier 1e-4", {"z-loss": 1e-4}),
    ("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3", {"mtp_num_layers": 2, "depths": (2, 0.3)}),
    # Experts, and layers of several kinds.
    (
        f"{EXPERTS} --expert-model-parallel-size 2",
        {**WITH_EXPERTS, "dispatcher": "AllGatherDispatcher"},
        "experts: 2 of 4 for each token, in 4 of 4 layers; ranks of a stage = expert tensor 1 x expert 2 x expert data "
        "2, allgather; no balancing loss",
    ),
    (
        f"{EXPERTS} --expert-tensor-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 1 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
        "--moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3",
        {
            **WITH_EXPERTS,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 32,
            "dispatcher": "AllToAllDispatcher",
        },
        "experts: 1 of 4 for each token, a shared expert, in 4 of 4 layers; ranks of a stage = expert tensor 2 x "
        "expert 1 x expert data 2, alltoall; seq_aux_loss 0.01, z-loss 0.001, expert bias 0.01",
    ),
    (
        f"{EXPERTS} --moe-router-force-load-balancing",
        {**WITH_EXPERTS, "dispatcher": "LocalDispatcher", "forces balance": True},
        "WARNING: --moe-router-force-load-balancing: for benchmarks only",
    ),
    (
        "--no-rope-freq 4 --attention-chunk-size 8 --qk-l2-norm --attention-temperature-tuning "
        "--attention-temperature-floor 16",
        {
            "no_rope_freq": "4",
            "attention_chunk_size": 8,
            "qk_l2_norm": True,
            "attention_temperature_tuning": True,
            "attention_temperature_floor": 16,
        },
        "attention: 3 of 4 layers with rotary position embedding, in chunks of 8, with normed queries and keys; 1 "
        "without, with a temperature from position 15 on",
    ),
    (
        "--window-size 5,0 --window-attn-skip-freq 2 --attn-logit-softcapping 30",
        {"window_size": "5,0", "window_attn_skip_freq": "2", "attn_logit_softcapping": 30.0},
        "attention: 2 of 4 layers with a window of 6 keys; scores capped at 30",
    ),
    (
        "--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 2",
        {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 2.0, "mup_output_mult": 0.25},
        "4 times the width of the base model (16), logits x 0.25, attention scores x 0.5",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_flags_change_what_they_name_and_nothing_else(row: tuple[Any, ...]) -> None:
    flags, facts, *words = row
    (plain, _), (found, said) = built(""), built(flags)
    names = {**plain, **found}
    assert {name: found.get(name) for name in names if found.get(name) != plain.get(name)} == facts
    assert all(any(one in line for line in said) for one in words), said


def test_attention_that_is_whole_and_alike_in_all_layers_is_not_described() -> None:
    assert not [line for line in built("")[1] if line.startswith("attention:")]


def test_a_terminal_shows_the_kernels_that_were_forced_or_stand_in() -> None:
    plain = [Choice(name, "eager", "fits") for name in ("rope", "swiglu")]
    forced = Choice("attention", "reference", "asked for by --attention-backend", is_forced=True)
    stand_in = Choice("adam", "torch", "plain (not apex: it is not installed)", is_stand_in=True)
    choices = [*plain, forced, stand_in]
    assert describe_kernels(plain, True, False) == "kernels: eager for 2 operations"
    on_gpu = describe_kernels(choices, True, False).splitlines()
    assert on_gpu[0] == "kernels: eager for 2 operations"
    assert [line.split()[0] for line in on_gpu[1:]] == ["attention", "adam"]
    on_cpu = describe_kernels(choices, True, True).splitlines()
    assert on_cpu[0] == "kernels: eager for 2, torch for 1 operations" and len(on_cpu) == 2
    assert "asked for by --attention-backend" in on_cpu[1]
    assert len(describe_kernels(choices, False, True).splitlines()) == 5


# --- memory --------------------------------------------------------------------------------------------------

BYTES_KEPT: dict[str, dict[str, float]] = {
    "no_shard": {"weights": 2, "gradients": 4, "master weights": 4, "moments": 8},
    "optim": {"weights": 2, "gradients": 4, "master weights": 1, "moments": 2},
    "optim_grads": {"weights": 2, "gradients": 1, "master weights": 1, "moments": 2},
    "optim_grads_params": {"weights": 1, "gradients": 1, "moments": 2},
}
"""For each parameter of the model, on each of four ranks."""


@pytest.mark.parametrize("strategy", BYTES_KEPT)
def test_the_start_says_the_memory_that_a_strategy_keeps(strategy: str) -> None:
    _, said = built(f"--bf16 --vocab-size 128 --hidden-size 256 --data-parallel-sharding-strategy {strategy}")
    ((whole, mine),) = re.findall(r"^model: ([0-9,]+) parameters, ([0-9,]+) on", "\n".join(said), re.MULTILINE)
    parameters = int(whole.replace(",", ""))
    assert int(mine.replace(",", "")) == (parameters // 4 if strategy == "optim_grads_params" else parameters)
    (memory,) = [line for line in said if line.startswith("memory on this rank: ")]
    found = {kind: float(size) for kind, size in re.findall(r"[:,] ([a-z ]+) ([0-9.]+) MiB", memory)}
    # Half a unit of the last digit, and some padding.
    wanted = {kind: pytest.approx(size * parameters / 2**20, abs=0.06) for kind, size in BYTES_KEPT[strategy].items()}
    assert found == wanted
