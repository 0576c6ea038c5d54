"""Tensor memory and tcgen05 of the virtual GPU against torch."""

import numpy as np
import pytest
import torch
from microkernel import run_kernel

from mok_cute.emulator.device import Deadlock
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.number_formats import E4M3, E5M2

pytestmark = pytest.mark.emulated

SWIZZLE_NUMBER = {0: 0, 128: 2, 64: 4, 32: 6}
# 128 threads. Shared memory: operands from smem, the barrier at +48K, the address of tensor memory at +48K+8.
PROLOGUE = """
ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; mov.b32 %r250, smem; add.s32 %r249, %r250, 49152;
setp.eq.s32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [%r249], 1;
setp.ge.u32 %p2, %t, 32; @%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r249+8], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED: bar.sync 0; ld.shared.b32 %r248, [%r249+8];
shr.u32 %r247, %t, 5; shl.b32 %r247, %r247, 21; add.s32 %r247, %r247, %r248;
"""
EPILOGUE = """
bar.sync 0; setp.ge.u32 %p2, %t, 32; @%p2 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r248, 64; END:
"""
FILL = """
mov.b32 %r251, %t;
FILL: shl.b32 %r252, %r251, 2; setp.ge.u32 %p1, %r252, {num_bytes}; @%p1 bra FILLED;
cvt.u64.u32 %q2, %r252; add.s64 %q2, %q0, %q2; ld.global.b32 %r253, [%q2]; add.s32 %r254, %r250, %r252;
st.shared.b32 [%r254], %r253; add.s32 %r251, %r251, 128; bra FILL;
FILLED: fence.proxy.async.shared::cta; bar.sync 0; setp.eq.s32 %p1, %t, 0;
"""
READ = """
tcgen05.fence::after_thread_sync; tcgen05.ld.sync.aligned.32x32b.x32.b32 {names}, [%r247];
tcgen05.wait::ld.sync.aligned; mul.wide.u32 %q6, %t, 128; add.s64 %q6, %q1, %q6;
"""
NAMES = [f"%r{number}" for number in range(32)]
SMEM = {"threads": 128, "dynamic_smem_bytes": 65536}


def k_major(raw, swizzle):
    """(rows, bytes) one swizzle span wide, as it lies in shared memory."""
    rows = len(raw)
    chunks = raw.reshape(rows, -1, 16)
    result = np.zeros_like(chunks)
    for row in range(rows):
        for chunk in range(chunks.shape[1]):
            result[row, chunk ^ (row * swizzle // 128 % (swizzle // 16))] = chunks[row, chunk]
    return result.ravel()


def descriptor(register, offset, swizzle):
    high = 1 << 16 | 8 * swizzle // 16 << 32 | 1 << 46 | SWIZZLE_NUMBER[swizzle] << 61
    signed = high - (1 << 64) if high >> 63 else high
    return f"""add.s32 %r255, %r250, {offset}; shr.u32 %r255, %r255, 4; and.b32 %r255, %r255, 16383;
    cvt.u64.u32 {register}, %r255; or.b64 {register}, {register}, {signed};"""


def multiply(a, b, kind, number, swizzle, wait=True, seed=0):
    """(128, 32) result of raw operands (m, span bytes) and (32, span bytes), 32 bytes of k at a time."""
    data = np.concatenate([k_major(a, swizzle), k_major(b, swizzle)]).view("u4")
    output = np.zeros((128, 32), "f4")
    form = 1 << 4 | number << 7 | number << 10 | 32 // 8 << 17 | len(a) // 16 << 24
    body = PROLOGUE + FILL.format(num_bytes=data.nbytes)
    for step in range(swizzle // 32):
        body += descriptor("%q4", 32 * step, swizzle) + descriptor("%q5", a.nbytes + 32 * step, swizzle)
        body += (
            f"setp.ne.s32 %p4, {step}, 0; @%p1 tcgen05.mma.cta_group::1.kind::{kind} [%r248], %q4, %q5, {form}, %p4;"
        )
    body += "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r249];"
    body += "mbarrier.try_wait.parity.shared.b64 %p5, [%r249], 0;" if wait else ""
    body += READ.format(names=f"{{{', '.join(NAMES)}}}")
    body += "".join(f"st.global.b32 [%q6+{4 * at}], {name};" for at, name in enumerate(NAMES))
    run_kernel(body + EPILOGUE, data, output, seed=seed, **SMEM)
    return torch.from_numpy(output)


def operands(m, k, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, (rows, k), generator=generator).float().to(dtype) for rows in (m, 32)]


def raw(tensor):
    return tensor.view(torch.uint8).numpy()


TYPES = [
    ("f16", 0, torch.float16),
    ("f16", 1, torch.bfloat16),
    ("f8f6f4", 0, torch.float8_e4m3fn),
    ("f8f6f4", 1, torch.float8_e5m2),
]


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize(("kind", "number", "dtype"), TYPES)
def test_mma_is_exact_for_integers(kind, number, dtype, swizzle):
    a, b = operands(128, swizzle // torch.empty(0, dtype=dtype).element_size(), dtype, swizzle)
    got = multiply(raw(a), raw(b), kind, number, swizzle, seed=swizzle)
    assert torch.equal(got, a.float() @ b.float().T)


def test_mma_of_64_rows_uses_half_of_the_lanes():
    a, b = operands(64, 64, torch.bfloat16, 1)
    got = multiply(raw(a), raw(b), "f16", 1, 128).view(4, 32, 32)
    assert torch.equal(got[:, :16].reshape(64, 32), a.float() @ b.float().T)
    assert got[:, 16:].isnan().all()  # as it was before


def test_missing_wait_for_a_commit_is_noticed_in_some_order():
    a, b = operands(128, 64, torch.bfloat16, 2)
    right = a.float() @ b.float().T
    noticed = 0
    for seed in range(6):
        try:
            noticed += not torch.equal(multiply(raw(a), raw(b), "f16", 1, 128, wait=False, seed=seed), right)
        except KernelFault as fault:  # the columns are gone when the operation happens
            assert "while the tensor core does: " in str(fault)
            noticed += 1
    assert noticed


def test_eight_bit_floats_are_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        expected = codes.view(dtype).float()
        assert torch.equal(torch.from_numpy(table).isnan(), expected.isnan())
        assert torch.equal(torch.from_numpy(table).nan_to_num(), expected.nan_to_num())


def test_store_to_tensor_memory_is_read_back_by_lane_and_column():
    output = np.zeros((128, 2), "u4")
    body = (
        PROLOGUE
        + """mul.lo.s32 %r1, %t, 3; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r247+4], {%t, %r1};
    tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r247+5];
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r247+4]; mul.wide.u32 %q6, %t, 8; add.s64 %q6, %q1, %q6;
    st.global.v2.b32 [%q6], {%r2, %r3};"""
    )
    run_kernel(body + EPILOGUE, np.zeros(1, "u4"), output, **SMEM)
    assert output.tolist() == [[lane, 3 * lane] for lane in range(128)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r248];" + EPILOGUE, "warp . reaches lanes from"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r247+64];" + EPILOGUE, "not all of 1 columns are allocated"),
        ("", "ended without tcgen05.dealloc"),
        (EPILOGUE + "bar.sync 0;" + EPILOGUE.replace("END", "LATER"), "not all of them allocated"),
    ],
)
def test_misuse_of_tensor_memory_is_a_fault(body, words):
    with pytest.raises(KernelFault, match=words):
        run_kernel(PROLOGUE + body, np.zeros(1, "u4"), np.zeros(1, "u4"), **SMEM)


def test_allocation_waits_for_columns_that_never_come():
    body = (
        PROLOGUE.replace("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "")
        + """setp.ge.u32 %p2, %t, 32; @%p2 bra OUT;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r249+8], 512; OUT:"""
    )
    with pytest.raises(Deadlock, match="no 512 free columns"):
        run_kernel(body, np.zeros(1, "u4"), np.zeros(1, "u4"), **SMEM)
