"""What a search is for, and what it chooses.

A job is a model, a batch and a cluster, but no layout, corpus or tokenizer. A layout of its step over the GPUs is given
as flags and as a changed configuration.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, cast

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import RecomputeMethod, RecomputeModule
from megatron.config.command_line import CommandLine
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_flag
from megatron.operation.run_summary import GPU_HOURS_PER_FAILURE
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import Cluster
from megatron.training.build.vocabulary import Vocabulary, planned_vocabulary

FULL_RECOMPUTE: dict[str, RecomputeMethod] = {"full": "block", "uniform": "uniform"}
"""--recompute-method by the :attr:`Layout.recompute` that recomputes whole layers."""
DIVISION = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Flags that divide the layers among the stages, apart from sizes."""
_OTHER_DIVISIONS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_ALIASES: dict[str, Any] = {
    "use_distributed_optimizer": False,
    "use_torch_fsdp2": False,
    "recompute_activations": False,
    "num_layers_per_virtual_pipeline_stage": None,
}
"""Fields that mean the same as fields of :meth:`Layout.settings`, at their defaults."""


@dataclass(frozen=True)
class Layout:
    """A layout of a training step over GPUs. Sizes are numbers of ranks."""

    tp: int
    pp: int
    cp: int
    dp: int
    """Model replicas; the global batch is divided among them."""
    vp: int
    """Model chunks of a pipeline rank: 1 without interleaving, 2 with zb-v."""
    schedule: str
    """A value of --pipeline-schedule; ``"1f1b"`` without pipeline parallelism."""
    sharding: ShardingStrategy
    """A value of --data-parallel-sharding-strategy."""
    micro_batch_size: int
    recompute: str
    """``"none"``; the values of --recompute-modules joined by ``+``; ``"full"``, the first ``recompute_layers`` layers
    of each chunk one by one; or ``"uniform"``, all layers in units of ``recompute_layers``."""
    recompute_layers: int = 0
    replicas: int = 1
    """Copies of each shard (--num-distributed-optimizer-instances): above 1 is hybrid sharding."""
    reduces_in_bf16: bool = False
    """Gradients are accumulated and reduced in bf16, which changes the numerics."""
    counts_ends: bool = False
    """The embedding and the output layer count as a layer each in the division among the stages."""
    sequence_parallel: bool = True
    """This has no effect with ``tp`` 1."""
    tp_comm_overlap: bool = False
    """The collectives of tensor parallelism overlap with matrix products."""
    ep: int = 1
    etp: int = 1

    @property
    def name(self) -> str:
        """Sizes above 1, such as ``TP4 PP4 VP5 CP2 DP2``."""
        sizes = {"TP": self.tp, "PP": self.pp, "VP": self.vp, "CP": self.cp, "EP": self.ep, "DP": self.dp}
        if self.ep > 1 and self.etp != self.tp:
            sizes["ETP"] = self.etp
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def modules(self) -> tuple[RecomputeModule, ...]:
        """What each layer recomputes; empty with full recompute."""
        is_selective = self.recompute != "none" and self.recompute not in FULL_RECOMPUTE
        return cast(tuple[RecomputeModule, ...], tuple(self.recompute.split("+"))) if is_selective else ()

    def settings(self, has_experts: bool = False) -> dict[str, Any]:
        """Values of all fields of the flags that the layout determines, by field name."""
        is_piped, is_full = self.pp > 1, self.recompute in FULL_RECOMPUTE
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sequence_parallel and self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "pipeline_schedule": self.schedule if is_piped else None,
            "num_virtual_stages_per_pipeline_rank": self.vp if is_piped and self.vp > 1 else None,
            **dict.fromkeys(DIVISION, self.counts_ends),
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp if has_experts else None,
            "data_parallel_sharding_strategy": self.sharding,
            "num_distributed_optimizer_instances": self.replicas,
            "micro_batch_size": self.micro_batch_size,
            "recompute_granularity": "full" if is_full else "selective" if self.modules else None,
            "recompute_modules": self.modules or None,
            "recompute_method": FULL_RECOMPUTE.get(self.recompute),
            "recompute_num_layers": self.recompute_layers if is_full else None,
            "grad_reduce_in_bf16": self.reduces_in_bf16,
        }

    def overlaps(self) -> dict[str, Any]:
        """More values of flags by field: what our recipes overlap with computation, and the dispatcher of tokens."""
        overlaps = self.dp * self.cp > 1
        chosen: dict[str, Any] = {
            "overlap_grad_reduce": overlaps,
            "overlap_param_gather": overlaps and self.sharding != "no_shard",
            "tp_comm_overlap": self.tp_comm_overlap,
        }
        if self.ep > 1:
            # Expert-parallel ranks are neighbours, as the recipes of experts have it.
            chosen |= {"moe_token_dispatcher_type": "alltoall", "rank_order": "tp-cp-ep-dp-pp"}
        return chosen

    def apply(self, config: RunConfig, given: Collection[str] = ()) -> RunConfig:
        """``config`` with this layout. Fields of :meth:`overlaps` whose name is in ``given`` keep their value, as do
        those that divide the layers if one of these is in ``given``."""
        values = self._chosen(given, bool(config.model.num_experts)) | _ALIASES
        if not divides_layers(given):
            values |= dict.fromkeys(_OTHER_DIVISIONS)
        changed: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in values.items():
            changed[_groups_by_field()[name]][name] = value
        return replace(config, **{group: replace(getattr(config, group), **ours) for group, ours in changed.items()})

    def flags(self, given: Collection[str] = (), has_experts: bool = False) -> dict[str, object]:
        """Value by flag name without leading dashes (True for a switch): what to paste beside the flags ``given``.

        Switches that are off and values that are None are left out, and the fields that :meth:`apply` keeps.
        """
        has_experts = has_experts or self.ep * self.etp > 1
        values = self._chosen(given, has_experts)
        if not has_experts:
            del values["expert_model_parallel_size"]
        if self.replicas == 1:
            del values["num_distributed_optimizer_instances"]
        return {
            name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and value is not False
        }

    def _chosen(self, given: Collection[str], has_experts: bool) -> dict[str, Any]:
        overlaps = self.overlaps()
        values = self.settings(has_experts) | {name: overlaps[name] for name in overlaps if name not in given}
        if divides_layers(given):
            for name in DIVISION:
                del values[name]
        if "pipeline_model_parallel_layout" in given:
            del values["num_virtual_stages_per_pipeline_rank"]
        return values


@cache
def _groups_by_field() -> dict[str, str]:
    """The group of every flag in :class:`RunConfig`, both by their names there."""
    default = RunConfig()
    return {flag.name: group.name for group in fields(default) for flag in fields(getattr(default, group.name))}


def divides_layers(given: Collection[str]) -> bool:
    """Whether the user divides the layers among the stages."""
    return not {*DIVISION, *_OTHER_DIVISIONS}.isdisjoint(given)


@dataclass(frozen=True)
class Operation:
    """What the days and the cost of a run depend on besides the time of a step."""

    tokens: float = 1e12
    """Tokens of the whole run."""
    price_per_gpu_hour: float | None = None
    """The cluster's price by default."""
    save_s: float = 5.0
    """Seconds for which a save blocks training; --async-save blocks only while the state is copied."""
    restart_s: float = 300.0
    """Seconds from a failure to the first new step."""


@dataclass(frozen=True)
class Job:
    """What to train on which GPUs."""

    line: CommandLine
    """Flags of ``pretrain_llama.py``: the model, the batch, and constraints on the layout."""
    config: RunConfig
    """The flags of ``line``, completed so that a layout is all that is missing."""
    given: frozenset[str]
    """Fields of the flags of ``line``."""
    vocabulary: Vocabulary
    cluster: Cluster
    num_gpus: int
    operation: Operation = Operation()

    @classmethod
    def of(cls, line: CommandLine, cluster: Cluster, num_gpus: int, operation: Operation | None = None) -> "Job":
        """The job of a command line. What a search does not depend on, and a run needs, gets a value: data, learning
        rate, length. Raises :class:`ConfigError` for an invalid flag, and for a size that is missing."""
        config = line.parse().checked()
        for flag, value in (
            ("--seq-length", config.data.seq_length),
            ("--global-batch-size", config.training.global_batch_size),
        ):
            if value is None:
                raise ConfigError(f"{flag} is missing: set it.")
        expert_parallel = changed_flags(config.parallel, "expert_model_parallel_size")
        require_flag("--num-experts", config.architecture.num_experts is not None, expert_parallel)
        if num_gpus < 1:
            raise ConfigError(f"--num-gpus {num_gpus} is below 1: set the number of GPUs of the run.")
        given = line.fields
        if "gpus_per_node" in given:
            cluster = replace(cluster, node_size=config.dry_run.gpus_per_node)
        completed = _completed(config, cluster, num_gpus)
        if completed.tokenizer.tokenizer_type is None and completed.mock_vocab_size is None:
            raise ConfigError("The vocabulary size is missing: add --vocab-size, or choose a preset with --model.")
        vocabulary = planned_vocabulary(completed)
        return cls(line, completed, given, vocabulary, cluster, num_gpus, operation or Operation())

    @property
    def name(self) -> str:
        """The name of the model, or its size."""
        if self.config.model.model is not None:
            return str(self.config.model.model)
        return f"{self.architecture.num_parameters() / 1e9:.3g}B parameters"

    @cached_property
    def architecture(self) -> TransformerConfig:
        """The model without padding for tensor parallelism."""
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
    def precision(self) -> str:
        return "bf16" if self.config.precision.fp8_format is None else "fp8"

    @property
    def gpu_hours_per_failure(self) -> float:
        """The rate of failures of the cluster file, or that of Llama 3 405B."""
        return self.cluster.gpu_hours_per_failure or GPU_HOURS_PER_FAILURE

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a GPU in this precision."""
        return self.cluster.bf16_flops if self.precision == "bf16" else self.cluster.fp8_flops

    @cached_property
    def constants(self) -> Mapping[str, float]:
        """Constants of the prices: the fitted ones, and in place of them the cluster's own."""
        return {**load_fitted(), **self.cluster.constants}

    def with_gpus(self, num_gpus: int) -> "Job":
        """This job on another number of GPUs."""
        return replace(self, config=_completed(self.config, self.cluster, num_gpus), num_gpus=num_gpus)


def _completed(config: RunConfig, cluster: Cluster, num_gpus: int) -> RunConfig:
    memory = config.dry_run.gpu_memory_gb or cluster.memory_gib
    dry_run = replace(
        config.dry_run, dry_run=True, num_gpus=num_gpus, gpu_memory_gb=memory, gpus_per_node=cluster.node_size
    )
    training, rates = config.training, config.learning_rate
    if training.micro_batch_size is None:
        training = replace(training, micro_batch_size=1)
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if rates.lr is None:
        rates = replace(rates, lr=1e-4)
    data = config.data if config.data.sources else replace(config.data, mock_data=True)
    return replace(config, dry_run=dry_run, training=training, learning_rate=rates, data=data)
