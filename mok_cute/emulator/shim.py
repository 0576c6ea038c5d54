"""Builds and loads ``shim.c``: once per text of it, with the system's C compiler, kept in our cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mok_cute.cache import cache_directory
from mok_cute.errors import UnsupportedError
from mok_cute.settings import Settings

SOURCE = Path(__file__).with_name("shim.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread")
FOLDER = "virtual-gpu"


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """``launch_config`` of shim.c. Of an attribute's value only the words that its id defines are meaningful: the rest
    is whatever lay on the caller's stack."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint32),
    ]


class Callbacks(ctypes.Structure):
    """``callbacks`` of shim.c. Each returns a CUDA error number."""

    _fields_ = [
        ("load", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)),
        (
            "launch",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.POINTER(Config),
                ctypes.POINTER(ctypes.c_void_p),
            ),
        ),
        ("allocate", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64)),
        ("release", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("synchronize", ctypes.CFUNCTYPE(ctypes.c_int)),
        ("written", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)),
    ]


def build(folder: Path, compilers: tuple[str, ...] = COMPILERS, source: Path = SOURCE) -> Path:
    """The shared library of ``source`` in ``folder``, compiled if it is not there yet."""
    digest = hashlib.sha256(source.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    path = folder / f"lib{source.stem}-{digest}.so"
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise UnsupportedError(
            f"the virtual GPU needs a C compiler once, to build {source.name}: found none of {', '.join(compilers)}; "
            "install one, for example the package gcc."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *FLAGS, "-o", str(made), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise UnsupportedError(f"the virtual GPU was not built: {' '.join(command)} said: {result.stderr.strip()}")
        os.replace(made, path)  # of several processes that build at once, each puts the same whole file here
    return path


@functools.cache
def load() -> tuple[Path, ctypes.CDLL]:
    """The library of this process and where it lies."""
    path = build(cache_directory(Settings.from_environment()) / FOLDER)
    library = ctypes.CDLL(str(path))
    library.emulator_set_callbacks.argtypes = [ctypes.POINTER(Callbacks)]
    library.emulator_set_callbacks.restype = None
    library.emulator_set_device_attribute.argtypes = [ctypes.c_int, ctypes.c_int]
    library.emulator_set_device_attribute.restype = None
    return path, library
