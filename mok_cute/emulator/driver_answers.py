"""What the CUDA driver and runtime bindings say while a script runs on the virtual device.

Scripts ask them for the device, its limits, streams and events before they launch anything. A function that is not
listed here fails as it does on a machine without a driver. Streams are those of the device; an event holds the time of
the host at which everything before it had run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver, runtime

from mok_cute.emulator.driver import device_attributes
from mok_cute.emulator.dsl_patches import replace_attribute
from mok_cute.emulator.virtual_device import VirtualDevice

DRIVER_VERSION = 13000
NS_PER_MS = 1e6


class _Events:
    """Times by handle."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._times: dict[int, int] = {}

    def create(self) -> int:
        handle = len(self._times) + 1
        self._times[handle] = 0
        return handle

    def record(self, handle: int) -> None:
        self._device.synchronize()
        self._times[handle] = time.perf_counter_ns()

    def elapsed_ms(self, first: int, last: int) -> float:
        return (self._times[last] - self._times[first]) / NS_PER_MS


def install(undo: ExitStack, device: VirtualDevice) -> None:
    """Until ``undo`` is closed."""
    attributes = device_attributes(device.arch, device.num_sms)
    events = _Events(device)
    for module, prefix, success, answers in (
        (driver, "cu", driver.CUresult.CUDA_SUCCESS, _driver_answers(device, attributes, events)),
        (runtime, "cuda", runtime.cudaError_t.cudaSuccess, _runtime_answers(device, attributes, events)),
    ):
        for name, answer in answers.items():
            replace_attribute(undo, module, prefix + name, _returning(success, answer))


def _returning(success: Any, answer: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The bindings' convention: a tuple of the error and the result, if there is one."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        result = answer(*args, **kwargs)
        return (success,) if result is None else (success, result)

    return call


def _attribute(attributes: dict[int, int]) -> Callable[..., int]:
    def read(attribute: Any, device: Any = 0) -> int:
        if int(attribute) not in attributes:
            raise NotImplementedError(f"device attribute {attribute}: the virtual device has no answer; add one")
        return attributes[int(attribute)]

    return read


def _driver_answers(device: VirtualDevice, attributes: dict[int, int], events: _Events) -> dict[str, Any]:
    context, ordinal = driver.CUcontext(1), driver.CUdevice(0)
    return {
        "Init": lambda flags: None,
        "DriverGetVersion": lambda: DRIVER_VERSION,
        "DeviceGetCount": lambda: 1,
        "DeviceGet": lambda number: ordinal,
        "DeviceGetName": lambda length, number: str(device).encode(),
        "DeviceGetAttribute": _attribute(attributes),
        "DevicePrimaryCtxRetain": lambda number: context,
        "DevicePrimaryCtxRelease": lambda number: None,
        "CtxCreate": lambda *args: context,
        "CtxDestroy": lambda *args: None,
        "CtxGetCurrent": lambda: context,
        "CtxSetCurrent": lambda given: None,
        "CtxGetDevice": lambda *args: ordinal,
        "CtxSynchronize": lambda *args: device.synchronize(),
        "StreamCreate": lambda flags: driver.CUstream(device.new_stream()),
        "StreamSynchronize": lambda stream: device.synchronize(),
        "StreamDestroy": lambda stream: device.synchronize(),
        "EventCreate": lambda flags: driver.CUevent(events.create()),
        "EventRecord": lambda event, stream: events.record(int(event)),
        "EventSynchronize": lambda event: device.synchronize(),
        "EventElapsedTime": lambda first, last: events.elapsed_ms(int(first), int(last)),
        "EventDestroy": lambda event: None,
    }


def _runtime_answers(device: VirtualDevice, attributes: dict[int, int], events: _Events) -> dict[str, Any]:
    return {
        "GetDevice": lambda: 0,
        "SetDevice": lambda number: None,
        "DeviceGetAttribute": _attribute(attributes),
        "DeviceSynchronize": lambda: device.synchronize(),
        "StreamCreate": lambda: runtime.cudaStream_t(device.new_stream()),
        "StreamSynchronize": lambda stream: device.synchronize(),
        "StreamDestroy": lambda stream: device.synchronize(),
        "EventCreate": lambda: runtime.cudaEvent_t(events.create()),
        "EventRecord": lambda event, stream: events.record(int(event)),
        "EventSynchronize": lambda event: device.synchronize(),
        "EventElapsedTime": lambda first, last: events.elapsed_ms(int(first), int(last)),
        "EventDestroy": lambda event: None,
    }
