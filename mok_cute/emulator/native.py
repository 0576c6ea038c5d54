"""Builds and loads the C sources of this folder: once per text, flags and machine, with the system's C compiler, kept
in our cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from mok_cute.cache import cache_directory
from mok_cute.errors import UnsupportedError
from mok_cute.settings import Settings

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread")
# For code whose speed counts. Floats keep the bits of each single operation, integers wrap.
FAST_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",
    "-fno-strict-aliasing",
)
FOLDER = "virtual-gpu"


def build(folder: Path, source: Path, flags: tuple[str, ...] = FLAGS, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """The shared library of ``source`` in ``folder``, compiled if it is not there yet."""
    machine = _processor() if "-march=native" in flags else ""
    digest = hashlib.sha256(source.read_bytes() + repr((flags, machine)).encode()).hexdigest()[:16]
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
        command = [compiler, *flags, "-o", str(made), str(source), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise UnsupportedError(f"the virtual GPU was not built: {' '.join(command)} said: {result.stderr.strip()}")
        os.replace(made, path)  # of several processes that build at once, each puts the same whole file here
    return path


@functools.cache
def load(name: str, flags: tuple[str, ...] = FAST_FLAGS) -> ctypes.CDLL:
    """A library of this process, by the name of its source."""
    folder = cache_directory(Settings.from_environment()) / FOLDER
    return ctypes.CDLL(str(build(folder, SOURCES / name, flags)))


def _processor() -> str:
    """What tells machines apart that need different code: a cache folder may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
