"""The cvt instruction: between integers, f16, bf16, f32, f64 and packed pairs, with PTX's roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, Mask, Step, Value, opcode
from mok_cute.emulator.rounding import flush

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOATS = ("f16", "bf16", "f32", "f64")
CANONICAL_NAN_BF16 = 0x7FFF


def bf16_to_f32(bits: Value) -> Value:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value: Value, mode: str = "rn") -> Value:
    """bf16 bits, rounded to nearest even or towards zero; NaN is the canonical one."""
    single = np.asarray(value, np.float32)
    bits = single.view(np.uint32)
    if mode == "rn":
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode != "rz":
        raise ValueError(f"rounding {mode} to bf16")
    return np.where(np.isnan(single), CANONICAL_NAN_BF16, bits >> np.uint32(16)).astype(np.uint16)


def f32_to_f16(value: Value, mode: str = "rn") -> Value:
    """f16 bits, rounded to nearest even or towards zero."""
    single = np.asarray(value, np.float32)
    half = np.asarray(single.astype(np.float16))
    if mode == "rz":
        too_big = np.abs(half.astype(np.float32)) > np.abs(single)
        bits = np.where(too_big, half.view(np.uint16) - np.uint16(1), half.view(np.uint16)).astype(np.uint16)
    elif mode == "rn":
        bits = half.view(np.uint16)
    else:
        raise ValueError(f"rounding {mode} to f16")
    return np.where(np.isnan(single), 0x7FFF, bits).astype(np.uint16)


TO_HALF: dict[str, Callable[[Value, str], Value]] = {"f16": f32_to_f16, "bf16": f32_to_bf16}


@opcode("cvt")
def _cvt(asm: Assembler, instruction: Instruction) -> Step:
    *modifiers, to, origin = instruction.parts[1:]
    if not set(modifiers) <= {"rn", "rz", "ftz", "sat", "relu", *ROUND_TO_INTEGER}:
        raise ValueError(f"modifiers {modifiers}")
    if to in ("f16x2", "bf16x2"):
        return _pair(asm, instruction, to.removesuffix("x2"), modifiers)
    write, read = asm.sink(instruction.operands[0], to), asm.source(instruction.operands[1], origin)
    convert = _conversion(to, origin, modifiers)
    return lambda warp, mask: write(warp, convert(read(warp)), mask)


def _pair(asm: Assembler, instruction: Instruction, half: str, modifiers: list[str]) -> Step:
    """Two f32 -> two halves in 32 bits; the first source goes to the upper one."""
    if instruction.type != "f32":
        raise ValueError("source type")
    write = asm.sink(instruction.operands[0], "b32")
    upper, lower = (asm.source(operand, "f32") for operand in instruction.operands[1:])
    convert = _conversion(half, "f32", modifiers)

    def step(warp: Warp, mask: Mask) -> None:
        high = np.asarray(convert(upper(warp))).view(np.uint16).astype(np.uint32)
        write(warp, high << np.uint32(16) | np.asarray(convert(lower(warp))).view(np.uint16), mask)

    return step


def _conversion(to: str, origin: str, modifiers: list[str]) -> Callable[[Value], Value]:
    """Values as the source type -> values as the destination type (bf16: as its bits)."""
    mode = next((modifier for modifier in modifiers if modifier in ("rn", "rz")), "rn")
    if to in FLOATS and origin in FLOATS:
        return _between_floats(to, origin, mode, modifiers)
    if to in FLOATS:
        if mode != "rn" or to == "bf16":
            raise ValueError("rounding")
        return lambda value: np.asarray(value).astype(TYPES[to])
    if origin in FLOATS:
        return _to_integer(to, origin, modifiers)
    dtype = TYPES[to]
    if "sat" in modifiers:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return lambda value: np.array([min(max(int(x), low), high) for x in np.atleast_1d(value)]).astype(dtype)
    return lambda value: np.asarray(value).astype(dtype)


def _between_floats(to: str, origin: str, mode: str, modifiers: list[str]) -> Callable[[Value], Value]:
    rounding = next((ROUND_TO_INTEGER[modifier] for modifier in modifiers if modifier in ROUND_TO_INTEGER), None)

    def convert(value: Value) -> Value:
        wide = bf16_to_f32(value) if origin == "bf16" else np.asarray(value)
        if "ftz" in modifiers and origin == "f32":
            wide = flush(wide)
        if rounding is not None:
            wide = rounding(wide)
        if "relu" in modifiers:
            wide = np.where(wide > 0, wide, np.where(np.isnan(wide), wide, wide.dtype.type(0)))
        if "sat" in modifiers:
            wide = np.where(np.isnan(wide), wide.dtype.type(0), np.clip(wide, 0, 1))
        if to in TO_HALF:
            if wide.dtype == np.float64:
                raise ValueError("double to half")
            bits = TO_HALF[to](wide, mode)
            return bits if to == "bf16" else bits.view(np.float16)
        return wide.astype(TYPES[to])

    if to in TO_HALF and origin == "f64":
        raise ValueError("double to half")
    return convert


def _to_integer(to: str, origin: str, modifiers: list[str]) -> Callable[[Value], Value]:
    """Rounds, clamps to the range of the destination; NaN becomes zero."""
    rounding = next(ROUND_TO_INTEGER[modifier] for modifier in modifiers if modifier in ROUND_TO_INTEGER)
    dtype = TYPES[to]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)

    def convert(value: Value) -> Value:
        wide = np.asarray(bf16_to_f32(value) if origin == "bf16" else value).astype(np.float64)
        whole = rounding(np.where(np.isnan(wide), 0.0, wide))
        inside = np.clip(whole, float(low), float(high) if high < 2**53 else np.nextafter(float(high), 0.0))
        return np.where(whole >= float(high), dtype.type(high), inside.astype(dtype))

    return convert
