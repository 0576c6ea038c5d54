"""The shared-memory plan of a CTA: what lies where, allocated in this order.

operand ring    A and B stages; before the GEMMs start, row pieces of dispatch use the same bytes
staging         epilogue chunks; before the GEMMs start, its first bytes are the zeros that padding rows copy
prefix table    expert_block_end
slot, messages  a task for the load and consumer warps; what a chunk is, for the store warps
barriers        see the tables in grouped_gemm/, epilogue/store.py and dispatch/pull.py
answers         tcgen05 only: tasks that the cluster has asked for, see scheduler/clusters.py
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Int128
from cutlass.memory import SmemAllocator

from mok_cute.config import ACC_STAGES, ANSWERS
from mok_cute.templates.epilogue.store import BUFFERS, MESSAGE_WORDS, PARTS
from mok_cute.templates.scheduler.dynamic import SLOT_WORDS


class Storage(NamedTuple):
    sA: cute.Tensor  # (128, tile_k, stages) bf16, swizzled
    sB: cute.Tensor  # (weight_rows, tile_k, stages) bf16, swizzled
    sOut: cute.Tensor  # (128, out_cols, BUFFERS) bf16, swizzled
    prefix: cute.Pointer  # (local_experts,) i32
    slot: cute.Pointer  # (SLOT_WORDS,) i32
    messages: cute.Pointer  # (PARTS, BUFFERS, MESSAGE_WORDS) i32
    operand_bars: cute.Pointer  # 2 * stages
    slot_full: cute.Pointer
    slot_empty: cute.Pointer
    chunk_full: cute.Pointer  # PARTS * BUFFERS
    chunk_empty: cute.Pointer
    dispatch_bars: cute.Pointer  # warps * dispatch_slots


class ClusterStorage(NamedTuple):
    """What tcgen05 and clusters need besides."""

    acc_bars: cute.Pointer  # 2 * ACC_STAGES
    answers: cute.Pointer  # (ANSWERS,) 16 bytes each
    answer_full: cute.Pointer  # ANSWERS
    answers_read: cute.Pointer  # at CTA 0 of the cluster
    handled: cute.Pointer  # (1,) i32: cluster numbers that this cluster has taken
    tmem_base: cute.Pointer  # (1,) i32: where its tensor memory begins
    tmem_done: cute.Pointer  # the peer is through with tensor memory


def allocate(
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    layout_out: cute.ComposedLayout,
    local_experts: int,
    stages: int,
    dispatch_barriers: int,
) -> Storage:
    smem: Any = SmemAllocator()
    chunks = PARTS * BUFFERS
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


def allocate_for_cluster() -> ClusterStorage:
    smem: Any = SmemAllocator()
    return ClusterStorage(
        acc_bars=smem.allocate_array(Int64, 2 * ACC_STAGES),
        answers=smem.allocate_array(Int128, ANSWERS, byte_alignment=16),
        answer_full=smem.allocate_array(Int64, ANSWERS),
        answers_read=smem.allocate_array(Int64, 1),
        handled=smem.allocate_array(Int32, 1, byte_alignment=8),
        tmem_base=smem.allocate_array(Int32, 1, byte_alignment=8),
        tmem_done=smem.allocate_array(Int64, 1),
    )
