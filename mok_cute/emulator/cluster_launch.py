"""Cluster launch control: a running cluster takes over the work of one that has not started.

A request is answered some time after it was made: 16 bytes in shared memory and 16 bytes reported to a barrier. The
encoding is ours, a kernel may only pass it on to query_cancel. Which cluster is taken is the next that would start.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.async_copy import place_of, update_barrier
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Step, lanes_of, opcode

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta, Warp

UNIT = "cluster launch control"
NUM_BYTES = 16  # of a response
REFUSED, TAKEN = 0xC1C00000, 0xC1C00001  # first word; x, y and z of the first CTA follow
NO_CTA = 0xFFFFFFFF
AXES = {"x": 1, "y": 2, "z": 3}


@opcode("clusterlaunchcontrol.try_cancel")
def _try_cancel(asm: Assembler, instruction: Instruction) -> Step:
    """[response], [barrier]; with multicast::cluster::all both at the same offsets of every CTA of the cluster."""
    response, barrier = (asm.address(operand)[0] for operand in instruction.operands)
    everywhere = "multicast::cluster::all" in instruction.opcode

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            to, offset = place_of(warp, int(response(warp)[lane]))
            barrier_cta, barrier_offset = place_of(warp, int(barrier(warp)[lane]))
            if to is not warp.cta or barrier_cta is not warp.cta:
                raise KernelFault(
                    "clusterlaunchcontrol.try_cancel: response and barrier must be in the CTA's own memory"
                )
            if offset % NUM_BYTES:
                raise KernelFault(f"clusterlaunchcontrol.try_cancel: {offset:#x} is not a multiple of {NUM_BYTES}")
            if to.saw_refusal:
                raise KernelFault(
                    "clusterlaunchcontrol.try_cancel after this CTA saw one fail is undefined; stop asking then"
                )
            ctas = to.cluster.ctas if everywhere else [to]
            _post(warp, instruction, ctas, offset, barrier_offset)

    return step


def _post(warp: Warp, instruction: Instruction, ctas: list[Cta], offset: int, barrier_offset: int) -> None:
    from mok_cute.emulator.device import AsyncOperation

    grid = warp.cta.grid

    def answer() -> None:
        taken = grid.cancel_next()
        words = (REFUSED, NO_CTA, NO_CTA, NO_CTA) if taken is None else (TAKEN, *taken)
        for cta in ctas:
            cta.check_shared(offset, NUM_BYTES)
            none = np.empty(0, np.uint64)
            warp.tracker.loads(none, 0, cta, np.array([offset]), NUM_BYTES, (cta, barrier_offset))
            cta.shared[offset : offset + NUM_BYTES] = np.array(words, np.uint32).view(np.uint8)
            update_barrier(cta, barrier_offset, 0, -NUM_BYTES)

    step = warp.tracker.asynchronous(warp, instruction, answer)
    grid.scheduler.post(grid, AsyncOperation(UNIT, deque([step]), instruction.text))


@opcode("clusterlaunchcontrol.query_cancel")
def _query(asm: Assembler, instruction: Instruction) -> Step:
    """is_canceled: predicate, response. get_first_ctaid::x: register, response. get_first_ctaid.v4: {x, y, z, _}."""
    parts = instruction.parts
    read = asm.source(instruction.operands[1], "b128")
    question, _, axis = parts[2].partition("::")
    if question == "is_canceled":
        put = asm.sink(instruction.operands[0], "pred")
    elif question == "get_first_ctaid":
        names = asm.vector(instruction.operands[0])
        columns = [AXES[axis]] if axis else [1, 2, 3]
        puts = [asm.sink(name, "b32") for name in names[: len(columns)]]
    else:
        raise ValueError("question")

    def step(warp: Warp, mask: Mask) -> Any:
        words = np.ascontiguousarray(np.broadcast_to(read(warp), 32)).view(np.uint32).reshape(32, 4)
        seen = {int(words[lane, 0]) for lane in lanes_of(mask)}
        if not seen <= {REFUSED, TAKEN}:
            raise KernelFault("clusterlaunchcontrol.query_cancel of something that is no response of try_cancel")
        if question == "is_canceled":
            warp.cta.saw_refusal |= REFUSED in seen
            put(warp, words[:, 0] == TAKEN, mask)
            return
        for column, sink in zip(columns, puts, strict=True):
            sink(warp, words[:, column], mask)

    return step
