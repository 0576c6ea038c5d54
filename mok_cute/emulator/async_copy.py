"""mbarriers, bulk copies, and tensor copies between global and shared memory (TMA).

A copy is an ``AsyncOperation``: a load writes shared memory and reports its bytes to the barrier in one step; a store
reads shared memory in its first step and writes global memory in its second, so that a kernel that reuses the source or
publishes the result too early is seen to do so.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.decode import Instruction, split_operands
from mok_cute.emulator.execute import (
    SHARED_WINDOW,
    Assembler,
    KernelFault,
    Mask,
    Source,
    Step,
    lanes_of,
    of_lane,
    opcode,
)
from mok_cute.emulator.load_store import OFFSET_BITS
from mok_cute.emulator.state import Word
from mok_cute.emulator.tensor_box import Box, box_at, box_of_rows, read_box, write_box
from mok_cute.emulator.tensor_map import NUM_BYTES, TensorMap

if TYPE_CHECKING:
    from mok_cute.emulator.device import AsyncOperation, Cta, Warp

Bytes = npt.NDArray[np.uint8]
MAX_COUNT = (1 << 20) - 1  # arrivals and bytes that an mbarrier can hold
TX_BITS, TX_SHIFT = 23, 41
PHASE = 1  # the bit of the word that says which phase it is in
LOAD, STORE = "bulk load", "bulk store"


# ----------------------------------------------------------------------------------------------------------- mbarriers


@dataclass
class MBarrier:
    """The 64-bit word of an mbarrier, taken apart. The layout is ours: a kernel must not look inside.

    The phase ends when no arrivals and no bytes are missing.
    """

    phase: int
    pending: int  # arrivals missing in this phase
    expected: int  # arrivals of every phase
    missing_bytes: (
        int  # announced and not yet copied; negative for a moment when a copy is faster than its announcement
    )

    @classmethod
    def load(cls, word: int) -> MBarrier:
        missing = word >> TX_SHIFT
        missing -= (1 << TX_BITS) if missing >> (TX_BITS - 1) else 0
        return cls(word & 1, word >> 1 & MAX_COUNT, word >> 21 & MAX_COUNT, missing)

    def word(self) -> int:
        missing = self.missing_bytes & ((1 << TX_BITS) - 1)
        return self.phase | self.pending << 1 | self.expected << 21 | missing << TX_SHIFT

    def update(self, arrivals: int, num_bytes: int) -> None:
        """``num_bytes`` announced (positive) or copied (negative), then ``arrivals``."""
        self.missing_bytes += num_bytes
        self.pending -= arrivals
        if self.pending < 0:
            raise KernelFault(f"mbarrier: {-self.pending} arrivals more than its count of {self.expected}")
        if abs(self.missing_bytes) > MAX_COUNT:
            raise KernelFault(f"mbarrier: {self.missing_bytes} bytes outstanding, beyond its range")
        if self.pending == 0 and self.missing_bytes == 0:
            self.phase ^= 1
            self.pending = self.expected

    def __str__(self) -> str:
        arrivals = f"{self.pending} of {self.expected} arrivals missing"
        return f"phase {self.phase}, {arrivals}, {self.missing_bytes} bytes missing"


def place_of(warp: Warp, address: int) -> tuple[Cta, int]:
    """The CTA and offset of a shared address."""
    plain = address & (SHARED_WINDOW - 1)
    return warp.cta.peer(plain >> OFFSET_BITS), plain & ((1 << OFFSET_BITS) - 1)


def load_barrier(cta: Cta, offset: int) -> MBarrier:
    cta.check_shared(offset, 8)
    if offset % 8:
        raise KernelFault(f"mbarrier at shared memory offset {offset:#x}, which is not a multiple of 8")
    return MBarrier.load(int(cta.shared_words[8][offset // 8]))


def store_barrier(cta: Cta, offset: int, barrier: MBarrier) -> None:
    cta.shared_words[8][offset // 8] = barrier.word()
    cta.grid.scheduler.version += 1
    cta.grid.scheduler.tracker.mbarrier_stored(cta, offset, barrier.phase)


def update_barrier(cta: Cta, offset: int, arrivals: int, num_bytes: int) -> None:
    """By an asynchronous operation."""
    barrier = load_barrier(cta, offset)
    cta.grid.scheduler.tracker.reports(cta, offset)
    barrier.update(arrivals, num_bytes)
    store_barrier(cta, offset, barrier)


@opcode("mbarrier.init")
def _init(asm: Assembler, instruction: Instruction) -> Step:
    address, _ = asm.address(instruction.operands[0])
    count = asm.source(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(address(warp)[lane]))
            number = of_lane(count(warp), lane)
            if not 1 <= number <= MAX_COUNT:
                raise KernelFault(f"mbarrier.init with a count of {number}")
            cta.check_shared(offset, 8)
            warp.tracker.mbarrier_made(warp, instruction, cta, offset)
            store_barrier(cta, offset, MBarrier(0, number, number, 0))

    return step


@opcode("mbarrier.inval")
def _inval(asm: Assembler, instruction: Instruction) -> Step:
    address, _ = asm.address(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(address(warp)[lane]))
            cta.check_shared(offset, 8)
            cta.shared_words[8][offset // 8] = 0xFFFFFFFFFFFFFFFF
            warp.tracker.mbarrier_ended(cta, offset)

    return step


@opcode("mbarrier.arrive", "mbarrier.expect_tx", "mbarrier.complete_tx")
def _arrive(asm: Assembler, instruction: Instruction) -> Step:
    """arrive [state,] [barrier] {, count}; arrive.expect_tx [state,] [barrier], bytes; expect_tx; complete_tx."""
    parts, operands = instruction.parts, list(instruction.operands)
    if "noComplete" in parts:
        raise ValueError("noComplete")
    put = asm.sink(operands.pop(0), "b64") if not operands[0].startswith("[") else None
    address, _ = asm.address(operands[0])
    amount = asm.source(operands[1], "u32") if len(operands) > 1 else None
    arrives, announces = parts[1] == "arrive", "expect_tx" in parts

    def step(warp: Warp, mask: Mask) -> None:
        addresses, before = address(warp), np.zeros(32, np.uint64)
        amounts = None if amount is None else amount(warp)
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(addresses[lane]))
            number = 1 if amounts is None else of_lane(amounts, lane)
            barrier = load_barrier(cta, offset)
            before[lane] = barrier.word()
            warp.tracker.mbarrier_arrives(warp, instruction, cta, offset)
            if announces:
                barrier.update(1 if arrives else 0, number)
            else:
                barrier.update(number if arrives else 0, 0 if arrives else -number)
            store_barrier(cta, offset, barrier)
        warp.polls.clear()
        if put is not None:
            put(warp, before, mask)

    return step


def _describe_wait(cta: Cta, offset: int, parity: int) -> Callable[[], str]:
    return lambda: f"mbarrier at shared memory offset {offset:#x}, parity {parity}: {load_barrier(cta, offset)}"


@opcode("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(asm: Assembler, instruction: Instruction) -> Step:
    """True once the phase of the given parity has ended. try_wait never gives up here."""
    parts, operands = instruction.parts, instruction.operands
    put = asm.sink(operands[0], "pred")
    address, _ = asm.address(operands[1])
    awaited = asm.source(operands[2], "u32" if "parity" in parts else "u64")
    suspends = parts[1] == "try_wait"

    def step(warp: Warp, mask: Mask) -> Any:
        addresses, parities = address(warp), awaited(warp)
        done = np.zeros(32, np.bool_)
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(addresses[lane]))
            if cta is not warp.cta:
                raise KernelFault(f"{parts[1]} on a barrier of another CTA")
            barrier = load_barrier(cta, offset)
            parity = of_lane(parities, lane) & 1
            done[lane] = barrier.phase != parity
            warp.tracker.mbarrier_waits(warp, instruction, cta, offset, parity, bool(done[lane]))
            if not done[lane]:
                words = cta.shared_words[8][offset // 8 : offset // 8 + 1]
                seen = np.array([addresses[lane]], np.uint64)
                if suspends or warp.is_repeated_poll(instruction, seen, words, words.copy):
                    word = Word(words.ctypes.data, PHASE) if suspends else warp.cta.grid.scheduler.version_word
                    return warp.block(_describe_wait(cta, offset, parity), word)
        warp.polls.clear()
        put(warp, done, mask)
        return None

    return step


# -------------------------------------------------------------------------------------------------------------- groups


@dataclass
class BulkGroups:
    """The stores of one thread: those since the last commit, and the committed groups in order."""

    open: list[AsyncOperation] = field(default_factory=list)
    committed: list[list[AsyncOperation]] = field(default_factory=list)

    def forget_complete(self) -> None:
        """Only the oldest: a group that ended before an older one still counts among the latest."""
        while self.committed and not any(operation.remaining() for operation in self.committed[0]):
            self.committed.pop(0)


def groups_of(warp: Warp, lane: int) -> BulkGroups:
    return warp.bulk_groups.setdefault(lane, BulkGroups())


@opcode("cp.async.bulk.commit_group")
def _commit(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            groups = groups_of(warp, lane)
            groups.committed.append(groups.open)
            groups.open = []
            warp.tracker.group_committed(warp, lane)

    return step


@opcode("cp.async.bulk.wait_group")
def _wait_group(asm: Assembler, instruction: Instruction) -> Step:
    """All but the latest groups are complete; with .read, have read their source."""
    latest = int(instruction.operands[0], 0)
    may_remain = 1 if "read" in instruction.parts else 0  # steps: read, then write

    def step(warp: Warp, mask: Mask) -> Any:
        for lane in lanes_of(mask):
            committed = groups_of(warp, lane).committed
            for group in committed[: max(len(committed) - latest, 0)]:
                if any(operation.remaining() > may_remain for operation in group):
                    return warp.block(lambda: f"{instruction.text}: a copy of the group is under way", warp.async_steps)
        for lane in lanes_of(mask):
            groups_of(warp, lane).forget_complete()
            warp.tracker.group_awaited(warp, lane, latest, bool(may_remain))
        return None

    return step


# ------------------------------------------------------------------------------------------------- copies without TMA


def post(warp: Warp, unit: str, text: str, *steps: Callable[[], None]) -> AsyncOperation:
    from mok_cute.emulator.device import AsyncOperation

    operation = AsyncOperation(unit, deque(steps), text, warp)
    warp.cta.grid.scheduler.post(warp.cta.grid, operation)
    return operation


class Destination(NamedTuple):
    """Where a load goes and which barrier it reports to."""

    cta: Cta
    offset: int
    barrier_cta: Cta
    barrier_offset: int


def _destinations(
    warp: Warp, lane: int, to: Source, barrier: Source, multicast: Source | None, paired: bool = False
) -> list[Destination]:
    """One, or the CTAs of a multicast mask, each at the same offset.

    The barrier is in the destination's CTA, at the same offset in each. With cta_group::2 it may be in the other CTA of
    the pair: one barrier address then means, for every destination, the even or the odd CTA of its pair.
    """
    cta, offset = place_of(warp, int(to(warp)[lane]))
    barrier_cta, barrier_offset = place_of(warp, int(barrier(warp)[lane]))
    if multicast is None:
        if barrier_cta is not cta and not (paired and barrier_cta.rank == cta.rank ^ 1):
            raise KernelFault(
                f"copy to CTA {cta.rank} of the cluster that reports to a barrier of CTA {barrier_cta.rank}: must be "
                "the same one, or with .cta_group::2 the other one of the pair"
            )
        return [Destination(cta, offset, barrier_cta, barrier_offset)]
    ranks = [rank for rank in range(16) if of_lane(multicast(warp), lane) >> rank & 1]
    reports = {rank: rank & ~1 | barrier_cta.rank & 1 if paired else rank for rank in ranks}
    return [Destination(cta.peer(rank), offset, cta.peer(reports[rank]), barrier_offset) for rank in ranks]


@opcode("cp.async.bulk")
def _bulk(asm: Assembler, instruction: Instruction) -> Step:
    """[to], [from], bytes {, [barrier]} {, multicast mask} {, cache hint}"""
    to_space, from_space = (part.split("::")[0] for part in instruction.parts[3:5])
    operands = instruction.operands
    to, origin = asm.address(operands[0])[0], asm.address(operands[1])[0]
    size = asm.source(operands[2], "u32")
    if (to_space, from_space) == ("global", "shared"):
        return _bulk_store(to, origin, size, instruction)
    if (to_space, from_space) not in (("shared", "global"), ("shared", "shared")):
        raise ValueError("direction")
    barrier = asm.address(operands[3])[0]
    if from_space == "shared":
        return _bulk_to_cluster(to, origin, size, barrier, instruction)
    multicast = asm.source(operands[4], "u16") if "multicast::cluster" in instruction.opcode else None

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            destinations = _destinations(warp, lane, to, barrier, multicast)
            source, num_bytes = int(origin(warp)[lane]), of_lane(size(warp), lane)
            check_bulk(destinations[0].offset, source, num_bytes)
            load = partial(_bulk_load, warp, source, num_bytes, destinations)
            post(warp, LOAD, instruction.text, warp.tracker.asynchronous(warp, instruction, load))

    return step


def _bulk_load(warp: Warp, source: int, num_bytes: int, destinations: list[Destination]) -> None:
    data = warp.cta.grid.memory.read(source, num_bytes, 16)
    for to in destinations:
        to.cta.check_shared(to.offset, num_bytes)
        places = np.array([source]), num_bytes, to.cta, np.array([to.offset]), num_bytes
        warp.tracker.loads(*places, (to.barrier_cta, to.barrier_offset))
        to.cta.shared[to.offset : to.offset + num_bytes] = data
        update_barrier(to.barrier_cta, to.barrier_offset, 0, -num_bytes)


def _bulk_to_cluster(to: Source, origin: Source, size: Source, barrier: Source, instruction: Instruction) -> Step:
    """From the CTA's own shared memory to that of a CTA of its cluster."""

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            (target,) = _destinations(warp, lane, to, barrier, None)
            cta, offset = place_of(warp, int(origin(warp)[lane]))
            num_bytes = of_lane(size(warp), lane)
            check_bulk(target.offset, offset, num_bytes)

            def move(target: Destination = target, cta: Cta = cta, offset: int = offset, n: int = num_bytes) -> None:
                cta.check_shared(offset, n)
                target.cta.check_shared(target.offset, n)
                warp.tracker.reads_shared(cta, np.array([offset]), n)
                report = target.barrier_cta, target.barrier_offset
                warp.tracker.loads(np.zeros(0, np.int64), 0, target.cta, np.array([target.offset]), n, report)
                target.cta.shared[target.offset : target.offset + n] = cta.shared[offset : offset + n]
                update_barrier(target.barrier_cta, target.barrier_offset, 0, -n)

            post(warp, LOAD, instruction.text, warp.tracker.asynchronous(warp, instruction, move))

    return step


def check_bulk(shared: int, address: int, num_bytes: int) -> None:
    if shared % 16 or address % 16 or num_bytes % 16:
        raise KernelFault(
            f"bulk copy of {num_bytes} bytes between shared memory offset {shared:#x} and {address:#x}: "
            "all three must be multiples of 16"
        )


def _bulk_store(to: Source, origin: Source, size: Source, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(origin(warp)[lane]))
            target, num_bytes = int(to(warp)[lane]), of_lane(size(warp), lane)
            check_bulk(offset, target, num_bytes)
            steps = warp.tracker.in_group(warp, instruction, lane, *_store_steps(warp, cta, offset, target, num_bytes))
            groups_of(warp, lane).open.append(post(warp, STORE, instruction.text, *steps))

    return step


def _store_steps(warp: Warp, cta: Cta, offset: int, target: int, num_bytes: int) -> list[Callable[[], None]]:
    held: list[Bytes] = []

    def read() -> None:
        cta.check_shared(offset, num_bytes)
        warp.tracker.reads_shared(cta, np.array([offset]), num_bytes)
        held.append(cta.shared[offset : offset + num_bytes].copy())

    def write() -> None:
        warp.tracker.writes_global(np.array([target]), num_bytes)
        warp.cta.grid.memory.write(target, held[0], 16)

    return [read, write]


# ---------------------------------------------------------------------------------------------------------- TMA tiles


def read_descriptor(warp: Warp, address: int) -> TensorMap:
    return TensorMap.decode(warp.cta.grid.memory.read(address, NUM_BYTES, 64).tobytes())


def tensor_operand(asm: Assembler, operand: str) -> tuple[Source, list[Source]]:
    """``[descriptor, {coordinates}]``"""
    match = re.match(r"\[\s*([%\w$@]+)\s*,\s*\{(.*)\}\s*\]$", operand)
    if match is None:
        raise ValueError(f"tensor operand {operand}")
    return asm.source(match[1], "u64"), [asm.source(part, "s32") for part in split_operands(match[2])]


@opcode("cp.async.bulk.tensor")
def _tensor_copy(asm: Assembler, instruction: Instruction) -> Step:
    parts = instruction.parts
    if any(part.split("::")[0].startswith("im2col") for part in parts):
        raise ValueError("mode")
    rank = int(parts[4][0])
    to_space, from_space = (part.split("::")[0] for part in parts[5:7])
    find = box_of_rows if "tile::gather4" in parts or "tile::scatter4" in parts else box_at
    if (to_space, from_space) == ("global", "shared"):
        return _tensor_store(asm, instruction, rank, find)
    operands = instruction.operands
    to = asm.address(operands[0])[0]
    descriptor, coordinates = tensor_operand(asm, operands[1])
    barrier = asm.address(operands[2])[0]
    multicast = asm.source(operands[3], "u16") if "multicast::cluster" in instruction.opcode else None
    paired = "cta_group::2" in parts

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            tensor = read_descriptor(warp, of_lane(descriptor(warp), lane))
            at = [of_lane(coordinate(warp), lane) for coordinate in coordinates]
            check_rank(tensor, rank)
            destinations = _destinations(warp, lane, to, barrier, multicast, paired)
            load = partial(_tensor_load, warp, find(tensor, at), destinations)
            post(warp, "tensor load", instruction.text, warp.tracker.asynchronous(warp, instruction, load))

    return step


def _tensor_load(warp: Warp, box: Box, destinations: list[Destination]) -> None:
    data = box.to_chunks(read_box(warp.cta.grid.memory, box))
    for to in destinations:
        chunks = box.chunks(to.cta, to.offset)
        barrier = to.barrier_cta, to.barrier_offset
        warp.tracker.loads(box.rows[box.inside], box.copied_bytes, to.cta, 16 * chunks, 16, barrier)
        to.cta.shared_words[16][chunks] = data
        update_barrier(to.barrier_cta, to.barrier_offset, 0, -box.smem_bytes)


def check_rank(tensor: TensorMap, rank: int) -> None:
    if tensor.rank != rank:
        raise KernelFault(f"TMA: a copy of rank {rank} with a descriptor of rank {tensor.rank}")


def _tensor_store(asm: Assembler, instruction: Instruction, rank: int, find: Callable[..., Box]) -> Step:
    descriptor, coordinates = tensor_operand(asm, instruction.operands[0])
    origin = asm.address(instruction.operands[1])[0]

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(origin(warp)[lane]))
            tensor = read_descriptor(warp, of_lane(descriptor(warp), lane))
            at = [of_lane(coordinate(warp), lane) for coordinate in coordinates]
            check_rank(tensor, rank)
            steps = _tensor_store_steps(warp, cta, offset, find(tensor, at))
            steps = warp.tracker.in_group(warp, instruction, lane, *steps)
            groups_of(warp, lane).open.append(post(warp, "tensor store", instruction.text, *steps))

    return step


def _tensor_store_steps(warp: Warp, cta: Cta, offset: int, box: Box) -> list[Callable[[], None]]:
    held: list[Bytes] = []

    def read() -> None:
        places = box.chunks(cta, offset)
        warp.tracker.reads_shared(cta, 16 * places, 16)
        held.append(box.from_chunks(cta.shared_words[16][places]))

    def write() -> None:
        warp.tracker.writes_global(box.rows[box.inside], box.copied_bytes)
        write_box(warp.cta.grid.memory, box, held[0])

    return [read, write]
