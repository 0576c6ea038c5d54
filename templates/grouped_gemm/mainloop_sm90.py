"""The GEMM main loop on Hopper: one TMA warp feeds two consumer warpgroups through a ring of stages.

| warp role     | warps | does |
|---------------|-------|------|
| load          | 1     | waits for the tile's rows, then TMA loads of A (128 x 64) and B (2 x 128 x 64) per stage |
| consumer      | 8     | wgmma m64n256k16 on its warpgroup's 64 rows, accumulators in registers |

| pipeline      | producer    | consumer       | arrivals per phase |
|---------------|-------------|----------------|--------------------|
| operands      | TMA (load)  | consumer warps | full: 1 and 49,152 bytes; empty: 8, one per consumer warp |
| slot          | scheduler   | load, consumer | full: 1; empty: 9, one per reading warp |

    load      | A0 B0 | A1 B1 | A2 B2 | A3 B3 |  wait | A4 B4 | ... runs up to `stages` ahead, into the next tile
    consumer          | wgmma 0 | wgmma 1, free 0 | wgmma 2, free 1 | ... | wait all | epilogue |
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warpgroup as wg

from mok_cute.config import ROW_BLOCK
from mok_cute.templates.arch.tiles import tile_modes
from mok_cute.templates.grouped_gemm.load import LoadWarp, num_k_tiles
from mok_cute.templates.grouped_gemm.rows import ROWS_GEMM, k_tiles
from mok_cute.templates.interface import Plan
from mok_cute.templates.scheduler.dynamic import Task


class OperandPipeline:
    """The ring of operand stages, made by every warp of the CTA."""

    def __init__(self, plan: Plan):
        config = plan.config
        self.stages, self.consumer_warps = config.stages, config.epilogue_warps
        self.tile_bytes = 2 * config.tile_k * (config.tile_rows + config.down_cols)

    def create(self, barriers: cute.Pointer) -> pl.PipelineTmaAsync:
        agent = pl.Agent.Thread
        return pl.PipelineTmaAsync.create(
            num_stages=self.stages,
            tx_count=self.tile_bytes,
            barrier_storage=barriers,  # 2 * stages mbarriers
            producer_group=pl.CooperativeGroup(agent),
            consumer_group=pl.CooperativeGroup(agent, self.consumer_warps),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )


class Sm90Load(LoadWarp):
    """Both operands of a tile, by TMA into the ring of this CTA."""

    @cute.jit
    def load_tile(
        self,
        kind: cutlass.Constexpr,
        loads: Any,  # name -> (copy atom, TMA tensor)
        sA: cute.Tensor,  # (tile_rows, tile_k, stages) bf16, swizzled
        sB: cute.Tensor,  # (down_cols, tile_k, stages) bf16, swizzled
        task: Task,
        operands: pl.PipelineTmaAsync,
        state: pl.PipelineState,
    ) -> pl.PipelineState:
        what = ROWS_GEMM[kind]
        solo = cute.make_layout(1)
        box = (ROW_BLOCK, self.tile_k)
        atom_a, mA = loads[what.a]
        atom_b0, mB0 = loads[what.b[0]]
        atom_b1, mB1 = loads[what.b[1]]
        tAs, tAg = cpasync.tma_partition(
            atom_a, 0, solo, tile_modes(sA), tile_modes(cute.local_tile(mA, box, (None, None)))
        )
        halves = cute.flat_divide(sB, box)  # (128, tile_k, 2, 1, stages)
        tBs, tBg0 = cpasync.tma_partition(
            atom_b0, 0, solo, tile_modes(halves), tile_modes(cute.local_tile(mB0, box, (None, None, None)))
        )
        _, tBg1 = cpasync.tma_partition(
            atom_b1, 0, solo, tile_modes(halves), tile_modes(cute.local_tile(mB1, box, (None, None, None)))
        )
        n0, n1 = task.col, task.col
        if const_expr(what.adjacent):
            n0, n1 = task.col * 2, task.col * 2 + 1
        for k in cutlass.range(k_tiles(kind, self.shape, self.tile_k), unroll=1):
            operands.producer_acquire(state)
            bar = operands.producer_get_barrier(state)
            cute.copy(atom_a, tAg[None, task.operand_block, k], tAs[None, state.index], tma_bar_ptr=bar)
            cute.copy(atom_b0, tBg0[None, n0, k, task.expert], tBs[None, 0, 0, state.index], tma_bar_ptr=bar)
            cute.copy(atom_b1, tBg1[None, n1, k, task.expert], tBs[None, 1, 0, state.index], tma_bar_ptr=bar)
            state.advance()
        return state


class Sm90Multiply:
    """The consumer warpgroups' inner loop: one tile's products into the accumulators."""

    def __init__(self, plan: Plan):
        self.shape, self.tile_k = plan.shape, plan.config.tile_k

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def run(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,  # accumulator fragment of this thread, f32
        rA: cute.Tensor,  # descriptors of A, (.., k blocks, stages)
        rB: cute.Tensor,
        kind: Int32,
        operands: pl.PipelineTmaAsync,
        state: pl.PipelineState,
    ) -> pl.PipelineState:
        mma.set(wg.Field.ACCUMULATE, False)
        behind = state.clone()
        for k in cutlass.range(num_k_tiles(kind, self.shape, self.tile_k), unroll=1):
            operands.consumer_wait(state)
            wg.fence()
            for kb in cutlass.range_constexpr(cute.size(rB, mode=[2])):
                cute.gemm(mma, acc, rA[None, None, kb, state.index], rB[None, None, kb, state.index], acc)
                mma.set(wg.Field.ACCUMULATE, True)
            wg.commit_group()
            wg.wait_group(1)  # the previous stage's products are done: free it
            if k > 0:
                operands.consumer_release(behind)
                behind.advance()
            state.advance()
        wg.wait_group(0)
        operands.consumer_release(behind)
        return state
