"""Triton kernels (``tests/triton_kernels`` tests them without a GPU)."""
