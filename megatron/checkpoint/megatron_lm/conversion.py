"""Conversion from a checkpoint of Megatron-LM, block by block; memory holds one block of rows."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping
from megatron.checkpoint.hugging_face.read import WeightsImport
from megatron.checkpoint.megatron_lm.conversion import (
    MegatronWeights,
    architecture_of,
    arguments_in,
    shown,
    tokenizer_of,
)
from megatron.checkpoint.megatron_lm.torch_dist import COMMON, TorchDistCheckpoint
from megatron.checkpoint.streaming import Advance
from megatron.config.data import TokenizerConfig
from megatron.errors import CheckpointError

EMBEDDING = "embedding.word_embeddings.weight"


class MegatronCheckpoint:
    """The tensors and the arguments in ``directory``. Raises :class:`CheckpointError`."""

    def __init__(self, directory: Path) -> None:
        self.tensors = TorchDistCheckpoint(directory)
        self.where = str(directory / COMMON)
        """The file of the arguments."""
        self.arguments = arguments_in(self.tensors.common(), self.where)

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The flags of the tokenizer; without a type if it is not a tokenizer of this code."""
        return tokenizer_of(self.arguments)

    @property
    def tokenizer_type(self) -> str:
        """The tokenizer's type in the arguments, for messages."""
        return shown(self.arguments.get("tokenizer_type"))

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding, with padding. (The argument ``padded_vocab_size`` may be absent.)"""
        embedding = self.tensors.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.tensors.directory} has no {EMBEDDING}: choose a checkpoint of a language model."
            )
        return embedding.shape[0]


class MegatronImport(WeightsImport):
    """The model of a checkpoint of Megatron-LM as global tensors of this code.

    ``vocab_size`` is the number of ids without padding; None keeps all rows of the embedding. ``dtype`` None keeps the
    dtype of each tensor. Raises :class:`CheckpointError` for a checkpoint that is damaged or of an architecture that is
    not in the registry.
    """

    def __init__(self, source: MegatronCheckpoint, vocab_size: int | None, dtype: torch.dtype | None, advance: Advance):
        padded = source.vocabulary_rows
        if vocab_size is not None and vocab_size > padded:
            raise CheckpointError(
                f"{source.where} is of a model with {padded} rows of the vocabulary, which is less than the "
                f"{vocab_size} ids of the tokenizer: give the model's tokenizer, or lower --vocab-size."
            )
        rows = padded if vocab_size is None else vocab_size
        self.num_padding_rows = padded - rows
        """Rows of the vocabulary that are left out."""
        resolved = architecture_of(source.arguments, rows, source.where)
        self.architecture = replace(resolved, padded_vocab_size=rows)
        # Megatron-LM, too, stores the gain minus one.
        as_stored = replace(self.architecture, apply_layernorm_1p=False)
        weights = MegatronWeights(source.tensors, as_stored)
        super().__init__(weights, HuggingFaceMapping.of(as_stored), dtype, advance)
