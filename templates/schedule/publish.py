"""First launch: clean this rank's expert choices, show them to all peers, and wait for theirs.

Only the CTA that finishes last waits: virtual ranks that share a GPU may queue behind each other's kernels, and one
waiting CTA leaves room for them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from mok_cute.templates import records, signal
from mok_cute.templates.schedule import layout
from mok_cute.templates.schedule.layout import LINE_BYTES, THREADS, ScheduleArgs
from mok_cute.templates.schedule.memory import (
    draw_last_ticket,
    ids_of_epoch,
    ints,
    longs,
    smem_ints,
    this_epoch,
    tokens_of_epoch,
)

ROUTES_PER_THREAD = layout.ROUTES_PER_PUBLISH_CTA // THREADS


class PublishRoutes:
    def __init__(self, num_experts: int, topk: int, id_bits: int) -> None:
        self.num_experts, self.topk, self.id_bits = num_experts, topk, id_bits

    @cute.jit
    def local_tokens(self, a: ScheduleArgs) -> Int32:
        """This rank's token count, inside what topk_ids holds."""
        tokens = a.rows
        if a.count != 0:
            given = ints(a.count)[0]
            tokens = Int32(0)
            if given > 0:
                tokens = given
            if tokens > a.rows:
                tokens = a.rows
        return tokens

    @cute.jit
    def expert_of(self, a: ScheduleArgs, route: Int32) -> Int32:
        """The chosen expert; num_experts for any id at or above it, -1 for any negative one."""
        expert = Int32(0)
        if const_expr(self.id_bits == 64):
            wide = longs(a.topk_ids)[route]
            if wide < 0:
                wide = Int64(-1)
            if wide > self.num_experts:
                wide = Int64(self.num_experts)
            expert = Int32(wide)
        else:
            expert = ints(a.topk_ids)[route]
            if expert < 0:
                expert = Int32(-1)
            if expert > self.num_experts:
                expert = Int32(self.num_experts)
        return expert

    @cute.kernel
    def kernel(self, a: ScheduleArgs) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        verdict = smem_ints(1)
        epoch = this_epoch(a)
        own = longs(a.peer_table)[a.rank]
        local_ids, published = ints(a.local_ids), ints(ids_of_epoch(a, own, epoch))
        tokens = self.local_tokens(a)
        dropped = Int32(0)
        for i in cutlass.range_constexpr(ROUTES_PER_THREAD):
            route = cta * layout.ROUTES_PER_PUBLISH_CTA + i * THREADS + thread
            if route < a.max_tokens * self.topk:
                expert = Int32(-1)
                if route < tokens * self.topk:
                    expert = self.expert_of(a, route)
                    if expert == self.num_experts:
                        dropped += 1
                        expert = Int32(-1)
                local_ids[route] = expert
                published[route] = expert
        if dropped > 0:
            cute.arch.red(ints(a.state) + layout.DROPPED, dropped, op="add", dtype="s32", sem="relaxed", scope="gpu")
        if draw_last_ticket(a.state + layout.PUBLISH_TICKET * 4, num_ctas, verdict):
            if thread == 0:
                ints(a.num_tokens)[0] = tokens
                ints(tokens_of_epoch(a, own, epoch))[0] = tokens
                ints(a.num_dropped)[0] = ints(a.state)[layout.DROPPED]
                ints(a.state)[layout.DROPPED] = Int32(0)
            cute.arch.sync_threads()
            self.meet_peers(a, own, epoch, thread)

    @cute.jit
    def meet_peers(self, a: ScheduleArgs, own: Int64, epoch: Int32, thread: Int32) -> None:
        # signal schedule_flags[rank]     last CTA of publish -> last CTA of every peer's publish, between GPUs
        #   data     the ids and the token count of this epoch in this rank's symmetric memory
        #   before   the ticket made the last CTA see all ids, its CTA barrier the token count
        #   publish  system-scope fence and release of the epoch, one thread per peer
        #   expect   the epoch of the waiting rank: all ranks build the same sequence of schedules
        #   wait     acquire at system scope, one thread per peer; count, the next kernel of the stream, reads the data
        #            with generic loads
        #   reset    never: epochs only grow
        table = longs(a.peer_table)
        peer = thread
        while peer < a.ep_size:
            signal.publish_to_peer(table[peer] + a.schedule_flags + Int64(a.rank) * LINE_BYTES, epoch)
            peer += THREADS
        control = signal.WaitControl(
            a.stop, a.record, a.limit_ns, Int64(0), Int32(records.KERNEL_SCHEDULE), a.rank, epoch
        )
        peer = thread
        while peer < a.ep_size:
            signal.wait_at_least(
                own + a.schedule_flags + Int64(peer) * LINE_BYTES,
                epoch,
                control,
                Int32(records.ROLE_SCHEDULE),
                Int32(records.SCHEDULE_FLAG),
                peer,
                True,
            )
            peer += THREADS
