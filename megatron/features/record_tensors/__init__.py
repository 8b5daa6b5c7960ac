"""Fingerprints of every tensor of a training step, to compare it with another run's."""
