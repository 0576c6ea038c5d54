"""The common part of the race detector: who acts, which events there are, the shadow of memory, and findings.

Whatever orders accesses lies above this, in ``race_memory.py``, ``race_async.py`` and ``race_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mok_cute.emulator import shadow as cells
from mok_cute.emulator.clocks import NEVER, Actor, Clock
from mok_cute.emulator.race_findings import Finding, RaceError
from mok_cute.emulator.tracker import Addresses, Tracker

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Cta, Grid, Warp

Space = Literal["shared", "global"]
OFFSET_BITS = 24  # of a shared address, as in load_store.py
SHARED_KEY, TENSOR_KEY = 1 << 62, 1 << 61  # above every address: where the shadows of these memories lie
NO_EVENT = (0, 0)
CTA, CLUSTER, GPU, SYS = range(4)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": SYS, "gl": GPU}
SCOPE_NAMES = ("cta", "cluster", "gpu", "sys")
MOST_FINDINGS = 50
REMEMBERED_WORDS = 64  # synchronising accesses of each warp that a report can name
KINDS = {
    cells.RACE: "race",
    cells.SCOPE: "scope",
    cells.PROXY: "proxy",
    cells.UNINITIALISED: "uninitialised",
    cells.TENSOR_FENCE: "tensor fence",
}
MBARRIER, EXIT = "mbarrier", "exit"


@dataclass(frozen=True)
class Order:
    """Memory order of an instruction. ``scope`` is that of a strong one; weak ones have none."""

    place: int
    strong: bool
    scope: int
    acquires: bool
    releases: bool


class Recorder(Tracker):
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

    # --------------------------------------------------------------------------------------------------------- accesses

    def _shared_key(self, cta: Cta) -> int:
        return SHARED_KEY | self._cta(cta) << OFFSET_BITS

    def _generic(self, actor: Actor, order: Order, space: Space, keys: Addresses, size: int, *, writes: bool) -> None:
        flags = (cells.STRONG if order.strong else 0) | (cells.GLOBAL if space == "global" else 0)
        actor.acted = True
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
        where = f"mbarrier at {shared_place(cta, offset)}"
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
        where = f"the mbarrier at {shared_place(cta, offset)}"
        return lambda first, event: f"a wait for phase {event.epoch - 1} of {where}"

    def _words_between(self, first: Actor, second: Actor) -> str:
        """Words that the first has written and the second read: the signal that should have carried the order."""
        read = {key: instruction for key, instruction, writes in second.synchronised if not writes}
        for key, instruction, writes in reversed(first.synchronised):
            if writes and key in read and first is not second:
                how = f"{instruction.opcode} and {read[key].opcode}"
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
            return shared_place(numbers[(key ^ SHARED_KEY) >> OFFSET_BITS], key & ((1 << OFFSET_BITS) - 1))
        if key & TENSOR_KEY:
            lane, column = (key >> 2) % 2048 // 512 * 32, (key >> 2) % 512
            return f"tensor memory, lane {lane}, column {column}"
        return self._memory.describe(key)


def shared_place(cta: Cta, offset: int) -> str:
    return f"shared memory offset {offset:#x} of CTA {cta.index}"
