"""Races, missing fences and reads of memory that nobody wrote, found by what must come before what.

Every access is compared with the last write of the same bytes, and a write also with the reads since: one must come
before the other by a chain of synchronisation, whatever the order was this time. The chain is kept in vector clocks.

What orders, and what more the detector asks for:
- A warp is one actor: a fence or an acquire of one lane counts for all. A missing __syncwarp is not found.
- mbarrier arrivals, and copies and commits that complete on it, come before a wait that saw the phase end or a later
  one. A copy's data come after the phase that it counted to and no other.
- Release and acquire of words in memory, with scopes: seen from another CTA of the grid a scope must be at least
  cluster, seen from another grid (another GPU) it must be sys. Also a fence before a relaxed write, or after a relaxed
  read. Additions continue the release of those before; a plain store ends it.
- bar.sync, barrier.cluster, bulk groups, wgmma groups, tcgen05.commit, tcgen05.wait.
- What the generic proxy wrote, the async proxy may read or overwrite behind a fence.proxy.async that lies on the chain.
  Bulk stores to global memory count for others only when their thread fences between its wait and its release; the
  async proxy of another CTA needs a fence behind the acquire as well.
- Matrix instructions of another warp on tensor memory need tcgen05.fence::before_thread_sync and after_thread_sync.
- Bytes of a word that several warps write in parts are told apart only as far as the last write goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mok_cute.emulator import shadow as cells
from mok_cute.emulator.clocks import NEVER, NOTHING, Actor, Clock, Knowledge
from mok_cute.emulator.execute import SHARED_WINDOW
from mok_cute.errors import KernelError

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Barrier, Cta, Grid, Warp

Addresses = npt.NDArray[Any]
Step = Callable[[], None]
Space = Literal["shared", "global"]
OFFSET_BITS = 24  # of a shared address, as in load_store.py
SHARED_KEY, TENSOR_KEY = 1 << 62, 1 << 61  # above every address: where the shadows of these memories lie
NO_EVENT = (0, 0)
CTA, CLUSTER, GPU, SYS = range(4)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": SYS, "gl": GPU}
SCOPE_NAMES = ("cta", "cluster", "gpu", "sys")
MOST_FINDINGS = 50
MOST_SHOWN = 10
REMEMBERED_WORDS = 64  # synchronising accesses of each warp that a report can name
KINDS = {
    cells.RACE: "race",
    cells.SCOPE: "scope",
    cells.PROXY: "proxy",
    cells.UNINITIALISED: "uninitialised",
    cells.TENSOR_FENCE: "tensor fence",
}
MBARRIER = "mbarrier"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a kernel, whether or not its results were right.

    kind     race, scope, proxy, tensor fence, uninitialised or mbarrier
    where    the bytes: a buffer's name with the element, or the place in shared or tensor memory
    first    the earlier access and who did it, empty where there is none
    second   the access at which it was found
    missing  what would have made it right
    """

    kind: str
    where: str
    first: str
    second: str
    missing: str

    def __str__(self) -> str:
        lines = [f"{self.kind} at {self.where}: {self.missing}", f"first   {self.first}", f"second  {self.second}"]
        return "\n    ".join(line for line in lines if not line.endswith("  "))


class RaceError(KernelError):
    """A kernel broke the rules of memory order. ``findings`` has one entry for each pair of places in the program."""

    def __init__(self, findings: list[Finding]) -> None:
        shown = [f"  {number}. {finding}" for number, finding in enumerate(findings[:MOST_SHOWN], 1)]
        rest = [f"  and {len(findings) - MOST_SHOWN} more"] if len(findings) > MOST_SHOWN else []
        super().__init__("\n".join([f"{len(findings)} findings of memory order:", *shown, *rest]))
        self.findings = findings


@dataclass(frozen=True)
class Order:
    """Memory order of an instruction. ``scope`` is that of a strong one; weak ones have none."""

    place: int
    strong: bool
    scope: int
    acquires: bool
    releases: bool


@dataclass(eq=False)
class SharedBarrier:
    """What the detector keeps of an mbarrier. Its slot counts the phases that have ended."""

    cta: Cta
    offset: int
    slot: int
    by: Actor
    epoch: int  # of the initialisation
    place: int
    fenced: bool = False
    phase: int = 0  # the bit
    ended: int = 0  # phases
    gathering: Knowledge = NOTHING  # of all arrivals so far
    complete: Knowledge = NOTHING  # of those up to the last phase that ended
    waits: dict[Actor, int] = field(default_factory=dict)  # last phase that each actor has seen end


@dataclass
class Word:
    """What releases have left at a word of memory, by who may take it."""

    system: Knowledge = NOTHING
    ranks: dict[int, Knowledge] = field(default_factory=dict)
    ctas: dict[int, Knowledge] = field(default_factory=dict)

    def release(self, actor: Actor, scope: int, knowledge: Knowledge) -> None:
        self.ctas[actor.cta] = self.ctas.get(actor.cta, NOTHING).joined(knowledge)
        if scope >= CLUSTER:
            self.ranks[actor.rank] = self.ranks.get(actor.rank, NOTHING).joined(knowledge)
        if scope == SYS:
            self.system = self.system.joined(knowledge)

    def seen_by(self, actor: Actor, scope: int) -> Knowledge:
        seen = self.ctas.get(actor.cta, NOTHING)
        if scope >= CLUSTER:
            seen = seen.joined(self.ranks.get(actor.rank, NOTHING))
        return seen.joined(self.system) if scope == SYS else seen


@dataclass(frozen=True)
class Issue:
    """An asynchronous operation as it was issued: what comes before it, and which events it is.

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

    def knowledge(self) -> Knowledge:
        """What whoever waits for this operation learns from it, besides that it is complete."""
        return replace(self.known, happened=self.happened.at(self.actor.slot, self.epoch))


@dataclass
class Groups:
    """Slots of the operations that one thread (or warp) puts into groups, and the groups that are committed."""

    read_slot: int
    write_slot: int = 0
    committed: int = 0


@dataclass
class Pipe:
    """Slots and counts of a warp's tcgen05 instructions: matrix operations and copies, loads, stores."""

    slot: int
    load_slot: int
    store_slot: int
    issued: int = 0
    loads: int = 0
    stores: int = 0


class Tracker:
    """What the steps of instructions tell about memory order. This one does not listen."""

    def loaded(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def stored(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def updated(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def fence(self, warp: Warp, instruction: Instruction) -> None: ...

    def barrier_arrives(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None: ...

    def barrier_passed(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None: ...

    def mbarrier_made(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None: ...

    def mbarrier_ended(self, cta: Cta, offset: int) -> None: ...

    def mbarrier_arrives(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None: ...

    def mbarrier_stored(self, cta: Cta, offset: int, phase: int) -> None: ...

    def mbarrier_waits(
        self, warp: Warp, instruction: Instruction, cta: Cta, offset: int, parity: int, done: bool
    ) -> None: ...

    def asynchronous(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def in_group(self, warp: Warp, instruction: Instruction, lane: int, *steps: Step) -> list[Step]:
        return list(steps)

    def group_committed(self, warp: Warp, lane: int) -> None: ...

    def group_awaited(self, warp: Warp, lane: int, latest: int, read_only: bool) -> None: ...

    def loads(
        self, reads: Addresses, num_bytes: int, cta: Cta, offsets: Addresses, size: int, barrier: tuple[Cta, int]
    ) -> None: ...

    def reads_shared(self, cta: Cta, offsets: Addresses, size: int) -> None: ...

    def writes_global(self, addresses: Addresses, num_bytes: int) -> None: ...

    def reports(self, cta: Cta, offset: int) -> None: ...

    def in_matrix_group(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def matrix_group_committed(self, warp: Warp) -> None: ...

    def matrix_group_awaited(self, warp: Warp, latest: int) -> None: ...

    def in_pipe(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def tensor_allocated(
        self, warp: Warp, instruction: Instruction, first: int, columns: int, cta: Cta, offset: int
    ) -> None: ...

    def tensor_moved(self, warp: Warp, instruction: Instruction, lanes: Addresses, columns: Addresses) -> None: ...

    def tensor_used(self, cta: Cta, lanes: Addresses, columns: Addresses, *, reads: bool, writes: bool) -> None: ...

    def tensor_fence(self, warp: Warp, instruction: Instruction) -> None: ...

    def finish(self) -> None: ...

    def explain(self, fault: Exception) -> None: ...

    def close(self) -> None: ...


NO_TRACKER = Tracker()


class RaceTracker(Tracker):
    """Listens, and collects findings. One for all grids of a run."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.findings: list[Finding] = []
        self._memory = grids[0].memory
        self._ranks = {id(grid): rank for rank, grid in enumerate(grids)}
        self._shadow = cells.Shadow()
        self._access = cells.Access()
        self._actors: dict[Warp, Actor] = {}
        self._by_number: list[Actor] = []
        self._ctas: dict[Cta, int] = {}
        self._slots: list[Callable[[Actor, cells.Event], str]] = [lambda actor, event: ""]  # slot 0 is never used
        self._orders: dict[int, Order] = {}  # by id of the instruction
        self._places: list[Instruction] = []
        self._words: dict[int, Word] = {}
        self._barriers: dict[tuple[Cta, int], SharedBarrier] = {}
        self._unfenced: dict[Actor, list[SharedBarrier]] = {}
        self._meetings: dict[Barrier, tuple[int, list[Knowledge]]] = {}
        self._awaited: dict[tuple[Warp, Barrier], list[Knowledge]] = {}
        self._groups: dict[tuple[Actor, int], Groups] = {}
        self._matrix_groups: dict[Actor, Groups] = {}
        self._pipes: dict[Actor, Pipe] = {}
        self._issue: Issue | None = None  # of the asynchronous operation that is happening
        self._seen: set[tuple[Any, ...]] = set()

    # ------------------------------------------------------------------------------------------------ actors and places

    def actor(self, warp: Warp) -> Actor:
        actor = self._actors.get(warp)
        if actor is None:
            cta = self._cta(warp.cta)
            slot = self._new_slot(lambda first, event: self._why_unordered(first))
            actor = Actor(warp, slot, len(self._by_number), cta, self._ranks[id(warp.cta.grid)])
            self._actors[warp] = actor
            self._by_number.append(actor)
        return actor

    def _cta(self, cta: Cta) -> int:
        return self._ctas.setdefault(cta, len(self._ctas))

    def _new_slot(self, missing: Callable[[Actor, cells.Event], str]) -> int:
        """A slot of the clocks. ``missing`` says what an event of it lacks that nobody has waited for."""
        self._slots.append(missing)
        return len(self._slots) - 1

    def order(self, instruction: Instruction) -> Order:
        known = self._orders.get(id(instruction))
        if known is None:
            parts = instruction.parts
            atomic = parts[0] in ("atom", "red")
            strong = atomic or not {"acquire", "release", "relaxed", "volatile", "acq_rel", "mmio"}.isdisjoint(parts)
            default = SYS if {"volatile", "mmio"} & set(parts) else GPU
            known = self._orders[id(instruction)] = Order(
                len(self._places),
                strong,
                next((SCOPES[part] for part in parts if part in SCOPES), default),
                bool({"acquire", "acq_rel"} & set(parts)),
                bool({"release", "acq_rel"} & set(parts)),
            )
            self._places.append(instruction)
        return known

    # ------------------------------------------------------------------------------------------- loads, stores, atomics

    def loaded(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None:
        order, actor = self.order(instruction), self.actor(warp)
        space, keys = self._keys(warp, space, addresses)
        self._generic(actor, order, space, keys, size, writes=False)
        if order.strong:
            self._read_words(actor, order, keys, instruction)

    def stored(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None:
        order, actor = self.order(instruction), self.actor(warp)
        space, keys = self._keys(warp, space, addresses)
        self._generic(actor, order, space, keys, size, writes=True)
        if order.strong or self._words:
            self._write_words(actor, order, keys, instruction, continues=False)

    def updated(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None:
        order, actor = self.order(instruction), self.actor(warp)
        space, keys = self._keys(warp, space, addresses)
        self._generic(actor, order, space, keys, size, writes=True)
        self._read_words(actor, order, keys, instruction)
        self._write_words(actor, order, keys, instruction, continues=True)

    def _keys(self, warp: Warp, space: str, addresses: Addresses) -> tuple[Space, npt.NDArray[np.uint64]]:
        """Space and place in the shadow of the addresses of one access."""
        addresses = addresses.astype(np.uint64, copy=False)
        if space == "generic":
            space = "shared" if int(addresses[0]) >= SHARED_WINDOW else "global"
        if space != "shared":
            return "global", addresses
        plain = addresses & np.uint64(SHARED_WINDOW - 1)
        ranks, offsets = plain >> np.uint64(OFFSET_BITS), plain & np.uint64((1 << OFFSET_BITS) - 1)
        bases = {rank: self._shared_key(warp.cta.peer(rank)) for rank in set(ranks.tolist())}
        if len(bases) == 1:
            return "shared", offsets + np.uint64(bases.popitem()[1])
        return "shared", offsets + np.array([bases[rank] for rank in ranks.tolist()], np.uint64)

    def _shared_key(self, cta: Cta) -> int:
        return SHARED_KEY | self._cta(cta) << OFFSET_BITS

    def _generic(self, actor: Actor, order: Order, space: Space, keys: Addresses, size: int, *, writes: bool) -> None:
        flags = (cells.STRONG if order.strong else 0) | (cells.GLOBAL if space == "global" else 0)
        self._record(
            actor,
            (actor.slot, actor.epoch),
            order,
            flags,
            keys,
            size,
            writes,
            happened=actor.happened(),
            visible=NEVER,
            must_be_written=space == "shared",
        )

    def _record(
        self,
        actor: Actor,
        event: tuple[int, int],
        order: Order,
        flags: int,
        keys: Addresses,
        size: int,
        writes: bool,
        *,
        happened: Clock,
        visible: Clock,
        own_epoch: int | None = None,
        pipe: tuple[int, int] = (0, 0),
        must_be_written: bool = False,
    ) -> None:
        access = self._access
        access.event = cells.Event(*event, order.place, actor.number, actor.cta, actor.rank, flags, order.scope)
        access.own_slot, access.own_epoch = actor.slot, actor.epoch if own_epoch is None else own_epoch
        access.pipe_slot, access.pipe_epoch = pipe
        access.happened, access.num_happened = happened.pointer, happened.size
        access.visible, access.num_visible = visible.pointer, visible.size
        access.writes, access.must_be_written = writes, must_be_written
        for conflict in self._shadow.access(access, keys, size):
            self._found(conflict, writes)

    def _read_words(self, actor: Actor, order: Order, keys: Addresses, instruction: Instruction) -> None:
        for key in dict.fromkeys(keys.tolist()):
            self._remember(actor, key, instruction, writes=False)
            word = self._words.get(key)
            if word is None:
                continue
            if order.acquires:
                actor.acquire(word.seen_by(actor, order.scope))
            else:
                for scope in range(CTA, order.scope + 1):
                    known = actor.looked.get(scope, NOTHING)
                    actor.looked[scope] = known.joined(word.seen_by(actor, scope))

    def _write_words(
        self, actor: Actor, order: Order, keys: Addresses, instruction: Instruction, *, continues: bool
    ) -> None:
        if not order.strong:
            for key in keys.tolist():
                self._words.pop(key, None)
            return
        released = actor.release() if order.releases else None
        for key in dict.fromkeys(keys.tolist()):
            self._remember(actor, key, instruction, writes=True)
            word = self._words.setdefault(key, Word())
            if not continues:
                word = self._words[key] = Word()
            if released is not None:
                word.release(actor, order.scope, released)
            else:
                for scope, knowledge in actor.fenced.items():
                    word.release(actor, min(scope, order.scope), knowledge)

    def _remember(self, actor: Actor, key: int, instruction: Instruction, *, writes: bool) -> None:
        entry = (key, instruction, writes)
        if entry in actor.synchronised[-4:]:
            return
        actor.synchronised.append(entry)
        del actor.synchronised[:-REMEMBERED_WORDS]

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
            for reached in range(CTA, scope + 1):
                actor.acquire(actor.looked.pop(reached, NOTHING))
            actor.fenced[scope] = actor.release()

    # -------------------------------------------------------------------------------------------- barriers of the warps

    def barrier_arrives(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None:
        """Before the arrival is counted: those of one generation share what they release."""
        generation, released = self._meetings.get(barrier, (-1, []))
        if generation != barrier.generation:
            released = [NOTHING]
            self._meetings[barrier] = (barrier.generation, released)
        if not relaxed:
            released[0] = released[0].joined(self.actor(warp).release())
        self._awaited[warp, barrier] = released

    def barrier_passed(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None:
        released = self._awaited.pop((warp, barrier))
        if not relaxed:
            self.actor(warp).acquire(released[0])

    # -------------------------------------------------------------------------------------------------------- mbarriers

    def mbarrier_made(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None:
        actor, order = self.actor(warp), self.order(instruction)
        old = self._barriers.get((cta, offset))
        if old is not None:
            first = self._text(old.by, old.place)
            self._mbarrier(cta, offset, order, actor, first, "mbarrier.inval before it is initialised again")
        slot = old.slot if old is not None else self._new_slot(self._not_waited_for(cta, offset))
        self._generic(actor, order, "shared", np.array([self._shared_key(cta) + offset], np.uint64), 8, writes=True)
        made = SharedBarrier(cta, offset, slot, actor, actor.epoch, order.place, ended=old.ended if old else 0)
        self._barriers[cta, offset] = made
        self._unfenced.setdefault(actor, []).append(made)

    def mbarrier_ended(self, cta: Cta, offset: int) -> None:
        self._barriers.pop((cta, offset), None)

    def _barriers_fenced(self, actor: Actor) -> None:
        for barrier in self._unfenced.pop(actor, []):
            barrier.fenced = True

    def _barrier(
        self, actor: Actor, order: Order, cta: Cta, offset: int, happened: Clock, *, fenced: bool
    ) -> SharedBarrier | None:
        """The barrier for a use of it, which must come after its initialisation; ``fenced``: and after a fence."""
        barrier = self._barriers.get((cta, offset))
        if barrier is None:
            self._mbarrier(cta, offset, order, actor, "", "mbarrier.init before its first use")
            return None
        if barrier.by is not actor and happened[barrier.by.slot] < barrier.epoch:
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
            barrier.gathering = barrier.gathering.joined(actor.release())

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
        # Waits of alternating parity follow the phases one by one; the parity tells a phase only from its neighbours.
        if seen is not None and parity != seen & 1 and latest - seen >= (3 if done else 2):
            first = f"its wait for phase {seen}"
            missing = f"a wait that is less than two phases behind: phase {latest} has ended"
            self._mbarrier(cta, offset, order, actor, first, missing)
        if done and barrier.ended:
            barrier.waits[actor] = latest
            if "relaxed" not in instruction.parts:
                actor.acquire(barrier.complete)

    # ------------------------------------------------------------------------------------------ asynchronous operations

    def _issued(self, warp: Warp, instruction: Instruction, **events: tuple[int, int]) -> Issue:
        actor = self.actor(warp)
        issue = Issue(actor, self.order(instruction), actor.epoch, actor.happened(), actor.known, actor.after, **events)
        actor.epoch += 1  # what the warp does from now on does not come before the operation
        return issue

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

    def _why_incomplete(self, first: Actor, event: cells.Event) -> str:
        if first.completed[event.slot] >= event.epoch:
            return "fence.proxy.async between its cp.async.bulk.wait_group and the release"
        if first.known.happened[event.slot] >= event.epoch:
            return "a release behind its wait and an acquire of it before the second"
        return "cp.async.bulk.wait_group (without .read) by its thread"

    def loads(
        self, reads: Addresses, num_bytes: int, cta: Cta, offsets: Addresses, size: int, barrier: tuple[Cta, int]
    ) -> None:
        """The operation that is happening copies these stretches to shared memory; it will report to this barrier."""
        issue = self._issue
        assert issue is not None
        known = self._barrier(issue.actor, issue.order, *barrier, issue.knowledge().happened, fenced=True)
        if known is None:
            return
        event = (known.slot, known.ended + 1)
        self._asynchronous(issue, event, "global", reads, num_bytes, writes=False)
        self._asynchronous(issue, event, "shared", offsets + self._shared_key(cta), size, writes=True)

    def reads_shared(self, cta: Cta, offsets: Addresses, size: int) -> None:
        """The operation that is happening reads these bytes."""
        assert self._issue is not None
        self._asynchronous(
            self._issue, self._issue.reads, "shared", offsets.ravel() + self._shared_key(cta), size, writes=False
        )

    def writes_global(self, addresses: Addresses, num_bytes: int) -> None:
        assert self._issue is not None
        self._asynchronous(self._issue, self._issue.writes, "global", addresses, num_bytes, writes=True)

    def reports(self, cta: Cta, offset: int) -> None:
        """The operation that is happening is complete, as far as this barrier is concerned; before that is counted."""
        issue = self._issue
        if issue is not None and issue.pipe != NO_EVENT:
            self._barrier(issue.actor, issue.order, cta, offset, issue.knowledge().happened, fenced=True)
        assert issue is not None
        barrier = self._barriers.get((cta, offset))
        if barrier is not None:
            learned = issue.knowledge()
            learned = replace(learned, happened=learned.happened.at(barrier.slot, barrier.ended + 1))
            if issue.pipe != NO_EVENT:  # a commit is a fence::before_thread_sync, too
                happened = learned.happened.at(*issue.pipe)
                learned = replace(learned, happened=happened, tensor=learned.tensor.joined(happened))
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
    ) -> None:
        self._record(
            issue.actor,
            event,
            issue.order,
            cells.ASYNC | (cells.GLOBAL if space == "global" else 0),
            keys,
            size,
            writes,
            happened=issue.happened,
            visible=issue.known.globally if space == "global" else issue.known.shared,
            own_epoch=issue.epoch,
            pipe=issue.pipe,
            must_be_written=space == "shared",
        )

    # ------------------------------------------------------------------------------------------------ wgmma and tcgen05

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

    # --------------------------------------------------------------------------------------------------------- findings

    def finish(self) -> None:
        if self.findings:
            raise RaceError(self.findings)

    def explain(self, fault: Exception) -> None:
        """Adds what was found before a kernel stopped to the report of why it did."""
        if self.findings:
            fault.args = (f"{fault}\n{RaceError(self.findings)}", *fault.args[1:])

    def close(self) -> None:
        self._shadow.close()

    def _add(self, key: tuple[Any, ...], finding: Callable[[], Finding]) -> None:
        if key in self._seen or len(self.findings) >= MOST_FINDINGS:
            return
        self._seen.add(key)
        self.findings.append(finding())

    def _mbarrier(self, cta: Cta, offset: int, order: Order, actor: Actor, first: str, missing: str) -> None:
        where = f"mbarrier at {_shared_place(cta, offset)}"
        text = self._text(actor, order.place)
        self._add((MBARRIER, order.place, missing), lambda: Finding(MBARRIER, where, first, text, missing))

    def _found(self, conflict: cells.Conflict, writes: bool) -> None:
        before, after = conflict.before, conflict.after
        key = (conflict.kind, before.place if before else -1, after.place)
        self._add(key, lambda: self._finding(conflict, writes))

    def _finding(self, conflict: cells.Conflict, writes: bool) -> Finding:
        before, after = conflict.before, conflict.after
        actor = self._by_number[after.actor]
        second = f"{'write' if writes else 'read'} by {self._text(actor, after.place)}"
        where = self._where(conflict.address)
        if before is None:
            return Finding(KINDS[conflict.kind], where, "", second, "a write of these bytes before they are read")
        earlier = self._by_number[before.actor]
        first = f"{'write' if conflict.before_writes else 'read'} by {self._text(earlier, before.place)}"
        return Finding(KINDS[conflict.kind], where, first, second, self._missing(conflict, earlier, actor))

    def _missing(self, conflict: cells.Conflict, first: Actor, second: Actor) -> str:
        before, after = conflict.before, conflict.after
        assert before is not None
        if conflict.kind == cells.SCOPE:
            least = "sys" if before.rank != after.rank else "cluster"
            scopes = f"{SCOPE_NAMES[before.scope]} and {SCOPE_NAMES[after.scope]}"
            return f"a scope of at least {least} on both sides; they have {scopes}"
        if conflict.kind == cells.PROXY:
            if before.flags & cells.ASYNC:
                return "fence.proxy.async between the acquire and this asynchronous access"
            return "fence.proxy.async behind the write, before this asynchronous access"
        if conflict.kind == cells.TENSOR_FENCE:
            return "tcgen05.fence::before_thread_sync behind the first or ::after_thread_sync before the second"
        return self._slots[before.slot](first, before) + self._words_between(first, second)

    def _why_unordered(self, first: Actor) -> str:
        return "a release behind the first and an acquire of it before the second"

    def _not_waited_for(self, cta: Cta, offset: int) -> Callable[[Actor, cells.Event], str]:
        where = f"the mbarrier at {_shared_place(cta, offset)}"
        return lambda first, event: f"a wait for phase {event.epoch - 1} of {where}"

    def _words_between(self, first: Actor, second: Actor) -> str:
        """Words that the first has written and the second read: the signal that should have carried the order."""
        read = {key: instruction for key, instruction, writes in second.synchronised if not writes}
        for key, instruction, writes in reversed(first.synchronised):
            if writes and key in read and first is not second:
                how = f"{_mnemonic(instruction)} and {_mnemonic(read[key])}"
                return f"; {self._where(key)} lies between them, with {how}"
        return ""

    def _text(self, actor: Actor, place: int) -> str:
        instruction = self._places[place]
        at = instruction.source or f"PTX line {instruction.line}"
        warp, grid = actor.warp, actor.warp.cta.grid
        rank = f" of grid {actor.rank}" if len(self._ranks) > 1 else ""
        return f"warp {warp.index} of CTA {warp.cta.index}{rank} ({grid.kernel.name}) at {at}: {instruction.text}"

    def _where(self, key: int) -> str:
        if key & SHARED_KEY:
            numbers = {number: cta for cta, number in self._ctas.items()}
            return _shared_place(numbers[(key ^ SHARED_KEY) >> OFFSET_BITS], key & ((1 << OFFSET_BITS) - 1))
        if key & TENSOR_KEY:
            lane, column = (key >> 2) % 2048 // 512 * 32, (key >> 2) % 512
            return f"tensor memory, lane {lane}, column {column}"
        return self._memory.describe(key)


def _shared_place(cta: Cta, offset: int) -> str:
    return f"shared memory offset {offset:#x} of CTA {cta.index}"


def _mnemonic(instruction: Instruction) -> str:
    return instruction.opcode
