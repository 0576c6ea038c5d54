"""Barriers among warps and CTAs, exchanges between the lanes of a warp, fences and hints.

An instruction with ``.sync`` waits until all lanes that it names, and that have not exited, stand at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import (
    ALL_LANES,
    LANES,
    Assembler,
    Mask,
    Source,
    Step,
    Value,
    first_lane,
    of_lane,
    opcode,
)

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp


def lanes_missing(warp: Warp, mask: Mask, members: int) -> int:
    """Lanes of ``members`` that live and do not stand here."""
    if mask is None:
        return 0
    here = int(np.packbits(mask, bitorder="little").view(np.uint32)[0])
    alive = int(np.packbits(warp.alive, bitorder="little").view(np.uint32)[0])
    return members & alive & ~here


def converged(step: Step, members: Source, text: str) -> Step:
    """The step, once all member lanes are here."""

    def wait(warp: Warp, mask: Mask) -> Any:
        if mask is not None:
            missing = lanes_missing(warp, mask, of_lane(members(warp), first_lane(mask)))
            if missing:
                return warp.block(lambda: f"{text}: lanes {missing:#010x} of the warp are elsewhere", warp.progress)
        return step(warp, mask)

    return wait


def all_members(warp: Warp) -> Value:
    """Of an ``.aligned`` instruction: the whole warp."""
    return np.uint32(0xFFFFFFFF)


# ----------------------------------------------------------------------------------------------------- among the lanes


@opcode("bar.warp.sync")
def _bar_warp(asm: Assembler, instruction: Instruction) -> Step:
    return converged(lambda warp, mask: None, asm.source(instruction.operands[0], "b32"), instruction.text)


@opcode("elect.sync")
def _elect(asm: Assembler, instruction: Instruction) -> Step:
    """The lowest active lane is elected."""
    lane_name, predicate = instruction.operands[0].split("|")
    put_lane, put = asm.sink(lane_name, "b32"), asm.sink(predicate, "pred")

    def step(warp: Warp, mask: Mask) -> None:
        lane = first_lane(mask)
        put_lane(warp, np.uint32(lane), mask)
        put(warp, LANES == lane, mask)

    return converged(step, asm.source(instruction.operands[1], "b32"), instruction.text)


@opcode("shfl.sync")
def _shfl(asm: Assembler, instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    names = instruction.operands[0].split("|")
    put = asm.sink(names[0], "b32")
    put_valid = asm.sink(names[1], "pred") if len(names) > 1 else None
    value, other, clamp, members = (asm.source(operand, "u32") for operand in instruction.operands[1:])
    lanes = LANES.astype(np.int64)

    def step(warp: Warp, mask: Mask) -> None:
        controls = np.broadcast_to(clamp(warp), 32).astype(np.int64)
        segment, bound = controls >> 8 & 31, controls & 31
        count = np.broadcast_to(other(warp), 32).astype(np.int64) & 31
        highest = (lanes & segment) | (bound & ~segment)
        if mode == "idx":
            origin = (lanes & segment) | (count & ~segment & 31)
        else:
            origin = {"up": lanes - count, "down": lanes + count, "bfly": lanes ^ count}[mode]
        valid = origin >= highest if mode == "up" else origin <= highest
        origin = np.where(valid, origin, lanes)
        put(warp, np.broadcast_to(value(warp), 32)[origin], mask)
        if put_valid is not None:
            put_valid(warp, valid, mask)

    return converged(step, members, instruction.text)


@opcode("vote.sync")
def _vote(asm: Assembler, instruction: Instruction) -> Step:
    mode, text = instruction.parts[2], instruction.operands[1]
    put = asm.sink(instruction.operands[0], "b32" if mode == "ballot" else "pred")
    read, negated = asm.source(text.removeprefix("!"), "pred"), text.startswith("!")

    def step(warp: Warp, mask: Mask) -> None:
        active = ALL_LANES if mask is None else mask
        votes = np.broadcast_to(read(warp), 32) ^ negated
        if mode == "ballot":
            result: Value = np.packbits(votes & active, bitorder="little").view(np.uint32)[0]
        elif mode == "all":
            result = votes[active].all()
        elif mode == "any":
            result = votes[active].any()
        else:
            result = votes[active].all() or not votes[active].any()
        put(warp, result, mask)

    if mode not in ("ballot", "all", "any", "uni"):
        raise ValueError("mode")
    return converged(step, asm.source(instruction.operands[2], "b32"), instruction.text)


@opcode("match.any.sync")
def _match(asm: Assembler, instruction: Instruction) -> Step:
    put, read = asm.sink(instruction.operands[0], "b32"), asm.source(instruction.operands[1], instruction.type)

    def step(warp: Warp, mask: Mask) -> None:
        values = np.broadcast_to(read(warp), 32)
        equal = (values[:, None] == values[None, :]) & (ALL_LANES if mask is None else mask)[None, :]
        put(warp, np.packbits(equal, axis=1, bitorder="little").view(np.uint32).reshape(32), mask)

    return converged(step, asm.source(instruction.operands[2], "b32"), instruction.text)


# ----------------------------------------------------------------------------------------------- among warps and CTAs


@opcode("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", "barrier.cta.sync", "barrier.cta.arrive")
def _bar(asm: Assembler, instruction: Instruction) -> Step:
    """Named barriers of a CTA. Without a count all warps that have not exited take part."""
    number = asm.source(instruction.operands[0], "u32")
    count = asm.source(instruction.operands[1], "u32") if len(instruction.operands) > 1 else None
    waits = "sync" in instruction.parts

    def step(warp: Warp, mask: Mask) -> Any:
        lane = first_lane(mask)
        barrier = warp.cta.barrier(of_lane(number(warp), lane))
        awaited = warp.awaited_barrier
        if awaited is None:
            awaited = barrier.generation
            warp.tracker.barrier_arrives(warp, barrier)
            barrier.arrive(of_lane(count(warp), lane) if count is not None else None)
            if not waits:
                return None
        if barrier.passed(awaited):
            warp.awaited_barrier = None
            warp.tracker.barrier_passed(warp, barrier)
            return None
        warp.awaited_barrier = awaited
        return warp.block(lambda: f"{instruction.text}: {barrier}", barrier.word)

    return converged(step, all_members, instruction.text)


@opcode("barrier.cluster.arrive")
def _cluster_arrive(asm: Assembler, instruction: Instruction) -> Step:
    relaxed = "relaxed" in instruction.parts

    def step(warp: Warp, mask: Mask) -> None:
        warp.awaited_cluster = warp.cta.cluster.barrier.generation
        warp.tracker.barrier_arrives(warp, warp.cta.cluster.barrier, relaxed)
        warp.cta.cluster.barrier.arrive(None)

    return converged(step, all_members, instruction.text)


@opcode("barrier.cluster.wait")
def _cluster_wait(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> Any:
        barrier = warp.cta.cluster.barrier
        if barrier.passed(warp.awaited_cluster):
            warp.tracker.barrier_passed(warp, barrier)
            return None
        return warp.block(lambda: f"{instruction.text}: {barrier}", barrier.word)

    return converged(step, all_members, instruction.text)


# --------------------------------------------------------------------------------------------------- fences and hints


@opcode("fence", "membar", "prefetch", "griddepcontrol", "setmaxnreg", "cp.async.bulk.prefetch", "applypriority")
def _no_effect(asm: Assembler, instruction: Instruction) -> Step:
    """Order is what the engine gives anyway; register budgets and prefetches change no value."""
    return lambda warp, mask: warp.tracker.fence(warp, instruction)


@opcode("nanosleep")
def _nanosleep(asm: Assembler, instruction: Instruction) -> Step:
    """Virtual time does not pass by sleeping; the warp gives its turn away."""

    def step(warp: Warp, mask: Mask) -> None:
        warp.gives_way = True

    return step
