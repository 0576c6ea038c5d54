"""mbarriers and copies of the virtual GPU: what arrives where, and what a kernel sees that does not wait."""

import numpy as np
import pytest
from microkernel import run_kernel

from mok_cute.emulator.async_copy import MBarrier
from mok_cute.emulator.device import Deadlock
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.tensor_map import TensorMap

pytestmark = pytest.mark.emulated

# %r9 data and %r8 barrier in shared memory, %p1 thread 0, %q0.. the parameters.
PROLOGUE = """
mov.b32 %r9, smem; add.s32 %r8, %r9, 12288; setp.eq.s32 %p1, %t, 0;
@%p1 mbarrier.init.shared.b64 [%r8], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0;"


def expect(num_bytes):
    return f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {num_bytes};"


def parameters(count):
    return "".join(f"ld.param.b64 %q{number}, [p{number}];" for number in range(count))


def copy_out(num_bytes, threads=32):
    """All threads copy shared memory to the array of the last parameter, %q1, four bytes at a time."""
    return f"""
    mov.b32 %r1, %t;
    COPY: shl.b32 %r2, %r1, 2; setp.ge.u32 %p3, %r2, {num_bytes}; @%p3 bra COPIED;
    add.s32 %r3, %r9, %r2; ld.shared.b32 %r4, [%r3]; cvt.u64.u32 %q8, %r2; add.s64 %q8, %q1, %q8;
    st.global.b32 [%q8], %r4; add.s32 %r1, %r1, {threads}; bra COPY;
    COPIED: bar.sync 0;
    """


def aligned(data, align=1024):
    raw = np.zeros(data.nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    result = raw[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    result[...] = data
    return result


# ----------------------------------------------------------------------------------------------------------- mbarriers


def test_barrier_word_keeps_what_it_holds():
    for barrier in (MBarrier(1, 3, 5, 0), MBarrier(0, 1, (1 << 20) - 1, 4096), MBarrier(1, 2, 2, -512)):
        assert MBarrier.load(barrier.word()) == barrier


def test_phase_ends_when_arrivals_and_bytes_are_there():
    barrier = MBarrier(0, 2, 2, 0)
    barrier.update(1, 256)
    barrier.update(1, 0)
    assert barrier.phase == 0
    barrier.update(0, -256)
    assert (barrier.phase, barrier.pending, barrier.missing_bytes) == (1, 2, 0)


def test_arrival_beyond_the_count_is_a_fault():
    with pytest.raises(KernelFault, match="2 arrivals more than its count of 1"):
        run_kernel(PROLOGUE + "@%p1 mbarrier.arrive.shared.b64 %q3, [%r8], 3;", np.zeros(1, "u4"))


def test_wait_on_the_parity_before_the_first_phase_passes_at_once():
    run_kernel(PROLOGUE + "mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 1;", np.zeros(1, "u4"))


@pytest.mark.parametrize("announced", [496, 528])
def test_wrong_byte_count_is_a_deadlock_that_names_the_missing_bytes(announced):
    source, target = aligned(np.arange(128, dtype="u4")), np.zeros(128, "u4")
    body = PROLOGUE + parameters(2) + expect(announced)
    body += "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%q0], 512, [%r8];" + WAIT
    with pytest.raises(
        Deadlock, match=rf"parity 0: phase 0, 0 of 1 arrivals missing, {announced - 512} bytes"
    ) as raised:
        run_kernel(body, source, target, threads=64)
    assert len(raised.value.waits) == 2
    assert "warp 1" in raised.value.waits[1]


# -------------------------------------------------------------------------------------------------------- bulk copies


@pytest.mark.parametrize("seed", range(4))
def test_bulk_load_arrives_before_the_wait_ends(seed):
    source, target = aligned(np.arange(1024, dtype="u4")), np.zeros(1024, "u4")
    body = PROLOGUE + parameters(2) + expect(4096)
    body += "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%q0], 4096, [%r8];"
    stats = run_kernel(body + WAIT + copy_out(4096, 64), source, target, threads=64, seed=seed)
    np.testing.assert_array_equal(source, target)
    assert stats.async_operations == {"bulk load": 1}


def test_load_without_a_wait_is_seen_to_come_late():
    source, target = aligned(np.arange(1024, dtype="u4")), np.zeros(1024, "u4")
    body = PROLOGUE + parameters(2) + expect(4096)
    body += "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%q0], 4096, [%r8];"
    wrong = 0
    for seed in range(8):
        run_kernel(body + copy_out(4096), source, target, seed=seed)
        wrong += not np.array_equal(source, target)
    assert wrong


STORE = """
st.shared.b32 [%r9], 1111; fence.proxy.async.shared::cta;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r9], 16; @%p1 cp.async.bulk.commit_group;
"""


def stored_values(wait, after):
    """First words that end up in global memory, over seeds."""
    seen = set()
    for seed in range(12):
        target, flag = aligned(np.zeros(4, "u4")), np.zeros(1, "u4")
        run_kernel(PROLOGUE + parameters(2) + STORE + wait + after, target, flag, seed=seed)
        seen.add((int(target[0]), int(flag[0])))
    return seen


def test_source_of_a_store_may_be_reused_after_its_read():
    reuse = "bar.warp.sync -1; st.shared.b32 [%r9], 2222;"
    assert stored_values("@%p1 cp.async.bulk.wait_group.read 0;", reuse) == {(1111, 0)}
    assert (2222, 0) in stored_values("", reuse)


def test_store_is_visible_only_after_the_full_wait():
    look = "@%p1 ld.global.b32 %r1, [%q0]; @%p1 st.global.b32 [%q1], %r1;"
    assert stored_values("@%p1 cp.async.bulk.wait_group 0;", look) == {(1111, 1111)}
    assert stored_values("@%p1 cp.async.bulk.wait_group.read 0;", look) >= {(1111, 0)}


def test_misaligned_bulk_copy_is_a_fault():
    body = PROLOGUE + parameters(1) + "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%q0+4], [%r9], 16;"
    with pytest.raises(KernelFault, match="multiples of 16"):
        run_kernel(body, aligned(np.zeros(16, "u4")))


# ---------------------------------------------------------------------------------------------------------- TMA tiles


def make_map(tensor, box, swizzle=0, **options):
    dims = tuple(reversed(tensor.shape))
    strides = tuple(reversed(tensor.strides))[1:]
    steps = (1,) * tensor.ndim
    address = tensor.ctypes.data
    return TensorMap("u16", tensor.ndim, address, dims, strides, box, steps, swizzle=swizzle, **options)


def load_box(tensor, box, at, swizzle=0, **options):
    """What a tile load leaves in shared memory, as u16 elements in the order of addresses."""
    tma = make_map(tensor, box, swizzle, **options)
    raw = aligned(np.frombuffer(tma.encode(), np.uint8))
    out = np.zeros(tma.box_bytes // 2, "u2")
    body = PROLOGUE + parameters(2) + expect(tma.box_bytes)
    kind = f"cp.async.bulk.tensor.{tensor.ndim}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    body += f"@%p1 {kind} [%r9], [%q0, {{{', '.join(map(str, at))}}}], [%r8];" + WAIT + copy_out(out.nbytes)
    run_kernel(body, raw, out, tensor, seed=sum(at) % 5)
    return out


def box_by_hand(tensor, box, at):
    """Element by element, zero outside."""
    result = np.zeros(tuple(reversed(box)), tensor.dtype)
    for index in np.ndindex(*result.shape):
        place = tuple(c + i for c, i in zip(reversed(at), index, strict=True))
        if all(0 <= p < extent for p, extent in zip(place, tensor.shape, strict=True)):
            result[index] = tensor[place]
    return result


TILES = [
    pytest.param((256,), (64,), (32,), id="1d"),
    pytest.param((24, 64), (64, 8), (0, 8), id="2d"),
    pytest.param((5, 24, 64), (32, 8, 2), (16, 16, 3), id="3d"),
    pytest.param((2, 3, 8, 32), (16, 4, 2, 2), (16, 2, 1, 0), id="4d"),
    pytest.param((2, 2, 3, 8, 32), (8, 2, 2, 2, 1), (8, 2, 1, 0, 1), id="5d"),
    pytest.param((24, 64), (64, 8), (8, 20), id="beyond_the_end"),
    pytest.param((24, 64), (64, 8), (-3, -2), id="before_the_start"),
    pytest.param((24, 64), (64, 8), (200, 0), id="outside"),
]


@pytest.mark.parametrize(("shape", "box", "at"), TILES)
def test_tile_load_takes_the_box_and_zeros_outside(shape, box, at):
    tensor = aligned(np.arange(1, 1 + np.prod(shape)).astype("u2").reshape(shape))
    np.testing.assert_array_equal(load_box(tensor, box, at), box_by_hand(tensor, box, at).ravel())


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzle_moves_chunks_by_the_row_bits(span):
    """Chunk c of row r lies at c XOR the row bits: r at 128 bytes, r / 2 at 64, r / 4 at 32."""
    columns = span // 2
    tensor = aligned(np.arange(16 * columns).astype("u2").reshape(16, columns))
    got = load_box(tensor, (columns, 16), (0, 0), swizzle=span).reshape(16, span // 16, 8)
    for row in range(16):
        for chunk in range(span // 16):
            place = chunk ^ (row * span // 128 % (span // 16))
            np.testing.assert_array_equal(got[row, place], tensor[row, 8 * chunk : 8 * chunk + 8])


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (0, 20)])
def test_tile_store_brings_back_what_a_load_took(swizzle, at):
    columns = (swizzle or 64) // 2
    source = aligned(np.random.default_rng(swizzle).integers(0, 1 << 16, (24, columns)).astype("u2"))
    target = aligned(np.zeros((24, columns), "u2"))
    maps = [make_map(tensor, (columns, 8), swizzle) for tensor in (source, target)]
    raw = [aligned(np.frombuffer(one.encode(), np.uint8)) for one in maps]
    place = f"{{{at[0]}, {at[1]}}}"
    body = PROLOGUE + parameters(2) + expect(maps[0].box_bytes)
    body += f"""@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r9], [%q0, {place}], [%r8]; {WAIT}
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%q1, {place}], [%r9];
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"""
    run_kernel(body, *raw, source, target)
    rows = slice(at[1], min(at[1] + 8, 24))
    np.testing.assert_array_equal(target[rows], source[rows])
    target[rows] = 0
    assert not target.any()


def test_rank_of_descriptor_and_copy_must_agree():
    tensor = aligned(np.zeros((8, 64), "u2"))
    raw = aligned(np.frombuffer(make_map(tensor, (64, 8)).encode(), np.uint8))
    body = PROLOGUE + parameters(1)
    body += (
        "@%p1 cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r9], [%q0, {0}], [%r8];"
    )
    with pytest.raises(KernelFault, match="rank 1 with a descriptor of rank 2"):
        run_kernel(body, raw, tensor)


# ----------------------------------------------------------------------------------------------------------- clusters


def test_multicast_brings_data_and_bytes_to_every_cta_of_the_mask():
    source, target = aligned(np.arange(64, dtype="u4")), np.zeros((2, 64), "u4")
    body = PROLOGUE + parameters(2) + "mov.u32 %r20, %cluster_ctarank; setp.eq.and.u32 %p4, %r20, 0, %p1;"
    body += expect(256) + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.b16 %h1, 3;"
    body += (
        """@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r9], [%q0], 256, [%r8], %h1;"""
        + WAIT
    )
    body += "mul.wide.u32 %q3, %r20, 256; add.s64 %q1, %q1, %q3;" + copy_out(256)
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    run_kernel(body, source, target, grid=(2, 1, 1), cluster=(2, 1, 1), seed=3)
    np.testing.assert_array_equal(target, np.stack([source, source]))


def test_mapa_and_remote_arrival_reach_the_other_cta():
    body = (
        PROLOGUE
        + """
    mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; mapa.shared::cluster.u32 %r22, %r8, %r21;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];"""
        + WAIT
    )
    run_kernel(body, np.zeros(1, "u4"), grid=(4, 1, 1), cluster=(2, 1, 1))
