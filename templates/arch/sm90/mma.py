"""wgmma and its layouts: how a tile lies in shared memory, is multiplied, and leaves the registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp
from cutlass.cute.nvgpu import warpgroup as wg
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import sm90

ROW_MAJOR = LayoutEnum.ROW_MAJOR  # K-major, for operand A and for B stored (rows, contraction)


def tiled_mma(warpgroups: int, cols: int) -> cute.TiledMma:
    """``warpgroups`` x 64 rows times ``cols`` columns, bf16 operands from shared memory, f32 accumulators."""
    k = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, k, k, Float32, (warpgroups, 1, 1), (64, cols), wg.OperandSource.SMEM
    )


def layout_a(tile: tuple[int, int, int], stages: int) -> cute.ComposedLayout:
    return sm90.make_smem_layout_a(ROW_MAJOR, tile, BFloat16, stages)


def layout_b(tile: tuple[int, int, int], stages: int) -> cute.ComposedLayout:
    return sm90.make_smem_layout_b(ROW_MAJOR, tile, BFloat16, stages)


def layout_out(rows: int, cols: int, buffers: int) -> cute.ComposedLayout:
    return sm90.make_smem_layout_epi(BFloat16, ROW_MAJOR, (rows, cols), buffers)


def registers_to_shared(mma: cute.TiledMma) -> cute.TiledCopy:
    """stmatrix of bf16 accumulators. The atom form tiles one stmatrix block; the whole-tile form would wrap columns."""
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
    return cute.make_tiled_copy_S(store, cute.make_tiled_copy_C_atom(store, mma))


def one_stage(layout: Any) -> Any:
    return cute.slice_(layout, (None, None, 0))


def tma_load(tensor: cute.Tensor, layout: Any, box: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)


def tma_store(tensor: cute.Tensor, layout: Any, box: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box)
