"""Order by mbarriers, and what asynchronous operations do: copies, bulk groups, wgmma and its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mok_cute.emulator import shadow as cells
from mok_cute.emulator.clocks import NEVER, NOTHING, Actor, Clock, Knowledge
from mok_cute.emulator.race_findings import Finding
from mok_cute.emulator.race_memory import MemoryOrder
from mok_cute.emulator.race_recorder import CLUSTER, EXIT, NO_EVENT, SCOPES, SYS, Order, Space, shared_place
from mok_cute.emulator.tracker import Addresses, Step

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Cta, Grid, Warp


@dataclass(eq=False)
class SharedBarrier:
    """What the detector keeps of an mbarrier. Its slot counts the phases that have ended.

    made   slot and epoch of the initialisation: among those of its warp, which are events of their own because a
           fence.mbarrier_init releases them and nothing else
    """

    cta: Cta
    offset: int
    slot: int
    by: Actor
    made: tuple[int, int]
    place: int
    fenced: bool = False
    phase: int = 0  # the bit
    ended: int = 0  # phases
    gathering: Knowledge = NOTHING  # of all arrivals so far
    complete: Knowledge = NOTHING  # of those up to the last phase that ended
    waits: dict[Actor, int] = field(default_factory=dict)  # last phase that each actor has seen end


@dataclass(frozen=True)
class Issue:
    """An asynchronous operation as it was issued: what comes before it, and which events it is.

    known           also what whoever waits for the operation learns from it, besides that it is complete
    reads, writes   slot and epoch of its accesses; a load's are those of the barrier that it reports to
    pipe            slot and epoch of the operations that it comes behind, without any wait
    """

    actor: Actor
    order: Order
    epoch: int
    happened: Clock
    known: Knowledge
    after: Clock
    reads: tuple[int, int] = NO_EVENT
    writes: tuple[int, int] = NO_EVENT
    pipe: tuple[int, int] = NO_EVENT


@dataclass
class Groups:
    """Slots of the operations that one thread (or warp) puts into groups, and the groups that are committed."""

    read_slot: int
    write_slot: int = 0
    committed: int = 0
    latest: tuple[Order, int] | None = None  # operation, and the number of its group


@dataclass
class Copies:
    """The cp.async of a warp: its slot counts them. ``ends`` has the number of copies at each commit."""

    slot: int
    issued: int = 0
    ends: list[int] = field(default_factory=list)


class AsyncOrder(MemoryOrder):
    """The async proxy. While an operation happens, ``_issue`` says whose it is."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        super().__init__(grids)
        self._barriers: dict[tuple[Cta, int], SharedBarrier] = {}
        self._unfenced: dict[Actor, list[SharedBarrier]] = {}
        self._made: dict[Actor, tuple[int, int]] = {}  # slot and number of the mbarriers that each has made
        self._groups: dict[tuple[Actor, int], Groups] = {}
        self._copies: dict[Actor, Copies] = {}
        self._matrix_groups: dict[Actor, Groups] = {}
        self._issue: Issue | None = None  # of the asynchronous operation that is happening

    def fence(self, warp: Warp, instruction: Instruction) -> None:
        parts = instruction.parts
        if parts[0] not in ("fence", "membar"):
            return
        actor = self.actor(warp)
        if "mbarrier_init" in parts:
            self._barriers_fenced(actor)
        elif parts[1] == "proxy":
            if parts[2] != "async":
                return
            space = parts[3].split("::")[0] if len(parts) > 3 else ""
            actor.fence_async(shared=space != "global", globally=space != "shared")
            if space != "global":
                self._barriers_fenced(actor)
        else:
            scope = next((SCOPES[part] for part in parts if part in SCOPES), SYS)
            self._fence_words(actor, scope)

    # -------------------------------------------------------------------------------------------------------- mbarriers

    def mbarrier_made(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None:
        actor, order = self.actor(warp), self.order(instruction)
        old = self._barriers.get((cta, offset))
        if old is not None:
            first = self._text(old.by, old.place)
            self._mbarrier(cta, offset, order, actor, first, "mbarrier.inval before it is initialised again")
        slot = old.slot if old is not None else self._new_slot(self._not_waited_for(cta, offset))
        self._generic(actor, order, "shared", np.array([self._shared_key(cta) + offset], np.uint64), 8, writes=True)
        ended = 0 if old is None else old.ended + old.ended % 2  # an even number, as the first phase has parity 0
        unfenced = self._unfenced.setdefault(actor, [])
        slot_made, number = self._made.get(actor) or (self._new_slot(lambda first, event: ""), 0)
        self._made[actor] = slot_made, number + 1
        actor.reach(slot_made, number + 1)
        barrier = SharedBarrier(cta, offset, slot, actor, self._made[actor], order.place, ended=ended)
        self._barriers[cta, offset] = barrier
        unfenced.append(barrier)

    def mbarrier_ended(self, cta: Cta, offset: int) -> None:
        self._barriers.pop((cta, offset), None)

    def _barriers_fenced(self, actor: Actor) -> None:
        for barrier in self._unfenced.pop(actor, []):
            barrier.fenced = True
        if actor in self._made:
            actor.fence(CLUSTER, Knowledge(NEVER.at(*self._made[actor])))

    def _barrier(
        self, actor: Actor, order: Order, cta: Cta, offset: int, happened: Clock, *, fenced: bool
    ) -> SharedBarrier | None:
        """The barrier for a use of it, which must come after its initialisation; ``fenced``: and after a fence."""
        barrier = self._barriers.get((cta, offset))
        if barrier is None:
            self._mbarrier(cta, offset, order, actor, "", "mbarrier.init before its first use")
            return None
        if barrier.by is not actor and happened[barrier.made[0]] < barrier.made[1]:
            missing = "a barrier of the CTA or cluster between mbarrier.init and this"
            self._mbarrier(cta, offset, order, actor, self._text(barrier.by, barrier.place), missing)
        elif fenced and not barrier.fenced:
            missing = "fence.mbarrier_init or fence.proxy.async behind mbarrier.init, by the same warp"
            self._mbarrier(cta, offset, order, actor, self._text(barrier.by, barrier.place), missing)
        return barrier

    def mbarrier_arrives(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None:
        """Before the arrival is counted."""
        actor, order = self.actor(warp), self.order(instruction)
        remote = cta is not warp.cta
        barrier = self._barrier(actor, order, cta, offset, actor.happened(), fenced=remote)
        if barrier is not None and "relaxed" not in instruction.parts:
            barrier.gathering = barrier.gathering.joined(_as_if_fenced(actor.release()))

    def mbarrier_stored(self, cta: Cta, offset: int, phase: int) -> None:
        barrier = self._barriers.get((cta, offset))
        if barrier is not None and barrier.phase != phase:
            barrier.phase = phase
            barrier.ended += 1
            barrier.complete = barrier.gathering

    def mbarrier_waits(
        self, warp: Warp, instruction: Instruction, cta: Cta, offset: int, parity: int, done: bool
    ) -> None:
        actor, order = self.actor(warp), self.order(instruction)
        barrier = self._barrier(actor, order, cta, offset, actor.happened(), fenced=False)
        if barrier is None:
            return
        latest, seen = barrier.ended - 1, barrier.waits.get(actor)
        if done and latest == seen:  # of many lanes or tries only the first learns anything
            return
        # Waits of alternating parity follow the phases one by one; the parity tells a phase only from its neighbours.
        if seen is not None and parity != seen & 1 and latest - seen >= (3 if done else 2):
            first = f"its wait for phase {seen}"
            missing = f"a wait that is less than two phases behind: phase {latest} has ended"
            self._mbarrier(cta, offset, order, actor, first, missing)
        if done and barrier.ended and "relaxed" not in instruction.parts:
            barrier.waits[actor] = latest
            actor.acquire(barrier.complete)
            actor.after = actor.after.joined(barrier.complete.tensor)

    # ------------------------------------------------------------------------------------------ asynchronous operations

    def _issued(self, warp: Warp, instruction: Instruction, **events: tuple[int, int]) -> Issue:
        actor = self.actor(warp)
        known = actor.release()  # what the warp does from now on does not come before the operation
        return Issue(actor, self.order(instruction), actor.epoch - 1, actor.happened(), known, actor.after, **events)

    def _during(self, issue: Issue, step: Step) -> Step:
        def run() -> None:
            self._issue = issue
            try:
                step()
            finally:
                self._issue = None

        return run

    def asynchronous(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        """The step of an operation that reports to an mbarrier, such that this tracker knows whose it is."""
        return self._during(self._issued(warp, instruction), step)

    def in_group(self, warp: Warp, instruction: Instruction, lane: int, *steps: Step) -> list[Step]:
        """The steps of a bulk store, which belongs to the thread's open group."""
        groups = self._groups_of(self.actor(warp), lane)
        number = groups.committed + 1
        issue = self._issued(warp, instruction, reads=(groups.read_slot, number), writes=(groups.write_slot, number))
        groups.latest = issue.order, number
        return [self._during(issue, step) for step in steps]

    def _groups_of(self, actor: Actor, lane: int) -> Groups:
        groups = self._groups.get((actor, lane))
        if groups is None:
            reading = self._new_slot(
                lambda first, event: "cp.async.bulk.wait_group, with or without .read, by its thread"
            )
            groups = Groups(reading, self._new_slot(self._why_incomplete))
            self._groups[actor, lane] = groups
        return groups

    def group_committed(self, warp: Warp, lane: int) -> None:
        self._groups_of(self.actor(warp), lane).committed += 1

    def group_awaited(self, warp: Warp, lane: int, latest: int, read_only: bool) -> None:
        actor = self.actor(warp)
        groups = self._groups_of(actor, lane)
        done = groups.committed - latest
        if done > 0:
            actor.reach(groups.read_slot, done)
            if not read_only:
                actor.completed = actor.completed.at(groups.write_slot, done)

    def finish(self) -> None:
        for (actor, _), groups in self._groups.items():
            if groups.latest is not None and actor.known.happened[groups.read_slot] < groups.latest[1]:
                self._not_read_at_exit(actor, groups.latest[0])
        super().finish()

    def _not_read_at_exit(self, actor: Actor, order: Order) -> None:
        missing = "cp.async.bulk.wait_group, with or without .read, by its thread before the CTA ends"
        where = f"the source in shared memory of CTA {actor.warp.cta.index}"
        text = f"read by {self._text(actor, order.place)}"
        self._add((EXIT, order.place), lambda: Finding(EXIT, where, text, "", missing))

    def _why_incomplete(self, first: Actor, event: cells.Event) -> str:
        if first.completed[event.slot] >= event.epoch:
            return "fence.proxy.async between its cp.async.bulk.wait_group and the release"
        if first.known.happened[event.slot] >= event.epoch:
            return "a release behind its wait and an acquire of it before the second"
        return "cp.async.bulk.wait_group (without .read) by its thread"

    def loads(
        self,
        reads: Addresses,
        num_bytes: int,
        cta: Cta,
        offsets: Addresses,
        size: int,
        barrier: tuple[Cta, int],
        atomic: bool = False,
    ) -> None:
        """The operation that is happening copies these stretches to shared memory; it will report to this barrier."""
        issue = self._issue
        assert issue is not None
        known = self._barrier(issue.actor, issue.order, *barrier, issue.happened, fenced=True)
        if known is None:
            return
        event = (known.slot, known.ended + 1)
        self._asynchronous(issue, event, "global", reads, num_bytes, writes=False)
        self._asynchronous(issue, event, "shared", offsets + self._shared_key(cta), size, writes=True, atomic=atomic)

    def reads_shared(self, cta: Cta, offsets: Addresses, size: int) -> None:
        """The operation that is happening reads these bytes."""
        assert self._issue is not None
        self._asynchronous(
            self._issue, self._issue.reads, "shared", offsets.ravel() + self._shared_key(cta), size, writes=False
        )

    def writes_global(self, addresses: Addresses, num_bytes: int, atomic: bool = False) -> None:
        issue = self._issue
        assert issue is not None
        self._asynchronous(issue, issue.writes, "global", addresses, num_bytes, writes=True, atomic=atomic)

    def reports(self, cta: Cta, offset: int) -> None:
        """The operation that is happening is complete, as far as this barrier is concerned; before that is counted."""
        issue = self._issue
        assert issue is not None
        barrier = self._barrier(issue.actor, issue.order, cta, offset, issue.happened, fenced=True)
        if barrier is not None:
            learned = issue.known
            learned = replace(learned, happened=learned.happened.at(barrier.slot, barrier.ended + 1))
            if issue.pipe != NO_EVENT:
                learned = _as_if_fenced(replace(learned, happened=learned.happened.at(*issue.pipe)))
            barrier.gathering = barrier.gathering.joined(learned)

    def _asynchronous(
        self,
        issue: Issue,
        event: tuple[int, int],
        space: Space,
        keys: Addresses,
        size: int,
        *,
        writes: bool,
        atomic: bool = False,
    ) -> None:
        flags = cells.ASYNC | (cells.GLOBAL if space == "global" else 0) | (cells.STRONG if atomic else 0)
        self._record(
            issue.actor,
            event,
            issue.order,
            flags,
            keys,
            size,
            writes,
            happened=issue.happened,
            visible=issue.known.globally if space == "global" else issue.known.shared,
            own_epoch=issue.epoch,
            pipe=issue.pipe,
            must_be_written=space == "shared",
        )

    # --------------------------------------------------------------------------------------------------------- cp.async

    def copying(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        """The step of a cp.async. It is of the generic proxy, and complete when its thread has waited for it."""
        copies = self._copies_of(self.actor(warp))
        copies.issued += 1
        event = (copies.slot, copies.issued)
        return self._during(self._issued(warp, instruction, reads=event, writes=event), step)

    def _copies_of(self, actor: Actor) -> Copies:
        if actor not in self._copies:
            missing = "cp.async.wait_group or cp.async.mbarrier.arrive by its thread"
            self._copies[actor] = Copies(self._new_slot(lambda first, event: missing))
        return self._copies[actor]

    def copies(self, cta: Cta, offsets: Addresses, size: int, sources: Addresses, num_bytes: int) -> None:
        """The cp.async that is happening copies from these places to those."""
        issue = self._issue
        assert issue is not None
        self._generic_copy(issue, cells.GLOBAL, sources, num_bytes, writes=False)
        self._generic_copy(issue, 0, offsets + self._shared_key(cta), size, writes=True)

    def _generic_copy(self, issue: Issue, flags: int, keys: Addresses, size: int, *, writes: bool) -> None:
        self._record(
            issue.actor,
            issue.writes,
            issue.order,
            flags,
            keys,
            size,
            writes,
            happened=issue.happened,
            visible=NEVER,
            own_epoch=issue.epoch,
        )

    def copies_committed(self, warp: Warp) -> None:
        copies = self._copies_of(self.actor(warp))
        copies.ends.append(copies.issued)

    def copies_awaited(self, warp: Warp, latest: int | None) -> None:
        """All but the latest groups; None: all copies."""
        actor = self.actor(warp)
        copies = self._copies_of(actor)
        if latest is None:
            actor.reach(copies.slot, copies.issued)
        elif len(copies.ends) > latest:
            actor.reach(copies.slot, copies.ends[-1 - latest])

    def copies_arrive(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> Step:
        """For the arrival that follows the copies issued so far; to be called before it is counted."""
        actor, order = self.actor(warp), self.order(instruction)
        copies = self._copies_of(actor)
        known = actor.release()
        known = replace(known, happened=known.happened.at(copies.slot, copies.issued))
        barrier = self._barrier(actor, order, cta, offset, known.happened, fenced=cta is not warp.cta)

        def arrive() -> None:
            if barrier is not None:
                barrier.gathering = barrier.gathering.joined(_as_if_fenced(known))

        return arrive

    # ------------------------------------------------------------------------------------------------------------ wgmma

    def in_matrix_group(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        """A wgmma, which belongs to the open group of its warp."""
        groups = self._matrix_groups_of(self.actor(warp))
        return self._during(self._issued(warp, instruction, reads=(groups.read_slot, groups.committed + 1)), step)

    def _matrix_groups_of(self, actor: Actor) -> Groups:
        if actor not in self._matrix_groups:
            self._matrix_groups[actor] = Groups(self._new_slot(self._why_multiplying))
        return self._matrix_groups[actor]

    def matrix_group_committed(self, warp: Warp) -> None:
        self._matrix_groups_of(self.actor(warp)).committed += 1

    def matrix_group_awaited(self, warp: Warp, latest: int) -> None:
        actor = self.actor(warp)
        groups = self._matrix_groups_of(actor)
        actor.reach(groups.read_slot, max(groups.committed - latest, 0))

    def _why_multiplying(self, first: Actor, event: cells.Event) -> str:
        if first.known.happened[event.slot] >= event.epoch:
            return "a release behind its wgmma.wait_group and an acquire of it before the second"
        return "wgmma.wait_group by its warp"

    def _not_waited_for(self, cta: Cta, offset: int) -> Callable[[Actor, cells.Event], str]:
        where = f"the mbarrier at {shared_place(cta, offset)}"
        return lambda first, event: f"a wait for phase {event.epoch - 1} of {where}"


def _as_if_fenced(knowledge: Knowledge) -> Knowledge:
    """A commit is a tcgen05.fence::before_thread_sync by itself; of other arrivals the usual pipelines ask none."""
    return replace(knowledge, tensor=knowledge.tensor.joined(knowledge.happened))
