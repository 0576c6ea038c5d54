"""Small helpers for traced code, where the DSL has no call of its own."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64


class Untouched:
    """A plain object whose fields no traced loop or branch reassigns: the DSL carries it through as nothing."""

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Untouched":
        return self


@cute.jit
def shuffle64(value: Int64, lane: Int32) -> Int64:
    """Lane ``lane``'s 64-bit value, for all lanes of the warp: two 32-bit shuffles."""
    low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
