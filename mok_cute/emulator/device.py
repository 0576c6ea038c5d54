"""The machine: grids of clusters of CTAs of warps, asynchronous units, and a seed that picks who steps next.

A warp holds one split per group of lanes that stand at the same instruction and runs the lowest one first, which brings
structured code together again. Nothing spins: an instruction that must wait leaves its split where it is, parked on
words of memory, and it is tried again when one of them has changed. When no warp can run and no asynchronous operation
is left, that is a deadlock, and the report names what each warp waits for; or virtual time jumps, if that was asked
for, so that a kernel's own time limits are met.

Two engines run the same rules on the same state (``state.py``): the reference, here and in the files of the opcodes,
and ``core.c``, which takes a round of turns and comes back for every instruction that it does not know. One seed gives
one order of events, whichever engine runs it.
"""

from __future__ import annotations

import ctypes
import functools
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

# Imported for their opcodes.
from mok_cute.emulator import (  # noqa: F401
    async_copy,
    bulk_reduce,
    cluster_launch,
    convert,
    float_arithmetic,
    integer_arithmetic,
    load_store,
    synchronize,
    tcgen05,
    tensor_core,
    tensor_map_update,
    thread_copies,
    warp_votes,
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
from mok_cute.emulator.state import (
    ALL_64,
    ALL_BITS,
    MAX_WAITS,
    CtaState,
    Machine,
    Split,
    WarpState,
    Word,
    address_of,
    bits,
    lanes,
)
from mok_cute.errors import KernelError, UnsupportedError
from mok_cute.settings import Settings

Extent = tuple[int, int, int]
OnStall = Literal["deadlock", "timeout"]
EngineName = Literal["auto", "fast", "reference"]
ENGINES = ("auto", "fast", "reference")
TURNS = (20, 200, 2000)  # instructions of one turn of a warp; drawn each time
OUT_OF_TURN = 20  # one turn in so many, a warp with several splits does not begin with the lowest
ASYNC_PERCENTS = (0, 5, 30, 90)  # chance that an asynchronous step happens after a turn; 0: only when all wait
STALLS = 8  # times that parked polls are let through, without any change, before that is a deadlock
FIRST_JUMP_NS, MAX_JUMP_NS = 1_000, 1 << 53  # of virtual time in a stall; each jump is twice the one before
ALIGNMENT = 64  # of a register file


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
    async_bytes: Counter[str]  # moved by copies, by unit
    warps: Counter[int]  # warp-instructions by the index of the warp in its CTA, which tells its role
    waits: Counter[int]  # times that an instruction of the warp of this index had to wait
    seconds: float  # wall time of the run; grids that ran together share it


@dataclass
class AsyncOperation:
    """Work of an asynchronous unit in steps that happen one by one, at times the scheduler chooses."""

    unit: str
    steps: deque[Callable[[], None]]
    text: str
    warp: Warp | None = None  # that issued it, if it may wait for the steps
    num_bytes: int = 0  # that it moves

    def remaining(self) -> int:
        return len(self.steps)


class Barrier:
    """Counts lanes by whole warps; without a stated count it wants every warp that lives."""

    def __init__(self, name: str, living: Callable[[], int]) -> None:
        self.name, self._living = name, living
        self._word = ctypes.c_uint64(0)
        self.word = Word(ctypes.addressof(self._word))  # changes when the barrier opens
        self._arrived = 0
        self._count: int | None = None

    @property
    def generation(self) -> int:
        return self._word.value

    def arrive(self, count: int | None) -> None:
        if self._arrived and count != self._count:
            raise KernelFault(f"{self.name}: arrivals expect {self._count} and {count} threads")
        self._count = count
        self._arrived += 32
        self.settle()

    @property
    def _needed(self) -> int:
        return 32 * self._living() if self._count is None else self._count

    def settle(self) -> None:
        """Open, if all that it wants have arrived."""
        if self._arrived and self._arrived >= self._needed:
            self._word.value += 1
            self._arrived = 0

    def passed(self, generation: int) -> bool:
        return self.generation != generation

    def __str__(self) -> str:
        return f"{self.name}: {self._arrived} of {self._needed} threads have arrived"


class Layout:
    """Where the registers of a kernel lie in the register file of a warp: one bank for each size, 32 lanes a row."""

    def __init__(self, types: list[Any]) -> None:
        self.sizes = [0 if dtype == np.bool_ else dtype.itemsize for dtype in types]  # 0: a predicate
        counts = Counter(self.sizes)
        self.banks: dict[int, tuple[int, int]] = {}  # size -> first byte, number of rows
        self.num_bytes = 0
        for size in sorted(counts, reverse=True):
            self.banks[size] = (self.num_bytes, counts[size])
            self.num_bytes += 32 * max(size, 1) * counts[size]
        seen = Counter[int]()
        self.rows: list[int] = []  # of each register in its bank
        for size in self.sizes:
            self.rows.append(seen[size])
            seen[size] += 1

    def offset(self, register: int) -> int:
        size = self.sizes[register]
        return self.banks[size][0] + 32 * max(size, 1) * self.rows[register]


class _Registers(dict[int, Any]):
    """Views of the registers in one of the three kinds, made when they are first asked for."""

    def __init__(self, layout: Layout, views: dict[int, Any]) -> None:
        super().__init__()
        self._layout, self._views = layout, views

    def __missing__(self, register: int) -> Any:
        view = self[register] = self._views[self._layout.sizes[register]][self._layout.rows[register]]
        return view


Poll = tuple[npt.NDArray[np.uint64], bytes, Callable[[], Any], "list[Word] | None"]


class Warp:
    def __init__(self, cta: Cta, index: int, num_threads: int) -> None:
        self.cta, self.index = cta, index
        self.tracker = cta.grid.scheduler.tracker
        layout = cta.grid.layout
        num_bytes = layout.num_bytes + cta.grid.constant_bytes
        self.file = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        skip = -self.file.ctypes.data % ALIGNMENT
        self.file = self.file[skip : skip + num_bytes]
        self.rows = layout.rows
        self.banks: dict[int, npt.NDArray[Any]] = {}
        for size, (first, count) in layout.banks.items():
            part = self.file[first : first + 32 * max(size, 1) * count]
            self.banks[size] = part.view(WORDS[size] if size else np.bool_).reshape(count, 32)
        views = {size: self._views(bank, size) for size, bank in self.banks.items()}
        # Views of every register: as unsigned (predicates: bool), signed and float.
        self.u, self.s, self.f = (
            _Registers(layout, {size: kinds[kind] for size, kinds in views.items()}) for kind in range(3)
        )
        x, y, _ = cta.grid.extents["ntid"]
        threads = np.arange(32 * index, 32 * index + 32)
        self.tid = [threads % x, threads // x % y, threads // (x * y)]
        living = bits(threads < num_threads)
        self.state = WarpState(
            registers=self.file.ctypes.data, cta=address_of(cta.state), index=index, alive=living, gives_way=0
        )
        self.state.place(0, living)
        self._progress = Word(address_of(self.state, "progress"))
        self.async_steps = Word(address_of(self.state, "async_steps"))
        self.parked_on: list[tuple[Word, int]] = []  # by the step that was tried last
        self._reason: Callable[[], str] | None = None
        self.awaited_barrier: int | None = None
        self.awaited_cluster = 0
        # Spin waits: what each strong load saw since the last effect of this warp.
        self._polls: dict[int, Poll] = {}
        self.let_through = False
        self.bulk_groups: dict[int, async_copy.BulkGroups] = {}
        self.matrix_groups = tensor_core.MatrixGroups()

    @staticmethod
    def _views(bank: npt.NDArray[Any], size: int) -> tuple[Any, Any, Any]:
        if size in (0, 16):  # predicates, and 128 bits that are only moved
            return bank, bank, bank
        return bank, bank.view(f"i{size}"), bank.view(f"f{size}") if size > 1 else bank

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """(32,) lanes that have not exited; read only."""
        return lanes(self.state.alive)

    @property
    def lives(self) -> bool:
        return bool(self.state.alive)

    @property
    def splits(self) -> list[Split]:
        return list(self.state.splits[: self.state.num_splits])

    @property
    def gives_way(self) -> bool:
        return bool(self.state.gives_way)

    @gives_way.setter
    def gives_way(self, value: bool) -> None:
        self.state.gives_way = value

    @property
    def progress(self) -> Word:
        """Changes with every instruction of this warp."""
        return self._progress

    @property
    def polls(self) -> dict[int, Poll]:
        if self.state.has_effect:
            self._polls.clear()
            self.state.has_effect = 0
        return self._polls

    def block(self, waits: Callable[[], str], *on: Word) -> int:
        """For a step that must wait: ``waits`` says for what, if that is ever asked.

        The step is tried again when one of the words is no longer what it is now; without any, or with too many, when
        anything happens that moves the scheduler's version.
        """
        words = on if 0 < len(on) <= MAX_WAITS else (self.cta.grid.scheduler.version_word,)
        self.parked_on = [(word, word.read()) for word in words]
        self._reason = waits
        return BLOCKED

    def block_on_polls(self, waits: Callable[[], str]) -> int:
        words: set[Word] = set()
        for *_, places in self.polls.values():
            if places is None:
                return self.block(waits)
            words.update(places)
        return self.block(waits, *sorted(words))

    def is_repeated_poll(
        self,
        instruction: object,
        addresses: npt.NDArray[np.uint64],
        data: Any,
        reread: Callable[[], Any],
        words: list[Word] | None = None,
    ) -> bool:
        """Whether this load saw what it saw before, and so did all other polls since. ``words``: where it looks."""
        key, seen = id(instruction), data.tobytes()
        polls = self.polls
        before = polls.get(key)
        if self.let_through or before is None or before[1] != seen or not np.array_equal(before[0], addresses):
            if self.let_through or before is not None:
                polls.clear()
            self.let_through = False
            polls[key] = (addresses, seen, reread, words)
            return False
        if all(again().tobytes() == value for _, value, again, _ in polls.values()):
            return True
        polls.clear()
        polls[key] = (addresses, seen, reread, words)
        return False

    def attempt(self, pc: int, mask: int) -> Any:
        """The outcome of the step at ``pc`` for these lanes."""
        try:
            return self.cta.grid.code[pc](self, None if mask == ALL_BITS else lanes(mask))
        except (KernelFault, MemoryFault) as fault:
            _locate(fault, self, pc)
            raise

    def run(self, position: int, budget: int) -> int:
        """Run one split for at most ``budget`` instructions, until it parts, meets another, waits or gives way."""
        state, counts = self.state, self.cta.grid.counts
        pc, mask = state.splits[position].pc, state.splits[position].mask
        state.remove(position)
        others = {other.pc for other in self.splits}
        executed = 0
        while True:
            outcome = self.attempt(pc, mask)
            if outcome.__class__ is int and outcome == BLOCKED:
                state.blocked += 1
                state.place(pc, mask, self.parked_on)
                return executed
            counts[pc] += 1
            state.progress += 1
            executed += 1
            if outcome is None:
                pc += 1
            elif outcome.__class__ is Branch:
                taken = bits(outcome.taken)
                if outcome.target == EXIT:
                    self.exit(taken)
                else:
                    state.place(outcome.target, taken)
                state.place(pc + 1, mask & ~taken)
                return executed
            elif outcome == EXIT:
                self.exit(mask)
                return executed
            else:
                pc = outcome
            if pc in others or executed >= budget or state.gives_way:
                state.place(pc, mask)
                return executed

    def exit(self, mask: int) -> None:
        self.state.alive &= ~mask
        if not self.state.alive:
            self.cta.warp_has_exited()

    def release_polls(self) -> None:
        """Let a spin wait look once more."""
        self.let_through = True
        for split in self.splits:
            split.num_waits = 0

    def waits(self) -> list[str]:
        kernel = self.cta.grid.kernel
        lines = []
        for split in self.splits:
            instruction = kernel.instructions[split.pc]
            what = f"runs {instruction.text}"
            # Trying again changes nothing while the split is parked, and says what it waits for.
            if split.is_parked and self.attempt(split.pc, split.mask) == BLOCKED and self._reason is not None:
                what = self._reason()
            at = instruction.source or f"PTX line {instruction.line}"
            where = f"{kernel.name} CTA {self.cta.index} warp {self.index} lanes {split.mask:#010x}"
            lines.append(f"{where} at {at}: {what}")
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
        self.state = CtaState(
            shared=self.shared.ctypes.data, shared_end=self.shared_end, rank=rank, cluster_size=len(cluster.sms)
        )
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
        return sum(1 for warp in self.warps if warp.lives)

    def warp_has_exited(self) -> None:
        """Barriers do not wait for it any more."""
        for barrier in (*self._barriers.values(), self.cluster.barrier):
            barrier.settle()

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
        for cta in self.ctas:
            for rank, peer in enumerate(self.ctas):
                cta.state.peers[rank] = address_of(peer.state)

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
            cached = _ASSEMBLED[id(self.kernel)] = (assembler, assembler.assemble(), Layout(assembler.types))
        self.assembler, self.code, self.layout = cached
        self.constant_bytes = 0  # of each warp, behind its registers, for the fast engine
        self.counts = np.zeros(len(self.code) + 1, np.uint64)
        self.async_counts: Counter[str] = Counter()
        self.async_bytes: Counter[str] = Counter()
        self.warp_counts: Counter[int] = Counter()
        self.wait_counts: Counter[int] = Counter()
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
        for cluster in [cluster for cluster in self.clusters if not any(warp.lives for warp in cluster.warps)]:
            for cta in cluster.ctas:
                if cta.tensor_memory is not None and cta.tensor_memory.allocated.any():
                    raise KernelFault(f"{self.kernel.name}: CTA {cta.index} ended without tcgen05.dealloc")
            self.clusters.remove(cluster)
            self._free_sms.extend(cluster.sms)
            for warp in cluster.warps:
                self.warp_counts[warp.index] += warp.state.progress
                self.wait_counts[warp.index] += warp.state.blocked

    def stats(self, seconds: float) -> LaunchStats:
        opcodes: Counter[str] = Counter()
        for count, instruction in zip(self.counts.tolist(), self.kernel.instructions, strict=False):
            if count:
                opcodes[instruction.opcode] += count
        return LaunchStats(
            int(self.counts.sum()),
            opcodes,
            self.async_counts,
            self.async_bytes,
            +self.warp_counts,
            +self.wait_counts,
            seconds,
        )


_ASSEMBLED: dict[int, tuple[Assembler, list[Step], Layout]] = {}  # by id of the kernel, which the assembler keeps alive


class Engine(Protocol):
    """What takes the turns of the warps; without one, the scheduler does that itself."""

    def admitted(self, warps: list[Warp]) -> None:
        """These warps are there now, before they run."""

    def round(self, warps: list[Warp]) -> int:
        """One round or several, until a warp has exited or none can run; the number of instructions."""


class Scheduler:
    """Steps the warps and asynchronous operations of several grids, in an order that the seed decides."""

    def __init__(
        self,
        grids: list[Grid],
        seed: int,
        max_steps: int | None,
        on_stall: OnStall = "deadlock",
        tracker: Tracker = NO_TRACKER,
    ) -> None:
        self.grids, self.max_steps, self.on_stall, self.tracker = grids, max_steps, on_stall, tracker
        self.machine = Machine(
            rng=(seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & ALL_64,
            time_ns=1_000_000_000,  # virtual: one nanosecond per warp-instruction
            max_steps=ALL_64 if max_steps is None else max_steps,
        )
        for _ in range(4):  # seeds that are close together part
            self.machine.below(2)
        draw = self.machine.below(len(ASYNC_PERCENTS))
        self.machine.async_percent = ASYNC_PERCENTS[2 if seed == 0 else draw]
        self.late_matrix = seed % 2 == 1  # whether wgmma happens when it is waited for, not when it is issued
        self.operations: list[AsyncOperation] = []
        self.version_word = Word(address_of(self.machine, "version"))
        self.engine: Engine | None = None
        for grid in grids:
            grid.scheduler = self

    @property
    def version(self) -> int:
        """Of all that a waiting warp may look at."""
        return int(self.machine.version)

    @version.setter
    def version(self, value: int) -> None:
        self.machine.version = value

    @property
    def time_ns(self) -> int:
        return int(self.machine.time_ns)

    @property
    def executed(self) -> int:
        return int(self.machine.executed)

    def post(self, grid: Grid, operation: AsyncOperation) -> None:
        grid.async_counts[operation.unit] += 1
        if operation.num_bytes:
            grid.async_bytes[operation.unit] += operation.num_bytes
        self.operations.append(operation)
        self.machine.num_operations += 1

    def advance_one(self) -> bool:
        """One step of some asynchronous operation, if there is any."""
        if not self.operations:
            return False
        self.advance(self.machine.below(len(self.operations)))
        return True

    def advance(self, position: int) -> None:
        operation = self.operations[position]
        try:
            operation.steps.popleft()()
        except (KernelFault, MemoryFault) as fault:
            fault.args = (f"{fault}\n  while the {operation.unit} does: {operation.text}",)
            raise
        if not operation.remaining():
            last = self.operations.pop()
            if last is not operation:
                self.operations[position] = last
            self.machine.num_operations -= 1
        if operation.warp is not None:
            operation.warp.state.async_steps += 1
        self.machine.version += 1

    def run(self) -> None:
        stalls, version, jump_ns = 0, -1, FIRST_JUMP_NS
        known: set[int] = set()
        while True:
            for grid in self.grids:
                grid.admit()
            warps = [warp for grid in self.grids for cluster in grid.clusters for warp in cluster.warps if warp.lives]
            if not warps:
                break
            if self.engine is not None:
                self.engine.admitted([warp for warp in warps if id(warp) not in known])
                known = {id(warp) for warp in warps}
            ran = self.engine.round(warps) if self.engine is not None else self._round(warps)
            if not all(warp.lives for warp in warps):
                for grid in self.grids:
                    grid.retire()
            if self.max_steps is not None and self.executed > self.max_steps:
                raise Deadlock(f"no end after {self.executed} warp-instructions", _all_waits(warps))
            if ran or self.advance_one():
                continue
            # Everything waits. Parked polls may be loops that end by themselves, so let them try some times.
            if version != self.version:
                stalls, version, jump_ns = 0, self.version, FIRST_JUMP_NS
            stalls += 1
            polling = [warp for warp in warps if warp.polls]
            if not polling or (stalls > STALLS and self.on_stall == "deadlock") or jump_ns > MAX_JUMP_NS:
                raise Deadlock("deadlock: no warp can go on", _all_waits(warps))
            if self.on_stall == "timeout":
                self.machine.time_ns += jump_ns
                jump_ns *= 2
            for warp in polling:
                warp.release_polls()
        while self.advance_one():
            pass

    def _round(self, warps: list[Warp]) -> int:
        machine, order, ran = self.machine, list(warps), 0
        machine.shuffle(order)
        for warp in order:
            if warp.state.first_runnable() is None:
                continue
            executed = self._turn(warp)
            ran += executed
            if executed and machine.async_percent and machine.below(100) < machine.async_percent:
                self.advance_one()
        machine.executed += ran
        machine.time_ns += ran
        return ran

    def _turn(self, warp: Warp) -> int:
        """One turn; the number of instructions that ran. Mostly of the lowest split that can run."""
        machine, state = self.machine, warp.state
        turn = TURNS[machine.below(len(TURNS))]
        chosen = None
        if state.num_splits > 1 and machine.below(OUT_OF_TURN) == 0:
            chosen = machine.below(state.num_splits)
        state.gives_way = 0
        executed = 0
        while executed < turn and not state.gives_way:
            position = state.first_runnable()
            if chosen is not None and not state.splits[chosen].is_parked:
                position = chosen
            chosen = None
            if position is None:
                break
            executed += warp.run(position, turn - executed)
        return executed


def _all_waits(warps: list[Warp]) -> list[str]:
    ordered = sorted(warps, key=lambda warp: (warp.cta.grid.kernel.name, warp.cta.index, warp.index))
    return [line for warp in ordered for line in warp.waits()]


def _engine(name: EngineName | None, scheduler: Scheduler) -> Engine | None:
    chosen = name or Settings.from_environment().engine
    if chosen not in ENGINES:
        raise ValueError(f"engine={chosen!r}: not one of {', '.join(ENGINES)}; pass one of them.")
    if chosen == "reference":
        return None
    from mok_cute.emulator import fast

    try:
        return fast.FastEngine(scheduler)
    except UnsupportedError as error:
        if chosen == "fast":
            raise
        _warn_of_slowness(str(error))
        return None


@functools.cache
def _warn_of_slowness(reason: str) -> None:
    warnings.warn(f"the virtual GPU runs on its slow reference engine: {reason}", stacklevel=4)


def run(
    grids: list[Grid],
    *,
    seed: int = 0,
    max_steps: int | None = None,
    engine: EngineName | None = None,
    on_stall: OnStall = "deadlock",
    check_races: bool = False,
) -> list[LaunchStats]:
    """Run several launches at once, as ranks that wait for each other need it. One seed, one order of events.

    engine     "fast", "reference", or "auto": the fast one where it can be built; None: what MOK_CUTE_ENGINE says
    on_stall   when only spin waits are left that see nothing new: "deadlock" reports that at once, "timeout" lets
               virtual time jump until a time limit of the kernel ends one of them
    check_races  also look for races, missing fences and reads of what nobody wrote: a RaceError at the end
    """
    if on_stall not in ("deadlock", "timeout"):
        raise ValueError(f"on_stall={on_stall!r}: not one of deadlock, timeout; pass one of them.")
    tracker = RaceTracker(grids) if check_races else NO_TRACKER
    scheduler = Scheduler(grids, seed, max_steps, on_stall, tracker)
    scheduler.engine = _engine(engine, scheduler)
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
    engine: EngineName | None = None,
    on_stall: OnStall = "deadlock",
    check_races: bool = False,
) -> LaunchStats:
    """Run one launch to its end."""
    single = Grid(kernel, grid, block, params, memory, cluster, dynamic_smem_bytes, sms)
    options: dict[str, Any] = {"engine": engine, "on_stall": on_stall, "check_races": check_races}
    return run([single], seed=seed, max_steps=max_steps, **options)[0]
