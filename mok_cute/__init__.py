"""mok_cute: a mixture-of-experts layer as one GPU kernel. Importing it loads neither torch nor the compiler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok_cute.config import KernelConfig, RunConfig
    from mok_cute.errors import (
        CompileError,
        ConfigError,
        MokError,
        PeerTimeoutError,
        TimeoutReport,
        UnsupportedError,
    )
    from mok_cute.shapes import MoEShape

__version__ = "0.1.0"

_HOME = {  # public name -> the module that defines it
    "CompileError": "errors",
    "ConfigError": "errors",
    "KernelConfig": "config",
    "MoEShape": "shapes",
    "MokError": "errors",
    "PeerTimeoutError": "errors",
    "RunConfig": "config",
    "TimeoutReport": "errors",
    "UnsupportedError": "errors",
}
_SUBMODULES = ("functional", "reference")

__all__ = [
    "CompileError",
    "ConfigError",
    "KernelConfig",
    "MoEShape",
    "MokError",
    "PeerTimeoutError",
    "RunConfig",
    "TimeoutReport",
    "UnsupportedError",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"mok_cute.{_HOME[name]}"), name)
    elif name in _SUBMODULES:
        value = import_module(f"mok_cute.{name}")
    else:
        raise AttributeError(f"module 'mok_cute' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
