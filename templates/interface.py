"""What a role is: a class that joins the megakernel by name, see ``registry.py``.

A role says what happens; ``arch/`` says how a tile is copied, laid out and multiplied. Every role is made from one
``Plan`` while the kernel is traced, keeps only compile-time values, and has one method ``run`` that the DSL traces:

| role       | run is called by              | must keep |
|------------|-------------------------------|-----------|
| dispatch   | all warps of a communication CTA, before its GEMMs | publishes x_routed_ready once per group |
| scheduler  | the scheduler warp            | hands out tasks in increasing order, END last |
| load       | the load warp                 | completes every stage it acquires, also after a stop |
| multiply   | the consumer warpgroups, or the MMA warp of tcgen05 | waits for and releases every stage of a tile |
| activation | each thread, on fp32 values   | is a pure function of gate and up |
| epilogue   | the warps that hold or read accumulators | an even number of chunks per tile |
| store      | the store warps               | publishes nothing after a stop |
| push       | the store warps               | one writer per combine slot |
| reduce     | the warps of the epilogue     | a fixed order of summation |

``unsupported_reason`` answers before anything is built: None, or a sentence that names the argument, its value, the
rule and what to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mok_cute.arch import Arch
from mok_cute.config import KernelConfig
from mok_cute.shapes import MoEShape
from mok_cute.templates.scheduler.order import Geometry


@dataclass(frozen=True)
class Plan:
    """Everything a role may know while it is traced: what was asked, what was decided, for which machine."""

    shape: MoEShape
    config: KernelConfig
    arch: Arch
    local_experts: int

    @property
    def geometry(self) -> Geometry:
        return self.config.geometry(self.shape)

    @property
    def has_shared(self) -> bool:
        return self.shape.shared_intermediate > 0


class Accumulators(Protocol):
    """One tile's results, as the epilogue sees them: 256 columns of f32, of which a part's writers hold 64 rows.

    A gate/up tile has 128 columns of gate, then 128 of up. What a machine keeps in registers or in tensor memory, and
    how it gets to shared memory, stays in ``arch/``. A chunk is whatever ``put`` of the same class takes.
    """

    def begin(self) -> None:
        """Called once, before everything else."""

    def activate(self, activation: Any) -> None:
        """Called before ``hidden``; ``activation`` takes gate and up as f32, rounded to bf16 before."""

    def columns(self, chunk: int) -> Any:
        """Columns 64 * chunk to 64 * chunk + 63, rounded to bf16."""

    def hidden(self, chunk: int) -> Any:
        """Hidden columns 64 * chunk to 64 * chunk + 63, rounded to bf16."""

    def put(self, chunk: Any, buffer: int) -> None:
        """Write the calling thread's share of a chunk to a staging buffer, in the layout of 128-byte swizzled TMA."""


class Role(Protocol):
    """A role's class. Machines that it is registered for are checked by the registry, not here."""

    def __init__(self, plan: Plan) -> None: ...

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None: ...
