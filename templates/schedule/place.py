"""Third launch: give every kept route its row.

    row(e, p, j) = base_e + sum over peers r of min(count[e, r], j) + how many r < p have count[e, r] > j

j numbers the routes of (expert e, peer p) in ascending order, so an expert's rows go round the peers. The two terms
are one sum of min(count[e, r], j + (r < p)).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mok_cute.templates.schedule import layout
from mok_cute.templates.schedule.layout import ROUTES_PER_GROUP, ROUTES_PER_UNIT, THREADS, WARPS, ScheduleArgs
from mok_cute.templates.schedule.memory import draw_last_ticket, ints, is_stopped, smem_ints, this_epoch

ALL_LANES = 0xFFFFFFFF


class PlaceRoutes:
    def __init__(self, topk: int, local_experts: int, row_block: int) -> None:
        self.topk, self.local_experts = topk, local_experts
        self.row_block, self.shift = row_block, row_block.bit_length() - 1
        assert row_block == 1 << self.shift <= THREADS, row_block

    @cute.kernel
    def kernel(self, a: ScheduleArgs) -> None:
        thread, _, _ = cute.arch.thread_idx()
        group, peer, _ = cute.arch.block_idx()
        groups, peers, _ = cute.arch.grid_dim()
        cta, num_ctas = peer * groups + group, groups * peers
        verdict = smem_ints(1)
        totals = smem_ints(self.local_experts)  # routes of each local expert, over all peers
        starts = smem_ints(self.local_experts)  # its first block of rows
        numbers = smem_ints(WARPS * self.local_experts)  # (WARPS, local_experts): next j of each warp
        if is_stopped(a):
            if cta == 0:
                self.write_empty(a)
        else:
            self.sum_peers(a, totals)
            if thread < 32:
                self.lay_out_experts(a, totals, starts, cta)
            cute.arch.sync_threads()
            self.fill_padding(a, totals, starts, cta, num_ctas)
            if group * ROUTES_PER_GROUP < ints(a.peer_tokens)[peer] * self.topk:
                self.place_group(a, starts, numbers, group, peer)
        # All CTAs have read the epoch of this schedule in publish and count; this is the last look.
        if draw_last_ticket(a.state + layout.PLACE_TICKET * 4, num_ctas, verdict):
            if thread == 0:
                ints(a.state)[layout.EPOCH] = this_epoch(a)

    @cute.jit
    def write_empty(self, a: ScheduleArgs) -> None:
        thread, _, _ = cute.arch.thread_idx()
        expert = thread
        while expert < self.local_experts:
            ints(a.expert_block_end)[expert] = Int32(0)
            ints(a.tokens_per_expert)[expert] = Int32(0)
            expert += THREADS
        if thread == 0:
            ints(a.num_rows)[0] = Int32(0)

    @cute.jit
    def sum_peers(self, a: ScheduleArgs, totals: cute.Pointer) -> None:
        thread, _, _ = cute.arch.thread_idx()
        expert = thread
        while expert < self.local_experts:
            totals[expert] = Int32(0)
            expert += THREADS
        cute.arch.sync_threads()
        entry = thread
        while entry < a.ep_size * self.local_experts:
            expert = Int32(cutlass.Uint32(entry) % self.local_experts)
            cute.arch.atomic_add(totals + expert, ints(a.counts)[entry], sem="relaxed", scope="cta")
            entry += THREADS
        cute.arch.sync_threads()

    @cute.jit
    def lay_out_experts(self, a: ScheduleArgs, totals: cute.Pointer, starts: cute.Pointer, cta: Int32) -> None:
        """One warp: prefix sum of the experts' blocks; CTA 0 also writes it out."""
        lane = cute.arch.lane_idx()
        blocks_before = Int32(0)
        for first in cutlass.range(0, self.local_experts, 32, unroll=1):
            expert = first + lane
            tokens = Int32(0)
            if expert < self.local_experts:
                tokens = totals[expert]
            blocks = (tokens + (self.row_block - 1)) >> self.shift
            end = blocks
            for i in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(end, 1 << i, mask_and_clamp=0)
                if lane >= 1 << i:
                    end += other
            end += blocks_before
            if expert < self.local_experts:
                starts[expert] = end - blocks
                if cta == 0:
                    ints(a.expert_block_end)[expert] = end
                    ints(a.tokens_per_expert)[expert] = tokens
            blocks_before = cute.arch.shuffle_sync(end, 31)
        if cta == 0:
            if lane == 0:
                ints(a.num_rows)[0] = blocks_before << self.shift

    @cute.jit
    def fill_padding(
        self, a: ScheduleArgs, totals: cute.Pointer, starts: cute.Pointer, cta: Int32, num_ctas: Int32
    ) -> None:
        """Mark the rows between an expert's last route and the end of its last block."""
        thread, _, _ = cute.arch.thread_idx()
        expert = cta
        while expert < self.local_experts:
            tokens = totals[expert]
            if thread < ((0 - tokens) & (self.row_block - 1)):
                row = (starts[expert] << self.shift) + tokens + thread
                ints(a.peer_rank)[row] = Int32(-1)
                ints(a.peer_route)[row] = Int32(-1)
            expert += num_ctas

    @cute.jit
    def place_group(
        self, a: ScheduleArgs, starts: cute.Pointer, numbers: cute.Pointer, group: Int32, peer: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        group_row = Int64(peer * a.groups_per_peer + group)
        kept_routes = ints(a.local_routes) + (group_row * ROUTES_PER_GROUP + warp * ROUTES_PER_UNIT)
        num_kept = ints(a.unit_routes)[group_row * WARPS + warp]
        own_numbers = numbers + warp * self.local_experts
        entry = thread
        while entry < WARPS * self.local_experts:
            numbers[entry] = Int32(0)
            entry += THREADS
        cute.arch.sync_threads()

        # How many routes has each warp for each expert?
        i = lane
        while i < num_kept:
            cute.arch.atomic_add(own_numbers + (kept_routes[i] >> 8), Int32(1), sem="relaxed", scope="cta")
            i += 32
        cute.arch.sync_threads()
        # Where does each warp begin? After all earlier groups and the warps before it.
        expert = thread
        while expert < self.local_experts:
            number = ints(a.group_counts)[group_row * self.local_experts + expert]
            for w in cutlass.range_constexpr(WARPS):
                count = numbers[w * self.local_experts + expert]
                numbers[w * self.local_experts + expert] = number
                number += count
            expert += THREADS
        cute.arch.sync_threads()

        first_route = group * ROUTES_PER_GROUP + warp * ROUTES_PER_UNIT
        for first in cutlass.range(0, num_kept, 32, unroll=1):
            expert, route = Int32(-1), Int32(-1)
            if first + lane < num_kept:
                kept = kept_routes[first + lane]
                expert = kept >> 8
                route = first_route + (kept & (ROUTES_PER_UNIT - 1))
            # Lanes of one expert number themselves in lane order, which is route order.
            mates = Int32(cute.arch.match_sync(ALL_LANES, expert, "any"))
            before = cute.arch.popc(mates & Int32(cute.arch.lanemask_lt()))
            number = Int32(0)
            if expert >= 0:
                number = own_numbers[expert] + before
            cute.arch.sync_warp()
            if expert >= 0:
                if before == 0:
                    own_numbers[expert] = number + cute.arch.popc(mates)
            cute.arch.sync_warp()
            if expert >= 0:
                row = self.row_of(a, starts[expert] << self.shift, expert, peer, number)
                ints(a.peer_rank)[row] = peer
                ints(a.peer_route)[row] = route

    @cute.jit
    def row_of(self, a: ScheduleArgs, base: Int32, expert: Int32, peer: Int32, number: Int32) -> Int32:
        row = base
        counts = ints(a.counts) + expert
        for other in cutlass.range(a.ep_size, unroll=4):
            turns = number
            if other < peer:
                turns = number + 1
            count = counts[Int64(other) * self.local_experts]
            if count < turns:
                turns = count
            row += turns
        return row
