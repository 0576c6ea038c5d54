"""What both engines see of a running launch: structures that Python reads and writes and ``core.c`` declares alike.

A warp stands at several places at once, one ``Split`` for each group of lanes. A split that waits is parked on words of
memory: it is tried again when one of them, under its mask, is no longer what was seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

U32, U64 = ctypes.c_uint32, ctypes.c_uint64
MAX_SPLITS = 33  # one for each lane, and one more for a moment
MAX_WAITS = 16  # words that a split can be parked on
MAX_CLUSTER = 16
ALL_BITS = 0xFFFFFFFF
ALL_64 = (1 << 64) - 1


class Word(NamedTuple):
    """Part of an aligned 64-bit word of this process that a split waits for: bits of ``mask``."""

    address: int
    mask: int = ALL_64

    def read(self) -> int:
        return U64.from_address(self.address).value & self.mask

    @classmethod
    def within(cls, address: int, num_bytes: int) -> Word:
        """The word that holds these bytes, which do not cross a multiple of 8."""
        shift = 8 * (address % 8)
        return cls(address - address % 8, ((1 << 8 * num_bytes) - 1) << shift)


class Wait(ctypes.Structure):
    _fields_ = [("address", U64), ("mask", U64), ("seen", U64)]


class Split(ctypes.Structure):
    """Lanes of a warp that stand at the same instruction. Without waits it can run."""

    _fields_ = [("pc", U32), ("mask", U32), ("num_waits", U32), ("unused", U32), ("waits", Wait * MAX_WAITS)]

    @property
    def is_parked(self) -> bool:
        waits = self.waits[: self.num_waits]
        return bool(waits) and all(U64.from_address(one.address).value & one.mask == one.seen for one in waits)


class CtaState(ctypes.Structure):
    """``peers`` are the addresses of the states of the CTAs of the cluster, by rank."""

    _fields_ = [
        ("shared", U64),
        ("shared_end", U64),
        ("rank", U32),
        ("cluster_size", U32),
        ("peers", U64 * MAX_CLUSTER),
    ]


class WarpState(ctypes.Structure):
    """Splits are kept in the order of their places. The one that runs is not among them."""

    _fields_ = [
        ("registers", U64),
        ("cta", U64),
        ("grid", U64),
        ("progress", U64),  # instructions that this warp has executed
        ("async_steps", U64),  # of asynchronous operations that this warp issued
        ("blocked", U64),  # times that an instruction had to wait
        ("alive", U32),  # lanes that have not exited
        ("index", U32),
        ("num_splits", U32),
        ("gives_way", U32),
        ("has_effect", U32),  # since the polls of this warp were recorded
        ("unused", U32),
        ("splits", Split * MAX_SPLITS),
    ]

    def remove(self, position: int) -> None:
        self.num_splits -= 1
        for at in range(position, self.num_splits):
            self.splits[at] = self.splits[at + 1]

    def place(self, pc: int, mask: int, waits: Sequence[tuple[Word, int]] = ()) -> None:
        """Lanes that are now at ``pc``; they join a split that is there already, which then can run."""
        position = 0
        while position < self.num_splits and self.splits[position].pc < pc:
            position += 1
        if position < self.num_splits and self.splits[position].pc == pc:
            self.splits[position].mask |= mask
            self.splits[position].num_waits = 0
            return
        for at in range(self.num_splits, position, -1):
            self.splits[at] = self.splits[at - 1]
        self.num_splits += 1
        split = self.splits[position]
        split.pc, split.mask, split.num_waits = pc, mask, len(waits)
        for at, (word, seen) in enumerate(waits):
            split.waits[at] = Wait(word.address, word.mask, seen)

    def first_runnable(self) -> int | None:
        for position in range(self.num_splits):
            if not self.splits[position].is_parked:
                return position
        return None


class Machine(ctypes.Structure):
    """The scheduler. The second half is where ``core.c`` stands and what it and Python tell each other."""

    rng: int
    _fields_ = [
        ("rng", U64),
        ("time_ns", U64),
        ("executed", U64),
        ("version", U64),  # of all that a waiting warp may look at
        ("max_steps", U64),
        ("async_percent", U32),
        ("num_operations", U32),
        ("num_warps", U32),
        ("stage", U32),
        ("warps", U64),
        ("order", U64),
        ("position", U32),
        ("deaths", U32),
        ("ran", U64),
        ("turn", U64),
        ("turn_executed", U64),
        ("chosen", U32),
        ("operation", U32),
        ("pc", U32),
        ("mask", U32),
        ("escaped", U32),
        ("outcome", ctypes.c_int32),
        ("num_waits", U32),
        ("unused", U32),
        ("waits", Wait * MAX_WAITS),
    ]

    def below(self, count: int) -> int:
        """The next random number, from 0 to ``count`` - 1."""
        state = (self.rng * 6364136223846793005 + 1442695040888963407) & ALL_64
        self.rng = state
        return (state >> 32) * count >> 32

    def shuffle(self, items: list[Any]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


class GridState(ctypes.Structure):
    _fields_ = [("code", U64), ("counts", U64), ("lists", U64), ("memory", U64)]


def address_of(structure: ctypes.Structure, field: str = "") -> int:
    offset = getattr(type(structure), field).offset if field else 0
    return ctypes.addressof(structure) + int(offset)


@lru_cache(maxsize=4096)
def lanes(mask: int) -> npt.NDArray[np.bool_]:
    """(32,) read only."""
    vector = np.unpackbits(np.array([mask], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
    vector.flags.writeable = False
    return vector


def bits(vector: npt.NDArray[np.bool_]) -> int:
    return int(np.packbits(vector, bitorder="little").view("<u4")[0])
