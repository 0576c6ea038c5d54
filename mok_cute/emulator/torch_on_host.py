"""Lets a script that was written for torch on CUDA run without a GPU: ``cuda`` means the virtual device.

Tensors asked for on ``cuda`` are made on the CPU. They are shown to the DSL as tensors of CUDA device 0, so that it
makes the same code for them. What of ``torch.cuda`` is answered is listed in ``_answers``; anything else fails as it
does on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mok_cute.emulator import driver_answers
from mok_cute.emulator.dsl_patches import replace_attribute
from mok_cute.emulator.virtual_device import VirtualDevice

DLPACK_CUDA = 2  # the device type of DLPack
VERSIONED_BYTES = 32  # before the tensor in a capsule of the versioned kind: version, context, deleter, flags
DEVICE_OFFSET = 8  # of device type and number inside the tensor


class _Stream:
    """The one stream of torch on the virtual device."""

    cuda_stream = 0

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def synchronize(self) -> None:
        self._device.synchronize()


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
    undo.enter_context(_CudaMeansHost())
    return undo


def _answers(device: VirtualDevice) -> dict[str, Any]:
    stream = _Stream(device)

    @contextmanager
    def on_device(*args: Any) -> Any:
        yield

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "device": on_device,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "synchronize": lambda *args: device.synchronize(),
        "get_device_capability": lambda *args: device.arch.capability,
        "get_device_name": lambda *args: str(device),
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
