"""tensormap.replace and tensormap.cp_fenceproxy: a kernel makes descriptors of tensor copies from others.

What a field holds in the descriptor, minus one or in units of 16 bytes, is the instruction's business; the kernel gives
plain values, but ``rank``, which it gives minus one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, Mask, Step, lanes_of, of_lane, opcode
from mok_cute.emulator.load_store import read, space_of, write
from mok_cute.emulator.synchronize import all_members, converged
from mok_cute.emulator.tensor_map import FIELDS, NUM_BYTES

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

WORD_BITS = 64
# By the number that the instruction takes, for element types: the number in the descriptor and the bit for tf32.
ELEMENT_TYPES = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (4, 0), 5: (5, 0), 6: (6, 0), 7: (7, 0), 8: (8, 0)}
ELEMENT_TYPES |= {9: (9, 0), 10: (10, 0), 11: (7, 1), 13: (11, 0), 14: (12, 0), 15: (13, 0)}
DIRECT = {"interleave_layout": "interleave", "swizzle_mode": "swizzle", "fill_mode": "oob_fill"}
DIRECT |= {"swizzle_atomicity": "swizzle_atom", "rank": "rank_1"}


def _changes(field: str, ordinal: int, value: int) -> dict[str, int]:
    """Fields of the descriptor and what is put there."""
    if field == "global_address":
        return {"address16": value >> 4}
    if field == "global_stride":
        return {f"stride{ordinal + 1}_low": value >> 4 & 0xFFFFFFFF, f"stride{ordinal + 1}_high": value >> 36}
    if field in ("global_dim", "box_dim", "element_stride"):
        name = {"global_dim": "dim", "box_dim": "box", "element_stride": "step"}[field]
        return {f"{name}{ordinal}_1": value - 1}
    if field == "elemtype":
        number, tf32 = ELEMENT_TYPES[value]
        return {"dtype": number, "tf32": tf32}
    return {DIRECT[field]: value}


def put_fields(words: list[int], values: dict[str, int]) -> None:
    """Put the fields of a descriptor into its words."""
    for name, value in values.items():
        word, low, bits = FIELDS[name]
        kept = words[word] & ~(((1 << bits) - 1) << low)
        words[word] = kept | (value & ((1 << bits) - 1)) << low


@opcode("tensormap.replace.tile")
def _replace(asm: Assembler, instruction: Instruction) -> Step:
    """[descriptor] {, ordinal}, value"""
    field, space = instruction.parts[3], space_of(instruction)
    address = asm.address(instruction.operands[0])[0]
    *ordinals, value_name = instruction.operands[1:]
    ordinal = int(ordinals[0], 0) if ordinals else 0
    value = asm.source(value_name, instruction.type)
    _changes(field, ordinal, 0)  # a field that is not known is refused here

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            addresses = address(warp)[lane : lane + 1] + np.arange(0, NUM_BYTES, 8, dtype=np.uint64)
            words = [int(word) for word in read(warp, space, addresses, 8).view(np.uint64).ravel()]
            put_fields(words, _changes(field, ordinal, of_lane(value(warp), lane)))
            write(warp, space, addresses, np.array(words, np.uint64).view(np.uint8).reshape(-1, 8))

    return step


@opcode("tensormap.cp_fenceproxy")
def _copy(asm: Assembler, instruction: Instruction) -> Step:
    """[to in global memory], [from in shared memory], 128: one copy by the warp."""
    to, origin = (asm.address(operand)[0] for operand in instruction.operands[:2])
    if int(instruction.operands[2], 0) != NUM_BYTES:
        raise ValueError("size")

    def step(warp: Warp, mask: Mask) -> None:
        lane = lanes_of(mask)[0]
        steps = np.arange(0, NUM_BYTES, 16, dtype=np.uint64)
        data = read(warp, "shared", origin(warp)[lane] + steps, 16)
        write(warp, "global", to(warp)[lane] + steps, data)

    return converged(step, all_members, instruction.text)
