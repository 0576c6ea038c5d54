"""Which operands a GEMM task multiplies: the forward products, token rows times a weight, by task kind.

A tile is 128 token rows (operand A) times 256 weight rows (operand B, two boxes of 128): for gate/up one box of gate
and one of up weights of the same hidden columns, for down two neighbouring boxes of the down weight.
"""

from dataclasses import dataclass

from mok_cute.shapes import MoEShape
from mok_cute.templates.scheduler import order


@dataclass(frozen=True)
class Operands:
    a: str  # tensor of token rows, (rows, contraction), K-major
    b: tuple[str, str]  # the two boxes of weight rows, (rows, contraction, experts), K-major
    contraction: str  # the MoEShape field that both run over
    adjacent: bool  # True: the boxes are tiles 2*col and 2*col+1 of one weight; False: tile col of two weights


ROWS_GEMM = {
    order.SHARED_GATE_UP: Operands("x", ("shared_gate", "shared_up"), "hidden", False),
    order.GATE_UP: Operands("x_ring", ("gate", "up"), "hidden", False),
    order.SHARED_DOWN: Operands("shared_hidden", ("shared_down", "shared_down"), "shared_intermediate", True),
    order.DOWN: Operands("hidden_ring", ("down", "down"), "intermediate", True),
}


def built_kinds(shape: MoEShape) -> tuple[int, ...]:
    """The GEMM task kinds that this shape needs."""
    if shape.shared_intermediate:
        return (order.SHARED_GATE_UP, order.GATE_UP, order.SHARED_DOWN, order.DOWN)
    return (order.GATE_UP, order.DOWN)


def k_tiles(kind: int, shape: MoEShape, tile_k: int) -> int:
    return int(getattr(shape, ROWS_GEMM[kind].contraction)) // tile_k
