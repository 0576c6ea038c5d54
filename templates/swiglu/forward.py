"""SwiGLU forward: h = silu(min(g, L)) * clamp(u, -L, L), in fp32, on bf16-rounded gate and up.

Source: the MoK protocol, section 6.1. The sigmoid uses the hardware's approximate exp2 and reciprocal, whose relative
error (about 2^-22) is far below the bf16 rounding of the result.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from mok_cute.templates.interface import Plan

LOG2_E = 1.4426950408889634


def select(condition: Boolean, yes: Float32, no: Float32) -> Float32:
    return Float32(cutlass.select_(condition, yes, no))


class SwiGLU:
    """``limit`` None: no clamp; a number >= 0: gate clamped from above, up from both sides. A compile-time choice."""

    def __init__(self, plan: Plan):
        self.limit = plan.shape.swiglu_limit

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def __call__(self, gate: Float32, up: Float32) -> Float32:
        if const_expr(self.limit is not None):
            # Compare and select, not min and max: those drop NaN, and a NaN activation must stay one.
            gate = select(gate > Float32(self.limit), Float32(self.limit), gate)
            up = select(up > Float32(self.limit), Float32(self.limit), up)
            up = select(up < Float32(-self.limit), Float32(-self.limit), up)
        sigmoid = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(gate * Float32(-LOG2_E), fastmath=True))
        return gate * sigmoid * up
