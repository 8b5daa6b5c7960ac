"""This codebase as a contender of benchmarks/peers.py."""

from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from benchmarks.lib.peers.job import LEARNING_RATE, Job, Step
from megatron.checkpoint.hugging_face.config import transformer_config_of
from megatron.checkpoint.hugging_face.weights import HuggingFaceWeights, fill_from_hugging_face
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.config.training import OptimizerConfig
from megatron.core.context_parallel import ContextParallel
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.data_parallel.strategy import whole_params
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import LayerKernels
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_executor, build_model, chunks_of_stage
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.norm import CompiledRMSNorm
from megatron.core.ops.swiglu import CompiledSwiGLU
from megatron.core.optimizer import Optimizer
from megatron.core.precision import LossScaler, NumberFormats
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.cross_entropy import CompiledCrossEntropy
from megatron.core.topology import RankGrid, Topology
from megatron.metrics.timers import Timers
from megatron.schedules.catalog import build_schedule, placement_of
from megatron.schedules.stages import split_evenly
from megatron.training.context import TrainModule
from megatron.training.initialize import Process, prepare_cpu
from megatron.training.loop.step import train_step


def build(job: Job) -> Step:
    """The step of a training run."""
    if job.device == "cpu":
        prepare_cpu(Process(job.rank, job.rank, job.ranks, job.ranks, has_thread_count=True))
    config, dp = _parallel_config(job), job.size("dp") * job.size("fsdp")
    replicas = config.data_parallel_replicas(dp)
    grid = RankGrid(tp=job.size("tp"), cp=job.size("cp"), pp=job.size("pp"), dp=dp, dp_replicas=replicas)
    topology = Topology(grid, job.rank, job.torch_device)
    model = _model(job, topology)
    length = job.model["max_position_embeddings"]
    schedule = partial(build_schedule, _schedule_of(job), grid.pp, num_chunks=_chunks_of(job))
    executor = build_executor(model, topology, schedule, length, job.micro_batch_size)
    formats = NumberFormats(job.torch_dtype, torch.float32, torch.float32)
    data_parallel = wrap_data_parallel(model, formats, topology, config)
    optimizer = Optimizer(OptimizerConfig(), data_parallel, topology)
    module = TrainModule(executor, data_parallel, optimizer, LossScaler(), topology)
    places = model.context.context_parallel.split.positions(length)

    def step(batch: Tensor) -> float:
        microbatches = [{"tokens": text[:, places], "labels": text[:, places + 1]} for text in job.microbatches(batch)]
        for one in microbatches:
            one["loss_mask"] = torch.ones(one["labels"].shape, device=job.torch_device)
        outcome = train_step(
            module,
            iter(microbatches),
            Hyperparameters(learning_rate=LEARNING_RATE),
            num_microbatches=len(microbatches),
            expected_tokens=batch.shape[0] * length,
            timers=Timers(0),
        )
        # Every rank has the loss of all.
        return outcome.loss if job.rank == 0 else 0.0

    return step


def _parallel_config(job: Job) -> ParallelConfig:
    """What layout and variant say about data parallelism."""
    words = job.variant.split(", ")
    strategies: tuple[ShardingStrategy, ...] = get_args(ShardingStrategy)
    strategy: ShardingStrategy = next((one for one in strategies if one in words), "no_shard")
    if job.layout == "fsdp":
        strategy = "optim_grads_params"
    overlap = "overlap" in words
    return ParallelConfig(
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and strategy != "no_shard",
        ddp_bucket_size=10**6 if job.layout == "dp" and (overlap or strategy == "optim_grads") else None,
    )


def _schedule_of(job: Job) -> str:
    return job.variant if job.layout == "pp" and job.variant else "1f1b"


def _chunks_of(job: Job) -> int | None:
    """Chunks of a stage: a layer each if there may be any number of them."""
    layers: int = job.model["num_hidden_layers"]
    return layers // job.ranks if _schedule_of(job) == "interleaved" else None


def _compiled_kernels() -> LayerKernels:
    """Those that ``--kernel rms_norm=compiled`` and so on choose."""
    return LayerKernels(rms_norm=CompiledRMSNorm(), swiglu=CompiledSwiGLU(), cross_entropy=CompiledCrossEntropy())


def _model(job: Job, topology: Topology) -> TransformerModel:
    """This rank's part of the model with the start weights."""
    architecture = transformer_config_of(job.model, job.weights)
    stages = topology.grid.pp
    placement = placement_of(_schedule_of(job), stages, _chunks_of(job))
    chunks = chunks_of_stage(
        split_evenly(architecture.num_layers, stages, placement.num_chunks), placement, topology.pipeline_parallel.rank
    )
    context = BuildContext(
        TensorParallel(topology.tensor_parallel),
        job.torch_dtype,
        job.torch_device,
        choose_attention_kernel("auto", job.torch_device, job.torch_dtype),
        context_parallel=ContextParallel(topology.context_parallel, ("p2p",)),
        kernels=_compiled_kernels() if job.is_compiled else LayerKernels(),
    )
    model = build_model(architecture, context, seed=1, virtual_stages=chunks)
    source = Path(job.weights)
    targets = [(one.info, one.start, one.tensor) for one in whole_params(model.parameters())]
    fill_from_hugging_face(source, HuggingFaceWeights(source), architecture, targets)
    return model
