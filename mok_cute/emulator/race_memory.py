"""Order by words of memory and by barriers of the warps: release, acquire, fences, bar.sync, barrier.cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.clocks import NOTHING, Actor, Knowledge
from mok_cute.emulator.execute import SHARED_WINDOW
from mok_cute.emulator.race_recorder import (
    CLUSTER,
    CTA,
    OFFSET_BITS,
    REMEMBERED_WORDS,
    SYS,
    Order,
    Recorder,
    Space,
)
from mok_cute.emulator.tracker import Addresses

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Barrier, Grid, Warp


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


class MemoryOrder(Recorder):
    """Accesses of the generic proxy. Lanes that act together are one access."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        super().__init__(grids)
        self._words: dict[int, Word] = {}
        self._meetings: dict[Barrier, tuple[int, list[Knowledge]]] = {}
        self._awaited: dict[tuple[Warp, Barrier], list[Knowledge]] = {}

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

    def _fence_words(self, actor: Actor, scope: int) -> None:
        """For relaxed reads before and relaxed writes behind."""
        for reached in range(CTA, scope + 1):
            actor.acquire(actor.looked.pop(reached, NOTHING))
        actor.fence(scope, actor.release())

    def barrier_arrives(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None:
        """Before the arrival is counted: those of one generation share what they release."""
        generation, released = self._meetings.get(barrier, (-1, []))
        if generation != barrier.generation:
            released = [NOTHING]
            self._meetings[barrier] = (barrier.generation, released)
        actor = self.actor(warp)
        if relaxed:
            for scope, knowledge in actor.fenced.items():
                if scope >= CLUSTER:
                    released[0] = released[0].joined(knowledge)
        else:
            released[0] = released[0].joined(actor.release())
        self._awaited[warp, barrier] = released

    def barrier_passed(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None:
        released = self._awaited.pop((warp, barrier))
        if not relaxed:
            self.actor(warp).acquire(released[0])
