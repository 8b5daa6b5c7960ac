"""Stands in for Transformer Engine's: its own names of formats."""

import torch

TE_DType = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
