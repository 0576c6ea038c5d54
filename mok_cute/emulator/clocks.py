"""Vector clocks: what an actor of the virtual GPU knows to have happened.

A clock has a slot for everything that makes its own progress: a warp, the completions of an mbarrier, the bulk groups
of a thread, the matrix operations of a warp. Clocks are immutable, so that an asynchronous operation keeps its issuer's
clock for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Warp

Epochs = npt.NDArray[np.uint32]


class Clock:
    """One epoch per slot; slots beyond the end are 0. ``pointer`` is the address of the values."""

    __slots__ = ("pointer", "size", "values")

    def __init__(self, values: Epochs) -> None:
        self.values = values
        self.size = len(values)
        self.pointer: int = values.__array_interface__["data"][0]  # values.ctypes.data takes four times as long

    def __getitem__(self, slot: int) -> int:
        return int(self.values[slot]) if slot < self.size else 0

    def joined(self, other: Clock) -> Clock:
        """What either knows. Gives back one of the two where that is enough."""
        if other is self or other is NEVER:
            return self
        if self is NEVER:
            return other
        if self.size < other.size:
            return other.joined(self)
        if not (other.values > self.values[: other.size]).any():
            return self
        values = self.values.copy()
        shared = values[: other.size]
        np.maximum(shared, other.values, out=shared)
        return Clock(values)

    def at(self, slot: int, epoch: int) -> Clock:
        """This clock with this slot at this epoch or later."""
        if self[slot] >= epoch:
            return self
        values = np.zeros(max(self.size, 1 << slot.bit_length()), np.uint32)
        values[: self.size] = self.values
        values[slot] = epoch
        return Clock(values)


NEVER = Clock(np.zeros(1, np.uint32))


@dataclass(frozen=True)
class Knowledge:
    """What a release hands on and an acquire takes.

    happened           events that come before
    shared, globally   of those, what the async proxy has been told of by a fence, for shared and for global memory
    tensor             of those, what a tcgen05.fence::before_thread_sync covers
    """

    happened: Clock = NEVER
    shared: Clock = NEVER
    globally: Clock = NEVER
    tensor: Clock = NEVER

    def joined(self, other: Knowledge) -> Knowledge:
        if other is self or other is NOTHING:
            return self
        happened, shared = self.happened.joined(other.happened), self.shared.joined(other.shared)
        globally, tensor = self.globally.joined(other.globally), self.tensor.joined(other.tensor)
        if happened is self.happened and shared is self.shared:
            if globally is self.globally and tensor is self.tensor:
                return self
        return Knowledge(happened, shared, globally, tensor)


NOTHING = Knowledge()


class Actor:
    """A warp as the detector sees it: all its lanes are one.

    known       what it knows, its own slot only up to its last release
    epoch       of its slot; grows with every release and fence that has something new to tell
    acted       whether it has done anything in this epoch
    completed   bulk stores it has waited for and not fenced: only this warp may count on them
    after       what its tcgen05 instructions come behind: the tensor part of ``known`` at its last after-fence
    """

    def __init__(self, warp: Warp, slot: int, number: int, cta: int, rank: int) -> None:
        self.warp, self.slot, self.number, self.cta, self.rank = warp, slot, number, cta, rank
        self.epoch = 1
        self.acted = False
        self.known = NOTHING
        self.completed = NEVER
        self.after = NEVER
        # Fences without their partner: a relaxed write behind a fence releases, a fence behind a relaxed read acquires.
        self.fenced: dict[int, Knowledge] = {}  # by scope
        self.looked: dict[int, Knowledge] = {}
        self.synchronised: list[tuple[int, Instruction, bool]] = []  # latest words: address, instruction, writes

    def happened(self) -> Clock:
        return self.known.happened.joined(self.completed)

    def acquire(self, knowledge: Knowledge) -> None:
        self.known = self.known.joined(knowledge)

    def release(self) -> Knowledge:
        """All that comes before this point; what the warp does from now on comes after it."""
        if self.acted:
            self.known = replace(self.known, happened=self.known.happened.at(self.slot, self.epoch))
            self.epoch += 1
            self.acted = False
        return self.known

    def reach(self, slot: int, epoch: int) -> None:
        """An event of another slot is complete, for this warp and whoever it releases to."""
        if self.known.happened[slot] < epoch:
            self.known = replace(self.known, happened=self.known.happened.at(slot, epoch))

    def fence(self, scope: int, knowledge: Knowledge) -> None:
        """From now on relaxed writes of this scope or less, and relaxed arrivals, release this."""
        self.fenced[scope] = self.fenced.get(scope, NOTHING).joined(knowledge)

    def fence_async(self, *, shared: bool, globally: bool) -> None:
        """Hands what has happened over to the async proxy, and then this warp's finished bulk stores to everybody."""
        known = self.release()
        if shared:
            known = replace(known, shared=known.shared.joined(known.happened))
        if globally:
            known = replace(known, globally=known.globally.joined(known.happened))
            known = replace(known, happened=known.happened.joined(self.completed))
            self.completed = NEVER
        self.known = known

    def fence_before(self) -> None:
        known = self.release()
        self.known = replace(known, tensor=known.tensor.joined(known.happened))

    def fence_after(self) -> None:
        self.after = self.after.joined(self.known.tensor)
