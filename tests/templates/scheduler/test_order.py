"""The task order on the host, against an enumeration that knows nothing of its formulas."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.order import DOWN, GATE_UP, SHARED_DOWN, SHARED_GATE_UP, Geometry, TaskOrder, Tile


@dataclass(frozen=True)
class Sizes:
    geometry: Geometry
    num_tokens: int
    blocks_per_expert: tuple[int, ...]
    minibatch_blocks: int
    ring_minibatches: int

    @property
    def routed_blocks(self) -> int:
        return sum(self.blocks_per_expert)

    @property
    def block_end(self) -> list[int]:
        return [sum(self.blocks_per_expert[: e + 1]) for e in range(len(self.blocks_per_expert))]

    def order(self) -> TaskOrder:
        counts = (self.num_tokens, self.routed_blocks, self.minibatch_blocks, self.ring_minibatches)
        return TaskOrder(self.geometry, *counts)

    def tile(self, o: TaskOrder, ticket: int) -> Tile:
        ends = self.block_end
        return o.tile(
            ticket,
            lambda block: min(bisect.bisect_right(ends, block), len(ends) - 1),
            lambda e: ends[e] if e >= 0 else 0,
        )

    def tiles(self) -> list[Tile]:
        o = self.order()
        return [self.tile(o, ticket) for ticket in range(o.num_gemm_tasks)]


def geometry(gate_up: int = 2, down: int = 3, shared: int = 1, raster: int = 2, group: int = 8) -> Geometry:
    return Geometry(128, gate_up, down, shared, down if shared else 0, 2, group, 8, raster)


TINY = Sizes(geometry(), num_tokens=200, blocks_per_expert=(2, 0, 3, 2), minibatch_blocks=2, ring_minibatches=2)


@st.composite
def any_sizes(draw: st.DrawFn) -> Sizes:
    g = geometry(
        gate_up=draw(st.integers(1, 4)),
        down=draw(st.integers(1, 4)),
        shared=draw(st.integers(0, 3)),
        raster=draw(st.integers(1, 5)),
        group=draw(st.sampled_from((8, 32, 128))),
    )
    g = replace(g, arrivals_per_tile=draw(st.integers(1, 2)), tokens_per_reduce=draw(st.integers(1, 9)))
    blocks = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)))
    tokens = draw(st.sampled_from((0, 1, 7, 127, 128, 129, 500)))
    return Sizes(g, tokens, blocks, draw(st.integers(1, 5)), draw(st.integers(1, 4)))


# -- the enumeration: lists of row blocks, cut and reordered -----------------------------------------------------------


def minibatches_in_order(s: Sizes) -> list[list[int]]:
    """Row blocks of each minibatch, in processing order: macrobatches last to first, minibatches first to last."""
    blocks, m, ring = list(range(s.routed_blocks)), s.minibatch_blocks, s.ring_minibatches
    macrobatches = [blocks[i : i + m * ring] for i in range(0, len(blocks), m * ring)]
    return [macro[i : i + m] for macro in reversed(macrobatches) for i in range(0, len(macro), m)]


def expected_steps(s: Sizes) -> list[list[tuple[int, int]]]:
    """Phases as (kind, z) in the order of the picture in ``order``, one list per step."""
    ups = [(SHARED_GATE_UP, 0)] + [(GATE_UP, z) for z in range(len(minibatches_in_order(s)))]
    downs = [(SHARED_DOWN, 0)] + [(DOWN, z) for z in range(len(ups) - 1)]
    behind = 1 if s.ring_minibatches > 1 else 0
    steps: list[list[tuple[int, int]]] = [[] for _ in range(len(ups) + behind)]
    for i, up in enumerate(ups):
        steps[i].append(up)
    for i, down in enumerate(downs):
        steps[i + behind].append(down)
    return steps


def expected_tiles(s: Sizes) -> list[set[tuple[int, int, int, int, int]]]:
    """(kind, z, row block, column, expert) of each phase, in order; inside a phase the raster may order them."""
    g, minibatches = s.geometry, minibatches_in_order(s)
    owner = [e for e, n in enumerate(s.blocks_per_expert) for _ in range(n)]
    cols = {
        SHARED_GATE_UP: g.shared_gate_up_cols,
        SHARED_DOWN: g.shared_down_cols,
        GATE_UP: g.gate_up_cols,
        DOWN: g.down_cols,
    }
    phases = []
    for step in expected_steps(s):
        for kind, z in step:
            if kind in (SHARED_GATE_UP, SHARED_DOWN):
                rows = [(b, 0) for b in range(-(-s.num_tokens // g.tile_rows))]
            else:
                rows = [(b, owner[b]) for b in minibatches[z]]
            phases.append({(kind, z, b, col, e) for b, e in rows for col in range(cols[kind])})
    return phases


# -- every task, once, where it belongs --------------------------------------------------------------------------------


@given(any_sizes())
@example(TINY)
@example(Sizes(geometry(), 0, (0, 0), 1, 1))
@example(Sizes(geometry(), 0, (3,), 1, 1))
@example(Sizes(geometry(shared=0), 300, (0,), 2, 2))
@settings(max_examples=300, deadline=None)
def test_tickets_enumerate_the_phases_in_order_each_tile_once(s: Sizes):
    tiles, start = s.tiles(), 0
    for phase in expected_tiles(s):
        part = tiles[start : start + len(phase)]
        assert {(t.kind, t.z, t.row_block, t.col, t.expert) for t in part} == phase
        start += len(phase)
    assert start == len(tiles)


@given(any_sizes())
@settings(max_examples=100, deadline=None)
def test_counts_equal_the_enumeration(s: Sizes):
    o, g, minibatches = s.order(), s.geometry, minibatches_in_order(s)
    phases = expected_tiles(s)
    assert o.num_minibatches == len(minibatches)
    assert o.num_gemm_tasks == sum(map(len, phases))
    assert o.num_tasks - o.num_gemm_tasks == o.num_reduce_tasks == -(-s.num_tokens // g.tokens_per_reduce)
    downs = [t for phase in phases for t in phase if t[0] == DOWN]
    assert order.total_pushes(o) == g.arrivals_per_tile * len(downs)
    for i in range(len(expected_steps(s))):
        before = [t for previous in expected_steps(s)[:i] for t in previous]
        assert o.step_start(i) == sum(len(p) for p in phases if p and (min(p)[0], min(p)[1]) in before)


@given(any_sizes())
@settings(max_examples=200, deadline=None)
def test_minibatches_run_in_the_order_of_the_enumeration(s: Sizes):
    o, minibatches = s.order(), minibatches_in_order(s)
    for z, blocks in enumerate(minibatches):
        assert o.first_block(z) == blocks[0]
        assert o.minibatch(z) == blocks[0] // s.minibatch_blocks
        assert o.blocks_of(z) == len(blocks)
        assert o.blocks_before(z) == sum(map(len, minibatches[:z]))
    assert o.blocks_before(len(minibatches)) == s.routed_blocks


@given(any_sizes())
@settings(max_examples=100, deadline=None)
def test_rows_of_the_first_macrobatch_are_processed_last(s: Sizes):
    o, first_macrobatch = s.order(), s.minibatch_blocks * s.ring_minibatches
    done = [t.row_block for t in s.tiles() if t.kind == GATE_UP and t.col == 0]
    expected = min(first_macrobatch, s.routed_blocks)
    assert sorted(done[len(done) - expected :]) == list(range(expected))
    # ... and at the end each block of it lies in the ring where its row says, so that it can be kept.
    for t in s.tiles():
        if t.kind == GATE_UP and t.row_block < first_macrobatch:
            slot_user = [u for u in s.tiles() if u.kind == GATE_UP and u.operand_block == t.operand_block]
            assert slot_user[-1].row_block == t.row_block
    assert o.num_minibatches == 0 or o.minibatch(o.num_minibatches - 1) < s.ring_minibatches


@given(any_sizes())
@settings(max_examples=100, deadline=None)
def test_raster_covers_its_grid_and_walks_down_columns(s: Sizes):
    o, height = s.order(), s.geometry.raster_rows
    for rows in range(1, 12):
        for cols in range(1, 5):
            walked = [o.raster(rows, cols, n) for n in range(rows * cols)]
            assert sorted(walked) == [(r, c) for r in range(rows) for c in range(cols)]
            for (r0, c0), (r1, c1) in itertools.pairwise(walked):
                same_strip = r0 // height == r1 // height
                assert (c1, r1) > (c0, r0) if same_strip else r1 // height == r0 // height + 1


# -- waits -------------------------------------------------------------------------------------------------------------


def waits_of(kind: int, by: str) -> list[order.Wait]:
    return [w for p in order.GEMM_PHASES if p.kind == kind for w in p.waits if w.by == by]


@given(any_sizes())
@settings(max_examples=200, deadline=None)
def test_every_wait_names_only_smaller_tickets_and_all_of_their_arrivals(s: Sizes):
    o, tiles = s.order(), s.tiles()
    arrivals: dict[tuple[str, int], list[int]] = {}  # ticket of each arrival
    for ticket, t in enumerate(tiles):
        for phase in order.GEMM_PHASES:
            if phase.kind == t.kind:
                for publish in phase.publishes:
                    at = arrivals.setdefault((publish.signal, publish.index(o, t)), [])
                    at += [ticket] * publish.arrivals(o)
    for ticket, t in enumerate(tiles):
        for by in ("load", "store"):
            for wait in waits_of(t.kind, by):
                if wait.signal == "x_routed_ready" or (wait.when is not None and not wait.when(o, t)):
                    continue
                found = arrivals[wait.signal, wait.index(o, t)]
                assert len(found) == wait.required(o, t)
                assert max(found) < ticket
    shared_y = arrivals.get(("shared_y_done", 0), [])
    nothing = Tile(order.REDUCE, 0, 0, 0, 0, 0)
    reduce_wait = next(w for w in order.REDUCE_PHASE.waits if w.signal == "shared_y_done")
    assert len(shared_y) == reduce_wait.required(o, nothing)
    assert len(arrivals.get(("pushes_done", 0), [])) == order.total_pushes(o)


@given(any_sizes())
@settings(max_examples=200, deadline=None)
def test_guards_name_the_last_user_of_the_ring_block(s: Sizes):
    o, last_user = s.order(), dict[int, int]()
    for z, blocks in enumerate(minibatches_in_order(s)):
        for i, block in enumerate(blocks):
            slot = o.ring_block(z, i)
            assert 0 <= slot < s.minibatch_blocks * s.ring_minibatches
            t = Tile(GATE_UP, z, block, slot, 0, 0)
            assert bool(o.slot_was_used(t)) == (slot in last_user)
            if slot in last_user:
                assert o.slot_user(t) == last_user[slot]
            last_user[slot] = block


@given(any_sizes())
@settings(max_examples=200, deadline=None)
def test_a_ring_block_is_not_handed_out_again_before_its_readers(s: Sizes):
    """In ticket order: gate/up writes a hidden block only after down has read what lay there before."""
    holds: dict[int, int] = {}
    downs_left: dict[int, int] = {}
    for t in s.tiles():
        if t.kind == GATE_UP:
            previous = holds.get(t.operand_block)
            if previous is not None and previous != t.row_block:
                assert downs_left[previous] == 0
            holds[t.operand_block] = t.row_block
            downs_left.setdefault(t.row_block, s.geometry.down_cols)
        if t.kind == DOWN:
            assert holds[t.operand_block] == t.row_block
            downs_left[t.row_block] -= 1
    assert not any(downs_left.values())


@given(any_sizes())
@settings(max_examples=100, deadline=None)
def test_down_follows_one_whole_minibatch_behind_unless_the_ring_holds_one(s: Sizes):
    o, tiles, count = s.order(), s.tiles(), len(minibatches_in_order(s))
    first_down = {t.z: n for n, t in reversed(list(enumerate(tiles))) if t.kind == DOWN}
    last_up = {t.z: n for n, t in enumerate(tiles) if t.kind == GATE_UP}
    assert o.lookahead == (s.ring_minibatches > 1)
    for z in range(count):
        assert first_down[z] > last_up[min(z + o.lookahead, count - 1)]
        if z + o.lookahead + 1 < count:
            assert first_down[z] < last_up[z + o.lookahead + 1]


# -- dispatch ----------------------------------------------------------------------------------------------------------


@given(any_sizes())
@settings(max_examples=200, deadline=None)
def test_dispatch_groups_cover_all_rows_in_processing_order(s: Sizes):
    o, g = s.order(), s.geometry
    expected = [
        (z, block, row)
        for z, blocks in enumerate(minibatches_in_order(s))
        for block in blocks
        for row in range(0, g.tile_rows, g.rows_per_dispatch_group)
    ]
    assert [o.dispatch_group(n) for n in range(o.num_dispatch_groups)] == expected
    for z in range(o.num_minibatches):
        assert o.dispatch_groups_of(z) == sum(group[0] == z for group in expected)


@given(any_sizes())
@settings(max_examples=100, deadline=None)
def test_dispatch_waits_only_for_minibatches_dispatched_a_whole_ring_earlier(s: Sizes):
    o, guard = s.order(), order.DISPATCH.waits[1]
    z_of = {block: z for z, blocks in enumerate(minibatches_in_order(s)) for block in blocks}
    for n in range(o.num_dispatch_groups):
        z, block, _ = o.dispatch_group(n)
        t = Tile(order.END, z, block, 0, 0, 0)
        if guard.when(o, t):  # type: ignore[misc]
            assert z_of[guard.index(o, t)] == z - s.ring_minibatches
            assert guard.required(o, t) == s.geometry.arrivals_per_tile * s.geometry.gate_up_cols


# -- the declaration itself --------------------------------------------------------------------------------------------


def test_phases_use_only_declared_signals_and_each_kind_once():
    declared = {signal.name for signal in order.SIGNALS}
    used = {w.signal for p in order.PHASES for w in p.waits} | {b.signal for p in order.PHASES for b in p.publishes}
    assert used <= declared
    assert declared - used == {"x_staged"}  # inside dispatch's entry: see the communication workers
    assert len({p.kind for p in order.PHASES}) == len(order.PHASES)
    assert len({p.name for p in order.PHASES}) == len(order.PHASES)
    assert {w.by for p in order.PHASES for w in p.waits} == {"load", "store", "scheduler", "dispatch"}


def test_only_signals_between_ranks_have_system_scope():
    across = {w.signal for p in order.PHASES for w in p.waits if w.all_peers}
    assert {s.name for s in order.SIGNALS if s.scope == "sys"} == across == {"entry", "exit"}


def test_the_device_reads_at_most_one_wait_per_phase_and_warp_role():
    for phase in order.GEMM_PHASES:
        roles = [w.by for w in phase.waits]
        assert len(roles) == len(set(roles)), phase.name


@dataclass(frozen=True, eq=False)
class TracingInt:
    """An int whose comparisons cannot steer Python's control flow, as a traced integer's cannot."""

    value: int

    def __int__(self) -> int:
        return self.value

    def __add__(self, other: Number) -> TracingInt:
        return TracingInt(self.value + int(other))

    def __sub__(self, other: Number) -> TracingInt:
        return TracingInt(self.value - int(other))

    def __rsub__(self, other: Number) -> TracingInt:
        return TracingInt(int(other) - self.value)

    def __mul__(self, other: Number) -> TracingInt:
        return TracingInt(self.value * int(other))

    def __floordiv__(self, other: Number) -> TracingInt:
        assert self.value >= 0, "device division rounds towards zero: the numerator must not be negative"
        return TracingInt(self.value // int(other))

    def __mod__(self, other: Number) -> TracingInt:
        assert self.value >= 0, "a device remainder has the sign of the numerator, which must not be negative"
        return TracingInt(self.value % int(other))

    def __lt__(self, other: Number) -> TracingBool:
        return TracingBool(self.value < int(other))

    def __le__(self, other: Number) -> TracingBool:
        return TracingBool(self.value <= int(other))

    def __gt__(self, other: Number) -> TracingBool:
        return TracingBool(self.value > int(other))

    def __ge__(self, other: Number) -> TracingBool:
        return TracingBool(self.value >= int(other))

    def __eq__(self, other: object) -> TracingBool:  # type: ignore[override]
        assert isinstance(other, (int, TracingInt))
        return TracingBool(self.value == int(other))

    __radd__, __rmul__ = __add__, __mul__


Number = int | TracingInt


class TracingBool:
    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        raise AssertionError("a traced condition steers Python control flow")

    def __or__(self, other: TracingBool) -> TracingBool:
        return TracingBool(self.value or other.value)

    def __and__(self, other: TracingBool) -> TracingBool:
        return TracingBool(self.value and other.value)


class TracingOps:
    @staticmethod
    def where(condition: TracingBool | bool, yes: Number, no: Number) -> TracingInt:
        value = condition.value if isinstance(condition, TracingBool) else condition
        return TracingInt(int(yes if value else no))

    @staticmethod
    def minimum(a: Number, b: Number) -> TracingInt:
        return TracingInt(min(int(a), int(b)))

    @staticmethod
    def maximum(a: Number, b: Number) -> TracingInt:
        return TracingInt(max(int(a), int(b)))


@pytest.mark.parametrize(
    "s",
    [
        TINY,
        Sizes(geometry(), 129, (1, 4), 2, 1),
        Sizes(geometry(shared=0), 5, (3, 0, 6), 1, 3),
        Sizes(geometry(), 0, (5,), 3, 2),
    ],
)
def test_traced_integers_decode_alike_without_control_flow_or_negative_division(s: Sizes):
    tokens, blocks = TracingInt(s.num_tokens), TracingInt(s.routed_blocks)
    traced = TaskOrder(
        s.geometry, tokens, blocks, TracingInt(s.minibatch_blocks), TracingInt(s.ring_minibatches), TracingOps
    )
    o, ends = s.order(), s.block_end
    for ticket in range(o.num_gemm_tasks):
        tile = traced.tile(
            TracingInt(ticket),
            lambda block: TracingInt(min(bisect.bisect_right(ends, int(block)), len(ends) - 1)),
            lambda e: TracingInt(ends[int(e)] if int(e) >= 0 else 0),
        )
        host = s.tile(o, ticket)
        assert [int(v) for v in vars(tile).values()] == [int(v) for v in vars(host).values()]
        for kind in (GATE_UP, DOWN, SHARED_DOWN):
            for by in ("load", "store"):
                for wait in waits_of(kind, by):
                    assert int(wait.index(traced, tile)) == wait.index(o, host)
                    assert int(wait.required(traced, tile)) == wait.required(o, host)
                    if wait.when is not None:
                        assert wait.when(traced, tile).value == wait.when(o, host)
    for group in range(o.num_dispatch_groups):
        assert tuple(map(int, traced.dispatch_group(TracingInt(group)))) == o.dispatch_group(group)
