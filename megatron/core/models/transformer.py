"""A rank's part of a decoder-only transformer: the whole model, or the chunks of a pipeline stage."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.device import copy_to_device
from megatron.core.gradient import WeightGradStore
from megatron.core.models.layer import BuildContext, RMSNorm, SequencePositions
from megatron.core.models.multi_token_prediction import CrossEntropy, MultiTokenPrediction
from megatron.core.moe.routing import ExpertBalance
from megatron.core.ops.documents import Documents, chunked_attention
from megatron.core.ops.matmul import PlainGemm, SeparateWeightGradient
from megatron.core.ops.rope import query_scales, rotary_frequencies, rotary_table, yarn_frequencies
from megatron.core.tensor_parallel.cross_entropy import (
    ChunkedOutputLayer,
    VocabularyShard,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.layers import (
    LinearFunction,
    LinearOp,
    VocabParallelEmbedding,
    VocabParallelWeight,
)
from megatron.schedules.stages import VirtualStage


class PositionTables:
    """Rotations, query scales and spans of this rank's positions; kept while the shape of microbatches is the same."""

    def __init__(self, config: TransformerConfig, context: BuildContext) -> None:
        self._config, self._context = config, context
        self._frequencies = frequencies_of(config).to(context.device)
        self._shape: tuple[int, int] | None = None
        self._sequences: SequencePositions | None = None

    def __call__(self, length: int, rows: int, documents: Documents | None = None) -> SequencePositions:
        """The tables of this rank's ``length`` positions of ``rows`` sequences: rotations
        ``[length, 1, 1, head size / 2]``, complex; if positions restart at each document, or rows of a cache differ,
        ``[length, b, 1, head size / 2]``."""
        context, split = self._context, self._context.context_parallel.split
        if context.cache is not None:
            return self._with_spans(self._tables(context.cache.positions), rows, None)
        if documents is not None and documents.resets_positions:
            positions = documents.positions()[split.positions(documents.starts.shape[1])]  # [s/cp, b]
            return self._with_spans(self._tables(positions), rows, documents)
        if self._sequences is None or self._shape != (length, rows):
            self._shape = length, rows
            self._sequences = self._with_spans(self._tables(split.positions(length * split.size)), rows, None)
        return self._sequences if documents is None else self._with_spans(self._sequences, rows, documents)

    def _tables(self, positions: Tensor) -> SequencePositions:
        """The tables of ``positions`` ``[s/cp]`` or ``[s/cp, b]``."""
        config, dtype = self._config, self._context.dtype
        positions = copy_to_device(positions, self._context.device)
        scales = None
        if config.attention_temperature_tuning:
            scales = query_scales(
                positions, config.attention_temperature_floor, config.attention_temperature_scale, dtype
            )
        rotary = rotary_table(self._frequencies, positions, dtype, config.rotary_magnitude)
        return SequencePositions(rotary, query_scales=scales)

    def _with_spans(self, tables: SequencePositions, rows: int, documents: Documents | None) -> SequencePositions:
        size, spans = self._config.attention_chunk_size, None if documents is None else documents.attention
        if size is None:
            return replace(tables, spans=spans)
        length = tables.rotary.shape[0] * self._context.context_parallel.split.size
        chunks = chunked_attention(documents, size, rows, length, self._context.device)
        return replace(tables, spans=spans, chunks=chunks)


class OutputLayer(nn.Module):
    """Final norm, logits and loss; ``vocab_weight`` may be a tied embedding."""

    loss_chunk_size: int | None = None
    """Tokens whose logits are computed at a time for the loss; None: all."""
    has_z_loss: bool = False
    """Whether losses are ``[2, b, s/cp]``, the cross entropy and the squared log-sum-exp of the logits."""

    def __init__(self, config: TransformerConfig, context: BuildContext, vocab_weight: VocabParallelWeight) -> None:
        super().__init__()
        self.context = context
        self.multiplier = config.output_multiplier
        # The weight gradient is never deferred: that would keep the gradient of the logits, which is larger than all
        # saved tensors of a layer.
        gemm = PlainGemm(context.weight_gradient)
        self.op = LinearOp(context.parallel, gemm, WeightGradStore(), is_column=True)
        self.final_layernorm = RMSNorm("final_layernorm", config.hidden_size, config, context)
        self.vocab_weight = vocab_weight
        ranks, kernel = context.parallel.communicator, context.kernels.cross_entropy
        self.shard = VocabularyShard(vocab_weight.first_id, vocab_weight.num_ids, ranks, kernel)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        predict: Callable[[Tensor, CrossEntropy], Tensor] | None = None,
    ) -> Tensor:
        """``[s/(cp tp), b, h]`` to this rank's part of the logits, ``[s/cp, b, v/tp]``, padding included.

        With ``labels`` ``[b, s/cp]`` the result is that of :meth:`token_losses`, without the logits of all tokens.
        ``predict`` adds losses to the output of the final norm, which it is given.
        """
        normed = self.final_layernorm(hidden)  # [s/(cp tp), b, h]
        if predict is not None:
            normed = predict(normed, lambda hidden, labels: self._statistics(hidden, labels)[0].t())
        return self._logits(normed) if labels is None else self._losses(*self._statistics(normed, labels))

    def _logits(self, normed: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            normed = normed * self.multiplier  # smaller than the logits
        logits: Tensor = LinearFunction.apply(normed, self.vocab_weight.weight, self.op, self.op.input_layout(), False)
        return logits

    def _statistics(self, normed: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of ``labels`` ``[b, s/cp]`` and log-sum-exp of every token, ``[s/cp, b]`` each."""
        if self.loss_chunk_size is None:
            return vocab_parallel_cross_entropy(self._logits(normed), labels.t(), self.shard)
        if self.multiplier != 1.0:
            normed = normed * self.multiplier
        kernel = self.context.weight_gradient or SeparateWeightGradient()
        layer = ChunkedOutputLayer(self.loss_chunk_size, self.context.parallel, self.shard, kernel)
        return chunked_cross_entropy(normed, self.vocab_weight.weight, labels.t(), layer)

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token, ``[b, s]`` in fp32 or wider, from ``logits`` and ``labels`` ``[b, s]``; with
        ``has_z_loss`` ``[2, b, s]``."""
        return self._losses(*vocab_parallel_cross_entropy(logits, labels.t(), self.shard))

    def _losses(self, cross_entropy: Tensor, log_sum_exp: Tensor) -> Tensor:
        """The losses that :meth:`token_losses` returns, from two tensors ``[s, b]``."""
        if not self.has_z_loss:
            return cross_entropy.t()
        return torch.stack((cross_entropy.t(), log_sum_exp.t().square()))


class TransformerChunk(nn.Module):
    """One virtual stage: layers, after the embedding and before the output layer at the ends of the model."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        positions: PositionTables,
        context: BuildContext,
        embedding: VocabParallelEmbedding | None,
        output_layer: OutputLayer | None,
        future: MultiTokenPrediction | None = None,
    ) -> None:
        super().__init__()
        self.positions, self.fp8 = positions, context.fp8
        self.sequence_parts = context.parallel.sequence_parts
        self.embedding, self.layers, self.output_layer = embedding, nn.ModuleList(layers), output_layer
        self.future = future
        self.num_layers = len(layers)

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, layers, depths of multi-token prediction and output layer in the order of the forward pass; layers
        that are recomputed together are one unit."""
        future = () if self.future is None else (self.future.embedding, *self.future.depths)
        units = (self.embedding, *self.layers, *future, self.output_layer)
        return list(dict.fromkeys(unit for unit in units if unit is not None))

    def forward(
        self,
        inputs: Tensor,
        documents: Documents | None = None,
        labels: Tensor | None = None,
        future: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Token ids ``[b, s/cp]`` at the start of the model, elsewhere activations ``[s/(cp tp), b, h]``, to
        activations, or at the end to this rank's part of the logits ``[s/cp, b, v/tp]``; there with ``labels``
        ``[b, s/cp]`` to the loss of every token, and with the microbatch ``future`` the losses of multi-token
        prediction are added."""
        with nullcontext() if self.fp8 is None else self.fp8.forward_pass():
            if self.embedding is None:
                length, rows, hidden = inputs.shape[0] * self.sequence_parts, inputs.shape[1], inputs
            else:
                rows, length = inputs.shape  # [b, s/cp]
                hidden = self.embedding(inputs)  # [s/(cp tp), b, h]
                if torch.is_grad_enabled() and not hidden.requires_grad:
                    # The embedding is frozen. Recomputed segments and pipelines need a gradient of their input.
                    hidden = hidden.requires_grad_()
            positions = self.positions(length, rows, documents)
            # A unit of recompute or offload is called as a layer.
            for layer in self.layers:
                hidden = layer(hidden, positions)  # [s/(cp tp), b, h]
            if self.output_layer is None:
                return hidden
            if future is None:
                return self.output_layer(hidden, labels)
            assert self.future is not None
            predict = partial(self.future, positions=positions, microbatch=future)
            return self.output_layer(hidden, labels, predict)


class TransformerModel(nn.Module):
    """This rank's chunks of the model; weights are not initialised. ``virtual_stages`` are the chunks' contents; by
    default one chunk is the whole model."""

    def __init__(
        self, config: TransformerConfig, context: BuildContext, virtual_stages: Sequence[VirtualStage] | None = None
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        whole = VirtualStage(range(config.num_layers), has_embedding=True, has_output_layer=True)
        self.virtual_stages = (whole,) if virtual_stages is None else tuple(virtual_stages)
        has_embedding = any(stage.has_embedding for stage in self.virtual_stages)
        has_output_layer = any(stage.has_output_layer for stage in self.virtual_stages)
        # The output layer multiplies, and its rank looks tokens up, once for each depth of multi-token prediction. If
        # it uses the embedding's weight, tied or for lookups, that is one parameter if both are on this rank; else the
        # last stage has a copy.
        is_tied, depths = not config.untie_embeddings_and_output_weights, config.mtp_num_layers
        embedding = output_layer = future = None
        uses_at_end = depths + (1 + depths if is_tied else 0)
        stages = (0, -1) if uses_at_end and has_embedding != has_output_layer else ()
        if has_embedding or (has_output_layer and uses_at_end):
            uses = has_embedding + (uses_at_end if has_output_layer else 0)
            is_copy = not has_embedding
            embedding = VocabParallelEmbedding("embedding.word_embeddings", config, context, uses, stages, is_copy)
        if has_output_layer:
            weight: VocabParallelWeight | None = embedding
            if not is_tied or weight is None:
                weight = VocabParallelWeight("output_layer", config, context, uses=1 + depths)
            output_layer = OutputLayer(config, context, weight)
            if depths and embedding is not None:
                future = MultiTokenPrediction(config, context, embedding)
        self.future = future
        positions = PositionTables(config, context)
        self.chunks = nn.ModuleList(
            TransformerChunk(
                [
                    context.build_layer(number, config, context.of_layer(number, config.num_layers))
                    for number in virtual_stage.layers
                ],
                positions,
                context,
                embedding if virtual_stage.has_embedding else None,
                output_layer if virtual_stage.has_output_layer else None,
                future if virtual_stage.has_output_layer else None,
            )
            for virtual_stage in self.virtual_stages
        )

    @property
    def transformer_chunks(self) -> list[TransformerChunk]:
        return [cast(TransformerChunk, chunk) for chunk in self.chunks]

    @property
    def chunk_units(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Every chunk with its units."""
        return [(chunk, chunk.units) for chunk in self.transformer_chunks]

    @property
    def has_experts(self) -> bool:
        """Whether the whole model has experts."""
        return self.config.num_experts is not None

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """Losses, loads and biases of the routers; None for a dense model."""
        return None if self.context.experts is None else self.context.experts.balance

    @property
    def output_layer(self) -> OutputLayer | None:
        """The output layer, on the rank that has it."""
        return self.transformer_chunks[-1].output_layer


def frequencies_of(config: TransformerConfig) -> Tensor:
    """Angles per position, ``[head_size / 2]`` in fp64."""
    if config.position_embedding_type == "yarn":
        factor, length = config.yarn_rotary_scaling_factor, config.yarn_original_max_position_embeddings
        assert factor is not None and length is not None
        return yarn_frequencies(
            config.kv_channels,
            config.rotary_base,
            scaling_factor=factor,
            original_length=length,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            round_to_int=config.yarn_correction_range_round_to_int,
        )
    return rotary_frequencies(
        config.kv_channels,
        config.rotary_base,
        scaling_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
        original_length=config.rope_scaling_original_length,
        low_freq_factor=config.rope_scaling_low_freq_factor,
        high_freq_factor=config.rope_scaling_high_freq_factor,
    )
