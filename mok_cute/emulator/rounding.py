"""Single and half precision results with one rounding, in every PTX mode.

Sums and products are formed in double precision and, where they are not exact there, rounded to odd: the last bit says
that something was cut off. A second rounding to at most 24 bits then never rounds a rounded tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Value = Any
Doubles = npt.NDArray[np.float64]
MODES = ("rn", "rz", "rm", "rp")  # to nearest even, towards zero, down, up
CANONICAL_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}


def sum_to_odd(a: Value, b: Value) -> Doubles:
    """a + b of doubles, rounded to odd."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    total = np.asarray(a + b)
    back = total - a
    return to_odd(total, (a - (total - back)) + (b - back))


def to_odd(total: Doubles, error: Doubles) -> Doubles:
    """A rounded value and what the rounding lost -> the same rounded to odd."""
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & ((bits & 1) == 0)
    nudge = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + nudge, bits).view(np.float64)


def fused_multiply_add(a: Value, b: Value, c: Value) -> Doubles:
    """a * b + c of single precision values, rounded to odd: the product is exact in double precision."""
    return sum_to_odd(np.asarray(a, np.float64) * np.asarray(b, np.float64), c)


def to_f32(value: Value, mode: str = "rn") -> npt.NDArray[np.float32]:
    wide = np.asarray(value, np.float64)
    single = np.asarray(wide.astype(np.float32))
    if mode == "rn":
        return single
    down, up = np.float32(-np.inf), np.float32(np.inf)
    below, above = np.nextafter(single, down), np.nextafter(single, up)
    if mode == "rz":
        return np.where(np.abs(single) > np.abs(wide), np.nextafter(single, np.float32(0)), single)
    if mode == "rm":
        return np.where(single > wide, below, single)
    if mode == "rp":
        return np.where(single < wide, above, single)
    raise ValueError(f"rounding {mode}")


def to_half(value: Value, kind: str, mode: str = "rn") -> npt.NDArray[np.uint16]:
    """Bits of f16 or bf16; NaN is the canonical one. ``value`` is exact or rounded to odd in double precision."""
    wide = np.asarray(value, np.float64)
    bits = _f16_bits(wide, mode) if kind == "f16" else _bf16_bits(wide, mode)
    return np.where(np.isnan(wide), CANONICAL_NAN[kind], bits).astype(np.uint16)


def _f16_bits(wide: Doubles, mode: str) -> npt.NDArray[np.uint16]:
    half = np.asarray(wide.astype(np.float16))
    back = half.astype(np.float64)
    down, up = np.float16(-np.inf), np.float16(np.inf)
    if mode == "rz":
        half = np.where(np.abs(back) > np.abs(wide), np.nextafter(half, np.float16(0)), half)
    elif mode == "rm":
        half = np.where(back > wide, np.nextafter(half, down), half)
    elif mode == "rp":
        half = np.where(back < wide, np.nextafter(half, up), half)
    elif mode != "rn":
        raise ValueError(f"rounding {mode}")
    return np.asarray(half, np.float16).view(np.uint16)


def _bf16_bits(wide: Doubles, mode: str) -> npt.NDArray[np.uint32]:
    # To single precision towards zero, with what was cut off kept in the last bit, which bf16 does not have.
    single = to_f32(wide, "rz")
    bits = single.view(np.uint32) | (single.astype(np.float64) != wide).astype(np.uint32)
    rest = bits & np.uint32(0xFFFF)
    negative = bits >> np.uint32(31) != 0
    if mode == "rn":
        add = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    elif mode == "rz":
        add = np.zeros_like(bits)
    elif mode in ("rm", "rp"):
        add = np.where((rest != 0) & (negative == (mode == "rm")), np.uint32(0xFFFF), np.uint32(0))
    else:
        raise ValueError(f"rounding {mode}")
    finite = np.isfinite(wide)
    result: npt.NDArray[np.uint32] = np.where(finite, bits + add, bits) >> np.uint32(16)
    return result


def half_to_f32(bits: Value, kind: str) -> npt.NDArray[np.float32]:
    halves = np.asarray(bits).astype(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def flush(value: Value) -> Value:
    """Subnormal numbers become zero of the same sign (.ftz)."""
    value = np.asarray(value)
    return np.where(np.abs(value) < np.finfo(value.dtype).tiny, np.copysign(np.zeros_like(value), value), value)


def canonical(value: Value) -> Value:
    """Single precision with every NaN the canonical one."""
    single = np.asarray(value, np.float32)
    missing = np.isnan(single)
    if not missing.any():
        return single
    return np.where(missing, np.uint32(CANONICAL_NAN["f32"]).view(np.float32), single)
