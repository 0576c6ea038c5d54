"""Integer arithmetic, logic, shifts and bit fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, Builder, Mask, Step, Value, opcode

if TYPE_CHECKING:
    from mok_cute.emulator.device import Warp

WORD_TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
CARRY = "%carry"  # the condition code of a thread, kept like a register


def _typed(*names: str, types: tuple[str, ...] = WORD_TYPES) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in types]


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


# ---------------------------------------------------------------------------------------------------- sums and products


def _simple(function: Callable[..., Value]) -> Builder:
    return lambda asm, instruction: asm.elementwise(instruction, function, instruction.type)


opcode(*_typed("add"))(_simple(np.add))
opcode(*_typed("sub"))(_simple(np.subtract))
opcode(*_typed("min"))(_simple(np.minimum))
opcode(*_typed("max"))(_simple(np.maximum))
opcode(*_typed("neg", types=("s16", "s32", "s64")))(_simple(np.negative))
opcode(*_typed("abs", types=("s16", "s32", "s64")))(_simple(np.abs))


@opcode("add.sat.s32", "sub.sat.s32")
def _saturating(asm: Assembler, instruction: Instruction) -> Step:
    function = np.add if instruction.parts[0] == "add" else np.subtract
    low, high = -(1 << 31), (1 << 31) - 1

    def compute(a: Value, b: Value) -> Value:
        exact = function(np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64))
        return np.clip(exact, low, high).astype(np.int32)

    return asm.elementwise(instruction, compute, "s32")


@opcode(*(f"{name}.{kind}" for name in ("add", "min", "max") for kind in ("u16x2", "s16x2")), "min.relu", "max.relu")
def _pairs(asm: Assembler, instruction: Instruction) -> Step:
    """On both halves of a word. With .relu a negative result becomes zero, in single words too."""
    parts, kind = instruction.parts, instruction.type
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[0]]
    floor = "relu" in parts
    if kind == "s32" and floor:
        return asm.elementwise(instruction, lambda a, b: np.maximum(function(a, b), np.int32(0)), kind)
    half = {"u16x2": np.uint16, "s16x2": np.int16}[kind]

    def compute(a: Value, b: Value) -> Value:
        left, right = (np.broadcast_to(value, 32).copy().view(half) for value in (a, b))
        result = function(left, right)
        return (np.maximum(result, half(0)) if floor else result).view(np.uint32)

    return asm.elementwise(instruction, compute, "b32")


def _carry_of(asm: Assembler) -> int:
    """The index of the hidden register for the carry."""
    return asm.hidden_register(CARRY, "pred")


def _integer(value: Value, count: int = 32) -> Any:
    """As Python integers, which have no width."""
    return np.broadcast_to(np.asarray(value), count).astype(object)


@opcode("add.cc", "addc", "sub.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc")
def _with_carry(asm: Assembler, instruction: Instruction) -> Step:
    """Sums of more words than one: the carry (of a difference, the borrow) goes from one to the next."""
    parts, kind = instruction.parts, instruction.type
    unsigned = kind.replace("s", "u")
    bits, dtype = int(kind[1:]), TYPES[unsigned]
    carry = _carry_of(asm)
    takes, gives = parts[0] in ("addc", "subc", "madc"), "cc" in parts
    write = asm.sink(instruction.operands[0], unsigned)
    high = "hi" in parts
    reads = [
        asm.source(operand, kind if high and number < 2 else unsigned)
        for number, operand in enumerate(instruction.operands[1:])
    ]

    def step(warp: Warp, mask: Mask) -> None:
        a, b, *rest = (_integer(read(warp)) for read in reads)
        if rest:
            product = a * b
            a, b = (product >> bits if high else product) & ((1 << bits) - 1), rest[0]
        before = warp.u[carry].astype(object) if takes else 0
        total = a - b - before if parts[0].startswith("sub") else a + b + before
        write(warp, (total & ((1 << bits) - 1)).astype(dtype), mask)
        if gives:
            out = (total < 0) | (total >> bits != 0)
            np.copyto(warp.u[carry], out.astype(np.bool_), where=True if mask is None else mask)

    return step


def _high_product(a: Value, b: Value, bits: int, dtype: Any) -> Value:
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{bits // 4}")
        return (np.asarray(a).astype(wide) * np.asarray(b).astype(wide) >> wide.type(bits)).astype(dtype)
    left, right = np.broadcast_arrays(a, b)
    exact = [int(x) * int(y) >> 64 for x, y in zip(left.flat, right.flat, strict=True)]
    return np.array([value & (2**64 - 1) for value in exact], np.uint64).view(dtype).reshape(left.shape)


@opcode("mul.lo", "mul.hi", "mul.wide")
def _mul(asm: Assembler, instruction: Instruction) -> Step:
    kind, part = instruction.type, instruction.parts[1]
    dtype = TYPES[kind]
    if part == "wide":
        wide = TYPES[_wide(kind)]
        return asm.elementwise(
            instruction,
            lambda a, b: np.multiply(np.asarray(a).astype(wide), np.asarray(b).astype(wide)),
            kind,
            _wide(kind),
        )
    if part == "hi":
        return asm.elementwise(instruction, lambda a, b: _high_product(a, b, 8 * dtype.itemsize, dtype), kind)
    return asm.elementwise(instruction, np.multiply, kind)


@opcode("mad.lo", "mad.hi", "mad.wide")
def _mad(asm: Assembler, instruction: Instruction) -> Step:
    kind, part = instruction.type, instruction.parts[1]
    if "sat" in instruction.parts:
        raise ValueError("saturation")
    if part == "wide":
        wide = _wide(kind)
        write = asm.sink(instruction.operands[0], wide)
        a, b = (asm.source(operand, kind) for operand in instruction.operands[1:3])
        c = asm.source(instruction.operands[3], wide)
        dtype = TYPES[wide]
        return lambda warp, mask: write(
            warp, np.asarray(a(warp)).astype(dtype) * np.asarray(b(warp)).astype(dtype) + c(warp), mask
        )
    if part == "hi":
        dtype = TYPES[kind]
        return asm.elementwise(instruction, lambda a, b, c: _high_product(a, b, 8 * dtype.itemsize, dtype) + c, kind)
    return asm.elementwise(instruction, lambda a, b, c: a * b + c, kind)


@opcode("mul24.lo", "mad24.lo")
def _mul24(asm: Assembler, instruction: Instruction) -> Step:
    kind = instruction.type
    shift = TYPES[kind].type(8)

    def low(value: Value) -> Value:
        return value << shift >> shift  # signed types extend the sign of bit 23

    if instruction.parts[0] == "mul24":
        return asm.elementwise(instruction, lambda a, b: low(a) * low(b), kind)
    return asm.elementwise(instruction, lambda a, b, c: low(a) * low(b) + c, kind)


@opcode("sad")
def _sad(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(
        instruction, lambda a, b, c: np.where(a < b, b - a, a - b).astype(c.dtype) + c, instruction.type
    )


def _divide(a: Value, b: Value) -> Value:
    """Integer division towards zero. The result of a division by zero is unspecified; all ones here."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    exact = quotient * safe == a
    quotient = np.where(~exact & ((a < 0) != (safe < 0)), quotient + b.dtype.type(1), quotient)
    return np.where(b == 0, ~b.dtype.type(0), quotient)


opcode(*_typed("div"))(_simple(_divide))
opcode(*_typed("rem"))(_simple(lambda a, b: a - _divide(a, b) * b))


@opcode("dp4a", "dp2a")
def _dot(asm: Assembler, instruction: Instruction) -> Step:
    """c + a . b: four bytes of each; dp2a: two halves of a and the lower or upper two bytes of b."""
    parts = instruction.parts
    wide = parts[0] == "dp2a"
    a_kind, b_kind = parts[-2:]
    signed = "s32" in (a_kind, b_kind)
    write = asm.sink(instruction.operands[0], "s32" if signed else "u32")
    a, b, c = (asm.source(operand, "b32") for operand in instruction.operands[1:])
    a_view = np.dtype(f"{'i' if a_kind == 's32' else 'u'}{2 if wide else 1}")
    b_view = np.dtype(f"{'i' if b_kind == 's32' else 'u'}1")

    def step(warp: Warp, mask: Mask) -> None:
        left = np.broadcast_to(a(warp), 32).copy().view(a_view).reshape(32, -1).astype(np.int64)
        right = np.broadcast_to(b(warp), 32).copy().view(b_view).reshape(32, 4).astype(np.int64)
        if wide:
            right = right[:, 2:] if "hi" in parts else right[:, :2]
        total = (left * right).sum(axis=1) + np.broadcast_to(c(warp), 32).astype(np.int64)
        write(warp, (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32 if signed else np.uint32), mask)

    return step


# ----------------------------------------------------------------------------------------------------- logic and shifts

for _name, _function in {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
}.items():
    opcode(_name)(_simple(_function))


@opcode("cnot")
def _cnot(asm: Assembler, instruction: Instruction) -> Step:
    return asm.elementwise(instruction, lambda a: (a == 0).astype(a.dtype), instruction.type)


@opcode("lop3.b32")
def _lop3(asm: Assembler, instruction: Instruction) -> Step:
    if instruction.opcode != "lop3.b32":
        raise ValueError("predicate result")
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


# By mode: the selector that the two low bits of the third source stand for.
PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@opcode("prmt.b32")
def _prmt(asm: Assembler, instruction: Instruction) -> Step:
    write = asm.sink(instruction.operands[0], "b32")
    low, high, selector = (asm.source(operand, "u32") for operand in instruction.operands[1:])
    mode = instruction.parts[2:]
    table = np.array(PRMT_MODES[mode[0]], np.uint32) if mode else None

    def step(warp: Warp, mask: Mask) -> None:
        choice = np.broadcast_to(selector(warp), 32)
        if table is not None:
            choice = table[choice & np.uint32(3)]
        joined = np.asarray(high(warp)).astype(np.uint64) << np.uint64(32) | np.asarray(low(warp)).astype(np.uint64)
        result = np.zeros(32, np.uint32)
        for position in range(4):
            nibble = choice >> np.uint32(4 * position) & np.uint32(15)
            byte = (joined >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 0xFF
            sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
            result |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * position)
        write(warp, result, mask)

    return step


# ----------------------------------------------------------------------------------------------------------- bit fields


def _each(function: Callable[..., int]) -> Callable[..., Value]:
    """A function of unsigned Python integers and their width, lane by lane."""

    def compute(*values: Value) -> Value:
        first = np.asarray(values[0])
        bits = 8 * first.dtype.itemsize
        columns = np.broadcast_arrays(*[np.atleast_1d(value) for value in values])
        results = [function(bits, *map(int, row)) & ((1 << bits) - 1) for row in zip(*columns, strict=True)]
        return np.array(results, np.uint64)

    return compute


def _fixed(function: Callable[..., int], source: str | None, result: str | None) -> Builder:
    """Sources as unsigned; types ``source`` and ``result`` where the instruction's own does not say."""

    def build(asm: Assembler, instruction: Instruction) -> Step:
        kind = source or instruction.type.replace("s", "u")
        to = result or kind
        compute, dtype = _each(function), TYPES[to]
        return asm.elementwise(instruction, lambda *values: compute(*values).astype(dtype), kind, to)

    return build


opcode("popc")(_fixed(lambda bits, a: a.bit_count(), None, "u32"))
opcode("clz")(_fixed(lambda bits, a: bits - a.bit_length(), None, "u32"))
opcode("brev")(_fixed(lambda bits, a: int(f"{a:0{bits}b}"[::-1], 2), None, None))


@opcode("bfind")
def _bfind(asm: Assembler, instruction: Instruction) -> Step:
    """The highest bit that is one, or for a negative number zero; with .shiftamt how far it is from the top."""
    signed, amount = instruction.type[0] == "s", "shiftamt" in instruction.parts

    def find(bits: int, value: int) -> int:
        if signed and value >> (bits - 1):
            value ^= (1 << bits) - 1
        top = value.bit_length() - 1
        return bits - 1 - top if amount and top >= 0 else top

    return _fixed(find, None, "u32")(asm, instruction)


@opcode("bfe")
def _bfe(asm: Assembler, instruction: Instruction) -> Step:
    """Bits from a position on; a signed field extends its highest bit, also where it reaches beyond the top."""
    kind = instruction.type
    signed, dtype = kind[0] == "s", TYPES[kind]
    bits = 8 * dtype.itemsize
    write = asm.sink(instruction.operands[0], kind.replace("s", "u"))
    value = asm.source(instruction.operands[1], kind.replace("s", "u"))
    position, length = (asm.source(operand, "u32") for operand in instruction.operands[2:])

    def extract(value: int, start: int, count: int) -> int:
        start, count = start & 0xFF, count & 0xFF
        field = value >> start & ((1 << count) - 1)
        top = min(start + count - 1, bits - 1)
        if signed and count and value >> top & 1:
            field |= -1 << max(0, min(count, bits - start))
        return field & ((1 << bits) - 1)

    def step(warp: Warp, mask: Mask) -> None:
        columns = [np.broadcast_to(read(warp), 32).tolist() for read in (value, position, length)]
        result = [extract(*row) for row in zip(*columns, strict=True)]
        write(warp, np.array(result, np.uint64).astype(f"u{dtype.itemsize}"), mask)

    return step


@opcode("bfi")
def _bfi(asm: Assembler, instruction: Instruction) -> Step:
    """The second source with the lowest bits of the first put in from a position on."""
    kind = instruction.type
    bits, dtype = int(kind[1:]), TYPES[kind]
    write = asm.sink(instruction.operands[0], kind)
    inserted, base = (asm.source(operand, kind) for operand in instruction.operands[1:3])
    position, length = (asm.source(operand, "u32") for operand in instruction.operands[3:])

    def insert(field: int, value: int, start: int, count: int) -> int:
        start, count = start & 0xFF, count & 0xFF
        room = ((1 << count) - 1) << start & ((1 << bits) - 1)
        return value & ~room | field << start & room

    def step(warp: Warp, mask: Mask) -> None:
        columns = [np.broadcast_to(read(warp), 32).tolist() for read in (inserted, base, position, length)]
        write(warp, np.array([insert(*row) for row in zip(*columns, strict=True)], np.uint64).astype(dtype), mask)

    return step


@opcode("bmsk")
def _bmsk(asm: Assembler, instruction: Instruction) -> Step:
    clamp = instruction.parts[1] == "clamp"

    def make(bits: int, start: int, count: int) -> int:
        if not clamp:
            start, count = start & 31, count & 31
        return ((1 << min(count, 32)) - 1) << min(start, 32)

    return _fixed(make, "b32", "b32")(asm, instruction)


@opcode("szext")
def _szext(asm: Assembler, instruction: Instruction) -> Step:
    """The lowest bits, as many as the second source says, extended by sign or zero."""
    clamp, signed = instruction.parts[1] == "clamp", instruction.type == "s32"

    def extend(bits: int, value: int, count: int) -> int:
        count = min(count, 32) if clamp else count & 31
        field = value & ((1 << count) - 1)
        return field - (1 << count) if signed and count and field >> (count - 1) else field

    return _fixed(extend, "b32", "b32")(asm, instruction)
