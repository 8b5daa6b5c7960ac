"""The kernels of a run: one implementation of every operation.

On a GPU each kernel that depends on the hardware, and the compiler, is tried once against the reference before it is
chosen. So a kernel that fails or is wrong is reported at the start and not at the first step.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import KernelConfig
from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.core.device import Machine, Unavailable
from megatron.core.kernels import candidates
from megatron.core.kernels.choice import Candidate, Choice, ExpertSizes, KernelRequest, choose
from megatron.core.kernels.trials import BrokenDevice, TrialSizes, run_trial
from megatron.core.ops.attention import AttentionKernel, hardest_mask
from megatron.core.ops.fp8 import FP8_CAPABILITY, Fp8Kernels, gemm_for
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import WeightGradientKernel
from megatron.core.ops.norm import EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import Rotation, rotate_
from megatron.core.ops.swiglu import EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer import OptimizerKernels
from megatron.core.precision import number_formats
from megatron.core.tensor_parallel.cross_entropy import CrossEntropyKernel, EagerCrossEntropy
from megatron.core.topology import Topology
from megatron.errors import ConfigError, RankError

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine import TransformerEngine


T = TypeVar("T")


@dataclass(frozen=True)
class LayerKernels:
    """The elementwise kernels of a layer, the GEMMs of its experts, and the loss."""

    rms_norm: RMSNormKernel = field(default_factory=EagerRMSNorm)
    swiglu: SwiGLUKernel = field(default_factory=EagerSwiGLU)
    rotate: Rotation = rotate_
    cross_entropy: CrossEntropyKernel = field(default_factory=EagerCrossEntropy)
    grouped_gemm: GroupedGemm = field(default_factory=LoopGroupedGemm)


@dataclass(frozen=True)
class Kernels:
    """The kernel of each operation of a run."""

    attention: AttentionKernel
    weight_gradient: WeightGradientKernel
    layers: LayerKernels
    optimizer: OptimizerKernels
    fp8: Fp8Kernels
    engine: "TransformerEngine | None"
    """Provides the norms and linear layers under ``--transformer-impl transformer_engine``."""
    choices: tuple[Choice, ...]
    """The choices in the order of the printed table."""


def choose_kernels(config: KernelConfig, request: KernelRequest) -> Kernels:
    """The kernels of a run. Raises :class:`~megatron.errors.ConfigError` if a required one is not available."""
    choices = [Choice("linear", "local", "the layers of this project")]
    if request.engine is not None:
        reason = f"version {request.engine.version}, by --transformer-impl; with the norms before linear layers"
        choices = [Choice("linear", "transformer_engine", reason)]

    def chosen(operation: str, implementations: Sequence[Candidate[T]]) -> T:
        compiler = request.machine.simulated_compiler
        kernel, choice = choose(operation, implementations, config.wanted(operation), compiler)
        choices.append(choice)
        return kernel

    fp8 = Fp8Kernels.eager(gemm_for(request.device, request.has_block_scales))
    if request.fp8:
        if request.machine.can_try and request.machine.capability >= FP8_CAPABILITY:
            trial, flag, kind, remedy = request.trials.scaled_gemm, "--fp8-format", "FP8 GEMMs", "remove it"
            if request.has_block_scales:
                trial, flag, kind = request.trials.block_scaled_gemm, "--fp8-recipe blockwise", "block-scaled GEMMs"
                remedy = "use another recipe"
            try:
                run_trial(lambda: trial(fp8.gemm, request.device, request.weight))
            except (Unavailable, BrokenDevice) as error:
                raise ConfigError(
                    f"{flag} needs {kind}, which torch does not have on this GPU: {error}; {remedy}, or use "
                    "--transformer-impl transformer_engine."
                ) from error
        if request.has_block_scales:
            fp8 = replace(fp8, blocks=chosen("fp8_quantization", candidates.block_quantization(request)))
        else:
            fp8 = replace(fp8, quantization=chosen("fp8_quantization", candidates.fp8_quantization(request)))
        weight_gradient_kernels = candidates.fp8_weight_gradient(request, fp8.gemm)
        fp8 = replace(fp8, weight_gradient=chosen("fp8_weight_gradient", weight_gradient_kernels))
    attention = chosen("attention", candidates.attention(request))
    weight_gradient = chosen("weight_gradient", candidates.weight_gradient(request))
    # The GEMMs of experts may write their weight gradients by the kernel of linear layers.
    grouped_gemm: GroupedGemm = LoopGroupedGemm(weight_gradient)
    if request.experts is not None:
        grouped_gemm = chosen("grouped_gemm", candidates.grouped_gemm(request, weight_gradient))
    kernels = Kernels(
        attention=attention,
        weight_gradient=weight_gradient,
        layers=LayerKernels(
            rms_norm=chosen("rms_norm", candidates.rms_norm(request)),
            swiglu=chosen("swiglu", candidates.swiglu(request)),
            rotate=chosen("rope", candidates.rope(request)),
            cross_entropy=chosen("cross_entropy", candidates.cross_entropy(request)),
            grouped_gemm=grouped_gemm,
        ),
        optimizer=OptimizerKernels(
            chosen("adam", candidates.adam(request)), chosen("l2_norm", candidates.l2_norm(request))
        ),
        fp8=fp8,
        engine=request.engine,
        choices=tuple(choices),
    )
    if request.machine.can_try:
        # Otherwise the first step would be the second size of these functions, and compile them for any size.
        request.trials.forget()
    return kernels


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
        # To merge partial outputs, and because CPU offload cannot move a kernel's private autograd graph.
        needs_log_sum_exp=topology.context_parallel.size > 1
        or config.activations.cpu_offloading_num_layers > 0
        or model.softmax_type != "vanilla",
        masks_attention=config.masks_attention,
        mask=hardest_mask(model),
        resets_positions=config.data.reset_position_ids,
        attention_backend=config.model.attention_backend,
        engine=find_transformer_engine(config, topology),
        fp8=config.precision.fp8_format is not None and config.model.transformer_impl == "local",
        has_delayed_scales=uses_recipe(config, "delayed"),
        has_block_scales=uses_recipe(config, "blockwise"),
        experts=expert_sizes(model, config.parallel, config.micro_batch_size * config.seq_length),
    )
    return choose_kernels(config.kernels, request)


def expert_sizes(model: TransformerConfig, parallel: ParallelConfig, tokens: int) -> ExpertSizes | None:
    """The experts of a layer on one rank, with microbatches of ``tokens``; None for a dense model."""
    if model.num_experts is None or model.moe_ffn_hidden_size is None:
        return None
    count = model.num_experts // parallel.expert_model_parallel_size
    # Every rank of the groups that exchange tokens has a part of its microbatch.
    ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_size
    of_rank = tokens / (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    rows = int(of_rank * ranks * model.moe_router_topk / model.num_experts)
    return ExpertSizes(count, model.hidden_size, model.moe_ffn_hidden_size // parallel.expert_tensor_size, rows)


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


def uses_recipe(config: RunConfig, recipe: str) -> bool:
    """Whether our own linear layers are in FP8 with the scaling ``recipe``. Under ``delayed`` they quantise an input
    with the scale of earlier steps, so before it is computed."""
    precision = config.precision
    is_local = config.model.transformer_impl == "local"
    return is_local and precision.fp8_format is not None and precision.fp8_recipe == recipe


def find_transformer_engine(config: RunConfig, topology: Topology) -> "TransformerEngine | None":
    """Transformer Engine, if ``--transformer-impl`` asks for it."""
    if config.model.transformer_impl == "local":
        return None
    from megatron.core.backends.transformer_engine import TransformerEngine

    try:
        return TransformerEngine.find(topology.device)
    except Unavailable as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine needs that package, which {error}: install requirements-cuda.txt "
            "on a machine with a GPU, or use --transformer-impl local."
        ) from error


def share_buffers(config: RunConfig, topology: Topology, engine: "TransformerEngine | None", at_end: ExitStack) -> None:
    """Allocate Transformer Engine's user buffers for --tp-comm-overlap, which ``at_end`` frees. Collective."""
    ranks = topology.tensor_parallel
    if engine is None or ranks.size == 1 or not config.parallel.tp_comm_overlap:
        return
    from megatron.core.backends.transformer_engine import shared_buffers

    rows = config.micro_batch_size * config.seq_length // topology.grid.cp
    hidden_size = config.model.resolve(1, ranks.size, config.seq_length).hidden_size
    try:
        at_end.enter_context(shared_buffers(engine, config.precision, ranks, rows, hidden_size))
    except Unavailable as error:
        raise RankError(
            f"--tp-comm-overlap with --transformer-impl transformer_engine needs that package, which on rank "
            f"{topology.rank} {error}: fix this, use --transformer-impl local, or remove --tp-comm-overlap."
        ) from error
