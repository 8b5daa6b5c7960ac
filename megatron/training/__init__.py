"""A training run: build, loop, checkpoints, profiles."""
