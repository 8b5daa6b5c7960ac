"""All flag groups of one run, and the order of the checks that cross groups."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial

from megatron.config.activations import ActivationConfig
from megatron.config.all_checks import run_all
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import attention, backends, experts, faults, layout, length, mup, operation, precision
from megatron.config.compatibility import CompatibilityConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.dry_run import DryRunConfig
from megatron.config.flag_files import FlagFileConfig
from megatron.config.kernels import KernelConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.operation import OperationConfig
from megatron.config.optimizer import LearningRateConfig, OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import PipelineConfig
from megatron.config.plan import PlanConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig, ValidationConfig


@dataclass(frozen=True)
class RunConfig:
    """The flags of ``pretrain_llama.py``, by group."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model architecture."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""
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
    operation: OperationConfig = field(default_factory=OperationConfig)
    """Operation."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Metrics and their writers."""
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    """Dry run."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Search of a layout."""
    flag_files: FlagFileConfig = field(default_factory=FlagFileConfig)
    """Flags from files."""
    compatibility: CompatibilityConfig = field(default_factory=CompatibilityConfig)
    """Compatibility."""

    def check(self, world_size: int) -> None:
        """Raise :class:`ConfigError` for every invalid flag or combination in a run of ``world_size`` processes.

        With ``--use-checkpoint-args`` the architecture is not known yet: call :meth:`check_architecture` later.
        """
        stages = [[getattr(self, group.name).check for group in fields(self)]]
        stages.append([partial(check, self, world_size) for check in CROSS_GROUP_CHECKS])
        if not self.checkpoint.use_checkpoint_args:
            stages.append([partial(check, self, world_size) for check in ARCHITECTURE_CHECKS])
        run_all(stages)

    def check_architecture(self, world_size: int) -> None:
        """Raise :class:`ConfigError` for every model size that is missing or incompatible with the layout."""
        run_all([[partial(check, self, world_size) for check in ARCHITECTURE_CHECKS]])

    @property
    def seq_length(self) -> int:
        """``--seq-length``, which :meth:`check` requires."""
        assert self.data.seq_length is not None
        return self.data.seq_length

    @property
    def masks_attention(self) -> bool:
        """Whether attention of some layers stays inside parts of the sequence: documents, or chunks that are shorter
        than the sequence or begin with every document."""
        chunk = self.model.attention_chunk_size
        has_chunks = chunk is not None and (chunk < self.seq_length or self.data.reset_position_ids)
        return self.data.masks_documents or has_chunks

    @property
    def micro_batch_size(self) -> int:
        """``--micro-batch-size``, which :meth:`check` requires."""
        assert self.training.micro_batch_size is not None
        return self.training.micro_batch_size

    @property
    def dataloader_timeout(self) -> float:
        """Seconds that a rank waits for a loader process; 0 for no limit."""
        seconds = self.data.dataloader_timeout
        return self.parallel.distributed_timeout_minutes * 30 if seconds is None else seconds

    @property
    def mock_vocab_size(self) -> int | None:
        """Vocabulary size under ``--mock-data`` without a tokenizer: ``--vocab-size``, otherwise of the preset."""
        return self.model.preset_vocab_size if self.tokenizer.vocab_size is None else self.tokenizer.vocab_size

    @property
    def has_two_tokenizer_files_alone(self) -> bool:
        """Whether a corpus has the two files of GPT2BPETokenizer, and no tokenizer is named."""
        tokenizer, is_named = self.tokenizer, self.tokenizer.tokenizer_type or self.tokenizer.tokenizer_model
        has_files = tokenizer.vocab_file is not None and tokenizer.merge_file is not None
        return has_files and not is_named and bool(self.data.sources) and not self.data.mock_data

    def data_parallel_size(self, world_size: int) -> int:
        return self.parallel.data_parallel_size(world_size)


CROSS_GROUP_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    length.check_required,
    length.check_data_source,
    length.check_loader_timeout,
    layout.check_tensor_parallel_overlap,
    backends.check_transformer_engine_overlap,
    layout.check_data_parallel,
    precision.check_formats,
    backends.check_transformer_engine,
    length.check_length,
    length.check_profile,
    length.check_data_stage,
    length.check_validation_sets,
    length.check_evaluation_batch,
    length.check_evaluation_of_average,
    operation.check_update_policies,
    backends.check_kernels,
    length.check_dry_run,
    faults.check_faults,
)
ARCHITECTURE_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    layout.check_tensor_parallel,
    attention.check_attention,
    mup.check_mup,
    experts.check_experts,
    experts.check_expert_layout,
    layout.check_context_parallel,
    layout.check_pipeline,
    layout.check_activations,
    experts.check_recomputed_modules,
    layout.check_fully_sharded,
    experts.check_expert_precision,
    experts.check_expert_optimizer,
    precision.check_fp8,
    backends.check_transformer_engine_buffers,
)
