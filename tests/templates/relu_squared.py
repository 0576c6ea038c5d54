"""An activation that is not ours: max(gate, 0)^2 * up. Registered by ``test_registry.py``."""

import cutlass
from cutlass import Float32


class ReluSquared:
    def __init__(self, plan):
        self.limit = plan.shape.swiglu_limit

    @staticmethod
    def unsupported_reason(plan):
        if plan.shape.swiglu_limit is None:
            return None
        return f"swiglu_limit={plan.shape.swiglu_limit}: this activation has no clamp; drop the limit."

    def __call__(self, gate, up):
        positive = Float32(cutlass.select_(gate > Float32(0.0), gate, Float32(0.0)))
        return positive * positive * up
