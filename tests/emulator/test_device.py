"""CTAs, clusters, barriers and the scheduler of the virtual GPU: everything runs, waits end, deadlocks are named."""

import numpy as np
import pytest
from microkernel import make_kernel, run_kernel

from mok_cute.emulator.device import Deadlock, Grid, run
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.memory import DeviceMemory

pytestmark = pytest.mark.emulated


def test_every_thread_of_every_cta_runs_once_with_its_indices():
    seen = np.zeros((2, 3, 5, 40), "u4")
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r4, %nctaid.x;
    mov.u32 %r5, %nctaid.y; mad.lo.s32 %r6, %r3, %r5, %r2; mad.lo.s32 %r6, %r6, %r4, %r1;
    mov.u32 %r7, %ntid.x; mad.lo.s32 %r6, %r6, %r7, %t; ld.param.b64 %q0, [p0]; mul.wide.u32 %q1, %r6, 4;
    add.s64 %q0, %q0, %q1; red.global.add.u32 [%q0], 1;"""
    stats = run_kernel(body, seen, threads=40, grid=(5, 3, 2), sms=3)
    assert (seen == 1).all()
    assert stats.opcodes["red.global.add.u32"] == 30 * 2  # a full warp and one of eight threads
    assert stats.warp_instructions == sum(stats.opcodes.values())


def test_cluster_registers_name_the_place_in_the_cluster():
    seen = np.zeros((8, 4), "u4")
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %clusterid.x;
    mov.u32 %r4, %cluster_nctaid.x; mov.u32 %r5, %nclusterid.x; ld.param.b64 %q0, [p0]; mul.wide.u32 %q1, %r1, 16;
    add.s64 %q0, %q0, %q1; st.global.v4.b32 [%q0], {%r2, %r3, %r4, %r5};"""
    run_kernel(body, seen, grid=(8, 1, 1), cluster=(2, 1, 1))
    assert seen.tolist() == [[cta % 2, cta // 2, 2, 4] for cta in range(8)]


REVERSE = """
ld.param.b64 %q0, [p0]; mul.wide.u32 %q1, %t, 4; add.s64 %q0, %q0, %q1; mov.b32 %r9, smem; shl.b32 %r8, %t, 2;
add.s32 %r8, %r9, %r8; st.shared.b32 [%r8], %t; BARRIER
sub.s32 %r7, 255, %t; shl.b32 %r7, %r7, 2; add.s32 %r7, %r9, %r7; ld.shared.b32 %r6, [%r7]; st.global.b32 [%q0], %r6;
"""


def reverse(barrier, seed):
    result = np.zeros(256, "u4")
    run_kernel(REVERSE.replace("BARRIER", barrier), result, threads=256, seed=seed)
    return result.tolist() == list(range(255, -1, -1))


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.sync 3, 256;", "barrier.sync 1;"])
def test_barrier_orders_shared_memory_between_warps(barrier):
    assert all(reverse(barrier, seed) for seed in range(4))


def test_missing_barrier_gives_wrong_numbers():
    assert not all(reverse("", seed) for seed in range(4))


def test_warps_that_have_exited_are_not_waited_for():
    run_kernel("setp.lt.u32 %p1, %t, 32; @%p1 bra END; bar.sync 0; END:", np.zeros(1, "u4"), threads=128)


def test_arriving_warps_do_not_wait():
    body = """setp.lt.u32 %p1, %t, 32; @%p1 bra WAIT; bar.arrive 1, 64; bra END; WAIT: bar.sync 1, 64; END:"""
    run_kernel(body, np.zeros(1, "u4"), threads=64)


def test_barrier_with_two_counts_is_a_fault():
    body = "setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 1, 96; bra END; A: bar.sync 1, 128; END:"
    with pytest.raises(KernelFault, match="named barrier 1: arrivals expect"):
        run_kernel(body, np.zeros(1, "u4"), threads=64)


def test_deadlock_names_every_warp_and_what_it_waits_for():
    body = """setp.lt.u32 %p1, %t, 32; @%p1 bra POLL; bar.sync 2, 128; bra END;
    POLL: ld.param.b64 %q0, [p0]; ld.acquire.gpu.global.b32 %r1, [%q0]; setp.eq.s32 %p2, %r1, 0; @%p2 bra POLL; END:"""
    with pytest.raises(Deadlock, match="no warp can go on") as raised:
        run_kernel(body, np.zeros(1, "u4"), threads=96)
    polls, *barriers = raised.value.waits
    assert "warp 0" in polls and "polls 0x" in polls and "which holds 00000000" in polls
    assert len(barriers) == 2 and all("named barrier 2: 64 of 128 threads" in line for line in barriers)


def test_lanes_that_never_meet_are_a_deadlock_that_names_them():
    body = """setp.lt.u32 %p1, %t, 8; @%p1 bra END; bar.warp.sync -1; ld.param.b64 %q0, [p0]; bra OUT;
    END: ld.param.b64 %q0, [p0]; AGAIN: ld.volatile.global.b32 %r1, [%q0]; setp.eq.s32 %p2, %r1, 0; @%p2 bra AGAIN;
    OUT:"""
    with pytest.raises(Deadlock, match=r"lanes 0x000000ff of the warp are elsewhere"):
        run_kernel(body, np.zeros(1, "u4"))


def test_loop_with_a_bound_that_only_polls_ends_by_itself():
    body = """mov.b32 %r2, 0; ld.param.b64 %q0, [p0];
    AGAIN: ld.relaxed.gpu.global.b32 %r1, [%q0]; add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 6; @%p1 bra AGAIN;
    st.global.b32 [%q0+4], %r2;"""
    words = np.zeros(2, "u4")
    run_kernel(body, words)
    assert words.tolist() == [0, 6]


# Adds 1 to the other's word, then waits for its own.
HANDSHAKE = """
ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; setp.ne.s32 %p1, %t, 0; @%p1 bra END;
red.release.sys.global.add.u32 [%q1], 1;
AGAIN: ld.acquire.sys.global.b32 %r1, [%q0]; nanosleep.u32 100; setp.eq.s32 %p2, %r1, 0; @%p2 bra AGAIN;
END:
"""


def handshake(grids_together):
    words = np.zeros(2, "u4")
    memory = DeviceMemory()
    memory.add(words.ctypes.data, words.nbytes, "words")
    addresses = [words.ctypes.data, words.ctypes.data + 4]
    kernel = make_kernel(HANDSHAKE, 2, 32)
    grids = []
    for own, other in (addresses, addresses[::-1]):
        params = [address.to_bytes(8, "little") for address in (own, other)]
        grids.append(Grid(kernel, (1, 1, 1), (32, 1, 1), params, memory))
    for batch in [grids] if grids_together else [[grid] for grid in grids]:
        run(batch, seed=1)
    return words.tolist()


def test_launches_that_wait_for_each_other_run_together():
    assert handshake(grids_together=True) == [1, 1]


def test_launch_that_waits_for_a_later_one_is_a_deadlock():
    with pytest.raises(Deadlock, match="polls"):
        handshake(grids_together=False)


ORDER = """
ld.param.b64 %q0, [p0]; mov.u32 %r1, %ctaid.x; shr.u32 %r2, %t, 5; mad.lo.s32 %r1, %r1, 4, %r2;
and.b32 %r3, %t, 31; setp.ne.s32 %p1, %r3, 0; @%p1 bra END;
atom.global.add.u32 %r4, [%q0], 1; mul.wide.u32 %q1, %r4, 4; add.s64 %q1, %q0, %q1; st.global.b32 [%q1+4], %r1;
END:
"""


def order_of_warps(seed):
    words = np.zeros(17, "u4")
    run_kernel(ORDER, words, threads=128, grid=(4, 1, 1), seed=seed)
    assert sorted(words[1:].tolist()) == list(range(16))
    return words.tolist()


def test_seed_decides_the_order_and_replays_it():
    assert order_of_warps(7) == order_of_warps(7)
    assert len({tuple(order_of_warps(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": (0, 1, 1)}, "every extent must be at least 1"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of cluster"),
        ({"grid": (8, 1, 1), "cluster": (8, 1, 1)}, "raise sms"),
    ],
)
def test_impossible_launch_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        run_kernel("", np.zeros(1, "u4"), **options)


def test_timer_advances_with_work():
    times = np.zeros(2, "u8")
    body = """ld.param.b64 %q0, [p0]; mov.u64 %q1, %globaltimer; mov.b32 %r1, 0;
    AGAIN: add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 5000; @%p1 bra AGAIN; mov.u64 %q2, %globaltimer;
    st.global.v2.b64 [%q0], {%q1, %q2};"""
    run_kernel(body, times)
    assert times[1] > times[0]
