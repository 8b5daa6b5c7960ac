"""Comparison of two runs that should agree (``megatron-llama diff``)."""
