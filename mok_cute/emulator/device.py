"""The machine: grids of clusters of CTAs of warps, asynchronous units, and a seed that picks who steps next.

A warp holds one split per group of lanes that stand at the same instruction and runs the lowest one first, which brings
structured code together again. Nothing spins: an instruction that must wait leaves its split where it is, to be tried
again. When no warp can run and no asynchronous operation is left, that is a deadlock, and the report names what each
warp waits for.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# Imported for their opcodes.
from mok_cute.emulator import (  # noqa: F401
    async_copy,
    cluster_launch,
    convert,
    float_arithmetic,
    integer_arithmetic,
    load_store,
    synchronize,
    tcgen05,
    tensor_core,
)
from mok_cute.emulator.decode import Kernel
from mok_cute.emulator.execute import (
    BLOCKED,
    EXIT,
    PARAMETER_ALIGN,
    RESERVED_SHARED_BYTES,
    Assembler,
    Branch,
    KernelFault,
    Step,
)
from mok_cute.emulator.memory import WORDS, DeviceMemory, MemoryFault
from mok_cute.emulator.races import NO_TRACKER, RaceTracker, Tracker
from mok_cute.errors import KernelError

Extent = tuple[int, int, int]
TURNS = (20, 200, 2000)  # instructions of one turn of a warp; drawn each time
OUT_OF_TURN = 0.05  # how often a warp with several splits does not run the lowest
ASYNC_RATES = (0.0, 0.05, 0.3, 0.9)  # chance that an asynchronous step happens after a turn; 0: only when all wait
STALLS = 8  # times that parked polls are let through, without any change, before that is a deadlock


class Deadlock(KernelError):
    """No warp can go on. ``waits`` has one line for each group of lanes."""

    def __init__(self, reason: str, waits: list[str]) -> None:
        super().__init__("\n  ".join([reason, *waits]))
        self.waits = waits


@dataclass(frozen=True)
class LaunchStats:
    warp_instructions: int
    opcodes: Counter[str]  # warp-instructions by opcode with modifiers
    async_operations: Counter[str]  # by unit
    seconds: float  # wall time of the run; grids that ran together share it


@dataclass
class AsyncOperation:
    """Work of an asynchronous unit in steps that happen one by one, at times the scheduler chooses."""

    unit: str
    steps: deque[Callable[[], None]]
    text: str

    def remaining(self) -> int:
        return len(self.steps)


class Barrier:
    """Counts lanes by whole warps; without a stated count it wants every warp that lives."""

    def __init__(self, name: str, living: Callable[[], int]) -> None:
        self.name, self._living = name, living
        self.generation = 0
        self._arrived = 0
        self._count: int | None = None

    def arrive(self, count: int | None) -> None:
        if self._arrived and count != self._count:
            raise KernelFault(f"{self.name}: arrivals expect {self._count} and {count} threads")
        self._count = count
        self._arrived += 32
        self.passed(self.generation)

    @property
    def _needed(self) -> int:
        return 32 * self._living() if self._count is None else self._count

    def passed(self, generation: int) -> bool:
        if self._arrived and self._arrived >= self._needed:
            self.generation += 1
            self._arrived = 0
        return self.generation != generation

    def __str__(self) -> str:
        return f"{self.name}: {self._arrived} of {self._needed} threads have arrived"


@dataclass(eq=False)
class Split:
    """Lanes of a warp that stand at the same instruction."""

    pc: int
    mask: npt.NDArray[np.bool_]
    waits: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        self.count = int(np.count_nonzero(self.mask))


class Warp:
    def __init__(self, cta: Cta, index: int, num_threads: int) -> None:
        self.cta, self.index = cta, index
        self.tracker = cta.grid.scheduler.tracker
        types = cta.grid.assembler.types
        self.banks: dict[int, npt.NDArray[Any]] = {}
        self.rows: list[int] = []  # of each register in the bank of its width
        sizes = Counter[int]()
        for dtype in types:
            size = 0 if dtype == np.bool_ else dtype.itemsize
            self.rows.append(sizes[size])
            sizes[size] += 1
        for size, count in sizes.items():
            self.banks[size] = np.zeros((count, 32), WORDS[size] if size else np.bool_)
        views = {size: self._views(bank, size) for size, bank in self.banks.items()}
        where = [(0 if dtype == np.bool_ else dtype.itemsize, row) for dtype, row in zip(types, self.rows, strict=True)]
        # Views of every register: as unsigned (predicates: bool), signed and float.
        self.u, self.s, self.f = ([views[size][kind][row] for size, row in where] for kind in range(3))
        x, y, _ = cta.grid.extents["ntid"]
        threads = np.arange(32 * index, 32 * index + 32)
        self.tid = [threads % x, threads // x % y, threads // (x * y)]
        self.alive = threads < num_threads
        self.splits = [Split(0, self.alive.copy())]
        self.current = self.splits[0]
        self.gives_way = False
        self.awaited_barrier: int | None = None
        self.awaited_cluster = 0
        # Spin waits: what each strong load saw since the last effect of this warp.
        self.polls: dict[int, tuple[npt.NDArray[np.uint64], bytes, Callable[[], Any]]] = {}
        self.let_through = False
        self.bulk_groups: dict[int, async_copy.BulkGroups] = {}
        self.matrix_groups = tensor_core.MatrixGroups()

    @staticmethod
    def _views(bank: npt.NDArray[Any], size: int) -> tuple[list[Any], list[Any], list[Any]]:
        if size in (0, 16):  # predicates, and 128 bits that are only moved
            return list(bank), list(bank), list(bank)
        floats = bank.view(f"f{size}") if size > 1 else bank
        return list(bank), list(bank.view(f"i{size}")), list(floats)

    def block(self, waits: Callable[[], str]) -> int:
        """For a step that must wait: ``waits`` says for what, if that is ever asked."""
        self.current.waits = waits
        return BLOCKED

    def is_repeated_poll(
        self, instruction: object, addresses: npt.NDArray[np.uint64], data: Any, reread: Callable[[], Any]
    ) -> bool:
        """Whether this load saw what it saw before, and so did all other polls since."""
        key, seen = id(instruction), data.tobytes()
        before = self.polls.get(key)
        if self.let_through or before is None or before[1] != seen or not np.array_equal(before[0], addresses):
            if self.let_through or before is not None:
                self.polls.clear()
            self.let_through = False
            self.polls[key] = (addresses, seen, reread)
            return False
        if all(again().tobytes() == value for _, value, again in self.polls.values()):
            return True
        self.polls = {key: (addresses, seen, reread)}
        return False

    def step(self, rng: random.Random) -> int:
        """One turn; the number of instructions that ran, 0 if every split waits."""
        splits = self.splits
        if len(splits) > 1:
            splits = sorted(splits, key=lambda split: split.pc)
            if rng.random() < OUT_OF_TURN:
                rng.shuffle(splits)
        turn = rng.choice(TURNS)
        for split in splits:
            executed = self._run(split, turn)
            if executed:
                return executed
        return 0

    def _run(self, split: Split, turn: int) -> int:
        self.current = split
        self.gives_way = False
        code, counts = self.cta.grid.code, self.cta.grid.counts
        pc, mask = split.pc, None if split.count == 32 else split.mask
        others = {other.pc for other in self.splits if other is not split}
        executed = 0
        while True:
            try:
                outcome = code[pc](self, mask)
            except (KernelFault, MemoryFault) as fault:
                split.pc = pc
                _locate(fault, self, pc)
                raise
            if outcome is None:
                pc += 1
            elif outcome.__class__ is Branch:
                counts[pc] += 1
                rest = split.mask & ~outcome.taken
                split.mask, split.count, split.pc = rest, int(np.count_nonzero(rest)), pc + 1
                self.splits.append(Split(outcome.target, outcome.taken))
                self._merge()
                return executed + 1
            elif outcome == BLOCKED:
                split.pc = pc
                if executed:
                    self._merge()
                return executed
            elif outcome == EXIT:
                counts[pc] += 1
                self.alive &= ~split.mask
                self.splits.remove(split)
                return executed + 1
            else:
                counts[pc] += 1
                executed += 1
                if outcome <= pc and executed >= turn:
                    self.gives_way = True
                pc = outcome
                if pc in others or self.gives_way:
                    break
                continue
            counts[pc - 1] += 1
            executed += 1
            if executed >= turn or pc in others or self.gives_way:
                break
        split.pc = pc
        self._merge()
        return executed

    def _merge(self) -> None:
        if len(self.splits) == 1:
            return
        by_pc: dict[int, Split] = {}
        for split in self.splits:
            same = by_pc.setdefault(split.pc, split)
            if same is not split:
                same.mask = same.mask | split.mask
                same.count += split.count
        self.splits = list(by_pc.values())

    def waits(self) -> list[str]:
        kernel = self.cta.grid.kernel
        lines = []
        for split in self.splits:
            instruction = kernel.instructions[split.pc]
            lanes = int(np.packbits(split.mask, bitorder="little").view(np.uint32)[0])
            what = split.waits() if split.waits is not None else f"runs {instruction.text}"
            at = instruction.source or f"PTX line {instruction.line}"
            lines.append(f"{kernel.name} CTA {self.cta.index} warp {self.index} lanes {lanes:#010x} at {at}: {what}")
        return lines


def _locate(fault: KernelFault | MemoryFault, warp: Warp, pc: int) -> None:
    """Adds the place in the program to the message."""
    instruction = warp.cta.grid.kernel.instructions[pc]
    at = instruction.source or f"PTX line {instruction.line}"
    where = f"{warp.cta.grid.kernel.name}, CTA {warp.cta.index}, warp {warp.index}, {at}: {instruction.text}"
    fault.args = (f"{fault}\n  {where}",)


class Cta:
    """One CTA with its shared memory. A shared address is the rank in the cluster above 24 bits of offset."""

    def __init__(self, grid: Grid, cluster: Cluster, index: Extent, rank: int, sm: int) -> None:
        self.grid, self.cluster, self.index, self.rank, self.sm = grid, cluster, index, rank, sm
        x, y, z = grid.extents["cluster_nctaid"]
        self.index_in_cluster = (index[0] % x, index[1] % y, index[2] % z)
        self.cluster_index = (index[0] // x, index[1] // y, index[2] // z)
        self.shared_base = rank << load_store.OFFSET_BITS
        self.shared_end = grid.shared_end
        # Not zeros: what a kernel reads before it writes should look wrong. As floats these are NaN.
        self.shared = np.full(-(-self.shared_end // 16) * 16, 0xFF, np.uint8)
        self.shared_words = {size: self.shared.view(kind) for size, kind in WORDS.items()}
        self.tensor_memory: tcgen05.TensorMemory | None = None  # made on first use
        self.saw_refusal = False  # of cluster launch control
        self._barriers: dict[int, Barrier] = {}
        threads = int(np.prod(grid.extents["ntid"]))
        self.warps = [Warp(self, number, threads) for number in range(-(-threads // 32))]

    def barrier(self, number: int) -> Barrier:
        if number not in self._barriers:
            if not 0 <= number < 16:
                raise KernelFault(f"named barrier {number}: there are 16")
            self._barriers[number] = Barrier(f"named barrier {number}", self.living)
        return self._barriers[number]

    def living(self) -> int:
        return sum(1 for warp in self.warps if warp.splits)

    def peer(self, rank: int) -> Cta:
        if rank >= len(self.cluster.ctas):
            raise KernelFault(f"shared memory of CTA {rank} in a cluster of {len(self.cluster.ctas)}")
        return self.cluster.ctas[rank]

    def check_shared(self, offset: int, size: int) -> None:
        if not RESERVED_SHARED_BYTES <= offset or offset + size > self.shared_end:
            low, high = RESERVED_SHARED_BYTES, self.shared_end
            raise KernelFault(f"{size} bytes at shared memory offset {offset:#x}: the CTA has {low:#x} to {high:#x}")


class Cluster:
    def __init__(self, grid: Grid, first: Extent, sms: list[int]) -> None:
        self.ctas: list[Cta] = []
        self.sms = sms
        self.barrier = Barrier("cluster barrier", lambda: sum(cta.living() for cta in self.ctas))
        width, height, depth = grid.extents["cluster_nctaid"]
        for rank, sm in enumerate(sms):
            offset = (rank % width, rank // width % height, rank // (width * height))
            index = (first[0] + offset[0], first[1] + offset[1], first[2] + offset[2])
            self.ctas.append(Cta(grid, self, index, rank, sm))
        assert depth * width * height == len(sms)

    @property
    def warps(self) -> list[Warp]:
        return [warp for cta in self.ctas for warp in cta.warps]


@dataclass
class Grid:
    """One launch: a kernel, its extents and parameters, the memory it sees and the SMs it may fill."""

    kernel: Kernel
    grid: Extent
    block: Extent
    params: list[bytes]
    memory: DeviceMemory
    cluster: Extent = (1, 1, 1)
    dynamic_smem_bytes: int = 0
    sms: int = 4
    scheduler: Scheduler = field(init=False)
    clusters: list[Cluster] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._validate()
        cached = _ASSEMBLED.get(id(self.kernel))
        if cached is None or cached[0].kernel is not self.kernel:
            assembler = Assembler(self.kernel)
            cached = _ASSEMBLED[id(self.kernel)] = (assembler, assembler.assemble())
        self.assembler, self.code = cached
        self.counts = [0] * len(self.code)
        self.async_counts: Counter[str] = Counter()
        self.shared_end = self.assembler.static_end + self.dynamic_smem_bytes
        num_clusters = [many // one for many, one in zip(self.grid, self.cluster, strict=True)]
        self.extents: dict[str, Extent] = {
            "ntid": self.block,
            "nctaid": self.grid,
            "cluster_nctaid": self.cluster,
            "nclusterid": (num_clusters[0], num_clusters[1], num_clusters[2]),
        }
        self._pending = deque(
            (x * self.cluster[0], y * self.cluster[1], z * self.cluster[2])
            for z in range(num_clusters[2])
            for y in range(num_clusters[1])
            for x in range(num_clusters[0])
        )
        self._free_sms = list(range(self.sms))
        self._place_parameters()

    def _validate(self) -> None:
        for name, extent in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if min(extent) < 1:
                raise ValueError(f"{self.kernel.name}: {name}={extent}: every extent must be at least 1.")
        if any(many % one for many, one in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"{self.kernel.name}: grid={self.grid} is not a multiple of cluster={self.cluster}.")
        if int(np.prod(self.cluster)) > self.sms:
            raise ValueError(f"{self.kernel.name}: cluster={self.cluster} needs more than sms={self.sms}; raise sms.")
        if int(np.prod(self.block)) > 1024:
            raise ValueError(f"{self.kernel.name}: block={self.block} has more than 1024 threads.")
        required = self.kernel.directives.get("reqntid")
        if required is not None and tuple(self.block[: len(required)]) != required:
            raise ValueError(f"{self.kernel.name}: block={self.block}, but it was compiled for {required}.")
        sizes = [parameter.num_bytes for parameter in self.kernel.parameters]
        if [len(value) for value in self.params] != sizes:
            raise ValueError(f"{self.kernel.name}: params have {[len(p) for p in self.params]} bytes, not {sizes}.")

    def _place_parameters(self) -> None:
        num_bytes = max(self.assembler.parameter_bytes, 1)
        block = np.zeros(num_bytes + PARAMETER_ALIGN, np.uint8)
        skip = -block.ctypes.data % PARAMETER_ALIGN
        self.parameters = block[skip : skip + num_bytes]
        self.parameter_base = self.parameters.ctypes.data
        for value, offset in zip(self.params, self.assembler.parameter_offsets.values(), strict=True):
            self.parameters[offset : offset + len(value)] = np.frombuffer(value, np.uint8)

    def time_ns(self) -> int:
        return self.scheduler.time_ns

    def admit(self) -> None:
        """Start pending clusters while SMs are free."""
        size = int(np.prod(self.cluster))
        while self._pending and len(self._free_sms) >= size:
            sms, self._free_sms = self._free_sms[:size], self._free_sms[size:]
            self.clusters.append(Cluster(self, self._pending.popleft(), sms))

    def cancel_next(self) -> Extent | None:
        """Take the next pending cluster away from the queue: its first CTA."""
        return self._pending.popleft() if self._pending else None

    def retire(self) -> None:
        """Free the SMs of clusters all of whose warps have exited."""
        for cluster in [cluster for cluster in self.clusters if not any(warp.splits for warp in cluster.warps)]:
            for cta in cluster.ctas:
                if cta.tensor_memory is not None and cta.tensor_memory.allocated.any():
                    raise KernelFault(f"{self.kernel.name}: CTA {cta.index} ended without tcgen05.dealloc")
            self.clusters.remove(cluster)
            self._free_sms.extend(cluster.sms)

    def stats(self, seconds: float) -> LaunchStats:
        opcodes: Counter[str] = Counter()
        for count, instruction in zip(self.counts, self.kernel.instructions, strict=True):
            if count:
                opcodes[instruction.opcode] += count
        return LaunchStats(sum(self.counts), opcodes, self.async_counts, seconds)


_ASSEMBLED: dict[int, tuple[Assembler, list[Step]]] = {}  # by id of the kernel, which the assembler keeps alive


class Scheduler:
    """Steps the warps and asynchronous operations of several grids, in an order that the seed decides."""

    def __init__(self, grids: list[Grid], seed: int, max_steps: int | None, tracker: Tracker = NO_TRACKER) -> None:
        self.grids, self.max_steps, self.tracker = grids, max_steps, tracker
        self.rng = random.Random(seed)
        self.async_rate = ASYNC_RATES[2] if seed == 0 else self.rng.choice(ASYNC_RATES)
        self.late_matrix = seed % 2 == 1  # whether wgmma happens when it is waited for, not when it is issued
        self.operations: list[AsyncOperation] = []
        self.version = 0  # of all that a waiting warp may look at
        self.time_ns = 1_000_000_000  # virtual: one nanosecond per warp-instruction
        self.executed = 0
        for grid in grids:
            grid.scheduler = self

    def post(self, grid: Grid, operation: AsyncOperation) -> None:
        grid.async_counts[operation.unit] += 1
        self.operations.append(operation)

    def _advance_one(self) -> bool:
        """One step of some asynchronous operation, if there is any."""
        if not self.operations:
            return False
        position = self.rng.randrange(len(self.operations))
        operation = self.operations[position]
        try:
            operation.steps.popleft()()
        except (KernelFault, MemoryFault) as fault:
            fault.args = (f"{fault}\n  while the {operation.unit} does: {operation.text}",)
            raise
        if not operation.remaining():
            self.operations.pop(position)
        self.version += 1
        return True

    def run(self) -> None:
        stalls, version = 0, -1
        while True:
            for grid in self.grids:
                grid.admit()
            warps = [warp for grid in self.grids for cluster in grid.clusters for warp in cluster.warps if warp.splits]
            if not warps:
                break
            self.rng.shuffle(warps)
            ran = self._round(warps)
            if any(not warp.splits for warp in warps):
                for grid in self.grids:
                    grid.retire()
            if self.max_steps is not None and self.executed > self.max_steps:
                raise Deadlock(f"no end after {self.executed} warp-instructions", _all_waits(warps))
            if ran or self._advance_one():
                continue
            # Everything waits. Parked polls may be loops that end by themselves, so let them try some times.
            stalls = stalls + 1 if version == self.version else 0
            version = self.version
            polling = [warp for warp in warps if warp.polls]
            if stalls >= STALLS or not polling:
                raise Deadlock("deadlock: no warp can go on", _all_waits(warps))
            for warp in polling:
                warp.let_through = True
        while self._advance_one():
            pass

    def _round(self, warps: list[Warp]) -> int:
        ran = 0
        for warp in warps:
            executed = warp.step(self.rng)
            ran += executed
            if executed and self.async_rate and self.rng.random() < self.async_rate:
                self._advance_one()
        self.executed += ran
        self.time_ns += ran
        return ran


def _all_waits(warps: list[Warp]) -> list[str]:
    ordered = sorted(warps, key=lambda warp: (warp.cta.grid.kernel.name, warp.cta.index, warp.index))
    return [line for warp in ordered for line in warp.waits()]


def run(
    grids: list[Grid], *, seed: int = 0, max_steps: int | None = None, check_races: bool = False
) -> list[LaunchStats]:
    """Run several launches at once, as ranks that wait for each other need it. One seed, one order of events.

    check_races   also look for races, missing fences and reads of what nobody wrote: a RaceError at the end
    """
    tracker = RaceTracker(grids) if check_races else NO_TRACKER
    scheduler = Scheduler(grids, seed, max_steps, tracker)
    begin = time.perf_counter()
    placed = []
    try:
        for number, grid in enumerate(grids):
            name = f"parameters of {grid.kernel.name} ({number})"
            placed.append((grid.memory, grid.memory.add(grid.parameter_base, len(grid.parameters), name)))
        with np.errstate(all="ignore"):
            scheduler.run()
        tracker.finish()
    except (Deadlock, KernelFault, MemoryFault) as fault:
        tracker.explain(fault)
        raise
    finally:
        tracker.close()
        for memory, allocation in placed:
            memory.discard(allocation)
    seconds = time.perf_counter() - begin
    return [grid.stats(seconds) for grid in grids]


def launch(
    kernel: Kernel,
    *,
    grid: Extent,
    block: Extent,
    params: list[bytes],
    memory: DeviceMemory,
    cluster: Extent = (1, 1, 1),
    dynamic_smem_bytes: int = 0,
    seed: int = 0,
    sms: int = 4,
    max_steps: int | None = None,
    check_races: bool = False,
) -> LaunchStats:
    """Run one launch to its end."""
    single = Grid(kernel, grid, block, params, memory, cluster, dynamic_smem_bytes, sms)
    return run([single], seed=seed, max_steps=max_steps, check_races=check_races)[0]
