"""Tickets for a persistent grid: one counter in global memory hands out tasks in order (Hopper).

The scheduler warp draws a ticket, decodes it once for the whole CTA and hands the task to the load warp and the
consumer warps through one slot in shared memory. It is one task ahead of the consumers, so the ticket's latency is
hidden and no CTA hoards work at the end of the launch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from mok_cute.templates import records, signal
from mok_cute.templates.interface import Plan
from mok_cute.templates.lanes import Untouched
from mok_cute.templates.launch_args import PEER_SIGNAL_BYTES, PUSHES_DONE, SHARED_Y_DONE, TICKET, LaunchArgs
from mok_cute.templates.scheduler import order

# Words of a task slot.
KIND, OPERAND_BLOCK, COL, EXPERT, ROW_BLOCK, Z, LOAD_WORD, LOAD_REQUIRED, STORE_WORD, PUBLISH_WORD = range(10)
SLOT_WORDS = 16
NO_WORD = -1


class DeviceOps:
    """``order.HostOps`` for traced integers."""

    @staticmethod
    def where(condition, yes, no):
        if isinstance(condition, bool):
            return yes if condition else no
        return Int32(cutlass.select_(condition, Int32(yes), Int32(no)))

    @staticmethod
    def minimum(a, b):
        return DeviceOps.where(Int32(a) < Int32(b), a, b)

    @staticmethod
    def maximum(a, b):
        return DeviceOps.where(Int32(a) > Int32(b), a, b)


class Task(NamedTuple):
    """A task as the roles read it from the slot; see ``order.Tile``. Words are offsets into the counter set."""

    kind: Int32
    operand_block: Int32
    col: Int32
    expert: Int32
    row_block: Int32
    z: Int32
    load_word: Int32  # NO_WORD: nothing to wait for
    load_required: Int32
    store_word: Int32  # NO_WORD: the ring block is free
    publish_word: Int32


def read_slot(slot: cute.Pointer) -> Task:
    return Task(*(slot[i] for i in range(len(Task._fields))))


class DeviceOrder(Untouched, order.TaskOrder):
    """The task order over traced integers."""


def device_order(geometry: order.Geometry, a: LaunchArgs) -> DeviceOrder:
    """The task order of this launch, from counts in device memory."""
    num_tokens = signal.word_at(a.num_tokens)[0]
    routed_blocks = signal.word_at(a.num_rows)[0] // geometry.tile_rows
    return DeviceOrder(geometry, num_tokens, routed_blocks, a.minibatch_blocks, a.ring_minibatches, DeviceOps)


class PrefixTable(Untouched):
    """Local expert of a row block: binary search in ``expert_block_end``, copied to shared memory once per CTA."""

    def __init__(self, table: cute.Pointer, local_experts: int):
        self.table, self.local_experts = table, local_experts

    def end(self, expert):
        """First row block after ``expert``; 0 before expert 0."""
        value = self.table[DeviceOps.maximum(expert, 0)]
        return DeviceOps.where(expert < 0, 0, value)

    def expert_of(self, block):
        """The number of experts that end at or before ``block``: ``block``'s expert, if it has one."""
        found = Int32(0)
        step = 1 << (self.local_experts.bit_length() - 1)
        while step:
            candidate = found + step
            inside = candidate <= self.local_experts
            ends = self.table[DeviceOps.minimum(candidate, self.local_experts) - 1]
            found = DeviceOps.where(inside & (ends <= block), candidate, found)
            step //= 2
        return DeviceOps.minimum(found, self.local_experts - 1)


class TaskDecoder:
    """Task numbers to slots, for the scheduler warp of every machine: ``wait_words`` and ``publish_word`` are what the
    declared waits of ``order`` become on the device."""

    def __init__(self, plan: Plan):
        self.geometry, self.local_experts = plan.geometry, plan.local_experts

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def word_of(self, name: str, index, a: LaunchArgs):
        """Word offset of ``name[index]`` inside a counter set."""
        bases = {
            "x_routed_ready": a.x_routed_ready,
            "hidden_ready": a.hidden_ready,
            "shared_hidden_ready": a.shared_hidden_ready,
            "y_done": a.y_done,
            "pushes_done": Int32(PUSHES_DONE),
            "shared_y_done": Int32(SHARED_Y_DONE),
        }
        return bases[name] + index

    def wait_words(self, by: str, o: order.TaskOrder, t: order.Tile, a: LaunchArgs):
        """(word, required) of the wait that role ``by`` has before this tile; NO_WORD without one."""
        word, required = Int32(NO_WORD), Int32(0)
        for phase in order.GEMM_PHASES:
            for wait in phase.waits:
                if wait.by == by:
                    applies = t.kind == phase.kind
                    if wait.when is not None:
                        applies = applies & wait.when(o, t)
                    word = DeviceOps.where(applies, self.word_of(wait.signal, wait.index(o, t), a), word)
                    required = DeviceOps.where(applies, wait.required(o, t), required)
        return word, required

    def publish_word(self, o: order.TaskOrder, t: order.Tile, a: LaunchArgs):
        """Word of the first signal that a finished tile adds to (``down`` adds to pushes_done as well)."""
        word = Int32(NO_WORD)
        for phase in order.GEMM_PHASES:
            first = phase.publishes[0]
            word = DeviceOps.where(t.kind == phase.kind, self.word_of(first.signal, first.index(o, t), a), word)
        return word

    @cute.jit
    def may_reduce(self, a: LaunchArgs, counters: Int64, o: order.TaskOrder, control: signal.WaitControl) -> Int32:
        """Wait until all peers' pushes and this rank's shared expert are visible; 0 = gave up."""
        # signal exit[peer]          peers' last store warp -> this scheduler, between GPUs
        #   data     the combine rows that the peer pushed into this rank's symmetric memory
        #   before   every push is followed by an acquire-release addition to pushes_done; whoever completes the
        #            count has all of them behind it
        #   publish  a system-scope release of the epoch to every peer
        #   expect   this launch's epoch, from every peer
        #   wait     acquire at system scope; the slot's mbarrier then orders the consumers' plain loads
        #   reset    never: epochs only grow
        ok = Int32(1)
        lane = cute.arch.lane_idx()
        base = cute.make_ptr(Int64, a.peer_table, cutlass.AddressSpace.gmem, assumed_align=8)[a.rank]
        peer = lane
        while peer < a.ep_size:
            address = base + a.exit_offset + Int64(peer) * PEER_SIGNAL_BYTES
            got = signal.wait_at_least(
                address,
                control.epoch,
                control,
                Int32(records.ROLE_SCHEDULER),
                Int32(records.SIGNAL_CODE["exit"]),
                peer,
                True,
            )
            ok = ok & got
            peer += 32
        # signal shared_y_done       store warps of shared down tiles -> this scheduler, same GPU
        #   data     shared_y, stored by TMA
        #   before   the storing lane waits until its stores are complete, then a proxy fence
        #   publish  add 1 per store warp and tile, release at gpu scope
        #   expect   all shared down tiles
        #   wait     acquire at gpu scope; plain loads follow
        #   reset    by the next launch, which clears the set it does not use
        if const_expr(self.geometry.shared_down_cols > 0):
            required = o.shared_down_tasks * self.geometry.arrivals_per_tile
            got = signal.wait_at_least(
                counters + SHARED_Y_DONE * 4,
                required,
                control,
                Int32(records.ROLE_SCHEDULER),
                Int32(records.SIGNAL_CODE["shared_y_done"]),
                Int32(0),
                False,
            )
            ok = ok & got
        ok = Int32(cute.arch.vote_all_sync(ok != 0))
        cute.arch.sync_warp()  # a vote orders no memory: every lane's acquire comes before lane 0 fills the slot
        return ok

    @cute.jit
    def decode(
        self,
        a: LaunchArgs,
        counters: Int64,
        control: signal.WaitControl,
        o: DeviceOrder,
        table: PrefixTable,
        ticket: Int32,
        reduce_checked: Int32,  # 1: all pushes to this rank are known to be visible
    ) -> tuple[Task, Int32]:
        """The task with this number and ``reduce_checked`` for the next; END beyond the last, and for a reduce task
        whose wait gave up."""
        kind, operand_block, col, expert = Int32(order.END), Int32(0), Int32(0), Int32(0)
        row_block, z, publish = Int32(0), Int32(0), Int32(NO_WORD)
        load_word, load_required, store_word = Int32(NO_WORD), Int32(0), Int32(NO_WORD)
        if ticket < o.num_gemm_tasks:
            t = o.tile(ticket, table.expert_of, table.end)
            kind, operand_block, col, expert = t.kind, t.operand_block, t.col, t.expert
            row_block, z = t.row_block, t.z
            load_word, load_required = self.wait_words("load", o, t, a)
            store_word, _ = self.wait_words("store", o, t, a)
            publish = self.publish_word(o, t, a)
        if ticket >= o.num_gemm_tasks:
            if ticket < o.num_tasks:
                if reduce_checked == 0:
                    if self.may_reduce(a, counters, o, control) != 0:
                        reduce_checked = Int32(1)
                if reduce_checked != 0:
                    kind = Int32(order.REDUCE)
                    row_block = ticket - o.num_gemm_tasks
        task = Task(kind, operand_block, col, expert, row_block, z, load_word, load_required, store_word, publish)
        return task, reduce_checked

    @cute.jit
    def fill_slot(self, task: Task, slot: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, phase: Int32):
        """Hand a task to the other warps of this CTA."""
        cute.arch.mbarrier_wait(empty, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(task)):
                slot[i] = task[i]
            cute.arch.mbarrier_arrive(full)


class TicketScheduler(TaskDecoder):
    """The scheduler warp's program on Hopper."""

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        counters: Int64,
        control: signal.WaitControl,
        prefix: cute.Pointer,  # (local_experts,) i32 in shared memory
        slot: cute.Pointer,  # (SLOT_WORDS,) i32 in shared memory
        full: cute.Pointer,  # mbarrier: the slot holds a task; 1 arrival
        empty: cute.Pointer,  # mbarrier: load warp and consumer warps have read it
    ):
        o = device_order(self.geometry, a)
        table = PrefixTable(prefix, self.local_experts)
        lane = cute.arch.lane_idx()
        phase = Int32(0)
        reduce_checked = Int32(0)
        going = Boolean(True)
        while going:
            # Drawn before the slot is free: the next task is bound to this CTA while the present one runs.
            ticket = Int32(0)
            if lane == 0:
                ticket = cute.arch.atomic_add(
                    signal.word_at(counters + TICKET * 4), Int32(1), sem="relaxed", scope="gpu"
                )
            ticket = cute.arch.shuffle_sync(ticket, 0)
            task, reduce_checked = self.decode(a, counters, control, o, table, ticket, reduce_checked)
            if signal.stopped(control):
                task = task._replace(kind=Int32(order.END))
            self.fill_slot(task, slot, full, empty, phase)
            phase ^= 1
            going = task.kind != order.END
