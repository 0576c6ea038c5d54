"""cp.reduce.async.bulk: shared memory is added to (or compared with, ...) global or shared memory, asynchronously.

A reduction is one step that nothing comes between, where a GPU promises that for each element. Reductions of several
CTAs into the same elements are no race, so the race check is not told of their writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.async_copy import (
    check_bulk,
    check_rank,
    groups_of,
    place_of,
    post,
    read_descriptor,
    tensor_operand,
    update_barrier,
)
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Step, lanes_of, of_lane, opcode
from mok_cute.emulator.reductions import ELEMENTS, combine, operation_of
from mok_cute.emulator.tensor_box import Box, box_at, read_box, write_box

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta, Warp

Bytes = npt.NDArray[np.uint8]
UNIT = "bulk reduction"
TENSOR_TYPES = {"u32": "u32", "s32": "s32", "u64": "u64", "s64": "s64", "f16": "f16", "bf16": "bf16", "f32": "f32"}


def _combined(before: Bytes, new: Bytes, operation: str, kind: str) -> Bytes:
    element = ELEMENTS[kind]
    left, right = (np.ascontiguousarray(data).view(element) for data in (before, new))
    return np.ascontiguousarray(combine(left, right, operation, kind)).astype(element).view(np.uint8)


def _parts(instruction: Instruction) -> tuple[str, str]:
    """Operation and element type."""
    kind = instruction.type
    if kind not in ELEMENTS:
        raise ValueError("type")
    return operation_of(instruction.parts), kind


@opcode("cp.reduce.async.bulk.global")
def _to_global(asm: Assembler, instruction: Instruction) -> Step:
    """[to], [from], bytes"""
    operation, kind = _parts(instruction)
    to, origin = (asm.address(operand)[0] for operand in instruction.operands[:2])
    size = asm.source(instruction.operands[2], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(origin(warp)[lane]))
            target, num_bytes = int(to(warp)[lane]), of_lane(size(warp), lane)
            check_bulk(offset, target, num_bytes)
            steps = _global_steps(warp, cta, offset, target, num_bytes, operation, kind)
            steps = warp.tracker.in_group(warp, instruction, lane, *steps)
            groups_of(warp, lane).open.append(post(warp, UNIT, instruction.text, *steps))

    return step


def _global_steps(
    warp: Warp, cta: Cta, offset: int, target: int, num_bytes: int, operation: str, kind: str
) -> list[Callable[[], None]]:
    held: list[Bytes] = []
    memory = warp.cta.grid.memory

    def read() -> None:
        cta.check_shared(offset, num_bytes)
        warp.tracker.reads_shared(cta, np.array([offset]), num_bytes)
        held.append(cta.shared[offset : offset + num_bytes].copy())

    def update() -> None:
        warp.tracker.writes_global(np.array([target]), num_bytes, atomic=True)
        memory.write(target, _combined(memory.read(target, num_bytes, 16), held[0], operation, kind), 16)

    return [read, update]


@opcode("cp.reduce.async.bulk.shared::cluster")
def _to_shared(asm: Assembler, instruction: Instruction) -> Step:
    """[to], [from], bytes, [barrier]: to the shared memory of a CTA of the cluster."""
    operation, kind = _parts(instruction)
    to, origin = (asm.address(operand)[0] for operand in instruction.operands[:2])
    size, barrier = asm.source(instruction.operands[2], "u32"), asm.address(instruction.operands[3])[0]

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            num_bytes = of_lane(size(warp), lane)
            places = [place_of(warp, int(address(warp)[lane])) for address in (to, origin, barrier)]
            check_bulk(places[0][1], places[1][1], num_bytes)
            if places[2][0] is not places[0][0]:
                raise KernelFault("cp.reduce.async.bulk: the barrier must be in the memory that is written")

            def update(places: list[tuple[Cta, int]] = places, num_bytes: int = num_bytes) -> None:
                (cta, offset), (source, start), (barrier_cta, barrier_offset) = places
                for place, first in ((cta, offset), (source, start)):
                    place.check_shared(first, num_bytes)
                warp.tracker.reads_shared(source, np.array([start]), num_bytes)
                new = source.shared[start : start + num_bytes]
                before = cta.shared[offset : offset + num_bytes]
                nothing, report = np.zeros(0, np.int64), (barrier_cta, barrier_offset)
                warp.tracker.loads(nothing, 0, cta, np.array([offset]), num_bytes, report, atomic=True)
                cta.shared[offset : offset + num_bytes] = _combined(before, new, operation, kind)
                update_barrier(barrier_cta, barrier_offset, 0, -num_bytes)

            post(warp, UNIT, instruction.text, warp.tracker.asynchronous(warp, instruction, update))

    return step


@opcode("cp.reduce.async.bulk.tensor")
def _tensor(asm: Assembler, instruction: Instruction) -> Step:
    """[descriptor, {coordinates}], [from]: the element type is the descriptor's."""
    if "tile" not in instruction.parts and "im2col_no_offs" in instruction.parts:
        raise ValueError("mode")
    rank, operation = int(instruction.parts[5][0]), operation_of(instruction.parts)
    descriptor, coordinates = tensor_operand(asm, instruction.operands[0])
    origin = asm.address(instruction.operands[1])[0]

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(origin(warp)[lane]))
            tensor = read_descriptor(warp, of_lane(descriptor(warp), lane))
            at = [of_lane(coordinate(warp), lane) for coordinate in coordinates]
            check_rank(tensor, rank)
            if tensor.dtype not in TENSOR_TYPES:
                raise KernelFault(f"TMA: a reduction of {tensor.dtype} elements")
            steps = _tensor_steps(warp, cta, offset, box_at(tensor, at), operation)
            steps = warp.tracker.in_group(warp, instruction, lane, *steps)
            groups_of(warp, lane).open.append(post(warp, UNIT, instruction.text, *steps))

    return step


def _tensor_steps(warp: Warp, cta: Cta, offset: int, box: Box, operation: str) -> list[Callable[[], None]]:
    held: list[Bytes] = []
    memory, kind = warp.cta.grid.memory, TENSOR_TYPES[box.tensor.dtype]

    def read() -> None:
        places = box.chunks(cta, offset)
        warp.tracker.reads_shared(cta, 16 * places, 16)
        held.append(box.from_chunks(cta.shared_words[16][places]))

    def update() -> None:
        warp.tracker.writes_global(box.rows[box.inside], box.copied_bytes, atomic=True)
        before = read_box(memory, box)
        write_box(memory, box, _combined(before, held[0], operation, kind).reshape(before.shape))

    return [read, update]
