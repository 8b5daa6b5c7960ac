"""One rank's share of a recipe without the other ranks: the same layers and shapes, and no communication.

What it computes is not the model's result, for sums over ranks miss the others' parts; how long it computes is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.checks import check_resolved_architecture
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import KernelConfig, PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.core.communication import CollectiveRecord, Communicator, Work
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.kernels.selection import Kernels, build_kernels
from megatron.core.models.parallelize import build_parallel_model
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.documents import Documents
from megatron.core.precision import number_formats
from megatron.core.topology import RankGrid, Topology
from megatron.core.transport.torch_distributed import Reduction
from megatron.flags import require_at_least


class SilentCommunicator(Communicator):
    """A group whose other ranks do not exist: results have the shapes of the collectives', made of own numbers.

    The copies are stand-ins for NCCL's kernels. Their reads and writes are recorded, because they take time of the
    device that a run spends otherwise.
    """

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Work[Tensor]:
        """``tensor`` as it is."""
        return Work((), lambda: tensor)

    def start_all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """``tensor`` once for every rank."""
        copies = tensor.repeat(self.size, *(1 for _ in tensor.shape[1:]))
        self.record("all_gather", tensor.nbytes + (1 if output is None else 3) * copies.nbytes)
        return Work((), lambda: copies if output is None else output.copy_(copies))

    def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """This rank's part of ``tensor``."""
        # A copy: a view would keep the whole alive.
        part = tensor.chunk(self.size)[self.rank].clone()
        self.record("reduce_scatter", (2 if output is None else 4) * part.nbytes)
        return Work((), lambda: part if output is None else output.copy_(part))


class LoneTopology(Topology):
    """A rank's place in a grid of which it is the only rank."""

    _moved_bytes = 0

    def communicator(self, *axes: str) -> Communicator:
        """The ranks along ``axes``, silent."""
        silent = SilentCommunicator(self.grid.group(self.rank, axes), self.rank, "x".join(axes))
        silent.observer = self._add_bytes
        return silent

    def _add_bytes(self, record: CollectiveRecord) -> None:
        self._moved_bytes += record.num_bytes

    def take_moved_bytes(self) -> int:
        """Bytes that stand-ins for collectives have read and written since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved


@dataclass(frozen=True)
class SliceConfig:
    """One rank's share of a recipe."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model architecture; --num-layers are those that this rank has."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Precision."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    """Kernels."""
    tensor_model_parallel_size: int = 1
    """Ranks that share a layer, of which one is measured, without communication."""
    sequence_parallel: bool = False
    """Divide the sequence over these ranks between the parallel regions."""
    with_head: bool = False
    """Add the embedding, the head and the loss to the layers."""
    vocab_size: int = 128256
    """Ids of the vocabulary; matters with --with-head."""
    seq_length: int = 4096
    """Tokens per sequence."""
    micro_batch_size: int = 1
    """Sequences per microbatch."""
    microbatches: int = 1
    """Microbatches per step; the gradients of all but the first are added to the gradient buffers."""
    documents: int | None = None
    """Mean length of documents: attention is restricted to documents of random (log-normal) lengths, which differ in
    every microbatch."""

    def check(self) -> None:
        """Raise :class:`~megatron.errors.ConfigError` on what cannot be built."""
        require_at_least(
            1,
            {
                "--tensor-model-parallel-size": self.tensor_model_parallel_size,
                "--vocab-size": self.vocab_size,
                "--seq-length": self.seq_length,
                "--micro-batch-size": self.micro_batch_size,
                "--microbatches": self.microbatches,
                "--documents": 1 if self.documents is None else self.documents,
            },
        )
        for group in (self.model, self.precision, self.kernels):
            group.check()
        check_resolved_architecture(self.run_config(), self.grid.world_size)

    @property
    def architecture(self) -> TransformerConfig:
        """The model, with as many layers as the slice has."""
        return self.model.resolve(self.vocab_size, self.tensor_model_parallel_size, self.seq_length)

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return number_formats(self.precision, self.run_config().optimizer).weight

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.micro_batch_size * self.seq_length

    @property
    def _num_stages(self) -> int:
        # A rank that has nothing but layers is one in the middle of a pipeline.
        return 1 if self.with_head else 3

    @property
    def grid(self) -> RankGrid:
        """The ranks of the run in which one has this slice."""
        return RankGrid(tp=self.tensor_model_parallel_size, pp=self._num_stages)

    def run_config(self) -> RunConfig:
        """The flags of that run."""
        return RunConfig(
            model=replace(self.model, num_layers=self.architecture.num_layers * self._num_stages),
            precision=self.precision,
            kernels=self.kernels,
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tensor_model_parallel_size,
                sequence_parallel=self.sequence_parallel,
                pipeline_model_parallel_size=self._num_stages,
            ),
            training=TrainingConfig(micro_batch_size=self.micro_batch_size),
            data=DataConfig(
                mock_data=True, seq_length=self.seq_length, reset_attention_mask=self.documents is not None
            ),
            tokenizer=TokenizerConfig(vocab_size=self.vocab_size),
        )

    def topology(self, device: torch.device, tensor_parallel_rank: int = 0) -> LoneTopology:
        """The place of one of these ranks."""
        stage = self._num_stages // 2
        return LoneTopology(self.grid, stage * self.tensor_model_parallel_size + tensor_parallel_rank, device)

    def random_documents(self, device: torch.device) -> Iterator[Documents | None]:
        """The documents of one microbatch after the other; None without ``--documents``."""
        generator = torch.Generator().manual_seed(self.run_config().training.seed)
        while True:
            yield None if self.documents is None else self._documents(self.documents, generator, device)

    def _documents(self, mean: int, generator: torch.Generator, device: torch.device) -> Documents:
        starts = torch.zeros(self.micro_batch_size, self.seq_length, dtype=torch.bool)
        for row in starts:
            # E[exp(x)] = exp(mu + 1/2) with x normal around mu, of variance 1.
            normal = torch.randn(1 + 8 * self.seq_length // mean, generator=generator)
            lengths = normal.sub(0.5).exp().mul(mean).round().clamp(min=1).long()
            positions = lengths.cumsum(0)
            row[positions[positions < self.seq_length]] = True
            row[0] = True
        return Documents(starts, masks_attention=True, resets_positions=False, device=device)

    def choose_kernels(self, topology: Topology) -> Kernels:
        """What computes each operation, as in a training run."""
        return build_kernels(self.run_config(), topology, self.vocab_size)

    def build(self, topology: Topology, kernels: Kernels | None = None) -> TransformerModel:
        """What that rank has of the model, its weights not initialised."""
        kernels = kernels or self.choose_kernels(topology)
        return build_parallel_model(self.run_config(), topology, self.vocab_size, kernels)

    def data_parallel(self, topology: Topology, model: TransformerModel) -> DataParallel:
        """The model under data parallelism, with its initial weights."""
        run = self.run_config()
        formats = number_formats(run.precision, run.optimizer)
        data_parallel = wrap_data_parallel(model, formats, topology, run.parallel, model.context.fp8)
        data_parallel.initialize(run.training.seed)
        return data_parallel
