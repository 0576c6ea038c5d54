"""The shared-memory plan of a CTA on sm_90a: what lies where, allocated in this order.

operand ring    A and B stages; before the GEMMs start, row pieces of dispatch use the same bytes
staging         epilogue chunks; before the GEMMs start, its first bytes are the zeros that padding rows copy
prefix table    expert_block_end
slot, messages  a task for the load and consumer warps; what a chunk is, for the store warps
barriers        see the tables in mainloop_sm90.py, epilogue/store.py and dispatch/pull.py
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.memory import SmemAllocator

from mok_cute.templates.epilogue.store import BUFFERS, MESSAGE_WORDS
from mok_cute.templates.scheduler.dynamic import SLOT_WORDS


class Storage(NamedTuple):
    sA: cute.Tensor  # (tile_rows, tile_k, stages) bf16, swizzled
    sB: cute.Tensor  # (down_cols, tile_k, stages) bf16, swizzled
    sOut: cute.Tensor  # (tile_rows, out_cols, BUFFERS) bf16, swizzled
    prefix: cute.Pointer  # (local_experts,) i32
    slot: cute.Pointer  # (SLOT_WORDS,) i32
    messages: cute.Pointer  # (warpgroups, BUFFERS, MESSAGE_WORDS) i32
    operand_bars: cute.Pointer  # 2 * stages
    slot_full: cute.Pointer
    slot_empty: cute.Pointer
    chunk_full: cute.Pointer  # warpgroups * BUFFERS
    chunk_empty: cute.Pointer
    dispatch_bars: cute.Pointer  # warps * dispatch_slots


def allocate(
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    layout_out: cute.ComposedLayout,
    local_experts: int,
    stages: int,
    warpgroups: int,
    dispatch_barriers: int,
) -> Storage:
    smem: Any = SmemAllocator()
    chunks = warpgroups * BUFFERS
    return Storage(
        sA=smem.allocate_tensor(BFloat16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner),
        sB=smem.allocate_tensor(BFloat16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner),
        sOut=smem.allocate_tensor(BFloat16, layout_out.outer, byte_alignment=1024, swizzle=layout_out.inner),
        prefix=smem.allocate_array(Int32, local_experts, byte_alignment=16),
        slot=smem.allocate_array(Int32, SLOT_WORDS, byte_alignment=16),
        messages=smem.allocate_array(Int32, chunks * MESSAGE_WORDS, byte_alignment=16),
        operand_bars=smem.allocate_array(Int64, 2 * stages),
        slot_full=smem.allocate_array(Int64, 1),
        slot_empty=smem.allocate_array(Int64, 1),
        chunk_full=smem.allocate_array(Int64, chunks),
        chunk_empty=smem.allocate_array(Int64, chunks),
        dispatch_bars=smem.allocate_array(Int64, dispatch_barriers),
    )
