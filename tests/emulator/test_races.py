"""The race detector: for each way to order two accesses a kernel that does it, and twins that leave a part out.

A body has marks ``[[kind: text]]`` and ``[[kind: text => other]]``. As written, all of the texts stand, and nothing may
be found. Each twin leaves one text out, or has the other in its place, and must be found to have that kind of fault and
no other.
"""

import re

import numpy as np
import pytest
from microkernel import run_kernel

from mok_cute.emulator.races import RaceError

pytestmark = pytest.mark.emulated

SEEDS = 6
MARK = re.compile(r"\[\[([a-z ]+): (.*?)(?: => (.*?))?\]\]", re.S)
# %w the warp; %p1 thread 0; %p2 warp 0; %p3 not warp 0. %r9 shared memory, %r8 an mbarrier of one arrival, %r7 another.
# %q0 and %q1 the parameters: data (16-byte aligned) and flags. %c the CTA; %p4 CTA 0.
START = """
.reg .b32 %w; .reg .b32 %c; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; shr.u32 %w, %t, 5;
setp.eq.s32 %p1, %t, 0; setp.eq.s32 %p2, %w, 0; setp.ne.s32 %p3, %w, 0; mov.u32 %c, %ctaid.x; setp.eq.s32 %p4, %c, 0;
mov.b32 %r9, smem; add.s32 %r8, %r9, 8192; add.s32 %r7, %r9, 8200;
"""
BARRIERS = """
@%p1 mbarrier.init.shared.b64 [%r8], 1; @%p1 mbarrier.init.shared.b64 [%r7], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;
"""
ZEROS = "@%p2 st.shared.b32 [%r9], 0; @%p2 st.shared.b32 [%r9+4], 0; @%p2 st.shared.v2.b32 [%r9+8], {0, 0};"
LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%q0], 16, [%r8];
"""
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r9], 16; @%p1 cp.async.bulk.commit_group;"
DONE = "@%p1 cp.async.bulk.wait_group.read 0;"
# One CTA publishes, the other waits for it.
SKIP = "@!%p4 bra OTHER;"
POLL = "bra END; OTHER: {load} %r1, [%q1]; setp.eq.s32 %p5, %r1, 0; @%p5 bra OTHER;"
PUBLISH = "@%p1 st.release.gpu.global.b32 [%q1], 1;"
ACQUIRE = POLL.format(load="ld.acquire.gpu.global.b32")
TWO = {"grid": (2, 1, 1)}
CLUSTER = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
PAIR = {"threads": 160}  # warps 0 and 4 share the lanes of tensor memory
ALLOCATE = """
@%p3 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9+4096], 32; ALLOCATED: bar.sync 0;
ld.shared.b32 %r10, [%r9+4096]; setp.eq.s32 %p6, %w, 4;
"""
DEALLOCATE = "LAST: bar.sync 0; @%p3 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32; END:"
# Operands of 16 rows of 128 bytes, at the start of shared memory and 2048 bytes on; descriptors %q4 and %q5.
FILL = """
mov.b32 %r251, %t; FILL: shl.b32 %r252, %r251, 2; setp.ge.u32 %p7, %r252, 4096; @%p7 bra FILLED;
add.s32 %r254, %r9, %r252; st.shared.b32 [%r254], 0; add.s32 %r251, %r251, {threads}; bra FILL; FILLED:
"""
DESCRIPTORS = """
shr.u32 %r255, %r9, 4; and.b32 %r255, %r255, 16383; cvt.u64.u32 %q4, %r255; or.b64 %q4, %q4, {high};
add.s64 %q5, %q4, 128;
"""
WGMMA = """
wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %q4, %q5,
0, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;
"""
MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r10], %q4, %q5, {form}, {more};".replace(
    "{form}", str(1 << 4 | 1 << 7 | 1 << 10 | 16 // 8 << 17 | 64 // 16 << 24)
)
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p5, [%r8], 0;"
TCGEN05_HIGH = 1 << 16 | 16 << 32 | 1 << 46
WGMMA_HIGH = 8 << 16 | 16 << 32

CASES = {
    # Within a CTA.
    "named barrier": (
        ZEROS + "bar.sync 0; @%p2 st.shared.b32 [%r9], 7; [[race: bar.sync 0;]] @%p3 ld.shared.b32 %r1, [%r9];",
        {},
    ),
    "named barrier before a write": (
        ZEROS + "bar.sync 0; @%p3 ld.shared.b32 %r1, [%r9]; [[race: bar.sync 0;]] @%p2 st.shared.b32 [%r9], 7;",
        {},
    ),
    "mbarrier": (
        BARRIERS
        + ZEROS
        + "bar.sync 0; @%p2 st.shared.b32 [%r9], 7;"
        + "@%p1 mbarrier.arrive[[race: .release => .relaxed]].cta.shared.b64 _, [%r8];"
        + f"@%p2 bra END; [[race: {WAIT}]] ld.shared.b32 %r1, [%r9]; END:",
        {},
    ),
    "halves of a word by two warps": (
        ZEROS + "bar.sync 0; mul.lo.s32 %r1, %w, 2; add.s32 %r1, %r1, %r9; mov.b16 %h1, 5; st.shared.b16 [%r1], %h1;"
        "[[race: bar.sync 0;]] @%p2 ld.shared.b32 %r2, [%r9];",
        {},
    ),
    "atomics of two warps": (
        "@%p1 st.shared.b32 [%r9], 0; [[race: bar.sync 0;]] atom.shared.add.u32 %r1, [%r9], 1;",
        {},
    ),
    "uninitialised": ("[[uninitialised: @%p2 st.shared.b32 [%r9], 7;]] bar.sync 0; ld.shared.b32 %r1, [%r9];", {}),
    # Copies.
    "load": (
        BARRIERS + ZEROS + f"fence.proxy.async; bar.sync 0; {LOAD} [[race: {WAIT}]] ld.shared.b32 %r1, [%r9];",
        {},
    ),
    "load over what was written": (
        BARRIERS + ZEROS + f"[[proxy: fence.proxy.async;]] bar.sync 0; {LOAD} {WAIT} ld.shared.b32 %r1, [%r9];",
        {},
    ),
    "load over what is read": (
        BARRIERS + ZEROS + "fence.proxy.async; bar.sync 0; @%p3 ld.shared.b32 %r1, [%r9];"
        f"[[race: bar.sync 0;]] {LOAD} {WAIT}",
        {},
    ),
    "load that reports to a fresh barrier": (
        "@%p1 mbarrier.init.shared.b64 [%r8], 1; [[mbarrier: fence.mbarrier_init.release.cluster;]] bar.sync 0;"
        + LOAD
        + WAIT,
        {},
    ),
    "store of what was written": (ZEROS + f"[[proxy: fence.proxy.async.shared::cta;]] bar.sync 0; {STORE} {DONE}", {}),
    "store of nothing": (f"[[uninitialised: {ZEROS}]] fence.proxy.async; bar.sync 0; {STORE} {DONE}", {}),
    "store that is not waited for": (ZEROS + f"fence.proxy.async; bar.sync 0; {STORE} [[exit: {DONE}]]", {}),
    "store before its source is reused": (
        ZEROS + f"fence.proxy.async; bar.sync 0; {STORE} [[race: {DONE}]]"
        f"[[race: bar.sync 0;]] @%p3 st.shared.b32 [%r9], 1; {DONE}",
        {},
    ),
    "store before its own warp reuses its source": (
        ZEROS + f"fence.proxy.async; bar.sync 0; {STORE} [[race: {DONE}]] @%p1 st.shared.b32 [%r9], 1; {DONE}",
        {},
    ),
    "store to another CTA": (
        f"{SKIP} {ZEROS} fence.proxy.async; bar.sync 0; {STORE} @%p1 cp.async.bulk.wait_group[[race:  => .read]] 0;"
        f"[[race: fence.proxy.async.global;]] {PUBLISH} {ACQUIRE} ld.global.b32 %r2, [%q0]; END:",
        TWO,
    ),
    "store to another CTA's load": (
        f"{BARRIERS} {SKIP} {ZEROS} fence.proxy.async; bar.sync 0; {STORE} @%p1 cp.async.bulk.wait_group 0;"
        f"fence.proxy.async; {PUBLISH} {ACQUIRE} [[proxy: fence.proxy.async.global;]] {LOAD} {WAIT} END:",
        TWO,
    ),
    "plain store to another CTA's load": (
        f"{BARRIERS} {SKIP} @%p1 st.global.b32 [%q0], 5; {PUBLISH} {ACQUIRE} [[proxy: fence.proxy.async;]]"
        f"{LOAD} {WAIT} END:",
        TWO,
    ),
    "plain store with the writer's fence to another CTA's load": (
        f"{BARRIERS} {SKIP} @%p1 st.global.b32 [%q0], 5; [[proxy: fence.proxy.async;]] {PUBLISH} {ACQUIRE}"
        f"{LOAD} {WAIT} END:",
        TWO,
    ),
    "copies of a thread, in groups": (
        ZEROS + "bar.sync 0; @%p1 cp.async.ca.shared.global [%r9], [%q0], 4; @%p1 cp.async.commit_group;"
        "@%p1 cp.async.ca.shared.global [%r9+64], [%q0+4], 4; @%p1 cp.async.commit_group;"
        "@%p1 cp.async.wait_group [[race: 1 => 2]]; [[race: bar.sync 0;]] @%p3 ld.shared.b32 %r1, [%r9];"
        "@%p1 cp.async.wait_all;",
        {},
    ),
    "copies of a thread, with an mbarrier": (
        BARRIERS + ZEROS + "bar.sync 0; @%p1 cp.async.ca.shared.global [%r9], [%q0], 4;"
        f"@%p1 cp.async.mbarrier.arrive.noinc.shared.b64 [%r8]; @%p2 bra END; [[race: {WAIT}]]"
        "ld.shared.b32 %r1, [%r9]; END:",
        {},
    ),
    "sums of bulk copies from two CTAs": (
        ZEROS + "@%p1 st.shared.v4.b32 [%r9], {1, 1, 1, 1}; fence.proxy.async; bar.sync 0;"
        "@%p1 cp.[[race: reduce.async.bulk.global.shared::cta.bulk_group.add.u32 => "
        "async.bulk.global.shared::cta.bulk_group]] [%q0], [%r9], 16; @%p1 cp.async.bulk.commit_group;" + DONE,
        TWO,
    ),
    "remote sums from two CTAs": (
        BARRIERS + "@%p1 st.shared.b32 [%r9], 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 8;"
        "fence.proxy.async; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        "mapa.shared::cluster.u32 %r1, %r9, 0; mapa.shared::cluster.u32 %r2, %r8, 0;"
        "@%p1 red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], 1, [%r2];"
        f"@!%p4 bra TOLD; [[race: {WAIT}]] ld.shared.b32 %r3, [%r9];"
        "TOLD: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        CLUSTER,
    ),
    # Words of global memory.
    "release and acquire": (
        f"{SKIP} @%p1 st.global.b32 [%q0], 5; @%p1 st.[[race: release => relaxed]].gpu.global.b32 [%q1], 1;"
        + POLL.format(load="ld.[[race: acquire => relaxed]].gpu.global.b32")
        + "ld.global.b32 %r2, [%q0]; END:",
        TWO,
    ),
    "scope of the CTA only": (
        f"{SKIP} @%p1 st.global.b32 [%q0], 5; @%p1 st.release.[[scope: gpu => cta]].global.b32 [%q1], 1;"
        + POLL.format(load="ld.acquire.gpu.global.b32")
        + "END:",
        TWO,
    ),
    "fences around relaxed accesses": (
        f"{SKIP} @%p1 st.global.b32 [%q0], 5; [[race: fence.acq_rel.gpu;]] @%p1 st.relaxed.gpu.global.b32 [%q1], 1;"
        + POLL.format(load="ld.relaxed.gpu.global.b32")
        + "[[race: fence.acq_rel.gpu;]] ld.global.b32 %r2, [%q0]; END:",
        TWO,
    ),
    "weak store to a word that is polled": (
        f"{SKIP} @%p1 st[[race: .release.gpu => ]].global.b32 [%q1], 1;"
        + POLL.format(load="ld.acquire.gpu.global.b32")
        + "END:",
        TWO,
    ),
    "addition continues the release before it": (
        "@%p4 st.global.b32 [%q0], 5; setp.eq.s32 %p5, %c, 1; @%p5 st.global.b32 [%q0+4], 5; bar.warp.sync -1;"
        "setp.eq.s32 %p6, %c, 2; @%p6 bra POLL;"
        "@%p1 red.[[race: release => relaxed]].gpu.global.add.u32 [%q1], 1; bra END;"
        "POLL: ld.acquire.gpu.global.b32 %r1, [%q1]; setp.lt.u32 %p7, %r1, [[race: 2 => 1]]; @%p7 bra POLL;"
        "ld.global.v2.b32 {%r2, %r3}, [%q0]; END:",
        {"grid": (3, 1, 1), "threads": 32},
    ),
    # Clusters.
    "cluster barrier": (
        "and.pred %p5, %p1, %p4; @%p5 st.shared.b32 [%r9], 5;"
        "barrier.cluster.arrive.[[race: release => relaxed]].aligned;"
        "barrier.cluster.wait.acquire.aligned; @%p4 bra DONE; mapa.shared::cluster.u32 %r1, %r9, 0;"
        "ld.shared::cluster.b32 %r2, [%r1]; DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        CLUSTER,
    ),
    "mbarrier of another CTA": (
        "@%p1 mbarrier.init.shared.b64 [%r8], 1; [[mbarrier: fence.mbarrier_init.release.cluster;]]"
        "[[mbarrier: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; => bar.sync 0;]]"
        f"@%p4 bra TOLD; mapa.shared::cluster.u32 %r1, %r8, 0; @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r1];"
        f"bra DONE; TOLD: {WAIT} DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        CLUSTER,
    ),
    "answer of cluster launch control": (
        BARRIERS + ZEROS + "fence.proxy.async; bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16;"
        "@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r9], [%r8];"
        f"[[race: {WAIT}]] ld.shared.b32 %r1, [%r9]; bar.sync 0;",
        {},
    ),
    # wgmma.
    "wgmma of what was written": (
        FILL.format(threads=128)
        + "[[proxy: fence.proxy.async;]] bar.sync 0;"
        + DESCRIPTORS.format(high=WGMMA_HIGH)
        + WGMMA
        + "wgmma.wait_group.sync.aligned 0;",
        {"threads": 128},
    ),
    "wgmma before its operand is overwritten": (
        FILL.format(threads=128)
        + "fence.proxy.async; bar.sync 0;"
        + DESCRIPTORS.format(high=WGMMA_HIGH)
        + WGMMA
        + "[[race: wgmma.wait_group.sync.aligned 0;]] [[race: bar.sync 0;]] @%p1 st.shared.b32 [%r9+2048], 1;",
        {"threads": 128},
    ),
    # Tensor memory.
    "tensor memory by two warps": (
        ALLOCATE + "@%p3 bra READ; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%t};"
        "[[race: tcgen05.wait::st.sync.aligned;]] [[tensor fence: tcgen05.fence::before_thread_sync;]]"
        "READ: bar.sync 1, 160; @!%p6 bra LAST; [[tensor fence: tcgen05.fence::after_thread_sync;]]"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r10]; tcgen05.wait::ld.sync.aligned;" + DEALLOCATE,
        PAIR,
    ),
    "tensor memory overwritten by another warp": (
        ALLOCATE + "@%p3 bra WRITE; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%t}; tcgen05.wait::st.sync.aligned;"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r10]; [[race: tcgen05.wait::ld.sync.aligned;]]"
        "tcgen05.fence::before_thread_sync; WRITE: [[race: bar.sync 1, 160;]] @!%p6 bra LAST;"
        "tcgen05.fence::after_thread_sync; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%t};"
        "tcgen05.wait::st.sync.aligned;" + DEALLOCATE,
        PAIR,
    ),
    "uninitialised tensor memory": (
        ALLOCATE + "@%p3 bra LAST; [[uninitialised: tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10+2], {%t};]]"
        "tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r10+2];" + DEALLOCATE,
        PAIR,
    ),
    "product read by another warp": (
        BARRIERS
        + ALLOCATE
        + FILL.format(threads=160)
        + "[[proxy: fence.proxy.async;]] bar.sync 0;"
        + DESCRIPTORS.format(high=TCGEN05_HIGH)
        + MMA.format(more=0)
        + MMA.format(more=1)
        + COMMIT
        + WAIT
        + "@!%p6 bra LAST; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r10]; tcgen05.wait::ld.sync.aligned;"
        + DEALLOCATE,
        PAIR,
    ),
    "operand overwritten behind a product": (
        BARRIERS
        + ALLOCATE
        + FILL.format(threads=160)
        + "fence.proxy.async; bar.sync 0;"
        + DESCRIPTORS.format(high=TCGEN05_HIGH)
        + MMA.format(more=0)
        + COMMIT
        + f"[[race: {WAIT}]] @%p6 st.shared.b32 [%r9], 1; {WAIT}"
        + DEALLOCATE,
        PAIR,
    ),
    "sum onto a product that was never made": (
        BARRIERS
        + ALLOCATE
        + FILL.format(threads=160)
        + "fence.proxy.async; bar.sync 0;"
        + DESCRIPTORS.format(high=TCGEN05_HIGH)
        + MMA.format(more="[[uninitialised: 0 => 1]]")
        + COMMIT
        + WAIT
        + DEALLOCATE,
        PAIR,
    ),
}


def variants():
    """(body, options, kind of what must be found), as parameters of a test."""
    parameters = []
    for name, (body, options) in CASES.items():
        parameters.append(pytest.param(MARK.sub(lambda mark: mark[2], body), options, None, id=name))
        for number, twin in enumerate(MARK.finditer(body)):
            twinned = "".join(part for part in _parts(body, twin.start()))
            parameters.append(pytest.param(twinned, options, twin[1], id=f"{name}, twin {number}"))
    return parameters


def _parts(body, chosen):
    end = 0
    for mark in MARK.finditer(body):
        yield body[end : mark.start()]
        yield (mark[3] or "") if mark.start() == chosen else mark[2]
        end = mark.end()
    yield body[end:]


def findings_of(body, seed=0, **options):
    raw = np.zeros(512, np.uint8)
    data = raw[-raw.ctypes.data % 128 :][:128].view("u4")
    end = "" if "END:" in body else " END:"
    options = {"threads": 64, **options}
    try:
        run_kernel(START + body + end, data, np.zeros(4, "u4"), seed=seed, check_races=True, **options)
    except RaceError as error:
        return error.findings
    return []


@pytest.mark.parametrize(("body", "options", "kind"), variants())
def test_what_is_left_out_is_found(body, options, kind):
    """In some of a few orders, and in none is anything else found."""
    kinds = {finding.kind for seed in range(SEEDS) for finding in findings_of(body, seed, **options)}
    assert kinds == ({kind} if kind else set())
