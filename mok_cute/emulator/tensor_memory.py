"""Tensor memory of a CTA: allocation, and moves between its cells and registers (tcgen05.alloc, ld, st and the like).

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. Loads and stores happen at
once. With cta_group::2 the two CTAs of a pair, whose ranks differ in the last bit, allocate together and get the same
columns.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.async_copy import place_of
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Step, first_lane, of_lane, opcode
from mok_cute.emulator.synchronize import all_members, converged

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta, Warp

Words = npt.NDArray[np.uint32]
LANES, COLUMNS = 128, 512
FEWEST_COLUMNS = 32  # of an allocation


class TensorMemory:
    """The cells of one CTA, which columns are allocated, and the matrix operations that its threads have issued."""

    def __init__(self) -> None:
        self.words = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.allocated = np.zeros(COLUMNS, np.bool_)
        self.queue: deque[Callable[[], None]] = deque()
        self.wanted: int | None = None  # columns that this half of a pair waits for
        self.granted: int | None = None  # first column, given by the other half
        self.may_allocate = True

    def block(self, address: int, lanes: int, columns: int) -> Words:
        """A view of this part, which must be allocated."""
        lane, column = address >> 16, address & 0xFFFF
        if lane + lanes > LANES or column + columns > COLUMNS:
            raise KernelFault(f"tensor memory {address:#x}: {lanes} lanes of {columns} columns reach beyond the end")
        if not self.allocated[column : column + columns].all():
            raise KernelFault(f"tensor memory {address:#x}: not all of {columns} columns are allocated")
        return self.words[lane : lane + lanes, column : column + columns]


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tensor_memory is None:
        cta.tensor_memory = TensorMemory()
    memory: TensorMemory = cta.tensor_memory
    return memory


def group_size(asm: Assembler, instruction: Instruction) -> int:
    """1 or 2 CTAs, as cta_group says; all tcgen05 instructions of a kernel must say the same."""
    groups = [int(part[-1]) for part in instruction.parts if part in ("cta_group::1", "cta_group::2")]
    if len(groups) != 1:
        raise ValueError("cta_group")
    return groups[0]


def pair_of(cta: Cta) -> list[Cta]:
    """The two CTAs of cta_group::2, the even rank first."""
    if len(cta.cluster.ctas) % 2:
        raise KernelFault(f"cta_group::2 in a cluster of {len(cta.cluster.ctas)} CTAs; launch with an even number")
    return [cta.peer(cta.rank & ~1), cta.peer(cta.rank | 1)]


# ---------------------------------------------------------------------------------------------------------- allocation


def _allocate(memories: list[TensorMemory], count: int) -> int | None:
    """First of ``count`` columns that are free in all, aligned to their number; None while there are none."""
    for first in range(0, COLUMNS, count):
        if not any(memory.allocated[first : first + count].any() for memory in memories):
            for memory in memories:
                memory.allocated[first : first + count] = True
            return first
    return None


def _allocate_together(cta: Cta, count: int) -> int | None:
    """For one half of a pair. The half that comes second allocates for both."""
    own = tensor_memory(cta)
    other = tensor_memory(cta.peer(cta.rank ^ 1))
    if own.granted is not None:
        first, own.granted, own.wanted = own.granted, None, None
        return first
    own.wanted = count
    if other.wanted is None or other.granted is not None:
        return None
    if other.wanted != count:
        raise KernelFault(f"tcgen05.alloc of {count} columns in one CTA of a pair and {other.wanted} in the other")
    together = _allocate([own, other], count)
    if together is not None:
        own.wanted, other.granted = None, together
    return together


@opcode("tcgen05.alloc")
def _alloc(asm: Assembler, instruction: Instruction) -> Step:
    paired = group_size(asm, instruction) == 2
    address = asm.address(instruction.operands[0])[0]
    count = asm.source(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> Any:
        columns, memory = of_lane(count(warp), first_lane(mask)), tensor_memory(warp.cta)
        if columns < FEWEST_COLUMNS or columns > COLUMNS or columns & (columns - 1):
            raise KernelFault(f"tcgen05.alloc of {columns} columns: a power of two from {FEWEST_COLUMNS} to {COLUMNS}")
        if not memory.may_allocate:
            raise KernelFault("tcgen05.alloc after this CTA gave up its permit to allocate")
        if paired:
            pair_of(warp.cta)
            first = _allocate_together(warp.cta, columns)
        else:
            first = _allocate([memory], columns)
        warp.cta.grid.scheduler.version += 1
        if first is None:
            return warp.block(lambda: f"{instruction.text}: {_why_not(warp.cta, columns, paired)}")
        cta, offset = place_of(warp, int(address(warp)[first_lane(mask)]))
        cta.check_shared(offset, 4)
        warp.tracker.tensor_allocated(warp, instruction, first, columns, cta, offset)
        cta.shared_words[4][offset // 4] = first
        return None

    return converged(step, all_members, instruction.text)


def _why_not(cta: Cta, columns: int, paired: bool) -> str:
    if paired and tensor_memory(cta.peer(cta.rank ^ 1)).wanted is None:
        return "the other CTA of the pair has not come to its tcgen05.alloc"
    return f"no {columns} free columns of tensor memory"


@opcode("tcgen05.dealloc")
def _dealloc(asm: Assembler, instruction: Instruction) -> Step:
    """Each CTA of a pair gives back its own half."""
    group_size(asm, instruction)
    address, count = (asm.source(operand, "u32") for operand in instruction.operands)

    def step(warp: Warp, mask: Mask) -> None:
        lane = first_lane(mask)
        first, columns = of_lane(address(warp), lane) & 0xFFFF, of_lane(count(warp), lane)
        allocated = tensor_memory(warp.cta).allocated[first : first + columns]
        if not allocated.all():
            raise KernelFault(f"tcgen05.dealloc of columns {first} to {first + columns}, not all of them allocated")
        allocated[:] = False
        warp.cta.grid.scheduler.version += 1

    return converged(step, all_members, instruction.text)


@opcode("tcgen05.relinquish_alloc_permit")
def _relinquish(asm: Assembler, instruction: Instruction) -> Step:
    group_size(asm, instruction)

    def step(warp: Warp, mask: Mask) -> None:
        tensor_memory(warp.cta).may_allocate = False

    return converged(step, all_members, instruction.text)


@opcode("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", "tcgen05.wait::ld", "tcgen05.wait::st")
def _order(asm: Assembler, instruction: Instruction) -> Step:
    """Order is what the engine gives anyway."""
    return lambda warp, mask: warp.tracker.tensor_fence(warp, instruction)


# ----------------------------------------------------------------------------------------------------- loads and stores

# By shape: lanes, columns and registers of one repetition.
SHAPES = {"32x32b": (32, 1, 1), "16x64b": (16, 2, 1), "16x128b": (16, 4, 2), "16x256b": (16, 8, 4)}


@lru_cache
def _places(shape: str, repeats: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(registers, 32): lane and column, from the address on, of each register of each thread."""
    register, thread = np.arange(SHAPES[shape][2] * repeats)[:, None], np.arange(32)[None, :]
    if shape == "32x32b":
        return thread + 0 * register, register + 0 * thread
    if shape == "16x64b":
        return thread // 4 + thread % 2 * 8 + 0 * register, thread // 2 % 2 + 2 * register
    if shape == "16x128b":
        return thread // 4 + register % 2 * 8, thread % 4 + register // 2 * 4
    return thread // 4 + register // 2 % 2 * 8, thread % 4 * 2 + register % 2 + register // 4 * 8


class _Move:
    """The form of one tcgen05.ld or st: which cells its registers stand for."""

    def __init__(self, asm: Assembler, instruction: Instruction, address: str, second: str | None) -> None:
        match = re.match(
            r"tcgen05\.(?:ld|st)\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(\d+)"
            r"(\.(?:un)?pack::16b)?\.b32$",
            instruction.opcode,
        )
        if match is None:
            raise ValueError("shape")
        self.shape, self.repeats, self.packed = match[1], int(match[2]), match[3] is not None
        self.address = asm.address(address)[0]
        self.split = int(second, 0) if second is not None else 0  # columns from the first half of 16x32bx2 to the next
        if (self.shape == "16x32bx2") != (second is not None):
            raise ValueError("operands")
        self.registers = self.repeats if self.shape == "16x32bx2" else SHAPES[self.shape][2] * self.repeats

    def cells(self, warp: Warp) -> tuple[Words, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The warp's part of tensor memory, lanes and columns in it. Packed: the first of two neighbouring columns."""
        address = int(self.address(warp)[0])
        lanes, wide = 32 if self.shape == "32x32b" else 16, 2 if self.packed else 1
        self._check(warp, address, lanes)
        memory = tensor_memory(warp.cta)
        if self.shape != "16x32bx2":
            lane, column = _places(self.shape, self.repeats)
            return memory.block(address, lanes, wide * SHAPES[self.shape][1] * self.repeats), lane, column * wide
        memory.block(address + self.split, lanes, wide * self.repeats)
        block = memory.block(address, lanes, wide * self.repeats)
        first = address & 0xFFFF
        block = memory.words[address >> 16 : (address >> 16) + lanes, first:]
        register, thread = np.arange(self.repeats)[:, None], np.arange(32)[None, :]
        return block, thread % 16 + 0 * register, register * wide + thread // 16 * self.split

    def touched(self, warp: Warp, lane: Any, column: Any) -> tuple[Any, Any]:
        """Lanes and columns in tensor memory of what ``cells`` gave."""
        address = int(self.address(warp)[0])
        columns = np.unique(column) + (address & 0xFFFF)
        return np.unique(lane) + (address >> 16), np.unique([columns, columns + self.packed])

    @staticmethod
    def _check(warp: Warp, address: int, lanes: int) -> None:
        """A warp reaches the 32 lanes of its number modulo 4."""
        first, own = address >> 16, 32 * (warp.index % 4)
        if first not in ((own,) if lanes == 32 else (own, own + 16)):
            raise KernelFault(f"tensor memory {address:#x}: warp {warp.index} reaches lanes from {own} only")


@opcode("tcgen05.ld")
def _ld(asm: Assembler, instruction: Instruction) -> Step:
    operands = instruction.operands
    move = _Move(asm, instruction, operands[1], operands[2] if len(operands) > 2 else None)
    sinks = [asm.sink(name, "b32") for name in asm.vector(operands[0])]
    if len(sinks) != move.registers:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        block, lane, column = move.cells(warp)
        warp.tracker.tensor_moved(warp, instruction, *move.touched(warp, lane, column))
        values = block[lane, column]
        if move.packed:
            values = values & np.uint32(0xFFFF) | block[lane, column + 1] << np.uint32(16)
        for value, sink in zip(values, sinks, strict=True):
            sink(warp, value, mask)

    return converged(step, all_members, instruction.text)


@opcode("tcgen05.st")
def _st(asm: Assembler, instruction: Instruction) -> Step:
    operands = instruction.operands
    move = _Move(asm, instruction, operands[0], operands[1] if len(operands) > 2 else None)
    sources = [asm.source(name, "b32") for name in asm.vector(operands[-1])]
    if len(sources) != move.registers:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        block, lane, column = move.cells(warp)
        warp.tracker.tensor_moved(warp, instruction, *move.touched(warp, lane, column))
        values = np.stack([np.broadcast_to(source(warp), 32) for source in sources])
        if move.packed:
            block[lane, column + 1] = values >> np.uint32(16)
            values = values & np.uint32(0xFFFF)
        block[lane, column] = values
        warp.cta.grid.scheduler.version += 1

    return converged(step, all_members, instruction.text)
