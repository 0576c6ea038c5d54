"""A CTA on Hopper: which warp plays which role, and what a tile is made of.

| warp role  | warps   | registers | program |
|------------|---------|-----------|---------|
| dispatch   | all 12  | 168       | dispatch/pull.py, in the first ``comm_ctas`` CTAs, before the roles below |
| load       | 0       | 72        | grouped_gemm/load.py, mainloop_sm90.py |
| scheduler  | 1       | 72        | scheduler/dynamic.py |
| store      | 2, 3    | 72        | epilogue/store.py, combine/push.py; warp 2 + w serves consumer warpgroup w |
| consumer   | 4 to 11 | 216       | mainloop_sm90.py, epilogue/store.py, combine/reduce.py |

| pipeline   | producer           | consumer                 | arrivals per phase |
|------------|--------------------|--------------------------|--------------------|
| operands   | load (TMA)         | 8 consumer warps         | full 1 + bytes; empty 8 |
| slot       | scheduler          | load, 8 consumer warps   | full 1; empty 9 |
| chunk      | consumer warpgroup | its store warp           | full 128; empty 1 |
| piece      | dispatch lane      | the same lane            | 1 + bytes |

    CTA < comm_ctas   | stage x | enter | pull rows ........ | then as below
    every CTA         | shared gate/up | gate/up 0 | shared down | gate/up 1 | down 0 | .. | down | wait exit | reduce |
    load              |  k k k k  k k k k | ...                     (up to 4 stages ahead, into the next task)
    consumer          |    m m m m  epilogue | m m m m epilogue |
    store             |                  s s | p p p p |
"""

import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mok_cute.templates import registry, signal, storage
from mok_cute.templates.arch.sm90 import mma as tensor_core
from mok_cute.templates.epilogue import store as epilogue
from mok_cute.templates.grouped_gemm.mainloop_sm90 import OperandPipeline
from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import CTAS_DONE, LaunchArgs
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import read_slot
from mok_cute.templates.warps import SM90_REGISTERS_CONSUMER, SM90_REGISTERS_SERVICE, Sm90Warps


class Sm90Cta:
    CLUSTER = None
    CHUNK_WRITERS = 128  # threads that write a chunk: a warpgroup

    def __init__(self, plan: Plan):
        self.config = plan.config
        self.tile = (plan.config.tile_rows, plan.config.down_cols, plan.config.tile_k)
        self.operands = OperandPipeline(plan)
        self.scheduler = registry.make(plan, "scheduler")
        self.load = registry.make(plan, "load")
        self.multiply = registry.make(plan, "multiply")
        self.epilogue = registry.make(plan, "epilogue")
        self.store = registry.make(plan, "store")
        self.reduce = registry.make(plan, "reduce")

    # ------------------------------------------------------------------------------------------- for the host function

    def tiled_mma(self) -> cute.TiledMma:
        return tensor_core.tiled_mma(self.config.epilogue_warps // 4, self.config.down_cols)

    def load_operation(self) -> cpasync.CopyBulkTensorTileG2SOp:
        return cpasync.CopyBulkTensorTileG2SOp()

    # --------------------------------------------------------------------------------------------------- in the kernel

    def slot_readers(self) -> int:
        return 1 + self.config.epilogue_warps

    def allocate(self) -> None:
        """Nothing besides ``storage.Storage``."""

    def start(self, s: storage.Storage, own: None) -> pl.PipelineTmaAsync:
        """Make the pipelines; afterwards every barrier of the CTA is ready for use."""
        operands = self.operands.create(s.operand_bars)  # ends with a barrier of the CTA
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return operands

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        mma: cute.TiledMma,
        loads: dict,
        stores: dict,
        s: storage.Storage,
        own: None,
        operands: pl.PipelineTmaAsync,
        counters: Int64,
        control: signal.WaitControl,
        thread: Int32,
        warp: Int32,
    ):
        wgi = cute.arch.make_warp_uniform(thread // 128)
        if wgi == 0:
            cute.arch.setmaxregister_decrease(SM90_REGISTERS_SERVICE)
            if warp == Sm90Warps.LOAD:
                self.load.run(loads, s.sA, s.sB, operands, counters, control, s.slot, s.slot_full, s.slot_empty)
            if warp == Sm90Warps.SCHEDULER:
                self.scheduler.run(a, counters, control, s.prefix, s.slot, s.slot_full, s.slot_empty)
            if warp >= Sm90Warps.STORE:
                self.store.run(
                    a,
                    stores,
                    s.sOut,
                    warp - Sm90Warps.STORE,
                    epilogue.chunks_of(s, warp - Sm90Warps.STORE),
                    counters,
                    control,
                )
        else:
            cute.arch.setmaxregister_increase(SM90_REGISTERS_CONSUMER)
            self.run_consumer(a, mma, s, operands, wgi - 1, thread - 128)

    @cute.jit
    def run_consumer(
        self,
        a: LaunchArgs,
        mma: cute.TiledMma,
        s: storage.Storage,
        operands: pl.PipelineTmaAsync,
        warpgroup: Int32,
        thread: Int32,  # within the consumer warpgroups
    ):
        config = self.config
        lane = cute.arch.lane_idx()
        num_tokens = signal.word_at(a.num_tokens)[0]
        saved_blocks = Int32(0)
        if a.saved_x != 0:
            saved_blocks = a.minibatch_blocks * a.ring_minibatches  # macrobatch 0
        part = mma.get_slice(thread)
        acc = cute.make_rmem_tensor(part.partition_shape_C(self.tile[:2]), Float32)
        rA = mma.make_fragment_A(part.partition_A(s.sA))
        rB = mma.make_fragment_B(part.partition_B(s.sB))
        r2s = tensor_core.registers_to_shared(mma)
        r2s_thread = r2s.get_slice(thread)
        dst = r2s_thread.partition_D(s.sOut)
        tile = tensor_core.RegisterTile(acc, r2s, r2s_thread, dst)
        chunks = epilogue.chunks_of(s, warpgroup)
        in_warpgroup = thread % 128
        warp = thread // 32
        state = pl.make_pipeline_state(pl.PipelineUserType.Consumer, config.stages)
        phase, parity = Int32(0), Int32(0)
        going = Boolean(True)
        while going:
            cute.arch.mbarrier_wait(s.slot_full, phase)
            task = read_slot(s.slot)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s.slot_empty)
            phase ^= 1
            if task.kind == order.REDUCE:
                self.reduce.run(a, task.row_block, warp, num_tokens)
            if (task.kind != order.REDUCE) & (task.kind != order.END):
                state = self.multiply.run(mma, acc, rA, rB, task.kind, operands, state)
                save = (task.kind == order.GATE_UP) & (task.row_block < saved_blocks)
                parity = self.epilogue.run(tile, task, chunks, parity, in_warpgroup, warpgroup, save)
            going = task.kind != order.END
        self.epilogue.finish(chunks, parity, in_warpgroup)

    @cute.jit
    def leave(self, a: LaunchArgs, own: None, counters: Int64, thread: Int32, num_ctas: Int32) -> Boolean:
        """After the last role: True in the one thread of the launch that every other CTA has left before."""
        cute.arch.sync_threads()
        last = Boolean(False)
        if thread == 0:
            done = cute.arch.atomic_add(signal.word_at(counters + CTAS_DONE * 4), Int32(1), sem="acq_rel", scope="gpu")
            last = done == num_ctas - 1
        return last
