"""The optimizer over a rank's pieces, the global gradient norm, and the learning-rate schedule."""
