"""A GPU that is not there: what ``device="virtual:sm_90a"`` means to a launcher.

Tensors live on the CPU and their addresses are device addresses. Launches are collected in their streams and run when
something waits: ``synchronize``, or torch looking at a tensor. Ranks that wait for each other are launched one after
the other and so run together, as on one GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mok_cute import arch as machines
from mok_cute.emulator import driver
from mok_cute.emulator.device import EngineName, Grid, LaunchStats, OnStall, run
from mok_cute.emulator.driver import Launch
from mok_cute.emulator.memory import ALIGNMENT, DeviceMemory, add_torch_tensor, find_torch_tensor
from mok_cute.emulator.streams import Streams
from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.gpu import NamedArray
from mok_cute.settings import Settings

PREFIX = "virtual:"
CURRENT_STREAM = 0  # torch on the CPU has no other
DEFAULT_SMS = 4  # few: persistent kernels fill the device, and every CTA costs time here

# Functions of torch that take tensors and leave their data alone. All others wait for the device first.
ADDRESSES = {"data_ptr", "untyped_storage", "__dlpack__"}
METADATA = {"__dlpack_device__", "__get__", "__len__", "__hash__", "dim", "element_size", "get_device", "is_contiguous"}
METADATA |= {"is_floating_point", "is_pinned", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"}
VIEWS = {"detach", "expand", "narrow", "permute", "select", "squeeze", "t", "transpose", "unsqueeze", "view", "view_as"}
NEW = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full")} | {
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
LEAVE_DATA_ALONE = ADDRESSES | METADATA | VIEWS | NEW
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty"}


class VirtualDevice:
    """The device of a ``with`` block: host code that is loaded in it launches here.

    num_sms      CTAs that a launch keeps resident at most
    seed         decides the order of everything that a GPU leaves open; one seed replays a run exactly
    check_races  also report races, missing fences and uninitialised reads (RaceError); takes up to four times as long
    engine       fast, reference or auto, which is the fast one where it can be built; None: what MOK_CUTE_ENGINE says
    on_stall     when nothing is left but waits that see nothing new: "deadlock" reports that at once, "timeout" lets
                 virtual time pass until a kernel's own time limit ends one of them
    launched     name of each kernel that has run and its statistics, oldest first
    """

    max_ranks = sys.maxsize  # all launches that are ready run together, however many

    def __init__(
        self,
        arch: str = "sm_90a",
        *,
        num_sms: int = DEFAULT_SMS,
        seed: int = 0,
        check_races: bool = False,
        engine: EngineName | None = None,
        on_stall: OnStall = "deadlock",
    ) -> None:
        if num_sms < 1:
            raise ConfigError(f"num_sms={num_sms}: a device has at least 1; pass more.")
        self.arch = machines.get(arch)
        self.num_sms = num_sms
        self.seed = seed
        self.check_races = check_races
        self.on_stall = on_stall
        self._engine = engine
        self.memory = DeviceMemory(discover=find_torch_tensor)
        self.streams = Streams()
        self.launched: list[tuple[str, LaunchStats]] = []
        self._undo: ExitStack | None = None
        self._kept: list[Any] = []  # storages whose address was asked for: a pending launch may use it

    @classmethod
    def of_name(cls, name: str, **kwargs: Any) -> VirtualDevice:
        """From a device name such as ``virtual:sm_90a``."""
        if not name.startswith(PREFIX):
            raise ConfigError(f"device={name}: not a virtual device; write {PREFIX} and an arch, as in virtual:sm_90a.")
        return cls(name.removeprefix(PREFIX), **kwargs)

    @classmethod
    def current_or_new(cls, name: str) -> VirtualDevice:
        """The device of the ``with`` block around the caller; without one, a device for the rest of the process."""
        current = driver.the_driver().current
        if current is None:
            return cls.of_name(name).__enter__()
        if not isinstance(current, cls) or str(current) != name:
            raise ConfigError(f"device={name}: {current} is current; use that one, or leave it first.")
        return current

    @staticmethod
    def is_any_current() -> bool:
        return driver.the_driver().current is not None

    def __str__(self) -> str:
        return PREFIX + self.arch.name

    def __enter__(self) -> VirtualDevice:
        undo = driver.install(self)
        undo.enter_context(_WaitingReads(self))
        self._undo = undo
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        """Waits for what was launched, unless an exception is on its way already."""
        undo, self._undo = self._undo, None
        assert undo is not None
        with undo:
            if kind is None:
                self.synchronize()
            self._forget()

    # ------------------------------------------------------------------------------------------- what the driver asks

    def submit(self, launch: Launch) -> None:
        self.streams.enqueue(launch)

    def synchronize(self) -> None:
        """Run all that was launched. Raises what a kernel did wrong; the launches behind it are dropped."""
        driver.the_driver().take_error()
        try:
            while launches := self.streams.take_ready():
                with torch._C.DisableTorchFunction():
                    grids = [self._grid(launch) for launch in launches]
                    statistics = run(
                        grids,
                        seed=self.seed,
                        engine=self._engine,
                        on_stall=self.on_stall,
                        check_races=self.check_races,
                    )
                self.streams.end(launches)
                self.launched += [(launch.entry, s) for launch, s in zip(launches, statistics, strict=True)]
        finally:
            self._forget()

    def _grid(self, launch: Launch) -> Grid:
        return Grid(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.params,
            self.memory,
            launch.cluster,
            launch.dynamic_smem_bytes,
            self.num_sms,
        )

    def _forget(self) -> None:
        self.streams.clear()
        self._kept.clear()

    def allocate(self, num_bytes: int) -> int:
        return self.memory.allocate(num_bytes, "device allocation").address

    def release(self, address: int) -> None:
        self.memory.remove(address)

    def written(self, address: int, num_bytes: int) -> None:
        self.memory.mark_defined(address, num_bytes)

    # ---------------------------------------------------------------------------------------- what a launcher asks for

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def engine(self) -> str:
        """The one that runs kernels here: fast or reference."""
        chosen = self._engine or Settings.from_environment().engine
        if chosen != "auto":
            return chosen
        from mok_cute.emulator import fast

        try:
            fast.library()
        except UnsupportedError:
            return "reference"
        return "fast"

    @property
    def product_name(self) -> str:
        return f"virtual GPU {self.arch.name}"

    def sms_per_rank(self, ep_size: int) -> int:
        """Every launch has SMs of its own, as if each rank had a GPU."""
        return self.num_sms

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8, aligned as well as memory of a GPU."""
        whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
        skipped = -whole.data_ptr() % ALIGNMENT
        return whole[skipped : skipped + num_bytes]

    def name_arrays(self, memory: torch.Tensor, arrays: Sequence[NamedArray]) -> None:
        self.keep(memory)
        with torch._C.DisableTorchFunction():
            start = memory.data_ptr()
        for array in arrays:
            self.memory.name(start + array.offset, array.name, array.shape, array.item_bytes)

    def pinned_words(self, count: int) -> torch.Tensor:
        """(count,) int32: all host memory is within a kernel's reach."""
        return torch.zeros(count, dtype=torch.int32)

    def use_schedule(self, seed: int) -> str:
        self.seed = seed
        return f"schedule seed {seed}"

    def new_stream(self) -> int:
        return self.streams.create()

    @contextmanager
    def rank_streams(self, own: Sequence[int]) -> Iterator[list[int]]:
        """These streams, behind the current stream and before what follows on it; without any, the current stream."""
        for stream in own:
            self.streams.wait(stream, CURRENT_STREAM)
        try:
            yield list(own) or [CURRENT_STREAM]
        except Exception:
            driver.the_driver().take_error()  # what is behind the error number that the compiled host code was given
            raise
        for stream in own:
            self.streams.wait(CURRENT_STREAM, stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor until the launches that are made now have run."""
        with torch._C.DisableTorchFunction():
            self._kept.append(tensor.untyped_storage())
            add_torch_tensor(self.memory, tensor)


class _WaitingReads(TorchFunctionMode):
    """Lets torch see a tensor only after the launches that may write it have run."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ADDRESSES and args and isinstance(args[0], torch.Tensor):
            if args[0].device.type == "cpu" and args[0].layout is torch.strided:
                self.device.keep(args[0])
        elif self.device.streams.num_pending and _looks_at_data(name, args, kwargs):
            self.device.synchronize()
        result = func(*args, **(kwargs or {}))
        if name in UNWRITTEN and result.device.type == "cpu":
            _make_conspicuous(result)
        return result


def _make_conspicuous(tensor: torch.Tensor) -> None:
    """Fill memory that nobody has written: what a kernel forgets to write must not look right by chance."""
    with torch._C.DisableTorchFunction():
        if tensor.dtype.is_floating_point:
            tensor.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]  # NaN in every format that has one
        elif not tensor.dtype.is_complex and tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _looks_at_data(name: str, args: Any, kwargs: Any) -> bool:
    if name in LEAVE_DATA_ALONE:
        return False
    if name == "__getitem__":
        return _has_tensor(args[1:])  # a plain index makes a view
    return _has_tensor(args) or _has_tensor(list((kwargs or {}).values()))


def _has_tensor(values: Any) -> bool:
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and _has_tensor(value)) for value in values
    )
