"""Tiles of bf16 with contiguous rows: how they lie in shared memory and travel by TMA, on every machine.

64 elements are one row of 128 bytes, and rows lie under the 128-byte swizzle: the 16-byte parts of row r stand at
part ^ (r mod 8). Both tensor cores read that layout, and so does TMA.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import sm90

ROW_MAJOR = LayoutEnum.ROW_MAJOR  # K-major, for operand A and for B stored (rows, contraction)


def layout_a(tile: tuple[int, int, int], stages: int) -> cute.ComposedLayout:
    """(rows, contraction, stages) of operand A for a tile of (rows, columns, contraction)."""
    return sm90.make_smem_layout_a(ROW_MAJOR, tile, BFloat16, stages)


def layout_b(tile: tuple[int, int, int], stages: int) -> cute.ComposedLayout:
    """(columns, contraction, stages) of operand B."""
    return sm90.make_smem_layout_b(ROW_MAJOR, tile, BFloat16, stages)


def layout_out(rows: int, cols: int, buffers: int) -> cute.ComposedLayout:
    return sm90.make_smem_layout_epi(BFloat16, ROW_MAJOR, (rows, cols), buffers)


def one_stage(layout: Any) -> Any:
    return cute.slice_(layout, (None, None, 0))


def tma_load(
    operation: cpasync.CopyBulkTensorTileG2SOp, tensor: cute.Tensor, layout: Any, box: tuple[int, int]
) -> tuple[cute.CopyAtom, cute.Tensor]:
    return cpasync.make_tiled_tma_atom(operation, tensor, layout, box)


def tma_store(tensor: cute.Tensor, layout: Any, box: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box)


def tile_modes(t: Any) -> Any:
    """Group the two tile modes into one, as tma_partition wants them."""
    return cute.group_modes(t, 0, 2)
