"""Order of tcgen05: the pipe of each warp, moves to and from tensor memory and their waits, fences of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mok_cute.emulator import shadow as cells
from mok_cute.emulator.clocks import Actor
from mok_cute.emulator.race_async import AsyncOrder
from mok_cute.emulator.race_recorder import OFFSET_BITS, TENSOR_KEY
from mok_cute.emulator.tracker import Addresses, Step

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Cta, Grid, Warp


@dataclass
class Pipe:
    """Slots and counts of a warp's tcgen05 instructions: matrix operations and copies, loads, stores."""

    slot: int
    load_slot: int
    store_slot: int
    issued: int = 0
    loads: int = 0
    stores: int = 0


class TensorOrder(AsyncOrder):
    """Accesses of tensor memory, and shared memory that matrix operations read."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        super().__init__(grids)
        self._pipes: dict[Actor, Pipe] = {}

    def _pipe(self, actor: Actor) -> Pipe:
        if actor not in self._pipes:
            self._pipes[actor] = Pipe(
                self._new_slot(lambda first, event: "a tcgen05.commit behind it and a wait for its mbarrier"),
                self._new_slot(lambda first, event: self._why_moving(first, event, "ld")),
                self._new_slot(lambda first, event: self._why_moving(first, event, "st")),
            )
        return self._pipes[actor]

    def _why_moving(self, first: Actor, event: cells.Event, what: str) -> str:
        if first.known.happened[event.slot] >= event.epoch:
            return "a release behind the first and an acquire of it before the second"
        return f"tcgen05.wait::{what} by the warp of the first"

    def in_pipe(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        """A tcgen05.mma or cp, which follows those that the warp issued before; or a commit, which follows them all."""
        pipe = self._pipe(self.actor(warp))
        if "commit" not in instruction.parts:
            pipe.issued += 1
        event = (pipe.slot, pipe.issued)
        return self._during(self._issued(warp, instruction, reads=event, writes=event, pipe=event), step)

    def tensor_allocated(
        self, warp: Warp, instruction: Instruction, first: int, columns: int, cta: Cta, offset: int
    ) -> None:
        for quarter in range(4):
            self._shadow.forget(self._tensor_key(warp.cta) + 4 * (512 * quarter + first), 4 * columns)
        key = np.array([self._shared_key(cta) + offset], np.uint64)
        self._generic(self.actor(warp), self.order(instruction), "shared", key, 4, writes=True)

    def _tensor_key(self, cta: Cta) -> int:
        return TENSOR_KEY | self._cta(cta) << OFFSET_BITS

    def _tensor_parts(self, cta: Cta, lanes: Addresses, columns: Addresses) -> list[tuple[Addresses, int]]:
        """Keys and sizes. The four bytes of a word of the shadow stand for four times eight lanes of one column."""
        eights = set((lanes // 8).tolist())
        base = self._tensor_key(cta)
        parts = []
        for quarter in range(4):
            of_quarter = [eight % 4 for eight in eights if eight // 4 == quarter]
            words = np.uint64(base) + (4 * (512 * quarter + columns)).astype(np.uint64)
            if len(of_quarter) == 4:
                parts.append((words, 4))
            else:
                parts += [(words + np.uint64(eight), 1) for eight in of_quarter]
        return parts

    def tensor_moved(self, warp: Warp, instruction: Instruction, lanes: Addresses, columns: Addresses) -> None:
        """tcgen05.ld or st."""
        actor, order = self.actor(warp), self.order(instruction)
        pipe, writes = self._pipe(actor), instruction.parts[1] == "st"
        event = (pipe.store_slot, pipe.stores + 1) if writes else (pipe.load_slot, pipe.loads + 1)
        for keys, size in self._tensor_parts(warp.cta, lanes, columns):
            self._record(
                actor,
                event,
                order,
                cells.TENSOR,
                keys,
                size,
                writes,
                happened=actor.happened(),
                visible=actor.after,
                must_be_written=not writes,
            )
        if writes:
            pipe.stores += 1
        else:
            pipe.loads += 1

    def tensor_used(self, cta: Cta, lanes: Addresses, columns: Addresses, *, reads: bool, writes: bool) -> None:
        """The matrix operation or copy that is happening works on these cells."""
        issue = self._issue
        assert issue is not None
        for keys, size in self._tensor_parts(cta, lanes, columns):
            for write in [False] * reads + [True] * writes:
                self._record(
                    issue.actor,
                    issue.writes,
                    issue.order,
                    cells.TENSOR,
                    keys,
                    size,
                    write,
                    happened=issue.happened,
                    visible=issue.after,
                    own_epoch=issue.epoch,
                    pipe=issue.pipe,
                    must_be_written=not write,
                )

    def tensor_fence(self, warp: Warp, instruction: Instruction) -> None:
        actor, what = self.actor(warp), instruction.parts[1]
        if what == "fence::before_thread_sync":
            actor.fence_before()
        elif what == "fence::after_thread_sync":
            actor.fence_after()
        elif what == "wait::ld":
            actor.reach(self._pipe(actor).load_slot, self._pipe(actor).loads)
        elif what == "wait::st":
            actor.reach(self._pipe(actor).store_slot, self._pipe(actor).stores)
