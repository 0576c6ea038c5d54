"""Figures of compiled kernels, read from PTX, cubin and host code without a GPU or a tool kit.

A change in them is a reviewed change, so they are few and exact: registers, stack, shared and tensor memory, size of
the code, the loop over the contraction, and how often each matrix, copy and barrier instruction stands in the code.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mok_cute.errors import CompileError

FAMILIES = (
    "atom",
    "bar",
    "barrier",
    "clusterlaunchcontrol",
    "cp",
    "fence",
    "ldmatrix",
    "mbarrier",
    "membar",
    "mma",
    "multimem",
    "red",
    "setmaxnreg",
    "stmatrix",
    "tcgen05",
    "wgmma",
)


@dataclass(frozen=True)
class KernelFigures:
    """Figures of one compiled host function: its kernels' largest values; instructions are summed over them.

    spill_bytes         bytes of a thread's stack frame: spilled registers and arrays that are not in registers. Both
                        cost local memory traffic, and the cubin does not tell them apart
    smem_bytes          shared memory of a CTA, static and dynamic
    dynamic_smem_bytes  None where the host code was not given; then smem_bytes is the static part
    tmem_columns        columns of tensor memory that a CTA allocates
    code_bytes          machine code of the kernels
    k_step              PTX instructions of one turn of the loop that multiplies, by what they are; see ``k_step``
    instructions        opcode with modifiers -> count in the PTX
    """

    kernels: tuple[str, ...]
    registers: int
    spill_bytes: int
    smem_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None
    tmem_columns: int
    code_bytes: int
    k_step: dict[str, int]
    instructions: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kernels": list(self.kernels)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> KernelFigures:
        return cls(**{**fields, "kernels": tuple(fields["kernels"])})


def kernel_figures(ptx: str, cubin: bytes, host_ir: str | None) -> KernelFigures:
    """Figures of a compiled function. ``host_ir`` is the lowered host code as text, which holds the launches."""
    resources = cubin_resources(cubin)
    if not resources:
        raise CompileError(f"the cubin of {len(cubin)} bytes holds no kernel")
    static = max(r.static_smem_bytes for r in resources.values())
    dynamic = None if host_ir is None else max(launch_smem_bytes(host_ir), default=0)
    return KernelFigures(
        kernels=tuple(sorted(resources)),
        registers=max(r.registers for r in resources.values()),
        spill_bytes=max(r.stack_bytes for r in resources.values()),
        smem_bytes=static + (dynamic or 0),
        static_smem_bytes=static,
        dynamic_smem_bytes=dynamic,
        tmem_columns=tmem_columns(ptx),
        code_bytes=sum(r.code_bytes for r in resources.values()),
        k_step=k_step(ptx),
        instructions=count_instructions(ptx),
    )


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INSTRUCTION = re.compile(
    # after a line start, a statement's end, a brace or a label; a predicate may stand before the opcode
    r"(?:^|[;{}]|^\s*[\w$]+:)\s*(?:@!?%?[\w$]+\s+)?((?:" + "|".join(FAMILIES) + r")(?:(?:\.|::)\w+)*)(?=[\s;])",
    re.MULTILINE,
)


def count_instructions(ptx: str) -> dict[str, int]:
    """Opcode with modifiers -> count, for matrix, copy and barrier opcodes, sorted by opcode."""
    return dict(sorted(Counter(_INSTRUCTION.findall(_COMMENT.sub("", ptx))).items()))


_MULTIPLY = re.compile(r"(?:tcgen05\.mma|wgmma\.mma_async)\.")
_LABEL = re.compile(r"^([\w$]+):\s*")
_OPCODE = re.compile(r"^(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)")


def k_step(ptx: str) -> dict[str, int]:
    """The smallest loop around all multiplications of tiles, one turn of which is a K step.

    multiply   instructions that start a product in the tensor cores
    wait       looks at an mbarrier; one that finds it closed is repeated
    other      everything else: descriptors, elections, commits, counters

    Empty where there are no such products, or where no loop holds all of them.
    """
    statements: list[str] = []  # opcode, or the target behind "bra "
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for text in re.split(r"[;\n]", _COMMENT.sub("", ptx)):
        text = text.strip(" \t{}")
        while label := _LABEL.match(text):
            labels[label[1]] = len(statements)
            text = text[label.end() :].strip(" \t{}")
        opcode = _OPCODE.match(text)
        if opcode is None:  # a directive, or the rest of an instruction of several lines
            continue
        if opcode[1].startswith("bra"):
            target = text.rsplit(None, 1)[-1]
            if target in labels:  # backwards
                loops.append((labels[target], len(statements) + 1))
        statements.append(opcode[1])
    products = [at for at, opcode in enumerate(statements) if _MULTIPLY.match(opcode)]
    around = [(end - start, start) for start, end in loops if products and start <= products[0] and products[-1] < end]
    if not around:
        return {}
    length, start = min(around)
    body = statements[start : start + length]
    multiply = sum(bool(_MULTIPLY.match(opcode)) for opcode in body)
    wait = sum(opcode.startswith("mbarrier.try_wait") for opcode in body)
    return {"multiply": multiply, "wait": wait, "other": length - multiply - wait}


def tmem_columns(ptx: str) -> int:
    """The largest constant column count of a ``tcgen05.alloc``; 0 where there is none."""
    columns = 0
    for operand in re.findall(r"\btcgen05\.alloc\.[\w.:]+\s+\[[^\]]+\]\s*,\s*([%\w]+)\s*;", _COMMENT.sub("", ptx)):
        if operand.startswith("%"):
            values = re.findall(r"\bmov\.[bu]32\s+" + re.escape(operand) + r"\s*,\s*(\d+)\s*;", ptx)
            if len(values) != 1:
                raise CompileError(f"tcgen05.alloc takes {operand}, which is not a constant; allocate a constant.")
            operand = values[0]
        columns = max(columns, int(operand, 0))
    return columns


def launch_smem_bytes(host_ir: str) -> list[int]:
    """Dynamic shared memory of each launch: field 2 of the launch configuration that the host code fills."""
    sizes = []
    field = r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\][^\n]*struct<\(array<3 x i32>, array<3 x i32>, i64"
    for place in re.finditer(field, host_ir):
        pattern = re.compile(r"llvm\.store (%\w+), " + re.escape(place[1]) + r" : i64")
        store = pattern.search(host_ir, place.end())
        if store is None:
            continue
        constant = re.escape(store[1]) + r" = llvm\.mlir\.constant\((\d+) : i64\)"
        values = re.findall(constant, host_ir[: store.start()])
        if not values:
            raise CompileError("a launch computes its shared memory at run time; give it a constant size.")
        sizes.append(int(values[-1]))  # names repeat between functions: the nearest definition above is meant
    return sizes


class Resources(NamedTuple):
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int


class _Section(NamedTuple):
    offset: int
    size: int
    link: int


_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info whose payload is (symbol index, value)
_SIZED = 4  # the attribute format with a payload of its own; the others fit in the four bytes of the header
_ALIGNMENT_ONLY = 1024  # a section up to this size is the alignment of the dynamic array, not memory


def cubin_resources(cubin: bytes) -> dict[str, Resources]:
    """Kernel name -> resources, from the section .nv.info of the cubin, an ELF file."""
    try:
        return _read_resources(cubin)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise CompileError(f"the cubin of {len(cubin)} bytes cannot be read: {error!r}") from error


def _read_resources(cubin: bytes) -> dict[str, Resources]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found: dict[str, dict[int, int]] = {}
    info = sections[".nv.info"]
    at, end = info.offset, info.offset + info.size
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute in (_REGCOUNT, _FRAME_SIZE) and size == 8:
            symbol, value = struct.unpack_from("<II", cubin, at)
            found.setdefault(symbols[symbol], {})[attribute] = value
        at += size
    resources = {}
    for name, values in found.items():
        if "$__internal" in name:  # a helper that the assembler adds; its registers count in the caller
            continue
        static = sections.get(".nv.shared." + name)
        static_bytes = static.size if static is not None and static.size > _ALIGNMENT_ONLY else 0
        code = sections[".text." + name].size
        resources[name] = Resources(values[_REGCOUNT], values.get(_FRAME_SIZE, 0), static_bytes, code)
    return resources


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()


def _sections(cubin: bytes) -> dict[str, _Section]:
    table = struct.unpack_from("<Q", cubin, 40)[0]
    entry_bytes, count, names_idx = struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = rows[names_idx][4]
    return {_text(cubin, names + row[0]): _Section(row[4], row[5], row[6]) for row in rows}


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    symtab, strtab = sections[".symtab"], sections[".strtab"]
    starts = range(symtab.offset, symtab.offset + symtab.size, 24)
    return [_text(cubin, strtab.offset + struct.unpack_from("<I", cubin, start)[0]) for start in starts]
