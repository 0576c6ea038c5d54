"""Dispatch: communication warps pull token rows from their owners into the ring of this rank's routed rows.

A pulled row needs no flag from its owner: the entry signal says that all of x lies there. Each warp works alone on
groups of rows. One lane drives a small ring of row pieces in shared memory: bulk load from the owner, bulk store to
the ring (and to the saved context for macrobatch 0), several pieces in flight.

    piece p     | wait: slot's last store has been read | load p | wait load p-lag | store p-lag |
    slots       dispatch_slots per warp; lag = dispatch_slots - 2 loads in flight behind the newest
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Boolean, Int32, Int64
from cutlass.experimental import primitives as prims

from mok_cute.templates import records, signal
from mok_cute.templates.interface import Plan
from mok_cute.templates.lanes import shuffle64
from mok_cute.templates.launch_args import ENTERED, PEER_SIGNAL_BYTES, X_STAGED, LaunchArgs
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import device_order

BF16_BYTES = 2


def bytes_at(address: Int64) -> cute.Pointer:
    return cute.make_ptr(BFloat16, address, AddressSpace.gmem, assumed_align=16)


class PullDispatch:
    """The communication CTAs' program, run by all their warps before they turn to computing."""

    def __init__(self, plan: Plan):
        shape, config = plan.shape, plan.config
        self.geometry, self.topk = plan.geometry, shape.topk
        self.row_bytes = shape.hidden * BF16_BYTES
        self.piece_bytes, self.slots = config.piece_bytes(shape), config.dispatch_slots
        self.warps = config.warps
        self.pieces = self.row_bytes // self.piece_bytes
        self.lag = self.slots - 2
        self.group_rows = self.geometry.rows_per_dispatch_group

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        config = plan.config
        pieces = config.warps * config.dispatch_slots * config.piece_bytes(plan.shape)
        ring = config.smem_plan(plan.shape, plan.local_experts)["operand ring (A and B stages)"]
        if pieces <= ring:
            return None
        return (
            f"dispatch_slots={config.dispatch_slots}: {pieces} bytes of row pieces exceed the {ring} bytes of the "
            "operand ring; lower KernelConfig.dispatch_slots or dispatch_piece_bytes."
        )

    @cute.jit
    def move_rows(
        self,
        source: Int64,  # lane r: address of row r of the group, 0: a row of zeros, -1: no row
        target: Int64,  # lane r: where it goes
        also: Int64,  # lane r: a second target, or 0
        ring: cute.Pointer,  # this warp's pieces in shared memory, slots x piece_bytes
        zeros: cute.Pointer,  # piece_bytes of zeros in shared memory
        bars: cute.Pointer,  # this warp's mbarriers, one per slot, 1 arrival and the piece's bytes
        moved: Int32,  # pieces moved before this group: gives slots and parities
    ):
        """Copy one group of rows and wait until its stores are complete. All lanes call it together."""
        lane = cute.arch.lane_idx()
        total = self.group_rows * self.pieces
        for p in cutlass.range(total + self.lag, unroll=1):
            row_in, row_out = p // self.pieces, (p - self.lag) // self.pieces
            src = shuffle64(source, row_in)
            src_out = shuffle64(source, row_out)
            dst = shuffle64(target, row_out)
            dst_also = shuffle64(also, row_out)
            if lane == 0:
                if p < total:
                    slot = (moved + p) % self.slots
                    # All but the newest store group have been read out of shared memory: this slot's among them.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    if src > 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(bars + slot, self.piece_bytes)
                        offset = Int64((p - row_in * self.pieces) * self.piece_bytes)
                        prims.cp_async_bulk_shared_cluster_global(
                            ring + slot * (self.piece_bytes // BF16_BYTES),
                            bytes_at(src + offset),
                            bars + slot,
                            self.piece_bytes,
                        )
                    else:
                        cute.arch.mbarrier_arrive(bars + slot)  # keeps the parity in step
                if p >= self.lag:
                    q = p - self.lag
                    slot = (moved + q) % self.slots
                    cute.arch.mbarrier_wait(bars + slot, ((moved + q) // self.slots) & 1)
                    offset = Int64((q - row_out * self.pieces) * self.piece_bytes)
                    if src_out >= 0:
                        if src_out > 0:
                            self.store_piece(ring + slot * (self.piece_bytes // BF16_BYTES), dst, dst_also, offset)
                        else:
                            self.store_piece(zeros, dst, dst_also, offset)
                    cute.arch.cp_async_bulk_commit_group()
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)  # complete, not merely read: what publish releases

    @cute.jit
    def store_piece(self, piece: cute.Pointer, dst: Int64, also: Int64, offset: Int64):
        prims.cp_async_bulk_global_shared_cta(bytes_at(dst + offset), piece, self.piece_bytes)
        if also != 0:
            prims.cp_async_bulk_global_shared_cta(bytes_at(also + offset), piece, self.piece_bytes)

    @cute.jit
    def enter(
        self,
        a: LaunchArgs,
        counters: Int64,
        control: signal.WaitControl,
        worker: Int32,
        num_workers: Int32,
        staged: Boolean,
        routed_blocks: Int32,
    ) -> Int32:
        """Tell all peers that this rank's x is in place, and wait for them to say the same; 0 = gave up."""
        lane = cute.arch.lane_idx()
        table = cute.make_ptr(Int64, a.peer_table, AddressSpace.gmem, assumed_align=8)
        control = control._replace(entered=Int64(0))  # these waits have clocks of their own
        # signal x_staged            all communication warps -> warp 0 of CTA 0, same GPU
        #   data     this rank's x in symmetric memory, stored by bulk copies
        #   before   the storing lane waited until its stores were complete, then a proxy fence
        #   publish  each warp adds 1 with release at gpu scope
        #   expect   the number of communication warps
        #   wait     acquire at gpu scope; the leader then releases at system scope, which carries all of it
        #   reset    by the next launch, which clears the set it does not use
        ok = Int32(1)
        if staged:
            if lane == 0:
                signal.async_writes_precede()
                signal.publish(counters + X_STAGED * 4, Int32(1))
        if worker == 0:
            if staged:
                if lane == 0:
                    ok = signal.wait_at_least(
                        counters + X_STAGED * 4,
                        num_workers,
                        control,
                        Int32(records.ROLE_DISPATCH),
                        Int32(records.SIGNAL_CODE["x_staged"]),
                        Int32(0),
                        False,
                    )
            # An earlier kernel of this stream may have given up: its schedule is empty, so promise the peers nothing.
            if signal.stopped(control):
                ok = Int32(0)
            ok = Int32(cute.arch.vote_all_sync(ok != 0))
            cute.arch.sync_warp()  # a vote orders no memory: lane 0's acquire comes before the other lanes' release
            # signal entry[rank]         the leader -> every peer's communication warps, between GPUs
            #   data     x in this rank's symmetric memory, and the end of its previous launch: by then it has
            #            read its combine buffer
            #   before   x_staged above; the previous launch by stream order
            #   publish  system-scope fence and release of this launch's epoch, one lane per peer
            #   expect   the epoch of the waiting rank's launch: all ranks make the same sequence of calls
            #   wait     acquire at system scope by each polling lane, the warp's barrier, then a proxy fence,
            #            because bulk copies read x next
            #   reset    never: epochs only grow
            if ok != 0:
                peer = lane
                while peer < a.ep_size:
                    address = table[peer] + Int64(a.rank) * PEER_SIGNAL_BYTES
                    signal.publish_to_peer(address + a.entry_offset, control.epoch)
                    if routed_blocks == 0:  # nothing to push: the last push is behind us already
                        signal.publish_to_peer(address + a.exit_offset, control.epoch)
                    peer += 32
        base = table[a.rank]
        peer = lane
        while peer < a.ep_size:
            got = signal.wait_at_least(
                base + a.entry_offset + Int64(peer) * PEER_SIGNAL_BYTES,
                control.epoch,
                control._replace(limit_ns=a.entry_limit_ns),
                Int32(records.ROLE_DISPATCH),
                Int32(records.SIGNAL_CODE["entry"]),
                peer,
                True,
            )
            ok = ok & got
            peer += 32
        ok = Int32(cute.arch.vote_all_sync(ok != 0))
        cute.arch.sync_warp()
        signal.async_reads_follow()
        # Starts the clocks of all other waits of this launch; it orders nothing.
        if worker == 0:
            if (lane == 0) & (ok != 0):
                signal.publish(counters + ENTERED * 4, Int32(1))
        return ok

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        counters: Int64,
        control: signal.WaitControl,
        pieces: cute.Pointer,  # warps x slots x piece_bytes in shared memory
        zeros: cute.Pointer,
        barriers: cute.Pointer,  # warps x slots mbarriers
    ):
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        worker, num_workers = cta * self.warps + warp, a.comm_ctas * self.warps
        ring = pieces + warp * (self.slots * self.piece_bytes // BF16_BYTES)
        bars = barriers + warp * self.slots
        table = cute.make_ptr(Int64, a.peer_table, AddressSpace.gmem, assumed_align=8)
        o = device_order(self.geometry, a)
        moved = Int32(0)

        # Own rows are pulled from x itself; peers need it in symmetric memory, unless it lies there already.
        own_symmetric_x = table[a.rank] + a.x_offset
        staged = (a.ep_size > 1) & (a.x != own_symmetric_x)
        if staged:
            first = worker * self.group_rows
            while first < o.num_tokens:
                row = first + lane
                source, target = Int64(-1), Int64(0)
                if lane < self.group_rows:
                    if row < o.num_tokens:
                        source = a.x + Int64(row) * self.row_bytes
                        target = own_symmetric_x + Int64(row) * self.row_bytes
                self.move_rows(source, target, Int64(0), ring, zeros, bars, moved)
                moved += self.group_rows * self.pieces
                first += num_workers * self.group_rows
        ok = self.enter(a, counters, control, worker, num_workers, staged, o.routed_blocks)

        group = worker
        while (ok != 0) & (group < o.num_dispatch_groups):
            z, row_block, first_row = o.dispatch_group(group)
            # Lane r looks up the origin of row r while one lane waits for the ring.
            row = Int64(row_block) * self.geometry.tile_rows + first_row + lane
            source, target, also = Int64(-1), Int64(0), Int64(0)
            if lane < self.group_rows:
                owner = cute.make_ptr(Int32, a.peer_rank + row * 4, AddressSpace.gmem, assumed_align=4)[0]
                route = cute.make_ptr(Int32, a.peer_route + row * 4, AddressSpace.gmem, assumed_align=4)[0]
                source = Int64(0)
                if owner >= 0:
                    x = a.x
                    if owner != a.rank:
                        x = table[owner] + a.x_offset
                    source = x + Int64(route // self.topk) * self.row_bytes
                in_minibatch = row_block - o.first_block(z)
                ring_row = o.ring_block(z, in_minibatch) * self.geometry.tile_rows + first_row + lane
                target = a.x_ring + Int64(ring_row) * self.row_bytes
                if a.saved_x != 0:
                    if row_block < a.minibatch_blocks * a.ring_minibatches:  # macrobatch 0
                        also = a.saved_x + row * self.row_bytes
            tile = order.Tile(order.END, z, row_block, Int32(0), Int32(0), Int32(0))
            guard = order.DISPATCH.waits[1]
            # signal hidden_ready[row block]   gate/up store warps -> this lane, same GPU
            #   data     none: it says that gate/up has read the ring rows that are overwritten next
            #   before   the tile's loads completed before its results could be published
            #   publish  see epilogue/store.py
            #   expect   every store warp of every column tile of the block that used these ring rows before
            #   wait     acquire at gpu scope, then a proxy fence: bulk stores overwrite what tensor loads read
            #   reset    by the next launch, which clears the set it does not use
            if guard.when(o, tile):
                if lane == 0:
                    user = guard.index(o, tile)
                    ok = signal.wait_at_least(
                        counters + Int64(a.hidden_ready + user) * 4,
                        Int32(guard.required(o, tile)),
                        control,
                        Int32(records.ROLE_DISPATCH),
                        Int32(records.SIGNAL_CODE["hidden_ready"]),
                        user,
                        False,
                    )
                    signal.async_reads_follow()
                ok = cute.arch.shuffle_sync(ok, 0)
            if ok != 0:
                self.move_rows(source, target, also, ring, zeros, bars, moved)
                moved += self.group_rows * self.pieces
                # signal x_routed_ready[z]   dispatch -> gate/up load warps, same GPU
                #   data     the group's rows in x_ring, stored by bulk copies (async proxy)
                #   before   the storing lane waited until its stores were complete, then a proxy fence
                #   publish  the same lane adds 1 with release at gpu scope, once per group
                #   expect   the groups of minibatch z: fewer in a short one
                #   wait     acquire at gpu scope by the load warp, then a proxy fence: TMA reads the rows next
                #   reset    by the next launch, which clears the set it does not use
                if lane == 0:
                    signal.async_writes_precede()
                    signal.publish(counters + Int64(a.x_routed_ready + z) * 4, Int32(1))
            group += num_workers
        cute.arch.sync_warp()
