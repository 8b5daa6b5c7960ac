"""The name of a device, and the memory that torch has allocated on it."""

import torch


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


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type != "cpu" else None
