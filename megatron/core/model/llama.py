"""The whole model, as this rank holds it."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron.config.model import LlamaConfig
from megatron.core.initialization import initialize_parameters
from megatron.core.model.layer import BuildContext, RMSNorm, TransformerLayer
from megatron.core.ops.rope import rotary_frequencies, rotary_table
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, VocabParallelHead, column_parallel_linear

VocabularyModule = TypeVar("VocabularyModule", VocabParallelEmbedding, VocabParallelHead)


class LlamaModel(nn.Module):
    """Llama, divided over the tensor-parallel ranks of ``context``; weights are left uninitialised."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.embedding = self._vocabulary(VocabParallelEmbedding, "embedding.word_embeddings")
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(number, config, context) for number in range(config.num_layers)}
        )
        self.final_layernorm = RMSNorm("final_layernorm", config.hidden_size, config.norm_epsilon, context)
        self.output_layer = (
            self._vocabulary(VocabParallelHead, "output_layer") if config.untie_embeddings_and_output_weights else None
        )
        self._rotary: Tensor | None = None

    def _vocabulary(self, kind: type[VocabularyModule], name: str) -> VocabularyModule:
        return kind(
            name,
            self.config.vocab_size,
            self.config.padded_vocab_size,
            self.config.hidden_size,
            self.context,
            self.config.init_method_std,
        )

    def rotary(self, length: int) -> Tensor:
        """Rotations of positions ``0..length-1`` (kept for the next call)."""
        if self._rotary is None or self._rotary.shape[0] != length:
            config = self.config
            frequencies = rotary_frequencies(
                config.kv_channels,
                config.rotary_base,
                scaling_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
                original_length=config.rope_scaling_original_length,
            )
            positions = torch.arange(length, device=self.context.device)
            self._rotary = rotary_table(frequencies, positions, self.context.dtype)
        return self._rotary

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to this rank's part of the logits, ``[s, b, v/tp]``, padding included."""
        hidden = self.embedding(tokens)
        rotary = self.rotary(tokens.shape[1])
        for layer in self.layers.values():
            hidden = layer(hidden, rotary)
        hidden = self.final_layernorm(hidden)
        if self.output_layer is None:
            return column_parallel_linear(hidden, self.embedding.weight, self.context.parallel)
        logits: Tensor = self.output_layer(hidden)
        return logits

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token: ids and labels ``[b, s]`` to ``[b, s]`` in fp32 or wider."""
        loss = vocab_parallel_cross_entropy(
            self.logits(tokens),
            labels.t(),
            self.embedding.first_id,
            self.config.vocab_size,
            self.context.parallel.communicator,
        )
        return loss.t()


def build_model(config: LlamaConfig, context: BuildContext, seed: int) -> LlamaModel:
    """A model with its initial weights, the same in every layout."""
    model = LlamaModel(config, context)
    initialize_parameters(model.parameters(), seed)
    return model
