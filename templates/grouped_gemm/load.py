"""The load warp: for each task, wait for its rows and stream both operands. ``load_tile`` is the machine's part."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Boolean, Int32, Int64

from mok_cute.shapes import MoEShape
from mok_cute.templates import records, signal
from mok_cute.templates.grouped_gemm.rows import built_kinds, k_tiles
from mok_cute.templates.interface import Plan
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import NO_WORD, read_slot


def num_k_tiles(kind: Int32, shape: MoEShape, tile_k: int) -> Int32:
    """Stages that a tile of this kind takes."""
    count = Int32(0)
    for built in built_kinds(shape):
        count = Int32(cutlass.select_(kind == built, Int32(k_tiles(built, shape, tile_k)), count))
    return count


class LoadWarp:
    def __init__(self, plan: Plan):
        config = plan.config
        self.shape, self.stages = plan.shape, config.stages
        self.tile_k, self.ctas_per_tile = config.tile_k, config.ctas_per_tile

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def load_tile(self, kind: int, loads: Any, sA: Any, sB: Any, task: Any, operands: Any, state: Any) -> Any:
        """Stream both operands of one tile through the ring; the state of the ring behind it."""
        raise NotImplementedError

    @cute.jit
    def run(
        self,
        loads: Any,
        sA: cute.Tensor,
        sB: cute.Tensor,
        operands: Any,  # the machine's pipeline of operand stages
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
