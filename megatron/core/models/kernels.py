"""Which kernels a run uses, from its flags and its device."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.core.device import Machine
from megatron.core.kernels.choice import Choice, ExpertSizes, KernelRequest
from megatron.core.kernels.selection import Kernels, choose_kernels
from megatron.core.kernels.trials import TrialSizes
from megatron.core.precision import number_formats
from megatron.core.topology import Topology
from megatron.errors import ConfigError, RankError

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine import TransformerEngine


def build_kernels(config: RunConfig, topology: Topology, vocab_size: int, machine: Machine | None = None) -> Kernels:
    """The kernel of each operation on this rank, by default for this machine."""
    size = topology.tensor_parallel.size
    model = config.model.resolve(vocab_size, size, config.seq_length)
    formats = number_formats(config.precision, config.optimizer)
    request = KernelRequest(
        machine or Machine.of(topology.device),
        formats.weight,
        formats.gradient,
        TrialSizes.of(model, size, config.micro_batch_size),
        needs_log_sum_exp=needs_log_sum_exp(config, topology),
        masks_attention=config.masks_attention,
        resets_positions=config.data.reset_position_ids,
        attention_backend=config.model.attention_backend,
        engine=find_transformer_engine(config, topology),
        fp8=config.precision.fp8_format is not None and config.model.transformer_impl == "local",
        has_delayed_scales=has_delayed_scales(config),
        experts=expert_sizes(model, config.parallel),
    )
    return choose_kernels(config.kernels, request)


def expert_sizes(model: TransformerConfig, parallel: ParallelConfig) -> ExpertSizes | None:
    """The experts of a layer on one rank; None for a dense model."""
    if model.num_experts is None or model.moe_ffn_hidden_size is None:
        return None
    count = model.num_experts // parallel.expert_model_parallel_size
    return ExpertSizes(count, model.hidden_size, model.moe_ffn_hidden_size // parallel.expert_tensor_size)


def check_kernels_agree(choices: Sequence[Choice], control: ControlGroup) -> None:
    """Refuse ranks with different kernels (other packages, compilers or GPUs): replicated tensors would diverge."""
    for rank, rank_choices in enumerate(control.all_gather_object(choices)):
        for own, other in zip(choices, rank_choices, strict=True):
            if own.implementation != other.implementation:
                raise ConfigError(
                    f"The {own.operation} kernel differs among ranks: on rank {control.rank} {own.implementation} "
                    f"({own.reason}), on rank {rank} {other.implementation} ({other.reason}): install the same "
                    f"packages on all hosts, or choose one with --kernel {own.operation}={own.implementation}."
                )


def needs_log_sum_exp(config: RunConfig, topology: Topology) -> bool:
    """Whether the attention kernel must return the log-sum-exp: needed to merge partial outputs (context parallelism)
    and for CPU offload, which cannot move a kernel's private autograd graph."""
    return topology.context_parallel.size > 1 or config.activations.cpu_offloading_num_layers > 0


def has_delayed_scales(config: RunConfig) -> bool:
    """Whether our own linear layers quantise their inputs with scales that are known before the input."""
    precision = config.precision
    is_local = config.model.transformer_impl == "local"
    return is_local and precision.fp8_format is not None and precision.fp8_recipe == "delayed"


def find_transformer_engine(config: RunConfig, topology: Topology) -> "TransformerEngine | None":
    """Transformer Engine, if ``--transformer-impl`` asks for it."""
    if config.model.transformer_impl == "local":
        return None
    from megatron.core.backends.transformer_engine import TransformerEngine, UnavailableError

    try:
        return TransformerEngine.find(topology.device)
    except UnavailableError as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine needs that package, which {error}: install requirements-cuda.txt "
            "on a machine with a GPU, or use --transformer-impl local."
        ) from error


def share_buffers(config: RunConfig, topology: Topology, engine: "TransformerEngine | None", at_end: ExitStack) -> None:
    """Allocate Transformer Engine's user buffers for --tp-comm-overlap, which ``at_end`` frees. Collective."""
    ranks = topology.tensor_parallel
    if engine is None or ranks.size == 1 or not config.parallel.tp_comm_overlap:
        return
    from megatron.core.backends.transformer_engine import UnavailableError, shared_buffers

    rows = config.micro_batch_size * config.seq_length // topology.grid.cp
    hidden_size = config.model.resolve(1, ranks.size, config.seq_length).hidden_size
    try:
        at_end.enter_context(shared_buffers(engine, config.precision, ranks, rows, hidden_size))
    except UnavailableError as error:
        raise RankError(
            f"--tp-comm-overlap with --transformer-impl transformer_engine needs that package, which on rank "
            f"{topology.rank} {error}: fix this, use --transformer-impl local, or remove --tp-comm-overlap."
        ) from error
