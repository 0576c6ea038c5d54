"""Two pipelined GEMMs with a role per warp, C = A B^T, as PTX whose marks say how it could be wrong.

A is (M, 256) and B (16, 256) in bf16, C (M, 16) in f32. Each CTA takes every other tile.

| role   | wgmma: tiles of 64 rows                          | tcgen05: tiles of 128 rows               |
|--------|--------------------------------------------------|------------------------------------------|
| load   | warp 4: TMA of A and B, 64 elements of K at a time, into a ring of two stages               |
| mma    | warps 0 to 3, sums in registers                  | warp 5, into one of two accumulators     |
| store  | warps 0 to 3: sums to shared memory, thread 0 stores them by TMA                            |

| barrier           | arrivals of a phase                                                                      |
|-------------------|------------------------------------------------------------------------------------------|
| full[stage]       | 1 and the bytes of both tiles                                                            |
| empty[stage]      | wgmma: 4, one of each warp; tcgen05: 1, a commit                                         |
| ready[number]     | tcgen05: 1, a commit: the accumulator holds a tile                                       |
| named 2 + number  | tcgen05: 160 threads: the accumulator has been read                                      |

A mark ``[[text | name => other | ...]]`` is the text in the right kernel, and ``other`` in the mutant of that name.
"""

from __future__ import annotations

import re

import numpy as np
from microkernel import make_kernel

from mok_cute.emulator.decode import Kernel
from mok_cute.emulator.device import launch
from mok_cute.emulator.memory import DeviceMemory
from mok_cute.emulator.tensor_map import TensorMap

DEPTH, COLUMNS, TILES, CTAS = 256, 16, 6, 2
MARK = re.compile(r"\[\[(.*?)\]\]", re.S)

# %r9 shared memory; %r10 A, %r11 B, %r12 C, %r13 full, %r14 empty, %r15 ready. %r16 tile; %r17 steps so far, of all
# tiles; %r18 step of the tile; %r19 stage, %r30 parity of its phase; %r31 warp, %p2 its lane 0, %p1 thread 0.
# %q0, %q1, %q2 the descriptors of A, B and C.
START = """
ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2]; mov.b32 %r9, smem;
mov.b32 %r10, %r9; add.s32 %r11, %r9, $b; add.s32 %r12, %r9, $c; add.s32 %r13, %r9, $barriers; add.s32 %r14, %r13, 16;
add.s32 %r15, %r13, 32; mov.u32 %r16, %ctaid.x; mov.u32 %r17, 0; setp.eq.s32 %p1, %t, 0; shr.u32 %r31, %t, 5;
and.b32 %r32, %t, 31; setp.eq.s32 %p2, %r32, 0; @!%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r13], 1; mbarrier.init.shared.b64 [%r13+8], 1; mbarrier.init.shared.b64 [%r14], $readers;
mbarrier.init.shared.b64 [%r14+8], $readers; mbarrier.init.shared.b64 [%r15], 1; mbarrier.init.shared.b64 [%r15+8], 1;
[[fence.mbarrier_init.release.cluster; | barriers not fenced => ]]
INITIALISED:
"""
STAGE = "and.b32 %r19, %r17, 1; shr.u32 %r30, %r17, 1; and.b32 %r30, %r30, 1; shl.b32 %r33, %r19, 3;"
NEXT_STEP = "add.s32 %r17, %r17, 1; add.s32 %r18, %r18, 1; setp.lt.s32 %p3, %r18, $steps; @%p3 bra"
NEXT_TILE = "add.s32 %r16, %r16, $ctas; setp.lt.s32 %p3, %r16, $tiles; @%p3 bra"
LOAD = f"""
LOAD: @!%p2 bra END;
LOAD_TILE: mov.u32 %r18, 0;
LOAD_STEP: {STAGE}
add.s32 %r34, %r14, %r33; xor.b32 %r35, %r30, [[1 | wrong parity of the empty wait => 0]];
[[mbarrier.try_wait.parity.shared.b64 %p3, [%r34], %r35; | no empty wait => ]]
add.s32 %r36, %r13, %r33; shl.b32 %r37, %r18, 6; mul.lo.s32 %r38, %r16, $rows;
mbarrier.arrive.expect_tx.shared.b64 _, [%r36], [[$bytes | too many bytes => $more | too few bytes => $less]];
mul.lo.s32 %r39, [[%r19 | loads to the other stage => %r30]], $a_bytes; add.s32 %r39, %r10, %r39;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r39], [%q0, {{%r37, %r38}}], [%r36];
shl.b32 %r40, %r19, 11; add.s32 %r40, %r11, %r40;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r40], [%q1, {{%r37, 0}}], [%r36];
{NEXT_STEP} LOAD_STEP; {NEXT_TILE} LOAD_TILE; bra END;
"""
# Ends with the descriptors of the stage, K-major with a 128-byte swizzle, in %q4 and %q5.
WAIT_FULL = f"""
{STAGE} add.s32 %r34, %r14, %r33; xor.b32 %r35, %r33, [[0 | full wait of the other stage => 8]];
add.s32 %r35, %r13, %r35;
[[mbarrier.try_wait.parity.shared.b64 %p3, [%r35], %r30; | no full wait => | wrong parity of the full wait =>
mbarrier.try_wait.parity.shared.b64 %p3, [%r35], 1;]]
mul.lo.s32 %r39, %r19, $a_bytes; add.s32 %r39, %r10, %r39; shl.b32 %r40, %r19, 11; add.s32 %r40, %r11, %r40;
shr.u32 %r39, %r39, 4; and.b32 %r39, %r39, 16383; shr.u32 %r40, %r40, 4; and.b32 %r40, %r40, 16383;
cvt.u64.u32 %q4, %r39; or.b64 %q4, %q4, $high; cvt.u64.u32 %q5, %r40; or.b64 %q5, %q5, $high;
"""
NEXT_OPERANDS = "add.s64 %q4, %q4, 2; add.s64 %q5, %q5, 2; setp.eq.s32 %p4, 0, 0;"
REUSE = """
[[@%p1 cp.async.bulk.wait_group.read 0; | staging reused while it is stored => ]]
[[bar.sync 1, 128; | no barrier before the staging is reused => ]]
"""
# The tile's sums are in the staging. Thread 0 stores them.
STORE = f"""
[[fence.proxy.async.shared::cta; | no proxy fence before the store => ]]
[[bar.sync 1, 128; | no barrier before the store => ]]
@!%p1 bra STORED; mul.lo.s32 %r38, %r16, $rows;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%q2, {{0, %r38}}], [%r12]; cp.async.bulk.commit_group;
STORED: {NEXT_TILE} TILE; [[@%p1 cp.async.bulk.wait_group 0; | last store not waited for => ]]
"""

SUMS = ", ".join(f"%r{20 + number}" for number in range(8))
FREE = "@%p2 mbarrier.arrive.shared.b64 _, [%r34];"
# A warp's rows are 16 w + l / 4 and eight more; its columns 2 (l % 4) and the next, and eight more.
WGMMA_OUT = """
mul.lo.s32 %r41, %r31, 1024; shr.u32 %r42, %r32, 2; shl.b32 %r42, %r42, 6; add.s32 %r41, %r41, %r42;
and.b32 %r42, %r32, 3; shl.b32 %r42, %r42, 3; add.s32 %r41, %r41, %r42; add.s32 %r41, %r12, %r41;
st.shared.v2.b32 [%r41], {%r20, %r21}; st.shared.v2.b32 [%r41+512], {%r22, %r23};
st.shared.v2.b32 [%r41+32], {%r24, %r25}; st.shared.v2.b32 [%r41+544], {%r26, %r27};
"""
WGMMA = f"""
{START} [[bar.sync 0; | barriers used at once => ]] setp.eq.s32 %p3, %r31, 4; @%p3 bra LOAD;
TILE: mov.u32 %r18, 0; setp.ne.s32 %p4, 0, 0;
STEP: {WAIT_FULL} wgmma.fence.sync.aligned;
{f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{SUMS}}}, %q4, %q5, %p4, 1, 1, 0, 0; {NEXT_OPERANDS}" * 4}
wgmma.commit_group.sync.aligned; [[ | stage freed before its products => {FREE}]]
[[wgmma.wait_group.sync.aligned 0; | products not waited for => ]]
[[{FREE} | stage never freed => | stage freed before its products => ]]
{NEXT_STEP} STEP; {REUSE} {WGMMA_OUT} {STORE} bra END; {LOAD} END:
"""

ALLOCATE = """
setp.ne.s32 %p3, %r31, 5; @%p3 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9+$base], 32;
ALLOCATED: [[bar.sync 0; | barriers used at once => ]] ld.shared.b32 %r8, [%r9+$base];
"""
# %r43 counts tiles; %r44 the accumulator's number, %r45 its columns, %r46 the barrier of its readers, %r47 its parity.
ACCUMULATOR = """
and.b32 %r44, %r43, 1; shl.b32 %r45, %r44, 4; add.s32 %r45, %r8, %r45; add.s32 %r46, %r44, 2; shr.u32 %r47, %r43, 1;
and.b32 %r47, %r47, 1; shl.b32 %r48, %r44, 3; add.s32 %r48, %r15, %r48; setp.lt.u32 %p5, %r43, 2;
"""
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
MULTIPLY = f"""
MMA: mov.u32 %r43, 0;
MMA_TILE: {ACCUMULATOR} @%p5 bra FIRST; [[bar.sync %r46, 160; | accumulator reused before it is read => ]]
[[tcgen05.fence::after_thread_sync; | no fence behind the readers' barrier => ]]
FIRST: mov.u32 %r18, 0; [[setp.ne.s32 %p4, 0, 0; | sums onto the last tile => setp.eq.s32 %p4, 0, 0;]]
MMA_STEP: {WAIT_FULL} [[ | stage freed before its products => {COMMIT} [%r34];]]
{f"@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r45], %q4, %q5, $form, %p4; {NEXT_OPERANDS}" * 4}
[[{COMMIT} [%r34]; | stage never freed => | stage freed before its products => ]]
{NEXT_STEP} MMA_STEP;
[[{COMMIT} [%r48]; | accumulator never ready => | wrong accumulator ready =>
xor.b32 %r35, %r48, 8; {COMMIT} [%r35];]]
add.s32 %r43, %r43, 1; {NEXT_TILE} MMA_TILE; bar.sync 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32; bra END;
"""
LOADED = [f"%r{50 + number}" for number in range(16)]
TCGEN05_OUT = "shl.b32 %r41, %t, 6; add.s32 %r41, %r12, %r41;" + "".join(
    f"st.shared.v4.b32 [%r41+{4 * first}], {{{', '.join(LOADED[first : first + 4])}}};" for first in range(0, 16, 4)
)
TCGEN05 = f"""
{START} {ALLOCATE} setp.eq.s32 %p3, %r31, 4; @%p3 bra LOAD; setp.eq.s32 %p3, %r31, 5; @%p3 bra MMA;
mov.u32 %r43, 0; shl.b32 %r49, %r31, 21;
TILE: {ACCUMULATOR} [[mbarrier.try_wait.parity.shared.b64 %p3, [%r48], %r47; | accumulator not waited for => ]]
add.s32 %r45, %r45, %r49; tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(LOADED)}}}, [%r45];
[[tcgen05.wait::ld.sync.aligned; | loads not waited for => ]]
[[tcgen05.fence::before_thread_sync; | no fence before the readers' barrier => ]]
add.s32 %r38, %r16, $two_rounds; setp.lt.s32 %p6, %r38, $tiles;
@!%p6 bra READ; [[bar.arrive %r46, 160; | readers never arrive => ]] READ: add.s32 %r43, %r43, 1;
{REUSE} {TCGEN05_OUT} {STORE} bar.sync 0; bra END;
{MULTIPLY} {LOAD.replace("LOAD: @!%p2 bra END;", "LOAD: @!%p2 bra LOADED;").replace("bra END;", "bra LOADED;")}
LOADED: bar.sync 0; END:
"""


class Gemm:
    """One of the two kernels with its numbers. ``mutants`` are the names of its marks."""

    def __init__(self, body: str, rows: int, threads: int, high: int, readers: int) -> None:
        a_bytes, b_bytes = rows * 128, COLUMNS * 128
        total = a_bytes + b_bytes
        numbers = {
            "b": 2 * a_bytes,
            "c": 2 * total,
            "barriers": 2 * total + 4 * COLUMNS * rows,
            "base": 2 * total + 4 * COLUMNS * rows + 64,
            "readers": readers,
            "rows": rows,
            "bytes": total,
            "more": total + 16,
            "less": total - 16,
            "a_bytes": a_bytes,
            "steps": DEPTH // 64,
            "ctas": CTAS,
            "tiles": TILES,
            "two_rounds": 2 * CTAS,
            "high": high,
            "form": 1 << 4 | 1 << 7 | 1 << 10 | COLUMNS // 8 << 17 | rows // 16 << 24,
        }
        self.body = re.sub(r"\$(\w+)", lambda name: str(numbers[name[1]]), body)
        self.rows, self.threads, self.smem_bytes = rows, threads, numbers["base"] + 64
        others = [other for mark in MARK.findall(self.body) for other in mark.split("|")[1:]]
        self.mutants = list(dict.fromkeys(other.partition("=>")[0].strip() for other in others))

    def kernel(self, mutant: str | None = None) -> Kernel:
        def choose(mark: re.Match[str]) -> str:
            text, *others = mark[1].split("|")
            named = {name.strip(): other for name, _, other in (part.partition("=>") for part in others)}
            return named.get(mutant, text) if mutant else text

        return make_kernel(MARK.sub(choose, self.body), 3, self.threads)

    def run(self, kernel: Kernel, seed: int) -> None:
        """Run it on small integers and compare. Raises what the virtual GPU finds, or AssertionError."""
        random = np.random.default_rng(0)
        a = random.integers(-4, 5, (TILES * self.rows, DEPTH)).astype("f4")
        b = random.integers(-4, 5, (COLUMNS, DEPTH)).astype("f4")
        tensors = [_bf16(a), _bf16(b), _aligned(np.full((len(a), COLUMNS), np.nan, "f4"))]
        boxes, memory = [(64, self.rows), (64, COLUMNS), (COLUMNS, self.rows)], DeviceMemory()
        params = []
        for name, tensor, box in zip("ABC", tensors, boxes, strict=True):
            swizzle, kind = (0, "f32") if name == "C" else (128, "bf16")
            dims, row = tuple(reversed(tensor.shape)), (tensor.strides[0],)
            encoded = TensorMap(kind, 2, tensor.ctypes.data, dims, row, box, (1, 1), swizzle=swizzle).encode()
            descriptor = _aligned(np.frombuffer(encoded, np.uint8))
            memory.add(tensor.ctypes.data, tensor.nbytes, name)
            memory.name(tensor.ctypes.data, name, tensor.shape, tensor.itemsize)
            memory.add(descriptor.ctypes.data, descriptor.nbytes, f"descriptor of {name}")
            params.append(descriptor)
        launch(
            kernel,
            grid=(CTAS, 1, 1),
            block=(self.threads, 1, 1),
            params=[descriptor.ctypes.data.to_bytes(8, "little") for descriptor in params],
            memory=memory,
            dynamic_smem_bytes=self.smem_bytes,
            seed=seed,
            max_steps=100_000,
            check_races=True,
        )
        np.testing.assert_array_equal(tensors[2], a @ b.T)


def _aligned(data: np.ndarray) -> np.ndarray:
    raw = np.zeros(data.nbytes + 128, np.uint8)
    result = raw[-raw.ctypes.data % 128 :][: data.nbytes].view(data.dtype).reshape(data.shape)
    result[...] = data
    return result


def _bf16(values: np.ndarray) -> np.ndarray:
    """Small integers as the upper halves of their singles."""
    return _aligned((np.ascontiguousarray(values).view("u4") >> 16).astype("u2"))


GEMMS = {
    "wgmma": Gemm(WGMMA, 64, 160, 1 << 62 | 64 << 32 | 1 << 16, 4),
    "tcgen05": Gemm(TCGEN05, 128, 192, (2 << 61 | 1 << 46 | 64 << 32 | 1 << 16), 1),
}
