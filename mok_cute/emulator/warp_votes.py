"""Reductions over the lanes of a warp, and which lanes are active."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import ALL_LANES, TYPES, Assembler, Mask, Step, opcode
from mok_cute.emulator.rounding import canonical
from mok_cute.emulator.synchronize import converged

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

FUNCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@opcode("redux.sync")
def _redux(asm: Assembler, instruction: Instruction) -> Step:
    """The result of all member lanes, to each of them. Of f32 only min and max; a NaN gives way unless .NaN is said."""
    parts, kind = instruction.parts, instruction.type
    name = parts[2]
    put, read = asm.sink(instruction.operands[0], kind), asm.source(instruction.operands[1], kind)
    functions: dict[str, Any] = FUNCTIONS
    if kind == "f32":
        functions = {"min": np.minimum, "max": np.maximum} if "NaN" in parts else {"min": np.fmin, "max": np.fmax}
    function = functions[name]
    absolute, dtype = "abs" in parts, TYPES[kind]

    def step(warp: Warp, mask: Mask) -> None:
        values = np.broadcast_to(read(warp), 32)[ALL_LANES if mask is None else mask]
        result = function.reduce(np.abs(values) if absolute else values)
        put(warp, canonical(result) if kind == "f32" else dtype.type(result), mask)

    return converged(step, asm.source(instruction.operands[2], "b32"), instruction.text)


@opcode("match.all.sync")
def _match_all(asm: Assembler, instruction: Instruction) -> Step:
    """All member lanes if they hold the same value, else none."""
    names = instruction.operands[0].split("|")
    put, put_equal = asm.sink(names[0], "b32"), asm.sink(names[1], "pred") if len(names) > 1 else None
    read = asm.source(instruction.operands[1], instruction.type)

    def step(warp: Warp, mask: Mask) -> None:
        active = ALL_LANES if mask is None else mask
        values = np.broadcast_to(read(warp), 32)[active]
        equal = bool((values == values[0]).all())
        members = np.packbits(active, bitorder="little").view(np.uint32)[0]
        put(warp, members if equal else np.uint32(0), mask)
        if put_equal is not None:
            put_equal(warp, np.bool_(equal), mask)

    return converged(step, asm.source(instruction.operands[2], "b32"), instruction.text)


@opcode("activemask")
def _active(asm: Assembler, instruction: Instruction) -> Step:
    put = asm.sink(instruction.operands[0], "b32")

    def step(warp: Warp, mask: Mask) -> None:
        active = ALL_LANES if mask is None else mask
        put(warp, np.packbits(active, bitorder="little").view(np.uint32)[0], mask)

    return step
