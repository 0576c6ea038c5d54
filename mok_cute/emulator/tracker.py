"""What the steps of instructions tell about memory order, for whoever listens: the race detector, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from mok_cute.emulator.decode import Instruction
    from mok_cute.emulator.device import Barrier, Cta, Warp

Addresses = npt.NDArray[Any]
Step = Callable[[], None]


class Tracker:
    """What the steps of instructions tell about memory order. This one does not listen."""

    def loaded(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def stored(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def updated(self, warp: Warp, instruction: Instruction, space: str, addresses: Addresses, size: int) -> None: ...

    def fence(self, warp: Warp, instruction: Instruction) -> None: ...

    def barrier_arrives(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None: ...

    def barrier_passed(self, warp: Warp, barrier: Barrier, relaxed: bool = False) -> None: ...

    def mbarrier_made(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None: ...

    def mbarrier_ended(self, cta: Cta, offset: int) -> None: ...

    def mbarrier_arrives(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> None: ...

    def mbarrier_stored(self, cta: Cta, offset: int, phase: int) -> None: ...

    def mbarrier_waits(
        self, warp: Warp, instruction: Instruction, cta: Cta, offset: int, parity: int, done: bool
    ) -> None: ...

    def asynchronous(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def in_group(self, warp: Warp, instruction: Instruction, lane: int, *steps: Step) -> list[Step]:
        return list(steps)

    def group_committed(self, warp: Warp, lane: int) -> None: ...

    def group_awaited(self, warp: Warp, lane: int, latest: int, read_only: bool) -> None: ...

    def loads(
        self,
        reads: Addresses,
        num_bytes: int,
        cta: Cta,
        offsets: Addresses,
        size: int,
        barrier: tuple[Cta, int],
        atomic: bool = False,
    ) -> None: ...

    def reads_shared(self, cta: Cta, offsets: Addresses, size: int) -> None: ...

    def writes_global(self, addresses: Addresses, num_bytes: int, atomic: bool = False) -> None: ...

    def copying(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def copies(self, cta: Cta, offsets: Addresses, size: int, sources: Addresses, num_bytes: int) -> None: ...

    def copies_committed(self, warp: Warp) -> None: ...

    def copies_awaited(self, warp: Warp, latest: int | None) -> None: ...

    def copies_arrive(self, warp: Warp, instruction: Instruction, cta: Cta, offset: int) -> Step:
        return lambda: None

    def reports(self, cta: Cta, offset: int) -> None: ...

    def in_matrix_group(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def matrix_group_committed(self, warp: Warp) -> None: ...

    def matrix_group_awaited(self, warp: Warp, latest: int) -> None: ...

    def in_pipe(self, warp: Warp, instruction: Instruction, step: Step) -> Step:
        return step

    def tensor_allocated(
        self, warp: Warp, instruction: Instruction, first: int, columns: int, cta: Cta, offset: int
    ) -> None: ...

    def tensor_moved(self, warp: Warp, instruction: Instruction, lanes: Addresses, columns: Addresses) -> None: ...

    def tensor_used(self, cta: Cta, lanes: Addresses, columns: Addresses, *, reads: bool, writes: bool) -> None: ...

    def tensor_fence(self, warp: Warp, instruction: Instruction) -> None: ...

    def finish(self) -> None: ...

    def explain(self, fault: Exception) -> None: ...

    def close(self) -> None: ...


NO_TRACKER = Tracker()
