"""Training steps of real runs, built from flags as ``pretrain_llama.py`` builds them, and the same steps to price."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.kernels.selection import build_kernels
from megatron.core.models.parallelize import parallelize
from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.topology import Topology
from megatron.metrics.timers import Timers
from megatron.planner.rehearsal.price import PlannedStep, attention_kind
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.step_time.cluster import Cluster
from megatron.training.initialize import rank_grid
from megatron.training.loop.step import train_step
from megatron.training.train_module import TrainModule


def build_step(config: RunConfig, topology: Topology, vocab_size: int, num_microbatches: int) -> Callable[[], None]:
    """A training step of this rank on random tokens. Collective."""
    kernels = build_kernels(config, topology, vocab_size)
    parallel = parallelize(config, topology, vocab_size, kernels)
    parallel.data_parallel.initialize(config.training.seed)
    module = TrainModule(
        parallel.executor,
        parallel.data_parallel,
        Optimizer(config.optimizer, parallel.data_parallel, topology, kernels.optimizer),
        build_loss_scaler(config.precision),
        topology,
        parallel.model.context.fp8,
        parallel.model.expert_balance,
    )
    expected_tokens = num_microbatches * config.micro_batch_size * config.seq_length * topology.grid.dp

    def step() -> None:
        train_step(
            module,
            _microbatches(config, topology, vocab_size),
            Hyperparameters(learning_rate=1e-6),
            num_microbatches=num_microbatches,
            expected_tokens=expected_tokens,
            timers=Timers(0),
        )

    return step


def _microbatches(config: RunConfig, topology: Topology, vocab_size: int) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end, of the same tokens for ranks that share them."""
    shape = config.micro_batch_size, config.seq_length // topology.grid.cp
    random = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, vocab_size, shape, generator=random)
        yield {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(shape)}


def planned_step(
    config: RunConfig, num_ranks: int, vocab_size: int, num_microbatches: int, cluster: Cluster
) -> PlannedStep:
    """The same step, to be priced."""
    grid = rank_grid(config.parallel, num_ranks)
    device = torch.device("cpu" if cluster.generation == "cpu" else "cuda")
    records = UnitRecords(vocab_size, attention_kind(config, cluster), device)
    return PlannedStep(UnitsOfRun(records, config, grid), config.micro_batch_size * num_microbatches * grid.dp)


def with_layers(config: RunConfig, num_layers: int, micro_batch_size: int) -> RunConfig:
    """The same model with another depth and microbatch."""
    model = replace(config.model, num_layers=num_layers)
    training = replace(config.training, micro_batch_size=micro_batch_size)
    return replace(config, model=model, training=training)
