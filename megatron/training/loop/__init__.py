"""The training loop: trainer, step, listeners, stopping."""
