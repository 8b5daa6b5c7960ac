"""Building a run: each step in one function, and all of them in order in :func:`build_trainer`."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron.config.errors import ConfigError, DataError
from megatron.config.model import LlamaConfig
from megatron.config.run import RunConfig
from megatron.core.data_parallel.strategy import wrap_data_parallel
from megatron.core.model.layer import BuildContext
from megatron.core.model.llama import LlamaModel, build_model
from megatron.core.ops.attention import choose_attention_kernel
from megatron.core.optimizer.learning_rate import LearningRateSchedule, build_schedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.precision import gradient_dtype, weight_dtype
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import Topology
from megatron.data.gpt_dataset import Dataset
from megatron.data.loader import build_datasets, build_loader
from megatron.data.sample_order import parse_split
from megatron.data.tokenizers import build_tokenizer, describe_tokenizer
from megatron.training.batch_schedule import BatchSchedule, build_batch_schedule
from megatron.training.flops import model_flops_per_token, resolve_peak
from megatron.training.launch import together
from megatron.training.listeners import Checkpoints, Evaluation, GarbageCollection, Metrics, device_name
from megatron.training.metrics import MetricsWriter
from megatron.training.state import Progress, RunState
from megatron.training.step import Microbatch
from megatron.training.stop import SignalWatch, StopConditions
from megatron.training.timers import Timers
from megatron.training.trainer import Listener, Trainer
from megatron.training.wandb_writer import check_wandb_credentials
from megatron.training.writers import build_writers

Say = Callable[[str], None]


@dataclass(frozen=True)
class Vocabulary:
    """What data and model need to know of the tokenizer."""

    size: int
    end_of_document: int


def build_trainer(config: RunConfig, topology: Topology, signals: SignalWatch, say: Say) -> Trainer:
    """The whole run of this rank, from flags to a trainer that is ready to go.

    Raises :class:`~megatron.config.errors.UserError`, on every rank alike.
    """
    started = time.monotonic()
    check_wandb_credentials(config.logging)
    vocabulary = together(topology.world, lambda: load_vocabulary(config))
    batches = build_batches(config, topology)
    train_iters = run_length(config, batches)
    model = build_parallel_model(config, topology, vocabulary)
    data_parallel = wrap_data_parallel(model, gradient_dtype(config.precision), topology)
    optimizer = Optimizer(config.optimizer, data_parallel, topology)
    state = RunState(
        model=model,
        optimizer=optimizer,
        schedule=build_learning_rate(config, train_iters, batches),
        learning_rate=config.learning_rate,
        progress=Progress(),
        rank=topology.rank,
        device=topology.device,
        flags=dataclasses.asdict(config),
    )
    resume(state, config, topology, say)
    data = build_data(config, topology, vocabulary, batches, train_iters, state.progress)
    writers = open_writers(config, topology, state.progress.iteration, train_iters)
    describe_run(config, topology, state, batches, train_iters, say)
    return Trainer(
        topology=topology,
        state=state,
        data_parallel=data_parallel,
        batches=batches,
        microbatches=data.train,
        stop=StopConditions(train_iters, config.training, signals, topology.world, topology.device, started),
        timers=Timers(config.logging.timing_log_level, synchronizer(topology.device)),
        listeners=build_listeners(config, topology, model.config, data, batches, train_iters, say),
        writers=writers,
        seq_length=_sequence(config),
        check_for_nan=config.training.check_for_nan_in_loss_and_grad,
        count_zeros=config.logging.log_num_zeros_in_grad,
    )


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The tokenizer's vocabulary; without a tokenizer (mock data) ``--vocab-size`` ids, the last ending a document."""
    if config.tokenizer.tokenizer_type is None:
        assert config.tokenizer.vocab_size is not None
        return Vocabulary(config.tokenizer.vocab_size, config.tokenizer.vocab_size - 1)
    tokenizer = build_tokenizer(config.tokenizer)
    return Vocabulary(tokenizer.vocab_size, tokenizer.eod)


def build_batches(config: RunConfig, topology: Topology) -> BatchSchedule:
    """The global batch size over the run."""
    assert config.training.micro_batch_size is not None
    return build_batch_schedule(
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_size=topology.grid.dp,
        global_batch_size=config.training.global_batch_size,
        rampup_batch_size=config.training.rampup_batch_size,
        step_batch_size_schedule=config.training.step_batch_size_schedule,
        seq_length=config.data.seq_length,
        decrease_if_needed=config.training.decrease_batch_size_if_needed,
    )


def run_length(config: RunConfig, batches: BatchSchedule) -> int:
    """Iterations of the whole run."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None
    return batches.iterations_for_samples(config.training.train_samples)


def build_parallel_model(config: RunConfig, topology: Topology, vocabulary: Vocabulary) -> LlamaModel:
    """This rank's part of the model, with its initial weights."""
    parallel = TensorParallel(
        topology.tensor_parallel, config.parallel.sequence_parallel and topology.tensor_parallel.size > 1
    )
    architecture = config.model.resolve(vocabulary.size, parallel.size, _sequence(config))
    dtype = weight_dtype(config.precision)
    kernel = choose_attention_kernel(config.model.attention_backend, topology.device, dtype)
    context = BuildContext(parallel, dtype, topology.device, kernel)
    return build_model(architecture, context, config.training.seed)


def build_learning_rate(config: RunConfig, train_iters: int, batches: BatchSchedule) -> LearningRateSchedule:
    """The learning-rate schedule; evaluation alone needs none."""
    rates = (
        config.learning_rate
        if config.learning_rate.lr is not None
        else dataclasses.replace(config.learning_rate, lr=0.0)
    )
    return build_schedule(
        rates,
        train_iters=None if config.training.train_samples is not None else train_iters,
        train_samples=config.training.train_samples,
        global_batch_size=batches.steps[-1][1],
    )


def resume(state: RunState, config: RunConfig, topology: Topology, say: Say) -> None:
    """Load the checkpoint of ``--load``, if there is one."""
    if config.checkpoint.load is None:
        return
    if state.load(config.checkpoint, topology.world):
        say(f"loaded checkpoint {config.checkpoint.load}, continuing after iteration {state.progress.iteration}")
    else:
        say(f"{config.checkpoint.load} holds no checkpoint yet: starting from random weights")


@dataclass(frozen=True)
class Data:
    """Endless microbatches of this rank, by split; None where a split is not used."""

    train: Iterator[Microbatch]
    validation: Iterator[Microbatch] | None
    test: Iterator[Microbatch] | None


def build_data(
    config: RunConfig,
    topology: Topology,
    vocabulary: Vocabulary,
    batches: BatchSchedule,
    train_iters: int,
    progress: Progress,
) -> Data:
    """Datasets (rank 0 builds cached orders first) and loaders that start where the run stands."""
    counts = sample_counts(config, batches, train_iters)
    described = describe_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type is not None else None
    train, validation, test = together(
        topology.world,
        lambda: build_datasets(
            config.data,
            vocab_size=vocabulary.size,
            eod=vocabulary.end_of_document,
            seed=config.training.seed,
            sample_counts=counts,
            tokenizer_description=described,
        ),
        first=True,
    )
    interval = config.validation.eval_interval
    evaluated = progress.iteration // interval * config.validation.eval_iters if interval else 0
    return Data(
        train=_loader(config, topology, train, progress.consumed_samples),
        validation=_loader(config, topology, validation, evaluated * batches.steps[-1][1]) if validation else None,
        test=_loader(config, topology, test, 0) if test else None,
    )


def sample_counts(config: RunConfig, batches: BatchSchedule, train_iters: int) -> tuple[int, int, int]:
    """Samples that the run will ask of each split, as in Megatron-LM; a split of weight 0 is not used."""
    train = config.training.train_samples or batches.total_samples(train_iters)
    interval, per_evaluation = config.validation.eval_interval, config.validation.eval_iters * batches.steps[-1][1]
    weights = [end - start for start, end in _split_ranges(config)]
    if config.validation.skip_train or (interval is not None and config.validation.eval_iters > 0):
        if weights[1] == 0:
            raise ConfigError(
                f"Evaluation needs a validation split, but --split {config.data.split!r} gives it nothing: raise its "
                "second weight, or drop --eval-interval."
            )
        evaluations = train_iters // interval + 1 if interval else 1
        return train, evaluations * per_evaluation, per_evaluation if weights[2] else 0
    return train, 0, 0


def _split_ranges(config: RunConfig) -> list[tuple[float, float]]:
    return [(0.0, 0.0) if bounds is None else bounds for bounds in parse_split(config.data.split)]


def _loader(config: RunConfig, topology: Topology, dataset: Dataset | None, consumed: int) -> Iterator[Microbatch]:
    if dataset is None:
        raise DataError("The train split holds no samples: raise the first weight of --split.")
    assert config.training.micro_batch_size is not None
    return build_loader(
        dataset,
        consumed_samples=consumed,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=topology.data_parallel.rank,
        data_parallel_size=topology.grid.dp,
        num_workers=config.data.num_workers,
        dataloader_type=config.data.dataloader_type,
        pin_memory=topology.device.type == "cuda",
    )


def open_writers(config: RunConfig, topology: Topology, iteration: int, train_iters: int) -> list[MetricsWriter]:
    """The metrics writers, all on rank 0; the other ranks have none."""

    def open_on_first_rank() -> list[MetricsWriter]:
        if topology.rank != 0:
            return []
        return build_writers(
            config.logging,
            save_directory=config.checkpoint.save,
            run_config=dataclasses.asdict(config),
            resume_iteration=iteration,
            train_iters=train_iters,
            stream=sys.stdout,
        )

    return together(topology.world, open_on_first_rank)


def build_listeners(
    config: RunConfig,
    topology: Topology,
    architecture: LlamaConfig,
    data: Data,
    batches: BatchSchedule,
    train_iters: int,
    say: Say,
) -> list[Listener]:
    """Listeners in the order in which they hear of an event: checkpoints last, since evaluation may take long."""
    peak, source = resolve_peak(device_name(topology.device), precision_name(config), config.logging.peak_tflops)
    say(source)
    flops = model_flops_per_token(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        kv_channels=architecture.kv_channels,
        num_query_groups=architecture.num_query_groups,
        vocab_size=architecture.vocab_size,
        seq_length=_sequence(config),
    )
    metrics = Metrics(config.logging, train_iters, flops, peak)
    evaluation = Evaluation(
        config.validation.eval_interval,
        config.validation.eval_iters,
        batches.steps[-1][1] // batches.unit,
        data.validation,
        data.test,
    )
    checkpoints = Checkpoints(config.checkpoint, say)
    collection = [GarbageCollection(config.training.manual_gc_interval)] if config.training.manual_gc else []
    return [metrics, evaluation, checkpoints, *collection]


def precision_name(config: RunConfig) -> str:
    """The precision in the words of the peak table."""
    if config.precision.fp64:
        return "fp64"
    return "bf16" if config.precision.bf16 else "fp32"


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """How timers wait for the device; None where there is nothing to wait for."""
    return torch.cuda.synchronize if device.type == "cuda" else None


def describe_run(
    config: RunConfig, topology: Topology, state: RunState, batches: BatchSchedule, train_iters: int, say: Say
) -> None:
    """A few lines on what is about to run, once."""
    grid, model = topology.grid, state.model
    strategy = config.parallel.sharding_strategy
    sequence = ", sequence parallel" if model.context.parallel.sequence_parallel else ""
    say(
        f"model: {model.config.num_parameters():,} parameters, "
        f"{sum(parameter.numel() for parameter in model.parameters()):,} on this rank"
    )
    say(
        f"layout: {grid.world_size} ranks on {device_name(topology.device) or 'CPU'} = tensor {grid.tp}{sequence} x "
        f"data {grid.dp} ({strategy}), {precision_name(config)}, attention: {model.context.attention_kernel.name}"
    )
    if config.parallel.sequence_parallel and grid.tp == 1:
        say("--sequence-parallel has nothing to split with --tensor-model-parallel-size 1")
    say(
        f"run: {train_iters} iterations of {batches.steps[-1][1]} x {_sequence(config)} tokens, "
        f"{batches.num_microbatches(state.progress.consumed_samples)} microbatches per rank"
    )


def _sequence(config: RunConfig) -> int:
    assert config.data.seq_length is not None
    return config.data.seq_length
