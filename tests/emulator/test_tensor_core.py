"""wgmma and stmatrix of the virtual GPU against torch."""

import numpy as np
import pytest
import torch
from microkernel import run_kernel

from mok_cute.emulator.execute import KernelFault

pytestmark = pytest.mark.emulated

# Threads copy the prepared operands (4-byte words) from %q0 to shared memory.
LOAD = """
ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; mov.b32 %r250, smem; mov.b32 %r251, %t;
FILL: shl.b32 %r252, %r251, 2; setp.ge.u32 %p1, %r252, {num_bytes}; @%p1 bra FILLED;
cvt.u64.u32 %q2, %r252; add.s64 %q2, %q0, %q2; ld.global.b32 %r253, [%q2]; add.s32 %r254, %r250, %r252;
st.shared.b32 [%r254], %r253; add.s32 %r251, %r251, 128; bra FILL;
FILLED: fence.proxy.async.shared::cta; bar.sync 0;
"""
SWIZZLE_NUMBER = {0: 0, 128: 1, 64: 2, 32: 3}


def k_major(matrix, swizzle):
    """(rows, k) of 16-bit elements, one swizzle span wide, as it lies in shared memory from a multiple of 1024."""
    rows, k = matrix.shape
    if not swizzle:  # 8x8 blocks of 128 bytes; those of one row group follow each other
        return matrix.reshape(rows // 8, 8, k // 8, 8).transpose(0, 2, 1, 3).ravel()
    assert 2 * k == swizzle
    chunks = matrix.reshape(rows, -1, 8)
    result = np.zeros_like(chunks)
    for row in range(rows):
        for chunk in range(chunks.shape[1]):
            result[row, chunk ^ (row * swizzle // 128 % (swizzle // 16))] = chunks[row, chunk]
    return result.ravel()


def descriptor(register, offset, swizzle, leading, stride):
    """PTX that puts a matrix descriptor for shared memory at ``smem + offset`` into a 64-bit register."""
    high = leading // 16 << 16 | stride // 16 << 32 | SWIZZLE_NUMBER[swizzle] << 62
    return f"""add.s32 %r255, %r250, {offset}; shr.u32 %r255, %r255, 4; and.b32 %r255, %r255, 16383;
    cvt.u64.u32 {register}, %r255; or.b64 {register}, {register}, {high};"""


def multiply(a, b, kind, swizzle, steps, accumulate_first=False, late=False):
    """a (64, k) times b (n, k) transposed on the virtual tensor core, 16 columns of k at a time."""
    n, k = b.shape
    data = np.concatenate([k_major(a, swizzle), k_major(b, swizzle)])
    output = np.zeros((64, n), "f4")
    names = [f"%r{number}" for number in range(n // 2)]
    body = LOAD.format(num_bytes=data.nbytes) + "".join(f"mov.b32 {name}, 0f3F800000;" for name in names)
    leading, stride = (128, 16 * k) if not swizzle else (16, 8 * swizzle)
    setting = "wgmma.fence.sync.aligned;"
    for step in range(steps):
        advance = 32 * step if swizzle else 256 * step
        body += descriptor("%q4", advance, swizzle, leading, stride)
        body += descriptor("%q5", a.nbytes + advance, swizzle, leading, stride)
        body += f"setp.ne.s32 %p4, {int(accumulate_first or step > 0)}, 0; {setting}"
        body += f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{', '.join(names)}}}, %q4, %q5,"
        body += " %p4, 1, 1, 0, 0;"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.b32 %r255, %t;"
    # Register i of lane l in warp w: row 16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2.
    body += f"""shr.u32 %r251, %r255, 5; and.b32 %r252, %r255, 31; shr.u32 %r253, %r252, 2; and.b32 %r252, %r252, 3;
    mad.lo.s32 %r253, %r251, 16, %r253; mul.lo.s32 %r253, %r253, {n}; mad.lo.s32 %r253, %r252, 2, %r253;
    mul.wide.u32 %q6, %r253, 4; add.s64 %q6, %q1, %q6;"""
    for number, name in enumerate(names):
        offset = 4 * (8 * (number // 2 % 2) * n + 8 * (number // 4) + number % 2)
        body += f"st.global.b32 [%q6+{offset}], {name};"
    run_kernel(body, data, output, threads=128, seed=int(late), dynamic_smem_bytes=65536)
    return output


def operands(n, k, dtype, seed, integers=True):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((64, k), (n, k))
    if integers:
        return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def bits(tensor):
    return tensor.view(torch.int16).numpy().view("u2")


@pytest.mark.parametrize("late", [False, True], ids=["at_issue", "at_wait"])
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_wgmma_is_exact_for_integers(swizzle, kind, dtype, late):
    k = swizzle // 2 or 32
    a, b = operands(32, k, dtype, swizzle)
    got = multiply(bits(a), bits(b), kind, swizzle, k // 16, late=late)
    assert torch.equal(torch.from_numpy(got), a.float() @ b.float().T)


@pytest.mark.parametrize("n", [8, 64, 256])
def test_wgmma_serves_every_width(n):
    a, b = operands(n, 16, torch.bfloat16, n)
    got = multiply(bits(a), bits(b), "bf16", 32, 1, accumulate_first=True)
    assert torch.equal(torch.from_numpy(got), a.float() @ b.float().T + 1)


def test_wgmma_is_as_near_as_single_precision_for_random_numbers():
    a, b = operands(64, 64, torch.bfloat16, 5, integers=False)
    got = torch.from_numpy(multiply(bits(a), bits(b), "bf16", 128, 4))
    exact = a.double() @ b.double().T
    assert (got - exact).abs().max() <= 8 * (a.float() @ b.float().T - exact).abs().max() + 1e-5


def test_wgmma_outside_shared_memory_is_a_fault():
    body = LOAD.format(num_bytes=16) + descriptor("%q4", 16384 - 512, 128, 16, 1024)
    names = ", ".join(f"%r{number}" for number in range(4))
    body += f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{names}}}, %q4, %q4, 0, 1, 1, 0, 0;"
    with pytest.raises(KernelFault, match="shared memory offset"):
        run_kernel(body, np.zeros(4, "u4"), np.zeros(1, "u4"), threads=128)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_stores_four_tiles_and_ldmatrix_reads_them_back(transposed):
    trans = ".trans" if transposed else ""
    inputs = np.random.default_rng(1).integers(0, 2**32, (32, 4)).astype("u4")
    stored, loaded = np.zeros((32, 4), "u4"), np.zeros((32, 4), "u4")
    body = f"""ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q3, [p2]; mul.wide.u32 %q2, %t, 16;
    add.s64 %q0, %q0, %q2; add.s64 %q1, %q1, %q2; add.s64 %q3, %q3, %q2;
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%q0]; mov.b32 %r9, smem; shl.b32 %r8, %t, 4; add.s32 %r9, %r9, %r8;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r9], {{%r1, %r2, %r3, %r4}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r5, %r6, %r7, %r10}}, [%r9];
    ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r9]; st.global.v4.b32 [%q1], {{%r1, %r2, %r3, %r4}};
    st.global.v4.b32 [%q3], {{%r5, %r6, %r7, %r10}};"""
    run_kernel(body, inputs, stored, loaded)
    np.testing.assert_array_equal(loaded, inputs)
    tiles = inputs.T.copy().view("u2").reshape(4, 8, 8)  # tile, lane / 4, element
    expected = tiles.transpose(0, 2, 1) if transposed else tiles
    np.testing.assert_array_equal(stored.view("u2").reshape(4, 8, 8), expected)
