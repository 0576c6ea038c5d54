"""wgmma and the matrix moves between registers and shared memory (stmatrix, ldmatrix).

Products are exact in single precision and summed there; the order of the sum is not the hardware's. A warp computes its
own 16 rows. By the scheduler's choice that happens when the instruction is issued or when its group is waited for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Step, of_lane, opcode
from mok_cute.emulator.load_store import read, write
from mok_cute.emulator.matrix_operand import K_BYTES, SmemDescriptor, read_operand
from mok_cute.emulator.number_formats import TO_F32
from mok_cute.emulator.synchronize import all_members, converged

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

Matrix = npt.NDArray[np.float32]


@dataclass
class MatrixGroups:
    """wgmma of one warp that was issued and not waited for."""

    open: list[Callable[[], None]] = field(default_factory=list)
    committed: list[list[Callable[[], None]]] = field(default_factory=list)


@lru_cache
def _accumulator_places(n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(register, lane) -> row and column of the warp's (16, n) part of the accumulator."""
    register, lane = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    return lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


def _flag(asm: Assembler, operand: str) -> Callable[[Warp], bool]:
    read_flag = asm.source(operand, "pred")
    return lambda warp: bool(np.broadcast_to(read_flag(warp), 32)[0])


WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)(?P<saturates>\.satfinite)?"
    r"\.(?P<d>f32|f16|s32)\.(?P<a>\w+)\.(?P<b>\w+)$"
)
OPERAND_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@opcode("wgmma.mma_async")
def _wgmma(asm: Assembler, instruction: Instruction) -> Step:
    """{accumulator}, A, B, scale-d {, negate-a, negate-b {{, A is MN-major}, B is MN-major}}"""
    match = WGMMA.match(instruction.opcode)
    if match is None:
        raise ValueError("shape or types")
    n, d_type, a_type, b_type = int(match["n"]), match["d"], match["a"], match["b"]
    size = OPERAND_BYTES[a_type]
    if OPERAND_BYTES[b_type] != size or int(match["k"]) * size != K_BYTES or match["saturates"]:
        raise ValueError("shape or types")
    accumulator, a_operand, b_operand, scale_d, *modifiers = instruction.operands
    registers = np.array([asm.registers[name] for name in asm.vector(accumulator)])
    a_registers = np.array([asm.registers[name] for name in asm.vector(a_operand)]) if a_operand[0] == "{" else None
    a_bits = None if a_registers is not None else asm.source(a_operand, "u64")
    b_bits, accumulates = asm.source(b_operand, "u64"), _flag(asm, scale_d)
    signs = [int(value) for value in modifiers[:2]] or [1, 1]
    majors = [bool(int(value)) for value in modifiers[2:]]
    b_mn = majors[-1] if majors else False
    a_mn = majors[0] if len(majors) == 2 else False
    if len(registers) != (n // 4 if d_type == "f16" else n // 2):
        raise ValueError("accumulator registers")
    row, column = _accumulator_places(n)
    sign = np.float32(signs[0] * signs[1])

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise KernelFault("wgmma in a part of a warp")
        scale = accumulates(warp)
        b_place = SmemDescriptor.of_wgmma(of_lane(b_bits(warp), 0))
        a_place = None if a_bits is None else SmemDescriptor.of_wgmma(of_lane(a_bits(warp), 0))
        rows_in_bank = [warp.rows[register] for register in registers]

        def multiply() -> None:
            if a_place is not None:
                raw = read_operand(warp.cta, a_place, 16, size, mn_major=a_mn, skip=16 * (warp.index % 4))
            else:
                assert a_registers is not None
                raw = _a_from_registers(warp, a_registers)
            b = TO_F32[b_type](read_operand(warp.cta, b_place, n, size, mn_major=b_mn))
            product = sign * (TO_F32[a_type](raw) @ b.T)
            _accumulate(warp.banks[4], rows_in_bank, product[row, column], d_type, scale)

        warp.matrix_groups.open.append(warp.tracker.in_matrix_group(warp, instruction, multiply))
        if not warp.cta.grid.scheduler.late_matrix:
            _finish(warp.matrix_groups.open)

    return converged(step, all_members, instruction.text)


def _accumulate(bank: npt.NDArray[np.uint32], rows: list[int], values: Matrix, kind: str, scale: bool) -> None:
    """``values`` (registers, 32) of one warp into its registers: f32, s32, or pairs of f16, low half first."""
    if kind == "f32":
        floats = bank.view(np.float32)
        floats[rows] = floats[rows] + values if scale else values
    elif kind == "s32":
        whole = np.rint(values).astype(np.int32)
        words = bank.view(np.int32)
        words[rows] = words[rows] + whole if scale else whole
    else:
        halves = bank[rows].view(np.float16).reshape(len(rows), 32, 2)
        pairs = values.reshape(len(rows), 2, 32).transpose(0, 2, 1)
        sums = (halves.astype(np.float32) + pairs if scale else pairs).astype(np.float16)
        bank[rows] = np.ascontiguousarray(sums).view(np.uint32).reshape(len(rows), 32)


def _a_from_registers(warp: Warp, registers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """(16, 32) bytes of A: register i of lane l has row l/4 + 8*(i%2), four bytes from 4*(l%4) + 16*(i/2) on."""
    result = np.zeros((16, K_BYTES // 4), np.uint32)
    lane = np.arange(32)
    for number, register in enumerate(registers):
        result[lane // 4 + 8 * (number % 2), lane % 4 + 4 * (number // 2)] = warp.u[register]
    return result.view(np.uint8)


def _finish(group: list[Callable[[], None]]) -> None:
    """In order; each once."""
    while group:
        group.pop(0)()


@opcode("wgmma.commit_group")
def _commit(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        groups = warp.matrix_groups
        groups.committed.append(groups.open)
        groups.open = []
        warp.tracker.matrix_group_committed(warp)

    return converged(step, all_members, instruction.text)


@opcode("wgmma.wait_group")
def _wait(asm: Assembler, instruction: Instruction) -> Step:
    latest = int(instruction.operands[0], 0)

    def step(warp: Warp, mask: Mask) -> None:
        committed = warp.matrix_groups.committed
        while len(committed) > latest:
            _finish(committed.pop(0))
        warp.tracker.matrix_group_awaited(warp, latest)

    return converged(step, all_members, instruction.text)


@opcode("wgmma.fence")
def _fence(asm: Assembler, instruction: Instruction) -> Step:
    return lambda warp, mask: None


# ----------------------------------------------------------------------------------------------- stmatrix and ldmatrix


def _tiles(instruction: Instruction) -> int:
    parts = instruction.parts
    if "m8n8" not in parts or instruction.type != "b16":
        raise ValueError("shape")
    return next(int(part[1:]) for part in parts if part in ("x1", "x2", "x4"))


def _row_addresses(addresses: npt.NDArray[np.uint64], tile: int) -> npt.NDArray[np.uint64]:
    return addresses[8 * tile : 8 * tile + 8]


@opcode("stmatrix.sync")
def _stmatrix(asm: Assembler, instruction: Instruction) -> Step:
    """Lane l holds row l/4, columns 2*(l%4) and the next; lane 8j + r has the address of row r of tile j."""
    tiles, transposed = _tiles(instruction), "trans" in instruction.parts
    address = asm.address(instruction.operands[0])[0]
    sources = [asm.source(name, "b32") for name in asm.vector(instruction.operands[1])]
    if len(sources) != tiles:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise KernelFault("stmatrix in a part of a warp")
        addresses = address(warp)
        for tile, source in enumerate(sources):
            matrix = np.array(np.broadcast_to(source(warp), 32)).view(np.uint16).reshape(8, 8)
            rows = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint8).reshape(8, 16)
            warp.tracker.stored(warp, instruction, "shared", _row_addresses(addresses, tile), 16)
            write(warp, "shared", _row_addresses(addresses, tile), rows)

    return converged(step, all_members, instruction.text)


@opcode("ldmatrix.sync")
def _ldmatrix(asm: Assembler, instruction: Instruction) -> Step:
    tiles, transposed = _tiles(instruction), "trans" in instruction.parts
    sinks = [asm.sink(name, "b32") for name in asm.vector(instruction.operands[0])]
    address = asm.address(instruction.operands[1])[0]
    if len(sinks) != tiles:
        raise ValueError("registers")

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise KernelFault("ldmatrix in a part of a warp")
        addresses = np.array(address(warp))
        for tile, sink in enumerate(sinks):
            warp.tracker.loaded(warp, instruction, "shared", _row_addresses(addresses, tile), 16)
            matrix = read(warp, "shared", _row_addresses(addresses, tile), 16).view(np.uint16).reshape(8, 8)
            words = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32).reshape(32)
            sink(warp, words, None)

    return converged(step, all_members, instruction.text)
