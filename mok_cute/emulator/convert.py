"""The cvt instruction: between integers, floats of every width, and packed pairs, with PTX's roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, Mask, Sink, Source, Step, Value, opcode
from mok_cute.emulator.number_formats import FORMATS, VALUES, encode, encode_ue8m0
from mok_cute.emulator.rounding import MODES, canonical, flush, half_to_f32, to_f32, to_half, to_odd

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOATS = ("f16", "bf16", "f32", "f64")
HALVES = ("f16", "bf16")
SMALL_PAIRS = (*(f"{name}x2" for name in FORMATS), "ue8m0x2")
MODIFIERS = {*MODES, "ftz", "sat", "relu", "satfinite", "rna", *ROUND_TO_INTEGER}
TF32_BITS = 13  # of single precision, that tf32 does not have


@opcode("cvt")
def _cvt(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.parts[1] == "pack":
        return _pack(asm, instruction)
    *modifiers, to, origin = instruction.parts[1:]
    if not set(modifiers) <= MODIFIERS:
        raise ValueError(f"modifiers {modifiers}")
    if to in SMALL_PAIRS:
        return _to_small_pair(asm, instruction, to.removesuffix("x2"), origin, modifiers)
    if origin in SMALL_PAIRS:
        return _from_small_pair(asm, instruction, to, origin.removesuffix("x2"), modifiers)
    if to in ("f16x2", "bf16x2"):
        return _to_halves(asm, instruction, to.removesuffix("x2"), modifiers)
    if to == "tf32":
        return _to_tf32(asm, instruction, modifiers)
    write, read = asm.sink(instruction.operands[0], to), asm.source(instruction.operands[1], origin)
    convert = _conversion(to, origin, modifiers)
    return lambda warp, mask: write(warp, convert(read(warp)), mask)


# -------------------------------------------------------------------------------------------------------------- scalars


def _conversion(to: str, origin: str, modifiers: list[str]) -> Callable[[Value], Value]:
    """Values as the source type -> values as the destination type (bf16: as its bits)."""
    mode = next((modifier for modifier in modifiers if modifier in MODES), "rn")
    if (to, origin, modifiers) == ("f32", "bf16", []):
        return lambda value: half_to_f32(value, "bf16")  # a shift on the hardware: a NaN keeps its bits
    if to in FLOATS and origin in FLOATS:
        return _between_floats(to, origin, mode, modifiers)
    if to in FLOATS:
        return _from_integer(to, mode)
    if origin in FLOATS:
        return _to_integer(to, origin, modifiers)
    dtype = TYPES[to]
    if "sat" in modifiers:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return lambda value: np.array([min(max(int(x), low), high) for x in np.atleast_1d(value)]).astype(dtype)
    return lambda value: np.asarray(value).astype(dtype)


def _from_integer(to: str, mode: str) -> Callable[[Value], Value]:
    if to == "f64" or (to == "f32" and mode == "rn"):
        if mode != "rn":
            raise ValueError("rounding")
        return lambda value: np.asarray(value).astype(TYPES[to])

    def convert(value: Value) -> Value:
        wide = _odd_double(np.asarray(value))
        if to == "f32":
            return to_f32(wide, mode)
        bits = to_half(wide, to, mode)
        return bits if to == "bf16" else bits.view(np.float16)

    return convert


def _odd_double(value: Value) -> Value:
    """Integers as doubles, those of 64 bits rounded to odd."""
    wide = value.astype(np.float64)
    if value.dtype.itemsize < 8:
        return wide

    lost = [
        float(int(exact) - int(close)) for exact, close in zip(np.atleast_1d(value), np.atleast_1d(wide), strict=True)
    ]
    return to_odd(np.atleast_1d(wide), np.array(lost))


def _between_floats(to: str, origin: str, mode: str, modifiers: list[str]) -> Callable[[Value], Value]:
    rounding = next((ROUND_TO_INTEGER[modifier] for modifier in modifiers if modifier in ROUND_TO_INTEGER), None)

    def convert(value: Value) -> Value:
        wide = half_to_f32(value, "bf16") if origin == "bf16" else np.asarray(value)
        if "ftz" in modifiers and origin == "f32":
            wide = flush(wide)
        if rounding is not None:
            wide = rounding(wide)
        if "relu" in modifiers:
            wide = np.where(wide > 0, wide, np.where(np.isnan(wide), wide, wide.dtype.type(0)))
        if "sat" in modifiers:
            wide = np.where(np.isnan(wide), wide.dtype.type(0), np.clip(wide, 0, 1))
        if to in HALVES:
            bits = _finite(to_half(wide, to, mode), to, wide) if "satfinite" in modifiers else to_half(wide, to, mode)
            return bits if to == "bf16" else bits.view(np.float16)
        if to == "f32":
            single = canonical(to_f32(wide, mode) if wide.dtype == np.float64 else wide.astype(np.float32))
            return flush(single) if "ftz" in modifiers else single
        return wide.astype(np.float64)

    return convert


def _finite(bits: Value, kind: str, value: Value) -> Value:
    """.satfinite: what would be infinite is the largest number."""
    infinite = 0x7C00 if kind == "f16" else 0x7F80
    beyond = (bits & 0x7FFF) == infinite
    return np.where(beyond, bits - np.uint16(1), bits).astype(np.uint16)


def _to_integer(to: str, origin: str, modifiers: list[str]) -> Callable[[Value], Value]:
    """Rounds, clamps to the range of the destination; NaN becomes zero."""
    rounding = next(ROUND_TO_INTEGER[modifier] for modifier in modifiers if modifier in ROUND_TO_INTEGER)
    dtype = TYPES[to]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)

    def convert(value: Value) -> Value:
        wide = np.asarray(half_to_f32(value, "bf16") if origin == "bf16" else value)
        if "ftz" in modifiers and origin == "f32":
            wide = flush(wide)
        wide = wide.astype(np.float64)
        whole = rounding(np.where(np.isnan(wide), 0.0, wide))
        inside = np.clip(whole, float(low), float(high) if high < 2**53 else np.nextafter(float(high), 0.0))
        return np.where(whole >= float(high), dtype.type(high), inside.astype(dtype))

    return convert


def _to_tf32(asm: Assembler, instruction: Instruction, modifiers: list[str]) -> Step:
    """Single precision whose last 13 bits are zero; .rna rounds a tie away from zero."""
    write, read = asm.sink(instruction.operands[0], "b32"), asm.source(instruction.operands[1], "f32")
    mode = next(modifier for modifier in modifiers if modifier in ("rna", "rn", "rz"))
    half, kept = np.uint32(1 << (TF32_BITS - 1)), np.uint32(0xFFFFFFFF << TF32_BITS & 0xFFFFFFFF)

    def convert(value: Value) -> Value:
        single = np.asarray(value, np.float32)
        if "relu" in modifiers:
            single = np.where(single > 0, single, np.where(np.isnan(single), single, np.float32(0)))
        bits = single.view(np.uint32)
        if mode == "rna":
            rounded = bits + half
        elif mode == "rn":
            rounded = bits + half - np.uint32(1) + (bits >> np.uint32(TF32_BITS) & np.uint32(1))
        else:
            rounded = bits
        result = np.where(np.isfinite(single), rounded, bits) & kept
        if "satfinite" in modifiers:
            infinite = (result & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
            result = np.where(infinite, result - np.uint32(1 << TF32_BITS), result)
        return np.where(np.isnan(single), np.uint32(0x7FFFFFFF), result)

    return lambda warp, mask: write(warp, convert(read(warp)), mask)


# ---------------------------------------------------------------------------------------------------------------- pairs


def _to_halves(asm: Assembler, instruction: Instruction, half: str, modifiers: list[str]) -> Step:
    """Two f32 -> two halves in 32 bits; the first source goes to the upper one."""
    if instruction.type != "f32" or len(instruction.operands) != 3:
        raise ValueError("source type")
    write = asm.sink(instruction.operands[0], "b32")
    upper, lower = (asm.source(operand, "f32") for operand in instruction.operands[1:])
    convert = _conversion(half, "f32", modifiers)

    def step(warp: Warp, mask: Mask) -> None:
        high = np.asarray(convert(upper(warp))).view(np.uint16).astype(np.uint32)
        write(warp, high << np.uint32(16) | np.asarray(convert(lower(warp))).view(np.uint16), mask)

    return step


def _pair_of_singles(asm: Assembler, operands: tuple[str, ...], origin: str) -> Callable[[Warp], tuple[Value, Value]]:
    """Upper and lower source in single precision: two f32, or the halves of one word."""
    if origin == "f32":
        upper, lower = (asm.source(operand, "f32") for operand in operands)
        return lambda warp: (upper(warp), lower(warp))
    read, kind = asm.source(operands[0], "b32"), origin.removesuffix("x2")
    if kind not in HALVES:
        raise ValueError("source type")

    def split(warp: Warp) -> tuple[Value, Value]:
        word = np.asarray(read(warp))
        return half_to_f32(word >> np.uint32(16), kind), half_to_f32(word & np.uint32(0xFFFF), kind)

    return split


def _to_small_pair(asm: Assembler, instruction: Instruction, form: str, origin: str, modifiers: list[str]) -> Step:
    """Two numbers -> two codes, the first source in the upper one: bytes, or of e2m1 the halves of a byte."""
    bits = 4 if form == "e2m1" else 8
    write = asm.sink(instruction.operands[0], "b8" if bits == 4 else "b16")
    read = _pair_of_singles(asm, instruction.operands[1:], origin)
    if form == "ue8m0":
        if "rp" not in modifiers and "rz" not in modifiers:
            raise ValueError("rounding")
        up = "rp" in modifiers

        def codes(value: Value) -> Value:
            return encode_ue8m0(value, up=up)
    else:
        if "rn" not in modifiers:
            raise ValueError("rounding")
        relu = "relu" in modifiers

        def codes(value: Value) -> Value:
            return encode(value, form, relu=relu)

    def step(warp: Warp, mask: Mask) -> None:
        upper, lower = (codes(value).astype(np.uint16) for value in read(warp))
        write(warp, (upper << np.uint16(bits) | lower).astype(np.uint8 if bits == 4 else np.uint16), mask)

    return step


def _from_small_pair(asm: Assembler, instruction: Instruction, to: str, form: str, modifiers: list[str]) -> Step:
    """Two codes -> two halves in a word."""
    half = to.removesuffix("x2")
    if half not in HALVES:
        raise ValueError("destination type")
    bits = 4 if form == "e2m1" else 8
    write = asm.sink(instruction.operands[0], "b32")
    read = asm.source(instruction.operands[1], "b8" if bits == 4 else "b16")
    table = VALUES[form]
    if "relu" in modifiers:
        table = np.where(table < 0, np.float32(0), table)

    def step(warp: Warp, mask: Mask) -> None:
        both = np.asarray(read(warp)).astype(np.uint16)
        low = to_half(table[both & ((1 << bits) - 1)], half).astype(np.uint32)
        high = to_half(table[both >> np.uint16(bits)], half).astype(np.uint32)
        write(warp, high << np.uint32(16) | low, mask)

    return step


def _pack(asm: Assembler, instruction: Instruction) -> Step:
    """cvt.pack.sat: two s32 clamped to narrow integers and put together, for 8 and fewer bits above a third source."""
    to, origin = instruction.parts[3], instruction.parts[4]
    bits, signed = int(to[1:]), to[0] == "s"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if origin != "s32" or instruction.parts[2] != "sat":
        raise ValueError("form")
    write: Sink = asm.sink(instruction.operands[0], "b32")
    a, b, *rest = (asm.source(operand, "s32") for operand in instruction.operands[1:])
    third: Source | None = rest[0] if rest else None

    def step(warp: Warp, mask: Mask) -> None:
        upper, lower = (np.clip(np.asarray(read(warp)).astype(np.int64), low, high) for read in (a, b))
        kept = (1 << bits) - 1
        word = (upper & kept) << bits | lower & kept
        if third is not None:
            word |= np.asarray(third(warp)).astype(np.int64) << (2 * bits)
        write(warp, (word & 0xFFFFFFFF).astype(np.uint32), mask)

    return step
