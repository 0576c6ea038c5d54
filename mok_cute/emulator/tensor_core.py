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
from mok_cute.emulator.matrix_operand import SmemDescriptor, read_operand
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


@opcode("wgmma.mma_async")
def _wgmma(asm: Assembler, instruction: Instruction) -> Step:
    """{accumulator}, A, B, scale-d, negate-a, negate-b {, A is MN-major}, B is MN-major"""
    match = re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)$", instruction.opcode)
    if match is None:
        raise ValueError("shape or types")
    n, kind = int(match[1]), match[2]
    accumulator, a_operand, b_operand, scale_d, *modifiers = instruction.operands
    registers = np.array([asm.registers[name] for name in asm.vector(accumulator)])
    a_registers = np.array([asm.registers[name] for name in asm.vector(a_operand)]) if a_operand[0] == "{" else None
    a_bits = None if a_registers is not None else asm.source(a_operand, "u64")
    b_bits, accumulates = asm.source(b_operand, "u64"), _flag(asm, scale_d)
    signs = [int(value) for value in modifiers[:2]] or [1, 1]
    majors = [bool(int(value)) for value in modifiers[2:]]
    b_mn = majors[-1] if majors else False
    a_mn = majors[0] if len(majors) == 2 else False
    if len(registers) != n // 2:
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
                a = TO_F32[kind](read_operand(warp.cta, a_place, 16, 2, mn_major=a_mn, skip=16 * (warp.index % 4)))
            else:
                assert a_registers is not None
                a = _a_from_registers(warp, a_registers, kind)
            b = TO_F32[kind](read_operand(warp.cta, b_place, n, 2, mn_major=b_mn))
            product = sign * (a @ b.T)
            values = product[row, column]
            bank = warp.banks[4].view(np.float32)
            bank[rows_in_bank] = bank[rows_in_bank] + values if scale else values

        warp.matrix_groups.open.append(warp.tracker.in_matrix_group(warp, instruction, multiply))
        if not warp.cta.grid.scheduler.late_matrix:
            _finish(warp.matrix_groups.open)

    return converged(step, all_members, instruction.text)


def _a_from_registers(warp: Warp, registers: npt.NDArray[np.int64], kind: str) -> Matrix:
    """A fragment, (16, 16): register i of lane l has row l/4 + 8*(i%2), columns 2*(l%4) + 8*(i/2) and the next."""
    words = np.stack([warp.u[register] for register in registers])  # (4, 32)
    halves = TO_F32[kind](np.ascontiguousarray(words).view(np.uint16)).reshape(4, 32, 2)
    register, lane, half = np.meshgrid(np.arange(4), np.arange(32), np.arange(2), indexing="ij")
    result = np.zeros((16, 16), np.float32)
    result[lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2) + half] = halves
    return result


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
