"""Metrics of single layers: norms of gradients and weights, update ratios, the largest attention logit."""
