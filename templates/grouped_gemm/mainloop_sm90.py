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
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warpgroup as wg

from mok_cute.templates import records, signal
from mok_cute.templates.grouped_gemm.rows import ROWS_GEMM, built_kinds, k_tiles
from mok_cute.templates.interface import Plan
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import NO_WORD, Task, read_slot


def tile_modes(t: Any) -> Any:
    """Group the two tile modes into one, as tma_partition wants them."""
    return cute.group_modes(t, 0, 2)


class OperandPipeline:
    """The ring of operand stages, made by every warp of the CTA."""

    def __init__(self, plan: Plan):
        config = plan.config
        self.stages, self.consumer_warps = config.stages, plan.consumer_warps
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


class Sm90Load:
    """The load warp: for each task, wait for its rows and stream both operands."""

    def __init__(self, plan: Plan):
        config = plan.config
        self.shape, self.stages = plan.shape, config.stages
        self.tile_rows, self.tile_k = config.tile_rows, config.tile_k

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

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
        box = (self.tile_rows, self.tile_k)
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

    @cute.jit
    def run(
        self,
        loads: Any,
        sA: cute.Tensor,
        sB: cute.Tensor,
        operands: pl.PipelineTmaAsync,
        counters: Int64,
        control: signal.WaitControl,
        slot: cute.Pointer,
        slot_full: cute.Pointer,
        slot_empty: cute.Pointer,
    ):
        lane = cute.arch.lane_idx()
        state = pl.make_pipeline_state(pl.PipelineUserType.Producer, self.stages)
        phase = Int32(0)
        going = Boolean(True)
        while going:
            cute.arch.mbarrier_wait(slot_full, phase)
            task = read_slot(slot)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(slot_empty)
            phase ^= 1
            if task.load_word != NO_WORD:
                # The rows' readiness: x_routed_ready (gate/up), hidden_ready or shared_hidden_ready (down); the
                # argument of each stands where it is published. Every lane polls with acquire at gpu scope, and its
                # proxy fence orders its TMA loads below behind it, whichever lane is elected to issue them.
                # When the wait gives up, the loads still run (their addresses are valid, their data is garbage), so
                # that every mbarrier phase completes; the store warps see the stop word and publish nothing.
                signal_code, index = Int32(records.SIGNAL_CODE["x_routed_ready"]), task.z
                if task.kind == order.DOWN:
                    signal_code, index = Int32(records.SIGNAL_CODE["hidden_ready"]), task.row_block
                if task.kind == order.SHARED_DOWN:
                    signal_code, index = Int32(records.SIGNAL_CODE["shared_hidden_ready"]), task.row_block
                signal.wait_at_least(
                    counters + Int64(task.load_word) * 4,
                    task.load_required,
                    control,
                    Int32(records.ROLE_LOAD),
                    signal_code,
                    index,
                    False,
                )
                signal.async_reads_follow()
                cute.arch.sync_warp()
            for kind in built_kinds(self.shape):  # unrolled while tracing: one loop per operand binding
                if task.kind == kind:
                    state = self.load_tile(kind, loads, sA, sB, task, operands, state)
            going = task.kind != order.END
        operands.producer_tail(state)


class Sm90Multiply:
    """The consumer warpgroups' inner loop: one tile's products into the accumulators."""

    def __init__(self, plan: Plan):
        self.shape, self.tile_k = plan.shape, plan.config.tile_k

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def num_k_tiles(self, kind: Int32) -> Int32:
        count = Int32(0)
        for built in built_kinds(self.shape):
            count = Int32(cutlass.select_(kind == built, Int32(k_tiles(built, self.shape, self.tile_k)), count))
        return count

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
        for k in cutlass.range(self.num_k_tiles(kind), unroll=1):
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


ACCUMULATOR = Float32
OPERAND = BFloat16
