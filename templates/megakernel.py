"""The forward megakernel: one launch per rank, every role of the layer in it.

Here is what all machines share: arguments, TMA descriptors, counters, dispatch, the end. Which warp plays which role,
and the tables of warps and pipelines, are in ``arch/sm90/cta.py`` and ``arch/sm100/cta.py``.

Counters live in two sets; a launch uses the one of its epoch's parity and clears the other, so nothing is reset by
hand and CUDA graphs replay. The last CTA out advances the epoch.
"""

from importlib import import_module
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Int32, Int64, const_expr

from mok_cute.config import ROW_BLOCK
from mok_cute.templates import records, registry, signal, storage
from mok_cute.templates.arch import tiles
from mok_cute.templates.epilogue import store as epilogue
from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import (
    CONTROL_EPOCH,
    CONTROL_STOP,
    ENTERED,
    FORWARD_ARGS,
    LaunchArgs,
    TensorArgs,
)

CTAS = {
    "wgmma": ("mok_cute.templates.arch.sm90.cta", "Sm90Cta"),
    "tcgen05": ("mok_cute.templates.arch.sm100.cta", "Sm100Cta"),
}


def cta_of(plan: Plan) -> Any:
    """The machine's half of the kernel."""
    module, name = CTAS[plan.config.tensor_core]
    return getattr(import_module(module), name)(plan)


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
        self.local_experts, self.has_shared = plan.local_experts, plan.has_shared
        self.cta = cta_of(plan)
        self.dispatch = registry.make(plan, "dispatch")

    @cute.jit
    def __call__(self, *flat: Any):
        """Arguments as ``launch_args.FORWARD_ARGS``, then the stream."""
        named = dict(zip((name for name, _ in FORWARD_ARGS), flat[:-1], strict=True))
        a = LaunchArgs(**{name: named[name] for name in LaunchArgs._fields})
        t = TensorArgs(**{name: named[name] for name in TensorArgs._fields})
        shape, config = self.shape, self.config
        hidden, inner, shared = shape.hidden, shape.intermediate, shape.shared_intermediate
        mma = self.cta.tiled_mma()
        own_tile = (ROW_BLOCK, config.weight_rows, config.tile_k)  # what one CTA brings
        la, lb = tiles.layout_a(own_tile, config.stages), tiles.layout_b(own_tile, config.stages)
        lo = tiles.layout_out(ROW_BLOCK, config.out_cols, epilogue.BUFFERS)
        box = (ROW_BLOCK, config.tile_k)
        load = lambda tensor: tiles.tma_load(self.cta.load_operation(), tensor, tiles.one_stage(la), box)
        half = (epilogue.CHUNK_ROWS, config.out_cols)
        store_layout = tiles.one_stage(tiles.layout_out(*half, 1))
        store = lambda tensor: tiles.tma_store(tensor, store_layout, half)
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
            cluster=self.cta.CLUSTER,
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
        num_dispatch_bars = config.warps * config.dispatch_slots
        s = storage.allocate(la, lb, lo, self.local_experts, config.stages, num_dispatch_bars)
        own = self.cta.allocate()

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
        slot_readers = self.cta.slot_readers()
        if thread == 0:
            cute.arch.mbarrier_init(s.slot_full, 1)
            cute.arch.mbarrier_init(s.slot_empty, slot_readers)
            for i in cutlass.range_constexpr(epilogue.PARTS * epilogue.BUFFERS):
                cute.arch.mbarrier_init(s.chunk_full + i, self.cta.CHUNK_WRITERS)
                cute.arch.mbarrier_init(s.chunk_empty + i, 1)
            for i in cutlass.range(num_dispatch_bars, unroll=1):
                cute.arch.mbarrier_init(s.dispatch_bars + i, 1)
        for e in cutlass.range(thread, self.local_experts, config.threads, unroll=1):
            s.prefix[e] = signal.word_at(a.expert_block_end + Int64(e) * 4)[0]
        pipelines = self.cta.start(s, own)
        self.clear_other_set(a, epoch, cta, num_ctas, thread)

        if cta < a.comm_ctas:
            self.run_dispatch(a, s, counters, control, thread)
        self.cta.run(a, mma, loads, stores, s, own, pipelines, counters, control, thread, warp)

        # The last CTA out advances the epoch: every CTA has read it by then.
        if self.cta.leave(a, own, counters, thread, num_ctas):
            signal.word_at(a.control + CONTROL_EPOCH * 4)[0] = epoch

    @cute.jit
    def clear_other_set(self, a: LaunchArgs, epoch: Int32, cta: Int32, num_ctas: Int32, thread: Int32):
        """Zero the counters of the next launch. Nobody uses them now: the last launch has ended.

        With launch control most of the grid never starts, so the communication CTAs do it alone: they always start.
        """
        other = a.counters + Int64((epoch + 1) & 1) * (Int64(a.set_words) * 4)
        first, workers = cta * self.config.threads + thread, num_ctas
        if const_expr(self.cta.CLUSTER is not None):
            workers = a.comm_ctas
            first = Int32(cutlass.select_(cta < workers, first, a.set_words))
        for i in cutlass.range(first, a.set_words, workers * self.config.threads, unroll=1):
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
