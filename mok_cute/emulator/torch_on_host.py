"""Lets a script that was written for torch on CUDA run without a GPU: ``cuda`` means the virtual device.

Tensors asked for on ``cuda`` are made on the CPU. They are shown to the DSL as tensors of CUDA device 0, so that it
makes the same code for them. What of ``torch.cuda`` is answered is listed in ``_answers``; anything else fails as it
does on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import tvm_ffi
from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunction, TVMFFIJitCompiledFunctionWithKwargs
from torch.overrides import TorchFunctionMode

from mok_cute.emulator import driver_answers
from mok_cute.emulator.driver import Launch, device_attributes
from mok_cute.emulator.dsl_patches import replace_attribute
from mok_cute.emulator.virtual_device import VirtualDevice

DLPACK_CUDA = 2  # the device type of DLPack
VERSIONED_BYTES = 32  # before the tensor in a capsule of the versioned kind: version, context, deleter, flags
DEVICE_OFFSET = 8  # of device type and number inside the tensor
MAX_SMEM_OPT_IN, SMEM_OF_AN_SM = 97, 81  # device attributes


class _Stream:
    """A stream of torch on the virtual device. Handle 0 is the default one."""

    def __init__(self, device: VirtualDevice, handle: int = 0) -> None:
        self._device, self.cuda_stream = device, handle

    def synchronize(self) -> None:
        self._device.synchronize()

    def wait_stream(self, other: _Stream) -> None:
        self._device.streams.wait(self.cuda_stream, other.cuda_stream)


class _Event:
    """A moment of the host at which everything that was launched before it had run."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device, self._time_ns = device, 0

    def record(self, *stream: Any) -> None:
        self._device.synchronize()
        self._time_ns = time.perf_counter_ns()

    def synchronize(self) -> None:
        self._device.synchronize()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return (end._time_ns - self._time_ns) / 1e6


class _Graph:
    """Launches that were made while it was captured, to be made again."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.launches: list[Launch] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        with ExitStack() as undo:
            replace_attribute(undo, self._device, "submit", self.launches.append)
            yield

    def replay(self) -> None:
        for launch in self.launches:
            self._device.submit(launch)


@dataclass(frozen=True)
class _Properties:
    """What torch.cuda.get_device_properties gives of the virtual device."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    warp_size: int = 32


class _CudaMeansHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        given = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_host, args), **given)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def enter(device: VirtualDevice) -> ExitStack:
    """Closing what is returned gives torch back its own answers."""
    undo = ExitStack()
    driver_answers.install(undo, device)
    for name, answer in _answers(device).items():
        replace_attribute(undo, torch.cuda, name, answer)
    export = torch.Tensor.__dlpack__

    def as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("stream", None)
        with torch._C.DisableTorchFunction():
            device.keep(self)
            capsule = export(self, *args, **kwargs)
        _set_device(capsule)
        return capsule

    replace_attribute(undo, torch.Tensor, "__dlpack__", as_cuda)
    replace_attribute(undo, torch.Tensor, "__dlpack_device__", lambda self: (DLPACK_CUDA, 0))
    for function in (TVMFFIJitCompiledFunction, TVMFFIJitCompiledFunctionWithKwargs):
        replace_attribute(undo, function, "__call__", _showing_tensors(function.__call__))
    undo.enter_context(_CudaMeansHost())
    return undo


class _Shown:
    """A tensor that can only be asked for its DLPack capsule."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, 0


def _showing_tensors(call: Callable[..., Any]) -> Callable[..., Any]:
    """TVM-FFI takes tensors of torch by a way of its own, which would show them on the CPU."""

    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tvm_ffi.from_dlpack(_Shown(value.detach()))
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(map(shown, value))
        return value

    def call_shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *map(shown, args), **{name: shown(value) for name, value in kwargs.items()})

    return call_shown


def _answers(device: VirtualDevice) -> dict[str, Any]:
    current = [_Stream(device)]
    default = current[0]
    attributes = device_attributes(device.arch, device.num_sms)
    properties = _Properties(
        str(device), *device.arch.capability, device.num_sms, attributes[MAX_SMEM_OPT_IN], attributes[SMEM_OF_AN_SM]
    )

    class NewStream(_Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(device, device.new_stream())

    @contextmanager
    def on_device(*args: Any) -> Any:
        yield

    @contextmanager
    def on_stream(stream: Any) -> Any:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "device": on_device,
        "Stream": NewStream,
        "stream": on_stream,
        "current_stream": lambda *args: current[-1],
        "default_stream": lambda *args: default,
        "CUDAGraph": lambda *args, **kwargs: _Graph(device),
        "graph": lambda graph, *args, **kwargs: graph.capture(),
        "Event": lambda *args, **kwargs: _Event(device),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *args: device.synchronize(),
        "get_device_capability": lambda *args: device.arch.capability,
        "get_device_name": lambda *args: str(device),
        "get_device_properties": lambda *args: properties,
        "manual_seed": lambda seed: None,  # tensors are made on the CPU, with its generator
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
    }


def _set_device(capsule: Any) -> None:
    """Write CUDA device 0 into a DLPack capsule."""
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = name_of(capsule)
    offset = DEVICE_OFFSET + (VERSIONED_BYTES if name == b"dltensor_versioned" else 0)
    fields = (ctypes.c_int * 2).from_address(pointer_of(capsule, name) + offset)
    fields[0], fields[1] = DLPACK_CUDA, 0
