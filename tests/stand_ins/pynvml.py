"""A stand-in for nvidia-ml-py with the functions that the checks call, under their names and with their values
(nvidia-ml-py 13.615.71). A test sets ``gpu``."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 0x8


T = TypeVar("T")


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """What the driver says about a GPU; None where it does not support a question."""

    free: int = 79 * 2**30
    total: int = 80 * 2**30
    uncorrected: int | None = 0
    remapped: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    reasons: int | None = 0x4
    """Power cap: normal under load."""
    xids: list[int] | None = field(default_factory=list)


gpu = Gpu()
asked: list[str] = []


def nvmlInit() -> None:
    pass


def nvmlDeviceGetHandleByUUID(uuid: str) -> Gpu:
    asked.append(uuid)
    return gpu


def nvmlDeviceGetMemoryInfo(handle: Gpu, version: object = None) -> SimpleNamespace:
    return SimpleNamespace(total=handle.total, free=handle.free, used=handle.total - handle.free)


def nvmlDeviceGetTotalEccErrors(handle: Gpu, errorType: int, counterType: int) -> int:
    assert (errorType, counterType) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return supported(handle.uncorrected)


def nvmlDeviceGetRemappedRows(device: Gpu) -> tuple[int, int, int, int]:
    return supported(device.remapped)


def nvmlDeviceGetCurrentClocksEventReasons(handle: Gpu) -> int:
    return supported(handle.reasons)


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(handle: Gpu, eventTypes: int, eventSet: list[int]) -> None:
    assert eventTypes == nvmlEventTypeXidCriticalError
    eventSet.extend(supported(handle.xids))


def nvmlEventSetWait_v2(eventSet: list[int], timeoutms: int) -> SimpleNamespace:
    if not eventSet:
        raise NVMLError("Timeout")
    return SimpleNamespace(eventData=eventSet.pop(0))


def nvmlEventSetFree(eventSet: list[int]) -> None:
    assert not eventSet


def supported(value: T | None) -> T:
    if value is None:
        raise NVMLError("Not Supported")
    return value
