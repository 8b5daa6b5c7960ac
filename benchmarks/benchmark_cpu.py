#!/usr/bin/env python3
"""Training speed on two CPU cores: one rank, two ranks in each layout, and what one could hope for.

All contenders train the same Llama (6,163,712 parameters, fp32, 16 sequences of 256 tokens a step, AdamW) with one
thread per rank, in turns within one run, so that the ratios hold on a noisy machine:

    python benchmarks/benchmark_cpu.py [--repeats 5] [--json OUT]

The bound is the step's matrix products and attention alone, as torch computes them. The second bound uses the
product that our layers use.
"""

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.local_ranks import run_benchmark, run_ranks
from benchmarks.lib.step_bound import BareAttention, BareProducts, Product, linear_shapes
from benchmarks.lib.step_profile import time_by_group
from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig, TokenDispatcherType
from megatron.config.parallel import Exchange, ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.core.context_parallel import ContextParallel
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import LayerKernels
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_executor, build_experts, build_model, chunks_of_stage
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.grouped import PaddedGroupedGemm
from megatron.core.ops.matmul import linear
from megatron.core.optimizer import Optimizer
from megatron.core.precision import LossScaler, NumberFormats
from megatron.core.tensor_parallel.collectives import P2POverlap, TensorParallel
from megatron.core.topology import RankGrid, Topology, single_process
from megatron.metrics.timers import Timers
from megatron.schedules.catalog import build_schedule, placement_of
from megatron.schedules.stages import split_evenly
from megatron.training.context import TrainModule
from megatron.training.initialize import Process, prepare_cpu
from megatron.training.loop.step import train_step

CPU = torch.device("cpu")
BATCH, LENGTH = 16, 256
MODEL = TransformerConfig(
    num_layers=6,
    hidden_size=256,
    ffn_hidden_size=768,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=16,
    vocab_size=2048,
    padded_vocab_size=2048,
    max_position_embeddings=LENGTH,
)
EXPERTS_8 = replace(MODEL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=384)
"""The active FLOPs of MODEL, without the router's: two experts of half the width for each token."""
EXPERTS_64 = replace(MODEL, num_experts=64, moe_router_topk=8, moe_ffn_hidden_size=96)
RANKS = 2
PROFILED_STEPS = 4


@dataclass(frozen=True)
class BenchmarkConfig:
    """How long to measure."""

    repeats: int = 5
    """Turns of every contender; the median counts."""
    steps: int = 2
    """Steps per turn."""
    micro_batch_size: int | None = None
    """Sequences per microbatch for every contender alike (default: the fastest for each)."""
    rows: str = ""
    """Measure only the rows whose name contains this, and those that they are compared with."""
    profile: bool = False
    """Also print where rank 0 spends the time of a step, by looking at its stack every millisecond."""
    json: str | None = None
    """File for the figures."""

    @property
    def contenders(self) -> "list[Contender]":
        """What is measured."""
        chosen = [contender for contender in CONTENDERS if self.rows in contender.name]
        wanted = {"one rank", *(contender.name for contender in chosen), *(one.reference for one in chosen)}
        return [contender for contender in CONTENDERS if contender.name in wanted]


@dataclass(frozen=True)
class Contender:
    """A row of the table: its ranks, and a function that builds its step for a rank."""

    name: str
    ranks: int
    build: Callable[[int, int], Callable[[], None]]
    """Makes the step from the micro-batch size and the rank."""
    micro_batch_size: int = 4
    """The fastest of 2, 4, 8 and 16 here: small ones stay in the cache, large ones mean fewer collectives. Pipelines
    have four microbatches to fill them."""
    reference: str = "one rank"
    """The row whose speed it is compared with."""


def samples(length: int = LENGTH, seed: int = 0) -> Tensor:
    """A batch ``[4096 / length, length + 1]``, the same for all; by default 16 sequences."""
    shape = (BATCH * LENGTH // length, length + 1)
    return torch.randint(0, MODEL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Training:
    """What a rank trains in a layout."""

    module: TrainModule
    batches: list[list[dict[str, Tensor]]]
    """The microbatches of each step."""

    def step(self, number: int) -> None:
        """Train one step."""
        microbatches = self.batches[number % len(self.batches)]
        train_step(
            self.module,
            iter(microbatches),
            Hyperparameters(learning_rate=1e-4),
            num_microbatches=len(microbatches),
            expected_tokens=BATCH * LENGTH,
            timers=Timers(0),
        )


def training(micro_batch_size: int, rank: int, **layout: Any) -> Training:
    """A rank of this codebase in a layout: ``tp``, ``cp``, ``cp_comm_type``, ``dp``, ``pp``, ``schedule``, ``chunks``,
    ``sequence_parallel``, ``tp_overlap``, ``strategy``, ``overlap``, ``bucket_size``, ``reshard``, ``ep``,
    ``dispatcher`` and ``shares_memory``; of another ``model``, on sequences of ``length``. Models with experts have
    another batch in every step, so that the experts' numbers of rows are new."""
    tp, cp, dp, pp = (layout.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))
    length = layout.get("length", LENGTH)
    config = ParallelConfig(
        data_parallel_sharding_strategy=layout.get("strategy", "no_shard"),
        overlap_grad_reduce=layout.get("overlap", False),
        overlap_param_gather=layout.get("overlap", False) and layout.get("strategy", "no_shard") != "no_shard",
        ddp_bucket_size=layout.get("bucket_size"),
        torch_fsdp2_reshard_after_forward=layout.get("reshard", True),
    )
    replicas = config.data_parallel_replicas(dp)
    grid = RankGrid(tp=tp, cp=cp, pp=pp, dp=dp, ep=layout.get("ep", 1), dp_replicas=replicas)
    topology = Topology(grid, rank, CPU, shares_memory=layout.get("shares_memory", True))
    architecture = layout.get("model", MODEL)
    overlap = P2POverlap(topology.tensor_parallel) if layout.get("tp_overlap", False) else None
    parallel = TensorParallel(topology.tensor_parallel, layout.get("sequence_parallel", False), overlap)
    kernel = choose_attention_kernel("auto", CPU, torch.float32)
    schedule = partial(build_schedule, layout.get("schedule", "1f1b"), pp, num_chunks=layout.get("chunks"))
    placement = placement_of(layout.get("schedule", "1f1b"), pp, layout.get("chunks"))
    stages = split_evenly(architecture.num_layers, pp, placement.num_chunks)
    chunks = chunks_of_stage(stages, placement, topology.pipeline_parallel.rank)
    context_parallel = ContextParallel(topology.context_parallel, (layout.get("cp_comm_type", "p2p"),))
    moe = MoEConfig(moe_token_dispatcher_type=layout.get("dispatcher", "alltoall"))
    context = BuildContext(
        parallel,
        torch.float32,
        CPU,
        kernel,
        context_parallel=context_parallel,
        kernels=LayerKernels(grouped_gemm=PaddedGroupedGemm()),
        experts=build_experts(architecture, moe, topology),
    )
    model = build_model(architecture, context, seed=1, virtual_stages=chunks)
    executor = build_executor(model, topology, schedule, length, micro_batch_size)
    data_parallel = wrap_data_parallel(model, NumberFormats.uniform(torch.float32), topology, config)
    optimizer = Optimizer(OptimizerConfig(), data_parallel, topology)
    places = context_parallel.split.positions(length)

    def read(seed: int) -> list[dict[str, Tensor]]:
        mine = samples(length, seed).view(-1, dp, micro_batch_size, length + 1)[:, topology.data_parallel.rank]
        parts = [(text[:, places], text[:, places + 1]) for text in mine]
        return [{"tokens": tokens, "labels": labels, "loss_mask": torch.ones(labels.shape)} for tokens, labels in parts]

    batches = [read(seed) for seed in range(50 if model.has_experts else 1)]
    module = TrainModule(executor, data_parallel, optimizer, LossScaler(), topology, experts=model.expert_balance)
    return Training(module, batches)


def ours(**layout: Any) -> Callable[[int, int], Callable[[], None]]:
    """A step of this codebase in a layout (:func:`training`)."""

    def build(micro_batch_size: int, rank: int) -> Callable[[], None]:
        built, steps = training(micro_batch_size, rank, **layout), count()
        return lambda: built.step(next(steps))

    return build


def halves(micro_batch_size: int, rank: int) -> Callable[[], None]:
    """Half of the batch on each rank, which exchange nothing and wait for each other after each step: what the cores
    leave to two ranks."""
    alone = training(micro_batch_size, 0)
    half = replace(alone, batches=[batch[: len(batch) // RANKS] for batch in alone.batches])

    def step() -> None:
        half.step(0)
        dist.barrier()

    return step


def bare(micro_batch_size: int, rank: int) -> Callable[[], None]:
    """A step of our model with torch's AdamW, without the rest of this project."""
    kernel = choose_attention_kernel("auto", CPU, torch.float32)
    parallel = TensorParallel(single_process().tensor_parallel)
    model = build_model(MODEL, BuildContext(parallel, torch.float32, CPU, kernel), seed=1)
    head = model.output_layer
    assert head is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    microbatches = samples().split(micro_batch_size)

    def step() -> None:
        for text in microbatches:
            losses = head.token_losses(model.chunks[0](text[:, :-1]), text[:, 1:])
            (losses.sum() / (BATCH * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_eager(micro_batch_size: int, rank: int) -> Callable[[], None]:
    """A step of Hugging Face's Llama with torch's AdamW."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(intermediate_size=MODEL.ffn_hidden_size, **_hugging_face_sizes())
    return _transformers_step(transformers.LlamaForCausalLM(config), micro_batch_size, num_batches=1)


def transformers_mixtral(experts_implementation: str) -> Callable[[int, int], Callable[[], None]]:
    """A step of Hugging Face's Mixtral with eight experts."""

    def build(micro_batch_size: int, rank: int) -> Callable[[], None]:
        transformers: Any = importlib.import_module("transformers")
        config = transformers.MixtralConfig(
            intermediate_size=EXPERTS_8.moe_ffn_hidden_size,
            num_local_experts=EXPERTS_8.num_experts,
            num_experts_per_tok=EXPERTS_8.moe_router_topk,
            experts_implementation=experts_implementation,
            **_hugging_face_sizes(),
        )
        model = transformers.MixtralForCausalLM(config)
        assert model.config._experts_implementation == experts_implementation
        return _transformers_step(model, micro_batch_size, num_batches=50)

    return build


def _hugging_face_sizes() -> dict[str, Any]:
    return {
        "vocab_size": MODEL.vocab_size,
        "hidden_size": MODEL.hidden_size,
        "num_hidden_layers": MODEL.num_layers,
        "num_attention_heads": MODEL.num_attention_heads,
        "num_key_value_heads": MODEL.num_query_groups,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }


def _transformers_step(model: Any, micro_batch_size: int, num_batches: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batches = [samples(seed=seed).split(micro_batch_size) for seed in range(num_batches)]
    steps = count()

    def step() -> None:
        for text in batches[next(steps) % num_batches]:
            logits = model(input_ids=text[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
            (loss / (BATCH * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bound(product: Product) -> Callable[[int, int], Callable[[], None]]:
    """The step's matrix products and attention, forward and backward, and nothing else."""

    def build(micro_batch_size: int, rank: int) -> Callable[[], None]:
        products = BareProducts(linear_shapes(MODEL), micro_batch_size * LENGTH, product=product)
        attention = BareAttention(MODEL, micro_batch_size, LENGTH)

        def step() -> None:
            for _ in range(BATCH // micro_batch_size):
                for part in (products, attention):
                    part.forward()
                    part.backward()

        return step

    return build


EXPERTS = "8 experts, 2 for a token"
CONTENDERS = (
    Contender("bound, torch's matrix product", 1, bound(F.linear)),
    Contender("bound, our matrix product", 1, bound(linear)),
    Contender("transformers eager", 1, transformers_eager),
    Contender("bare model and optimizer", 1, bare),
    Contender("one rank", 1, ours()),
    Contender("two ranks that exchange nothing", 2, halves),
    Contender("DP2 no_shard", 2, ours(dp=2)),
    Contender("DP2 optim (ZeRO-1)", 2, ours(dp=2, strategy="optim")),
    Contender("DP2 optim_grads (ZeRO-2)", 2, ours(dp=2, strategy="optim_grads", bucket_size=10**6), 8),
    Contender("DP2 no_shard, overlap", 2, ours(dp=2, overlap=True, bucket_size=10**6)),
    Contender("DP2 optim, overlap", 2, ours(dp=2, strategy="optim", overlap=True, bucket_size=10**6)),
    Contender("DP2 optim_grads, overlap", 2, ours(dp=2, strategy="optim_grads", overlap=True, bucket_size=10**6), 8),
    Contender("DP2 FSDP", 2, ours(dp=2, strategy="optim_grads_params"), 8),
    Contender("DP2 FSDP, overlap", 2, ours(dp=2, strategy="optim_grads_params", overlap=True), 8),
    Contender("DP2 FSDP, gathered once", 2, ours(dp=2, strategy="optim_grads_params", reshard=False), 8),
    Contender("TP2", 2, ours(tp=2), 16),
    Contender("TP2 + sequence parallel", 2, ours(tp=2, sequence_parallel=True), 16),
    Contender("TP2 + sequence parallel, overlap", 2, ours(tp=2, sequence_parallel=True, tp_overlap=True), 16),
    *(Contender(f"CP2 {kind}", 2, ours(cp=2, cp_comm_type=kind), 16) for kind in get_args(Exchange)),
    Contender("one rank, 2048 tokens", 1, ours(length=2048), 1),
    *(
        Contender(f"CP2 {kind}, 2048 tokens", 2, ours(cp=2, cp_comm_type=kind, length=2048), 1, "one rank, 2048 tokens")
        for kind in get_args(Exchange)
    ),
    Contender("PP2 1f1b", 2, ours(pp=2)),
    Contender("PP2 interleaved", 2, ours(pp=2, schedule="interleaved", chunks=3)),
    Contender("PP2 zb-h1", 2, ours(pp=2, schedule="zb-h1")),
    *(
        Contender(f"{name}, over gloo", 2, ours(**layout, shares_memory=False), size, reference=name)
        for name, layout, size in (
            ("DP2 no_shard", {"dp": 2}, 4),
            ("DP2 FSDP", {"dp": 2, "strategy": "optim_grads_params"}, 8),
            ("TP2", {"tp": 2}, 16),
            ("TP2 + sequence parallel", {"tp": 2, "sequence_parallel": True}, 16),
            ("CP2 p2p", {"cp": 2}, 16),
            ("PP2 1f1b", {"pp": 2}, 4),
        )
    ),
    Contender("64 experts, 8 for a token", 1, ours(model=EXPERTS_64), 8),
    Contender(EXPERTS, 1, ours(model=EXPERTS_8)),
    Contender(f"{EXPERTS}, transformers eager", 1, transformers_mixtral("eager"), reference=EXPERTS),
    Contender(f"{EXPERTS}, transformers grouped_mm", 1, transformers_mixtral("grouped_mm"), reference=EXPERTS),
    *(
        Contender(f"{EXPERTS}, EP2 {kind}", 2, ours(model=EXPERTS_8, dp=2, ep=2, dispatcher=kind), 8, reference=EXPERTS)
        for kind in get_args(TokenDispatcherType)
    ),
)


@dataclass(frozen=True)
class Measured:
    """Times of one rank, by contender."""

    seconds: dict[str, list[float]]
    """Per step, of every turn."""
    shares: dict[str, dict[str, float]]
    """Shares of a step's time, by group of functions; empty without ``--profile``."""


def run_rank(rank: int, config: BenchmarkConfig) -> dict[str, Any]:
    """Take part in every contender that has a place for this rank; a :class:`Measured`."""
    prepare_cpu(Process(rank, rank, RANKS, RANKS, has_thread_count=True))
    steps: dict[str, Callable[[], None]] = {}
    for contender in config.contenders:
        if rank < contender.ranks:
            try:
                steps[contender.name] = contender.build(config.micro_batch_size or contender.micro_batch_size, rank)
            except ImportError:
                print(f"{contender.name} is left out: the package is not installed", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(config.repeats + 1):
        for contender in config.contenders:
            dist.barrier()
            step = steps.get(contender.name)
            if step is None:
                continue
            start = time.perf_counter()
            for _ in range(config.steps):
                step()
            # The first turn warms up.
            if repeat > 0:
                seconds[contender.name].append((time.perf_counter() - start) / config.steps)
        if rank == 0:
            print(f"\rturn {repeat} of {config.repeats}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print(file=sys.stderr)
    shares = {}
    for contender in config.contenders if config.profile else ():
        dist.barrier()
        if contender.name in steps:
            shares[contender.name] = profile(steps[contender.name], rank)
    return asdict(Measured(seconds, shares))


def profile(step: Callable[[], None], rank: int) -> dict[str, float]:
    """The share of every group of functions in some steps."""

    def some_steps() -> None:
        for _ in range(PROFILED_STEPS):
            step()

    if rank == 0:
        return time_by_group(some_steps)
    some_steps()
    return {}


def report(config: BenchmarkConfig, measured: Measured) -> dict[str, Any]:
    """Tokens/s and ratios: medians, ratios turn by turn against the reference of each row, mostly one rank."""
    seconds = measured.seconds
    references = {contender.name: seconds[contender.reference] for contender in config.contenders}
    rows = {}
    print(f"{'':44}{'tokens/s':>10}{'x reference':>13}")
    for name, times in seconds.items():
        speed = BATCH * LENGTH / median(times)
        ratio = median(one / mine for one, mine in zip(references[name], times))
        rows[name] = {"tokens_per_s": speed, "ratio": ratio, "seconds_per_step": times}
        print(f"{name:44}{speed:10.0f}{ratio:13.3f}")
    if measured.shares:
        print_profile(measured)
        rows = {name: row | {"shares": measured.shares[name]} for name, row in rows.items()}
    return {"machine": platform.machine(), "torch": torch.__version__, "flags": asdict(config), "rows": rows}


def print_profile(measured: Measured) -> None:
    """Milliseconds of a step by group of functions."""
    groups = list(next(iter(measured.shares.values())))
    print("\nms of a step on rank 0")
    print(f"{'':44}" + "".join(f"{group:>{len(group) + 2}}" for group in groups))
    for name, shares in measured.shares.items():
        step = 1e3 * median(measured.seconds[name])
        print(f"{name:44}" + "".join(f"{share * step:{len(group) + 2}.0f}" for group, share in shares.items()))


def measure_all(config: BenchmarkConfig) -> None:
    """Start the ranks, and report."""
    figures = report(config, Measured(**run_ranks(RANKS, run_rank, config)))
    if config.json is not None:
        Path(config.json).write_text(json.dumps(figures, indent=2) + "\n")


main = partial(run_benchmark, BenchmarkConfig, measure_all, __doc__)


if __name__ == "__main__":
    sys.exit(main())
