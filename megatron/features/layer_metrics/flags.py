"""The flags for metrics of single layers."""

from dataclasses import dataclass

from megatron.flags import require_at_least, values_of


@dataclass(frozen=True)
class LayerMetricsFlags:
    """Metrics of single layers, for the files and plots."""

    log_layer_norms_interval: int = 0
    """Every so many iterations, log for each layer the L2 norms of its gradient (before clipping) and of its weights,
    and the norm of the update over that of the weights; 0: never. During the update it takes the memory of one more
    copy of this rank's master weights."""
    log_max_attention_logit: bool = False
    """Log the largest attention logit (the scaled product of a query and a visible key) of all layers and of each, at
    the iterations of --log-layer-norms-interval, by default in the last of each --log-interval. These iterations
    compute the products once more."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "log_layer_norms_interval"))
