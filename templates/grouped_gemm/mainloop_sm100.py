"""The GEMM main loop on Blackwell: a TMA warp in each CTA feeds the MMA warp of CTA 0, which multiplies for the pair.

A pair computes 256 token rows x 256 weight rows (gate/up: 128 of gate and 128 of up). Each CTA brings its own 128 token
rows and half of the weight rows, CTA 0 the gate half; the tensor cores of both read both halves. Each CTA's accumulator
holds its own 128 rows and all 256 columns. A single CTA (ctas_per_tile 1) computes 128 x 256 and brings all of it.

| warp role | warps      | does |
|-----------|------------|------|
| load      | 1 per CTA  | waits for the tile's rows, then TMA loads of 128 x 64 per stage: A and B (single: B twice) |
| MMA       | 1, CTA 0   | 4 x tcgen05.mma m256n256k16 per stage, into one of two accumulators |
| epilogue  | 4 per CTA  | reads the accumulator while the other one is being filled |

| pipeline     | producer   | consumer       | arrivals per phase |
|--------------|------------|----------------|--------------------|
| operands     | TMA (load) | MMA            | full, at CTA 0: 1 and the bytes of both CTAs; empty, at each: 1 commit |
| accumulators | MMA        | epilogue warps | full, at each: 1 commit; empty, at CTA 0: 4 per CTA |
| slot         | scheduler  | load, MMA, epilogue | full: 1; empty: one per reading warp of the CTA |

    load      | A0 B0 | A1 B1 | ... | A5 B5 |  wait | A6 B6 | ... runs up to `stages` ahead, into the next tile
    MMA               | mma 0, free 0 | mma 1, free 1 | ... | acc 0 full | wait acc 1 empty | mma | ...
    epilogue                                             | acc 0: read, activate, hand over | acc 1 ...
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from mok_cute.config import ACC_STAGES, BF16_BYTES, ROW_BLOCK
from mok_cute.templates.arch.tiles import tile_modes
from mok_cute.templates.grouped_gemm.load import LoadWarp, num_k_tiles
from mok_cute.templates.grouped_gemm.rows import ROWS_GEMM, k_tiles
from mok_cute.templates.interface import Plan
from mok_cute.templates.scheduler.dynamic import Task


class ClusterPipelines:
    """The rings of operand stages and of accumulators, made by every warp of the cluster, which meets afterwards."""

    def __init__(self, plan: Plan):
        config = plan.config
        self.stages, self.ctas, self.epilogue_warps = config.stages, config.ctas_per_tile, config.epilogue_warps
        self.bytes = BF16_BYTES * config.tile_k * (ROW_BLOCK + config.weight_rows) * self.ctas

    def create(
        self, operand_bars: cute.Pointer, acc_bars: cute.Pointer
    ) -> tuple[pl.PipelineTmaUmma, pl.PipelineUmmaAsync]:
        agent = pl.Agent.Thread
        cluster = cute.make_layout((self.ctas, 1, 1, 1))
        operands = pl.PipelineTmaUmma.create(
            num_stages=self.stages,
            tx_count=self.bytes,
            barrier_storage=operand_bars,  # 2 * stages mbarriers
            producer_group=pl.CooperativeGroup(agent),
            consumer_group=pl.CooperativeGroup(agent),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        accumulators = pl.PipelineUmmaAsync.create(
            num_stages=ACC_STAGES,
            barrier_storage=acc_bars,  # 2 * ACC_STAGES mbarriers
            producer_group=pl.CooperativeGroup(agent),
            consumer_group=pl.CooperativeGroup(agent, self.epilogue_warps * self.ctas),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        return operands, accumulators


class Sm100Load(LoadWarp):
    """This CTA's share of both operands, by TMA into its own ring; the bytes count at CTA 0."""

    @cute.jit
    def load_tile(
        self,
        kind: cutlass.Constexpr,
        loads: Any,  # name -> (copy atom, TMA tensor)
        sA: cute.Tensor,  # (128, tile_k, stages) bf16, swizzled
        sB: cute.Tensor,  # (weight_rows, tile_k, stages) bf16, swizzled
        task: Task,
        operands: pl.PipelineTmaUmma,
        state: pl.PipelineState,
    ) -> pl.PipelineState:
        what = ROWS_GEMM[kind]
        solo = cute.make_layout(1)
        box = (ROW_BLOCK, self.tile_k)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        atom_a, mA = loads[what.a]
        atom_b0, mB0 = loads[what.b[0]]
        atom_b1, mB1 = loads[what.b[1]]
        tAs, tAg = cpasync.tma_partition(
            atom_a, 0, solo, tile_modes(sA), tile_modes(cute.local_tile(mA, box, (None, None)))
        )
        halves = cute.flat_divide(sB, box)  # (128, tile_k, 1 or 2, 1, stages)
        tBs, tBg0 = cpasync.tma_partition(
            atom_b0, 0, solo, tile_modes(halves), tile_modes(cute.local_tile(mB0, box, (None, None, None)))
        )
        _, tBg1 = cpasync.tma_partition(
            atom_b1, 0, solo, tile_modes(halves), tile_modes(cute.local_tile(mB1, box, (None, None, None)))
        )
        m = task.operand_block * self.ctas_per_tile + rank
        n0, n1 = task.col, task.col
        if const_expr(what.adjacent):
            n0, n1 = task.col * 2, task.col * 2 + 1
        for k in cutlass.range(k_tiles(kind, self.shape, self.tile_k), unroll=1):
            operands.producer_acquire(state)
            bar = operands.producer_get_barrier(state)
            cute.copy(atom_a, tAg[None, m, k], tAs[None, state.index], tma_bar_ptr=bar)
            if const_expr(self.ctas_per_tile == 1):
                cute.copy(atom_b0, tBg0[None, n0, k, task.expert], tBs[None, 0, 0, state.index], tma_bar_ptr=bar)
                cute.copy(atom_b1, tBg1[None, n1, k, task.expert], tBs[None, 1, 0, state.index], tma_bar_ptr=bar)
            else:
                if rank == 0:
                    cute.copy(atom_b0, tBg0[None, n0, k, task.expert], tBs[None, 0, 0, state.index], tma_bar_ptr=bar)
                else:
                    cute.copy(atom_b1, tBg1[None, n1, k, task.expert], tBs[None, 0, 0, state.index], tma_bar_ptr=bar)
            state.advance()
        return state


class Sm100Multiply:
    """The MMA warp's inner loop: one tile's products into an accumulator."""

    def __init__(self, plan: Plan):
        self.shape, self.tile_k = plan.shape, plan.config.tile_k

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def run(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,  # one accumulator in tensor memory
        rA: cute.Tensor,  # descriptors of A, (.., k blocks, stages)
        rB: cute.Tensor,
        kind: Int32,
        operands: pl.PipelineTmaUmma,
        state: pl.PipelineState,
    ) -> pl.PipelineState:
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(num_k_tiles(kind, self.shape, self.tile_k), unroll=1):
            operands.consumer_wait(state)
            for kb in cutlass.range_constexpr(cute.size(rB, mode=[2])):
                cute.gemm(mma, acc, rA[None, None, kb, state.index], rB[None, None, kb, state.index], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            operands.consumer_release(state)  # a commit: the stage is free when its products are done
            state.advance()
        return state
