"""Instructions -> steps: one closure per instruction. Here: operands, integer and float arithmetic, branches.

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
    """The lanes of ``taken`` go to ``target``, the others to the next instruction."""

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
        if instruction.predicate is None or parts[0] == "bra":
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


# ------------------------------------------------------------------------------------------------ integers and logic


def fused_multiply_add(a: Value, b: Value, c: Value) -> Value:
    """a * b + c in single precision with one rounding.

    The product is exact in double precision. The sum is rounded to odd there, so that the second rounding to single
    precision cannot be a rounding of an already rounded tie.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & ((bits & 1) == 0)
    nudge = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + nudge, bits).view(np.float64).astype(np.float32)


def flush(value: Value) -> Value:
    """Subnormal numbers become zero of the same sign (.ftz)."""
    value = np.asarray(value)
    return np.where(np.abs(value) < np.finfo(value.dtype).tiny, np.copysign(np.zeros_like(value), value), value)


def _maybe_flush(instruction: Instruction, function: Callable[..., Value]) -> Callable[..., Value]:
    if "ftz" not in instruction.parts:
        return function
    return lambda *values: flush(function(*[flush(value) for value in values]))


def _pairs(function: Callable[..., Value]) -> Callable[..., Value]:
    """The function on two floats packed in 64 bits, the first in the low half."""

    def packed(*values: Value) -> Value:
        halves = [np.broadcast_to(value, 32).copy().view(np.float32) for value in values]
        return np.asarray(function(*halves), np.float32).view(np.uint64)

    return packed


def _bf16(function: Callable[..., Value]) -> Callable[..., Value]:
    """The function in single precision on bf16 values, rounded once to bf16."""
    from mok_cute.emulator.convert import bf16_to_f32, f32_to_bf16

    return lambda *values: f32_to_bf16(function(*[bf16_to_f32(value) for value in values]))


def _arithmetic(asm: Assembler, instruction: Instruction, function: Callable[..., Value]) -> Step:
    kind = instruction.type
    if any(part in instruction.parts for part in ("rz", "rm", "rp", "sat", "cc")):
        raise ValueError("rounding, saturation or carry")
    if kind == "f32x2":
        return asm.elementwise(instruction, _pairs(_maybe_flush(instruction, function)), kind)
    if kind == "bf16":
        return asm.elementwise(instruction, _bf16(function), kind)
    if kind in ("f16x2", "bf16x2"):
        raise ValueError("packed halves")
    return asm.elementwise(instruction, _maybe_flush(instruction, function), kind)


@opcode("add")
def _add(asm: Assembler, instruction: Instruction) -> Step:
    return _arithmetic(asm, instruction, np.add)


@opcode("sub")
def _sub(asm: Assembler, instruction: Instruction) -> Step:
    return _arithmetic(asm, instruction, np.subtract)


def _is_float(kind: str) -> bool:
    return "f" in kind


@opcode("min")
def _min(asm: Assembler, instruction: Instruction) -> Step:
    wrong_nan = "NaN" in instruction.parts
    return _arithmetic(asm, instruction, np.fmin if _is_float(instruction.type) and not wrong_nan else np.minimum)


@opcode("max")
def _max(asm: Assembler, instruction: Instruction) -> Step:
    wrong_nan = "NaN" in instruction.parts
    return _arithmetic(asm, instruction, np.fmax if _is_float(instruction.type) and not wrong_nan else np.maximum)


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _high_product(a: Value, b: Value, bits: int, dtype: Any) -> Value:
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{bits // 4}")
        return (np.asarray(a).astype(wide) * np.asarray(b).astype(wide) >> wide.type(bits)).astype(dtype)
    left, right = np.broadcast_arrays(a, b)
    exact = [int(x) * int(y) >> 64 for x, y in zip(left.flat, right.flat, strict=True)]
    return np.array([value & (2**64 - 1) for value in exact], np.uint64).view(dtype).reshape(left.shape)


@opcode("mul")
def _mul(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    if "wide" in instruction.parts:
        wide = TYPES[_wide(kind)]
        return asm.elementwise(
            instruction,
            lambda a, b: np.multiply(np.asarray(a).astype(wide), np.asarray(b).astype(wide)),
            kind,
            _wide(kind),
        )
    if "hi" in instruction.parts:
        dtype = TYPES[kind]
        return asm.elementwise(instruction, lambda a, b: _high_product(a, b, 8 * dtype.itemsize, dtype), kind)
    return _arithmetic(asm, instruction, np.multiply)


@opcode("mad")
def _mad(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    if "wide" in instruction.parts:
        wide = _wide(kind)
        write = asm.sink(instruction.operands[0], wide)
        a, b = (asm.source(operand, kind) for operand in instruction.operands[1:3])
        c = asm.source(instruction.operands[3], wide)
        dtype = TYPES[wide]
        return lambda warp, mask: write(
            warp, np.asarray(a(warp)).astype(dtype) * np.asarray(b(warp)).astype(dtype) + c(warp), mask
        )
    if "hi" in instruction.parts:
        dtype = TYPES[kind]
        return asm.elementwise(instruction, lambda a, b, c: _high_product(a, b, 8 * dtype.itemsize, dtype) + c, kind)
    return asm.elementwise(instruction, lambda a, b, c: a * b + c, kind)


@opcode("fma.rn")
def _fma(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.type not in ("f32", "f32x2"):
        raise ValueError("type")
    return _arithmetic(asm, instruction, fused_multiply_add)


@opcode("neg")
def _neg(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.type in ("bf16", "bf16x2", "f16x2"):
        sign = TYPES[instruction.type].type(0x8000 if instruction.type == "bf16" else 0x80008000)
        return asm.elementwise(instruction, lambda a: a ^ sign, instruction.type)
    return _arithmetic(asm, instruction, np.negative)


@opcode("abs")
def _abs(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.type in ("bf16", "bf16x2", "f16x2"):
        kept = TYPES[instruction.type].type(0x7FFF if instruction.type == "bf16" else 0x7FFF7FFF)
        return asm.elementwise(instruction, lambda a: a & kept, instruction.type)
    return _arithmetic(asm, instruction, np.abs)


def _divide(a: Value, b: Value) -> Value:
    """Integer division towards zero. The result of a division by zero is unspecified; all ones here."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    exact = quotient * safe == a
    quotient = np.where(~exact & ((a < 0) != (safe < 0)), quotient + b.dtype.type(1), quotient)
    return np.where(b == 0, ~b.dtype.type(0), quotient)


@opcode("div")
def _div(asm: Assembler, instruction: Instruction) -> Step:
    if _is_float(instruction.type):
        return _arithmetic(asm, instruction, np.divide)
    return asm.elementwise(instruction, _divide, instruction.type)


@opcode("rem")
def _rem(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(instruction, lambda a, b: a - _divide(a, b) * b, instruction.type)


def _approximate(function: Callable[[Value], Value]) -> Builder:
    """Correctly rounded stand-in for an approximate instruction, whose bits the ISA does not fix."""

    def build(asm: Assembler, instruction: Instruction) -> Step:
        if instruction.type != "f32":
            raise ValueError("type")

        def single(value: Value) -> Value:
            return np.asarray(function(np.asarray(value, np.float64))).astype(np.float32)

        return asm.elementwise(instruction, _maybe_flush(instruction, single), "f32")

    return build


opcode("ex2.approx")(_approximate(np.exp2))
opcode("lg2.approx")(_approximate(np.log2))
opcode("rcp")(_approximate(lambda a: 1.0 / a))
opcode("sqrt")(_approximate(np.sqrt))
opcode("rsqrt.approx")(_approximate(lambda a: 1.0 / np.sqrt(a)))
opcode("tanh.approx")(_approximate(np.tanh))
opcode("sin.approx")(_approximate(np.sin))
opcode("cos.approx")(_approximate(np.cos))


def _logic(function: Callable[..., Value]) -> Builder:
    return lambda asm, instruction: asm.elementwise(instruction, function, instruction.type)


opcode("and")(_logic(np.bitwise_and))
opcode("or")(_logic(np.bitwise_or))
opcode("xor")(_logic(np.bitwise_xor))
opcode("not")(_logic(np.bitwise_not))


@opcode("lop3")
def _lop3(asm: Assembler, instruction: Instruction) -> Step:
    *operands, table = instruction.operands
    bits = int(table, 0)
    write = asm.sink(operands[0], "b32")
    a, b, c = (asm.source(operand, "b32") for operand in operands[1:])

    def step(warp: Warp, mask: Mask) -> None:
        values = [np.broadcast_to(read(warp), 32) for read in (a, b, c)]
        result = np.zeros(32, np.uint32)
        for row in range(8):
            if bits >> row & 1:
                chosen = [value if row >> (2 - at) & 1 else ~value for at, value in enumerate(values)]
                result |= chosen[0] & chosen[1] & chosen[2]
        write(warp, result, mask)

    return step


def _shift(asm: Assembler, instruction: Instruction, left: bool) -> Step:
    """Shifts clamp: a count beyond the width gives zero, or the sign."""
    kind = instruction.type
    dtype = TYPES[kind]
    bits = 8 * dtype.itemsize
    write = asm.sink(instruction.operands[0], kind)
    value, count = asm.source(instruction.operands[1], kind), asm.source(instruction.operands[2], "u32")
    shift = np.left_shift if left else np.right_shift

    def step(warp: Warp, mask: Mask) -> None:
        amount = count(warp)
        result = shift(value(warp), np.minimum(amount, bits - 1).astype(dtype))
        if left or dtype.kind == "u":
            result = np.where(amount < bits, result, dtype.type(0))
        write(warp, result, mask)

    return step


@opcode("shl")
def _shl(asm: Assembler, instruction: Instruction) -> Step:
    return _shift(asm, instruction, left=True)


@opcode("shr")
def _shr(asm: Assembler, instruction: Instruction) -> Step:
    return _shift(asm, instruction, left=False)


@opcode("shf")
def _shf(asm: Assembler, instruction: Instruction) -> Step:
    """Funnel shift of {high, low}: left gives the high word, right the low one."""
    left, clamp = instruction.parts[1] == "l", instruction.parts[2] == "clamp"
    write = asm.sink(instruction.operands[0], "b32")
    low, high, count = (asm.source(operand, "u32") for operand in instruction.operands[1:])

    def step(warp: Warp, mask: Mask) -> None:
        joined = np.asarray(high(warp)).astype(np.uint64) << np.uint64(32) | np.asarray(low(warp)).astype(np.uint64)
        amount = (np.minimum(count(warp), 32) if clamp else count(warp) & np.uint32(31)).astype(np.uint64)
        result = (joined << amount) >> np.uint64(32) if left else joined >> amount
        write(warp, result & np.uint64(0xFFFFFFFF), mask)

    return step


@opcode("prmt.b32")
def _prmt(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.opcode != "prmt.b32":
        raise ValueError("mode")
    write = asm.sink(instruction.operands[0], "b32")
    low, high, selector = (asm.source(operand, "u32") for operand in instruction.operands[1:])

    def step(warp: Warp, mask: Mask) -> None:
        choice = np.broadcast_to(selector(warp), 32)
        joined = np.asarray(high(warp)).astype(np.uint64) << np.uint64(32) | np.asarray(low(warp)).astype(np.uint64)
        result = np.zeros(32, np.uint32)
        for position in range(4):
            nibble = choice >> np.uint32(4 * position) & np.uint32(15)
            byte = (joined >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 0xFF
            sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
            result |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * position)
        write(warp, result, mask)

    return step


def _count_bits(value: Value) -> Value:
    value = np.atleast_1d(np.asarray(value))
    bits = np.unpackbits(np.ascontiguousarray(value).view(np.uint8).reshape(len(value), -1), axis=1)
    return bits.sum(axis=1).astype(np.uint32)


def _leading_zeros(value: Value) -> Value:
    value = np.atleast_1d(np.asarray(value))
    bits = 8 * value.dtype.itemsize
    return np.array([bits - int(number).bit_length() for number in value], np.uint32)


def _reverse_bits(value: Value) -> Value:
    value = np.atleast_1d(np.asarray(value))
    bits = 8 * value.dtype.itemsize
    return np.array([int(f"{int(number):0{bits}b}"[::-1], 2) for number in value], value.dtype)


@opcode("popc")
def _popc(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(instruction, _count_bits, instruction.type, "u32")


@opcode("clz")
def _clz(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(instruction, _leading_zeros, instruction.type, "u32")


@opcode("brev")
def _brev(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(instruction, _reverse_bits, instruction.type)


@opcode("bfe.u32")
def _bfe(asm: Assembler, instruction: Instruction) -> Step:
    def extract(value: Value, position: Value, length: Value) -> Value:
        wide = np.asarray(value).astype(np.uint64) >> np.minimum(position & np.uint32(255), 63).astype(np.uint64)
        kept = (np.uint64(1) << np.minimum(length & np.uint32(255), 32).astype(np.uint64)) - np.uint64(1)
        return (wide & kept).astype(np.uint32)

    return asm.elementwise(instruction, extract, "u32")


# ------------------------------------------------------------------------------------------- compare, select and move

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


@opcode("setp")
def _setp(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    compare = _comparison(instruction.parts[1], _is_float(kind))
    combine = COMBINE.get(instruction.parts[2])
    destinations = instruction.operands[0].split("|")
    write = asm.sink(destinations[0], "pred")
    write_other = asm.sink(destinations[1], "pred") if len(destinations) > 1 else None
    a, b = (asm.source(operand, kind) for operand in instruction.operands[1:3])
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


@opcode("bra")
def _bra(asm: Assembler, instruction: Instruction) -> Step:
    target = asm.kernel.labels[instruction.operands[0]]
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


@opcode("ret", "exit")
def _ret(asm: Assembler, instruction: Instruction) -> Step:
    return lambda warp, mask: EXIT


@opcode("trap")
def _trap(asm: Assembler, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        raise KernelFault("the kernel executed a trap")

    return step
