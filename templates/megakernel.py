"""The forward megakernel for Hopper: one launch per rank, every role of the layer in it.

| warp role  | warps   | registers | program |
|------------|---------|-----------|---------|
| dispatch   | all 12  | 168       | dispatch/pull.py, in the first ``comm_ctas`` CTAs, before the roles below |
| load       | 0       | 72        | grouped_gemm/mainloop_sm90.py |
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

Counters live in two sets; a launch uses the one of its epoch's parity and clears the other, so nothing is reset by
hand and CUDA graphs replay. The last CTA out advances the epoch.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import AddressSpace, BFloat16, Boolean, Float32, Int32, Int64, const_expr

from mok_cute.templates import records, registry, signal, storage
from mok_cute.templates.arch.sm90 import mma as arch
from mok_cute.templates.epilogue import store as epilogue
from mok_cute.templates.grouped_gemm.mainloop_sm90 import OperandPipeline
from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import (
    CONTROL_EPOCH,
    CONTROL_STOP,
    CTAS_DONE,
    ENTERED,
    FORWARD_ARGS,
    LaunchArgs,
    TensorArgs,
)
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import read_slot
from mok_cute.templates.warps import SM90_REGISTERS_CONSUMER, SM90_REGISTERS_SERVICE, Sm90Warps


def matrix(address: Int64, rows: Any, cols: int) -> cute.Tensor:
    """(rows, cols) bf16, rows contiguous, at a byte address."""
    pointer = cute.make_ptr(BFloat16, address, AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, cols), stride=(cols, 1)))


def stacked(address: Int64, rows: int, cols: int, experts: int, stride: Any) -> cute.Tensor:
    """(rows, cols, experts) bf16, rows contiguous, ``stride`` elements between experts."""
    pointer = cute.make_ptr(BFloat16, address, AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, cols, experts), stride=(cols, 1, stride)))


class ForwardMegakernel:
    """Joins the roles. ``__call__`` is the host function: it encodes the TMA descriptors and launches once."""

    def __init__(self, plan: Plan):
        self.plan, self.shape, self.config = plan, plan.shape, plan.config
        self.local_experts, self.consumer_warps = plan.local_experts, plan.consumer_warps
        self.has_shared = plan.has_shared
        self.tile = (self.config.tile_rows, self.config.down_cols, self.config.tile_k)
        self.operands = OperandPipeline(plan)
        self.dispatch = registry.make(plan, "dispatch")
        self.scheduler = registry.make(plan, "scheduler")
        self.load = registry.make(plan, "load")
        self.multiply = registry.make(plan, "multiply")
        self.epilogue = registry.make(plan, "epilogue")
        self.store = registry.make(plan, "store")
        self.reduce = registry.make(plan, "reduce")

    @cute.jit
    def __call__(self, *flat: Any):
        """Arguments as ``launch_args.FORWARD_ARGS``, then the stream."""
        named = dict(zip((name for name, _ in FORWARD_ARGS), flat[:-1], strict=True))
        a = LaunchArgs(**{name: named[name] for name in LaunchArgs._fields})
        t = TensorArgs(**{name: named[name] for name in TensorArgs._fields})
        shape, config = self.shape, self.config
        hidden, inner, shared = shape.hidden, shape.intermediate, shape.shared_intermediate
        mma = arch.tiled_mma(config.consumer_warpgroups, config.down_cols)
        la, lb = arch.layout_a(self.tile, config.stages), arch.layout_b(self.tile, config.stages)
        lo = arch.layout_out(config.tile_rows, config.out_cols, epilogue.BUFFERS)
        box = (config.tile_rows, config.tile_k)
        load = lambda tensor: arch.tma_load(tensor, arch.one_stage(la), box)
        half = (config.tile_rows // 2, config.out_cols)
        store_layout = arch.one_stage(arch.layout_out(*half, 1))
        store = lambda tensor: arch.tma_store(tensor, store_layout, half)
        experts = self.local_experts
        stride = lambda value: cute.assume(value, 8)
        loads = {
            "x_ring": load(matrix(a.x_ring, t.ring_rows, hidden)),
            "hidden_ring": load(matrix(t.hidden_ring, t.ring_rows, inner)),
            "gate": load(stacked(t.gate, inner, hidden, experts, stride(t.gate_stride))),
            "up": load(stacked(t.up, inner, hidden, experts, stride(t.up_stride))),
            "down": load(stacked(t.down, hidden, inner, experts, stride(t.down_stride))),
        }
        stores = {
            "hidden_ring": store(matrix(t.hidden_ring, t.ring_rows, inner)),
            "saved_gate": store(matrix(t.saved_gate, t.saved_rows, inner)),
            "saved_up": store(matrix(t.saved_up, t.saved_rows, inner)),
        }
        if const_expr(self.has_shared):
            loads["x"] = load(matrix(a.x, t.x_rows, hidden))
            loads["shared_hidden"] = load(matrix(t.shared_hidden, t.token_rows, shared))
            loads["shared_gate"] = load(stacked(t.shared_gate, shared, hidden, 1, shared * hidden))
            loads["shared_up"] = load(stacked(t.shared_up, shared, hidden, 1, shared * hidden))
            loads["shared_down"] = load(stacked(t.shared_down, hidden, shared, 1, shared * hidden))
            stores["shared_hidden"] = store(matrix(t.shared_hidden, t.token_rows, shared))
            stores["shared_y"] = store(matrix(a.shared_y, t.token_rows, hidden))
        self.kernel.set_name_prefix("mok_forward", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(a, mma, loads, stores, la, lb, lo).launch(
            grid=(named["num_ctas"], 1, 1),
            block=(config.threads, 1, 1),
            stream=flat[-1],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        a: LaunchArgs,
        mma: cute.TiledMma,
        loads: dict,
        stores: dict,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
        lo: cute.ComposedLayout,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroups = config.consumer_warpgroups
        num_dispatch_bars = config.warps * config.dispatch_slots
        s = storage.allocate(la, lb, lo, self.local_experts, config.stages, warpgroups, num_dispatch_bars)

        epoch = signal.word_at(a.control + CONTROL_EPOCH * 4)[0] + 1
        counters = a.counters + Int64(epoch & 1) * (Int64(a.set_words) * 4)
        control = signal.WaitControl(
            stop=a.control + CONTROL_STOP * 4,
            record=a.record,
            limit_ns=a.wait_limit_ns,
            entered=counters + ENTERED * 4,
            kernel=Int32(records.KERNEL_FORWARD),
            rank=a.rank,
            epoch=epoch,
        )
        if thread == 0:
            cute.arch.mbarrier_init(s.slot_full, 1)
            cute.arch.mbarrier_init(s.slot_empty, 1 + self.consumer_warps)
            for i in cutlass.range_constexpr(warpgroups * epilogue.BUFFERS):
                cute.arch.mbarrier_init(s.chunk_full + i, 128)
                cute.arch.mbarrier_init(s.chunk_empty + i, 1)
            for i in cutlass.range(num_dispatch_bars, unroll=1):
                cute.arch.mbarrier_init(s.dispatch_bars + i, 1)
        for e in cutlass.range(thread, self.local_experts, config.threads, unroll=1):
            s.prefix[e] = signal.word_at(a.expert_block_end + Int64(e) * 4)[0]
        operands = self.operands.create(s.operand_bars)  # ends with a barrier of the CTA
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.clear_other_set(a, epoch, cta * config.threads + thread, num_ctas * config.threads)

        if cta < a.comm_ctas:
            self.run_dispatch(a, s, counters, control, thread)

        wgi = cute.arch.make_warp_uniform(thread // 128)
        if wgi == 0:
            cute.arch.setmaxregister_decrease(SM90_REGISTERS_SERVICE)
            if warp == Sm90Warps.LOAD:
                self.load.run(loads, s.sA, s.sB, operands, counters, control, s.slot, s.slot_full, s.slot_empty)
            if warp == Sm90Warps.SCHEDULER:
                self.scheduler.run(a, counters, control, s.prefix, s.slot, s.slot_full, s.slot_empty)
            if warp >= Sm90Warps.STORE:
                self.run_store(a, stores, s, warp - Sm90Warps.STORE, counters, control)
        else:
            cute.arch.setmaxregister_increase(SM90_REGISTERS_CONSUMER)
            self.run_consumer(a, mma, s, operands, wgi - 1, thread - 128)

        # The last CTA out advances the epoch: every CTA has read it by then.
        cute.arch.sync_threads()
        if thread == 0:
            done = cute.arch.atomic_add(signal.word_at(counters + CTAS_DONE * 4), Int32(1), sem="acq_rel", scope="gpu")
            if done == num_ctas - 1:
                signal.word_at(a.control + CONTROL_EPOCH * 4)[0] = epoch

    @cute.jit
    def clear_other_set(self, a: LaunchArgs, epoch: Int32, thread: Int32, num_threads: Int32):
        """Zero the counters of the next launch. Nobody uses them now: the last launch has ended."""
        other = a.counters + Int64((epoch + 1) & 1) * (Int64(a.set_words) * 4)
        for i in cutlass.range(thread, a.set_words, num_threads, unroll=1):
            signal.word_at(other + Int64(i) * 4)[0] = Int32(0)

    @cute.jit
    def run_dispatch(
        self, a: LaunchArgs, s: storage.Storage, counters: Int64, control: signal.WaitControl, thread: Int32
    ):
        """Dispatch borrows the operand ring and the staging before the GEMMs of this CTA start."""
        pieces = cute.make_ptr(BFloat16, s.sA.iterator.toint(), AddressSpace.smem, assumed_align=128)
        zeros = cute.make_ptr(BFloat16, s.sOut.iterator.toint(), AddressSpace.smem, assumed_align=128)
        words = cute.recast_ptr(zeros, dtype=Int32)
        for i in cutlass.range(thread, self.dispatch.piece_bytes // 4, self.config.threads, unroll=1):
            words[i] = Int32(0)
        cute.arch.fence_view_async_shared()  # bulk stores read the zeros
        cute.arch.sync_threads()
        self.dispatch.run(a, counters, control, pieces, zeros, s.dispatch_bars)
        # Every warp's bulk copies are complete; the fence orders our reads and writes before TMA fills the ring.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

    def chunks_of(self, s: storage.Storage, warpgroup: Int32) -> epilogue.Chunks:
        first = warpgroup * epilogue.BUFFERS
        return epilogue.Chunks(s.chunk_full + first, s.chunk_empty + first, s.messages + first * epilogue.MESSAGE_WORDS)

    @cute.jit
    def run_store(
        self,
        a: LaunchArgs,
        stores: dict,
        s: storage.Storage,
        warpgroup: Int32,
        counters: Int64,
        control: signal.WaitControl,
    ):
        config = self.config
        half_rows = config.tile_rows // 2
        halves = cute.flat_divide(s.sOut, (half_rows, config.out_cols))  # (64, 64, 2, 1, BUFFERS)
        half = half_rows * config.out_cols
        first = cute.make_ptr(BFloat16, s.sOut.iterator.toint(), AddressSpace.smem, assumed_align=1024)
        self.store.run(
            a,
            stores,
            halves,
            first + warpgroup * half,
            warpgroup,
            self.chunks_of(s, warpgroup),
            counters,
            control,
            half * config.consumer_warpgroups,
        )

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
        r2s = arch.registers_to_shared(mma)
        r2s_thread = r2s.get_slice(thread)
        dst = r2s_thread.partition_D(s.sOut)
        chunks = self.chunks_of(s, warpgroup)
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
                parity = self.epilogue.run(
                    acc, r2s, r2s_thread, dst, task, chunks, parity, in_warpgroup, warpgroup, save
                )
            going = task.kind != order.END
        self.epilogue.finish(chunks, parity, in_warpgroup)
