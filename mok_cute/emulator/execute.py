"""Instructions -> steps: one closure per instruction. Here: operands, comparisons, moves and branches.

A step gets a warp and the mask of lanes that run it (None: all 32) and returns None to go on, the index of the next
instruction, a ``Branch`` for lanes that part, BLOCKED to be tried again later, or EXIT. Values are vectors of 32 lanes,
or one scalar for all of them. Other files add their opcodes with ``@opcode``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.decode import Instruction, Kernel, split_operands
from mok_cute.errors import KernelError, UnsupportedError

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

Mask = npt.NDArray[np.bool_] | None
Value = Any  # numpy vector of 32 lanes or numpy scalar
Step = Callable[["Warp", Mask], Any]
Source = Callable[["Warp"], Value]
Sink = Callable[["Warp", Value, Mask], None]

BLOCKED, EXIT = -2, -1
LANES = np.arange(32, dtype=np.uint32)
ALL_LANES = np.ones(32, np.bool_)
EXTENTS = ("ntid", "nctaid", "cluster_nctaid", "nclusterid")
PARAMETER_ALIGN = 128  # a TMA descriptor among the parameters is read at its address
RESERVED_SHARED_BYTES = 1024  # the first bytes belong to the system, so that address 0 is a fault
SHARED_WINDOW = 1 << 56  # generic addresses of shared memory: this plus the shared address

TYPES: dict[str, Any] = {
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype("u2"),
    **{name: np.dtype("u4") for name in ("f16x2", "bf16x2")},
    "f32x2": np.dtype("u8"),
    "b128": np.dtype("V16"),  # only moved
    "pred": np.dtype("?"),
}


@dataclass(frozen=True)
class Branch:
    """The lanes of ``taken`` go to ``target`` (or EXIT), the others to the next instruction."""

    target: int
    taken: npt.NDArray[np.bool_]


class UnsupportedInstruction(UnsupportedError):
    """The virtual GPU does not know this instruction, or this form of it."""

    def __init__(self, instruction: Instruction, why: str = "is not known to the virtual GPU") -> None:
        where = f"PTX line {instruction.line}" + (f", {instruction.source}" if instruction.source else "")
        super().__init__(f"{instruction.text}: {why} ({where})")


class KernelFault(KernelError):
    """A kernel did what a GPU would trap or leave undefined."""


Builder = Callable[["Assembler", Instruction], Step]
OPCODES: dict[str, Builder] = {}


def opcode(*names: str) -> Callable[[Builder], Builder]:
    """Registers the builder of steps for opcodes that begin with these names; the longest name wins."""

    def register(builder: Builder) -> Builder:
        OPCODES.update(dict.fromkeys(names, builder))
        return builder

    return register


def lanes_of(mask: Mask) -> list[int]:
    return list(range(32)) if mask is None else np.flatnonzero(mask).tolist()


def first_lane(mask: Mask) -> int:
    return 0 if mask is None else int(mask.argmax())


def of_lane(value: Value, lane: int) -> int:
    """The integer that one lane holds."""
    return int(value[lane]) if isinstance(value, np.ndarray) and value.ndim else int(value)


class Assembler:
    """Turns the instructions of one kernel into steps. Nothing of a launch goes into them: they serve all launches."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.registers = {name: index for index, name in enumerate(kernel.registers)}
        self.types = [TYPES[kind] for kind in kernel.registers.values()]
        self.parameter_offsets: dict[str, int] = {}
        self.parameter_bytes = 0
        for parameter in kernel.parameters:
            self.parameter_offsets[parameter.name] = self._place(PARAMETER_ALIGN, self.parameter_bytes)
            self.parameter_bytes = self.parameter_offsets[parameter.name] + parameter.num_bytes
        self.shared_offsets: dict[str, int] = {}
        self.static_end = RESERVED_SHARED_BYTES  # where dynamic shared memory begins
        for variable in sorted(kernel.variables.values(), key=lambda variable: variable.num_bytes == 0):
            if variable.space == "shared":
                self.static_end = self._place(variable.align, self.static_end)
                self.shared_offsets[variable.name] = self.static_end
                self.static_end += variable.num_bytes

    def hidden_register(self, name: str, kind: str) -> int:
        """The index of a register that no instruction names, made on first use."""
        if name not in self.registers:
            self.registers[name] = len(self.types)
            self.types.append(TYPES[kind])
        return self.registers[name]

    @staticmethod
    def _place(align: int, offset: int) -> int:
        return -(-offset // align) * align

    def assemble(self) -> list[Step]:
        return [self.step(instruction) for instruction in self.kernel.instructions]

    def step(self, instruction: Instruction) -> Step:
        parts = instruction.parts
        for length in range(len(parts), 0, -1):
            builder = OPCODES.get(".".join(parts[:length]))
            if builder is not None:
                break
        else:
            raise UnsupportedInstruction(instruction)
        try:
            step = builder(self, instruction)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UnsupportedInstruction(instruction, f"form not known to the virtual GPU ({error!r})") from error
        if instruction.predicate is None or parts[0] in ("bra", "ret", "exit"):
            return step
        predicate, negated = self.registers[instruction.predicate], instruction.negated

        def predicated(warp: Warp, mask: Mask) -> Any:
            active = ~warp.u[predicate] if negated else warp.u[predicate]
            if mask is not None:
                active = active & mask
            if not active.any():
                return None
            return step(warp, None if active.all() else active)

        return predicated

    # ----------------------------------------------------------------------------------------------------- operands

    def source(self, operand: str, kind: str) -> Source:
        """Reads a register, constant, special register or address as the given type."""
        dtype = TYPES[kind]
        if operand in self.registers:
            return self._register_source(self.registers[operand], dtype)
        if operand in self.shared_offsets:
            address = self.shared_offsets[operand]
            return lambda warp: dtype.type(warp.cta.shared_base | address)
        if operand in self.parameter_offsets:
            offset = self.parameter_offsets[operand]
            return lambda warp: dtype.type(warp.cta.grid.parameter_base + offset)
        if operand.startswith("%"):
            return self._special(operand[1:], dtype)
        value = self._constant(operand, dtype)
        return lambda warp: value

    def _register_source(self, index: int, dtype: Any) -> Source:
        held = self.types[index]
        if held == np.bool_ or dtype == held:
            return lambda warp: warp.u[index]
        if dtype.itemsize == held.itemsize:
            if dtype.kind == "i":
                return lambda warp: warp.s[index]
            if dtype.kind == "f":
                return lambda warp: warp.f[index]
            return lambda warp: warp.u[index]
        if dtype.kind == "f":
            bits = np.dtype(f"u{dtype.itemsize}")
            return lambda warp: warp.u[index].astype(bits).view(dtype)
        return lambda warp: warp.u[index].astype(dtype)

    @staticmethod
    def _constant(operand: str, dtype: Any) -> Value:
        if operand[:2].lower() == "0f":
            single = np.array(int(operand[2:], 16), np.uint32)
            return (single.view(np.float32) if dtype.kind == "f" else single).astype(dtype)[()]
        if operand[:2].lower() == "0d":
            double = np.array(int(operand[2:], 16), np.uint64)
            return (double.view(np.float64) if dtype.kind == "f" else double).astype(dtype)[()]
        number = int(operand.rstrip("U"), 0)
        if dtype.kind == "b":
            return np.bool_(number != 0)
        bits = 8 * dtype.itemsize
        return np.array(number & ((1 << bits) - 1), f"u{dtype.itemsize}").view(dtype)[()]

    def _special(self, name: str, dtype: Any) -> Source:
        base, _, axis = name.partition(".")
        if axis:
            position = "xyz".index(axis)
            if base in EXTENTS:
                return lambda warp: dtype.type(warp.cta.grid.extents[base][position])
            if base == "tid":
                return lambda warp: warp.tid[position].astype(dtype)
            index_of = {"ctaid": "index", "cluster_ctaid": "index_in_cluster", "clusterid": "cluster_index"}[base]
            return lambda warp: dtype.type(getattr(warp.cta, index_of)[position])
        if name in SPECIAL:
            read = SPECIAL[name]
            return lambda warp: np.asarray(read(warp)).astype(dtype)
        raise ValueError(f"special register %{name}")

    def sink(self, operand: str, kind: str) -> Sink:
        """Writes a register; a narrower value is extended as its type says."""
        if operand == "_":
            return lambda warp, value, mask: None
        index, dtype = self.registers[operand], TYPES[kind]
        held = self.types[index]
        bank = "u" if dtype.kind in "ubV" or held == np.bool_ else {"i": "s", "f": "f"}[dtype.kind]
        if dtype.kind == "f" and dtype.itemsize != held.itemsize:
            bits = np.dtype(f"u{dtype.itemsize}")

            def write_bits(warp: Warp, value: Value, mask: Mask) -> None:
                np.copyto(warp.u[index], np.asarray(value, dtype).view(bits), where=_where(mask), casting="unsafe")

            return write_bits

        def write(warp: Warp, value: Value, mask: Mask) -> None:
            register = getattr(warp, bank)[index]
            if mask is None:
                register[...] = value
            else:
                np.copyto(register, value, where=mask, casting="unsafe")

        return write

    def vector(self, operand: str) -> list[str]:
        """The elements of ``{a, b}``, or the operand alone."""
        return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]

    def address(self, operand: str) -> tuple[Source, bool]:
        """``[base+offset]`` -> (addresses as u64, whether all lanes have the same one)."""
        match = re.match(r"^\[\s*([%\w$@.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$", operand)
        if match is None:
            raise ValueError(f"address {operand}")
        offset = int(match[3] or "0", 0) * (-1 if match[2] == "-" else 1)
        base = match[1]
        if base in self.registers:
            index = self.registers[base]
            wide = self.types[index].itemsize == 8
            step = np.uint64(offset & 0xFFFFFFFFFFFFFFFF) if wide else np.uint32(offset & 0xFFFFFFFF)
            if wide:
                return (lambda warp: warp.u[index] + step), False
            return (lambda warp: (warp.u[index] + step).astype(np.uint64)), False
        read = self.source(base, "u64")
        constant = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        return (lambda warp: np.broadcast_to(read(warp) + constant, 32)), True

    def elementwise(
        self, instruction: Instruction, function: Callable[..., Value], kind: str, result: str | None = None
    ) -> Step:
        """Step for ``destination = function(sources)``."""
        write = self.sink(instruction.operands[0], result or kind)
        reads = [self.source(operand, kind) for operand in instruction.operands[1:]]
        if len(reads) == 2:
            left, right = reads
            return lambda warp, mask: write(warp, function(left(warp), right(warp)), mask)
        return lambda warp, mask: write(warp, function(*[read(warp) for read in reads]), mask)


def _where(mask: Mask) -> Any:
    return True if mask is None else mask


SPECIAL: dict[str, Callable[[Any], Value]] = {
    "laneid": lambda warp: LANES,
    "warpid": lambda warp: warp.index,
    "cluster_ctarank": lambda warp: warp.cta.rank,
    "cluster_nctarank": lambda warp: len(warp.cta.cluster.ctas),
    "smid": lambda warp: warp.cta.sm,
    "globaltimer": lambda warp: warp.cta.grid.time_ns(),
    "clock64": lambda warp: warp.cta.grid.time_ns(),
    "clock": lambda warp: warp.cta.grid.time_ns() & 0xFFFFFFFF,
    "lanemask_eq": lambda warp: np.uint32(1) << LANES,
    "lanemask_lt": lambda warp: (np.uint32(1) << LANES) - np.uint32(1),
    "lanemask_le": lambda warp: (np.uint64(2) << LANES.astype(np.uint64)) - np.uint64(1),
    "lanemask_gt": lambda warp: ~((np.uint64(2) << LANES.astype(np.uint64)) - np.uint64(1)) & np.uint64(0xFFFFFFFF),
    "lanemask_ge": lambda warp: ~((np.uint32(1) << LANES) - np.uint32(1)),
}


# ------------------------------------------------------------------------------------------- compare, select and move


def _is_float(kind: str) -> bool:
    return "f" in kind


COMPARE: dict[str, Callable[..., Value]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, is_float: bool) -> Callable[..., Value]:
    if name in COMPARE:
        compare = COMPARE[name]
        if name == "ne" and is_float:
            return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))
        return compare
    ordered = COMPARE[name[:-1]]  # ltu: less, or not comparable
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


def _comparable(kind: str, read: Source) -> Source:
    """A source as numbers that can be compared: halves in single precision."""
    if kind not in ("f16", "bf16"):
        return read
    from mok_cute.emulator.rounding import half_to_f32

    return lambda warp: half_to_f32(np.asarray(read(warp)).view(np.uint16), kind)


@opcode("setp")
def _setp(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    if kind.endswith("16x2"):
        return _setp_pair(asm, instruction)
    compare = _comparison(instruction.parts[1], _is_float(kind))
    combine = COMBINE.get(instruction.parts[2])
    destinations = instruction.operands[0].split("|")
    write = asm.sink(destinations[0], "pred")
    write_other = asm.sink(destinations[1], "pred") if len(destinations) > 1 else None
    a, b = (_comparable(kind, asm.source(operand, kind)) for operand in instruction.operands[1:3])
    text = instruction.operands[3] if combine is not None else ""
    third = asm.source(text.removeprefix("!"), "pred") if combine is not None else None
    inverted = text.startswith("!")

    def step(warp: Warp, mask: Mask) -> None:
        result, other = compare(a(warp), b(warp)), None
        if write_other is not None:
            other = ~result
        if combine is not None and third is not None:
            condition = ~third(warp) if inverted else third(warp)
            result = combine(result, condition)
            other = None if other is None else combine(other, condition)
        write(warp, result, mask)
        if write_other is not None:
            write_other(warp, other, mask)

    return step


def _setp_pair(asm: Assembler, instruction: Instruction) -> Step:
    """Two predicates from the halves of two words, the low ones first."""
    from mok_cute.emulator.rounding import half_to_f32

    kind = instruction.type.removesuffix("x2")
    compare = _comparison(instruction.parts[1], True)
    if instruction.parts[2] in COMBINE:
        raise ValueError("combination")
    puts = [asm.sink(name, "pred") for name in instruction.operands[0].split("|")]
    a, b = (asm.source(operand, "b32") for operand in instruction.operands[1:])

    def step(warp: Warp, mask: Mask) -> None:
        words = [np.broadcast_to(read(warp), 32) for read in (a, b)]
        for half, put in enumerate(puts):
            left, right = (half_to_f32(word >> np.uint32(16 * half) & np.uint32(0xFFFF), kind) for word in words)
            put(warp, compare(left, right), mask)

    return step


@opcode("set")
def _set(asm: Assembler, instruction: Instruction) -> Step:
    """All ones or zeros, or as f32 one or zero, where a comparison holds."""
    to, kind = instruction.parts[-2:]
    compare = _comparison(instruction.parts[1], _is_float(kind))
    if to not in ("u32", "s32", "f32") or instruction.parts[2] in COMBINE or "x2" in kind:
        raise ValueError("form")
    put = asm.sink(instruction.operands[0], to)
    a, b = (_comparable(kind, asm.source(operand, kind)) for operand in instruction.operands[1:])
    true = np.float32(1) if to == "f32" else TYPES[to].type(-1 if to == "s32" else 0xFFFFFFFF)
    return lambda warp, mask: put(warp, np.where(compare(a(warp), b(warp)), true, TYPES[to].type(0)), mask)


@opcode("slct")
def _slct(asm: Assembler, instruction: Instruction) -> Step:
    """The first source where the third is not negative, else the second."""
    kind, decides = instruction.parts[-2:]
    put = asm.sink(instruction.operands[0], kind)
    a, b = (asm.source(operand, kind) for operand in instruction.operands[1:3])
    c = asm.source(instruction.operands[3], decides)
    return lambda warp, mask: put(warp, np.where(c(warp) >= 0, a(warp), b(warp)), mask)


@opcode("selp")
def _selp(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    write = asm.sink(instruction.operands[0], kind)
    a, b = (asm.source(operand, kind) for operand in instruction.operands[1:3])
    predicate = asm.source(instruction.operands[3], "pred")
    return lambda warp, mask: write(warp, np.where(predicate(warp), a(warp), b(warp)), mask)


@opcode("mov")
def _mov(asm: Assembler, instruction: Instruction) -> Step:
    to, origin = instruction.operands
    kind = instruction.type
    if to.startswith("{"):
        return _unpack(asm, asm.vector(to), origin, kind)
    if origin.startswith("{"):
        return _pack(asm, to, asm.vector(origin), kind)
    write, read = asm.sink(to, kind), asm.source(origin, kind)
    return lambda warp, mask: write(warp, read(warp), mask)


def _pack(asm: Assembler, to: str, elements: list[str], kind: str) -> Step:
    bits = int(kind[1:]) // len(elements)
    write, dtype = asm.sink(to, kind), TYPES[kind]
    reads = [asm.source(element, f"b{bits}") for element in elements]
    if kind == "b128":

        def join(warp: Warp, mask: Mask) -> None:
            parts = np.stack([np.broadcast_to(read(warp), 32) for read in reads], axis=1)
            write(warp, np.ascontiguousarray(parts).view(dtype).reshape(32), mask)

        return join

    def step(warp: Warp, mask: Mask) -> None:
        total = np.zeros(32, dtype)
        for position, read in enumerate(reads):
            total |= np.asarray(read(warp)).astype(dtype) << dtype.type(bits * position)
        write(warp, total, mask)

    return step


def _unpack(asm: Assembler, elements: list[str], origin: str, kind: str) -> Step:
    bits = int(kind[1:]) // len(elements)
    read, dtype, small = asm.source(origin, kind), TYPES[kind], TYPES[f"b{bits}"]
    writes = [asm.sink(element, f"b{bits}") for element in elements]

    if kind == "b128":

        def split(warp: Warp, mask: Mask) -> None:
            parts = np.array(read(warp)).view(small).reshape(32, len(writes))
            for position, write in enumerate(writes):
                write(warp, parts[:, position], mask)

        return split

    def step(warp: Warp, mask: Mask) -> None:
        value = np.array(read(warp))  # a copy: the source may be among the destinations
        for position, write in enumerate(writes):
            write(warp, (value >> dtype.type(bits * position)).astype(small), mask)

    return step


@opcode("cvta")
def _cvta(asm: Assembler, instruction: Instruction) -> Step:
    """Between generic addresses and those of one space: only shared memory has a window of its own."""
    write, read = asm.sink(instruction.operands[0], "u64"), asm.source(instruction.operands[1], "u64")
    if not any(part.startswith("shared") for part in instruction.parts):
        return lambda warp, mask: write(warp, read(warp), mask)
    window = np.uint64(SHARED_WINDOW)
    if "to" in instruction.parts:
        return lambda warp, mask: write(warp, read(warp) & ~window, mask)
    return lambda warp, mask: write(warp, read(warp) | window, mask)


@opcode("mapa")
def _mapa(asm: Assembler, instruction: Instruction) -> Step:
    """The address of the same variable in another CTA of the cluster."""
    kind = instruction.type
    write, read = asm.sink(instruction.operands[0], kind), asm.source(instruction.operands[1], kind)
    rank, dtype = asm.source(instruction.operands[2], "u32"), TYPES[kind]
    return lambda warp, mask: write(
        warp,
        (read(warp) & dtype.type(~(0xFF << 24) & (2 ** (8 * dtype.itemsize) - 1)))
        | (np.asarray(rank(warp)).astype(dtype) << dtype.type(24)),
        mask,
    )


# ------------------------------------------------------------------------------------------------------------ control


def _go(asm: Assembler, instruction: Instruction, target: int) -> Step:
    """To ``target``, or EXIT; a predicate may send a part of the lanes only."""
    if instruction.predicate is None:
        return lambda warp, mask: target
    predicate, negated = asm.registers[instruction.predicate], instruction.negated

    def step(warp: Warp, mask: Mask) -> Any:
        taken = ~warp.u[predicate] if negated else warp.u[predicate]
        if mask is None:
            if taken.all():
                return target
        else:
            taken = taken & mask
            if (taken == mask).all():
                return target
        return Branch(target, taken.copy()) if taken.any() else None

    return step


@opcode("bra")
def _bra(asm: Assembler, instruction: Instruction) -> Step:
    return _go(asm, instruction, asm.kernel.labels[instruction.operands[0]])


@opcode("ret", "exit")
def _ret(asm: Assembler, instruction: Instruction) -> Step:
    return _go(asm, instruction, EXIT)


@opcode("trap")
def _trap(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        raise KernelFault("the kernel executed a trap")

    return step
