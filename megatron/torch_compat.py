"""Every private name of torch that this code uses, so that an upgrade of torch touches one file.

``tests/core/test_torch_compat.py`` has a test for each that no other test computes with, which names what a new version
has changed. Modules that ``import torch`` does not load are imported on use.
"""

import gc
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from subprocess import Popen
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_unflatten",
]

LOOPBACK = "127.0.0.1"

# Context manager: operations inside are real, whatever dispatch modes are active.
disable_dispatch_modes = _disable_current_modes

# torch 2.13 renamed the collectives on one contiguous tensor.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The product of two FP8 matrices with a scale each.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm
# With scales of the kinds below; torch's public functional.scaled_mm calls it without `out`.
scaled_mm_of_kinds: Callable[..., Tensor] = torch._scaled_mm_v2
ScalingType: Any = torch.nn.functional.ScalingType
# Adds such a product to a tensor; torch 2.13 does not have it yet.
scaled_addmm_: Callable[..., Tensor] | None = getattr(torch.nn.functional, "scaled_addmm_", None)

_aten = torch.ops.aten
cpu_flash_attention: Any = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention: Any = _aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = _aten._scaled_dot_product_flash_attention_backward
varlen_flash_attention: Any = _aten._flash_attention_forward
varlen_flash_attention_backward: Any = _aten._flash_attention_backward
cudnn_attention: Any = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward: Any = _aten._scaled_dot_product_cudnn_attention_backward
varlen_cudnn_attention: Any = _aten._cudnn_attention_forward
varlen_cudnn_attention_backward: Any = _aten._cudnn_attention_backward
# What tensor.item() calls.
local_scalar: Any = _aten._local_scalar_dense.default
# Out variants that meta tensors lack, or that torch decomposes for them as if the dtype were beta.
WRITING_PRODUCTS = (_aten.addmm.dtype_out, _aten.baddbmm.dtype_out, _aten._scaled_mm.out, _aten._scaled_mm_v2.out)
# The update of AdamW on lists of tensors of one dtype.
fused_adamw_: Callable[..., None] = torch._fused_adamw_


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


def forward_hooks(module: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """What is called after the forward pass of ``module``, by identifier."""
    return module._forward_hooks


def forward_pre_hooks(module: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """What is called before the forward pass of ``module``, by identifier. Changes take effect."""
    return module._forward_pre_hooks


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


@contextmanager
def lazy_fsdp_chunks() -> Iterator[None]:
    """A context in which ``fully_shard`` makes a view of this rank's shard of a parameter alone, not of every rank's.

    All views of an 8B model for 16,384 ranks take half a minute on every rank.
    """
    module = fsdp_parameters()
    original = module._chunk_with_empty
    module._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        module._chunk_with_empty = original


def fsdp_parameters() -> Any:
    """FSDP2's module of parameters."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param


class _Chunks:
    """``torch.chunk``, whose chunks are made on access; those beyond the tensor are empty."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        start = number * self._length
        length = min(self._length, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


def ranks_store() -> Any:
    """The store through which the ranks have joined; for a single process one in its memory."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    from torch._C._distributed_c10d import HashStore

    return HashStore()


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of the collectives of a gloo or NCCL group."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def release_meshes() -> None:
    """Free the process groups that DTensor's cache of operations keeps alive. Their threads must not outlive them: a
    thread that frees a tensor while the interpreter ends aborts the process."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        # Not torch.distributed.tensor.debug, which has a function for both: it imports torch's compiler, for seconds.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
    gc.collect()


def construct_optimizers_without_compiler() -> None:
    """Keep the constructor of every optimizer from loading torch's compiler, which takes most of a second, to exclude
    one of its methods from compilation."""
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if method is not None and not hasattr(method, "__dynamo_disable"):
        setattr(method, "__dynamo_disable", method)


def renew_store_address(rendezvous_handler: Any) -> None:
    """Let the nodes of the next c10d rendezvous agree on a new store for their ranks. torch 2.13 keeps the address of
    the first one, whose node may be gone, or no longer be the first."""
    if hasattr(rendezvous_handler, "_bootstrap_store_info"):
        rendezvous_handler._bootstrap_store_info = None


def listen_on_loopback() -> None:
    """Let the stores of torch's elastic agent accept connections from this host alone. torch has no option for it, and
    listens on all interfaces."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    def store(host_name: str, port: int, is_master: bool = False, **options: Any) -> Any:
        if is_master:
            listening = socket.create_server((LOOPBACK, port))
            host_name, port = LOOPBACK, listening.getsockname()[1]
            options["master_listen_fd"] = listening.detach()  # the store closes it
        return dist.TCPStore(host_name=host_name, port=port, is_master=is_master, **options)  # type: ignore[attr-defined]

    vars(c10d_rendezvous_backend)["TCPStore"] = store
    setattr(  # noqa: B010 (mypy takes an assignment for a mistake)
        dynamic_rendezvous.DynamicRendezvousHandler,
        "_create_tcp_store_server",
        lambda handler, address, port: store(address, port, is_master=True, multi_tenant=True),
    )


def leave_rendezvous(rendezvous_handler: Any, seconds: float) -> None:
    """Remove this node from a c10d rendezvous, as the next one does first: a node that waits may take its place."""
    if hasattr(rendezvous_handler, "_op_executor"):
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

        rendezvous_handler._stop_heartbeats()
        rendezvous_handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + seconds)


def rendezvous_members(rendezvous_handler: Any) -> set[int] | None:
    """The nodes that have not left the last c10d rendezvous, by their rank there: torch removes one whose launcher does
    not renew its entry. None for another kind of rendezvous."""
    holder = getattr(rendezvous_handler, "_state_holder", None)
    return None if holder is None else set(holder.state.participants.values())


def rendezvous_store(rendezvous_handler: Any) -> Any:
    """The store of a rendezvous, which also the launchers that wait for a place share; None if it has none (yet)."""
    return getattr(rendezvous_handler, "_store", None)


def connection_to(store: Any) -> Any:
    """A copy of ``store`` over a connection of its own, for another thread."""
    return store.clone()


def start_ranks_by(start: Callable[[Any, Sequence[str], Mapping[str, str]], Popen[Any]]) -> None:
    """Let torch's elastic agent start a process with ``start(handler, arguments, environment)``; ``start_rank`` is its
    own way. A handler has the ``local_rank_id`` and the files ``_stdout`` and ``_stderr`` (None: not redirected)."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class RankHandler(SubprocessHandler):
        def _popen(self, args: Any, env: dict[str, str]) -> Popen[Any]:
            return start(self, args, env)

    vars(api)["get_subprocess_handler"] = RankHandler


def handle_signals_by(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let torch's elastic agent, which installs a handler of signals at every start of the ranks, install this one."""
    from torch.distributed.elastic.multiprocessing import api

    vars(api)["_terminate_process_handler"] = handler


def start_rank(handler: Any, arguments: Sequence[str], environment: Mapping[str, str]) -> Popen[Any]:
    """Start a process as torch's elastic agent does."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    return SubprocessHandler._popen(handler, tuple(arguments), dict(environment))


def redirected_to(handler: Any) -> tuple[str | None, str | None]:
    """The files of standard output and standard error of a rank; None if they are not redirected."""
    stdout, stderr = (None if file is None else str(file.name) for file in (handler._stdout, handler._stderr))
    return stdout, stderr


def record_memory_history(max_entries: int) -> None:
    """Record the last ``max_entries`` allocations and frees of CUDA's allocator, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_history(path: str) -> None:
    """Write what was recorded, and the memory at present, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
