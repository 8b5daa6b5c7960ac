"""All flag groups of one run, and the checks that cross groups."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.config.activations import ActivationConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.dry_run import DryRunConfig
from megatron.config.errors import ConfigError
from megatron.config.kernels import KernelConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import FP8_UNITS, LearningRateConfig, OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import SCHEDULES, PipelineConfig
from megatron.config.training import TrainingConfig, ValidationConfig


@dataclass(frozen=True)
class RunConfig:
    """The flags of ``pretrain_llama.py``, by purpose."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model architecture."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallel layout."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """Activation memory."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    """Kernels."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training loop."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)
    """Learning-rate schedule."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Precision."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Metrics and their writers."""
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    """Dry run."""

    def check(self, world_size: int) -> None:
        """Raise :class:`ConfigError` for the first flag or combination that cannot be honoured.

        ``world_size`` is the number of processes of the run. With ``--use-checkpoint-args`` the architecture is not
        known yet: what depends on it is left to :meth:`check_architecture`.
        """
        for group in (
            self.model,
            self.parallel,
            self.pipeline,
            self.activations,
            self.kernels,
            self.training,
            self.optimizer,
            self.learning_rate,
            self.precision,
            self.data,
            self.tokenizer,
            self.validation,
            self.checkpoint,
            self.logging,
            self.dry_run,
        ):
            group.check()
        for check in CROSS_GROUP_CHECKS:
            check(self, world_size)
        if not self.checkpoint.use_checkpoint_args:
            self.check_architecture(world_size)

    def check_architecture(self, world_size: int) -> None:
        """Raise :class:`ConfigError` for the first size of the model that is missing, or does not fit the layout."""
        for check in ARCHITECTURE_CHECKS:
            check(self, world_size)

    @property
    def seq_length(self) -> int:
        """``--seq-length``, which :meth:`check` requires."""
        assert self.data.seq_length is not None
        return self.data.seq_length

    @property
    def micro_batch_size(self) -> int:
        """``--micro-batch-size``, which :meth:`check` requires."""
        assert self.training.micro_batch_size is not None
        return self.training.micro_batch_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among ``world_size`` ranks."""
        return self.parallel.data_parallel_size(world_size)


def _check_required(run: RunConfig, world_size: int) -> None:
    required = {
        "--seq-length": run.data.seq_length,
        "--micro-batch-size": run.training.micro_batch_size,
        "--lr": run.learning_rate.lr if not run.validation.skip_train else 0.0,
        "--train-iters (or --train-samples)": run.training.train_iters or run.training.train_samples,
    }
    for flag, value in required.items():
        if value is None:
            raise ConfigError(f"{flag} is missing: training needs it.")


def _check_data_source(run: RunConfig, world_size: int) -> None:
    if not run.data.sources:
        raise ConfigError("No data: give --data-path with a tokenized corpus, or --mock-data.")
    if run.tokenizer.tokenizer_type is None and not run.data.mock_data:
        raise ConfigError("--tokenizer-type is missing: --data-path needs the tokenizer that made the corpus.")
    if run.tokenizer.tokenizer_type is None and run.tokenizer.vocab_size is None:
        raise ConfigError("--mock-data without a tokenizer needs --vocab-size.")


def _check_tensor_parallel(run: RunConfig, world_size: int) -> None:
    size = run.parallel.tensor_model_parallel_size
    model = run.model.resolve(1, size, run.data.seq_length or 1)
    for flag, value in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
    ):
        if value % size:
            raise ConfigError(
                f"{flag} {value} is not divisible by --tensor-model-parallel-size {size}: lower the latter to a "
                f"divisor of {value}, or change the former."
            )
    if run.parallel.sequence_parallel and run.data.seq_length is not None and run.data.seq_length % size:
        raise ConfigError(
            f"--sequence-parallel splits the sequence over the tensor-parallel ranks, but --seq-length "
            f"{run.data.seq_length} is not divisible by --tensor-model-parallel-size {size}: change one of them."
        )


def _check_tensor_parallel_overlap(run: RunConfig, world_size: int) -> None:
    size = run.parallel.tensor_model_parallel_size
    if size == 1 or not run.parallel.tp_comm_overlap:
        return
    if not run.parallel.sequence_parallel:
        raise ConfigError(
            f"--tp-comm-overlap overlaps the collectives of --sequence-parallel, which --tensor-model-parallel-size "
            f"{size} does not imply: add --sequence-parallel, or remove --tp-comm-overlap."
        )
    if run.model.transformer_impl == "transformer_engine":
        _check_transformer_engine_overlap(run)


def _check_transformer_engine_overlap(run: RunConfig) -> None:
    """What Transformer Engine's overlap takes for granted, most of it in silence."""
    parallel, precision = run.parallel, run.precision
    overlap = "--tp-comm-overlap with --transformer-impl transformer_engine"
    remedy = "use --transformer-impl local, or remove --tp-comm-overlap"
    if not precision.bf16:
        raise ConfigError(f"{overlap} adds up in bf16 and nothing else: add --bf16, {remedy}.")
    if parallel.tensor_model_parallel_size not in (2, 4, 8):
        raise ConfigError(
            f"{overlap} adds up over 2, 4 or 8 ranks, not --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size}: use one of these, {remedy}."
        )
    if not parallel.rank_order.startswith("tp-"):
        raise ConfigError(
            f"{overlap} is between neighbouring ranks, which --rank-order {parallel.rank_order} gives to other axes: "
            f"begin it with tp, {remedy}."
        )
    if precision.fp8_format is not None and precision.fp8_recipe == "blockwise":
        raise ConfigError(f"{overlap} does not send what --fp8-recipe blockwise scales: use another recipe, {remedy}.")


def _check_transformer_engine_buffers(run: RunConfig, world_size: int) -> None:
    parallel, size = run.parallel, run.parallel.tensor_model_parallel_size
    if size == 1 or not parallel.tp_comm_overlap or run.model.transformer_impl == "local":
        return
    length = run.data.seq_length or 128 * size
    # A quarter is sent at once, in words of eight numbers.
    sizes = {"--hidden-size": (run.model.resolve(1, size, length).hidden_size, 32)}
    if run.precision.fp8_format is not None and run.precision.fp8_recipe == "mxfp8":
        rows = (run.training.micro_batch_size or 1) * length // parallel.context_parallel_size // size
        name = "--micro-batch-size x --seq-length / --context-parallel-size / --tensor-model-parallel-size"
        sizes[name] = (rows, 128)
    for name, (value, unit) in sizes.items():
        if value % unit:
            raise ConfigError(
                f"--tp-comm-overlap with --transformer-impl transformer_engine takes multiples of {unit}, but {name} "
                f"is {value}: change one of them, use --transformer-impl local, or remove --tp-comm-overlap."
            )


def _check_context_parallel(run: RunConfig, world_size: int) -> None:
    parallel = run.parallel
    size, tensor_size = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    model = run.model.resolve(1, tensor_size, run.data.seq_length or 1)
    types = " ".join(parallel.cp_comm_type)
    if len(parallel.cp_comm_type) not in (1, model.num_layers):
        raise ConfigError(
            f"--cp-comm-type {types} names {len(parallel.cp_comm_type)} types for {model.num_layers} layers: give one "
            "for all, or one for each."
        )
    if size == 1:
        return
    length = run.data.seq_length
    parts = math.lcm(2 * size, size * tensor_size) if parallel.sequence_parallel else 2 * size
    if length is not None and length % parts:
        by = " and --sequence-parallel" if parallel.sequence_parallel and tensor_size > 1 else ""
        raise ConfigError(
            f"--seq-length {length} is not divisible by {parts}, into which --context-parallel-size {size}{by} cut it: "
            "change one of them."
        )
    heads = model.num_query_groups // tensor_size
    if "a2a" in parallel.cp_comm_type and heads % size:
        raise ConfigError(
            f"--cp-comm-type a2a divides the {heads} key-value heads of a rank over --context-parallel-size {size}, "
            "which does not go: use p2p or allgather, or a smaller size."
        )


def _check_pipeline(run: RunConfig, world_size: int) -> None:
    model = run.model.resolve(1, run.parallel.tensor_model_parallel_size, run.data.seq_length or 1)
    run.pipeline.check_stages(model.num_layers, run.parallel.pipeline_model_parallel_size)


def _check_activations(run: RunConfig, world_size: int) -> None:
    activations, parallel = run.activations, run.parallel
    size = parallel.tensor_model_parallel_size
    model = run.model.resolve(1, size, run.data.seq_length or 1)
    stages = run.pipeline.virtual_stages(model.num_layers, parallel.pipeline_model_parallel_size)
    layers = max(len(stage.layers) for stage in stages)
    for flag, count in (
        ("--recompute-num-layers", activations.recompute_num_layers),
        ("--cpu-offloading-num-layers", activations.cpu_offloading_num_layers),
    ):
        if count is not None and count > layers:
            raise ConfigError(f"{flag} {count} is more than the {layers} layers of a pipeline chunk: lower it.")
    if activations.distribute_saved_activations:
        _check_distributed_activations(run, size, model.hidden_size)


def _check_distributed_activations(run: RunConfig, size: int, hidden_size: int) -> None:
    flag, sizes = "--distribute-saved-activations", f"--tensor-model-parallel-size {size}"
    if run.parallel.sequence_parallel:
        raise ConfigError(f"{flag} divides what --sequence-parallel has divided already: remove it.")
    if size == 1:
        raise ConfigError(f"{flag} has nobody to divide with under {sizes}: remove it, or raise the latter.")
    if hidden_size % size:
        raise ConfigError(
            f"{flag} divides --hidden-size {hidden_size} over {sizes}, which does not go: change one, or remove {flag}."
        )


def _check_data_parallel(run: RunConfig, world_size: int) -> None:
    data_parallel = run.data_parallel_size(world_size)
    instances = run.parallel.num_distributed_optimizer_instances
    if run.parallel.sharding_strategy == "no_shard" and instances > 1:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} needs a sharded strategy such as "
            "--use-distributed-optimizer: add it, or remove the flag."
        )
    if data_parallel % instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} does not divide the data-parallel size "
            f"{data_parallel}: use one of its divisors."
        )


def _check_formats(run: RunConfig, world_size: int) -> None:
    if run.precision.fp64 and run.optimizer.use_precision_aware_optimizer:
        raise ConfigError("--fp64 keeps everything in fp64: remove it, or --use-precision-aware-optimizer.")


def _check_transformer_engine(run: RunConfig, world_size: int) -> None:
    precision, activations, flag = run.precision, run.activations, "--transformer-impl transformer_engine"
    if run.model.transformer_impl == "local":
        if precision.fp8_recipe in ("blockwise", "mxfp8"):
            hardware = "Hopper" if precision.fp8_recipe == "blockwise" else "Blackwell"
            raise ConfigError(
                f"--fp8-recipe {precision.fp8_recipe} needs kernels that Transformer Engine has on {hardware}, and "
                f"--transformer-impl local does not: use delayed or tensorwise, or {flag}."
            )
        return
    if precision.fp64:
        raise ConfigError(f"--fp64 is a format that {flag} does not know: use --transformer-impl local.")
    if run.pipeline.pipeline_schedule is not None and SCHEDULES[run.pipeline.pipeline_schedule].splits_backward:
        raise ConfigError(
            f"--pipeline-schedule {run.pipeline.pipeline_schedule} computes weight gradients apart from the backward "
            f"pass, and {flag} in it: use 1f1b or interleaved, or --transformer-impl local."
        )
    if activations.cpu_offloading_num_layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers would take to the host what {flag} saves, weights included: remove it, or "
            "use --transformer-impl local."
        )
    if "layernorm" in activations.modules:
        raise ConfigError(
            f"--recompute-modules layernorm has no norm of its own to recompute under {flag}, where the norm and the "
            "projection are one module: remove layernorm, or use --transformer-impl local."
        )
    if precision.fp8_format is None:
        return
    if precision.fp8_recipe == "delayed" and activations.granularity is not None:
        raise ConfigError(
            f"--recompute-granularity {activations.granularity} would run layers twice, of which --fp8-recipe delayed "
            f"under {flag} counts each run: use another recipe, keep the activations, or use --transformer-impl local."
        )
    if run.parallel.sharding_strategy == "optim_grads_params":
        raise ConfigError(
            f"--fp8-format with {flag} keeps FP8 copies of whole weights, of which --data-parallel-sharding-strategy "
            "optim_grads_params keeps shards: use optim_grads, or --transformer-impl local."
        )


def _check_fp8(run: RunConfig, world_size: int) -> None:
    if run.precision.fp8_format is None:
        return
    unit = FP8_UNITS[run.precision.fp8_recipe]
    size, context_size = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    length, samples = run.data.seq_length or unit, run.training.micro_batch_size or unit
    model = run.model.resolve(1, size, length)
    on_each_rank = {
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size / --tensor-model-parallel-size": model.ffn_hidden_size // size,
        "--num-attention-heads x --kv-channels / --tensor-model-parallel-size": model.query_size // size,
        "(--num-attention-heads + 2 x --num-query-groups) x --kv-channels / --tensor-model-parallel-size": (
            (model.query_size + 2 * model.key_value_size) // size
        ),
        "--micro-batch-size x --seq-length / --context-parallel-size": samples * length // context_size,
    }
    for formula, value in on_each_rank.items():
        if value % unit:
            raise ConfigError(
                f"FP8 products take sizes that are multiples of {unit}, but {formula} is {value}: change one of "
                "them, or remove --fp8-format."
            )
    _check_layers_in_bf16(run.precision, model.num_layers)


def _check_layers_in_bf16(precision: PrecisionConfig, num_layers: int) -> None:
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and start + end >= num_layers:
        raise ConfigError(
            f"--first-last-layers-bf16 keeps {start} + {end} of {num_layers} layers in bf16, so that --fp8-format has "
            "none left: lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or remove --fp8-format."
        )


def _check_fully_sharded(run: RunConfig, world_size: int) -> None:
    stages = run.parallel.pipeline_model_parallel_size
    copies = run.data_parallel_size(world_size) * run.parallel.context_parallel_size
    shards = copies // run.parallel.num_distributed_optimizer_instances
    if run.parallel.sharding_strategy != "optim_grads_params" or stages == 1 or shards == 1:
        return
    model = run.model.resolve(1, run.parallel.tensor_model_parallel_size, run.data.seq_length or 1)
    schedule = run.pipeline.schedule(model.num_layers, stages)
    if SCHEDULES[schedule].placement == "v" and not model.untie_embeddings_and_output_weights:
        raise ConfigError(
            f"--pipeline-schedule {schedule} puts both ends of a tied embedding on the first pipeline rank, in two "
            "chunks that optim_grads_params cannot gather together: use another schedule, another "
            "--data-parallel-sharding-strategy, or --untie-embeddings-and-output-weights."
        )


def _check_length(run: RunConfig, world_size: int) -> None:
    in_samples = run.training.train_samples is not None
    iteration_flags = {
        "--lr-decay-iters": run.learning_rate.lr_decay_iters,
        "--lr-warmup-iters": run.learning_rate.lr_warmup_iters or None,
        "--lr-wsd-decay-iters": run.learning_rate.lr_wsd_decay_iters,
    }
    sample_flags = {
        "--lr-decay-samples": run.learning_rate.lr_decay_samples,
        "--lr-warmup-samples": run.learning_rate.lr_warmup_samples or None,
        "--lr-wsd-decay-samples": run.learning_rate.lr_wsd_decay_samples,
    }
    length, wrong = ("--train-samples", iteration_flags) if in_samples else ("--train-iters", sample_flags)
    for flag, value in wrong.items():
        if value is not None:
            unit = "samples" if in_samples else "iters"
            raise ConfigError(f"{flag} does not go with {length}: use {flag.rsplit('-', 1)[0]}-{unit}.")


def _check_profile(run: RunConfig, world_size: int) -> None:
    missing = [rank for rank in run.logging.profile_ranks if not 0 <= rank < world_size]
    if missing:
        raise ConfigError(f"--profile-ranks {missing[0]} is none of the ranks 0 to {world_size - 1}: name one of them.")
    if run.logging.use_pytorch_profiler and run.logging.tensorboard_dir is None and run.checkpoint.save is None:
        raise ConfigError(
            "--use-pytorch-profiler writes its traces below --tensorboard-dir or --save: give one of them."
        )
    if run.logging.profile_pipeline is None:
        return
    if run.validation.skip_train:
        raise ConfigError("--profile-pipeline records an iteration, and --skip-train makes none: remove one of them.")
    iteration, length = run.logging.profile_pipeline_iteration, run.training.train_iters
    if length is not None and length < iteration:
        raise ConfigError(
            f"--profile-pipeline records iteration {iteration}, which --train-iters {length} does not reach: lower "
            "--profile-pipeline-iteration, or train longer."
        )


def _check_evaluation_batch(run: RunConfig, world_size: int) -> None:
    size, ranks = run.validation.eval_global_batch_size, run.data_parallel_size(world_size)
    unit = run.micro_batch_size * ranks
    if size is not None and size % unit:
        raise ConfigError(
            f"--eval-global-batch-size {size} does not divide into --micro-batch-size {run.micro_batch_size} x "
            f"data-parallel size {ranks}: use a multiple of {unit}."
        )


def _check_kernels(run: RunConfig, world_size: int) -> None:
    attention, adam = run.kernels.wanted("attention"), run.kernels.wanted("adam")
    backend = run.model.attention_backend
    if attention is not None and backend != "auto":
        raise ConfigError(f"{attention.flag} and --attention-backend {backend} choose the same kernel: remove one.")
    product = run.kernels.wanted("weight_gradient")
    if run.model.transformer_impl != "local" and product is not None and product.implementation != "in_place":
        raise ConfigError(
            f"{product.flag} does not reach the layers of --transformer-impl transformer_engine, which add to gradient "
            "buffers in place: remove it, or use --transformer-impl local."
        )
    if adam is None or adam.implementation == "torch":
        return
    other = "--optimizer sgd" if run.optimizer.optimizer == "sgd" else "--use-precision-aware-optimizer"
    if run.optimizer.optimizer == "sgd" or run.optimizer.use_precision_aware_optimizer:
        raise ConfigError(f"{adam.flag} does not go with {other}, which has an update of its own: remove one.")


def _check_dry_run(run: RunConfig, world_size: int) -> None:
    if not run.dry_run.dry_run:
        return
    for flag, is_given, reason in (
        ("--use-checkpoint-args", run.checkpoint.use_checkpoint_args, "reads no checkpoint"),
        ("--skip-train", run.validation.skip_train, "is about a training step"),
        ("--cpu-offloading-num-layers", run.activations.cpu_offloading_num_layers > 0, "cannot tell host from GPU yet"),
    ):
        if is_given:
            raise ConfigError(f"{flag} does not go with --dry-run, which {reason}: remove one of them.")


CROSS_GROUP_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    _check_required,
    _check_data_source,
    _check_tensor_parallel_overlap,
    _check_data_parallel,
    _check_formats,
    _check_transformer_engine,
    _check_length,
    _check_profile,
    _check_evaluation_batch,
    _check_kernels,
    _check_dry_run,
)
ARCHITECTURE_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    _check_tensor_parallel,
    _check_context_parallel,
    _check_pipeline,
    _check_activations,
    _check_fully_sharded,
    _check_fp8,
    _check_transformer_engine_buffers,
)
