"""wgmma: how a tile is multiplied, and how it leaves the registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warp
from cutlass.cute.nvgpu import warpgroup as wg
from cutlass.utils import sm90

from mok_cute.templates.lanes import Untouched


def tiled_mma(warpgroups: int, cols: int) -> cute.TiledMma:
    """``warpgroups`` x 64 rows times ``cols`` columns, bf16 operands from shared memory, f32 accumulators."""
    k = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, k, k, Float32, (warpgroups, 1, 1), (64, cols), wg.OperandSource.SMEM
    )


def registers_to_shared(mma: cute.TiledMma) -> cute.TiledCopy:
    """stmatrix of bf16 accumulators. The atom form tiles one stmatrix block; the whole-tile form would wrap columns."""
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
    return cute.make_tiled_copy_S(store, cute.make_tiled_copy_C_atom(store, mma))


class RegisterTile(Untouched):
    """``interface.Accumulators`` in the registers of a consumer warpgroup.

    acc     f32 fragment of the whole tile
    r2s     stmatrix copy; ``thread`` is its slice for the calling thread
    dst     this thread's part of the staging, (.., buffers)
    """

    def __init__(self, acc: cute.Tensor, r2s: cute.TiledCopy, thread: Any, dst: cute.Tensor) -> None:
        self.acc, self.r2s, self.thread, self.dst = acc, r2s, thread, dst
        self.copies = cute.size(dst, mode=[2])  # stmatrix steps of a chunk

    def begin(self) -> None:
        self.rounded = cute.make_rmem_tensor(self.acc.shape, BFloat16)
        self.rounded.store(self.acc.load().to(BFloat16))

    def activate(self, activation: Any) -> None:
        hidden32 = cute.make_rmem_tensor(self.acc.shape, Float32)
        hidden32.store(self.rounded.load().to(Float32))
        half = cute.size(self.acc) // 2
        for i in range(half):
            hidden32[i] = activation(hidden32[i], hidden32[i + half])
        self.activated = cute.make_rmem_tensor(self.acc.shape, BFloat16)
        self.activated.store(hidden32.load().to(BFloat16))

    def columns(self, chunk: int) -> tuple[Any, int]:
        return self.thread.retile(self.rounded), chunk

    def hidden(self, chunk: int) -> tuple[Any, int]:
        return self.thread.retile(self.activated), chunk

    def put(self, chunk: tuple[Any, int], buffer: int) -> None:
        source, number = chunk
        for i in range(self.copies):
            cute.copy(self.r2s, source[(None, number * self.copies + i), 0, 0], self.dst[None, 0, i, buffer])
