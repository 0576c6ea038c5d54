"""tcgen05: how a tile is multiplied by one CTA or a pair, and how it leaves tensor memory.

Tensor memory of a CTA: 128 lanes, its rows of the tile, times 512 columns of 32 bits: two accumulators of 256 columns.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import sm100

from mok_cute.config import ACC_STAGES, ROW_BLOCK
from mok_cute.templates.lanes import Untouched

TMEM_COLUMNS = 512
COLUMNS_AT_ONCE = 32  # of f32 that a thread reads from tensor memory in one instruction
CHUNK_COLS = 64
GATE_COLS = 128  # columns of gate in a gate/up tile; as many of up follow
VECTOR = 8  # bf16 elements in 16 bytes


def cta_group(ctas: int) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE


def tiled_mma(ctas: int, cols: int) -> cute.TiledMma:
    """``ctas`` x 128 rows times ``cols`` columns, bf16 operands from shared memory, f32 accumulators."""
    k = OperandMajorMode.K
    return sm100.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, cta_group(ctas), (ROW_BLOCK * ctas, cols))


def load_operation(ctas: int) -> cpasync.CopyBulkTensorTileG2SOp:
    """TMA load whose bytes count at the barrier of CTA 0 of the pair."""
    return cpasync.CopyBulkTensorTileG2SOp(cta_group(ctas))


def operand_fragments(
    mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, tile: tuple[int, int, int], stages: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """Descriptors of A and B, (.., k blocks, stages), over the memory of the tiles that TMA fills."""
    a = sm100.make_smem_layout_a(mma, tile, BFloat16, stages)
    b = sm100.make_smem_layout_b(mma, tile, BFloat16, stages)
    for ours, theirs in ((sA, a), (sB, b)):
        assert cute.cosize(ours.layout) == cute.cosize(theirs.outer), "TMA and the tensor core disagree about a tile"
    return (
        mma.make_fragment_A(cute.make_tensor(sA.iterator, a.outer)),
        mma.make_fragment_B(cute.make_tensor(sB.iterator, b.outer)),
    )


def accumulators(mma: cute.TiledMma, base: cute.Pointer, tile: tuple[int, int, int]) -> cute.Tensor:
    """((rows, columns), 1, 1, ACC_STAGES) f32 in tensor memory."""
    shape = cute.append(mma.partition_shape_C(tile[:2]), ACC_STAGES)
    return cute.make_tensor(base, mma.make_fragment_C(shape).layout)


class TmemTile(Untouched):
    """``interface.Accumulators`` in tensor memory. A thread has one row; a chunk is its 64 elements, as bf16.

    acc      (128, columns) f32 of one accumulator
    thread   0 to 127 among the epilogue's threads: the lane of tensor memory, and the row of the staging
    out      (128, 64, buffers) bf16 in shared memory, swizzled
    """

    def __init__(self, acc: cute.Tensor, thread: Int32, out: cute.Tensor) -> None:
        self.parts = cute.flat_divide(acc, (ROW_BLOCK, COLUMNS_AT_ONCE))
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        self.load = tcgen05.make_tmem_copy(load, self.parts[None, None, 0, 0])
        self.slice = self.load.get_slice(thread)
        self.shape = self.slice.partition_D(cute.make_identity_tensor((ROW_BLOCK, COLUMNS_AT_ONCE))).shape
        self.row = thread
        self.out = cute.make_ptr(BFloat16, out.iterator.toint(), AddressSpace.smem, assumed_align=1024)

    def begin(self) -> None:
        pass

    def activate(self, activation: Any) -> None:
        self.activation = activation

    def _rounded(self, *numbers: int) -> list[cute.Tensor]:
        """Groups of 32 columns by number, rounded to bf16."""
        fragments = []
        for number in numbers:
            fragment = cute.make_rmem_tensor(self.shape, Float32)
            cute.copy(self.load, self.slice.partition_S(self.parts[None, None, 0, number]), fragment)
            fragments.append(fragment)
        cute.arch.fence_view_async_tmem_load()  # the loads are asynchronous: before the registers are read
        rounded = []
        for fragment in fragments:
            rounded.append(cute.make_rmem_tensor(self.shape, BFloat16))
            rounded[-1].store(fragment.load().to(BFloat16))
        return rounded

    def columns(self, chunk: int) -> list[cute.Tensor]:
        per = CHUNK_COLS // COLUMNS_AT_ONCE
        return [self._rounded(chunk * per + i)[0] for i in range(per)]

    def hidden(self, chunk: int) -> list[cute.Tensor]:
        per, up = CHUNK_COLS // COLUMNS_AT_ONCE, GATE_COLS // COLUMNS_AT_ONCE
        result = []
        for i in range(chunk * per, (chunk + 1) * per):
            gate, above = (self._widened(values) for values in self._rounded(i, i + up))
            for column in range(COLUMNS_AT_ONCE):
                gate[column] = self.activation(gate[column], above[column])
            result.append(cute.make_rmem_tensor(self.shape, BFloat16))
            result[-1].store(gate.load().to(BFloat16))
        return result

    def _widened(self, values: cute.Tensor) -> cute.Tensor:
        wide = cute.make_rmem_tensor(self.shape, Float32)
        wide.store(values.load().to(Float32))
        return wide

    def put(self, chunk: list[cute.Tensor], buffer: int) -> None:
        # 128-byte swizzle: eight rows that follow each other write eight different parts of a line.
        row = self.out + buffer * (ROW_BLOCK * CHUNK_COLS) + self.row * CHUNK_COLS
        for i, values in enumerate(chunk):
            flat = cute.coalesce(values)
            for v in range(COLUMNS_AT_ONCE // VECTOR):
                part = i * (COLUMNS_AT_ONCE // VECTOR) + v
                target = row + (part ^ (self.row % 8)) * VECTOR
                pointer = cute.make_ptr(BFloat16, target.toint(), AddressSpace.smem, assumed_align=16)
                vector = cute.make_tensor(pointer, cute.make_layout(VECTOR))
                cute.autovec_copy(cute.local_tile(flat, (VECTOR,), (v,)), vector)
