"""The instructions that ``perf/instructions.py`` compares, and their inputs.

A case is the body of a kernel in which each thread finds its inputs in %i0, %i1, ... and leaves its result in %o.
Inputs depend on nothing but integer arithmetic, so they have the same bits everywhere. They are shuffled: the first
few thousand of a set are a sample of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RANDOM = 1 << 18  # random operands of an instruction with several sources
DENSE_RANDOM = 1 << 20  # random numbers in single and double precision, beside the chosen ones
MODES = ("rn", "rz", "rm", "rp")
WHOLE_MODES = ("rni", "rzi", "rmi", "rpi")


# ------------------------------------------------------------------------------------------------------------- inputs


def hashes(seed: int, count: int) -> Array:
    """(count,) u64: the SplitMix64 sequence of a seed."""
    step = np.uint64(0x9E3779B97F4A7C15)
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * step
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shuffled(seed: int, arrays: list[Array]) -> tuple[Array, ...]:
    order = np.argsort(hashes(seed, len(arrays[0])), kind="stable")
    return tuple(np.ascontiguousarray(array[order]) for array in arrays)


def _signed(values: list[int], bits: int) -> list[int]:
    return [value | sign << (bits - 1) for value in values for sign in (0, 1)]


# Zero, subnormal numbers, both ends of the normal ones, one and its neighbours, small integers, infinity and NaNs.
F32 = [0, 1, 2, 0x400000, 0x7FFFFF, 0x800000, 0x800001, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40400000]
F32 += [0x4B000000, 0x4B7FFFFF, 0x4F000000, 0x5F000000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345]
F16 = [0, 1, 2, 0x3FF, 0x400, 0x401, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0x4200, 0x6400, 0x7BFF, 0x7C00, 0x7C01, 0x7E12]
WORDS = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
WORDS += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0x00FF00FF]
SPECIAL = {
    "f32": _signed(F32, 32),
    "f16": _signed(F16, 16),
    "bf16": [value >> 16 for value in _signed(F32, 32)] + [1, 0x8001],
    "b32": WORDS,
    "b64": [low | high << 32 for low in WORDS[::3] for high in WORDS[::3]],
    "f64": _signed(
        [0, 1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x3FF0000000000000, 0x3FF0000000000001, 0x7FEFFFFFFFFFFFFF]
        + [0x7FF0000000000000, 0x7FF8000000000001, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x36A0000000000000],
        64,
    ),
}
WIDTH = {"f32": 32, "f16": 16, "bf16": 16, "b16": 16, "b32": 32, "b64": 64, "f64": 64, "f16x2": 32, "bf16x2": 32}
EXPONENT = {"f32": (23, 255), "f64": (52, 2047)}  # mantissa bits; the exponent of infinity


def _dense_f32() -> Array:
    """All exponents; five upper mantissa bits; below them nothing, one bit, or its neighbours: ties of any format."""
    tails = sorted({0, *(max((1 << bit) + by, 0) for bit in range(18) for by in (-1, 0, 1))})
    upper = np.arange(1 << 14, dtype=np.uint32) << np.uint32(18)
    chosen = (upper[:, None] | np.array(tails, np.uint32)).ravel()
    rounded = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    drawn = (hashes(1, DENSE_RANDOM) >> np.uint64(32)).astype(np.uint32)
    # Numbers near integers, for conversions to them.
    whole = (hashes(2, 1 << 16) >> np.uint64(30)).astype(np.int64) - np.int64(1 << 33)
    shift = hashes(3, 1 << 16) % np.uint64(36)
    near = np.ldexp((whole >> shift.astype(np.int64)).astype(np.float64), -1).astype(np.float32).view(np.uint32)
    return np.concatenate([np.array(SPECIAL["f32"], np.uint32), chosen, rounded, drawn, near])


def _dense_f64() -> Array:
    """Ties of single precision and their neighbours at all its exponents, numbers near integers, random ones."""
    drawn = hashes(4, DENSE_RANDOM)
    count = 1 << 18
    exponent = np.uint64(1023 - 152) + hashes(5, count) % np.uint64(284)
    kept = hashes(6, count)
    bit = np.uint64(1) << (kept % np.uint64(53))
    tail: Array = bit + (hashes(7, count) % np.uint64(3)) - np.uint64(1)
    upper = (kept >> np.uint64(12)) & ~(bit - np.uint64(1)) & ~bit & np.uint64((1 << 52) - 1)
    ties = (kept & np.uint64(1 << 63)) | exponent << np.uint64(52) | upper | (tail & np.uint64((1 << 52) - 1))
    whole = (hashes(8, 1 << 16) >> (hashes(9, 1 << 16) % np.uint64(64))).astype(np.int64)
    near = np.ldexp(whole.astype(np.float64), -1).view(np.uint64)
    return np.concatenate([np.array(SPECIAL["f64"], np.uint64), drawn, ties, near])


def _random(kind: str, count: int, number: int) -> Array:
    bits = WIDTH[kind]
    return (hashes(20 + number, count) >> np.uint64(64 - bits)).astype(f"u{bits // 8}")


def _related(kind: str, first: Array, scale: Array, number: int) -> Array:
    """Random numbers, half of them with an exponent at most 31 from that of ``scale`` (biased)."""
    mantissa, top = EXPONENT[kind]
    drawn: Array = _random(kind, len(first), number)
    dtype = drawn.dtype.type
    spread = (hashes(40 + number, len(first)) % np.uint64(63)).astype(np.int64) - 31
    exponent = np.clip(scale + spread, 0, top - 1).astype(drawn.dtype)
    near = (drawn & dtype(~(top << mantissa) & (2 ** (8 * drawn.itemsize) - 1))) | exponent << dtype(mantissa)
    return np.where(hashes(60 + number, len(first)) & np.uint64(1), near, drawn)


def _exponent(kind: str, values: Array) -> Array:
    mantissa, top = EXPONENT[kind]
    return (values >> values.dtype.type(mantissa)).astype(np.int64) & top


def _random_operands(kind: str, arity: int) -> list[Array]:
    if kind == "bf16":
        return [(array >> np.uint32(16)).astype(np.uint16) for array in _random_operands("f32", arity)]
    first = _random(kind, RANDOM, 0)
    if kind not in EXPONENT:
        return [first, *(_random(kind, RANDOM, number) for number in range(1, arity))]
    second = _related(kind, first, _exponent(kind, first), 1)
    bias = EXPONENT[kind][1] // 2
    third = _related(kind, first, _exponent(kind, first) + _exponent(kind, second) - bias, 2)
    return [first, second, third][:arity]


@lru_cache(maxsize=8)
def operands(kind: str, arity: int) -> tuple[Array, ...]:
    """Sources of one type. One of 16 bits takes every value; of several, all combinations of special values occur."""
    if kind.endswith("16x2"):
        low = operands(kind.removesuffix("x2"), arity)
        order = np.argsort(hashes(90, len(low[0])), kind="stable")
        return tuple(array.astype(np.uint32) | array[order].astype(np.uint32) << np.uint32(16) for array in low)
    if arity == 1 and WIDTH[kind] == 16:
        return _shuffled(10, [np.arange(1 << 16).astype(np.uint16)])
    if arity == 1 and kind in ("f32", "f64"):
        return _shuffled(11, [_dense_f32() if kind == "f32" else _dense_f64()])
    special = SPECIAL[kind][:: 1 if arity < 3 else 2 if len(SPECIAL[kind]) < 45 else 4]
    if len(special) ** arity > RANDOM:
        special = special[::3]
    combinations = np.array(list(product(special, repeat=arity)), np.uint64)
    columns = [combinations[:, number].astype(f"u{WIDTH[kind] // 8}") for number in range(arity)]
    drawn = _random_operands(kind, arity)
    return _shuffled(12, [np.concatenate(pair) for pair in zip(columns, drawn, strict=True)])


# -------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """``exact`` of an approximate instruction: its function in double precision, and the format of source and result.

    Every other instruction has one right result.
    """

    name: str
    body: str
    kind: str
    arity: int
    result: int  # bits
    exact: Callable[[Array], Array] | None = None
    form: str = ""

    @property
    def inputs(self) -> tuple[Array, ...]:
        return operands(self.kind, self.arity)


REGISTER = {"b8": 16, "u8": 16, "s8": 16, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
REGISTER |= {name: bits for name, bits in WIDTH.items()}
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _simple(opcode: str, kind: str, arity: int = 1, result: str | None = None) -> Case:
    sources = ", ".join(f"%i{number}" for number in range(arity))
    return Case(opcode, f"{opcode} %o, {sources};", kind, arity, REGISTER[result or kind])


def _register_kind(kind: str) -> str:
    """The inputs for a source of this type: integers by the width of their register."""
    return kind if kind in EXPONENT or kind in ("f16", "bf16") else f"b{REGISTER[kind]}"


def conversions() -> Iterator[Case]:
    for half in ("f16", "bf16"):
        for mode in MODES:
            yield _simple(f"cvt.{mode}.{half}.f32", "f32", 1, half)
        for mode in ("rn", "rz"):
            for more in ("", ".relu"):
                yield (
                    _simple(f"cvt.{mode}{more}.{half}.f32", "f32", 1, half)
                    if more
                    else _simple(f"cvt.{mode}.satfinite.{half}.f32", "f32", 1, half)
                )
                opcode = f"cvt.{mode}{more}.{half}x2.f32"
                yield Case(opcode, _pair(opcode), "f32", 1, 32)
        yield _simple(f"cvt.f32.{half}", half, 1, "f32")
    yield _simple("cvt.rn.ftz.f16.f32", "f32", 1, "f16")
    yield _simple("cvt.rn.sat.f16.f32", "f32", 1, "f16")
    yield _simple("cvt.ftz.f32.f16", "f16", 1, "f32")
    yield _simple("cvt.sat.f32.f16", "f16", 1, "f32")
    yield _simple("cvt.rn.bf16.f16", "f16", 1, "bf16")
    yield _simple("cvt.rn.f16.bf16", "bf16", 1, "f16")
    for mode in ("rna", "rn", "rz", "rn.relu", "rz.relu", "rna.satfinite"):
        yield _simple(f"cvt.{mode}.tf32.f32", "f32", 1, "f32")
    for small in ("e4m3x2", "e5m2x2"):
        for more in ("", ".relu"):
            opcode = f"cvt.rn.satfinite{more}.{small}.f32"
            yield Case(opcode, _pair(opcode), "f32", 1, 16)
            yield _simple(f"cvt.rn.satfinite{more}.{small}.f16x2", "f16x2", 1, "b16")
            yield _simple(f"cvt.rn{more}.f16x2.{small}", "b16", 1, "b32")
    for mode in MODES:
        yield _simple(f"cvt.{mode}.f32.f64", "f64", 1, "f32")
        yield _simple(f"cvt.{mode}.f16.f64", "f64", 1, "f16")
    yield _simple("cvt.f64.f32", "f32", 1, "f64")
    yield _simple("cvt.ftz.f32.f32", "f32", 1, "f32")
    yield _simple("cvt.sat.f32.f32", "f32", 1, "f32")
    yield _simple("cvt.ftz.sat.f32.f32", "f32", 1, "f32")
    for mode in WHOLE_MODES:
        yield _simple(f"cvt.{mode}.f32.f32", "f32", 1, "f32")
        yield _simple(f"cvt.{mode}.f16.f16", "f16", 1, "f16")
        yield _simple(f"cvt.{mode}.f64.f64", "f64", 1, "f64")
        for origin in ("f32", "f16", "bf16", "f64"):
            for to in INTEGERS if mode in ("rni", "rzi") else ("s8", "u16", "s32", "u64"):
                if (to in ("u8", "s8")) and origin == "bf16":
                    continue
                yield _simple(f"cvt.{mode}.{to}.{origin}", origin, 1, to)
    yield _simple("cvt.rni.ftz.s32.f32", "f32", 1, "s32")
    yield _simple("cvt.rpi.ftz.u32.f32", "f32", 1, "u32")
    for mode, origin in product(MODES, INTEGERS):
        for to in ("f32", "f16", "bf16", "f64"):
            if origin in ("u8", "s8") and (mode != "rn" or to == "bf16") or mode != "rn" and to == "f64":
                continue
            yield _simple(f"cvt.{mode}.{to}.{origin}", _register_kind(origin), 1, to)
    for to, origin in product(INTEGERS, INTEGERS):
        yield _simple(f"cvt.{to}.{origin}", _register_kind(origin), 1, to)
        holds_all = int(to[1:]) > int(origin[1:]) and (to[0] == origin[0] or origin[0] == "u")
        if to != origin and not holds_all:
            yield _simple(f"cvt.sat.{to}.{origin}", _register_kind(origin), 1, to)
    for to in ("u16", "s16"):
        yield _simple(f"cvt.pack.sat.{to}.s32", "b32", 2)
    for to in ("u8", "s8"):
        yield _simple(f"cvt.pack.sat.{to}.s32.b32", "b32", 3)


def _pair(opcode: str) -> str:
    """The input and a related one, so that one set of inputs serves both sources."""
    return f".reg .b32 %other; xor.b32 %other, %i0, 0x80010001; {opcode} %o, %i0, %other;"


def arithmetic() -> Iterator[Case]:
    for name, arity in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        for mode in MODES:
            yield _simple(f"{name}.{mode}.f32", "f32", arity)
        for more in ("ftz", "sat", "ftz.sat"):
            yield _simple(f"{name}.rn.{more}.f32", "f32", arity)
        yield _simple(f"{name}.rn.f64", "f64", arity)
        for half in ("f16", "f16x2", "bf16", "bf16x2"):
            yield _simple(f"{name}.rn.{half}", half, arity)
            for more in ("ftz", "sat") if half.startswith("f16") else ():
                yield _simple(f"{name}.rn.{more}.{half}", half, arity)
    for half in ("f16", "f16x2", "bf16", "bf16x2"):
        yield _simple(f"fma.rn.relu.{half}", half, 3)
    for name, arity in (("div", 2), ("rcp", 1), ("sqrt", 1)):
        for mode in MODES:
            yield _simple(f"{name}.{mode}.f32", "f32", arity)
        yield _simple(f"{name}.rn.ftz.f32", "f32", arity)
        yield _simple(f"{name}.rn.f64", "f64", arity)
    for name in ("min", "max"):
        for more in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            yield _simple(f"{name}{more}.f32", "f32", 2)
        yield _simple(f"{name}.f64", "f64", 2)
        for half in ("f16", "bf16", "f16x2", "bf16x2"):
            for more in ("", ".NaN", ".xorsign.abs"):
                yield _simple(f"{name}{more}.{half}", half, 2)
    for name in ("neg", "abs"):
        for kind in ("f32", "ftz.f32", "f16", "bf16", "f16x2", "bf16x2", "f64"):
            yield _simple(f"{name}.{kind}", kind.removeprefix("ftz."), 1)
    yield _simple("copysign.f32", "f32", 2)
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield _predicate(f"testp.{test}.f32", "f32", 1)
    for relation in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        for kind in ("f32", "f16", "bf16"):
            yield _predicate(f"setp.{relation}.{kind}", kind, 2)
    yield _predicate("setp.lt.ftz.f32", "f32", 2)
    yield _predicate("setp.eq.ftz.f32", "f32", 2)
    yield _simple("set.lt.u32.f32", "f32", 2, "u32")
    yield _simple("set.geu.f32.f32", "f32", 2)


def _predicate(opcode: str, kind: str, arity: int) -> Case:
    sources = ", ".join(f"%i{number}" for number in range(arity))
    return Case(opcode, f"{opcode} %p1, {sources}; selp.b32 %o, 1, 0, %p1;", kind, arity, 32)


def integers() -> Iterator[Case]:
    for kind in ("u32", "s32", "u64", "s64"):
        bits = _register_kind(kind)
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield _simple(f"{name}.{kind}", bits, 2)
        for name in ("mad.lo", "mad.hi", "sad"):
            yield _simple(f"{name}.{kind}", bits, 3)
        for name in ("div", "rem"):  # the result of a division by zero is unspecified
            body = f"max.u{kind[1:]} %i1, %i1, 1; {name}.{kind} %o, %i0, %i1;"
            yield Case(f"{name}.{kind}", body, bits, 2, REGISTER[kind])
        yield _simple(f"bfind.{kind}", bits, 1, "u32")
        yield _simple(f"bfind.shiftamt.{kind}", bits, 1, "u32")
        shift = "cvt.u32.u64 %r1, %i1;" if kind.endswith("64") else "mov.b32 %r1, %i1;"
        for name in ("shr",) if kind[0] == "s" else ("shr", "shl"):
            opcode = f"{name}.{kind if name == 'shr' else 'b' + kind[1:]}"
            yield Case(opcode, f"{shift} {opcode} %o, %i0, %r1;", bits, 2, REGISTER[kind])
            yield Case(
                f"{opcode} small", f"{shift} and.b32 %r1, %r1, 63; {opcode} %o, %i0, %r1;", bits, 2, REGISTER[kind]
            )
        field = f"{shift} shr.u32 %r2, %r1, 8;"
        yield Case(f"bfe.{kind}", f"{field} bfe.{kind} %o, %i0, %r1, %r2;", bits, 2, REGISTER[kind])
    for kind in ("b32", "b64"):
        for name in ("popc", "clz"):
            yield _simple(f"{name}.{kind}", kind, 1, "u32")
        for name in ("brev", "not", "cnot"):
            yield _simple(f"{name}.{kind}", kind, 1)
        for name in ("and", "or", "xor"):
            yield _simple(f"{name}.{kind}", kind, 2)
        narrow = "cvt.u32.u64 %r1, %i2;" if kind == "b64" else "mov.b32 %r1, %i2;"
        yield Case(
            f"bfi.{kind}",
            f"{narrow} shr.u32 %r2, %r1, 8; bfi.{kind} %o, %i0, %i1, %r1, %r2;",
            kind,
            3,
            REGISTER[kind],
        )
    for name in ("add.sat.s32", "sub.sat.s32", "mul24.lo.s32", "mul24.lo.u32"):
        yield _simple(name, "b32", 2)
    yield _simple("mad24.lo.s32", "b32", 3)
    for kind in ("u16", "s16"):
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield _simple(f"{name}.{kind}", "f16", 2, kind)
        for name in ("add", "min", "max"):
            yield _simple(f"{name}.{kind}x2", "b32", 2)
    for relu in ("min.relu.s32", "max.relu.s32", "min.relu.s16x2", "max.relu.s16x2"):
        yield _simple(relu, "b32", 2)
    for direction, mode in product("lr", ("wrap", "clamp")):
        opcode = f"shf.{direction}.{mode}.b32"
        yield _simple(opcode, "b32", 3)
        yield Case(f"{opcode} small", f"and.b32 %i2, %i2, 63; {opcode} %o, %i0, %i1, %i2;", "b32", 3, 32)
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield _simple(f"prmt.b32{mode}", "b32", 3)
    for table in (0x96, 0xCA, 0xE8, 0x01, 0x80, 0x3C):
        yield Case(f"lop3.b32 {table:#x}", f"lop3.b32 %o, %i0, %i1, %i2, {table};", "b32", 3, 32)
    for a, b in product(("u32", "s32"), repeat=2):
        yield _simple(f"dp4a.{a}.{b}", "b32", 3)
        for half in ("lo", "hi"):
            yield _simple(f"dp2a.{half}.{a}.{b}", "b32", 3)
    for mode in ("wrap", "clamp"):
        yield _simple(f"bmsk.{mode}.b32", "b32", 2)
        yield _simple(f"szext.{mode}.s32", "b32", 2)
        yield _simple(f"szext.{mode}.u32", "b32", 2)
    yield Case(
        "add.cc chain",
        "add.cc.u32 %r1, %i0, %i1; addc.cc.u32 %r2, %i1, %i2; addc.u32 %r3, 0, 0;"
        "mad.lo.u32 %o, %r1, 3, %r2; mad.lo.u32 %o, %o, 5, %r3;",
        "b32",
        3,
        32,
    )
    yield Case(
        "sub.cc chain",
        "sub.cc.u32 %r1, %i0, %i1; subc.cc.u32 %r2, %i1, %i2; subc.u32 %r3, 0, 0;"
        "mad.lo.u32 %o, %r1, 3, %r2; mad.lo.u32 %o, %o, 5, %r3;",
        "b32",
        3,
        32,
    )
    yield Case(
        "mad.lo.cc chain",
        "mad.lo.cc.u32 %r1, %i0, %i1, %i2; madc.hi.u32 %r2, %i0, %i1, 0; mad.lo.u32 %o, %r1, 3, %r2;",
        "b32",
        3,
        32,
    )
    for kind in ("u16", "s16", "u32", "s32"):
        source = "f16" if kind.endswith("16") else "b32"
        yield _simple(f"mul.wide.{kind}", source, 2, f"b{2 * int(kind[1:])}")
    for relation, kind in product(("eq", "ne", "lt", "le", "gt", "ge"), ("u32", "s32", "u64", "s64")):
        yield _predicate(f"setp.{relation}.{kind}", _register_kind(kind), 2)
    yield _simple("slct.b32.s32", "b32", 3)


def warp_exchange() -> Iterator[Case]:
    for mode in ("idx", "up", "down", "bfly"):
        for clamp in (0, 31, 0x1F, 0x181F, 0x1000, 0x0F07):
            opcode = f"shfl.sync.{mode}.b32"
            body = f"{opcode} %o|%p1, %i0, %i1, {clamp}, -1; @%p1 xor.b32 %o, %o, 0x5A5A5A5A;"
            yield Case(f"{opcode} {clamp:#x}", body, "b32", 2, 32)
    for name in ("add", "min", "max"):
        for kind in ("u32", "s32"):
            yield Case(f"redux.sync.{name}.{kind}", f"redux.sync.{name}.{kind} %o, %i0, -1;", "b32", 1, 32)
    for name in ("and", "or", "xor"):
        yield Case(f"redux.sync.{name}.b32", f"redux.sync.{name}.b32 %o, %i0, -1;", "b32", 1, 32)
    some = "and.b32 %i0, %i0, 5;"
    yield Case("match.any.sync.b32", f"{some} match.any.sync.b32 %o, %i0, -1;", "b32", 1, 32)
    body = "match.all.sync.b32 %o|%p1, %i0, -1; @%p1 xor.b32 %o, %o, 1;"
    yield Case("match.all.sync.b32", f"and.b32 %i0, %i0, 0x8000000; {body}", "b32", 1, 32)
    yield Case("vote.sync.ballot.b32", "setp.gt.s32 %p1, %i0, 0; vote.sync.ballot.b32 %o, %p1, -1;", "b32", 1, 32)
    for name in ("any", "all", "uni"):
        body = f"setp.gt.s32 %p1, %i0, -2000000000; vote.sync.{name}.pred %p2, %p1, -1; selp.b32 %o, 1, 0, %p2;"
        yield Case(f"vote.sync.{name}.pred", body, "b32", 1, 32)


def matrix_moves() -> Iterator[Case]:
    """Words of a warp through shared memory; rows at addresses in reverse order. The results are mixed into one."""
    at = "mov.b32 %r8, smem; shl.b32 %r9, %tid0, 4; add.s32 %r9, %r9, %r8;"  # own 16 bytes
    row = "xor.b32 %r7, %tid0, 31; shl.b32 %r7, %r7, 4; add.s32 %r7, %r7, %r8;"
    words = "xor.b32 %r1, %i0, 0x13579BDF; mul.lo.u32 %r2, %i0, 0x9E3779B1; not.b32 %r3, %i0;"
    mix = "mad.lo.u32 %o, %r10, 3, %r11; mad.lo.u32 %o, %r12, 5, %o; mad.lo.u32 %o, %r13, 7, %o;"
    names = {1: "{%i0}", 2: "{%i0, %r1}", 4: "{%i0, %r1, %r2, %r3}"}
    for count, transposed in product((1, 2, 4), ("", ".trans")):
        opcode = f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
        body = f"{at} {row} {words} st.shared.v4.b32 [%r9], {{%i0, %i0, %i0, %i0}}; bar.warp.sync -1;"
        body += f"{opcode} [%r7], {names[count]}; bar.warp.sync -1;"
        body += f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r9]; {mix}"
        yield Case(opcode, body, "b32", 1, 32)
        opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
        zero = "mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;"
        got = {1: "{%r10}", 2: "{%r10, %r11}", 4: "{%r10, %r11, %r12, %r13}"}[count]
        body = f"{at} {row} {words} {zero} st.shared.v4.b32 [%r9], {{%i0, %r1, %r2, %r3}}; bar.warp.sync -1;"
        yield Case(opcode, f"{body} {opcode} {got}, [%r7]; {mix}", "b32", 1, 32)


def _reciprocal(a: Array) -> Array:
    return 1.0 / a


APPROXIMATIONS: dict[str, Callable[[Array], Array]] = {
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "rcp.approx": _reciprocal,
    "sqrt.approx": np.sqrt,
    "rsqrt.approx": lambda a: 1.0 / np.sqrt(a),
    "tanh.approx": np.tanh,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
}


def approximations() -> Iterator[Case]:
    """Of one source; the inputs of sin and cos are brought below 4 by their exponent."""
    for name, function in APPROXIMATIONS.items():
        for more in (".ftz", "") if name != "tanh.approx" else ("",):
            opcode = f"{name}{more}.f32"
            small = "and.b32 %i0, %i0, 0xC0FFFFFF;" if name[:3] in ("sin", "cos") else ""
            yield Case(opcode, f"{small} {opcode} %o, %i0;", "f32", 1, 32, function, "f32")
    for name, half in (
        ("ex2.approx", "f16"),
        ("ex2.approx.ftz", "bf16"),
        ("tanh.approx", "f16"),
        ("tanh.approx", "bf16"),
    ):
        function = APPROXIMATIONS[name.removesuffix(".ftz")]
        yield Case(f"{name}.{half}", f"{name}.{half} %o, %i0;", half, 1, 16, function, half)


def specials_of_approximations() -> Iterator[Case]:
    """Sources whose result is documented: zeros, infinities and NaN; all others become one."""
    for name in APPROXIMATIONS:
        for more in (".ftz", "") if name != "tanh.approx" else ("",):
            opcode = f"{name}{more}.f32"
            body = f"""and.b32 %r1, %i0, 0x7FFFFFFF; setp.eq.u32 %p1, %r1, 0; setp.ge.u32 %p2, %r1, 0x7F800000;
            {opcode} %r2, %i0; or.pred %p3, %p1, %p2; selp.b32 %o, %r2, 1, %p3;"""
            yield Case(f"{opcode} special", body, "f32", 1, 32)


def all_cases() -> list[Case]:
    """By name, each once."""
    groups = (
        conversions,
        arithmetic,
        integers,
        warp_exchange,
        matrix_moves,
        approximations,
        specials_of_approximations,
    )
    found = {case.name: case for group in groups for case in group()}
    return list(found.values())
