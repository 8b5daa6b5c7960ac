"""Every private name of torch that this code uses, so that an upgrade of torch touches one file.

``tests/core/test_torch_compat.py`` has a test for each, which names what a new version has changed. Modules that
``import torch`` does not load are imported on use.
"""

import gc
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data._utils import signal_handling

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_unflatten",
]

disable_dispatch_modes = _disable_current_modes
"""Context manager: operations inside are real, whatever dispatch modes are active."""

# torch 2.13 renamed the collectives on one contiguous tensor.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

scaled_mm: Callable[..., Tensor] = torch._scaled_mm
"""The product of two FP8 matrices."""

_aten = torch.ops.aten
cpu_flash_attention: Any = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention: Any = _aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = _aten._scaled_dot_product_flash_attention_backward
varlen_flash_attention: Any = _aten._flash_attention_forward
varlen_flash_attention_backward: Any = _aten._flash_attention_backward
cudnn_attention: Any = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward: Any = _aten._scaled_dot_product_cudnn_attention_backward
local_scalar: Any = _aten._local_scalar_dense.default
"""What ``tensor.item()`` calls."""


def onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's ``(inputs, weight, bias, "none", [], "")``, which torch's compiler uses; None if not built in."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def symmetric_memory_operators() -> Any:
    """GEMMs that overlap with an all-gather or a reduce-scatter over symmetric memory."""
    import torch.distributed._symmetric_memory  # defines them

    return torch.ops.symm_mem


def operator_schema(operator: Any) -> Any:
    """The schema of an operator that a dispatch mode receives: its name and arguments, and which of them it writes."""
    return operator._schema


def storage_id(storage: torch.UntypedStorage) -> int:
    """Equal for two tensors' storages if they are the same memory."""
    return storage._cdata


def wrapper_subclass(cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of ``cls`` without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def save_state_dict(*arguments: Any, **options: Any) -> Any:
    """The distributed checkpoint's save of one state dict, without the conversions of ``dcp.save``."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    return _save_state_dict(*arguments, **options)


def load_state_dict(*arguments: Any, **options: Any) -> Any:
    """The distributed checkpoint's load of one state dict."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    return _load_state_dict(*arguments, **options)


def fake_store() -> Any:
    """The store of the process group ``fake``, whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of the collectives of a gloo or NCCL group."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def release_meshes() -> None:
    """Free the process groups that DTensor's cache of operations keeps alive. Their threads must not outlive them: a
    thread that frees a tensor while the interpreter ends aborts the process."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()


def forget_workers(batches: object) -> None:
    """Take the worker processes of a loader's iterator out of the table of those whose deaths torch reports."""
    signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
