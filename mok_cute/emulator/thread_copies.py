"""Asynchronous copies and stores that every thread makes for itself: cp.async, st.async, red.async; and st.bulk.

The cp.async copies of one warp-instruction are one operation. A thread's copies form groups of their own, apart from
those of bulk copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.async_copy import BulkGroups, load_barrier, place_of, post, store_barrier, update_barrier
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, KernelFault, Mask, Step, lanes_of, of_lane, opcode
from mok_cute.emulator.reductions import ELEMENTS, combine, operation_of

if TYPE_CHECKING:
    from mok_cute.emulator.device import AsyncOperation, Cta, Warp

COPY, REMOTE = "cp.async", "remote store"
NOWHERE = np.zeros(0, np.int64)  # in global memory
OWN_GROUPS = 32  # groups of cp.async are kept behind those of bulk copies, by lane


def _groups(warp: Warp, lane: int) -> BulkGroups:
    return warp.bulk_groups.setdefault(OWN_GROUPS + lane, BulkGroups())


@opcode("cp.async.ca", "cp.async.cg")
def _copy(asm: Assembler, instruction: Instruction) -> Step:
    """[to], [from], bytes {, bytes to read: the rest becomes zero | predicate: all become zero} {, cache hint}"""
    operands = list(instruction.operands)
    to, origin, size = asm.address(operands[0])[0], asm.address(operands[1])[0], int(operands[2], 0)
    rest = operands[3:]
    if "L2::cache_hint" in instruction.parts:
        rest.pop()
    if len(rest) > 1 or size not in (4, 8, 16):
        raise ValueError("operands")
    ignored = counted = None
    if rest and rest[0] in asm.registers and asm.types[asm.registers[rest[0]]] == np.bool_:
        ignored = asm.source(rest[0], "pred")
    elif rest:
        counted = asm.source(rest[0], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        jobs = []
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(to(warp)[lane]))
            count = size if counted is None else of_lane(counted(warp), lane)
            if ignored is not None and of_lane(ignored(warp), lane):
                count = 0
            if count > size or offset % size:
                raise KernelFault(f"cp.async of {count} of {size} bytes to shared memory offset {offset:#x}")
            jobs.append((cta, offset, int(origin(warp)[lane]), count))
        copy = warp.tracker.copying(warp, instruction, lambda: _perform(warp, jobs, size))
        operation = post(warp, COPY, instruction.text, copy)
        for lane in lanes_of(mask):
            _groups(warp, lane).open.append(operation)

    return step


def _perform(warp: Warp, jobs: list[tuple[Cta, int, int, int]], size: int) -> None:
    for cta, offset, source, count in jobs:
        cta.check_shared(offset, size)
        warp.tracker.copies(cta, np.array([offset]), size, np.array([source]), count)
        cta.shared[offset : offset + size] = 0
        if count:
            cta.shared[offset : offset + count] = warp.cta.grid.memory.read(source, count, count & -count)


@opcode("cp.async.commit_group")
def _commit(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            groups = _groups(warp, lane)
            groups.committed.append(groups.open)
            groups.open = []
        warp.tracker.copies_committed(warp)

    return step


@opcode("cp.async.wait_group", "cp.async.wait_all")
def _wait(asm: Assembler, instruction: Instruction) -> Step:
    everything = instruction.parts[2] == "wait_all"
    latest = 0 if everything else int(instruction.operands[0], 0)

    def step(warp: Warp, mask: Mask) -> Any:
        for lane in lanes_of(mask):
            groups = _groups(warp, lane)
            awaited = groups.committed[: max(len(groups.committed) - latest, 0)]
            if everything:
                awaited = [*awaited, groups.open]
            if any(operation.remaining() for group in awaited for operation in group):
                return warp.block(lambda: f"{instruction.text}: a copy of the group is under way")
        for lane in lanes_of(mask):
            _groups(warp, lane).forget_complete()
        warp.tracker.copies_awaited(warp, None if everything else latest)
        return None

    return step


@opcode("cp.async.mbarrier.arrive")
def _arrive(asm: Assembler, instruction: Instruction) -> Step:
    """One arrival when all earlier cp.async of the thread are done; without noinc it is announced first."""
    address, _ = asm.address(instruction.operands[0])
    announced = "noinc" not in instruction.parts

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(address(warp)[lane]))
            groups = _groups(warp, lane)
            before = [op for group in (*groups.committed, groups.open) for op in group if op.remaining()]
            if announced:
                barrier = load_barrier(cta, offset)
                barrier.update(-1, 0)
                store_barrier(cta, offset, barrier)
            told = warp.tracker.copies_arrive(warp, instruction, cta, offset)
            _after(before, _arrival(cta, offset, told))

    return step


def _arrival(cta: Cta, offset: int, told: Callable[[], None]) -> Callable[[], None]:
    def arrive() -> None:
        told()
        barrier = load_barrier(cta, offset)
        barrier.update(1, 0)
        store_barrier(cta, offset, barrier)

    return arrive


def _after(operations: list[AsyncOperation], action: Callable[[], None]) -> None:
    """Run ``action`` with the last step of the last of these to end; at once without any."""
    waiting = [len(operations)]
    if not operations:
        action()
        return

    def one_done() -> None:
        waiting[0] -= 1
        if not waiting[0]:
            action()

    for operation in operations:
        operation.steps = deque([*operation.steps, one_done])


@opcode("st.async")
def _st_async(asm: Assembler, instruction: Instruction) -> Step:
    """[to], value or {values}, [barrier]: to shared memory of the cluster; its bytes are reported to the barrier."""
    kind = instruction.type
    names = asm.vector(instruction.operands[1])
    to, barrier = asm.address(instruction.operands[0])[0], asm.address(instruction.operands[2])[0]
    reads, dtype = [asm.source(name, kind) for name in names], TYPES[kind]
    num_bytes = dtype.itemsize * len(reads)
    if not any(part.startswith("mbarrier::complete_tx") for part in instruction.parts):
        raise ValueError("completion")

    def step(warp: Warp, mask: Mask) -> None:
        values = np.stack([np.broadcast_to(read(warp), 32) for read in reads], axis=1)
        for lane in lanes_of(mask):
            place, report = (place_of(warp, int(address(warp)[lane])) for address in (to, barrier))
            _check_report(place, report)
            data = np.ascontiguousarray(values[lane]).view(np.uint8)

            def store(place: tuple[Cta, int] = place, report: tuple[Cta, int] = report, data: Any = data) -> None:
                cta, offset = place
                cta.check_shared(offset, num_bytes)
                warp.tracker.loads(NOWHERE, 0, cta, np.array([offset]), num_bytes, report)
                cta.shared[offset : offset + num_bytes] = data
                update_barrier(*report, 0, -num_bytes)

            post(warp, REMOTE, instruction.text, warp.tracker.asynchronous(warp, instruction, store))

    return step


@opcode("red.async")
def _red_async(asm: Assembler, instruction: Instruction) -> Step:
    """[to], value, [barrier]"""
    kind, operation = instruction.type, operation_of(instruction.parts)
    to, barrier = asm.address(instruction.operands[0])[0], asm.address(instruction.operands[2])[0]
    read, element = asm.source(instruction.operands[1], kind), ELEMENTS[kind]
    size = element.itemsize

    def step(warp: Warp, mask: Mask) -> None:
        values = np.broadcast_to(read(warp), 32)
        for lane in lanes_of(mask):
            place, report = (place_of(warp, int(address(warp)[lane])) for address in (to, barrier))
            _check_report(place, report)
            value = values[lane : lane + 1].copy().view(element)

            def update(place: tuple[Cta, int] = place, report: tuple[Cta, int] = report, value: Any = value) -> None:
                cta, offset = place
                cta.check_shared(offset, size)
                warp.tracker.loads(NOWHERE, 0, cta, np.array([offset]), size, report, atomic=True)
                word = cta.shared[offset : offset + size].view(element)
                word[:] = combine(word.copy(), value, operation, kind)
                update_barrier(*report, 0, -size)

            post(warp, REMOTE, instruction.text, warp.tracker.asynchronous(warp, instruction, update))

    return step


def _check_report(place: tuple[Cta, int], report: tuple[Cta, int]) -> None:
    if place[0] is not report[0]:
        raise KernelFault(
            f"store to CTA {place[0].rank} of the cluster that reports to a barrier of CTA {report[0].rank}: "
            "it must be the same one"
        )


@opcode("st.bulk")
def _st_bulk(asm: Assembler, instruction: Instruction) -> Step:
    """[to], bytes, 0: shared memory is set to zero."""
    to, size = asm.address(instruction.operands[0])[0], asm.source(instruction.operands[1], "u64")
    if int(instruction.operands[2], 0) != 0:
        raise ValueError("value")

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(to(warp)[lane]))
            num_bytes = of_lane(size(warp), lane)
            cta.check_shared(offset, num_bytes)
            written = np.array([cta.shared_base | offset], np.uint64)
            warp.tracker.stored(warp, instruction, "shared", written, num_bytes)
            cta.shared[offset : offset + num_bytes] = 0
            cta.grid.scheduler.version += 1

    return step
