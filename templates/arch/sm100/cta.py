"""A CTA on Blackwell: which warp plays which role, and what a tile is made of.

| warp role  | warps  | registers | program |
|------------|--------|-----------|---------|
| dispatch   | all 12 | 168       | dispatch/pull.py, in the first ``comm_ctas`` CTAs, before the roles below |
| load       | 0      | 96        | grouped_gemm/load.py, mainloop_sm100.py |
| scheduler  | 1      | 96        | scheduler/clusters.py |
| store      | 2, 3   | 96        | epilogue/store.py, combine/push.py; warp 2 + w serves rows 64 w to 64 w + 63 |
| epilogue   | 4 to 7 | 240       | epilogue/store.py, combine/reduce.py |
| MMA        | 8      | 152       | mainloop_sm100.py, in CTA 0 of a pair |

| pipeline     | producer             | consumer              | arrivals per phase |
|--------------|----------------------|-----------------------|--------------------|
| operands     | load (TMA)           | MMA                   | full 1 + bytes of all CTAs, at CTA 0; empty 1 |
| accumulators | MMA                  | epilogue              | full 1; empty 4 per CTA, at CTA 0 |
| slot         | scheduler            | load, epilogue, MMA   | full 1; empty 6 in CTA 0, 5 in CTA 1 |
| chunk        | two epilogue warps   | their store warp      | full 64; empty 1 |
| piece        | dispatch lane        | the same lane         | 1 + bytes |
| answers      | CTA 0's scheduler or the hardware | both schedulers | see scheduler/clusters.py |

Both CTAs of a pair walk the same tasks in the same order, since both schedulers see the same answers. A launch that
gave up walks them too, with nothing published: a CTA that stopped alone would leave its peer waiting.
"""

import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import TmemAllocator

from mok_cute.config import ACC_STAGES, ANSWERS
from mok_cute.templates import registry, signal, storage
from mok_cute.templates.arch.sm100 import mma as tensor_core
from mok_cute.templates.epilogue import store as epilogue
from mok_cute.templates.grouped_gemm.mainloop_sm100 import ClusterPipelines
from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import CTAS_DONE, LaunchArgs
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import read_slot
from mok_cute.templates.warps import (
    SM100_REGISTERS_EPILOGUE,
    SM100_REGISTERS_MMA,
    SM100_REGISTERS_SERVICE,
    Sm100Warps,
)

TMEM_BARRIER, EPILOGUE_BARRIER = 1, 2  # named barriers: tensor memory is allocated; its readers are through


class Sm100Cta:
    CHUNK_WRITERS = 64  # threads that write a chunk: half of the epilogue warps

    def __init__(self, plan: Plan):
        self.config = plan.config
        self.ctas = plan.config.ctas_per_tile
        self.CLUSTER = (self.ctas, 1, 1)
        self.tile = (plan.config.tile_rows, plan.config.down_cols, plan.config.tile_k)
        self.pipelines = ClusterPipelines(plan)
        self.scheduler = registry.make(plan, "scheduler")
        self.load = registry.make(plan, "load")
        self.multiply = registry.make(plan, "multiply")
        self.epilogue = registry.make(plan, "epilogue")
        self.store = registry.make(plan, "store")
        self.reduce = registry.make(plan, "reduce")

    # ------------------------------------------------------------------------------------------- for the host function

    def tiled_mma(self) -> cute.TiledMma:
        return tensor_core.tiled_mma(self.ctas, self.config.down_cols)

    def load_operation(self) -> cpasync.CopyBulkTensorTileG2SOp:
        return tensor_core.load_operation(self.ctas)

    # --------------------------------------------------------------------------------------------------- in the kernel

    def rank(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def slot_readers(self) -> Int32:
        return self.config.epilogue_warps + 1 + Int32(self.rank() == 0)

    def allocate(self) -> storage.ClusterStorage:
        return storage.allocate_for_cluster()

    @cute.jit
    def start(self, s: storage.Storage, own: storage.ClusterStorage) -> tuple[pl.PipelineTmaUmma, pl.PipelineUmmaAsync]:
        """Make the pipelines; afterwards every barrier of the cluster is ready for use."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < ANSWERS:
            cute.arch.mbarrier_init(own.answer_full + thread, 1)
        if thread == 0:
            cute.arch.mbarrier_init(own.answers_read, self.ctas)
            cute.arch.mbarrier_init(own.tmem_done, 32)
        pipelines = self.pipelines.create(s.operand_bars, own.acc_bars)
        cute.arch.mbarrier_init_fence()
        self.meet()
        return pipelines

    def meet(self) -> None:
        """A barrier of the whole cluster."""
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def tensor_memory(self, own: storage.ClusterStorage) -> TmemAllocator:
        readers = 32 * (self.config.epilogue_warps + 1)
        return TmemAllocator(
            own.tmem_base,
            barrier_for_retrieve=pl.NamedBarrier(TMEM_BARRIER, readers),
            allocator_warp_id=int(Sm100Warps.EPILOGUE),
            is_two_cta=self.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=own.tmem_done if self.ctas == 2 else None,
            initialize_mbarrier=False,
        )

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        mma: cute.TiledMma,
        loads: dict,
        stores: dict,
        s: storage.Storage,
        own: storage.ClusterStorage,
        pipelines: tuple,
        counters: Int64,
        control: signal.WaitControl,
        thread: Int32,
        warp: Int32,
    ):
        operands, accumulators = pipelines
        wgi = cute.arch.make_warp_uniform(thread // 128)
        if wgi == 0:
            cute.arch.setmaxregister_decrease(SM100_REGISTERS_SERVICE)
            if warp == Sm100Warps.LOAD:
                self.load.run(loads, s.sA, s.sB, operands, counters, control, s.slot, s.slot_full, s.slot_empty)
            if warp == Sm100Warps.SCHEDULER:
                self.scheduler.run(a, counters, control, s.prefix, s.slot, s.slot_full, s.slot_empty, own)
            if warp >= Sm100Warps.STORE:
                part = warp - Sm100Warps.STORE
                self.store.run(a, stores, s.sOut, part, epilogue.chunks_of(s, part), counters, control)
        elif wgi == 1:
            cute.arch.setmaxregister_increase(SM100_REGISTERS_EPILOGUE)
            self.run_epilogue(a, mma, s, own, accumulators, thread - 32 * Sm100Warps.EPILOGUE)
        else:
            cute.arch.setmaxregister_decrease(SM100_REGISTERS_MMA)
            if warp == Sm100Warps.MMA:
                self.run_mma(mma, s, own, operands, accumulators)

    @cute.jit
    def run_mma(
        self,
        mma: cute.TiledMma,
        s: storage.Storage,
        own: storage.ClusterStorage,
        operands: pl.PipelineTmaUmma,
        accumulators: pl.PipelineUmmaAsync,
    ):
        memory = self.tensor_memory(own)
        memory.wait_for_alloc()
        acc = tensor_core.accumulators(mma, memory.retrieve_ptr(Float32), self.tile)
        if self.rank() == 0:
            lane = cute.arch.lane_idx()
            rA, rB = tensor_core.operand_fragments(mma, s.sA, s.sB, self.tile, self.config.stages)
            state = pl.make_pipeline_state(pl.PipelineUserType.Consumer, self.config.stages)
            filled = pl.make_pipeline_state(pl.PipelineUserType.Producer, ACC_STAGES)
            phase = Int32(0)
            going = Boolean(True)
            while going:
                cute.arch.mbarrier_wait(s.slot_full, phase)
                kind = read_slot(s.slot).kind
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(s.slot_empty)
                phase ^= 1
                if (kind != order.REDUCE) & (kind != order.END):
                    accumulators.producer_acquire(filled)
                    target = acc[None, None, None, filled.index]
                    state = self.multiply.run(mma, target, rA, rB, kind, operands, state)
                    accumulators.producer_commit(filled)
                    filled.advance()
                going = kind != order.END
            accumulators.producer_tail(filled)

    @cute.jit
    def run_epilogue(
        self,
        a: LaunchArgs,
        mma: cute.TiledMma,
        s: storage.Storage,
        own: storage.ClusterStorage,
        accumulators: pl.PipelineUmmaAsync,
        thread: Int32,  # within the epilogue warps
    ):
        lane = cute.arch.lane_idx()
        rank = self.rank()
        num_tokens = signal.word_at(a.num_tokens)[0]
        saved_blocks = Int32(0)
        if a.saved_x != 0:
            saved_blocks = a.minibatch_blocks * a.ring_minibatches  # macrobatch 0
        memory = self.tensor_memory(own)
        memory.allocate(tensor_core.TMEM_COLUMNS)
        memory.wait_for_alloc()
        base = memory.retrieve_ptr(Float32)
        acc = tensor_core.accumulators(mma, base, self.tile)
        part = cute.arch.make_warp_uniform(thread // self.CHUNK_WRITERS)
        chunks = epilogue.chunks_of(s, part)
        in_part = thread % self.CHUNK_WRITERS
        warp = rank * self.config.epilogue_warps + thread // 32
        state = pl.make_pipeline_state(pl.PipelineUserType.Consumer, ACC_STAGES)
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
                accumulators.consumer_wait(state)
                tile = tensor_core.TmemTile(acc[(None, None), 0, 0, state.index], thread, s.sOut)
                save = (task.kind == order.GATE_UP) & (task.row_block < saved_blocks)
                parity = self.epilogue.run(tile, task, chunks, parity, in_part, rank * epilogue.PARTS + part, save)
                with cute.arch.elect_one():
                    accumulators.consumer_release(state)
                state.advance()
            going = task.kind != order.END
        self.epilogue.finish(chunks, parity, in_part)
        memory.relinquish_alloc_permit()
        pl.NamedBarrier(EPILOGUE_BARRIER, 32 * self.config.epilogue_warps).arrive_and_wait()
        memory.free(base)

    @cute.jit
    def leave(
        self, a: LaunchArgs, own: storage.ClusterStorage, counters: Int64, thread: Int32, num_ctas: Int32
    ) -> Boolean:
        """After the last role: True in the one thread of the launch that every other cluster has left before.

        The cluster meets first: a CTA that is gone could not take its peer's arrivals. A cluster counts the cluster
        numbers that it took, its own among them, so that the sum is right whatever launch control handed out.
        """
        self.meet()
        last = Boolean(False)
        if (thread == 0) & (self.rank() == 0):
            taken = own.handled[0]
            word = signal.word_at(counters + CTAS_DONE * 4)
            done = cute.arch.atomic_add(word, taken, sem="acq_rel", scope="gpu") + taken
            last = done == num_ctas // self.ctas
        return last
