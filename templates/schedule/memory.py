"""Addresses, tickets and loads that the three schedule kernels have in common."""

import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from mok_cute.templates.schedule import layout
from mok_cute.templates.schedule.layout import ScheduleArgs


def ints(address: Int64) -> cute.Pointer:
    """int32 words in global memory at a byte address."""
    return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)


def longs(address: Int64) -> cute.Pointer:
    """int64 words in global memory at a byte address."""
    return cute.make_ptr(Int64, address, AddressSpace.gmem, assumed_align=8)


def smem_ints(num_words: int) -> cute.Pointer:
    return SmemAllocator().allocate_array(Int32, num_words)


def this_epoch(a: ScheduleArgs) -> Int32:
    """Number of the schedule being built, from 1; the last CTA of place makes it final."""
    return ints(a.state)[layout.EPOCH] + 1


@cute.jit
def ids_of_epoch(a: ScheduleArgs, base: Int64, epoch: Int32) -> Int64:
    """Address of the ids that the peer with this base publishes in this epoch.

    Two buffers suffice: a rank overwrites one in epoch n+2, after its wait of epoch n+1, when all peers have entered
    n+1 and so, in stream order, have finished reading epoch n.
    """
    return base + a.published_ids + Int64(epoch & 1) * a.published_stride * 4


@cute.jit
def tokens_of_epoch(a: ScheduleArgs, base: Int64, epoch: Int32) -> Int64:
    return base + a.published_tokens + Int64(epoch & 1) * layout.LINE_BYTES


@cute.jit
def is_stopped(a: ScheduleArgs) -> Boolean:
    """Has the wait of publish, an earlier kernel of this stream, given up?"""
    return ints(a.stop)[0] != 0


@cute.jit
def draw_last_ticket(ticket: Int64, num_ctas: Int32, verdict: cute.Pointer) -> Boolean:
    """True in all threads of the CTA that comes last; it puts the ticket back to zero.

    verdict: one word of shared memory. Whoever is last sees what all other CTAs wrote before they came here.
    """
    # signal ticket              every CTA -> the last one, same GPU, same kernel
    #   data     what the CTAs wrote, by generic stores and atomics
    #   before   the CTA barrier orders all threads' writes before thread 0
    #   publish  thread 0 adds 1, acquire and release at gpu scope, so that the last add has seen them all
    #   expect   the number of CTAs that come here
    #   wait     none: the last CTA goes on, behind a CTA barrier
    #   reset    by the last CTA: nobody looks again before the next kernel of the stream
    cute.arch.sync_threads()
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        before = cute.arch.atomic_add(ints(ticket), Int32(1), sem="acq_rel", scope="gpu")
        verdict[0] = before
        if before == num_ctas - 1:
            ints(ticket)[0] = Int32(0)
    cute.arch.sync_threads()
    return verdict[0] == num_ctas - 1
