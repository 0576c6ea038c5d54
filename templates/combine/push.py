"""Combine, first half: result rows are pushed straight from the down tile's staging to their owners.

Every routed row has exactly one slot, (token * topk + k), in its owner's symmetric combine buffer, and exactly one
writer in the whole group, so a push needs no flag of its own; the owner waits once for all peers (signal exit).
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Int32, Int64, const_expr

from mok_cute.templates import signal
from mok_cute.templates.interface import Plan
from mok_cute.templates.lanes import shuffle64
from mok_cute.templates.launch_args import PEER_SIGNAL_BYTES, LaunchArgs

CHUNK_ROWS = 64
CHUNK_COLS = 64
LANES_PER_ROW = 8  # 16 bytes each: a row of a chunk is 128 bytes, one line
ROWS_AT_ONCE = 32 // LANES_PER_ROW
VECTOR = 8  # bf16 elements in 16 bytes


class PushCombine:
    def __init__(self, plan: Plan):
        self.hidden = plan.shape.hidden

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def owner_row(self, a: LaunchArgs, row: Int64) -> Int64:
        """Address of the combine slot of a routed row, 0 for padding."""
        table = cute.make_ptr(Int64, a.peer_table, AddressSpace.gmem, assumed_align=8)
        owner = cute.make_ptr(Int32, a.peer_rank + row * 4, AddressSpace.gmem, assumed_align=4)[0]
        route = cute.make_ptr(Int32, a.peer_route + row * 4, AddressSpace.gmem, assumed_align=4)[0]
        address = Int64(0)
        if owner >= 0:
            address = table[owner] + a.combine_offset + Int64(route) * (self.hidden * 2)
        return address

    @cute.jit
    def push_chunk(self, a: LaunchArgs, chunk: cute.Pointer, row_tile: Int32, col_tile: Int32):
        """Copy 64 rows x 64 columns from swizzled shared memory to the owners of the rows. The whole warp calls it."""
        lane = cute.arch.lane_idx()
        first = Int64(row_tile) * CHUNK_ROWS + lane
        low = self.owner_row(a, first)  # lane r: rows r and r + 32 of the chunk
        high = self.owner_row(a, first + 32)
        part = lane % LANES_PER_ROW
        col = col_tile * CHUNK_COLS
        if col < self.hidden:  # the last tile of a row may reach past it
            for i in cutlass.range_constexpr(CHUNK_ROWS // ROWS_AT_ONCE):
                row = i * ROWS_AT_ONCE + lane // LANES_PER_ROW
                address = shuffle64(low if const_expr(i < 8) else high, row % 32)
                # 128-byte swizzle: the 16-byte parts of row r stand at part ^ (r mod 8).
                source = chunk + row * CHUNK_COLS + (part ^ (row % 8)) * VECTOR
                value = cute.make_rmem_tensor((VECTOR,), BFloat16)
                shared = cute.make_ptr(BFloat16, source.toint(), AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(shared, cute.make_layout(VECTOR)), value)
                if address != 0:
                    target = cute.make_ptr(
                        BFloat16, address + Int64(col + part * VECTOR) * 2, AddressSpace.gmem, assumed_align=16
                    )
                    cute.autovec_copy(value, cute.make_tensor(target, cute.make_layout(VECTOR)))

    @cute.jit
    def tell_peers(self, a: LaunchArgs, epoch: Int32):
        """Signal exit[rank] at every peer; see scheduler/dynamic.py for the argument. The whole warp calls it."""
        table = cute.make_ptr(Int64, a.peer_table, AddressSpace.gmem, assumed_align=8)
        peer = cute.arch.lane_idx()
        while peer < a.ep_size:
            signal.publish_to_peer(table[peer] + a.exit_offset + Int64(a.rank) * PEER_SIGNAL_BYTES, epoch)
            peer += 32
