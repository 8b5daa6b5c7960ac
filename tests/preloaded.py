"""What the processes that tests fork have imported already: torch alone costs each of them seconds."""

import pytest
import torch.distributed.checkpoint

from megatron.commands import pretrain_llama
from megatron.training import pretrain

__all__ = ["pretrain", "pretrain_llama", "pytest", "torch"]
