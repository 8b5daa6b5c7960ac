"""Tensor parallelism: collectives with gradients, column- and row-parallel layers, the vocabulary-parallel loss.

Activations are ``[s, b, h]``; under sequence parallelism ``[s/tp, b, h]`` between the parallel regions.
Source: Megatron-LM (arXiv 1909.08053) and sequence parallelism (Korthikanti et al., arXiv 2205.05198).
"""
