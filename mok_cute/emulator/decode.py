"""PTX text -> kernels as lists of instructions, with names resolved and source lines attached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mok_cute.errors import MokError

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8, "f32x2": 8, "b128": 16},
}

# One statement: a brace, a label, a source line mark, or text up to a semicolon (which may hold vector braces).
STATEMENT = re.compile(
    r"(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<loc>\.loc\b[^\n]*\n)|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[\w\s.]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*$")
VARIABLE = re.compile(  # not the .ptr of a parameter, where a number follows .align
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(?!align\b)(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
)
SPACE = re.compile(r"\s*")
NAME = re.compile(r"[%A-Za-z_$][\w$]*")


class DecodeError(MokError):
    """The text is not PTX that this decoder understands."""


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with all modifiers: "add.s32"
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    line: int  # in the PTX text, from 1
    source: str  # "file:line" of the program, empty without line information

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def type(self) -> str:
        return self.opcode.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Parameter:
    name: str
    num_bytes: int
    align: int


@dataclass(frozen=True)
class Variable:
    name: str
    space: str
    align: int
    num_bytes: int  # 0: as many as the launch gives (dynamic shared memory)


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]]  # reqntid, maxntid, ...
    variables: dict[str, Variable]
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of an instruction
    vectors: dict[str, list[str]] = field(default_factory=dict)  # name -> the registers of its elements


def split_operands(text: str) -> list[str]:
    """Splits at commas that stand outside every bracket."""
    operands, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            operands.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*operands, last] if last else operands


def parse_module(ptx: str) -> dict[str, Kernel]:
    """All kernels of a PTX module by name."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), ptx, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    files = {int(number): name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    kernels: dict[str, Kernel] = {}
    bodies = []
    for match in ENTRY.finditer(text):
        directives = {
            name: tuple(int(number) for number in numbers.split(",") if number.strip())
            for name, numbers in re.findall(r"\.(\w+)\s*((?:\d+\s*,?\s*)*)", match[3])
        }
        parameters = [_parameter(part) for part in split_operands(match[2])]
        kernels[match[1]] = Kernel(match[1], parameters, directives, {})
        bodies.append((kernels[match[1]], match.end(), _closing(text, match.end())))
    outside = text
    for _, begin, end in reversed(bodies):
        outside = outside[:begin] + outside[end:]
    variables = {variable.name: variable for variable in map(_variable, VARIABLE.finditer(outside))}
    for kernel, begin, end in bodies:
        kernel.variables.update(variables)
        _parse_body(kernel, text[begin:end], text.count("\n", 0, begin) + 1, files)
    return kernels


def _closing(text: str, begin: int) -> int:
    depth = 1
    for match in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return begin + match.start()
    raise DecodeError("a kernel body has no closing brace")


def _parameter(text: str) -> Parameter:
    match = PARAMETER.match(text.strip())
    if match is None:
        raise DecodeError(f"kernel parameter not understood: {text.strip()}")
    size = TYPE_BYTES[match[2]]
    return Parameter(match[3], size * int(match[4] or 1), int(match[1] or size))


def _variable(match: re.Match[str]) -> Variable:
    size = TYPE_BYTES[match[3]]
    count = 1 if match[5] is None else int(match[5] or 0)
    return Variable(match[4], match[1], int(match[2] or size), size * count)


def _statements(body: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, position) of each statement."""
    position = 0
    while True:
        space = SPACE.match(body, position)
        position = space.end() if space else position
        if position >= len(body):
            return
        match = STATEMENT.match(body, position)
        if match is None:
            raise DecodeError(f"statement not understood: {body[position : position + 80]!r}")
        kind = match.lastgroup or ""
        yield kind, match[kind].strip(), position
        position = match.end()


class _Scope:
    """A pair of braces: inline assembly declares registers and labels that hide those outside."""

    def __init__(self, outer: _Scope | None, number: int) -> None:
        self.outer, self.number = outer, number
        self.names: set[str] = set()

    def resolve(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return f"{name}@{scope.number}" if scope.number else name
            scope = scope.outer
        return name


def _parse_body(kernel: Kernel, body: str, first_line: int, files: dict[int, str]) -> None:
    scope = _Scope(None, 0)
    placed: list[tuple[str, str, int, _Scope]] = []
    count = 0
    for kind, text, position in _statements(body):
        if kind == "open":
            count += 1
            scope = _Scope(scope, count)
        elif kind == "close":
            assert scope.outer is not None
            scope = scope.outer
        else:
            if kind == "label":
                scope.names.add(text)
            elif text.startswith(".reg"):
                _declare(kernel, text, scope)
            elif (variable := VARIABLE.match(text)) is not None:
                kernel.variables[variable[4]] = _variable(variable)
            placed.append((kind, text, position, scope))

    source, line, counted = "", first_line, 0
    for kind, text, position, scope in placed:
        line, counted = line + body.count("\n", counted, position), position
        if kind == "label":
            kernel.labels[scope.resolve(text)] = len(kernel.instructions)
        elif kind == "loc":
            _, number, row, *_ = text.split()
            source = f"{files.get(int(number), number)}:{row}"
        elif text and not text.startswith("."):
            kernel.instructions.append(_instruction(text, scope, line, source, kernel.vectors))


def _declare(kernel: Kernel, text: str, scope: _Scope) -> None:
    _, kind, names = text.split(None, 2)
    elements = ""
    if kind in (".v2", ".v4"):
        elements = "xyzw"[: int(kind[2])]
        kind, names = names.split(None, 1)
    for name in split_operands(names):
        if elements:
            scope.names.add(name)
            whole = scope.resolve(name)
            kernel.vectors[whole] = [f"{whole}.{element}" for element in elements]
            kernel.registers.update(dict.fromkeys(kernel.vectors[whole], kind[1:]))
            continue
        many = re.match(r"(.*)<(\d+)>$", name)
        for single in [f"{many[1]}{index}" for index in range(int(many[2]))] if many else [name]:
            scope.names.add(single)
            kernel.registers[scope.resolve(single)] = kind[1:]


def _instruction(text: str, scope: _Scope, line: int, source: str, vectors: dict[str, list[str]]) -> Instruction:
    text = " ".join(text.split())
    match = re.match(r"(?:@(!?)([%\w$]+)\s+)?(\S+)\s*(.*)$", text)
    if match is None:
        raise DecodeError(f"line {line}: instruction not understood: {text}")
    operands = match[4]
    if scope.number or match[3].startswith("bra"):
        operands = NAME.sub(lambda name: scope.resolve(name[0]), operands)
    predicate = scope.resolve(match[2]) if match[2] else None
    listed = tuple(
        f"{{{', '.join(vectors[operand])}}}" if operand in vectors else operand for operand in split_operands(operands)
    )
    return Instruction(match[3], listed, predicate, bool(match[1]), text, line, source)
