"""Publish and wait: the only release, acquire and proxy fence on global memory, and the only bounded wait.

A wait that passes its limit, or sees that another has, returns 0; it never hangs and never traps. The first to give
up claims the stop word of the launch and writes a record to host-mapped memory, which the host turns into a
PeerTimeoutError. Whoever gets 0 goes on through its normal exit without publishing anything.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Int32, Int64, const_expr
from cutlass.experimental import primitives as prims

from mok_cute.templates.records import AGE_NS, CTA, EPOCH, EXPECTED, INDEX, KERNEL, RANK, ROLE, SEEN, SIGNAL


class WaitControl(NamedTuple):
    """What every wait of a launch needs besides the word it watches."""

    stop: Int64  # address of the stop word, int32
    record: Int64  # address of the record, host-mapped
    limit_ns: Int64  # 0: wait for ever
    entered: Int64  # address of a word that is not 0 once all peers are here: the clock starts then; 0: at once
    kernel: Int32
    rank: Int32
    epoch: Int32


def word_at(address: Int64) -> cute.Pointer:
    """The int32 in global memory at a byte address."""
    return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)


@cute.jit
def load_acquire(address: Int64, peers: bool) -> Int32:
    """Read a signal word so that what its writer published is visible. ``peers``: it may be another GPU's."""
    return cute.arch.load(word_at(address), Int32, sem="acquire", scope="sys" if const_expr(peers) else "gpu")


@cute.jit
def stopped(control: WaitControl) -> Boolean:
    """Has any wait of this launch given up?"""
    return cute.arch.load(word_at(control.stop), Int32, sem="relaxed", scope="gpu") != 0


@cute.jit
def give_up(control: WaitControl, role: Int32, signal: Int32, index: Int32, seen: Int32, expected: Int32, age: Int64):
    """Claim the stop word; the first to do so writes the record."""
    first = cute.arch.atomic_cas(word_at(control.stop), cmp=Int32(0), val=Int32(1), sem="acq_rel", scope="gpu")
    if first == 0:
        cta, _, _ = cute.arch.block_idx()
        record = word_at(control.record)
        record[KERNEL] = control.kernel
        record[RANK] = control.rank
        record[CTA] = cta
        record[ROLE] = role
        record[SIGNAL] = signal
        record[INDEX] = index
        record[SEEN] = seen
        record[EXPECTED] = expected
        record[EPOCH] = control.epoch
        record[AGE_NS] = Int32(age & 0xFFFFFFFF)
        record[AGE_NS + 1] = Int32(age >> 32)
        cute.arch.fence_acq_rel_sys()
        cute.arch.store(record, Int32(1), sem="release", scope="sys")


@cute.jit
def wait_at_least(
    address: Int64,
    required: Int32,
    control: WaitControl,
    role: Int32,
    signal: Int32,
    index: Int32,
    peers: bool,
) -> Int32:
    """Spin until the word at ``address`` reaches ``required``; 1 = reached, 0 = gave up.

    The comparison is of the signed difference, so that epochs may wrap. One thread polls; whatever its CTA does next
    is ordered behind it by the caller's barrier.
    """
    seen = load_acquire(address, peers)
    reached = Int32(1)
    if seen - required < 0:
        start = cute.arch.globaltimer()
        armed = Int32(1)
        if control.entered != 0:
            armed = Int32(0)
        waiting = Boolean(True)
        while waiting:
            prims.nanosleep(32)
            seen = load_acquire(address, peers)
            if seen - required >= 0:
                waiting = Boolean(False)
            else:
                if stopped(control):
                    reached = Int32(0)
                    waiting = Boolean(False)
                else:
                    # A peer may be as late as the limit at entry allows; only then does this limit count.
                    if armed == 0:
                        armed = cute.arch.load(word_at(control.entered), Int32, sem="relaxed", scope="gpu")
                        start = cute.arch.globaltimer()
                    age = cute.arch.globaltimer() - start
                    if control.limit_ns > 0:
                        if age > control.limit_ns:
                            give_up(control, role, signal, index, seen, required, age)
                            reached = Int32(0)
                            waiting = Boolean(False)
    return reached


@cute.jit
def publish(address: Int64, arrivals: Int32):
    """Add to a signal of this GPU, releasing everything ordered before the calling thread."""
    cute.arch.red(word_at(address), arrivals, op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def publish_to_peer(address: Int64, value: Int32):
    """Set an epoch signal in a peer's memory, releasing to all GPUs everything ordered before the calling thread."""
    cute.arch.fence_acq_rel_sys()
    cute.arch.store(word_at(address), value, sem="release", scope="sys")


def async_reads_follow() -> None:
    """After a wait, before this thread's bulk or tensor copies read what was published."""
    cute.arch.fence_proxy("async.global")


def async_writes_precede() -> None:
    """After this thread's bulk or tensor stores have completed, before it publishes them."""
    cute.arch.fence_proxy("async.global")
