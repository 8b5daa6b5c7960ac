"""Multi-token prediction (MTP): depth k predicts the token k + 1 positions ahead of every token (DeepSeek-V3, arXiv
2412.19437, section 2.2).

    h_k = norm(layer(W [norm(embedding(token i + k)); norm(h_(k-1))]))      W: [h, 2h]
    loss_k = cross entropy of the token i + k + 1, with the output layer of the model

``h_0`` is the output of the model's final norm. The depths are beside the output layer, on the last virtual stage. Its
rank has a copy of the embedding, if it has not the embedding. Labels and masks of all depths are cut from whole samples
where the data is read (:func:`megatron.data.gpt_dataset.add_future_tokens`), so no rank needs the tokens of others.

The training loss is ``loss_0 + factor / depths * sum of loss_k``, each a mean over its own unmasked tokens of the
global batch. Evaluation and generation have no depths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.communication import Communicator
from megatron.core.models.layer import BuildContext, RMSNorm, SequencePositions
from megatron.core.parameter import ParameterInfo, sharded_boxes
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""Normed hidden states ``[s/(cp tp), b, h]`` and labels ``[b, s/cp]`` to the cross entropy of every token."""


class PredictionDepth(nn.Module):
    """One depth; ``number`` is the number of its transformer layer, which follows those of the model."""

    def __init__(self, number: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        name, hidden, parallel = f"layers.{number}", config.hidden_size, context.parallel
        self.enorm = RMSNorm(f"{name}.enorm", hidden, config, context)
        self.hnorm = RMSNorm(f"{name}.hnorm", hidden, config, context)
        # Every tensor-parallel rank has the whole matrix and multiplies its own tokens: output and input are on the
        # residual stream, so that a divided matrix would need an all-to-all.
        info = ParameterInfo(
            f"{name}.eh_proj.weight",
            *sharded_boxes((hidden,), (2 * hidden,), rank=0, size=1),
            config.hidden_init_std,
            weight_decay=True,
            tensor_parallel_sharded=False,
            gradient_is_partial=parallel.sequence_parallel,
            fan_in_mult=config.width_mult,
            fan_out_mult=config.width_mult,
        )
        alone = TensorParallel(Communicator((0,), 0))
        self.eh_proj = ColumnParallelLinear(info, replace(context, parallel=alone, fp8=None))
        self.layer = context.build_layer(number, config, context.of_layer(number, config.num_layers))
        self.final_layernorm = RMSNorm(f"{name}.final_layernorm", hidden, config, context)

    def forward(self, hidden: Tensor, embedded: Tensor, positions: SequencePositions) -> Tensor:  # [s/(cp tp), b, h]
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)  # [s/(cp tp), b, 2h]
        output: Tensor = self.final_layernorm(self.layer(self.eh_proj(both), positions))
        return output


class MultiTokenPrediction(nn.Module):
    """The depths of a model on the rank of the output layer, and their losses."""

    def __init__(self, config: TransformerConfig, context: BuildContext, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self.embedding, self.losses, self.device = embedding, context.auxiliary_losses, context.device
        numbers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
        self.depths = nn.ModuleList(PredictionDepth(number, config, context) for number in numbers)
        self.scaling_factor = 0.1
        """``--mtp-loss-scaling-factor``."""
        self.ranks: Communicator | None = None
        """Ranks with other tokens."""
        self._weights: Tensor | None = None

    def start_step(self, microbatches: Sequence[Mapping[str, Tensor]]) -> None:
        """Compute the weights of the losses in a step, given its microbatches on this rank. A collective of ``ranks``.

        The sum of all token losses is divided by the unmasked tokens of the output layer. A depth has fewer.
        """
        counts = sum(
            torch.stack((one["loss_mask"].sum(), *one["future_mask"].sum(dim=(0, 2)))).double() for one in microbatches
        )
        assert isinstance(counts, Tensor), "a step has microbatches"
        counts = counts.to(self.device, non_blocking=True)  # [depths + 1]
        if self.ranks is not None:
            counts = self.ranks.all_reduce(counts)
        self._weights = self.scaling_factor / len(self.depths) * counts[0] / counts[1:].clamp(min=1.0)

    def forward(
        self,
        hidden: Tensor,
        cross_entropy: CrossEntropy,
        positions: SequencePositions,
        microbatch: Mapping[str, Tensor],
    ) -> Tensor:
        """``hidden`` ``[s/(cp tp), b, h]``, the output of the final norm, whose backward pass adds the gradients of the
        depths' losses."""
        assert self._weights is not None
        labels = torch.cat((microbatch["labels"].unsqueeze(1), microbatch["future_labels"]), dim=1)  # [b, 1 + D, s/cp]
        output = hidden
        for place, depth in enumerate(self.depths):
            # The label of the depth before is the token that this one reads.
            hidden = depth(hidden, self.embedding(labels[:, place]), positions)
            losses = cross_entropy(hidden, labels[:, place + 1])  # [b, s/cp]
            mask = microbatch["future_mask"][:, place].to(losses.dtype)
            weight = self._weights[place].to(losses.dtype)
            output = self.losses.add(mtp_metric(place), output, losses * mask, weight, mask.sum())
        return output


def mtp_metric(place: int) -> str:
    """The name of the loss of a depth, counted from 0."""
    return f"mtp_{place + 1}_loss"
