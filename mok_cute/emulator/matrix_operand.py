"""Where a matrix operand lies in shared memory: descriptors of wgmma and tcgen05 and the layouts that they name.

An instruction reads rows of 32 bytes (of K) from each operand. An operand is K-major, when the bytes of a row lie
together, or MN-major, when those of a column do. Sixteen-byte chunks trade places as the swizzle says; bits of the
address decide, not of the offset in the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.execute import KernelFault

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta

Offsets = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
K_BYTES = 32  # of an operand row in one instruction
PERIOD = 1024  # bytes after which every swizzle repeats
WGMMA_SWIZZLES = {0: (0, 16), 1: (128, 16), 2: (64, 16), 3: (32, 16)}  # by number: bytes of the span and of an atom
TCGEN05_SWIZZLES = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}


@dataclass(frozen=True)
class SmemDescriptor:
    """All in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int
    atom: int = 16

    @classmethod
    def of_wgmma(cls, bits: int) -> SmemDescriptor:
        return cls._decode(bits, "wgmma", bits >> 49 & 7, WGMMA_SWIZZLES.get(bits >> 62))

    @classmethod
    def of_tcgen05(cls, bits: int) -> SmemDescriptor:
        # Bits 49 to 51 are a base offset, bit 52 chooses how the leading offset counts.
        return cls._decode(bits, "tcgen05", bits >> 49 & 15, TCGEN05_SWIZZLES.get(bits >> 61))

    @classmethod
    def _decode(cls, bits: int, what: str, unknown: int, swizzle: tuple[int, int] | None) -> SmemDescriptor:
        if unknown or swizzle is None:
            raise KernelFault(
                f"{what} descriptor {bits:#x}: a base offset, an absolute leading offset and this swizzle number are "
                "not known to the virtual GPU; align the operand to its swizzle pattern"
            )
        start, leading, stride = ((bits >> low & 0x3FFF) << 4 for low in (0, 16, 32))
        return cls(start, leading, stride, *swizzle)


@lru_cache(maxsize=4096)
def _offsets(place: SmemDescriptor, rows: int, size: int, mn_major: bool, row_bytes: int) -> Offsets:
    """(rows, row_bytes / size) byte offsets of the elements of ``size`` bytes."""
    row, k = np.arange(rows)[:, None], np.arange(row_bytes // size)[None, :]
    swizzle = place.swizzle
    if mn_major and swizzle:
        width, deep = swizzle // size, 8 if place.atom == 16 else 4
        offsets = row // width * place.leading + k // deep * place.stride + k % deep * swizzle + row % width * size
    elif mn_major:
        width = 16 // size
        offsets = row // width * place.stride + row % width * size + k // 8 * place.leading + k % 8 * 16
    elif swizzle:
        offsets = row // 8 * place.stride + row % 8 * swizzle + size * k
    else:
        offsets = row // 8 * place.stride + row % 8 * 16 + size * k // 16 * place.leading + size * k % 16
    offsets = offsets + place.start
    low = {16: 4, 32: 5}[place.atom]
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle] >> (low - 4)
    swizzled: Offsets = offsets ^ ((offsets >> 7 & mask) << low)
    return swizzled


def read_operand(
    cta: Cta,
    place: SmemDescriptor,
    rows: int,
    size: int,
    *,
    mn_major: bool = False,
    skip: int = 0,
    row_bytes: int = K_BYTES,
) -> Bytes:
    """(rows, row_bytes) of the operand beginning with row ``skip``; its elements have ``size`` bytes."""
    phase = place.start % PERIOD
    base = place.start - phase
    whole = SmemDescriptor(phase, place.leading, place.stride, place.swizzle, place.atom)
    if not mn_major:
        size = 16  # chunks stay together
    offsets = _offsets(whole, rows + skip, size, mn_major, row_bytes)[skip:]
    cta.check_shared(base + int(offsets.min()), size)
    cta.check_shared(base + int(offsets.max()), size)
    cta.grid.scheduler.tracker.reads_shared(cta, offsets + base, size)
    words = cta.shared_words[size][(offsets + base) // size]
    return np.ascontiguousarray(words).view(np.uint8).reshape(rows, row_bytes)
