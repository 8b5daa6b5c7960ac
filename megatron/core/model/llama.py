"""Llama as one rank holds it: all of it, or the chunks of a pipeline stage."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron.config.model import LlamaConfig
from megatron.config.stages import VirtualStage
from megatron.core.gradient import WeightGradientQueue
from megatron.core.initialization import initialize_parameters
from megatron.core.model.layer import BuildContext, RecomputedLayers, RMSNorm, TransformerLayer
from megatron.core.offload import HostCopies, run_offloaded
from megatron.core.ops.documents import Documents
from megatron.core.ops.rope import rotary_frequencies, rotary_table
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, VocabParallelTable, column_parallel_linear


class RotaryTables:
    """The rotations of this rank's positions; where these depend on the length alone, kept for the next call."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        self._config, self._context = config, context
        self._table: Tensor | None = None

    def __call__(self, length: int, documents: Documents | None = None) -> Tensor:
        """``[length, 1, 1, head size / 2]``, complex, for this rank's ``length`` positions of a sequence; where they
        count from the beginning of ``documents``, ``[length, b, 1, head size / 2]``."""
        if documents is not None and documents.resets_positions:
            return self._rotations(documents.positions()[self._positions(length)])
        if self._table is None or self._table.shape[0] != length:
            self._table = self._rotations(self._positions(length))
        return self._table

    def _positions(self, length: int) -> Tensor:
        split = self._context.context_parallel.split
        return split.positions(length * split.size)

    def _rotations(self, positions: Tensor) -> Tensor:
        config = self._config
        frequencies = rotary_frequencies(
            config.kv_channels,
            config.rotary_base,
            scaling_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
            original_length=config.rope_scaling_original_length,
        )
        return rotary_table(frequencies, positions.to(self._context.device), self._context.dtype)


class LlamaHead(nn.Module):
    """Final norm, logits and loss; ``output_layer`` may be a tied embedding."""

    def __init__(self, config: LlamaConfig, context: BuildContext, output_layer: VocabParallelTable) -> None:
        super().__init__()
        self.config = config
        # A queue that nobody holds: to compute the weight gradient later would keep the logits' gradient, which is
        # larger than all that a layer keeps.
        self.context = replace(context, weight_gradients=WeightGradientQueue())
        self.final_layernorm = RMSNorm("final_layernorm", config.hidden_size, config.norm_epsilon, context)
        self.output_layer = output_layer

    def forward(self, hidden: Tensor) -> Tensor:
        """``[s(/tp), b, h]`` to this rank's part of the logits, ``[s, b, v/tp]``, padding included."""
        return column_parallel_linear(self.final_layernorm(hidden), self.output_layer.weight, self.context)

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token, ``[b, s]`` in fp32 or wider, from ``logits`` and ``labels`` ``[b, s]``."""
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.t(),
            self.output_layer.first_id,
            self.config.vocab_size,
            self.context.parallel.communicator,
            self.context.kernel_device,
        )
        return loss.t()


class LlamaChunk(nn.Module):
    """One virtual stage: some layers, at the ends of the model with the embedding before or the head behind them.

    Its ``layers`` are single layers, or several that are recomputed as one; ``copies`` takes activations to the host.
    """

    def __init__(
        self,
        layers: Sequence[TransformerLayer],
        rotary: RotaryTables,
        context: BuildContext,
        embedding: VocabParallelEmbedding | None,
        head: LlamaHead | None,
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__()
        self.rotary, self.copies = rotary, copies
        self.sequence_parts = context.parallel.sequence_parts
        self.embedding = embedding
        plan = context.activations.units(len(layers))
        sharers = context.parallel.communicator if context.activations.distribute_saved_activations else None
        self.layers = nn.ModuleList(
            RecomputedLayers([layers[place] for place in unit.layers], sharers)
            if unit.is_recomputed
            else layers[unit.layers.start]
            for unit in plan
        )
        self.head = head
        self.is_offloaded = [*(unit.is_offloaded for unit in plan), *([] if head is None else [False])]

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, layers and head, where they are here, in the order of the forward pass; layers that are recomputed
        as one are one unit."""
        return [unit for unit in (self.embedding, *self.layers, self.head) if unit is not None]

    def forward(self, inputs: Tensor, documents: Documents | None = None) -> Tensor:
        """Token ids ``[b, s]`` at the start of the model, elsewhere activations ``[s(/tp), b, h]``, to activations,
        or at the end to this rank's part of the logits ``[s, b, v/tp]``; ``s`` are this rank's positions."""
        if self.embedding is None:
            length, hidden = inputs.shape[0] * self.sequence_parts, inputs
        else:
            length, hidden = inputs.shape[1], self.embedding(inputs)
        rotary = self.rotary(length, documents)
        functions: list[Callable[[Tensor], Tensor]] = [
            partial(layer, rotary=rotary, documents=documents) for layer in self.layers
        ]
        if self.head is not None:
            functions.append(self.head)
        if self.copies is not None and torch.is_grad_enabled():
            return run_offloaded(functions, self.is_offloaded, hidden, self.copies)
        for function in functions:
            hidden = function(hidden)
        return hidden


class LlamaModel(nn.Module):
    """This rank's chunks of Llama, divided over the tensor-parallel ranks; weights are left uninitialised.

    ``virtual_stages`` say what each chunk holds; the whole model by default.
    """

    def __init__(
        self, config: LlamaConfig, context: BuildContext, virtual_stages: Sequence[VirtualStage] | None = None
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        whole = VirtualStage(range(config.num_layers), has_embedding=True, has_head=True)
        self.virtual_stages = (whole,) if virtual_stages is None else tuple(virtual_stages)
        rotary = RotaryTables(config, context)
        copies = HostCopies.of(context.device) if context.activations.cpu_offloading_num_layers else None
        embedding = self._embedding() if self._has_embedding else None
        head = LlamaHead(config, context, self._output_layer(embedding)) if self._has_head else None
        self.chunks = nn.ModuleList(
            LlamaChunk(
                [TransformerLayer(number, config, context) for number in virtual_stage.layers],
                rotary,
                context,
                embedding if virtual_stage.has_embedding else None,
                head if virtual_stage.has_head else None,
                copies,
            )
            for virtual_stage in self.virtual_stages
        )

    @property
    def chunk_units(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Every chunk, and its embedding, layers and head in the order of the forward pass."""
        return [(chunk, cast(LlamaChunk, chunk).units) for chunk in self.chunks]

    @property
    def head(self) -> LlamaHead | None:
        """The head, on the rank that has it."""
        return cast(LlamaHead | None, self.chunks[-1].head)

    @property
    def _has_embedding(self) -> bool:
        return any(virtual_stage.has_embedding for virtual_stage in self.virtual_stages)

    @property
    def _has_head(self) -> bool:
        return any(virtual_stage.has_head for virtual_stage in self.virtual_stages)

    @property
    def _vocabulary(self) -> tuple[int, int, int, BuildContext, float]:
        config = self.config
        return config.vocab_size, config.padded_vocab_size, config.hidden_size, self.context, config.init_method_std

    def _embedding(self) -> VocabParallelEmbedding:
        is_tied = not self.config.untie_embeddings_and_output_weights
        return VocabParallelEmbedding(
            "embedding.word_embeddings",
            *self._vocabulary,
            uses=2 if is_tied and self._has_head else 1,
            tied_end="embedding" if is_tied and not self._has_head else None,
        )

    def _output_layer(self, embedding: VocabParallelEmbedding | None) -> VocabParallelTable:
        if self.config.untie_embeddings_and_output_weights:
            return VocabParallelTable("output_layer", *self._vocabulary)
        return embedding or VocabParallelTable("embedding.word_embeddings", *self._vocabulary, tied_end="head")

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to this rank's part of the logits, ``[s, b, v/tp]``; for a rank with the whole model."""
        assert self._has_embedding and self._has_head
        hidden = tokens
        for chunk in self.chunks:
            hidden = chunk(hidden)
        return hidden

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token: ids and labels ``[b, s]`` to ``[b, s]`` in fp32 or wider; for the whole model."""
        assert self.head is not None
        return self.head.token_losses(self.logits(tokens), labels)


def build_model(
    config: LlamaConfig, context: BuildContext, seed: int, virtual_stages: Sequence[VirtualStage] | None = None
) -> LlamaModel:
    """A rank's part of the model with its initial weights, the same in every layout."""
    model = LlamaModel(config, context, virtual_stages)
    initialize_parameters(model.parameters(), seed)
    return model
