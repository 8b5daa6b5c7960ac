"""What the processes that tests fork have imported already: torch alone costs each of them seconds."""

import pytest
import torch._dynamo  # FSDP imports it with its first module
import torch.distributed.checkpoint

from megatron.commands import pretrain_llama
from megatron.core.data_parallel import fully_sharded
from megatron.training import pretrain

__all__ = ["fully_sharded", "pretrain", "pretrain_llama", "pytest", "torch"]
