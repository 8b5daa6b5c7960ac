"""Checks of numbers during training: replicas, replays, known products, finite weights."""
