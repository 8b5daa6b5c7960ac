"""The optimizer over a rank's param_shards, the global gradient norm, and the learning-rate schedule."""
