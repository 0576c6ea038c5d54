"""Everything the virtual GPU changes inside the DSL and its CUDA bindings, in one place, and undone as one.

| what is replaced                         | why                                                                 |
|------------------------------------------|---------------------------------------------------------------------|
| BinaryExecutionEngine, ExecutionEngine   | host code is linked here, and must call our library: ``redirect``   |
| keep_ptx, keep_cubin, no_cache, dump_dir | the device runs PTX; an image holds none, but its cubin tells which |
| JitFunctionArtifacts.__post_init__       | PTX and cubin of each compile pass through it                       |
| ExternalBinaryModule.__init__            | exported objects: ``x.ptx`` and ``x.cubin`` lie beside ``x.o``      |
| cudaGetDeviceCount, cudaLibraryUnload    | asked of the driver, which may not be there                         |
| HardwareInfo                             | asks the driver how many SMs and clusters there are                 |

All names are probed before the first is touched: a release of the DSL that moved one gives one clear error.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mok_cute.emulator.redirect import redirect
from mok_cute.errors import UnsupportedError

SUPPORTED = "4.8.1 up to, not including, 4.9"
C_INTERFACE = "_mlir_ciface_"  # before the name of a function that the host may call
TVM_FFI = "__tvm_ffi_"  # likewise, through TVM-FFI
OnModule = Callable[[bytes, str], None]  # cubin and PTX of a compiled module


def probe() -> dict[str, Any]:
    """The owners of what is replaced. UnsupportedError if this DSL keeps them elsewhere."""
    try:
        import cuda.bindings.runtime as cuda_runtime
        import cutlass
        from cutlass._mlir import execution_engine
        from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine, _mlirExecutionEngine
        from cutlass.base_dsl.dsl import DSLSingletonMeta
        from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
        from cutlass.base_dsl.jit_executor import JitFunctionArtifacts
        from cutlass.utils.hardware_info import HardwareInfo
    except ImportError as error:
        raise UnsupportedError(f"the virtual GPU needs nvidia-cutlass-dsl {SUPPORTED}: {error}; install it.") from error
    version = str(cutlass.__version__)
    objects = list(DSLSingletonMeta._instances.values())
    names = [
        (execution_engine, ("ExecutionEngine",)),
        (_execution_engine, ("BinaryExecutionEngine",)),
        (_mlirExecutionEngine, ("dump_object_file_pic",)),
        (JitFunctionArtifacts, ("__post_init__",)),
        (ExternalBinaryModule, ("__init__", "load_provider")),
        (cuda_runtime, ("cudaGetDeviceCount", "cudaLibraryUnload")),
        (HardwareInfo, ("get_max_active_clusters", "get_device_multiprocessor_count")),
        (ExternalBinaryModule.load_provider, ("execution_engine_constructor",)),
        *((dsl.envar, ("keep_ptx", "keep_cubin", "dump_dir", "no_cache", "_arch")) for dsl in objects),
    ]
    missing = [
        f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        for owner, wanted in names
        for name in wanted
        if not hasattr(owner, name)
    ]
    if missing or not objects:
        raise UnsupportedError(
            f"the virtual GPU needs nvidia-cutlass-dsl {SUPPORTED}, and this is {version}: it has no "
            f"{', '.join(missing) or 'DSL objects'}; install a supported version."
        )
    return {
        "objects": objects,
        "engines": execution_engine,
        "object_engines": _execution_engine,
        "export": _mlirExecutionEngine,
        "artifacts": JitFunctionArtifacts,
        "exported": ExternalBinaryModule,
        "cuda_runtime": cuda_runtime,
        "hardware": HardwareInfo,
    }


def install(shim: Path, on_module: OnModule, *, arch: str, num_sms: int) -> ExitStack:
    """Make every launch of host code loaded from now on come to ``shim``; closing what is returned undoes it."""
    global _installed
    found = probe()
    undo = ExitStack()
    _link_here(undo, found, shim)
    _keep_ptx(undo, found, on_module)
    _answer_for_the_driver(undo, found, num_sms)
    for dsl in found["objects"]:
        replace_attribute(undo, dsl.envar, "_arch", arch)
    undo.callback(_end)
    _installed = True
    return undo


def is_installed() -> bool:
    """Whether host code that is loaded now launches on the virtual GPU. It does so for good."""
    return _installed


_installed = False


def _end() -> None:
    global _installed
    _installed = False


def chosen_arch() -> str | None:
    """What CUTE_DSL_ARCH asks for, as the DSL has read it."""
    chosen: str | None = probe()["objects"][0].envar._arch
    return chosen


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _link_here(undo: ExitStack, found: dict[str, Any], shim: Path) -> None:
    link, original = found["object_engines"].BinaryExecutionEngine, found["engines"].ExecutionEngine
    library = ctypes.CDLL(str(shim))

    def link_object(object_file: bytes, libraries: Sequence[str], use_jit_link: bool) -> Any:
        return link(redirect(object_file, lambda name: hasattr(library, name)), [str(shim), *libraries], use_jit_link)

    class ModuleEngine:
        """For functions that are called without TVM-FFI: the DSL hands over a module, not an object file."""

        def __init__(self, module: Any, function: str, opt_level: int, libraries: Sequence[str]) -> None:
            for name in libraries:
                ctypes.CDLL(name, ctypes.RTLD_GLOBAL)  # the export resolves the vendor's names, for nobody to call
            with tempfile.TemporaryDirectory(prefix="mok_cute_") as folder:
                path = Path(folder) / "host.o"
                found["export"].dump_object_file_pic(module, str(path), function, opt_level)
                self._engine = link_object(path.read_bytes(), libraries, True)

        def raw_lookup(self, name: str) -> Any:
            try:
                return self._engine.lookup(f"_mlir_{name}")  # the wrapper that takes its arguments packed
            except RuntimeError:
                return None

        def lookup(self, name: str) -> Any:
            address = self.raw_lookup(C_INTERFACE + name)
            if address is None:
                raise RuntimeError(f"Unknown function {name}")  # as the DSL's own engine, whose callers expect it
            return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def link_module(module: Any, opt_level: int = 2, shared_libs: Sequence[str] = ()) -> Any:
        names = [op.attributes["sym_name"].value for op in module.body if "sym_name" in op.attributes]
        functions = [name.removeprefix(C_INTERFACE) for name in names if name.startswith(C_INTERFACE)]
        if any(name.startswith(TVM_FFI) for name in names) or not functions:
            return original(module, opt_level=opt_level, shared_libs=shared_libs)  # soon replaced by an object's engine
        return ModuleEngine(module, functions[0], opt_level, shared_libs)

    replace_attribute(undo, found["object_engines"], "BinaryExecutionEngine", link_object)
    replace_attribute(undo, found["exported"].load_provider, "execution_engine_constructor", link_object)
    replace_attribute(undo, found["engines"], "ExecutionEngine", link_module)


def _keep_ptx(undo: ExitStack, found: dict[str, Any], on_module: OnModule) -> None:
    artifacts, exported = found["artifacts"], found["exported"]
    read, load = artifacts.__post_init__, exported.__init__
    folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="mok_cute_"))

    def read_and_tell(self: Any) -> None:
        read(self)
        if isinstance(self.CUBIN, bytes) and self.PTX:
            on_module(self.CUBIN, self.PTX)

    def tell_and_load(self: Any, file_path: str, *args: Any, **kwargs: Any) -> None:
        ptx, cubin = (Path(file_path).with_suffix(suffix) for suffix in (".ptx", ".cubin"))
        if ptx.exists() and cubin.exists():
            on_module(cubin.read_bytes(), ptx.read_text())
        load(self, file_path, *args, **kwargs)

    replace_attribute(undo, artifacts, "__post_init__", read_and_tell)
    replace_attribute(undo, exported, "__init__", tell_and_load)
    for dsl in found["objects"]:
        # Functions from the DSL's own cache come without PTX; with no_cache said here, it does not warn of keep_ptx.
        for name, value in (("keep_ptx", True), ("keep_cubin", True), ("no_cache", True), ("dump_dir", folder)):
            replace_attribute(undo, dsl.envar, name, value)


def _answer_for_the_driver(undo: ExitStack, found: dict[str, Any], num_sms: int) -> None:
    runtime, hardware = found["cuda_runtime"], found["hardware"]
    success = runtime.cudaError_t.cudaSuccess
    replace_attribute(undo, runtime, "cudaGetDeviceCount", lambda: (success, 1))
    replace_attribute(undo, runtime, "cudaLibraryUnload", lambda library: (success,))

    def no_driver(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return max(1, num_sms // cluster_size)

    replace_attribute(undo, hardware, "__init__", no_driver)
    replace_attribute(undo, hardware, "get_max_active_clusters", max_active_clusters)
    replace_attribute(undo, hardware, "get_device_multiprocessor_count", lambda self: num_sms)
