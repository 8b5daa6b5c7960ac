"""All flag groups of one run."""

from dataclasses import dataclass, field

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import ActivationConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.compatibility import CompatibilityConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.dry_run import DryRunConfig, FlagFileConfig, PlanConfig
from megatron.config.model import ModelConfig, MoEConfig
from megatron.config.operation import LoggingConfig, OperationConfig
from megatron.config.parallel import ParallelConfig, PipelineConfig
from megatron.config.precision import KernelConfig, PrecisionConfig
from megatron.config.training import LearningRateConfig, OptimizerConfig, TrainingConfig, ValidationConfig


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

    @property
    def architecture(self) -> TransformerConfig:
        """The architecture with a vocabulary of one token, for checks of the other sizes."""
        return self.model.resolve(1, self.parallel.tensor_model_parallel_size, self.data.seq_length or 1)

    @property
    def seq_length(self) -> int:
        """``--seq-length``, which the checks require."""
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
        """``--micro-batch-size``, which the checks require."""
        assert self.training.micro_batch_size is not None
        return self.training.micro_batch_size

    @property
    def dataloader_timeout(self) -> float:
        """Seconds that a rank waits for a microbatch of its loader threads; 0 for no limit."""
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
