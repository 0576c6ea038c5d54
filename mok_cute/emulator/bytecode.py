"""Instructions of a kernel -> bytecode for ``core.c``. What has none stays an escape to the reference's step.

An encoder says in one line what the builder of the same opcode in the reference does in a closure; it raises
``NoBytecode`` for every form that ``core.c`` does not have, however rare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import TYPES, Assembler, Source
from mok_cute.emulator.load_store import space_of

if TYPE_CHECKING:
    from mok_cute.emulator.device import Layout, Warp

INSTRUCTION = np.dtype(
    [
        ("op", "u2"),
        ("guard", "u1"),
        ("size", "u1"),
        ("guard_at", "u4"),
        *((name, "u4") for name in ("d", "a", "b", "c", "flags", "count")),
        ("value", "u8"),
    ]
)
TIMERS = {"globaltimer", "clock64", "clock"}
SCRATCH_BYTES = 32 * 16  # behind the registers: where ``_`` goes

# Flags as core.c has them.
WIDE_ADDRESS, SIGNED = 1, 8
SPACES = {"global": 0 << 1, "shared": 1 << 1, "generic": 2 << 1}
REGISTER_SHIFT, OPERATION_SHIFT = 8, 16
COMBINE = {"and": 1, "or": 2, "xor": 3}
INVERTED, HAS_OTHER = 4, 8
ATOMS = {name: at for at, name in enumerate(("add", "exch", "min", "max", "and", "or", "xor", "inc", "dec", "cas"))}
SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
VOTES = {"ballot": 0, "all": 1, "any": 2, "uni": 3}
ARRIVES, ANNOUNCES = 1 << 16, 1 << 17
ROUNDINGS = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}


class NoBytecode(Exception):
    """The instruction is left to the reference."""


Fields = dict[str, Any]
Encoder = Callable[["Program", Instruction], Fields]
ENCODERS: dict[str, tuple[Encoder, bool]] = {}


def encodes(*names: str, tracked: bool = False) -> Callable[[Encoder], Encoder]:
    """For opcodes that begin with these names; the longest wins. ``tracked``: a tracker of accesses wants to see it."""

    def register(encoder: Encoder) -> Encoder:
        ENCODERS.update(dict.fromkeys(names, (encoder, tracked)))
        return encoder

    return register


def need(condition: object) -> None:
    if not condition:
        raise NoBytecode


class Program:
    """The bytecode of one kernel. Nothing of a launch goes into it.

    code             (instructions + 1,) INSTRUCTION
    lists            offsets of registers in braces, one list behind the other
    constant_bytes   of each warp behind its registers
    """

    def __init__(self, assembler: Assembler, layout: Layout, ops: dict[str, int], tracked: bool) -> None:
        self.assembler, self.layout, self._ops = assembler, layout, ops
        self._lists: list[int] = []
        self._offsets: dict[tuple[str, str], int] = {}
        self._varying: list[tuple[int, Source, Any]] = []  # offset, value in a warp, type
        self._fixed: list[tuple[int, Any]] = []  # offset, (32,) vector
        self._scratch = layout.num_bytes
        self._end = self._scratch + SCRATCH_BYTES
        self.code = np.zeros(len(assembler.kernel.instructions) + 1, INSTRUCTION)
        for row, instruction in zip(self.code, assembler.kernel.instructions, strict=False):
            encoder, is_tracked = self._encoder(instruction)
            if encoder is None or (tracked and is_tracked):
                fields: Fields = {}
            else:
                try:
                    fields = encoder(self, instruction)
                    fields["op"] = self._ops[fields["op"]]
                except (NoBytecode, KeyError, ValueError, IndexError, StopIteration):
                    fields = {}
            if instruction.predicate is not None:
                fields["guard"] = 2 if instruction.negated else 1
                fields["guard_at"] = layout.offset(assembler.registers[instruction.predicate])
            for name, value in fields.items():
                row[name] = value
        self.lists = np.array(self._lists or [0], np.uint32)
        self.constant_bytes = self._end - layout.num_bytes
        self._template = np.zeros(self.constant_bytes, np.uint8)
        for offset, vector in self._fixed:
            start = offset - layout.num_bytes
            self._template[start : start + vector.nbytes] = vector.view(np.uint8)

    @staticmethod
    def _encoder(instruction: Instruction) -> tuple[Encoder | None, bool]:
        parts = instruction.parts
        for length in range(len(parts), 0, -1):
            found = ENCODERS.get(".".join(parts[:length]))
            if found is not None:
                return found
        return None, False

    def fill_constants(self, warp: Warp) -> None:
        file = warp.file
        file[self.layout.num_bytes :] = self._template
        for offset, read, dtype in self._varying:
            vector = np.ascontiguousarray(np.broadcast_to(np.asarray(read(warp), dtype), 32))
            file[offset : offset + vector.nbytes] = vector.view(np.uint8)

    # ----------------------------------------------------------------------------------------------------- operands

    def size(self, operand: str) -> int:
        """Bytes of a register; 0 for a predicate."""
        return self.layout.sizes[self.assembler.registers[operand]]

    def register(self, operand: str, size: int | None = None) -> int:
        register = self.assembler.registers[operand]
        need(size is None or self.layout.sizes[register] == size)
        return self.layout.offset(register)

    def source(self, operand: str, kind: str) -> int:
        """Where a value of this type is read; registers of another size are left to the reference."""
        if operand in self.assembler.registers:
            return self.register(operand, _size(kind))
        key = operand, kind
        if key not in self._offsets:
            need(operand.removeprefix("%") not in TIMERS)
            self._offsets[key] = self._constant(operand, self.assembler.source(operand, kind), TYPES[kind])
        return self._offsets[key]

    def _constant(self, operand: str, read: Source, dtype: Any) -> int:
        offset, self._end = self._end, self._end + 32 * max(dtype.itemsize, 8)
        if operand[0] in "-0123456789":
            self._fixed.append((offset, np.full(32, read(None), dtype)))  # type: ignore[arg-type]
        else:
            self._varying.append((offset, read, dtype))
        return offset

    def sink(self, operand: str, kind: str) -> int:
        return self._scratch if operand == "_" else self.register(operand, _size(kind))

    def narrow_sink(self, operand: str, size: int) -> tuple[int, int]:
        """Offset and bytes of a register that may be wider than the value of ``size`` bytes that it gets."""
        if operand == "_":
            return self._scratch, size
        held = self.size(operand)
        need(held >= size)
        return self.register(operand), held

    def list_of(self, offsets: list[int]) -> int:
        self._lists += offsets
        return len(self._lists) - len(offsets)

    def address(self, operand: str) -> Fields:
        """``[base+offset]``"""
        text = operand[1:-1].strip()
        for at, letter in enumerate(text):
            if at and letter in "+-":
                base, offset = text[:at].strip(), int(text[at:].replace("+-", "-").replace(" ", ""), 0)
                break
        else:
            base, offset = text, 0
        if base in self.assembler.registers:
            size = self.size(base)
            need(size in (4, 8))
            return {"a": self.register(base), "value": offset % (1 << 64), "flags": WIDE_ADDRESS if size == 8 else 0}
        key = operand, "address"
        if key not in self._offsets:
            read, same = self.assembler.address(operand)
            assert same
            self._offsets[key] = self._constant("address", read, np.dtype("u8"))
        return {"a": self._offsets[key], "flags": WIDE_ADDRESS}


def _size(kind: str) -> int:
    return 0 if kind == "pred" else TYPES[kind].itemsize


def _only(instruction: Instruction, *allowed: str) -> None:
    """Every modifier is one of these."""
    need(set(instruction.parts[1:-1]) <= set(allowed))


def _operation(program: Program, instruction: Instruction, op: str, *kinds: str) -> Fields:
    """An op with a destination and sources of these types."""
    to, *sources = instruction.operands
    need(len(sources) == len(kinds) - 1)
    fields: Fields = {"op": op, "d": program.sink(to, kinds[0])}
    for name, operand, kind in zip("abc", sources, kinds[1:], strict=False):
        fields[name] = program.source(operand, kind)
    return fields


def _unsigned(kind: str) -> str:
    return {"b": "u", "s": "u", "u": "u"}[kind[0]] + kind[1:]


def _is_integer(kind: str) -> bool:
    return kind[0] in "bus" and kind[1:] in ("16", "32", "64")


# ---------------------------------------------------------------------------------------------------------- arithmetic


@encodes("add", "sub", "mul", "mad", "div", "rem", "min", "max", "neg", "abs", "fma")
def _arithmetic(program: Program, instruction: Instruction) -> Fields:
    kind, parts = instruction.type, instruction.parts
    name, count = parts[0], len(instruction.operands)
    if kind in ("f32", "f32x2"):
        return _float(program, instruction, name, kind)
    need(_is_integer(kind))
    if "wide" in parts:
        _only(instruction, "wide")
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        kinds = (wide, kind, kind, wide) if name == "mad" else (wide, kind, kind)
        return _operation(program, instruction, f"{name}_wide_{kind}", *kinds)
    if "hi" in parts:
        need(name == "mul")
        _only(instruction, "hi")
        return _operation(program, instruction, f"mul_hi_{kind}", kind, kind, kind)
    _only(instruction, "lo")
    signed = name in ("div", "rem", "min", "max", "abs")
    op = f"{name}_{kind if signed else _unsigned(kind)}"
    return _operation(program, instruction, op, *[kind] * count)


def _float(program: Program, instruction: Instruction, name: str, kind: str) -> Fields:
    _only(instruction, "rn", "ftz", "NaN", "full", "approx")
    suffix = "_ftz" if "ftz" in instruction.parts else ""
    if "NaN" in instruction.parts:
        name += "_nan"
    need(name not in ("min", "max", "min_nan", "max_nan") or len(instruction.operands) == 3)
    fields = _operation(program, instruction, f"{name}_{kind}{suffix}", *[kind] * len(instruction.operands))
    if kind == "f32x2" and "c" not in fields:
        fields["c"] = fields["b"]
    return fields


@encodes("ex2.approx", "rcp", "sqrt", "rsqrt.approx")
def _function(program: Program, instruction: Instruction) -> Fields:
    need(instruction.type == "f32")
    return _float(program, instruction, instruction.parts[0], "f32")


@encodes("and", "or", "xor", "not")
def _logic(program: Program, instruction: Instruction) -> Fields:
    kind = instruction.type
    need(len(instruction.parts) == 2)
    bits = "u8" if kind == "pred" else _unsigned(kind)
    return _operation(program, instruction, f"{instruction.parts[0]}_{bits}", *[kind] * len(instruction.operands))


@encodes("shl", "shr")
def _shift(program: Program, instruction: Instruction) -> Fields:
    kind, name = instruction.type, instruction.parts[0]
    need(len(instruction.parts) == 2 and _is_integer(kind))
    bits = kind if name == "shr" and kind[0] == "s" else _unsigned(kind)
    return _operation(program, instruction, f"{name}_{bits}", kind, kind, "u32")


@encodes("lop3.b32")
def _lop3(program: Program, instruction: Instruction) -> Fields:
    need(instruction.opcode == "lop3.b32")
    *operands, table = instruction.operands
    d, a, b, c = operands
    sources = {name: program.source(operand, "b32") for name, operand in zip("abc", (a, b, c), strict=True)}
    return {"op": "lop3", "d": program.sink(d, "b32"), "flags": int(table, 0), **sources}


@encodes("shf")
def _funnel_shift(program: Program, instruction: Instruction) -> Fields:
    _, side, mode, kind = instruction.parts
    need(kind == "b32")
    return _operation(program, instruction, f"shf_{side}_{mode}", "b32", "u32", "u32", "u32")


@encodes("prmt.b32")
def _prmt(program: Program, instruction: Instruction) -> Fields:
    need(instruction.opcode == "prmt.b32")
    return _operation(program, instruction, "prmt", "b32", "u32", "u32", "u32")


@encodes("bfe.u32")
def _bfe(program: Program, instruction: Instruction) -> Fields:
    return _operation(program, instruction, "bfe_u32", "u32", "u32", "u32", "u32")


@encodes("popc", "clz", "brev")
def _bit_counts(program: Program, instruction: Instruction) -> Fields:
    name, kind = instruction.parts
    return _operation(program, instruction, f"{name}_{_unsigned(kind)}", "u32", kind)


# ------------------------------------------------------------------------------------------- compare, select and move


@encodes("setp")
def _setp(program: Program, instruction: Instruction) -> Fields:
    kind, parts, operands = instruction.type, instruction.parts, instruction.operands
    compare, combine = parts[1], parts[2] if len(parts) == 4 else ""
    need(len(parts) == (4 if combine else 3) and (not combine or combine in COMBINE))
    compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
    if kind != "f32":
        kind = kind if kind[0] == "s" else _unsigned(kind)
    destinations = operands[0].split("|")
    fields: Fields = {
        "op": f"{compare}_{kind}",
        "d": program.sink(destinations[0], "pred"),
        "a": program.source(operands[1], instruction.type),
        "b": program.source(operands[2], instruction.type),
        "flags": 0,
    }
    if combine:
        fields["c"] = program.source(operands[3].removeprefix("!"), "pred")
        fields["flags"] = COMBINE[combine] | (INVERTED if operands[3].startswith("!") else 0)
    if len(destinations) > 1:
        fields["count"] = program.sink(destinations[1], "pred")
        fields["flags"] |= HAS_OTHER
    return fields


@encodes("selp")
def _selp(program: Program, instruction: Instruction) -> Fields:
    kind = instruction.type
    op = {2: "selp_u16", 4: "selp_u32", 8: "selp_u64"}[_size(kind)]
    return _operation(program, instruction, op, kind, kind, kind, "pred")


@encodes("mov")
def _mov(program: Program, instruction: Instruction) -> Fields:
    to, origin = instruction.operands
    kind = instruction.type
    need(len(instruction.parts) == 2)
    vector = program.assembler.vector
    if to.startswith("{") or origin.startswith("{"):
        elements = vector(to if to.startswith("{") else origin)
        part = _size(kind) // len(elements)
        need(part in (2, 4) and part * len(elements) in (4, 8))
        bits = f"b{8 * part}"
        if to.startswith("{"):
            places = program.list_of([program.sink(element, bits) for element in elements])
            return {
                "op": "unpack",
                "d": places,
                "a": program.source(origin, kind),
                "size": part,
                "count": len(elements),
            }
        places = program.list_of([program.source(element, bits) for element in elements])
        return {"op": "pack", "d": program.sink(to, kind), "a": places, "size": part, "count": len(elements)}
    if origin.removeprefix("%") in TIMERS:
        return {"op": "timer", "d": program.sink(to, kind), "size": _size(kind)}
    op = {0: "mov_u8", 2: "mov_u16", 4: "mov_u32", 8: "mov_u64", 16: "mov_u128"}[_size(kind)]
    return _operation(program, instruction, op, kind, kind)


@encodes("cvta")
def _cvta(program: Program, instruction: Instruction) -> Fields:
    op = "mov_u64"
    if any(part.startswith("shared") for part in instruction.parts):
        op = "to_shared" if "to" in instruction.parts else "from_shared"
    return _operation(program, instruction, op, "u64", "u64")


# --------------------------------------------------------------------------------------------------------- conversions


@encodes("cvt")
def _cvt(program: Program, instruction: Instruction) -> Fields:
    *modifiers, to, origin = instruction.parts[1:]
    d, *sources = instruction.operands
    integers = [kind[0] in "us" and kind[1:] in ("8", "16", "32", "64") for kind in (to, origin)]
    if all(integers):
        need(not modifiers)
        return _between_integers(program, d, sources[0], to, origin)
    if integers[1] and to == "f32":
        need(modifiers == ["rn"] and origin[1:] in ("32", "64"))
        return _operation(program, instruction, f"cvt_f32_{origin}", "f32", origin)
    if integers[0] and origin == "f32":
        need(len(modifiers) == 1)
        place, held = program.narrow_sink(d, _size(to))
        flags = held << REGISTER_SHIFT | (SIGNED if to[0] == "s" else 0)
        rounding = ROUNDINGS[modifiers[0]]
        a = program.source(sources[0], "f32")
        return {"op": "cvt_int_f32", "d": place, "a": a, "flags": flags, "count": rounding, "size": _size(to)}
    if (to, origin) in (("f32", "bf16"), ("f32", "f16")):
        need(not modifiers)
        return _operation(program, instruction, f"cvt_f32_{origin}", "b32", "b16")
    if origin == "f32" and to in ("bf16", "f16", "bf16x2", "f16x2"):
        need(modifiers == ["rn"])
        kinds = ("b32", "f32", "f32") if to.endswith("x2") else ("b16", "f32")
        return _operation(program, instruction, f"cvt_{to}_f32", *kinds)
    raise NoBytecode


def _between_integers(program: Program, d: str, a: str, to: str, origin: str) -> Fields:
    place, held = program.narrow_sink(d, _size(to))
    if a in program.assembler.registers:
        size, start = program.size(a), program.register(a)
        need(size >= _size(origin))
    else:
        size, start = _size(origin), program.source(a, origin)
    count = _size(origin) | _size(to) << 8 | (origin[0] == "s") << 16 | (to[0] == "s") << 17
    return {"op": "cvt_int", "d": place, "a": start, "size": size, "count": count, "flags": held << REGISTER_SHIFT}


# ------------------------------------------------------------------------------------------------------------- control


@encodes("bra")
def _bra(program: Program, instruction: Instruction) -> Fields:
    return {"op": "bra", "d": program.assembler.kernel.labels[instruction.operands[0]]}


@encodes("ret", "exit")
def _ret(program: Program, instruction: Instruction) -> Fields:
    return {"op": "ret"}


@encodes("fence", "membar", "prefetch", "griddepcontrol", "setmaxnreg", "cp.async.bulk.prefetch", tracked=True)
@encodes("applypriority", "wgmma.fence", tracked=True)
def _no_effect(program: Program, instruction: Instruction) -> Fields:
    return {"op": "nop"}


@encodes("nanosleep")
def _nanosleep(program: Program, instruction: Instruction) -> Fields:
    return {"op": "nanosleep"}


# -------------------------------------------------------------------------------------------------------------- memory


@encodes("ld", tracked=True)
def _ld(program: Program, instruction: Instruction) -> Fields:
    kind, space = instruction.type, space_of(instruction)
    elements = program.assembler.vector(instruction.operands[0])
    size = _size(kind)
    if space == "param":
        return _ld_param(program, instruction, elements, kind)
    strong = space != "shared" and not {"acquire", "relaxed", "volatile"}.isdisjoint(instruction.parts)
    need(not strong and size * len(elements) <= 16)
    places = [program.narrow_sink(element, size) for element in elements]
    held = places[0][1]
    need(held <= 8 and all(one == held for _, one in places))
    fields = program.address(instruction.operands[1])
    fields["flags"] |= SPACES[space] | held << REGISTER_SHIFT | (SIGNED if kind[0] == "s" else 0)
    d = program.list_of([place for place, _ in places])
    return {"op": "ld", "d": d, "size": size, "count": len(elements), **fields}


def _ld_param(program: Program, instruction: Instruction, elements: list[str], kind: str) -> Fields:
    """Parameters do not change while a kernel runs: a constant of the launch."""
    name, _, offset = instruction.operands[1][1:-1].partition("+")
    start = program.assembler.parameter_offsets[name] + int(offset or "0", 0)
    size, dtype = _size(kind), TYPES[kind]
    need(len(elements) == 1 and size in (2, 4, 8))
    read: Source = lambda warp: warp.cta.grid.parameters[start : start + size].view(dtype)[0]  # noqa: E731
    key = f"[param {start}]", kind
    if key not in program._offsets:
        program._offsets[key] = program._constant("param", read, dtype)
    return {"op": f"mov_u{8 * size}", "d": program.sink(elements[0], kind), "a": program._offsets[key]}


@encodes("st", tracked=True)
def _st(program: Program, instruction: Instruction) -> Fields:
    kind, space = instruction.type, space_of(instruction)
    elements = program.assembler.vector(instruction.operands[1])
    size = _size(kind)
    need(size * len(elements) <= 16 and size <= 8 and {"async", "bulk"}.isdisjoint(instruction.parts))
    places = []
    for element in elements:
        if element in program.assembler.registers:
            held = program.size(element)
            need(held >= size)
            places += [program.register(element), held]
        else:
            places += [program.source(element, kind), size]
    fields = program.address(instruction.operands[0])
    fields["flags"] |= SPACES[space]
    return {"op": "st", "d": program.list_of(places), "size": size, "count": len(elements), **fields}


@encodes("atom", "red", tracked=True)
def _atom(program: Program, instruction: Instruction) -> Fields:
    kind, space, operands = instruction.type, space_of(instruction), list(instruction.operands)
    need(_is_integer(kind) and kind[1:] != "16")
    name = next(part for part in instruction.parts if part in ATOMS)
    d = program.sink(operands.pop(0), kind) if instruction.parts[0] == "atom" else None
    fields = program.address(operands[0])
    need(len(operands) == (3 if name == "cas" else 2))
    fields["flags"] |= SPACES[space] | (SIGNED if kind[0] == "s" else 0) | ATOMS[name] << OPERATION_SHIFT
    for field, operand in zip("bc", operands[1:], strict=False):
        fields[field] = program.source(operand, kind)
    return {"op": "atom", "d": d or 0, "count": int(d is not None), "size": _size(kind), **fields}


# ----------------------------------------------------------------------------------------------------- among the lanes


@encodes("bar.warp.sync", tracked=True)
def _bar_warp(program: Program, instruction: Instruction) -> Fields:
    return {"op": "warp_sync", "value": program.source(instruction.operands[0], "b32")}


@encodes("elect.sync")
def _elect(program: Program, instruction: Instruction) -> Fields:
    lane, predicate = instruction.operands[0].split("|")
    members = program.source(instruction.operands[1], "b32")
    return {"op": "elect", "d": program.sink(lane, "b32"), "a": program.sink(predicate, "pred"), "value": members}


@encodes("shfl.sync")
def _shfl(program: Program, instruction: Instruction) -> Fields:
    names = instruction.operands[0].split("|")
    a, b, c, members = (program.source(operand, "u32") for operand in instruction.operands[1:])
    valid = program.sink(names[1] if len(names) > 1 else "_", "pred")
    mode = SHUFFLES[instruction.parts[2]]
    d = program.sink(names[0], "b32")
    return {"op": "shfl", "d": d, "a": a, "b": b, "c": c, "count": valid, "flags": mode, "value": members}


@encodes("vote.sync")
def _vote(program: Program, instruction: Instruction) -> Fields:
    mode, text = instruction.parts[2], instruction.operands[1]
    return {
        "op": "vote",
        "d": program.sink(instruction.operands[0], "b32" if mode == "ballot" else "pred"),
        "a": program.source(text.removeprefix("!"), "pred"),
        "flags": VOTES[mode] | text.startswith("!") << OPERATION_SHIFT,
        "value": program.source(instruction.operands[2], "b32"),
    }


# ----------------------------------------------------------------------------------------------------------- mbarriers


@encodes("mbarrier.try_wait", tracked=True)
def _try_wait(program: Program, instruction: Instruction) -> Fields:
    kind = "u32" if "parity" in instruction.parts else "u64"
    fields = program.address(instruction.operands[1])
    place = program.sink(instruction.operands[0], "pred")
    return {
        "op": "try_wait",
        "d": place,
        "b": program.source(instruction.operands[2], kind),
        "size": _size(kind),
        **fields,
    }


@encodes("mbarrier.arrive", "mbarrier.expect_tx", tracked=True)
def _arrive(program: Program, instruction: Instruction) -> Fields:
    parts, operands = instruction.parts, list(instruction.operands)
    need("noComplete" not in parts)
    d = program.sink(operands.pop(0) if not operands[0].startswith("[") else "_", "b64")
    fields = program.address(operands[0])
    amount = program.source(operands[1], "u32") if len(operands) > 1 else 0
    fields["flags"] |= (ARRIVES if parts[1] == "arrive" else 0) | (ANNOUNCES if "expect_tx" in parts else 0)
    return {"op": "arrive", "d": d, "b": amount, "count": int(len(operands) > 1), **fields}


@encodes("stmatrix.sync", "ldmatrix.sync", tracked=True)
def _matrix(program: Program, instruction: Instruction) -> Fields:
    parts, operands = instruction.parts, list(instruction.operands)
    need("m8n8" in parts and instruction.type == "b16")
    tiles = next(int(part[1:]) for part in parts if part in ("x1", "x2", "x4"))
    stores = parts[0] == "stmatrix"
    names = program.assembler.vector(operands[1 if stores else 0])
    need(len(names) == tiles)
    places = [program.source(name, "b32") if stores else program.sink(name, "b32") for name in names]
    fields = program.address(operands[0 if stores else 1])
    fields["flags"] |= SIGNED if "trans" in parts else 0
    return {"op": parts[0], "d": program.list_of(places), "count": tiles, **fields}
