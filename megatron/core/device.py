"""The name of a device, the memory that torch has allocated on it, and copies to it."""

import torch
from torch import Tensor


def peak_memory(device: torch.device) -> dict[str, float]:
    """``peak_memory_gib``: the most that torch's GPU allocator has handed out so far; empty on a CPU."""
    return {} if device.type == "cpu" else {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}


def device_memory(device: torch.device) -> dict[str, float]:
    """Statistics of torch's GPU allocator under Megatron-LM's keys; empty on a CPU."""
    if device.type == "cpu":
        return {}
    counts = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": counts["reserved_bytes.all.current"],
        "mem-allocated-bytes": counts["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": counts["allocated_bytes.all.peak"],
        "mem-allocated-count": counts["allocation.all.current"],
    }


def memory_outside_allocator(device: torch.device) -> int:
    """Bytes in use on a GPU outside of torch's allocator: CUDA's context and kernels, NCCL, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def device_is_broken() -> bool:
    """Whether CUDA has failed in this process with an error that it returns from now on (an illegal address, an
    assertion in a kernel): only a new process can use the GPU again."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type != "cpu" else None


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to ``device``. The host does not wait, since the source of the copy is pinned."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
