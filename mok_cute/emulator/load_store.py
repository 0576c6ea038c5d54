"""Loads, stores and atomics on global and shared memory.

Global memory is sequentially consistent here: scopes and orders change nothing. A strong load (acquire, relaxed,
volatile) that a warp repeats without seeing anything new is a spin wait, and the warp is parked until a word it polls
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import (
    SHARED_WINDOW,
    TYPES,
    Assembler,
    KernelFault,
    Mask,
    Step,
    lanes_of,
    of_lane,
    opcode,
)
from mok_cute.emulator.memory import WORDS
from mok_cute.emulator.rounding import flush
from mok_cute.emulator.state import Word

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]
OFFSET_BITS = 24  # a shared address is the CTA's rank in its cluster above this many bits of offset


def space_of(instruction: Instruction) -> str:
    """global, shared, param, or generic: the address tells."""
    for part in instruction.parts:
        name = part.split("::")[0]
        if name in ("global", "shared", "param", "const", "local"):
            return name
    return "generic"


def read(warp: Warp, space: str, addresses: Addresses, size: int) -> Bytes:
    """(n, size) bytes."""
    if size > 16:
        steps = range(0, size, 16)
        return np.concatenate([read(warp, space, addresses + np.uint64(step), 16) for step in steps], axis=1)
    if space == "generic":
        inside = addresses >= SHARED_WINDOW
        if inside.any() and not inside.all():
            raise KernelFault("one generic access to shared and global memory at once")
        space = "shared" if inside.any() else "global"
    if space == "global":
        return warp.cta.grid.memory.gather(addresses, size)
    result = np.empty((len(addresses), size), np.uint8)
    for chosen, cta, offsets in _by_cta(warp, addresses, size):
        result[chosen] = cta.shared_words[size][offsets // size].view(np.uint8).reshape(-1, size)
    return result


def write(warp: Warp, space: str, addresses: Addresses, data: Bytes) -> None:
    size = data.shape[1]
    if size > 16:
        for step in range(0, size, 16):
            write(warp, space, addresses + np.uint64(step), np.ascontiguousarray(data[:, step : step + 16]))
        return
    if space == "generic":
        inside = addresses >= SHARED_WINDOW
        if inside.any() and not inside.all():
            raise KernelFault("one generic access to shared and global memory at once")
        space = "shared" if inside.any() else "global"
    warp.cta.grid.scheduler.version += 1
    warp.polls.clear()
    if space == "global":
        warp.cta.grid.memory.scatter(addresses, data)
        return
    for chosen, cta, offsets in _by_cta(warp, addresses, size):
        words = cta.shared_words[size]
        words[offsets // size] = np.ascontiguousarray(data[chosen]).view(words.dtype).reshape(-1)


def _by_cta(warp: Warp, addresses: Addresses, size: int) -> list[tuple[Any, Any, npt.NDArray[np.int64]]]:
    """(which accesses, their CTA, offsets in its shared memory)."""
    plain = (addresses & np.uint64(SHARED_WINDOW - 1)).astype(np.int64)
    if (plain % size).any():
        raise KernelFault(f"shared memory address {plain[plain % size != 0][0]:#x} is not a multiple of {size}")
    ranks = plain >> OFFSET_BITS
    parts = []
    for rank in set(ranks.tolist()):
        cta = warp.cta.peer(rank)
        chosen = ranks == rank
        offsets = plain[chosen] & ((1 << OFFSET_BITS) - 1)
        cta.check_shared(int(offsets.min()), 1)
        cta.check_shared(int(offsets.max()), size)
        parts.append((chosen, cta, offsets))
    return parts


def _again(warp: Warp, space: str, addresses: Addresses, size: int) -> Callable[[], Bytes]:
    """Reads once more what was read, and so checked, before."""
    if space == "global" and size in WORDS:
        memory = warp.cta.grid.memory
        return lambda: memory.peek(addresses, size)
    return lambda: read(warp, space, addresses, size)


def _words(addresses: Addresses, size: int) -> list[Word]:
    """Those that hold the bytes at global addresses."""
    step = min(size, 8)
    return [Word.within(address + at, step) for address in set(addresses.tolist()) for at in range(0, size, step)]


def _spread(values: Any, mask: Mask) -> Any:
    """Values of the active lanes -> a vector of 32 lanes."""
    if mask is None:
        return values
    result = np.zeros(32, values.dtype)
    result[mask] = values
    return result


@opcode("ld")
def _ld(asm: Assembler, instruction: Instruction) -> Step:
    kind, space = instruction.type, space_of(instruction)
    elements = asm.vector(instruction.operands[0])
    writes = [asm.sink(element, kind) for element in elements]
    dtype = TYPES[kind]
    size = dtype.itemsize * len(elements)
    if space == "param":
        return _ld_param(asm, instruction)
    address, _ = asm.address(instruction.operands[1])
    strong = space != "shared" and not {"acquire", "relaxed", "volatile"}.isdisjoint(instruction.parts)

    def step(warp: Warp, mask: Mask) -> Any:
        addresses = address(warp)
        if mask is not None:
            addresses = addresses[mask]
        data = read(warp, space, addresses, size)
        if strong and warp.is_repeated_poll(
            instruction,
            addresses,
            data,
            _again(warp, space, addresses, size),
            _words(addresses, size) if space == "global" else None,
        ):
            return warp.block_on_polls(
                lambda: f"{instruction.text}: polls {addresses[0]:#x}, which holds {data[0].tobytes().hex()}"
            )
        warp.tracker.loaded(warp, instruction, space, addresses, size)
        values = data.view(dtype)
        for position, put in enumerate(writes):
            put(warp, _spread(values[:, position], mask), mask)
        return None

    return step


def _ld_param(asm: Assembler, instruction: Instruction) -> Step:
    dtype = TYPES[instruction.type]
    elements = asm.vector(instruction.operands[0])
    writes = [asm.sink(element, instruction.type) for element in elements]
    name, _, offset = instruction.operands[1][1:-1].partition("+")
    start = asm.parameter_offsets[name] + int(offset or "0", 0)
    end = start + dtype.itemsize * len(elements)

    def step(warp: Warp, mask: Mask) -> None:
        values = warp.cta.grid.parameters[start:end].view(dtype)
        for value, put in zip(values, writes, strict=True):
            put(warp, value, mask)

    return step


@opcode("st")
def _st(asm: Assembler, instruction: Instruction) -> Step:
    kind, space = instruction.type, space_of(instruction)
    dtype = TYPES[kind.replace("s", "u") if kind[0] == "s" else kind]
    reads = [asm.source(element, kind) for element in asm.vector(instruction.operands[1])]
    address, _ = asm.address(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        values = np.empty((32, len(reads)), dtype)
        for position, get in enumerate(reads):
            value = get(warp)
            values[:, position] = value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value
        addresses = address(warp)
        if mask is not None:
            values, addresses = values[mask], addresses[mask]
        warp.tracker.stored(warp, instruction, space, addresses, values.itemsize * len(reads))
        write(warp, space, addresses, values.view(np.uint8))

    return step


# ------------------------------------------------------------------------------------------------------------ atomics


def _wrapping(function: Callable[[int, int], int]) -> Callable[..., Any]:
    return lambda old, value, dtype: _integer(function(int(old), int(value)), dtype)


def _integer(value: int, dtype: Any) -> Any:
    bits = 8 * dtype.itemsize
    return np.array(value & ((1 << bits) - 1), f"u{dtype.itemsize}").view(dtype)[()]


UPDATES: dict[str, Callable[..., Any]] = {
    "add": _wrapping(lambda old, value: old + value),
    "exch": _wrapping(lambda old, value: value),
    "min": _wrapping(min),
    "max": _wrapping(max),
    "and": _wrapping(lambda old, value: old & value),
    "or": _wrapping(lambda old, value: old | value),
    "xor": _wrapping(lambda old, value: old ^ value),
    "inc": _wrapping(lambda old, value: 0 if old >= value else old + 1),
    "dec": _wrapping(lambda old, value: value if old == 0 or old > value else old - 1),
}


def _add_float(old: Any, value: Any, dtype: Any) -> Any:
    return flush(old + value).astype(dtype)[()]


@opcode("atom", "red")
def _atom(asm: Assembler, instruction: Instruction) -> Step:
    """One lane after the other, in the order of lanes."""
    parts, kind, space = instruction.parts, instruction.type, space_of(instruction)
    dtype = TYPES[kind]
    operation = next(part for part in parts if part == "cas" or part in UPDATES)
    operands = list(instruction.operands)
    put = asm.sink(operands.pop(0), kind) if parts[0] == "atom" else None
    address, _ = asm.address(operands[0])
    values = [asm.source(operand, kind) for operand in operands[1:]]
    if len(values) != (2 if operation == "cas" else 1) or kind not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32"):
        raise ValueError("form of the atomic")
    if kind == "f32" and operation != "add":
        raise ValueError("float atomic")
    update = _add_float if kind == "f32" else UPDATES.get(operation)

    def step(warp: Warp, mask: Mask) -> None:
        addresses = address(warp)
        inputs = [np.broadcast_to(get(warp), 32) for get in values]
        before = np.zeros(32, dtype)
        active = addresses if mask is None else addresses[mask]
        warp.tracker.updated(warp, instruction, space, active, dtype.itemsize)
        for lane in lanes_of(mask):
            at = addresses[lane : lane + 1]
            old = read(warp, space, at, dtype.itemsize).view(dtype)[0, 0]
            before[lane] = old
            if update is None:
                new = inputs[1][lane] if of_lane(inputs[0], lane) == int(old) else old
            else:
                new = update(old, inputs[0][lane], dtype)
            if new != old:
                write(warp, space, at, np.array([[new]], dtype).view(np.uint8))
        if put is not None:
            put(warp, before, mask)

    return step
