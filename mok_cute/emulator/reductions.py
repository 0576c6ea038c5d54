"""Read-modify-write of whole vectors: what bulk reductions and vector atomics do to each element.

Sums of halves and floats are rounded to nearest once. ``noftz`` keeps subnormal halves; f32 sums keep them as well,
but for atomics on global memory, which flush them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.rounding import canonical, half_to_f32, to_half

Values = npt.NDArray[Any]
INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "su" for bits in (32, 64)
}
INTEGERS |= {f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (32, 64)}
ELEMENTS: dict[str, np.dtype[Any]] = {
    **INTEGERS,
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "f16": np.dtype("u2"),
    "bf16": np.dtype("u2"),
}


def combine(before: Values, new: Values, operation: str, kind: str) -> Values:
    """Both as elements of ELEMENTS[kind], halves as their bits."""
    if kind in ("f16", "bf16"):
        left, right = half_to_f32(before, kind), half_to_f32(new, kind)
        if operation == "add":
            return to_half(left.astype(np.float64) + right.astype(np.float64), kind)
        return to_half(_extreme(left, right, operation), kind)
    if kind in ("f32", "f64"):
        if operation == "add":
            total = before + new
            return canonical(total) if kind == "f32" else total
        return np.asarray(_extreme(before, new, operation), before.dtype)
    return _INTEGER[operation](before, new)


def _extreme(left: Values, right: Values, operation: str) -> Values:
    return np.fmin(left, right) if operation == "min" else np.fmax(left, right)


def _increment(before: Values, limit: Values) -> Values:
    return np.where(before >= limit, before.dtype.type(0), before + before.dtype.type(1))


def _decrement(before: Values, limit: Values) -> Values:
    return np.where((before == 0) | (before > limit), limit, before - before.dtype.type(1))


_INTEGER: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": _increment,
    "dec": _decrement,
}


def operation_of(parts: list[str]) -> str:
    """The operation that an opcode names; ValueError without one."""
    found = [part for part in parts if part in _INTEGER]
    if len(found) != 1:
        raise ValueError("operation")
    return found[0]
