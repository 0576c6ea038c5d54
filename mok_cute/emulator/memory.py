"""Device memory of the virtual GPU: host memory at its real addresses, and a table of what a kernel may touch.

Nothing is copied: the address of a CPU tensor is its device address. Every access is looked up in the table first, so
that a stray pointer becomes a ``MemoryFault`` with the name of the nearest allocation and never a crash of the process.
Allocations are known in three ways: added by name, made here with red zones around them, or found by ``discover`` when
an address is not in the table yet (``find_torch_tensor``).
"""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from mok_cute.errors import KernelError

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]

FIRST_ADDRESS = 4096  # page 0 is never mapped, and numpy refuses a null pointer
NUM_BYTES = (1 << 47) - 2 * FIRST_ADDRESS
RED_ZONE_BYTES = 256
ALIGNMENT = 1024  # of allocations made here: more than any copy or descriptor asks for
FAR_BYTES = 1 << 30  # from the nearest allocation: then the address is no overrun but nonsense
KEPT_FREED = 256  # freed allocations that a fault can still name
WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}  # access size to a numpy type that moves it in one piece

NULL, UNKNOWN, OUTSIDE, FREED = "null pointer", "unknown address", "out of bounds", "use after free"
MISALIGNED, UNINITIALISED = "misaligned", "uninitialised"


@dataclass(frozen=True)
class Allocation:
    """A stretch of device memory. ``name`` is what a report calls it."""

    address: int
    num_bytes: int
    name: str

    @property
    def end(self) -> int:
        return self.address + self.num_bytes

    def __str__(self) -> str:
        return f"{self.name} ({self.num_bytes} bytes at {self.address:#x})"


@dataclass(frozen=True, order=True)
class Name:
    """An array inside an allocation."""

    address: int
    num_bytes: int
    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.num_bytes

    def element(self, address: int) -> str:
        """``name[row, column]`` of the element that holds this byte."""
        number, indices = (address - self.address) // self.item_bytes, []
        for extent in reversed(self.shape):
            indices.append(number % extent)
            number //= extent
        return f"{self.name}[{', '.join(map(str, reversed(indices)))}]"


class MemoryFault(KernelError):
    """An access that device memory refuses. ``kind`` is one of the constants of this module."""

    def __init__(self, kind: str, access: str, address: int, num_bytes: int, detail: str, nearest: Allocation | None):
        super().__init__(f"{kind}: {access} of {num_bytes} bytes at {address:#x}: {detail}")
        self.kind = kind
        self.access = access
        self.address = address
        self.num_bytes = num_bytes
        self.nearest = nearest


class DeviceMemory:
    """The table of allocations and the accesses that it guards. Not for several threads at once.

    discover   called with an address that is in no allocation; may ``add`` what it finds
    """

    def __init__(self, discover: Callable[[DeviceMemory, int], None] | None = None) -> None:
        self._starts: list[int] = []  # sorted; the keys of _allocations
        self._allocations: dict[int, Allocation] = {}
        self._freed: deque[Allocation] = deque(maxlen=KEPT_FREED)
        self._defined: dict[int, npt.NDArray[np.bool_]] = {}  # by start: bytes written so far, where that is tracked
        self._owned: dict[int, Bytes] = {}  # by start: the buffer behind an allocation made here
        self.version = 0  # of the table
        self._names: list[Name] = []  # sorted by address
        self._last: Allocation | None = None  # where the latest access was: the next is mostly there too
        self._discover = discover
        everything = (ctypes.c_uint8 * NUM_BYTES).from_address(FIRST_ADDRESS)
        self._bytes: Bytes = np.ctypeslib.as_array(everything)
        whole = self._bytes[: NUM_BYTES // 16 * 16]
        self._words: dict[int, Any] = {size: whole.view(kind) for size, kind in WORDS.items()}

    # ------------------------------------------------------------------------------------------------------ the table

    def add(self, address: int, num_bytes: int, name: str, *, initialised: bool = True) -> Allocation:
        """Let kernels touch these bytes. ``initialised`` False: reading a byte before it was written is a fault.

        Whatever the table knew of the same bytes is forgotten: the host has given them to somebody else.
        """
        if address < FIRST_ADDRESS or num_bytes < 0:
            raise ValueError(f"{name}: {num_bytes} bytes at {address:#x}: no such memory; pass a host address.")
        for old in self._overlapping(address, address + num_bytes):
            self._forget(old)
        allocation = Allocation(address, num_bytes, name)
        insort(self._starts, address)
        self._allocations[address] = allocation
        self.version += 1
        if not initialised:
            self._defined[address] = np.zeros(num_bytes, np.bool_)
        return allocation

    def name(self, address: int, name: str, shape: tuple[int, ...], item_bytes: int) -> None:
        """What a report calls the elements of an array inside an allocation, until they are freed or named anew."""
        num_bytes = item_bytes * math.prod(shape)
        if self.find(address) is None or not num_bytes:
            raise ValueError(f"{name}: {num_bytes} bytes at {address:#x}: name what lies in an allocation.")
        self._names = [part for part in self._names if part.end <= address or address + num_bytes <= part.address]
        insort(self._names, Name(address, num_bytes, name, shape, item_bytes))

    def describe(self, address: int) -> str:
        """The element of a named array that holds this byte, or the byte of its allocation."""
        position = bisect_right(self._names, address, key=lambda part: part.address)
        if position and address < self._names[position - 1].end:
            return self._names[position - 1].element(address)
        allocation = self.find(address)
        return f"{address:#x}" if allocation is None else f"{allocation.name}, byte {address - allocation.address}"

    def remove(self, address: int) -> None:
        """Forget the allocation that starts here; later accesses are reported as use after free."""
        if address not in self._allocations:
            raise ValueError(f"no allocation starts at {address:#x}; remove what add or allocate returned.")
        allocation = self._allocations[address]
        self._forget(allocation)
        self._owned.pop(address, None)
        self._freed.append(allocation)

    def discard(self, allocation: Allocation) -> None:
        """``remove`` for what may have left the table already: its bytes can belong to another allocation by now."""
        if self._allocations.get(allocation.address) is allocation:
            self.remove(allocation.address)

    def allocate(self, num_bytes: int, name: str) -> Allocation:
        """Fresh memory, aligned, uninitialised, with a red zone on both sides."""
        buffer = np.empty(num_bytes + ALIGNMENT + 2 * RED_ZONE_BYTES, np.uint8)
        address = -(-(buffer.ctypes.data + RED_ZONE_BYTES) // ALIGNMENT) * ALIGNMENT
        allocation = self.add(address, num_bytes, name, initialised=False)
        self._owned[address] = buffer
        return allocation

    def mark_defined(self, address: int, num_bytes: int) -> None:
        """The host has written these bytes itself."""
        allocation = self.find(address)
        if allocation is not None and allocation.address in self._defined:
            offset = address - allocation.address
            self._defined[allocation.address][offset : offset + num_bytes] = True

    def allocations(self) -> list[Allocation]:
        """All of them in the order of their addresses."""
        return [self._allocations[start] for start in self._starts]

    def defined(self, allocation: Allocation) -> npt.NDArray[np.bool_] | None:
        """Which bytes were written so far, where that is tracked."""
        return self._defined.get(allocation.address)

    def _forget(self, allocation: Allocation) -> None:
        self.version += 1
        self._starts.pop(bisect_right(self._starts, allocation.address) - 1)
        del self._allocations[allocation.address]
        self._defined.pop(allocation.address, None)
        self._names = [part for part in self._names if part.end <= allocation.address or allocation.end <= part.address]
        self._last = None

    def _overlapping(self, start: int, end: int) -> list[Allocation]:
        first = max(0, bisect_right(self._starts, start) - 1)
        candidates = (self._allocations[known] for known in self._starts[first : bisect_right(self._starts, end)])
        return [a for a in candidates if (a.address < end and start < a.end) or a.address == start]

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds this address, if there is one."""
        position = bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        allocation = self._allocations[self._starts[position]]
        return allocation if address < allocation.end else None

    # ------------------------------------------------------------------------------------------------------- accesses

    def read(self, address: int, num_bytes: int, align: int = 1) -> Bytes:
        """A copy of these bytes."""
        self._check("read", address, num_bytes, align)
        start = address - FIRST_ADDRESS
        return self._bytes[start : start + num_bytes].copy()

    def write(self, address: int, data: bytes | Bytes, align: int = 1) -> None:
        source = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray)) else data.reshape(-1)
        self._check("write", address, source.size, align)
        start = address - FIRST_ADDRESS
        self._bytes[start : start + source.size] = source

    def gather(self, addresses: Addresses, size: int) -> Bytes:
        """(n, size): the bytes at each address, as one load of a warp. Sizes are those of WORDS; addresses aligned."""
        if not addresses.size:
            return np.empty((0, size), np.uint8)
        index = self._check_each("read", addresses, size)
        taken: Bytes = self._words[size][index].view(np.uint8).reshape(-1, size)
        return taken

    def peek(self, addresses: Addresses, size: int) -> Bytes:
        """What ``gather`` gives, of addresses that it has checked before in this run."""
        index = (addresses >> np.uint64(size.bit_length() - 1)).astype(np.int64) - FIRST_ADDRESS // size
        taken: Bytes = self._words[size][index].view(np.uint8).reshape(-1, size)
        return taken

    def scatter(self, addresses: Addresses, data: Bytes) -> None:
        """Store row i of ``data`` (n, size) at address i. Of equal addresses the last one stays."""
        if not addresses.size:
            return
        size = data.shape[1]
        index = self._check_each("write", addresses, size)
        self._words[size][index] = np.ascontiguousarray(data).view(WORDS[size]).reshape(-1)

    def _check(self, access: str, address: int, num_bytes: int, align: int) -> None:
        if num_bytes <= 0:
            return
        if address % align:
            self._fault(MISALIGNED, access, address, num_bytes, f"must be a multiple of {align}")
        last = self._last
        if last is None or not (last.address <= address and address + num_bytes <= last.end):
            last = self._locate(access, address, num_bytes)
        defined = self._defined.get(last.address) if self._defined else None
        if defined is None:
            return
        offset = address - last.address
        if access == "write":
            defined[offset : offset + num_bytes] = True
        elif not defined[offset : offset + num_bytes].all():
            first = address + int(np.argmin(defined[offset : offset + num_bytes]))
            self._fault(UNINITIALISED, access, address, num_bytes, f"byte {first:#x} was never written", last)

    def _check_each(self, access: str, addresses: Addresses, size: int) -> npt.NDArray[np.int64]:
        """Every address checked; their indices in the view of words of this size."""
        if size not in WORDS:
            raise ValueError(f"size={size}: a lane moves one of {', '.join(map(str, WORDS))} bytes; split the access.")
        low, high = int(addresses.min()), int(addresses.max())
        last = self._last
        if last is None or not last.address <= low < last.end:
            last = self.find(low)
            if last is not None:
                self._last = last
        clear = (
            last is not None
            and last.address <= low
            and high + size <= last.end
            and last.address not in self._defined
            and not (addresses & np.uint64(size - 1)).any()
        )
        if not clear:
            for address in dict.fromkeys(addresses.tolist()):  # lanes often share one
                self._check(access, address, size, size)
        offset = FIRST_ADDRESS // size
        return (addresses >> np.uint64(size.bit_length() - 1)).astype(np.int64) - offset

    def _locate(self, access: str, address: int, num_bytes: int) -> Allocation:
        """The allocation that holds all of these bytes, or a fault."""
        allocation = self.find(address)
        if allocation is None and self._discover is not None and address >= FIRST_ADDRESS:
            self._discover(self, address)
            allocation = self.find(address)
        if allocation is not None and address + num_bytes <= allocation.end:
            self._last = allocation
            return allocation
        if address < FIRST_ADDRESS:
            self._fault(NULL, access, address, num_bytes, "no memory lies there")
        if allocation is not None:
            over = address + num_bytes - allocation.end
            self._fault(OUTSIDE, access, address, num_bytes, f"the last {over} lie beyond {allocation}", allocation)
        for freed in reversed(self._freed):
            if freed.address <= address < freed.end:
                self._fault(FREED, access, address, num_bytes, f"inside {freed}, which was freed", freed)
        nearest = self._nearest(address)
        if nearest is None:
            self._fault(UNKNOWN, access, address, num_bytes, "the device has no allocations")
        after = address >= nearest.end
        distance = address - nearest.end if after else nearest.address - address
        detail = f"{distance} bytes {'after' if after else 'before'} {nearest}"
        self._fault(OUTSIDE if distance < FAR_BYTES else UNKNOWN, access, address, num_bytes, detail, nearest)

    def _nearest(self, address: int) -> Allocation | None:
        position = bisect_right(self._starts, address)
        sides = [self._allocations[start] for start in self._starts[max(0, position - 1) : position + 1]]
        if not sides:
            return None
        return min(sides, key=lambda a: min(abs(address - a.end), abs(a.address - address)))

    def _fault(
        self, kind: str, access: str, address: int, num_bytes: int, detail: str, nearest: Allocation | None = None
    ) -> NoReturn:
        if nearest is None and kind == MISALIGNED:
            nearest = self.find(address)
            detail += f"; in {nearest}" if nearest else ""
        raise MemoryFault(kind, access, address, num_bytes, detail, nearest)


def find_torch_tensor(memory: DeviceMemory, address: int) -> None:
    """For ``DeviceMemory(discover=...)``: add the storage of the live torch tensor that holds this address."""
    import torch

    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor) or candidate.device.type != "cpu":
            continue
        if candidate.layout is not torch.strided:
            continue
        start = candidate.untyped_storage().data_ptr()
        if start <= address < start + candidate.untyped_storage().nbytes():
            add_torch_tensor(memory, candidate)
            return


def add_torch_tensor(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    """Add the storage of a CPU tensor, unless it is known. It leaves the table when torch frees it."""
    storage = tensor.untyped_storage()
    start, num_bytes = storage.data_ptr(), storage.nbytes()
    known = memory.find(start)
    if not num_bytes or (known is not None and known.end >= start + num_bytes):
        return
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    allocation = memory.add(start, num_bytes, f"torch tensor {shape} {tensor.dtype}")
    weakref.finalize(storage, memory.discard, allocation)
