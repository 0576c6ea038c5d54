"""Tensor memory and the tcgen05 instructions of one CTA (cta_group::1), for 16-bit and 8-bit operands.

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. A matrix operation and the
commits behind it form one queue per CTA and happen in order, at times the scheduler chooses. Loads and stores happen at
once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.async_copy import place_of, update_barrier
from mok_cute.emulator.convert import bf16_to_f32
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Step, first_lane, lanes_of, of_lane, opcode
from mok_cute.emulator.synchronize import all_members, converged

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta, Warp

Matrix = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
LANES, COLUMNS = 128, 512
K_BYTES = 32  # of an operand row in one instruction
PERIOD = 1024
SWIZZLE_BYTES = {0: 0, 2: 128, 4: 64, 6: 32}  # by the number in a descriptor
UNIT = "tensor core"


def _small_floats(exponent_bits: int, mantissa_bits: int) -> Matrix:
    """Value of every byte as an FP8 number: e4m3 without infinities, e5m2 with them."""
    bias, values = (1 << (exponent_bits - 1)) - 1, []
    for byte in range(256):
        exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1)
        mantissa = byte & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if exponent_bits == 4 and byte & 0x7F == 0x7F:
            value = float("nan")
        if exponent_bits == 5 and exponent == 31:
            value = float("nan") if mantissa else float("inf")
        values.append(-value if byte & 0x80 else value)
    return np.array(values, np.float32)


E4M3, E5M2 = _small_floats(4, 3), _small_floats(5, 2)
CONVERT: dict[tuple[str, int], Callable[[Bytes], Matrix]] = {  # by kind and the type number in the descriptor
    ("f16", 0): lambda raw: raw.view(np.float16).astype(np.float32),
    ("f16", 1): lambda raw: bf16_to_f32(raw.view(np.uint16)),
    ("f8f6f4", 0): lambda raw: E4M3[raw],
    ("f8f6f4", 1): lambda raw: E5M2[raw],
}


class TensorMemory:
    """The tensor memory of one CTA and which columns are allocated."""

    def __init__(self) -> None:
        self.words = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.allocated = np.zeros(COLUMNS, np.bool_)
        self.queue: deque[Callable[[], None]] = deque()

    def allocate(self, count: int) -> int | None:
        """First of ``count`` free columns, aligned to their number; None while there are none."""
        for first in range(0, COLUMNS, count):
            if not self.allocated[first : first + count].any():
                self.allocated[first : first + count] = True
                return first
        return None

    def block(self, address: int, lanes: int, columns: int) -> npt.NDArray[np.uint32]:
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


def _only_one_cta(instruction: Instruction) -> None:
    if "cta_group::2" in instruction.parts:
        raise ValueError("cta_group::2")


@opcode("tcgen05.alloc")
def _alloc(asm: Assembler, instruction: Instruction) -> Step:
    _only_one_cta(instruction)
    address = asm.address(instruction.operands[0])[0]
    count = asm.source(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> Any:
        columns = of_lane(count(warp), first_lane(mask))
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise KernelFault(f"tcgen05.alloc of {columns} columns: a power of two from 32 to {COLUMNS}")
        first = tensor_memory(warp.cta).allocate(columns)
        if first is None:
            return warp.block(lambda: f"{instruction.text}: no {columns} free columns of tensor memory")
        cta, offset = place_of(warp, int(address(warp)[first_lane(mask)]))
        cta.check_shared(offset, 4)
        cta.shared_words[4][offset // 4] = first
        cta.grid.scheduler.version += 1
        return None

    return converged(step, all_members, instruction.text)


@opcode("tcgen05.dealloc")
def _dealloc(asm: Assembler, instruction: Instruction) -> Step:
    _only_one_cta(instruction)
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


NO_EFFECT = ("relinquish_alloc_permit", "fence::before_thread_sync", "fence::after_thread_sync", "wait::ld", "wait::st")


@opcode(*(f"tcgen05.{name}" for name in NO_EFFECT))
def _no_effect(asm: Assembler, instruction: Instruction) -> Step:
    return lambda warp, mask: None


# ----------------------------------------------------------------------------------------------------- loads and stores


def _columns_per_register(instruction: Instruction) -> int:
    match = re.match(r"tcgen05\.(?:ld|st)\.sync\.aligned\.32x32b\.x(\d+)\.b32$", instruction.opcode)
    if match is None:
        raise ValueError("shape")
    return int(match[1])


def _own_lanes(warp: Warp, address: int, columns: int) -> npt.NDArray[np.uint32]:
    """A warp reaches the 32 lanes of its number modulo 4."""
    if (address >> 16) // 32 != warp.index % 4:
        raise KernelFault(
            f"tensor memory {address:#x}: warp {warp.index} reaches lanes from {32 * (warp.index % 4)} only"
        )
    return tensor_memory(warp.cta).block(address, 32, columns)


@opcode("tcgen05.ld")
def _ld(asm: Assembler, instruction: Instruction) -> Step:
    columns = _columns_per_register(instruction)
    sinks = [asm.sink(name, "b32") for name in asm.vector(instruction.operands[0])]
    address = asm.address(instruction.operands[1])[0]
    if len(sinks) != columns:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        block = _own_lanes(warp, int(address(warp)[0]), columns)
        for column, sink in enumerate(sinks):
            sink(warp, block[:, column], mask)

    return converged(step, all_members, instruction.text)


@opcode("tcgen05.st")
def _st(asm: Assembler, instruction: Instruction) -> Step:
    columns = _columns_per_register(instruction)
    address = asm.address(instruction.operands[0])[0]
    sources = [asm.source(name, "b32") for name in asm.vector(instruction.operands[1])]
    if len(sources) != columns:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        block = _own_lanes(warp, int(address(warp)[0]), columns)
        for column, source in enumerate(sources):
            block[:, column] = source(warp)

    return converged(step, all_members, instruction.text)


# ---------------------------------------------------------------------------------------------------- matrix operations


def _enqueue(warp: Warp, text: str, operation: Callable[[], None]) -> None:
    """One operation behind those of the same CTA: whichever entry the scheduler draws, the oldest one happens."""
    from mok_cute.emulator.device import AsyncOperation

    queue = tensor_memory(warp.cta).queue
    queue.append(operation)
    warp.cta.grid.scheduler.post(warp.cta.grid, AsyncOperation(UNIT, deque([lambda: queue.popleft()()]), text))


@opcode("tcgen05.commit")
def _commit(asm: Assembler, instruction: Instruction) -> Step:
    _only_one_cta(instruction)
    if "multicast::cluster" in instruction.opcode:
        raise ValueError("multicast")
    address = asm.address(instruction.operands[0])[0]

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(address(warp)[lane]))
            _enqueue(warp, instruction.text, _arrival(cta, offset))

    return step


def _arrival(cta: Cta, offset: int) -> Callable[[], None]:
    return lambda: update_barrier(cta, offset, 1, 0)


@lru_cache(maxsize=1024)
def _offsets(
    phase: int, leading: int, stride: int, swizzle: int, rows: int, size: int, mn_major: bool
) -> npt.NDArray[np.int64]:
    """(rows, elements of 32 bytes) byte offsets of an operand of ``size``-byte elements that starts at ``phase``."""
    row, k = np.arange(rows)[:, None], np.arange(K_BYTES // size)[None, :]
    if mn_major:
        if not swizzle:
            raise KernelFault("tcgen05: an MN-major operand without a swizzle is not known to the virtual GPU")
        width = swizzle // size
        offsets = phase + row // width * leading + k // 8 * stride + k % 8 * swizzle + row % width * size
    elif swizzle:
        offsets = phase + row // 8 * stride + row % 8 * swizzle + size * k
    else:
        offsets = phase + row // 8 * stride + row % 8 * 16 + size * k // 16 * leading + size * k % 16
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    swizzled: npt.NDArray[np.int64] = offsets ^ ((offsets >> 7 & mask) << 4)
    return swizzled


def _operand(cta: Cta, descriptor: int, rows: int, kind: str, number: int, mn_major: bool) -> Matrix:
    if (kind, number) not in CONVERT or descriptor >> 61 not in SWIZZLE_BYTES or descriptor >> 49 & 15:
        raise KernelFault(f"tcgen05.mma: type {number} or descriptor {descriptor:#x} is not known to the virtual GPU")
    size = 2 if kind == "f16" else 1
    start, leading, stride = ((descriptor >> low & 0x3FFF) << 4 for low in (0, 16, 32))
    phase = start % PERIOD
    offsets = _offsets(phase, leading, stride, SWIZZLE_BYTES[descriptor >> 61], rows, size, mn_major)
    base = start - phase
    cta.check_shared(base + int(offsets.min()), size)
    cta.check_shared(base + int(offsets.max()), size)
    return CONVERT[kind, number](cta.shared_words[size][(offsets + base) // size])


def multiply(cta: Cta, target: int, a: int, b: int, kind: str, descriptor: int, accumulate: bool) -> None:
    """One tcgen05.mma with both operands in shared memory and single precision sums."""
    m, n = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
    if descriptor & 0xF or descriptor >> 4 & 3 != 1 or m not in (64, 128):
        raise KernelFault(f"tcgen05.mma: instruction descriptor {descriptor:#x} is not known to the virtual GPU")
    left = _operand(cta, a, m, kind, descriptor >> 7 & 7, bool(descriptor >> 15 & 1))
    right = _operand(cta, b, n, kind, descriptor >> 10 & 7, bool(descriptor >> 16 & 1))
    sign = np.float32(-1 if (descriptor >> 13 ^ descriptor >> 14) & 1 else 1)
    product = sign * (left @ right.T)
    block = tensor_memory(cta).block(target, LANES, n).view(np.float32)
    # 64 rows use the first half of each group of 32 lanes.
    lanes = np.arange(m) if m == LANES else np.arange(m) // 16 * 32 + np.arange(m) % 16
    block[lanes] = block[lanes] + product if accumulate else product


@opcode("tcgen05.mma")
def _mma(asm: Assembler, instruction: Instruction) -> Step:
    """[accumulator], A, B, instruction descriptor {, disabled lanes}, accumulate"""
    _only_one_cta(instruction)
    match = re.match(
        r"tcgen05\.mma\.cta_group::1\.kind::(f16|f8f6f4)(\.collector::a::(discard|lastuse|fill|use))?$",
        instruction.opcode,
    )
    operands = instruction.operands
    if match is None or operands[1].startswith("["):
        raise ValueError("form")
    kind = match[1]
    target = asm.address(operands[0])[0]
    a, b = asm.source(operands[1], "u64"), asm.source(operands[2], "u64")
    descriptor, accumulate = asm.source(operands[3], "u32"), asm.source(operands[-1], "pred")
    masks = [asm.source(name, "u32") for name in asm.vector(operands[4])] if operands[4].startswith("{") else []

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            if any(of_lane(disabled(warp), lane) for disabled in masks):
                raise KernelFault("tcgen05.mma: disabled lanes are not known to the virtual GPU")
            values = (int(target(warp)[lane]), of_lane(a(warp), lane), of_lane(b(warp), lane))
            _enqueue(
                warp,
                instruction.text,
                _multiplication(
                    warp.cta, *values, kind, of_lane(descriptor(warp), lane), bool(of_lane(accumulate(warp), lane))
                ),
            )

    return step


def _multiplication(cta: Cta, *values: Any) -> Callable[[], None]:
    return lambda: multiply(cta, *values)
