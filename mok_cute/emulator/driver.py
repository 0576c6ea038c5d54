"""Stands in for the CUDA driver: what compiled host code loads and launches comes here, and the launcher cannot tell.

A launch becomes a ``Launch`` and is handed to whoever ``install`` was told of. The PTX to a loaded image is known from
its cubin, which the image holds unchanged: two kernels of one name in two libraries stay apart.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from mok_cute.arch import Arch
from mok_cute.emulator import dsl_patches, shim
from mok_cute.emulator.decode import Kernel, parse_module
from mok_cute.errors import MokError

Dim3 = tuple[int, int, int]

SUCCESS, INVALID_CONFIGURATION, LAUNCH_FAILURE, MEMORY_ALLOCATION = 0, 9, 719, 2
MAX_THREADS = 1024  # of a CTA
SMEM_RESERVED_BYTES = 1024  # of each CTA, by the system: the difference between an SM's limit and a CTA's

# Launch attributes and the words of their values that mean something.
COOPERATIVE, CLUSTER, SERIALIZATION, PRIORITY, PREFERRED_CLUSTER = 2, 4, 6, 8, 11
ATTRIBUTE_WORDS = {COOPERATIVE: 1, CLUSTER: 3, SERIALIZATION: 1, PRIORITY: 1, PREFERRED_CLUSTER: 3}


class LaunchError(MokError):
    """A launch that a GPU would refuse, or of a kernel whose PTX is not known."""


@dataclass(frozen=True)
class Launch:
    """One launch as the host code asked for it.

    attributes   by CUDA id, the meaningful words of each, for ids in ATTRIBUTE_WORDS
    params       the bytes of each kernel parameter, as they were at the launch
    """

    entry: str
    ptx: str
    kernel: Kernel
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem_bytes: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    params: list[bytes]


class Device(Protocol):
    """What receives launches and answers for memory."""

    arch: Arch
    num_sms: int

    def submit(self, launch: Launch) -> None: ...

    def synchronize(self) -> None: ...

    def allocate(self, num_bytes: int) -> int: ...

    def release(self, address: int) -> None: ...

    def written(self, address: int, num_bytes: int) -> None: ...


class Driver:
    """Modules and libraries of the process, and the device that is current. There is one, made by ``the_driver``.

    A CUDA call cannot raise: it returns an error number, which the DSL turns into an exception of its own. The real one
    is kept in ``error`` until somebody takes it.
    """

    def __init__(self) -> None:
        self.current: Device | None = None
        self.error: BaseException | None = None
        self.alive: shim.Callbacks | None = None  # what the library calls
        self._modules: dict[bytes, str] = {}  # cubin -> PTX
        self._libraries: dict[int, tuple[str, dict[str, Kernel]]] = {}  # handle -> PTX and its kernels by entry

    @property
    def device(self) -> Device:
        if self.current is None:
            raise LaunchError("this function was loaded for the virtual GPU, and none is current; enter one.")
        return self.current

    def add_module(self, cubin: bytes, ptx: str) -> None:
        """The PTX that a cubin was made from."""
        self._modules[cubin] = ptx

    def callbacks(self) -> shim.Callbacks:
        """The C side of this object. Must be kept alive as long as the library may call."""
        types: dict[str, Any] = {name: kind for name, kind, *_ in shim.Callbacks._fields_}
        made = {
            "load": self._guarded(self._load),
            "launch": self._guarded(self._launch),
            "allocate": self._guarded(self._allocate, MEMORY_ALLOCATION),
            "release": self._guarded(lambda address: self.device.release(address or 0)),
            "synchronize": self._guarded(lambda: self.device.synchronize()),
            "written": self._guarded(lambda address, num_bytes: self.device.written(address or 0, num_bytes)),
        }
        return shim.Callbacks(**{name: types[name](function) for name, function in made.items()})

    def take_error(self) -> None:
        """Raise what a call has kept, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _guarded(self, function: Callable[..., None], code: int = LAUNCH_FAILURE) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                function(*args)
            except LaunchError as error:
                self.error = error
                return INVALID_CONFIGURATION
            except BaseException as error:  # nothing may unwind through compiled code
                self.error = error
                return code
            return SUCCESS

        return call

    def _load(self, library: int, image: int, num_bytes: int) -> None:
        content = ctypes.string_at(image, num_bytes)
        for cubin, ptx in self._modules.items():
            if cubin in content:
                self._libraries[library] = (ptx, parse_module(ptx))
                return
        raise LaunchError(
            "the virtual GPU has no PTX for a kernel image: it was compiled before the virtual GPU was there, or "
            "loaded from an object file without its .ptx and .cubin beside it; compile it again, or put them there."
        )

    def _launch(self, library: int, entry: bytes, config_pointer: Any, params: Any) -> None:
        config = config_pointer.contents
        ptx, kernels = self._libraries[library]
        name = entry.decode()
        kernel = kernels[name]
        attributes = {}
        for attribute in config.attributes[: config.num_attributes] if config.num_attributes else ():
            if attribute.id in ATTRIBUTE_WORDS:
                attributes[attribute.id] = tuple(attribute.value[: ATTRIBUTE_WORDS[attribute.id]])
        x, y, z = attributes.get(CLUSTER) or (1, 1, 1)
        launch = Launch(
            entry=name,
            ptx=ptx,
            kernel=kernel,
            grid=tuple(config.grid),
            block=tuple(config.block),
            cluster=(x, y, z),
            dynamic_smem_bytes=int(config.dynamic_smem_bytes),
            stream=config.stream or 0,
            attributes=attributes,
            params=[ctypes.string_at(params[i], p.num_bytes) for i, p in enumerate(kernel.parameters)],
        )
        check(launch, self.device.arch)
        self.device.submit(launch)

    def _allocate(self, result: Any, num_bytes: int) -> None:
        result[0] = self.device.allocate(num_bytes)


def check(launch: Launch, arch: Arch) -> None:
    """Refuse what the CUDA runtime refuses."""
    what = f"launch of {launch.entry}"
    if 0 in launch.grid or 0 in launch.block:
        raise LaunchError(
            f"{what}: grid {launch.grid}, block {launch.block}: no extent may be 0; launch nothing instead."
        )
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > MAX_THREADS:
        raise LaunchError(f"{what}: block {launch.block} has {threads} threads: at most {MAX_THREADS}; use fewer.")
    if any(extent % step for extent, step in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"{what}: grid {launch.grid} is not a multiple of the cluster {launch.cluster}; round it up.")
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if ctas > arch.max_cluster_opt_in:
        raise LaunchError(f"{what}: cluster {launch.cluster}: at most {arch.max_cluster_opt_in} CTAs; use fewer.")
    if launch.dynamic_smem_bytes > arch.smem_bytes_per_cta:
        raise LaunchError(
            f"{what}: {launch.dynamic_smem_bytes} bytes of dynamic shared memory: at most {arch.smem_bytes_per_cta} on "
            f"{arch.name}; use less."
        )


@functools.cache
def the_driver() -> Driver:
    """The driver of this process. Functions loaded through it stay bound to it, whichever device is current."""
    driver = Driver()
    callbacks = driver.callbacks()
    shim.load()[1].emulator_set_callbacks(ctypes.byref(callbacks))
    driver.alive = callbacks
    return driver


def install(device: Device) -> ExitStack:
    """Send the launches of all host code that is loaded from now on to ``device``; closing the stack ends that."""
    driver = the_driver()
    if driver.current is not None:
        raise LaunchError("a virtual GPU is current already; leave it before you enter another.")
    path, library = shim.load()
    for attribute, value in device_attributes(device.arch, device.num_sms).items():
        library.emulator_set_device_attribute(attribute, value)
    undo = dsl_patches.install(path, driver.add_module, arch=device.arch.name, num_sms=device.num_sms)
    driver.current = device
    undo.callback(setattr, driver, "current", None)
    return undo


def device_attributes(arch: Arch, num_sms: int) -> dict[int, int]:
    """By CUDA device attribute id, what compiled host code may ask for."""
    return {
        1: MAX_THREADS,
        8: 48 * 1024,  # shared memory of a CTA that asks for nothing
        10: 32,  # threads of a warp
        12: arch.registers_per_sm,
        16: num_sms,
        39: 2 * MAX_THREADS,  # threads of an SM
        75: arch.capability[0],
        76: arch.capability[1],
        81: arch.smem_bytes_per_cta + SMEM_RESERVED_BYTES,
        95: 1,  # cooperative launches
        97: arch.smem_bytes_per_cta,
    }
