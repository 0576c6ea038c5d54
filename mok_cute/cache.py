"""Compiled kernels on disk: key, lock, damaged entries.

An entry is a folder ``<cache>/<key>`` made once and never changed: for each function an object file, its PTX and its
cubin, and ``entry.json`` with the figures, what the key was made from, and a digest of every file, checked before
anything is loaded. The key is a hash of all inputs of code generation, so a changed template is another entry.

Writers build into a folder of their own and rename it into place under a lock per key: readers see a whole entry or
none, and of many processes that start together one compiles.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mok_cute.arch import get as get_arch
from mok_cute.emulator import dsl_patches
from mok_cute.errors import CompileError, MokError
from mok_cute.figures import KernelFigures, kernel_figures
from mok_cute.settings import Settings

FORMAT = 2  # of an entry's folder; a change makes every older entry unknown
SIDECAR = "entry.json"
LOCK_TIMEOUT_S = 900  # longer than any compile; then another process is stuck, and waiting on would hide it
# Host modules whose text decides what is generated, or that the templates see.
HOST_SOURCES = ("arch.py", "compile.py", "config.py", "errors.py", "shapes.py")

# Takes a folder for the compiler's own files, its --dump-dir, which would otherwise be the user's current folder.
# Returns what cute.compile returns, made with --enable-tvm-ffi --keep-ptx --keep-cubin.
Build = Callable[[Path], Any]

# The compiler of the DSL crashes when two threads compile at once. The memo below is guarded by the same lock.
_COMPILER_LOCK = threading.RLock()
# Functions launch for good where they did when they were loaded: on CUDA, or (True) on the virtual GPU.
_MEMO: dict[tuple[str, str | None, bool], LoadedKernels] = {}


@dataclass(frozen=True)
class LoadedKernels:
    """Functions ready to call, and what is known of them, each by function name.

    ``compile_seconds`` is the time that the build took, whoever did it; ``cached`` says that this call did not build.
    """

    key: str
    functions: dict[str, Callable[..., Any]]
    figures: dict[str, KernelFigures]
    ptx: dict[str, str]
    cubin: dict[str, bytes]
    compile_seconds: float
    cached: bool


@dataclass(frozen=True)
class Entry:
    """One entry on disk as ``list_entries`` and ``verify`` see it. ``problem`` None means that nothing is wrong."""

    key: str
    path: Path
    arch: str
    inputs: dict[str, Any]
    functions: tuple[str, ...]
    num_bytes: int
    compile_seconds: float
    problem: str | None


class _Damaged(Exception):
    """An entry that must not be used; the text says why."""


# ---------------------------------------------------------------------------------------------------------------- key


def source_fingerprint() -> str:
    """Hash of the template sources and of the host modules that decide what they generate, by name and content."""
    import mok_cute.templates

    package = Path(__file__).parent
    templates = Path(next(iter(mok_cute.templates.__path__)))
    files = [(f"templates/{p.relative_to(templates).as_posix()}", p) for p in templates.rglob("*.py")]
    files += [(name, package / name) for name in HOST_SOURCES if (package / name).exists()]
    digest = hashlib.sha256()
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@functools.cache
def process_fingerprint() -> str:
    """The fingerprint of what this process compiles from: Python reads a module once, whatever becomes of its file."""
    return source_fingerprint()


def tool_versions() -> dict[str, str]:
    """Everything besides our sources that decides the bytes of an object file."""
    import cutlass
    import tvm_ffi

    return {
        "dsl": str(cutlass.__version__),
        "cuda": str(cutlass.CUDA_VERSION),
        "tvm_ffi": str(tvm_ffi.__version__),
        "host": platform.machine(),
    }


def make_key(inputs: dict[str, Any], arch: str, function_names: Iterable[str], settings: Settings) -> str:
    """Key of an entry. ``inputs`` must be JSON values: a repr that changes from run to run would never be found."""
    return _hash(_identity(inputs, arch, function_names, settings))


def _identity(inputs: dict[str, Any], arch: str, names: Iterable[str], settings: Settings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "inputs": inputs,
        "arch": arch,
        "functions": sorted(names),
        "sources": process_fingerprint(),
        "tools": tool_versions(),
        "compiler_environment": [list(pair) for pair in settings.compiler_environment],
    }


def _hash(identity: dict[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------- build or get


def get_or_build(inputs: dict[str, Any], arch: str, functions: dict[str, Build], settings: Settings) -> LoadedKernels:
    """The functions for these inputs: from this process, else from disk, else built (and then kept on disk).

    ``functions`` maps a name, a C identifier, to what compiles it; called only when nothing is found, one at a time.
    """
    get_arch(arch)
    for name in functions:
        assert name.isidentifier(), f"function name {name!r} becomes a symbol of the object file"
    identity = _identity(inputs, arch, functions, settings)
    key = _hash(identity)
    with _COMPILER_LOCK:
        root = cache_directory(settings) if settings.cache else None
        memo = (key, None if root is None else str(root), dsl_patches.is_installed())
        if memo in _MEMO:
            return replace(_MEMO[memo], cached=True)
        if root is None:
            with tempfile.TemporaryDirectory(prefix="mok_cute_") as scratch:
                path = Path(scratch) / key
                _build(path, key, identity, functions)
                loaded = _load(path, key, cached=False)
        else:
            loaded = _from_disk(root, key, identity, functions)
        _MEMO[memo] = loaded
        return loaded


def _from_disk(root: Path, key: str, identity: dict[str, Any], functions: dict[str, Build]) -> LoadedKernels:
    path = root / key
    with _lock(root, key):
        if path.exists():
            try:
                return _load(path, key, cached=True)
            except _Damaged as damage:
                warnings.warn(f"compiled kernels in {path} are damaged ({damage}) and are built again.", stacklevel=4)
                _remove(path)
        scratch = root / f"building-{uuid.uuid4().hex}"
        try:
            _build(scratch, key, identity, functions)
            if source_fingerprint() != identity["sources"]:
                # Which text was compiled, the old or the new, is not known: neither may find it under its key.
                warnings.warn("template sources changed while this process runs: it keeps no kernels.", stacklevel=4)
                return _load(scratch, key, cached=False)
            os.rename(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return _load(path, key, cached=False)


def _build(path: Path, key: str, identity: dict[str, Any], functions: dict[str, Build]) -> None:
    """Compile all functions and write a whole entry into the new folder ``path``."""
    path.mkdir(mode=0o700)
    start = time.perf_counter()
    figures = {}
    for name, build in functions.items():
        with tempfile.TemporaryDirectory(prefix="mok_cute_") as dumps:
            compiled = _compile(name, identity["arch"], build, Path(dumps))
            ptx, cubin = compiled.__ptx__, compiled.__cubin__
        assert ptx and cubin, f"{name} was compiled without --keep-ptx --keep-cubin"
        figures[name] = kernel_figures(ptx, cubin, str(compiled.ir_module)).to_json()
        compiled.export_to_c(str(path / f"{name}.o"), function_name=_symbol(name, key))
        (path / f"{name}.ptx").write_text(ptx)
        (path / f"{name}.cubin").write_bytes(cubin)
    seconds = time.perf_counter() - start
    files = sorted(f"{name}.{kind}" for name in functions for kind in ("o", "ptx", "cubin"))
    sidecar = {
        "identity": identity,
        "figures": figures,
        "compile_seconds": seconds,
        "sha256": {file: _sync_and_digest(path / file) for file in files},
    }
    # The digest of the sidecar itself closes the chain: a torn write cannot pass for figures.
    text = json.dumps(sidecar, sort_keys=True, indent=1)
    (path / SIDECAR).write_text(json.dumps({"sha256": _digest(text.encode()), "entry": text}))
    _sync_and_digest(path / SIDECAR)


def _compile(name: str, arch: str, build: Build, dumps: Path) -> Any:
    try:
        return build(dumps)
    except MokError:
        raise
    except Exception as error:
        raise CompileError(f"{name} for {arch} was not built: {type(error).__name__}: {error}") from error


def _load(path: Path, key: str, *, cached: bool) -> LoadedKernels:
    """Check every digest of an entry, then load it."""
    from cutlass.cute.runtime import load_module

    sidecar, content = _read(path, key)
    functions = {}
    for name in sidecar["figures"]:
        module = load_module(str(path / f"{name}.o"), enable_tvm_ffi=True)
        functions[name] = getattr(module, _symbol(name, key))
    return LoadedKernels(
        key=key,
        functions=functions,
        figures={name: KernelFigures.from_json(fields) for name, fields in sidecar["figures"].items()},
        ptx={name: content[f"{name}.ptx"].decode() for name in functions},
        cubin={name: content[f"{name}.cubin"] for name in functions},
        compile_seconds=sidecar["compile_seconds"],
        cached=cached,
    )


def _read(path: Path, key: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Sidecar and files of an entry with all digests checked; _Damaged says what is wrong."""
    try:
        outer = json.loads((path / SIDECAR).read_text())
        text = outer["entry"]
        if _digest(text.encode()) != outer["sha256"]:
            raise _Damaged(f"{SIDECAR} does not match its digest")
        sidecar = json.loads(text)
        if _hash(sidecar["identity"]) != key:
            raise _Damaged(f"{SIDECAR} belongs to another key")
        content = {file: (path / file).read_bytes() for file in sidecar["sha256"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
    for file, digest in sidecar["sha256"].items():
        if _digest(content[file]) != digest:
            raise _Damaged(f"{file} does not match its digest")
    return sidecar, content


def _symbol(name: str, key: str) -> str:
    """A symbol per entry, since several entries live in one process."""
    return f"mok_{name}_{key[:16]}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sync_and_digest(path: Path) -> str:
    """On disk before the rename makes it visible, so that a crash of the machine leaves no entry of empty files."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _digest(file.read())


# ------------------------------------------------------------------------------------------------------------- folder


def cache_directory(settings: Settings) -> Path:
    """The folder of compiled kernels, made if need be. One that cannot be written, or that another user owns and could
    fill with code for us to run, is replaced by a private folder for the life of this process, with one warning."""
    import platformdirs

    wanted = settings.cache_dir or Path(platformdirs.user_cache_dir("mok_cute"))
    wanted = wanted.absolute()
    if wanted not in _USABLE:
        _USABLE[wanted] = _usable_or_private(wanted)
    return _USABLE[wanted]


_USABLE: dict[Path, Path] = {}  # folder asked for -> folder used


def _usable_or_private(wanted: Path) -> Path:
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
        owner = wanted.stat().st_uid
        if owner in (os.getuid(), 0):
            return wanted
        reason = f"it belongs to user {owner}"
    except OSError as error:
        reason = str(error)
    private = Path(tempfile.mkdtemp(prefix="mok_cute_"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    warnings.warn(
        f"the cache of compiled kernels {wanted} is not used: {reason}. This process keeps them in {private}; "
        "set MOK_CUTE_CACHE_DIR to a folder of your own to keep them longer.",
        stacklevel=5,
    )
    return private


def _lock(root: Path, key: str) -> Any:
    import filelock

    folder = root / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = filelock.FileLock(folder / f"{key}.lock")
    try:
        return lock.acquire(timeout=LOCK_TIMEOUT_S)
    except filelock.Timeout as error:
        raise CompileError(
            f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_S} s; end it, or set MOK_CUTE_CACHE_DIR."
        ) from error


def _remove(path: Path) -> None:
    """Out of the way at once, by rename, then deleted: no reader finds half an entry under its key."""
    aside = path.with_name(f"removing-{uuid.uuid4().hex}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- what the CLI shows


def list_entries(settings: Settings) -> list[Entry]:
    """All entries on disk, damaged ones included; digests are not checked beyond those of the sidecars."""
    return [_entry(path) for path in _entry_paths(settings)]


def verify(settings: Settings) -> list[Entry]:
    """All entries on disk with every digest checked; look at ``problem``."""
    checked = []
    for path in _entry_paths(settings):
        try:
            _read(path, path.name)
            checked.append(_entry(path))
        except _Damaged as damage:
            checked.append(replace(_entry(path), problem=str(damage)))
    return checked


def clear(settings: Settings, keys: Iterable[str] | None = None) -> int:
    """Remove the entries with these keys, or all; their number. Functions that are loaded stay usable."""
    chosen = None if keys is None else set(keys)
    paths = [path for path in _entry_paths(settings) if chosen is None or path.name in chosen]
    root = cache_directory(settings)
    if chosen is None:
        _clear_leftovers(root)
    for path in paths:
        with _COMPILER_LOCK, _lock(root, path.name):
            if path.exists():
                _remove(path)
            for is_virtual in (False, True):
                _MEMO.pop((path.name, str(root), is_virtual), None)
    return len(paths)


def _clear_leftovers(root: Path) -> None:
    """Folders that a killed process left half built. Younger ones may be at work in another process."""
    for pattern in ("building-*", "removing-*"):
        for path in root.glob(pattern):
            if path.stat().st_mtime < time.time() - LOCK_TIMEOUT_S:
                shutil.rmtree(path, ignore_errors=True)


def _entry_paths(settings: Settings) -> list[Path]:
    names = "[0-9a-f]" * 64
    return sorted(path for path in cache_directory(settings).glob(names) if path.is_dir())


def _entry(path: Path) -> Entry:
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    try:
        sidecar = json.loads(json.loads((path / SIDECAR).read_text())["entry"])
        identity = sidecar["identity"]
        return Entry(
            key=path.name,
            path=path,
            arch=identity["arch"],
            inputs=identity["inputs"],
            functions=tuple(identity["functions"]),
            num_bytes=num_bytes,
            compile_seconds=sidecar["compile_seconds"],
            problem=None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Entry(path.name, path, "", {}, (), num_bytes, 0.0, f"{SIDECAR}: {type(error).__name__}: {error}")
