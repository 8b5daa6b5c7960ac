"""Checkpoints of Megatron-LM (``torch_dist``): read without unpickling, as weights of this code."""
