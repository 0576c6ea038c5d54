"""Floating-point arithmetic: single and double precision, halves, pairs of any of them, and approximations.

Results in single and half precision are rounded once, as the instruction says; a NaN is always the canonical one. An
approximate instruction gives the correctly rounded value, as the bits of the real one are not documented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, Builder, Step, Value, opcode
from mok_cute.emulator.rounding import (
    MODES,
    canonical,
    flush,
    fused_multiply_add,
    half_to_f32,
    sum_to_odd,
    to_f32,
    to_half,
)

HALVES = ("f16", "bf16")
Exact = Callable[..., Value]  # of single precision values, giving doubles that are exact or rounded to odd


def _exact_add(a: Value, b: Value) -> Value:
    return sum_to_odd(a, b)


def _exact_subtract(a: Value, b: Value) -> Value:
    return sum_to_odd(a, -np.asarray(b, np.float64))


def _exact_multiply(a: Value, b: Value) -> Value:
    return np.asarray(a, np.float64) * np.asarray(b, np.float64)


EXACT: dict[str, Exact] = {
    "add": _exact_add,
    "sub": _exact_subtract,
    "mul": _exact_multiply,
    "fma": fused_multiply_add,
}
NEAREST: dict[str, Callable[..., Value]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _mode(parts: list[str]) -> str:
    return next((part for part in parts if part in MODES), "rn")


def _limit(parts: list[str], value: Value) -> Value:
    """.sat clamps to [0, 1], a NaN to zero; .relu negative values to zero."""
    if "sat" in parts:
        value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)
    if "relu" in parts:
        value = np.where(value < 0, value.dtype.type(0), value)
    return value


def _lanes(function: Callable[..., Value], parts: list[str], kind: str) -> Callable[..., Value]:
    """A function of single precision values giving doubles -> one of the bits of f16 or bf16."""

    def narrow(*values: Value) -> Value:
        singles = [half_to_f32(value, kind) for value in values]
        if "ftz" in parts:
            singles = [_flush_half(single, kind) for single in singles]
        bits = to_half(_limit(parts, np.asarray(function(*singles), np.float64)), kind, _mode(parts))
        if "ftz" in parts:
            bits = np.where(bits & (0x7C00 if kind == "f16" else 0x7F80), bits, bits & 0x8000).astype(np.uint16)
        return bits

    return narrow


def _flush_half(single: Value, kind: str) -> Value:
    tiny = 2.0**-14 if kind == "f16" else 2.0**-126
    return np.where(np.abs(single) < tiny, np.copysign(np.float32(0), single), single)


def _both(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function of 16-bit patterns on both halves of 32-bit words."""

    def packed(*values: Value) -> Value:
        words = [np.broadcast_to(value, 32).astype(np.uint32) for value in values]
        low = function(*[(word & np.uint32(0xFFFF)).astype(np.uint16) for word in words])
        high = function(*[(word >> np.uint32(16)).astype(np.uint16) for word in words])
        return np.asarray(low).astype(np.uint32) | np.asarray(high).astype(np.uint32) << np.uint32(16)

    return packed


def _pairs(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function of single precision values on both halves of 64-bit words, the first in the low half."""

    def packed(*values: Value) -> Value:
        halves = [np.broadcast_to(value, 32).copy().view(np.float32) for value in values]
        return np.asarray(function(*halves), np.float32).view(np.uint64)

    return packed


def on_halves(
    asm: Assembler,
    instruction: Instruction,
    function: Callable[..., Value],
    patterns: Callable[..., Value] | None = None,
) -> Step:
    """Step for a type of 16 bits or a pair of them: ``function`` of singles giving doubles, or one of bit patterns."""
    kind = instruction.type
    half = kind.removesuffix("x2")
    narrow = patterns if patterns is not None else _lanes(function, instruction.parts, half)
    bits = "b32" if kind.endswith("x2") else "b16"
    return _elementwise_bits(asm, instruction, _both(narrow) if bits == "b32" else narrow, bits)


def _elementwise_bits(asm: Assembler, instruction: Instruction, function: Callable[..., Value], bits: str) -> Step:
    write = asm.sink(instruction.operands[0], bits)
    reads = [asm.source(operand, bits) for operand in instruction.operands[1:]]
    return lambda warp, mask: write(warp, function(*[read(warp) for read in reads]), mask)


def _single(name: str, parts: list[str]) -> Callable[..., Value]:
    """The operation in single precision."""
    mode, exact, nearest = _mode(parts), EXACT[name], NEAREST.get(name)
    ftz, limited = "ftz" in parts, "sat" in parts or "relu" in parts

    def compute(*values: Value) -> Value:
        if ftz:
            values = tuple(flush(value) for value in values)
        result = nearest(*values) if nearest is not None and mode == "rn" else to_f32(exact(*values), mode)
        result = canonical(result)
        if limited:
            result = _limit(parts, result)
        return flush(result) if ftz else result

    return compute


def _arithmetic(name: str) -> Builder:
    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind, parts = instruction.type, instruction.parts
        if not set(parts[1:]) <= {*MODES, "ftz", "sat", "relu", *HALVES, "f16x2", "bf16x2", "f32", "f32x2", "f64"}:
            raise ValueError("modifier")
        if kind == "f64":
            return _double(asm, instruction, name)
        if kind == "f32x2":
            return asm.elementwise(instruction, _pairs(_single(name, parts)), kind)
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            if parts[-2] == "f32":
                return _mixed(asm, instruction, name, kind)
            return on_halves(asm, instruction, EXACT[name])
        return asm.elementwise(instruction, _single(name, parts), "f32")

    return build


for _name in EXACT:
    opcode(_name)(_arithmetic(_name))


def _mixed(asm: Assembler, instruction: Instruction, name: str, kind: str) -> Step:
    """add, sub and fma.f32.(f16|bf16): the last source and the result are f32, the others halves."""
    write = asm.sink(instruction.operands[0], "f32")
    halves = [asm.source(operand, "b16") for operand in instruction.operands[1:-1]]
    last, compute = asm.source(instruction.operands[-1], "f32"), _single(name, instruction.parts)
    return lambda warp, mask: write(
        warp, compute(*[half_to_f32(half(warp), kind) for half in halves], last(warp)), mask
    )


def _double(asm: Assembler, instruction: Instruction, name: str) -> Step:
    if _mode(instruction.parts) != "rn":
        raise ValueError("rounding of f64")
    if name == "fma":
        return asm.elementwise(instruction, _fma_f64, "f64")
    return asm.elementwise(instruction, NEAREST[name], "f64")


def _fma_f64(a: Value, b: Value, c: Value) -> Value:
    """Exact by fractions, a lane at a time; without one where a value is not finite."""
    from fractions import Fraction

    result = np.asarray(a * b + c, np.float64) * np.ones(32)
    a, b, c = (np.broadcast_to(value, 32) for value in (a, b, c))
    for lane in range(32):
        if np.isfinite(a[lane]) and np.isfinite(b[lane]) and np.isfinite(c[lane]):
            exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
            if exact:
                result[lane] = _nearest_double(exact)
    return result


def _nearest_double(exact: Any) -> float:
    try:
        return float(exact.numerator / exact.denominator)  # of integers, division rounds once
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


# --------------------------------------------------------------------------------------- minimum, maximum, sign changes


def _smaller(a: Value, b: Value) -> Value:
    """-0 is smaller than +0; a NaN gives way to a number."""
    chosen = np.where((a < b) | ((a == b) & np.signbit(a)) | np.isnan(b), a, b)
    return chosen


def _larger(a: Value, b: Value) -> Value:
    return np.where((a > b) | ((a == b) & ~np.signbit(a)) | np.isnan(b), a, b)


def _extreme(name: str) -> Builder:
    choose = _smaller if name == "min" else _larger

    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind, parts = instruction.type, instruction.parts
        if not set(parts[1:-1]) <= {"ftz", "NaN", "xorsign", "abs"}:
            raise ValueError("modifier")
        passes_nan, xors_sign, absolute = "NaN" in parts, "xorsign" in parts, "abs" in parts

        def pick(*values: Value) -> Value:
            signs = [np.signbit(value) for value in values]
            inputs = [np.abs(value) for value in values] if absolute else list(values)
            result = inputs[0]
            for other in inputs[1:]:
                result = choose(result, other)
            if passes_nan:
                for value in inputs:
                    result = np.where(np.isnan(value), value, result)
            if xors_sign:
                result = np.where(signs[0] ^ signs[1], -np.abs(result), np.abs(result))
            return result

        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return on_halves(asm, instruction, pick)
        if kind == "f64":
            return asm.elementwise(instruction, pick, "f64")
        if kind != "f32":
            raise ValueError("type")
        if "ftz" in parts:
            return asm.elementwise(
                instruction, lambda *values: canonical(flush(pick(*[flush(value) for value in values]))), kind
            )
        return asm.elementwise(instruction, lambda *values: canonical(pick(*values)), kind)

    return build


opcode("min")(_extreme("min"))
opcode("max")(_extreme("max"))


def _sign_change(function: Callable[..., Value], pattern: Callable[..., Value]) -> Builder:
    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind = instruction.type
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return on_halves(asm, instruction, function, pattern)
        compute = (lambda a: function(flush(a))) if "ftz" in instruction.parts else function
        return asm.elementwise(instruction, compute, kind)

    return build


opcode("neg")(_sign_change(np.negative, lambda a: a ^ np.uint16(0x8000)))
opcode("abs")(_sign_change(np.abs, lambda a: a & np.uint16(0x7FFF)))


@opcode("copysign")
def _copysign(asm: Assembler, instruction: Instruction) -> Step:
    """The sign of the first source, the rest of the second."""
    return asm.elementwise(instruction, lambda sign, value: np.copysign(value, sign), instruction.type)


@opcode("testp")
def _testp(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    tiny = np.finfo(TYPES[kind]).tiny
    tests: dict[str, Callable[..., Value]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    return asm.elementwise(instruction, tests[instruction.parts[1]], kind, "pred")


# ---------------------------------------------------------------------------------------------- division, roots, powers


def _divide(a: Value, b: Value) -> Value:
    """In double precision, and rounded to odd by its remainder."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    quotient = np.asarray(a / b)
    # With 24-bit inputs quotient * b needs 77 bits: take it apart to find the sign of what was lost.
    high = (quotient.view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64)
    remainder = (a - high * b) - (quotient - high) * b
    return _by_remainder(quotient, np.where(b < 0, -remainder, remainder))


def _root(a: Value) -> Value:
    a = np.asarray(a, np.float64)
    root = np.asarray(np.sqrt(a))
    high = (root.view(np.int64) & ~np.int64((1 << 27) - 1)).view(np.float64)
    low = root - high
    return _by_remainder(root, ((a - high * high) - 2 * high * low) - low * low)


def _by_remainder(value: Value, remainder: Value) -> Value:
    from mok_cute.emulator.rounding import to_odd

    return to_odd(value, np.where(np.isfinite(remainder), remainder, 0.0))


def _rounded(function: Exact) -> Builder:
    """div, rcp and sqrt: with a rounding mode, or .approx and .full, which are rounded to nearest here."""

    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind, parts = instruction.type, instruction.parts
        if not set(parts[1:-1]) <= {*MODES, "approx", "full", "ftz"} or kind not in ("f32", "f64"):
            raise ValueError("form")
        if kind == "f64":
            if _mode(parts) != "rn":
                raise ValueError("rounding of f64")
            return asm.elementwise(instruction, _DOUBLE[function], "f64")
        mode = _mode(parts)

        def compute(*values: Value) -> Value:
            if "ftz" in parts:
                values = tuple(flush(value) for value in values)
            result = canonical(to_f32(function(*values), mode))
            return flush(result) if "ftz" in parts else result

        return asm.elementwise(instruction, compute, "f32")

    return build


def _reciprocal(a: Value) -> Value:
    return _divide(np.float64(1), a)


_DOUBLE: dict[Exact, Callable[..., Value]] = {_divide: np.divide, _reciprocal: np.reciprocal, _root: np.sqrt}
opcode("div")(_rounded(_divide))
opcode("rcp")(_rounded(_reciprocal))
opcode("sqrt")(_rounded(_root))


def _approximate(function: Callable[[Value], Value]) -> Builder:
    """Correctly rounded stand-in for an approximate instruction, whose bits the ISA does not fix."""

    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind, parts = instruction.type, instruction.parts

        def exact(value: Value) -> Value:
            return function(np.asarray(value, np.float64))

        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return on_halves(asm, instruction, exact)
        if kind == "f64":
            return asm.elementwise(instruction, exact, "f64")
        if kind != "f32":
            raise ValueError("type")
        if "ftz" in parts:
            return asm.elementwise(instruction, lambda a: flush(canonical(to_f32(exact(flush(a))))), "f32")
        return asm.elementwise(instruction, lambda a: canonical(to_f32(exact(a))), "f32")

    return build


# ln(2)^k / k!, rounded once
EXP2_TERMS = (
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.01780860092397e-07,
    7.054911620801123e-09,
    4.4455382718708116e-10,
    2.5678435993488206e-11,
    1.3691488853904128e-12,
)


def exp2(value: Value) -> Value:
    """2^x of doubles, to about 1e-15, in operations that ``core.c`` does alike: numpy's own differs by machine."""
    limited = np.clip(np.asarray(value, np.float64), -1000.0, 1000.0)
    whole = np.rint(np.where(np.isnan(limited), 0.0, limited))
    rest = limited - whole
    total = np.full_like(rest, EXP2_TERMS[-1])
    for term in EXP2_TERMS[-2::-1]:
        total = total * rest + term
    return np.ldexp(total, whole.astype(np.int32))


opcode("ex2.approx")(_approximate(exp2))
opcode("lg2.approx")(_approximate(np.log2))
opcode("rsqrt.approx")(_approximate(lambda a: 1.0 / np.sqrt(a)))
opcode("tanh.approx")(_approximate(np.tanh))
opcode("sin.approx")(_approximate(np.sin))
opcode("cos.approx")(_approximate(np.cos))
