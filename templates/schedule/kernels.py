"""The three launches of a schedule as host functions to compile: publish, count, place, in this order on one stream.

Compile-time: num_experts, local_experts, topk, id_bits, row_block. Everything else is in ``ScheduleArgs``. A host
function takes its fields one by one and then the stream.
"""

from typing import Any

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mok_cute.templates.schedule.count import CountRoutes
from mok_cute.templates.schedule.layout import ROUTES_PER_PUBLISH_CTA, SCHEDULE_ARGS, THREADS, ScheduleArgs
from mok_cute.templates.schedule.place import PlaceRoutes
from mok_cute.templates.schedule.publish import PublishRoutes

LAUNCHES = ("publish", "count", "place")


class ScheduleKernels:
    def __init__(self, *, num_experts: int, local_experts: int, topk: int, id_bits: int, row_block: int) -> None:
        assert id_bits in (32, 64), id_bits
        self.topk = topk
        self.publish_routes = PublishRoutes(num_experts, topk, id_bits)
        self.count_routes = CountRoutes(topk, local_experts)
        self.place_routes = PlaceRoutes(topk, local_experts, row_block)

    @staticmethod
    def example_arguments() -> tuple[Any, ...]:
        """Arguments of the right types, for the compiler."""
        kinds = {"Int32": Int32(0), "Int64": Int64(0)}
        return (*(kinds[kind] for _, kind in SCHEDULE_ARGS), cu.CUstream(0))

    @cute.jit
    def publish(self, *arguments: Any) -> None:
        a, stream = ScheduleArgs(*arguments[:-1]), arguments[-1]
        num_ctas = cutlass.max(cute.ceil_div(a.max_tokens * self.topk, ROUTES_PER_PUBLISH_CTA), 1)
        kernel = self.publish_routes.kernel
        kernel.set_name_prefix("mok_schedule_publish", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel(a).launch(grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.jit
    def count(self, *arguments: Any) -> None:
        a, stream = ScheduleArgs(*arguments[:-1]), arguments[-1]
        kernel = self.count_routes.kernel
        kernel.set_name_prefix("mok_schedule_count", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel(a).launch(grid=(a.groups_per_peer, a.ep_size, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.jit
    def place(self, *arguments: Any) -> None:
        a, stream = ScheduleArgs(*arguments[:-1]), arguments[-1]
        kernel = self.place_routes.kernel
        kernel.set_name_prefix("mok_schedule_place", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel(a).launch(grid=(a.groups_per_peer, a.ep_size, 1), block=(THREADS, 1, 1), stream=stream)
