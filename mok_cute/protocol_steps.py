"""The steps of a launch, their waits and their accesses, for the protocol model; see ``protocol_model``.

Everything a worker waits for, announces, reads and writes comes from ``templates/scheduler/order.py``; this file adds
only who runs what, and the few signals around the order: x_staged, entry, exit and the clearing of counters.

| step     | worker        | waits              | accesses                               | announces       |
|----------|---------------|--------------------|----------------------------------------|-----------------|
| stage    | communication |                    | writes its share of symmetric x        | x_staged        |
| enter    | first of them | x_staged of all    |                                        | entry (1)       |
| met      | communication | entry of all peers |                                        |                 |
| dispatch | communication | as declared        | reads x of the owners, writes the ring | as declared     |
| load     | compute       | as declared        | reads its A operand                    |                 |
| store    | compute (2)   | as declared        | writes its part of the tile            | as declared (3) |
| reduce   | compute       | as declared        | reads combine and shared_y, writes y   |                 |
| clear    | any           |                    | zeroes the next launch's counter set   |                 |

(1) and exit, when it pushes nothing. (2) load and reduce run once per task, store once per task and store warp.
(3) and exit with the last push.

Memory is tracked by cell and version: a version is a launch and, in a ring, a row block. Each cell must see its
versions in order, each written once, and all reads of a version between its write and the next. ``System`` turns that
into masks of steps, which the model compares at every access.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mok_cute.templates.scheduler import order

MAX_FINDINGS = 8

Routing = tuple[tuple[tuple[int, ...], ...], ...]  # [rank][token][k] -> expert; -1 or >= num_experts: dropped
Cell = tuple[Any, ...]  # (buffer, rank, place ...)
Version = tuple[int, ...]  # (launch,) or (launch, z, row block), ordered
Access = tuple[Cell, Version]


@dataclass(frozen=True)
class Protocol:
    """What is modelled. The tests replace a part by a wrong one, which must be found."""

    phases: tuple[order.Phase, ...] = order.PHASES
    total_pushes: Callable[[order.TaskOrder], Any] = order.total_pushes
    task_order: Callable[..., order.TaskOrder] = order.TaskOrder
    clears: bool = True


@dataclass(frozen=True)
class Case:
    """One situation: sizes, workers per rank, and the routing of each of the launches that follow each other."""

    name: str
    geometry: order.Geometry
    num_experts: int
    topk: int
    routings: tuple[Routing, ...]
    minibatch_blocks: int
    ring_minibatches: int
    comm_ctas: int = 1
    warps_per_comm_cta: int = 1
    compute_workers: int = 1

    @property
    def ranks(self) -> int:
        return len(self.routings[0])

    @property
    def local_experts(self) -> int:
        return -(-self.num_experts // self.ranks)

    @property
    def comm_workers(self) -> int:
        return self.comm_ctas * self.warps_per_comm_cta


class RoutedRows(NamedTuple):
    rows: list[tuple[int, int] | None]  # (owner rank, route) of each routed row, None on padding
    block_end: list[int]  # per local expert, first row block after it


def routed_rows(case: Case, routing: Routing, rank: int) -> RoutedRows:
    """The schedule of one rank: expert by expert, peers in turn, each segment padded to whole row blocks."""
    rows: list[tuple[int, int] | None] = []
    block_end = []
    for local in range(case.local_experts):
        expert = rank * case.local_experts + local
        lists = [
            [(peer, t * case.topk + k) for t, ids in enumerate(tokens) for k, e in enumerate(ids) if e == expert]
            for peer, tokens in enumerate(routing)
        ]
        if expert < case.num_experts:
            for j in range(max(len(routes) for routes in lists)):
                rows += [routes[j] for routes in lists if j < len(routes)]
        rows += [None] * (-len(rows) % case.geometry.tile_rows)
        block_end.append(len(rows) // case.geometry.tile_rows)
    return RoutedRows(rows, block_end)


class Condition(NamedTuple):
    """So many of the steps in ``mask`` must be done."""

    mask: int
    required: int
    label: str
    local: bool  # announced by this rank only


@dataclass
class Step:
    name: str
    rank: int
    launch: int
    phase: order.Phase | None = None
    tile: order.Tile | None = None
    role: str = ""
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    announces: list[str] = field(default_factory=list)
    waits: list[Condition] = field(default_factory=list)
    after: int = 0  # steps that come first by program order
    need: int = 0  # steps whose accesses must precede this one's
    forbid: int = 0  # steps whose accesses must follow

    @property
    def where(self) -> str:
        return f"launch {self.launch} rank {self.rank}: {self.name}"


class Task(NamedTuple):
    load: int
    stores: tuple[int, ...]


@dataclass
class Plan:
    """The steps of one rank in one launch, by worker."""

    order: order.TaskOrder
    rows: RoutedRows
    comm: list[list[int]] = field(default_factory=list)  # program of each communication worker
    tasks: list[Task] = field(default_factory=list)  # by ticket
    free: list[int] = field(default_factory=list)  # steps that any worker may do at any time
    steps: int = 0  # mask
    comm_cta: list[int] = field(default_factory=list)  # mask of each communication CTA's steps


# Which signal orders accesses to symmetric memory behind a given one; elsewhere the task's own signals do.
SYMMETRIC = {("x", "write"): "entry", ("x", "read"): "exit", ("combine", "write"): "exit", ("combine", "read"): "entry"}


class System:
    """All steps of a case, their conditions and their conflicts. ``findings`` holds what needs no exploration."""

    def __init__(self, case: Case, protocol: Protocol | None = None) -> None:
        self.case, self.protocol = case, protocol or Protocol()
        self.steps: list[Step] = []
        self.findings: list[str] = []
        self.words: dict[tuple[int, int, str, int], int] = {}  # (launch, rank, signal, index) -> mask of arrivals
        self.enter: dict[tuple[int, int], int] = {}
        self.scopes = {s.name: s.scope for s in order.SIGNALS}
        self.phase_of = {phase.kind: phase for phase in self.protocol.phases}
        self.plans = {
            (launch, rank): self._plan(launch, rank)
            for launch in range(1, len(case.routings) + 1)
            for rank in range(case.ranks)
        }
        for step in self.steps:
            self._declare_waits(step)
        for (launch, rank), plan in self.plans.items():
            self._check_pushes(launch, rank, plan)
        self._order_accesses()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _add(self, plan: Plan, step: Step, publishes: bool = False) -> int:
        index = len(self.steps)
        if step.role != "clear":
            step.reads.append((("counter set", step.rank, step.launch & 1), (step.launch,)))
        if publishes and step.phase is not None:
            for publish in step.phase.publishes:
                self._announce(plan, step, index, publish.signal, publish.index(plan.order, step.tile))  # type: ignore[arg-type]
        self.steps.append(step)
        plan.steps |= 1 << index
        return index

    def _announce(self, plan: Plan, step: Step, index: int, signal: str, place: int) -> None:
        word = (step.launch, step.rank, signal, place)
        self.words[word] = self.words.get(word, 0) | 1 << index
        step.announces.append(f"{signal}[{place}] of rank {step.rank}")

    def _plan(self, launch: int, rank: int) -> Plan:
        case, g = self.case, self.case.geometry
        tokens = case.routings[launch - 1][rank]
        rows = routed_rows(case, case.routings[launch - 1], rank)
        blocks = len(rows.rows) // g.tile_rows
        o = self.protocol.task_order(g, len(tokens), blocks, case.minibatch_blocks, case.ring_minibatches)
        plan = Plan(o, rows)
        if self.protocol.clears:
            clear = Step("clear of the next launch's counters", rank, launch, role="clear")
            clear.writes.append((("counter set", rank, (launch + 1) & 1), (launch + 1,)))
            plan.free.append(self._add(plan, clear))
        self._plan_comm(plan, launch, rank, len(tokens))
        for ticket in range(o.num_tasks):
            self._plan_task(plan, launch, rank, ticket)
        return plan

    def _plan_comm(self, plan: Plan, launch: int, rank: int, num_tokens: int) -> None:
        g, o, workers = self.case.geometry, plan.order, self.case.comm_workers
        dispatch = self.phase_of[order.END]
        for w in range(workers):
            stage = Step(f"staging of x by communication worker {w}", rank, launch)
            share = [t for t in range(num_tokens) if t // g.rows_per_dispatch_group % workers == w]
            stage.writes += [(("x", rank, t), (launch,)) for t in share]
            self._announce(plan, stage, len(self.steps), "x_staged", 0)
            program = [self._add(plan, stage)]
            if w == 0:
                self.enter[launch, rank] = self._add(plan, Step("entry", rank, launch, role="enter"))
                program.append(self.enter[launch, rank])
            nowhere = order.Tile(order.END, 0, 0, 0, 0, 0)
            met = Step(f"meeting of peers by communication worker {w}", rank, launch, dispatch, nowhere, "met")
            program.append(self._add(plan, met))
            for group in range(w, o.num_dispatch_groups, workers):
                z, block, row = o.dispatch_group(group)
                tile = order.Tile(order.END, z, block, o.ring_block(z, block - o.first_block(z)), 0, 0)
                step = Step(f"dispatch of row block {block}, row {row}", rank, launch, dispatch, tile, "dispatch")
                step.reads += [a for b in dispatch.reads for a in self._reads(b, plan, step, row)]
                step.writes += [a for b in dispatch.writes for a in self._writes(b, plan, step, row)]
                program.append(self._add(plan, step, publishes=True))
            for before, after in itertools.pairwise(program):
                self.steps[after].after |= 1 << before
            plan.comm.append(program)
        for cta in range(self.case.comm_ctas):
            programs = plan.comm[cta * self.case.warps_per_comm_cta : (cta + 1) * self.case.warps_per_comm_cta]
            plan.comm_cta.append(mask_of(step for program in programs for step in program))

    def _plan_task(self, plan: Plan, launch: int, rank: int, ticket: int) -> None:
        o, ends = plan.order, plan.rows.block_end
        if ticket >= o.num_gemm_tasks:
            tile = order.Tile(order.REDUCE, 0, ticket - o.num_gemm_tasks, 0, 0, 0)
        else:
            tile = o.tile(
                ticket,
                lambda block: min(sum(end <= block for end in ends), len(ends) - 1),
                lambda e: ends[e] if e >= 0 else 0,
            )
        phase = self.phase_of[tile.kind]
        name = f"{phase.name} of row block {tile.row_block}, column {tile.col}"
        if tile.kind == order.REDUCE:
            name = f"reduce task {tile.row_block}"
        warps = range(o.geometry.arrivals_per_tile if phase.publishes else 0)
        for publish in phase.publishes:
            assert publish.arrivals(o) == len(warps), (
                f"{phase.name}: {publish.signal} is not one arrival per store warp"
            )
        role = "load" if warps else "scheduler"
        load = Step(f"load of {name}" if warps else name, rank, launch, phase, tile, role)
        load.reads += [a for b in phase.reads for a in self._reads(b, plan, load, 0)]
        if not warps:
            load.writes += [a for b in phase.writes for a in self._writes(b, plan, load, 0)]
        first = self._add(plan, load)
        stores = []
        for warp in warps:
            store = Step(f"store {warp} of {name}", rank, launch, phase, tile, "store", after=1 << first)
            store.writes += [a for b in phase.writes for a in self._writes(b, plan, store, warp)]
            stores.append(self._add(plan, store, publishes=True))
            load.announces = store.announces
        plan.tasks.append(Task(first, tuple(stores)))

    # -- memory: which cells a step of a phase touches ---------------------------------------------------------------

    def _reads(self, buffer: str, plan: Plan, step: Step, row: int) -> list[Access]:
        g, t, rank, case = self.case.geometry, step.tile, step.rank, self.case
        assert t is not None
        now, content = (step.launch,), (step.launch, t.z, t.row_block)
        warps = range(g.arrivals_per_tile)
        if buffer == "x":  # an input of the call, which nobody writes
            return []
        if buffer == "x of the owner rank":  # own rows come from the input itself
            first = t.row_block * g.tile_rows + row
            rows = plan.rows.rows[first : first + g.rows_per_dispatch_group]
            return [(("x", r[0], r[1] // case.topk), now) for r in rows if r is not None and r[0] != rank]
        if buffer == "x_ring":
            return [((buffer, rank, t.operand_block, i), content) for i in range(g.dispatch_groups_per_block)]
        if buffer == "hidden_ring":
            return [((buffer, rank, t.operand_block, c, w), content) for c in range(g.gate_up_cols) for w in warps]
        if buffer == "shared_hidden":
            cols = range(g.shared_gate_up_cols)
            return [((buffer, rank, t.operand_block, c, w), now) for c in cols for w in warps]
        routing = case.routings[step.launch - 1][rank]
        tokens = range(t.row_block * g.tokens_per_reduce, min((t.row_block + 1) * g.tokens_per_reduce, len(routing)))
        if buffer == "combine":
            routes = [i * case.topk + k for i in tokens for k, e in enumerate(routing[i]) if 0 <= e < case.num_experts]
            return [((buffer, rank, route, c), now) for route in routes for c in range(g.down_cols)]
        if buffer == "shared_y":
            blocks = sorted({i // g.tile_rows for i in tokens})
            return [((buffer, rank, b, c, w), now) for b in blocks for c in range(g.shared_down_cols) for w in warps]
        raise ValueError(f"protocol model: phase {step.name} reads {buffer!r}, which the model does not know")

    def _writes(self, buffer: str, plan: Plan, step: Step, part: int) -> list[Access]:
        """``part`` is the store warp of a tile, or the first row of a dispatch group inside its block."""
        g, t, rank = self.case.geometry, step.tile, step.rank
        assert t is not None
        now, content = (step.launch,), (step.launch, t.z, t.row_block)
        if buffer == "x_ring":
            return [((buffer, rank, t.operand_block, part // g.rows_per_dispatch_group), content)]
        if buffer == "hidden_ring":
            return [((buffer, rank, t.operand_block, t.col, part), content)]
        if buffer in ("shared_hidden", "shared_y"):
            return [((buffer, rank, t.operand_block, t.col, part), now)]
        if buffer == "combine of the owner rank":
            height = g.tile_rows // g.arrivals_per_tile
            first = t.row_block * g.tile_rows + part * height
            rows = plan.rows.rows[first : first + height]
            return [(("combine", r[0], r[1], t.col), now) for r in rows if r is not None]
        if buffer == "y":
            return [((buffer, rank, t.row_block), now)]
        raise ValueError(f"protocol model: phase {step.name} writes {buffer!r}, which the model does not know")

    # -- waits and counts ----------------------------------------------------------------------------------------------

    def _declare_waits(self, step: Step) -> None:
        launch, rank = step.launch, step.rank
        plan = self.plans[launch, rank]
        if launch > 1:
            step.after |= self.plans[launch - 1, rank].steps
        if step.role == "enter":
            staged = self.words[launch, rank, "x_staged", 0]
            step.waits.append(Condition(staged, self.case.comm_workers, f"x_staged[0] of rank {rank}", True))
        if step.phase is None:
            return
        role = "dispatch" if step.role == "met" else step.role
        for wait in step.phase.waits:
            if wait.by != role or (step.role == "met" and not wait.all_peers):
                continue
            if wait.when is not None and not wait.when(plan.order, step.tile):  # type: ignore[arg-type]
                continue
            if wait.all_peers:
                step.waits += [self._epoch_of(wait.signal, launch, peer) for peer in range(self.case.ranks)]
                continue
            index, required = wait.index(plan.order, step.tile), wait.required(plan.order, step.tile)  # type: ignore[arg-type]
            mask = self.words.get((launch, rank, wait.signal, index), 0)
            label = f"{wait.signal}[{index}] of rank {rank}"
            step.waits.append(Condition(mask, required, label, self.scopes[wait.signal] == "gpu"))
            if mask.bit_count() != required:
                self._find(f"{step.where} waits for {required} arrivals at {label}, but {mask.bit_count()} come")

    def _epoch_of(self, signal: str, launch: int, peer: int) -> Condition:
        """``signal`` of a peer has reached ``launch``: its enter step is done, or all its pushes are counted."""
        label = f"{signal}[{peer}] for launch {launch}"
        total = self.protocol.total_pushes(self.plans[launch, peer].order)
        if signal == "exit" and total > 0:
            return Condition(self.words.get((launch, peer, "pushes_done", 0), 0), total, label, False)
        return Condition(1 << self.enter[launch, peer], 1, label, False)

    def _check_pushes(self, launch: int, rank: int, plan: Plan) -> None:
        total = self.protocol.total_pushes(plan.order)
        pushes = self.words.get((launch, rank, "pushes_done", 0), 0).bit_count()
        if total != pushes:
            where = f"launch {launch} rank {rank}"
            self._find(f"{where}: exit[{rank}] waits for {total} arrivals at pushes_done[0], but {pushes} come")

    def _find(self, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)

    # -- accesses in order ---------------------------------------------------------------------------------------------

    def _order_accesses(self) -> None:
        """Turn versions into ``need``, ``forbid`` and conflicts, as masks of steps."""
        cells: dict[Cell, dict[Version, tuple[int, int]]] = {}
        for i, step in enumerate(self.steps):
            for accesses, which in ((step.writes, 0), (step.reads, 1)):
                for cell, version in accesses:
                    versions = cells.setdefault(cell, {})
                    masks = list(versions.get(version, (0, 0)))
                    masks[which] |= 1 << i
                    versions[version] = (masks[0], masks[1])
        self.cells = cells
        self.conflicts = [0] * len(self.steps)
        for cell, versions in cells.items():
            all_writers = all_readers = earlier = 0
            for writers, readers in versions.values():
                all_writers, all_readers = all_writers | writers, all_readers | readers
            later = all_writers
            for version in sorted(versions):
                writers, readers = versions[version]
                later &= ~writers
                first_counters = cell[0] == "counter set" and version == (1,)  # zeroed when they were allocated
                if writers.bit_count() != 1 and not first_counters:
                    self._find_writers(cell, version, writers, readers)
                for i in bits(readers):
                    self.steps[i].need |= writers & ~(1 << i)
                    self.steps[i].forbid |= later
                    self.conflicts[i] |= all_writers & ~(1 << i)
                for i in bits(writers):
                    self.steps[i].need |= earlier
                    self.conflicts[i] |= (all_writers | all_readers) & ~(1 << i)
                earlier |= writers | readers

    def _find_writers(self, cell: Cell, version: Version, writers: int, readers: int) -> None:
        step = self.steps[next(bits(writers | readers))]
        names = ", ".join(self.steps[i].where for i in bits(writers)) or "nobody"
        self._find(f"{step.where}: {text_of(cell)} of launch {version[0]} must have one writer, it has: {names}")

    def violation(self, index: int, done: int) -> str | None:
        """What is wrong with doing step ``index`` after exactly the steps ``done``."""
        step = self.steps[index]
        if step.need & ~done == 0 and step.forbid & done == 0:
            return None
        for access, accesses in (("read", step.reads), ("write", step.writes)):
            for cell, version in accesses:
                versions = self.cells[cell]
                for other_version in sorted(versions):
                    writers, readers = versions[other_version]
                    if access == "read" and other_version == version and writers & ~done:
                        other, kind, what = writers & ~done, "write", "reads {} before it is written by"
                    elif access == "read" and other_version > version and writers & done:
                        other, kind, what = writers & done, "write", "reads {} after it was overwritten by"
                        return self._tell(step, other, cell, what, step.announces or [f"exit[{step.rank}]"])
                    elif access == "write" and other_version < version and readers & ~done:
                        other, kind, what = readers & ~done, "read", "overwrites {} while it is still to be read by"
                    elif access == "write" and other_version < version and writers & ~done:
                        other, kind, what = writers & ~done, "write", "overwrites {} before it is written by"
                    else:
                        continue
                    first = self.steps[next(bits(other))]
                    signals = first.announces
                    if (cell[0], kind) in SYMMETRIC:
                        signals = [f"{SYMMETRIC[cell[0], kind]}[{first.rank}]"]
                    return self._tell(step, other, cell, what, signals)
        raise AssertionError("need and forbid come from these accesses")

    def _tell(self, step: Step, others: int, cell: Cell, what: str, signals: list[str]) -> str:
        other = self.steps[next(bits(others))]
        return f"{step.where} {what.format(text_of(cell))} {other.where}; not ordered by {' or '.join(signals)}"

    def unordered_conflicts(self) -> list[int]:
        """Per step, the conflicting steps that its waits and program order do not force behind it."""
        before = [step.after for step in self.steps]
        for i, step in enumerate(self.steps):
            for wait in step.waits:
                if wait.required >= wait.mask.bit_count():  # it needs every one of them
                    before[i] |= wait.mask
        changed = True
        while changed:
            changed = False
            for i, mask in enumerate(before):
                wider = mask
                for j in bits(mask):
                    wider |= before[j]
                if wider != mask:
                    before[i], changed = wider, True
        after = [0] * len(self.steps)
        for i, mask in enumerate(before):
            for j in bits(mask):
                after[j] |= 1 << i
        return [conflicts & ~behind for conflicts, behind in zip(self.conflicts, after, strict=True)]


def mask_of(steps: Iterable[int]) -> int:
    mask = 0
    for step in steps:
        mask |= 1 << step
    return mask


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def text_of(cell: Cell) -> str:
    return f"{cell[0]} of rank {cell[1]} [{', '.join(map(str, cell[2:]))}]"
