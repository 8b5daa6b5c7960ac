"""Clock, power, temperature and memory of the GPU while lines run, read through NVML outside of their processes."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from benchmarks.gpu_lines.line import Figures

INTERVAL = 0.5
"""Seconds between two readings."""
REASONS = {
    0x01: "idle",
    0x02: "clock setting",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software heat limit",
    0x40: "heat",
    0x80: "power brake",
}
"""NVML's reasons for a clock below the largest, by their bit."""


@dataclass(frozen=True)
class GpuState:
    """A reading."""

    at: float
    """:func:`time.monotonic`."""
    sm_clock_mhz: int
    power_w: float
    temperature_c: int
    throttle: int
    """Bits of :data:`REASONS`."""
    memory_bytes: int
    """In use, by all processes and the driver."""
    utilization_percent: int

    def figures(self) -> Figures:
        """Without the time; reasons by name."""
        named = [name for bit, name in REASONS.items() if self.throttle & bit]
        return {name: value for name, value in asdict(self).items() if name != "at"} | {"throttle": ", ".join(named)}


class GpuWatch:
    """Reads the state of the first GPU twice a second, in a thread. Without nvidia-ml-py or a GPU there are no states.

    While it is open, the driver stays loaded, which otherwise takes each process a second to load.
    """

    def __init__(self) -> None:
        self._nvml = _find_nvml()
        self._states: list[GpuState] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuWatch":
        if self._nvml is not None:
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def read(self) -> GpuState | None:
        """The state now; None without a GPU, or if the driver does not answer."""
        nvml = self._nvml
        if nvml is None:
            return None
        with suppress(nvml.NVMLError):
            handle = self._handle
            return GpuState(
                time.monotonic(),
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                nvml.nvmlDeviceGetMemoryInfo(handle).used,
                nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            )
        return None

    def since(self, start: float) -> Figures:
        """Extremes of the readings since ``start``; empty without any."""
        return extremes([state for state in self._states if state.at >= start])

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            state = self.read()
            if state is not None:
                self._states.append(state)


def extremes(states: Sequence[GpuState]) -> Figures:
    """Largest power, temperature and memory of ``states``, all reasons for low clocks, and the lowest clock while
    kernels ran."""
    if not states:
        return {}
    busy = [state for state in states if state.utilization_percent >= 50]
    reasons = [name for bit, name in REASONS.items() if any(state.throttle & bit for state in busy)]
    return {
        "most_power_w": max(state.power_w for state in states),
        "most_temperature_c": max(state.temperature_c for state in states),
        "most_memory_bytes": max(state.memory_bytes for state in states),
        "least_busy_sm_clock_mhz": min((state.sm_clock_mhz for state in busy), default=None),
        "throttle_while_busy": ", ".join(reasons),
    }


def _find_nvml() -> Any:
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the module's own errors are only known with the module
        return None
    return nvml
