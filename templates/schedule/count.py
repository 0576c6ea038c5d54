"""Second launch: pull every peer's choices, keep those that come to this rank, and count them by expert.

One CTA per group of routes of one peer. Peers are read here and nowhere else: place works on what count kept. The
last CTA of a peer turns the groups' counts into prefix sums, so the order of routes never depends on who ran when.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from mok_cute.templates.schedule.layout import ROUTES_PER_GROUP, ROUTES_PER_UNIT, THREADS, WARPS, ScheduleArgs
from mok_cute.templates.schedule.memory import (
    draw_last_ticket,
    ids_of_epoch,
    ints,
    is_stopped,
    longs,
    smem_ints,
    this_epoch,
    tokens_of_epoch,
)

STEPS = ROUTES_PER_UNIT // 32
GROUP_SHIFT = ROUTES_PER_GROUP.bit_length() - 1
GROUPS_AT_ONCE = 8  # loads in flight per thread of the prefix sum


class CountRoutes:
    def __init__(self, topk: int, local_experts: int) -> None:
        self.topk, self.local_experts = topk, local_experts

    @cute.kernel
    def kernel(self, a: ScheduleArgs) -> None:
        thread, _, _ = cute.arch.thread_idx()
        group, peer, _ = cute.arch.block_idx()
        verdict = smem_ints(1)
        histogram = smem_ints(self.local_experts)  # this group's routes by local expert
        if not is_stopped(a):
            epoch = this_epoch(a)
            base = longs(a.peer_table)[peer]
            tokens = ints(tokens_of_epoch(a, base, epoch))[0]
            num_routes = tokens * self.topk
            num_groups = (num_routes + (ROUTES_PER_GROUP - 1)) >> GROUP_SHIFT
            if num_groups == 0:
                num_groups = Int32(1)  # a peer without tokens still has its counts written
            if group < num_groups:
                expert = thread
                while expert < self.local_experts:
                    histogram[expert] = Int32(0)
                    expert += THREADS
                cute.arch.sync_threads()
                self.keep_local_routes(a, ints(ids_of_epoch(a, base, epoch)), num_routes, group, peer, histogram)
                cute.arch.sync_threads()
                first = Int64(peer * a.groups_per_peer) * self.local_experts
                table = ints(a.group_counts) + first
                expert = thread
                while expert < self.local_experts:
                    table[Int64(group) * self.local_experts + expert] = histogram[expert]
                    expert += THREADS
                if draw_last_ticket(a.peer_tickets + Int64(peer) * 4, num_groups, verdict):
                    self.sum_groups(a, table, num_groups, peer)
                    if thread == 0:
                        ints(a.peer_tokens)[peer] = tokens

    @cute.jit
    def keep_local_routes(
        self,
        a: ScheduleArgs,
        ids: cute.Pointer,  # (tokens, topk) i32 of the peer
        num_routes: Int32,
        group: Int32,
        peer: Int32,
        histogram: cute.Pointer,
    ) -> None:
        """Each warp compacts its unit's routes that choose an expert of this rank, in order."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        first = group * ROUTES_PER_GROUP + warp * ROUTES_PER_UNIT
        group_row = Int64(peer * a.groups_per_peer + group)
        kept_routes = ints(a.local_routes) + (group_row * ROUTES_PER_GROUP + warp * ROUTES_PER_UNIT)
        choices = [Int32(-1)] * STEPS  # all loads leave before the first is used: a peer is microseconds away
        for step in cutlass.range_constexpr(STEPS):
            route = first + step * 32 + lane
            choice = Int32(-1)
            if route < num_routes:
                choice = ids[route]
            choices[step] = choice
        num_kept = Int32(0)
        for step in cutlass.range_constexpr(STEPS):
            local = choices[step] - a.rank * self.local_experts
            mine = Boolean((choices[step] >= 0) & (local >= 0) & (local < self.local_experts))
            kept = cute.arch.vote_ballot_sync(mine)
            if mine:
                place = num_kept + cute.arch.popc(kept & Int32(cute.arch.lanemask_lt()))
                kept_routes[place] = (step * 32 + lane) | (local << 8)
                cute.arch.atomic_add(histogram + local, Int32(1), sem="relaxed", scope="cta")
            num_kept += cute.arch.popc(kept)
        if lane == 0:
            ints(a.unit_routes)[group_row * WARPS + warp] = num_kept

    @cute.jit
    def sum_groups(
        self,
        a: ScheduleArgs,
        table: cute.Pointer,  # (groups, local_experts) i32 of the peer; becomes the exclusive prefix over groups
        num_groups: Int32,
        peer: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        expert = thread
        while expert < self.local_experts:
            total = Int32(0)
            for first in cutlass.range(0, num_groups, GROUPS_AT_ONCE, unroll=1):
                counts = [Int32(0)] * GROUPS_AT_ONCE
                for i in cutlass.range_constexpr(GROUPS_AT_ONCE):
                    count = Int32(0)
                    if first + i < num_groups:
                        count = table[Int64(first + i) * self.local_experts + expert]
                    counts[i] = count
                for i in cutlass.range_constexpr(GROUPS_AT_ONCE):
                    if first + i < num_groups:
                        table[Int64(first + i) * self.local_experts + expert] = total
                    total += counts[i]
            ints(a.counts)[Int64(peer) * self.local_experts + expert] = total
            expert += THREADS
