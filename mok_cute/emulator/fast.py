"""The fast engine: kernels as bytecode for ``core.c``, and the calls between it and the reference.

An instruction that has no bytecode, or has not this form of it, is an escape: the reference's step runs for it. All
values lie in the register file of a warp, those of constants and special registers behind the registers as vectors of
32 lanes, so that the C code knows nothing but offsets.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator import native
from mok_cute.emulator.bytecode import Program
from mok_cute.emulator.execute import BLOCKED, Branch
from mok_cute.emulator.memory import DeviceMemory
from mok_cute.emulator.races import Tracker
from mok_cute.emulator.state import CtaState, GridState, Machine, Split, Wait, WarpState, address_of

if TYPE_CHECKING:
    from mok_cute.emulator.device import Grid, Scheduler, Warp

SOURCE = "core.c"
ROUND_ENDED, ESCAPED, ADVANCE, DIED = 1, 2, 3, 4  # what core_run returns
SHARED_STRUCTURES = (Split, CtaState, WarpState, Machine)

ALLOCATION = np.dtype([("start", "u8"), ("end", "u8"), ("defined", "u8")])


class _Memory(ctypes.Structure):
    _fields_ = [("allocations", ctypes.c_uint64), ("count", ctypes.c_uint64), ("last", ctypes.c_uint64)]


@functools.cache
def library() -> ctypes.CDLL:
    """``core.c``, built. Raises UnsupportedError where that is not possible."""
    loaded = native.load(SOURCE)
    loaded.core_run.argtypes, loaded.core_run.restype = [ctypes.c_void_p], ctypes.c_int
    loaded.core_size.argtypes, loaded.core_size.restype = [ctypes.c_int], ctypes.c_uint64
    for number, kind in enumerate(SHARED_STRUCTURES):
        assert loaded.core_size(number) == ctypes.sizeof(kind), f"{kind.__name__} differs between state.py and {SOURCE}"
    return loaded


@functools.cache
def op_numbers() -> dict[str, int]:
    names = (ctypes.c_char_p * 4096).in_dll(library(), "core_op_names")
    numbers: dict[str, int] = {}
    while (name := names[len(numbers)]) is not None:
        numbers[name.decode()] = len(numbers)
    return numbers


_PROGRAMS: dict[tuple[int, bool], Program] = {}  # by id of the assembler, which the program keeps alive, and tracking


def program_of(grid: Grid, tracked: bool) -> Program:
    key = id(grid.assembler), tracked
    found = _PROGRAMS.get(key)
    if found is None or found.assembler is not grid.assembler:
        found = _PROGRAMS[key] = Program(grid.assembler, grid.layout, op_numbers(), tracked)
    return found


class FastEngine:
    """Runs the warps of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._machine = scheduler, scheduler.machine
        self._run: Callable[[], int] = functools.partial(library().core_run, address_of(scheduler.machine))
        tracked = type(scheduler.tracker) is not Tracker
        self._warps: list[Warp] = []
        self._order = self._pointers = np.zeros(0, np.uint64)
        self._memories = [(memory, _Memory()) for memory in {id(g.memory): g.memory for g in scheduler.grids}.values()]
        self._tables: list[npt.NDArray[Any]] = [np.zeros(0, ALLOCATION) for _ in self._memories]
        self._versions = [-1 for _ in self._memories]
        self._grids: dict[int, tuple[GridState, Program]] = {}
        for grid in scheduler.grids:
            program = program_of(grid, tracked)
            grid.constant_bytes = program.constant_bytes
            memory = next(state for memory, state in self._memories if memory is grid.memory)
            state = GridState(
                code=program.code.ctypes.data,
                counts=grid.counts.ctypes.data,
                lists=program.lists.ctypes.data,
                memory=address_of(memory),
            )
            self._grids[id(grid)] = state, program

    def admitted(self, warps: list[Warp]) -> None:
        for warp in warps:
            state, program = self._grids[id(warp.cta.grid)]
            warp.state.grid = address_of(state)
            program.fill_constants(warp)

    def round(self, warps: list[Warp]) -> int:
        machine, run, scheduler = self._machine, self._run, self._scheduler
        before = machine.executed
        self._use(warps)
        order = self._order
        while True:
            self._refresh()
            event = run()
            if event == ESCAPED:
                self._escape(warps[order[machine.position]])
            elif event == ADVANCE:
                scheduler.advance(machine.operation)
            elif event == DIED:
                warps[order[machine.position]].cta.warp_has_exited()
            else:
                return int(machine.executed - before)

    def _use(self, warps: list[Warp]) -> None:
        if warps == self._warps:
            return
        self._warps = warps
        self._pointers = np.array([address_of(warp.state) for warp in warps], np.uint64)
        self._order = np.zeros(len(warps), np.uint32)
        machine = self._machine
        machine.num_warps, machine.stage = len(warps), 0
        machine.warps, machine.order = self._pointers.ctypes.data, self._order.ctypes.data

    def _escape(self, warp: Warp) -> None:
        machine = self._machine
        pc = machine.pc
        outcome = warp.attempt(pc, machine.mask)
        assert outcome.__class__ is not Branch, "branches are bytecode"
        if outcome is None:
            machine.outcome = pc + 1
        else:
            machine.outcome = outcome
            if outcome == BLOCKED:
                machine.num_waits = len(warp.parked_on)
                for at, (word, seen) in enumerate(warp.parked_on):
                    machine.waits[at] = Wait(word.address, word.mask, seen)
        machine.escaped = 1

    def _refresh(self) -> None:
        """Bring the tables of allocations up to date."""
        for at, (memory, state) in enumerate(self._memories):
            if memory.version != self._versions[at]:
                self._versions[at] = memory.version
                self._tables[at] = _table(memory)
                state.allocations, state.count, state.last = self._tables[at].ctypes.data, len(self._tables[at]), 0


def _table(memory: DeviceMemory) -> npt.NDArray[Any]:
    rows = []
    for allocation in memory.allocations():
        defined = memory.defined(allocation)
        rows.append((allocation.address, allocation.end, 0 if defined is None else defined.ctypes.data))
    return np.array(rows, ALLOCATION)
