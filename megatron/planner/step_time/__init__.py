"""The time of a training step in closed form, fitted to published runs."""
