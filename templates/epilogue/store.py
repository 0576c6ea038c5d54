"""From accumulators to global memory: the writers of a 64-row part of a tile hand chunks to their store warp.

The writers round their accumulators to bf16, put a chunk (64 rows x 64 columns) into one of two buffers in shared
memory, add a message saying what the chunk is, and go on to their next tile. Their store warp moves the chunk: by TMA
to a matrix of this rank, or row by row to the owners (combine). So waiting for stores never stops the MMA.

| pipeline | producer                     | consumer        | arrivals per phase |
|----------|------------------------------|-----------------|--------------------|
| chunk    | the writers of one part      | its store warp  | full: every writing thread (128, tcgen05: 64); empty: 1 |

A CTA has two parts: the two consumer warpgroups of wgmma, or the two halves of the epilogue warps of tcgen05.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from mok_cute.templates import records, registry, signal
from mok_cute.templates.arch.tiles import tile_modes
from mok_cute.templates.interface import Accumulators, Plan
from mok_cute.templates.lanes import Untouched
from mok_cute.templates.launch_args import PUSHES_DONE, LaunchArgs
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import NO_WORD, Task, device_order

# What a chunk is. FINISHED ends the store warp.
FINISHED, TO_HIDDEN, TO_SHARED_HIDDEN, TO_SAVED_GATE, TO_SAVED_UP, TO_SHARED_Y, TO_OWNERS = range(7)
MATRIX_OF = {
    TO_HIDDEN: "hidden_ring",
    TO_SHARED_HIDDEN: "shared_hidden",
    TO_SAVED_GATE: "saved_gate",
    TO_SAVED_UP: "saved_up",
    TO_SHARED_Y: "shared_y",
}
MESSAGE_WORDS = 8
BUFFERS = 2
CHUNK_ROWS = 64
PARTS = 2  # of a CTA, each with a store warp


class Message(NamedTuple):
    target: Int32
    row_tile: Int32  # 64-row tile of the target matrix (TO_OWNERS: of the routed rows)
    col_tile: Int32  # 64-column tile
    store_word: Int32  # wait before the first store of a tile; NO_WORD: none
    publish_word: Int32  # add 1 after the last store of a tile; NO_WORD: not the last chunk
    row_block: Int32  # for reports


class Chunks(Untouched):
    """One part's two buffers and their barriers."""

    def __init__(self, full: cute.Pointer, empty: cute.Pointer, messages: cute.Pointer):
        self.full, self.empty, self.messages = full, empty, messages  # BUFFERS each


def chunks_of(s: Any, part: Int32) -> Chunks:
    """A part's share of ``storage.Storage``."""
    first = part * BUFFERS
    return Chunks(s.chunk_full + first, s.chunk_empty + first, s.messages + first * MESSAGE_WORDS)


class Epilogue:
    """The writers' side: arithmetic on the accumulators, then chunks of bf16 into shared memory."""

    def __init__(self, plan: Plan):
        self.activation = registry.make(plan, "activation")
        self.tile_cols, self.out_cols = plan.config.down_cols, plan.config.out_cols
        self.parts_per_block = plan.config.tile_rows // CHUNK_ROWS

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def hand_over(
        self,
        tile: Accumulators,
        chunk: Any,  # what ``tile`` made of 64 columns
        buffer: cutlass.Constexpr,
        chunks: Chunks,
        parity: Int32,  # of the buffers' present phase
        message: Message,
        thread: Int32,  # among the writers of the part
    ):
        cute.arch.mbarrier_wait(chunks.empty + buffer, parity ^ 1)
        tile.put(chunk, buffer)
        cute.arch.fence_view_async_shared()  # the store warp's TMA reads what these threads wrote
        if thread == 0:
            words = chunks.messages + buffer * MESSAGE_WORDS
            for i in cutlass.range_constexpr(len(message)):
                words[i] = message[i]
        cute.arch.mbarrier_arrive(chunks.full + buffer)

    @cute.jit
    def run(
        self,
        tile: Accumulators,
        task: Task,
        chunks: Chunks,
        parity: Int32,
        thread: Int32,
        part: Int32,  # which 64 rows of the tile these writers have
        save: Boolean,  # this tile belongs to the saved context
    ) -> Int32:
        """Hand over one tile; returns the parity for the next. Every tile is an even number of chunks."""
        row_tile = task.row_block * self.parts_per_block + part
        ring_tile = task.operand_block * self.parts_per_block + part
        is_down = (task.kind == order.DOWN) | (task.kind == order.SHARED_DOWN)
        tile.begin()
        if is_down:
            target, rows = Int32(TO_OWNERS), row_tile
            if task.kind == order.SHARED_DOWN:
                target = Int32(TO_SHARED_Y)
            count = self.tile_cols // self.out_cols
            for c in cutlass.range_constexpr(count):
                last = c == count - 1
                message = Message(
                    target,
                    rows,
                    task.col * count + c,
                    Int32(NO_WORD),
                    task.publish_word if const_expr(last) else Int32(NO_WORD),
                    task.row_block,
                )
                self.hand_over(tile, tile.columns(c), c % 2, chunks, parity, message, thread)
                if const_expr(c % 2 == 1):
                    parity ^= 1
        else:
            # The activation sees gate and up as bf16, as they would be saved and replayed.
            tile.activate(self.activation)
            target = Int32(TO_HIDDEN)
            if task.kind == order.SHARED_GATE_UP:
                target = Int32(TO_SHARED_HIDDEN)
            count = self.tile_cols // 2 // self.out_cols
            for c in cutlass.range_constexpr(count):
                last = c == count - 1
                message = Message(
                    target,
                    ring_tile,
                    task.col * count + c,
                    task.store_word if const_expr(c == 0) else Int32(NO_WORD),
                    task.publish_word if const_expr(last) else Int32(NO_WORD),
                    task.row_block,
                )
                self.hand_over(tile, tile.hidden(c), c % 2, chunks, parity, message, thread)
                if const_expr(c % 2 == 1):
                    parity ^= 1
            if save:
                for c in cutlass.range_constexpr(2 * count):
                    message = Message(
                        Int32(TO_SAVED_GATE if const_expr(c < count) else TO_SAVED_UP),
                        row_tile,
                        task.col * count + c % count,
                        Int32(NO_WORD),
                        Int32(NO_WORD),
                        task.row_block,
                    )
                    self.hand_over(tile, tile.columns(c), c % 2, chunks, parity, message, thread)
                    if const_expr(c % 2 == 1):
                        parity ^= 1
        return parity

    @cute.jit
    def finish(self, chunks: Chunks, parity: Int32, thread: Int32):
        """Tell the store warp that no chunk follows."""
        cute.arch.mbarrier_wait(chunks.empty, parity ^ 1)
        if thread == 0:
            no_word = Int32(NO_WORD)
            message = Message(Int32(FINISHED), Int32(0), Int32(0), no_word, no_word, Int32(0))
            for i in cutlass.range_constexpr(len(message)):
                chunks.messages[i] = message[i]
        cute.arch.mbarrier_arrive(chunks.full)


class StoreWarp:
    """The store side: one warp per part."""

    def __init__(self, plan: Plan):
        self.geometry, self.push = plan.geometry, registry.make(plan, "push")
        self.chunk = CHUNK_ROWS * plan.config.out_cols  # elements
        shared = (TO_SHARED_HIDDEN, TO_SHARED_Y) if plan.has_shared else ()
        self.matrices = (TO_HIDDEN, TO_SAVED_GATE, TO_SAVED_UP, *shared)

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        stores: Any,  # name -> (copy atom, TMA tensor), boxes of (64, 64)
        sOut: cute.Tensor,  # (PARTS * 64, 64, BUFFERS) bf16, swizzled
        part: Int32,
        chunks: Chunks,
        counters: Int64,
        control: signal.WaitControl,
    ):
        box = (CHUNK_ROWS, self.chunk // CHUNK_ROWS)
        parts = cute.flat_divide(sOut, box)  # (64, 64, PARTS, 1, BUFFERS)
        first = cute.make_ptr(BFloat16, sOut.iterator.toint(), AddressSpace.smem, assumed_align=1024)
        out = first + part * self.chunk  # this part's first buffer
        lane = cute.arch.lane_idx()
        o = device_order(self.geometry, a)
        total_pushes = order.total_pushes(o)
        n = Int32(0)
        going = Boolean(True)
        while going:
            buffer = n & 1
            cute.arch.mbarrier_wait(chunks.full + buffer, (n >> 1) & 1)
            words = chunks.messages + buffer * MESSAGE_WORDS
            m = Message(*(words[i] for i in range(len(Message._fields))))
            if m.store_word != NO_WORD:
                # signal y_done[row block]   down store warps -> gate/up store warp, same GPU
                #   data     none: it says that down has read the ring rows that are overwritten next
                #   before   the down tile's loads completed before its rows could be pushed
                #   publish  below, after the pushes
                #   expect   every store warp of every down tile of the block that used these ring rows before
                #   wait     acquire at gpu scope, then a proxy fence: TMA overwrites what TMA read
                #   reset    by the next launch, which clears the set it does not use
                if lane == 0:
                    signal.wait_at_least(
                        counters + Int64(m.store_word) * 4,
                        Int32(self.geometry.arrivals_per_tile * self.geometry.down_cols),
                        control,
                        Int32(records.ROLE_STORE),
                        Int32(records.SIGNAL_CODE["y_done"]),
                        m.store_word - a.y_done,
                        False,
                    )
                    signal.async_reads_follow()
                cute.arch.sync_warp()
            # After a stop nothing leaves this CTA: what was computed may be garbage.
            alive = cute.arch.vote_all_sync(signal.stopped(control) == 0)
            if alive:
                for target in self.matrices:  # unrolled while tracing
                    if m.target == target:
                        atom, tensor = stores[MATRIX_OF[target]]
                        tSs, tSg = cpasync.tma_partition(
                            atom,
                            0,
                            cute.make_layout(1),
                            tile_modes(parts),
                            tile_modes(cute.local_tile(tensor, box, (None, None))),
                        )
                        if lane == 0:
                            cute.copy(atom, tSs[None, part, 0, buffer], tSg[None, m.row_tile, m.col_tile])
                            cute.arch.cp_async_bulk_commit_group()
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                if m.target == TO_OWNERS:
                    self.push.push_chunk(a, out + buffer * (PARTS * self.chunk), m.row_tile, m.col_tile)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(chunks.empty + buffer)
            if m.publish_word != NO_WORD:
                if alive:
                    self.publish(a, m, counters, control, total_pushes)
            n += 1
            going = m.target != FINISHED

    @cute.jit
    def publish(self, a: LaunchArgs, m: Message, counters: Int64, control: signal.WaitControl, total_pushes: Int32):
        """All chunks of a tile are on their way: make them visible, then say so."""
        lane = cute.arch.lane_idx()
        # signal hidden_ready / shared_hidden_ready[row block]   gate/up store warps -> down load warps, same GPU
        #   data     the tile's hidden columns, stored by TMA (async proxy)
        #   before   the storing lane waits until its stores are complete, then a proxy fence
        #   publish  that lane adds 1 with release at gpu scope: one addition per store warp
        #   expect   arrivals_per_tile x column tiles of the row block
        #   wait     acquire at gpu scope by the load warp, then a proxy fence: TMA reads the rows next
        #   reset    by the next launch, which clears the set it does not use
        # shared_y_done: the same, read by plain loads in reduce.
        if m.target != TO_OWNERS:
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(0)
                signal.async_writes_precede()
                signal.publish(counters + Int64(m.publish_word) * 4, Int32(1))
        else:
            # signal y_done[row block]      -> gate/up store warps that reuse the ring rows (above)
            # signal pushes_done            -> whoever completes the count tells the peers (exit, see scheduler)
            #   data     rows in the owners' combine buffers, stored by plain stores of all lanes
            #   before   the warp's barrier orders all lanes' stores before lane 0
            #   publish  acquire-release addition: the one that completes the count is ordered behind all others,
            #            and its system-scope fence and release carry their stores to the peers
            cute.arch.sync_warp()
            last = Int32(0)
            if lane == 0:
                signal.publish(counters + Int64(m.publish_word) * 4, Int32(1))
                before = cute.arch.atomic_add(
                    signal.word_at(counters + PUSHES_DONE * 4), Int32(1), sem="acq_rel", scope="gpu"
                )
                last = Int32(before + 1 == total_pushes)
            last = cute.arch.shuffle_sync(last, 0)
            cute.arch.sync_warp()  # a shuffle orders no memory: lane 0's acquire comes before the other lanes' release
            if last != 0:
                self.push.tell_peers(a, control.epoch)
