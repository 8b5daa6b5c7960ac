"""The job for which layouts are searched: a model, a batch and a cluster, but no layout, corpus or tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.operation.effective_time import GPU_HOURS_PER_FAILURE
from megatron.planner.search.layout import Layout
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.prices import load_fitted
from megatron.training.build.vocabulary import Vocabulary, planned_vocabulary


@dataclass(frozen=True)
class Operation:
    """What the days and the cost of a run depend on besides the time of a step."""

    tokens: float = 1e12
    """Tokens of the whole run."""
    price_per_gpu_hour: float | None = None
    """By default the cluster's."""
    save_s: float = 5.0
    """For which a save blocks training; --async-save blocks only while the state is copied."""
    restart_s: float = 300.0
    """From a failure to the first new step."""


@dataclass(frozen=True)
class Job:
    """What to train on which GPUs."""

    arguments: tuple[str, ...]
    """Words of the command line of ``pretrain_llama.py``: the model, the batch, and constraints on the layout."""
    config: RunConfig
    """The flags in ``arguments``, completed so that a layout is all that is missing."""
    given: frozenset[str]
    """Fields of the flags in ``arguments``."""
    vocabulary: Vocabulary
    cluster: Cluster
    num_gpus: int
    operation: Operation = Operation()

    @classmethod
    def of(cls, arguments: Sequence[str], cluster: Cluster, num_gpus: int, operation: Operation | None = None) -> "Job":
        """The job of a command line. What a search does not depend on, and a run needs, gets a value: data, learning
        rate, length. Raises :class:`ConfigError` for an invalid flag, and for a size that is missing."""
        config = parse_command_line(arguments)
        for flag, value in (
            ("--seq-length", config.data.seq_length),
            ("--global-batch-size", config.training.global_batch_size),
        ):
            if value is None:
                raise ConfigError(f"{flag} is missing: set it.")
        if num_gpus < 1:
            raise ConfigError(f"--num-gpus {num_gpus} is below 1: set the number of GPUs of the run.")
        given = given_fields(arguments)
        if "gpus_per_node" in given:
            cluster = replace(cluster, node_size=config.dry_run.gpus_per_node)
        completed = _completed(config, cluster, num_gpus)
        if completed.tokenizer.tokenizer_type is None and completed.mock_vocab_size is None:
            raise ConfigError("The vocabulary size is missing: add --vocab-size, or choose a preset with --model.")
        vocabulary = planned_vocabulary(completed)
        return cls(tuple(arguments), completed, given, vocabulary, cluster, num_gpus, operation or Operation())

    @property
    def name(self) -> str:
        """Of the model."""
        if self.config.model.model is not None:
            return str(self.config.model.model)
        return f"{self.architecture.num_parameters() / 1e9:.3g}B parameters"

    @cached_property
    def architecture(self) -> TransformerConfig:
        """Without padding for tensor parallelism."""
        return self.config.model.resolve(self.vocabulary.size, 1, self.seq_length)

    @property
    def seq_length(self) -> int:
        return self.config.seq_length

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        assert self.config.training.global_batch_size is not None
        return self.config.training.global_batch_size

    def num_microbatches(self, layout: Layout) -> int:
        """Microbatches of a rank in a step."""
        return self.global_batch_size // (layout.dp * layout.micro_batch_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def is_fp8(self) -> bool:
        return self.config.precision.fp8_format is not None

    @property
    def precision(self) -> str:
        return "fp8" if self.is_fp8 else "bf16"

    @property
    def tokens(self) -> float:
        """Of the whole run."""
        return self.operation.tokens

    @property
    def price_per_gpu_hour(self) -> float | None:
        """None if neither the user nor the cluster file states one."""
        given = self.operation.price_per_gpu_hour
        return self.cluster.price_per_gpu_hour if given is None else given

    @property
    def gpu_hours_per_failure(self) -> float:
        """The cluster's, by default that of Llama 3 405B."""
        return self.cluster.gpu_hours_per_failure or GPU_HOURS_PER_FAILURE

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a GPU in this precision."""
        return self.cluster.fp8_flops if self.is_fp8 else self.cluster.bf16_flops

    @cached_property
    def constants(self) -> Mapping[str, float]:
        """Of the step-time model: the fitted ones, and in place of them the cluster's own."""
        return {**load_fitted(), **self.cluster.constants}

    def with_gpus(self, num_gpus: int) -> "Job":
        """The same job on another number of GPUs."""
        return replace(self, config=_completed(self.config, self.cluster, num_gpus), num_gpus=num_gpus)


def given_fields(arguments: Sequence[str]) -> frozenset[str]:
    """The fields of the flags in a command line."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    known = {flag.name for group in fields(RunConfig) for flag in fields(group.type)}  # type: ignore[arg-type]
    return frozenset(name if name in known else name.removeprefix("no_") for name in names)


def _completed(config: RunConfig, cluster: Cluster, num_gpus: int) -> RunConfig:
    memory = config.dry_run.gpu_memory_gb or cluster.memory_gib
    dry_run = replace(config.dry_run, dry_run=True, num_gpus=num_gpus, gpu_memory_gb=memory)
    dry_run = replace(dry_run, gpus_per_node=cluster.node_size)
    training, rates = config.training, config.learning_rate
    if training.micro_batch_size is None:
        training = replace(training, micro_batch_size=1)
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if rates.lr is None:
        rates = replace(rates, lr=1e-4)
    data = config.data if config.data.sources else replace(config.data, mock_data=True)
    return replace(config, dry_run=dry_run, training=training, learning_rate=rates, data=data)
