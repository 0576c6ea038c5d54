"""The order of work of one forward launch, declared once as data.

Device decode, host sizes, the picture of ``explain``, the protocol model and the time model all read this file. It is
pure Python: the integers may be Python ints (host) or traced device integers, told apart only by ``ops``.

Two kinds of workers share a launch. *Communication workers* (the warps of the first ``comm_sms`` CTAs) walk the
dispatch groups in increasing order, worker ``w`` of ``W`` taking groups ``w, w + W, ...``, and then become compute
workers. *Compute workers* (CTAs) draw tickets from one counter: ticket ``t`` is task ``t`` of the order below.

    step 0        shared gate/up
    step 1        gate/up of the first minibatch          | shared down
    step i        gate/up of minibatch i-1 (in processing order) | down of minibatch i-1-lookahead
    last          reduce: the weighted sum over k, token by token

With ``lookahead`` 1 the down projection of a minibatch starts one whole minibatch after its gate/up tiles were
handed out, so that it never waits for tiles still in flight. A ring of a single minibatch cannot hold two, and then
``lookahead`` is 0.

Why this cannot deadlock: every wait of a task names tasks with a smaller ticket, or dispatch groups; every wait of a
dispatch group names tasks of a minibatch processed ``ring_minibatches`` earlier, whose own dispatch groups stand
earlier in every communication worker's list; tickets are drawn in increasing order and all CTAs are resident. So the
unfinished task or group that comes first always has what it waits for. ``mok_cute.protocol_model`` checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Int = Any  # a Python int on the host, a traced Int32 on the device


class HostOps:
    """The three operations that differ between Python ints and traced device integers."""

    @staticmethod
    def where(condition: Any, yes: Int, no: Int) -> Int:
        return yes if condition else no

    @staticmethod
    def minimum(a: Int, b: Int) -> Int:
        return min(a, b)

    @staticmethod
    def maximum(a: Int, b: Int) -> Int:
        return max(a, b)


# Task kinds, as the scheduler hands them to the other warps of its CTA.
END, SHARED_GATE_UP, GATE_UP, SHARED_DOWN, DOWN, REDUCE = range(6)


@dataclass(frozen=True)
class Geometry:
    """What a compile fixes about tasks: counts of column tiles and rows per unit of work. All static."""

    tile_rows: int  # rows of a GEMM tile, and the multiple that an expert's segment is padded to
    gate_up_cols: int  # column tiles of a routed gate/up row block
    down_cols: int  # column tiles of a down row block
    shared_gate_up_cols: int  # 0: no shared expert
    shared_down_cols: int  # 0: no shared expert
    arrivals_per_tile: int  # signals published per GEMM tile: one per store warp
    rows_per_dispatch_group: int  # divides tile_rows
    tokens_per_reduce: int
    raster_rows: int  # row blocks walked before the next column, so that a wave shares both operands in L2

    @property
    def dispatch_groups_per_block(self) -> int:
        return self.tile_rows // self.rows_per_dispatch_group


@dataclass(frozen=True)
class Tile:
    """One task, decoded. ``row_block`` counts blocks of ``tile_rows`` rows from the start of all routed rows (or of
    the tokens, for the shared expert); ``operand_block`` is where the A operand lies: the same block for tokens, the
    ring's block for routed rows. ``z`` is the minibatch's place in processing order."""

    kind: Int
    z: Int
    row_block: Int
    operand_block: Int
    col: Int
    expert: Int


@dataclass(frozen=True)
class Wait:
    """``signal[index]`` must reach ``required`` before ``by`` goes on. ``when`` is None for an unconditional wait."""

    signal: str
    by: str  # "load", "store", "scheduler" or "dispatch"
    index: Callable[[TaskOrder, Tile], Int]
    required: Callable[[TaskOrder, Tile], Int]
    when: Callable[[TaskOrder, Tile], Any] | None = None
    all_peers: bool = False  # one word per peer rank instead of one index


@dataclass(frozen=True)
class Publish:
    """``signal[index]`` grows by ``arrivals`` once the task's results are visible."""

    signal: str
    index: Callable[[TaskOrder, Tile], Int]
    arrivals: Callable[[TaskOrder], int]


@dataclass(frozen=True)
class Phase:
    """One kind of work: what it reads and writes, what it waits for, what it announces."""

    name: str
    kind: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    waits: tuple[Wait, ...]
    publishes: tuple[Publish, ...]


@dataclass(frozen=True)
class Signal:
    """A counter in global memory. ``scope`` is the memory scope of its release and acquire."""

    name: str
    scope: str  # "gpu": one rank; "sys": written by peers
    meaning: str


SIGNALS = (
    Signal("x_staged", "gpu", "communication warps that copied their share of x into symmetric memory"),
    Signal("entry", "sys", "per peer: its x is staged and it has left its previous launch (epoch)"),
    Signal("x_routed_ready", "gpu", "per minibatch: dispatch groups whose rows lie in the ring"),
    Signal("hidden_ready", "gpu", "per routed row block: store warps that finished a gate/up tile"),
    Signal("shared_hidden_ready", "gpu", "per token block: store warps that finished a shared gate/up tile"),
    Signal("y_done", "gpu", "per routed row block: store warps that pushed a down tile"),
    Signal("pushes_done", "gpu", "store warps that pushed a routed down tile, whole launch"),
    Signal("shared_y_done", "gpu", "store warps that finished a shared down tile, whole launch"),
    Signal("exit", "sys", "per peer: all its pushes of this launch are visible (epoch)"),
)


class TaskOrder:
    """The order for one launch: ``Geometry`` plus the run-time counts.

    num_tokens          tokens of this rank
    routed_blocks       row blocks of routed rows, padding included
    minibatch_blocks    row blocks per minibatch
    ring_minibatches    minibatches that the ring holds (macrobatch / minibatch)
    """

    def __init__(
        self,
        geometry: Geometry,
        num_tokens: Int,
        routed_blocks: Int,
        minibatch_blocks: Int,
        ring_minibatches: Int,
        ops: Any = HostOps,
    ) -> None:
        g = geometry
        self.geometry, self.ops = g, ops
        self.num_tokens, self.routed_blocks = num_tokens, routed_blocks
        self.minibatch_blocks, self.ring_minibatches = minibatch_blocks, ring_minibatches
        self.token_blocks = (num_tokens + (g.tile_rows - 1)) // g.tile_rows
        self.num_minibatches = (routed_blocks + (minibatch_blocks - 1)) // minibatch_blocks
        num_macrobatches = (self.num_minibatches + (ring_minibatches - 1)) // ring_minibatches
        # Macrobatches run last to first. The last one may hold fewer minibatches, and its last minibatch fewer rows.
        before_last = ops.maximum(num_macrobatches - 1, 0) * ring_minibatches
        self.first_minibatches = self.num_minibatches - before_last
        self.first_offset = before_last
        self.partial_z = ops.maximum(self.first_minibatches, 1) - 1
        self.partial_blocks = routed_blocks - ops.maximum(self.num_minibatches - 1, 0) * minibatch_blocks
        self.lookahead = ops.where(ring_minibatches > 1, 1, 0)
        self.shared_gate_up_tasks = self.token_blocks * g.shared_gate_up_cols
        self.shared_down_tasks = self.token_blocks * g.shared_down_cols
        self.num_gemm_tasks = (
            self.shared_gate_up_tasks + self.shared_down_tasks + routed_blocks * (g.gate_up_cols + g.down_cols)
        )
        self.num_reduce_tasks = (num_tokens + (g.tokens_per_reduce - 1)) // g.tokens_per_reduce
        self.num_tasks = self.num_gemm_tasks + self.num_reduce_tasks
        self.num_dispatch_groups = routed_blocks * g.dispatch_groups_per_block

    # -- minibatches in processing order ------------------------------------------------------------------------

    def blocks_before(self, z: Int) -> Int:
        """Row blocks of the first ``z`` minibatches in processing order (``z`` from 0 to num_minibatches)."""
        short = self.minibatch_blocks - self.partial_blocks
        return z * self.minibatch_blocks - self.ops.where(z > self.partial_z, short, 0)

    def blocks_of(self, z: Int) -> Int:
        return self.ops.where(z == self.partial_z, self.partial_blocks, self.minibatch_blocks)

    def minibatch(self, z: Int) -> Int:
        """The minibatch (in row order) that is processed as number ``z``."""
        ops, ring = self.ops, self.ring_minibatches
        later = ops.maximum(z - self.first_minibatches, 0)
        back = self.first_offset - (later // ring + 1) * ring + later % ring
        return ops.where(z < self.first_minibatches, self.first_offset + z, back)

    def first_block(self, z: Int) -> Int:
        return self.minibatch(z) * self.minibatch_blocks

    def ring_block(self, z: Int, block_in_minibatch: Int) -> Int:
        """Where a minibatch's block lies in the ring: slots follow processing order, so that a slot is free again
        exactly ``ring_minibatches`` later, also after a short last macrobatch."""
        return (z % self.ring_minibatches) * self.minibatch_blocks + block_in_minibatch

    def slot_was_used(self, t: Tile) -> Any:
        """Did an earlier minibatch of this launch use the ring block of tile ``t``?"""
        before = t.z - self.ring_minibatches
        block = t.row_block - self.first_block(t.z)
        used = self.ops.where(before >= 0, self.blocks_of(before), 0)
        return block < used

    def slot_user(self, t: Tile) -> Int:
        """The row block that used the ring block of ``t`` before, meaningful only when ``slot_was_used``."""
        before = self.ops.maximum(t.z - self.ring_minibatches, 0)
        return self.first_block(before) + (t.row_block - self.first_block(t.z))

    # -- tickets --------------------------------------------------------------------------------------------------

    def _up_before(self, i: Int) -> Int:
        """Gate/up tasks of units 0 .. i-1; unit 0 is the shared expert, unit i is minibatch i-1."""
        z = self.ops.minimum(self.ops.maximum(i - 1, 0), self.num_minibatches)
        routed = self.blocks_before(z) * self.geometry.gate_up_cols
        return self.ops.where(i > 0, self.shared_gate_up_tasks + routed, 0)

    def _down_before(self, i: Int) -> Int:
        z = self.ops.minimum(self.ops.maximum(i - 1, 0), self.num_minibatches)
        routed = self.blocks_before(z) * self.geometry.down_cols
        return self.ops.where(i > 0, self.shared_down_tasks + routed, 0)

    def step_start(self, i: Int) -> Int:
        """First ticket of step ``i``: gate/up of unit ``i``, then down of unit ``i - lookahead``."""
        return self._up_before(i) + self._down_before(i - self.lookahead)

    def locate(self, ticket: Int) -> tuple[Int, Int, Int]:
        """GEMM ticket -> (kind, z, number within that phase of that minibatch)."""
        ops, g = self.ops, self.geometry
        per_step = self.minibatch_blocks * (g.gate_up_cols + g.down_cols)
        head = self.shared_gate_up_tasks + self.shared_down_tasks + self.minibatch_blocks * g.gate_up_cols
        # A lower bound of the step; a short minibatch and the head move it by at most three.
        beyond = ops.maximum(ticket - head, 0) // per_step
        step = ops.where(ticket >= head, beyond + 1 + self.lookahead, 0)
        for _ in range(3):
            step = ops.where(self.step_start(step + 1) <= ticket, step + 1, step)
        number = ticket - self.step_start(step)
        ups = self._up_before(step + 1) - self._up_before(step)
        is_up = number < ups
        unit = ops.where(is_up, step, step - self.lookahead)
        number = ops.where(is_up, number, number - ups)
        kind = ops.where(
            is_up,
            ops.where(unit == 0, SHARED_GATE_UP, GATE_UP),
            ops.where(unit == 0, SHARED_DOWN, DOWN),
        )
        return kind, ops.maximum(unit - 1, 0), number

    def raster(self, rows: Int, cols: Int, number: Int) -> tuple[Int, Int]:
        """Number within a ``rows`` x ``cols`` grid of tiles -> (row, column): columns of up to ``raster_rows`` rows,
        so that tiles in flight together share both operands."""
        ops, height = self.ops, self.geometry.raster_rows
        group = number // (height * cols)
        inside = number - group * (height * cols)
        tall = ops.maximum(ops.minimum(rows - group * height, height), 1)
        col = inside // tall
        return group * height + (inside - col * tall), col

    def tile(self, ticket: Int, expert_of_block: Callable[[Int], Int], block_end: Callable[[Int], Int]) -> Tile:
        """GEMM ticket -> Tile. ``expert_of_block(row block)`` finds the local expert; ``block_end(e)`` is the first
        row block after expert ``e`` (0 for ``e`` = -1)."""
        ops, g = self.ops, self.geometry
        kind, z, number = self.locate(ticket)
        is_up = (kind == GATE_UP) | (kind == SHARED_GATE_UP)
        is_shared = (kind == SHARED_GATE_UP) | (kind == SHARED_DOWN)
        cols = ops.where(is_up, g.gate_up_cols, g.down_cols)
        shared_cols = ops.where(is_up, g.shared_gate_up_cols, g.shared_down_cols)
        cols = ops.where(is_shared, shared_cols, cols)
        # Routed: the blocks of one expert inside the minibatch form a grid of their own.
        first = self.first_block(z)
        last = first + self.blocks_of(z)
        probe = ops.where(is_shared, 0, first + number // cols)
        expert = expert_of_block(probe)
        lower = ops.maximum(block_end(expert - 1), first)
        upper = ops.minimum(block_end(expert), last)
        rows = ops.where(is_shared, self.token_blocks, upper - lower)
        number = ops.where(is_shared, number, number - (lower - first) * cols)
        row, col = self.raster(rows, cols, number)
        row_block = ops.where(is_shared, row, lower + row)
        operand_block = ops.where(is_shared, row, self.ring_block(z, row_block - first))
        return Tile(kind, z, row_block, operand_block, col, ops.where(is_shared, 0, expert))

    def dispatch_group(self, group: Int) -> tuple[Int, Int, Int]:
        """Dispatch group -> (z, row block, first row inside the block)."""
        ops, per_block = self.ops, self.geometry.dispatch_groups_per_block
        block = group // per_block
        # Without a short minibatch this is exact; a short one before ``block`` can only make z one larger.
        z = block // self.minibatch_blocks
        z = ops.where(self.blocks_before(z + 1) <= block, z + 1, z)
        inside = block - self.blocks_before(z)
        row = (group - block * per_block) * self.geometry.rows_per_dispatch_group
        return z, self.first_block(z) + inside, row

    def dispatch_groups_of(self, z: Int) -> Int:
        return self.blocks_of(z) * self.geometry.dispatch_groups_per_block


def _zero(_order: TaskOrder, _tile: Tile) -> Int:
    return 0


def _row_block(_order: TaskOrder, tile: Tile) -> Int:
    return tile.row_block


def _per_tile(order: TaskOrder) -> int:
    return order.geometry.arrivals_per_tile


# Epoch-valued signals: the value of ``entry`` and ``exit`` is the number of the launch, never a count.
EPOCH = _zero

DISPATCH = Phase(
    name="dispatch",
    kind=END,
    reads=("x of the owner rank",),
    writes=("x_ring",),
    waits=(
        Wait("entry", "dispatch", _zero, EPOCH, all_peers=True),
        # The ring block is free for x once every gate/up tile that read it has finished.
        Wait(
            "hidden_ready",
            "dispatch",
            index=lambda o, t: o.slot_user(t),
            required=lambda o, t: o.geometry.arrivals_per_tile * o.geometry.gate_up_cols,
            when=lambda o, t: o.slot_was_used(t),
        ),
    ),
    publishes=(Publish("x_routed_ready", lambda o, t: t.z, lambda o: 1),),
)

GEMM_PHASES = (
    Phase(
        name="shared_gate_up",
        kind=SHARED_GATE_UP,
        reads=("x",),
        writes=("shared_hidden",),
        waits=(),
        publishes=(Publish("shared_hidden_ready", _row_block, _per_tile),),
    ),
    Phase(
        name="gate_up",
        kind=GATE_UP,
        reads=("x_ring",),
        writes=("hidden_ring",),
        waits=(
            Wait("x_routed_ready", "load", lambda o, t: t.z, lambda o, t: o.dispatch_groups_of(t.z)),
            # The ring block is free for hidden once every down tile that read it has finished.
            Wait(
                "y_done",
                "store",
                index=lambda o, t: o.slot_user(t),
                required=lambda o, t: o.geometry.arrivals_per_tile * o.geometry.down_cols,
                when=lambda o, t: o.slot_was_used(t),
            ),
        ),
        publishes=(Publish("hidden_ready", _row_block, _per_tile),),
    ),
    Phase(
        name="shared_down",
        kind=SHARED_DOWN,
        reads=("shared_hidden",),
        writes=("shared_y",),
        waits=(
            Wait(
                "shared_hidden_ready",
                "load",
                _row_block,
                lambda o, t: o.geometry.arrivals_per_tile * o.geometry.shared_gate_up_cols,
            ),
        ),
        publishes=(Publish("shared_y_done", _zero, _per_tile),),
    ),
    Phase(
        name="down",
        kind=DOWN,
        reads=("hidden_ring",),
        writes=("combine of the owner rank",),
        waits=(
            Wait(
                "hidden_ready",
                "load",
                _row_block,
                lambda o, t: o.geometry.arrivals_per_tile * o.geometry.gate_up_cols,
            ),
        ),
        publishes=(Publish("y_done", _row_block, _per_tile), Publish("pushes_done", _zero, _per_tile)),
    ),
)

REDUCE_PHASE = Phase(
    name="reduce",
    kind=REDUCE,
    reads=("combine", "shared_y"),
    writes=("y",),
    waits=(
        Wait("exit", "scheduler", _zero, EPOCH, all_peers=True),
        Wait(
            "shared_y_done",
            "scheduler",
            _zero,
            lambda o, t: o.geometry.arrivals_per_tile * o.shared_down_tasks,
        ),
    ),
    publishes=(),
)

PHASES = (DISPATCH, *GEMM_PHASES, REDUCE_PHASE)


def total_pushes(order: TaskOrder) -> Int:
    """Value of ``pushes_done`` at which a rank tells its peers that all its pushes are visible."""
    return order.geometry.arrivals_per_tile * order.routed_blocks * order.geometry.down_cols
