"""The whole model on a rank, run without the pipeline's executor."""

from torch import Tensor

from megatron.core.models.transformer import TransformerModel


def logits_of(model: TransformerModel, tokens: Tensor) -> Tensor:
    """Token ids ``[b, s]`` to this rank's part of the logits ``[s, b, v/tp]``."""
    hidden = tokens
    for chunk in model.chunks:
        hidden = chunk(hidden)
    return hidden


def token_losses_of(model: TransformerModel, tokens: Tensor, labels: Tensor) -> Tensor:
    """Ids and labels ``[b, s]`` to the loss of every token ``[b, s]``."""
    assert model.output_layer is not None
    losses: Tensor = model.output_layer.token_losses(logits_of(model, tokens), labels)
    return losses
