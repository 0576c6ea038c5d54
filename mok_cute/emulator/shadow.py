"""``races.c``: who wrote each word of memory last, who has read it since, and whether an access comes after them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mok_cute.cache import cache_directory
from mok_cute.emulator import shim
from mok_cute.settings import Settings

SOURCE = shim.SOURCE.with_name("races.c")
ASYNC, STRONG, TENSOR, GLOBAL = 1, 2, 4, 8  # flags of an event, as in races.c
RACE, SCOPE, PROXY, UNINITIALISED, TENSOR_FENCE = 1, 2, 3, 4, 5  # kinds of a conflict
MOST_CONFLICTS = 8  # of one access


class Event(ctypes.Structure):
    """``event`` of races.c."""

    slot: int
    epoch: int
    place: int
    actor: int
    cta: int
    rank: int
    flags: int
    scope: int
    _fields_ = [
        (name, ctypes.c_uint32) for name in ("slot", "epoch", "place", "actor", "cta", "rank", "flags", "scope")
    ]


class Access(ctypes.Structure):
    """``access`` of races.c."""

    _fields_ = [
        ("event", Event),
        *[(name, ctypes.c_uint32) for name in ("own_slot", "own_epoch", "pipe_slot", "pipe_epoch")],
        ("happened", ctypes.c_void_p),
        ("visible", ctypes.c_void_p),
        *[(name, ctypes.c_uint32) for name in ("num_happened", "num_visible", "writes", "must_be_written")],
    ]


class _Conflict(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        *[(name, ctypes.c_uint32) for name in ("kind", "before", "after", "before_writes")],
    ]


class Conflict(NamedTuple):
    address: int
    kind: int
    before: Event | None  # None: never written
    after: Event
    before_writes: bool


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(shim.build(cache_directory(Settings.from_environment()) / shim.FOLDER, source=SOURCE)))
    pointer, number, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    loaded.shadow_create.argtypes, loaded.shadow_create.restype = [], pointer
    loaded.shadow_destroy.argtypes, loaded.shadow_destroy.restype = [pointer], None
    loaded.shadow_event.argtypes, loaded.shadow_event.restype = [pointer, word, ctypes.POINTER(Event)], None
    loaded.shadow_access.argtypes = [pointer, pointer, pointer, number, number, pointer, word]
    loaded.shadow_access.restype = word
    loaded.shadow_forget.argtypes, loaded.shadow_forget.restype = [pointer, number, number], None
    return loaded


class Shadow:
    """The shadow of all memory of one run."""

    def __init__(self) -> None:
        self._library = library()
        self._handle = self._library.shadow_create()
        self._room: Any = (_Conflict * MOST_CONFLICTS)()

    def close(self) -> None:
        if self._handle:
            self._library.shadow_destroy(self._handle)
            self._handle = None

    def access(self, access: Access, addresses: npt.NDArray[np.uint64], size: int) -> Iterator[Conflict]:
        """Record this access to ``size`` bytes at each address; what it conflicts with."""
        addresses = np.ascontiguousarray(addresses, np.uint64)
        count = self._library.shadow_access(
            self._handle,
            ctypes.addressof(access),
            addresses.ctypes.data,
            addresses.size,
            size,
            ctypes.addressof(self._room),
            MOST_CONFLICTS,
        )
        for found in self._room[:count]:
            before = self._event(found.before) if found.before else None
            yield Conflict(found.address, found.kind, before, self._event(found.after), bool(found.before_writes))

    def _event(self, number: int) -> Event:
        event = Event()
        self._library.shadow_event(self._handle, number, ctypes.byref(event))
        return event

    def forget(self, address: int, num_bytes: int) -> None:
        """These bytes become memory that nobody has touched."""
        self._library.shadow_forget(self._handle, address, num_bytes)
