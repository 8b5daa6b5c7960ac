"""Megatron-Llama: model-parallel pretraining of Llama models, from two CPU processes to a cluster."""
