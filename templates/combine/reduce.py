"""Combine, second half: y[t] = s[t] * S(x[t]) + sum over k of w[t, k] * combine[t, k], in fp32, rounded once.

One warp sums one token. The sum runs over k in order with explicit fused multiply-adds, so that its bits depend on
nothing else. Dropped routes are skipped: their combine slots were never written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Boolean, Float32, Int32, Int64, const_expr

from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import LaunchArgs

VECTOR = 8  # bf16 elements in 16 bytes
LANES = 32
BATCH = 4  # rows loaded before they are summed


class ReduceCombine:
    def __init__(self, plan: Plan):
        shape = plan.shape
        self.hidden, self.topk = shape.hidden, shape.topk
        self.has_shared, self.has_factor = plan.has_shared, shape.shared_factor
        self.tokens_per_task = plan.config.tokens_per_reduce

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    @cute.jit
    def load_vector(self, address: Int64, wanted: Boolean) -> cute.Tensor:
        """16 bytes from global memory, or zeros."""
        value = cute.make_rmem_tensor((VECTOR,), BFloat16)
        value.fill(0.0)
        if wanted:
            source = cute.make_ptr(BFloat16, address, AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), value)
        return value

    @cute.jit
    def run(self, a: LaunchArgs, task: Int32, warp: Int32, num_tokens: Int32):
        """Sum token ``task * tokens_per_task + warp``; ``warp`` counts the consumer warps."""
        lane = cute.arch.lane_idx()
        token = task * self.tokens_per_task + warp
        if token < num_tokens:
            table = cute.make_ptr(Int64, a.peer_table, AddressSpace.gmem, assumed_align=8)
            rows = table[a.rank] + a.combine_offset + Int64(token) * (self.topk * self.hidden * 2)
            ids = cute.make_ptr(Int32, a.local_ids + Int64(token) * (self.topk * 4), AddressSpace.gmem, assumed_align=4)
            weights = cute.make_ptr(
                Float32, a.topk_weights + Int64(token) * (self.topk * 4), AddressSpace.gmem, assumed_align=4
            )
            factor = Float32(1.0)
            if const_expr(self.has_factor):
                factor = cute.make_ptr(Float32, a.shared_factor, AddressSpace.gmem, assumed_align=4)[token]
            for col in cutlass.range(lane * VECTOR, self.hidden, LANES * VECTOR, unroll=1):
                total = cute.make_rmem_tensor((VECTOR,), Float32)
                total.fill(0.0)
                if const_expr(self.has_shared):
                    shared_row = a.shared_y + (Int64(token) * self.hidden + col) * 2
                    value = self.load_vector(shared_row, Boolean(True))
                    for i in cutlass.range_constexpr(VECTOR):
                        total[i] = Float32(value[i]) * factor
                for first in cutlass.range_constexpr(0, self.topk, BATCH):
                    batch = []
                    for k in cutlass.range_constexpr(first, min(first + BATCH, self.topk)):
                        wanted = ids[k] >= 0
                        row = self.load_vector(rows + Int64(k * self.hidden + col) * 2, wanted)
                        weight = Float32(cutlass.select_(wanted, weights[k], Float32(0.0)))
                        batch.append((weight, row))
                    for weight, row in batch:
                        for i in cutlass.range_constexpr(VECTOR):
                            total[i] = cute.math.fma(weight, Float32(row[i]), total[i])
                out = cute.make_rmem_tensor((VECTOR,), BFloat16)
                out.store(total.load().to(BFloat16))
                target = cute.make_ptr(
                    BFloat16, a.y + (Int64(token) * self.hidden + col) * 2, AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(out, cute.make_tensor(target, cute.make_layout(VECTOR)))
