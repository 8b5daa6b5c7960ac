"""The job for which layouts are searched: a model, a batch and a cluster, but no layout, corpus or tokenizer."""

from dataclasses import dataclass, replace
from functools import cached_property

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.plan import planned_vocabulary
from megatron.planner.step_time.cluster import Cluster
from megatron.training.build.vocabulary import Vocabulary

DESCRIBED = frozenset({"model", "seq_length", "global_batch_size", "num_gpus", "bf16", "fp8_format", "vocab_size"})
"""Flags that describe the job; other flags that are given constrain the layout."""


@dataclass(frozen=True)
class Job:
    """What to train on which GPUs."""

    config: RunConfig
    """The flags given, completed so that a layout is all that is missing; see :meth:`of`."""
    given: frozenset[str]
    """Fields of the flags that were given: constraints on the layout."""
    vocabulary: Vocabulary
    cluster: Cluster
    num_gpus: int
    tokens: float | None = None
    """Tokens of the whole run, for days and cost."""
    price_per_gpu_hour: float | None = None
    """By default the cluster's."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        given: frozenset[str],
        cluster: Cluster,
        num_gpus: int,
        tokens: float | None = None,
        price_per_gpu_hour: float | None = None,
    ) -> "Job":
        """The job of parsed flags. What a search does not depend on, and a run needs, gets a value: data, learning
        rate, length. Raises :class:`ConfigError` for a size that is missing."""
        for flag, value in (
            ("--seq-length", config.data.seq_length),
            ("--global-batch-size", config.training.global_batch_size),
        ):
            if value is None:
                raise ConfigError(f"{flag} is missing: set it.")
        if num_gpus < 1:
            raise ConfigError(f"--num-gpus {num_gpus} is below 1: set the number of GPUs of the run.")
        completed = _completed(config, cluster, num_gpus)
        if completed.tokenizer.tokenizer_type is None and completed.mock_vocab_size is None:
            raise ConfigError("The vocabulary size is missing: add --vocab-size, or choose a preset with --model.")
        vocabulary = planned_vocabulary(completed)
        return cls(completed, given - DESCRIBED, vocabulary, cluster, num_gpus, tokens, price_per_gpu_hour)

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
    def peak_flops(self) -> float:
        """FLOP/s of a GPU in this precision."""
        return self.cluster.fp8_flops if self.is_fp8 else self.cluster.bf16_flops

    def with_gpus(self, num_gpus: int) -> "Job":
        """The same job on another number of GPUs."""
        return replace(self, config=_completed(self.config, self.cluster, num_gpus), num_gpus=num_gpus)


def _completed(config: RunConfig, cluster: Cluster, num_gpus: int) -> RunConfig:
    memory = config.dry_run.gpu_memory_gb or cluster.memory_gib
    dry_run = replace(config.dry_run, dry_run=True, num_gpus=num_gpus, gpu_memory_gb=memory)
    training, rates = config.training, config.learning_rate
    if training.micro_batch_size is None:
        training = replace(training, micro_batch_size=1)
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if rates.lr is None:
        rates = replace(rates, lr=1e-4)
    data = config.data if config.data.sources else replace(config.data, mock_data=True)
    return replace(config, dry_run=dry_run, training=training, learning_rate=rates, data=data)
