"""The time of a step by groups of kernels, by torch's profiler or by samples of the stack, and the memory it allocates.

Unlike torch's profiler, samples show the waits for other ranks and do not slow small operators.
"""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

OTHER = "other"
KERNEL_GROUPS: tuple[tuple[str, str], ...] = (
    (OTHER, r"^autograd::|^torch::autograd|(?-i:Backward\d*$|^_[A-Z])"),
    ("attention", r"flash|fmha|scaled_dot_product|attention|sdpa"),
    ("optimizer", r"adam|sgd|multi_tensor|foreach"),
    ("communication and copies", r"nccl|c10d|gloo|memcpy|memset|copy|clone|contiguous|cat(array|\b)|fill|zero|repeat"),
    (
        "matrix products",
        r"gemm|gemv|splitk|cutlass|cublas|nvjet|xmma|wgmma|mkldnn::|aten::(b?mm|(b|ba)?addb?mm|linear|mv|addmv)_?\b",
    ),
    (
        "norm and elementwise",
        r"elementwise|reduce|norm|softmax|triton|cpp_fused|index|embedding|gather|scatter|masked|"
        r"aten::(add(cmul|cdiv)?|sub|mul|div|neg|exp|log(sumexp)?|pow|r?sqrt|square|sum|mean|amax|max|silu|sigmoid|"
        r"where|cos|sin|polar|lt|ge|le|gt|eq|ne|bitwise_\w+|logical_\w+)(_backward)?_?\b",
    ),
)
"""Groups in the order in which they are tried, each with the pattern of its kernels' names: of torch's operators on a
CPU, of CUDA kernels on a GPU. First what autograd calls its functions, which is not the work that they start."""


def kernel_group(name: str) -> str:
    """The group of a kernel (or, on a CPU, of an operator) by its name; ``other`` if no pattern fits.

    On a CPU the rest is Python, autograd, and operators that compute nothing.
    """
    return next((group for group, pattern in KERNEL_GROUPS if re.search(pattern, name, re.IGNORECASE)), OTHER)


MOST_KERNELS, MOST_CHARACTERS = 30, 100
"""Kernels in a profile, and characters of their names."""


@dataclass(frozen=True)
class StepProfile:
    """What the profiler saw of one step."""

    seconds: dict[str, float]
    """Seconds by kernel group, largest first; under the profiler, which slows small kernels."""
    longest: list[tuple[str, float, int]]
    """Name, seconds and calls of the kernels that took longest together, at most :data:`MOST_KERNELS`."""
    peak_bytes: int
    """Most that the step had allocated at once, beyond what was there before it (CPU: what torch allocated, thus
    without oneDNN's own memory; CUDA: by the caching allocator's count)."""


def profile_step(step: Callable[[], None], device: torch.device) -> StepProfile:
    """Run ``step`` twice, for its memory and under the profiler."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    cuda_peak = _peak_on_cuda(step, device) if on_gpu else 0
    with profile(activities=activities, profile_memory=not on_gpu, acc_events=True) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    kernels = _kernels(profiled, on_gpu)
    longest = [(name[:MOST_CHARACTERS], seconds, calls) for name, seconds, calls in kernels[:MOST_KERNELS]]
    return StepProfile(_seconds_by_group(kernels), longest, cuda_peak if on_gpu else _peak_on_cpu(profiled))


def _kernels(profiled: Any, on_gpu: bool) -> list[tuple[str, float, int]]:
    """Name, seconds and calls of every kernel (on a CPU, of every operator), longest first."""
    found = []
    for event in profiled.key_averages():
        # On a GPU only kernels count, not the operators that launch them.
        if (event.device_type == DeviceType.CUDA) == on_gpu:
            own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            found.append((str(event.key), own / 1e6, int(event.count)))
    return sorted(found, key=lambda kernel: -kernel[1])


def _seconds_by_group(kernels: Sequence[tuple[str, float, int]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, own, _ in kernels:
        group = kernel_group(name)
        seconds[group] = seconds.get(group, 0.0) + own
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _peak_on_cpu(profiled: Any) -> int:
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def _peak_on_cuda(step: Callable[[], None], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


# --- samples of the stack -------------------------------------------------------------------------------------------
GROUPS: tuple[tuple[str, str], ...] = (
    ("communication", r"megatron/core/(communication\.py|transport/)|torch/distributed/"),
    ("products", r"megatron/core/ops/(matmul|grouped)\.py"),
    ("attention", r"megatron/core/ops/attention\w*\.py"),
    ("norms, SwiGLU, rotary", r"megatron/core/ops/(norm|swiglu|rope)\.py"),
    ("loss", r"megatron/core/tensor_parallel/cross_entropy\.py"),
    ("optimizer", r"megatron/(core/optimizer\.py|update_rules/)"),
)
"""Groups with the files of their functions: the innermost function that is in one of them counts."""
INTERVAL = 1e-3
"""Seconds between two looks."""


def group_of(frame: FrameType | None) -> str:
    """The group of a stack by its innermost ``frame``; :data:`OTHER` if no function of it is in a group."""
    while frame is not None:
        for group, pattern in GROUPS:
            if re.search(pattern, frame.f_code.co_filename):
                return group
        frame = frame.f_back
    return OTHER


def time_by_group(run: Callable[[], None]) -> dict[str, float]:
    """The share of each group in the time of ``run``, which this thread calls."""
    thread, ended = threading.get_ident(), threading.Event()
    counts: Counter[str] = Counter()

    def look() -> None:
        while not ended.wait(INTERVAL):
            counts[group_of(sys._current_frames().get(thread))] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    total = max(1, counts.total())
    return {group: counts[group] / total for group in (*(name for name, _ in GROUPS), OTHER)}
