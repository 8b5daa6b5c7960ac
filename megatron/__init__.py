"""Megatron-Llama: model-parallel pretraining of Llama models, from two CPU processes to a cluster."""

import sys

if sys.platform == "win32":
    raise ImportError("Megatron-Llama runs on Linux and macOS: on Windows, install it in WSL 2, which is Linux.")
