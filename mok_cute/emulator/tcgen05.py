"""tcgen05.mma, cp and commit, of one CTA or of a pair (cta_group::2).

A matrix operation, a copy to tensor memory and the commits behind them form one queue per issuing CTA and happen in
order, at times the scheduler chooses. Products are exact in single precision and summed there.

Of a pair, each CTA's shared memory (or tensor memory) holds its half of the rows of A and half of the rows of B, at the
same addresses; each CTA's tensor memory receives its half of the rows of D.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.async_copy import place_of, update_barrier
from mok_cute.emulator.decode import Instruction
from mok_cute.emulator.execute import Assembler, KernelFault, Mask, Source, Step, lanes_of, of_lane, opcode
from mok_cute.emulator.matrix_operand import K_BYTES, SmemDescriptor, read_operand
from mok_cute.emulator.number_formats import TO_F32, VALUES
from mok_cute.emulator.tensor_memory import LANES, TensorMemory, group_size, pair_of, tensor_memory

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta, Warp

__all__ = ["TensorMemory"]

Matrix = npt.NDArray[np.float32]
UNIT = "tensor core"

# By kind: bytes of an element in shared memory, and the operand types by their number in the instruction descriptor.
EIGHT_BITS = {0: "e4m3", 1: "e5m2", 3: "e2m3_in_chunks", 4: "e3m2_in_chunks", 5: "e2m1_in_chunks"}
KINDS: dict[str, tuple[int, dict[int, str]]] = {
    "f16": (2, {0: "f16", 1: "bf16"}),
    "tf32": (4, {2: "tf32"}),
    "f8f6f4": (1, EIGHT_BITS),
    "i8": (1, {0: "u8", 1: "s8"}),
    "mxf8f6f4": (1, EIGHT_BITS),
    "mxf4": (1, {1: "e2m1"}),
    "mxf4nvf4": (1, {1: "e2m1"}),
}
ACCUMULATORS = {0: "f16", 1: "f32", 2: "s32"}


def ctas_of(warp: Warp, group: int) -> list[Cta]:
    return [warp.cta] if group == 1 else pair_of(warp.cta)


def _enqueue(warp: Warp, instruction: Instruction, operation: Callable[[], None]) -> None:
    """One operation behind those of the same CTA: whichever entry the scheduler draws, the oldest one happens."""
    from mok_cute.emulator.device import AsyncOperation

    queue = tensor_memory(warp.cta).queue
    queue.append(warp.tracker.in_pipe(warp, instruction, operation))
    steps = deque([lambda: queue.popleft()()])
    warp.cta.grid.scheduler.post(warp.cta.grid, AsyncOperation(UNIT, steps, instruction.text))


@opcode("tcgen05.commit")
def _commit(asm: Assembler, instruction: Instruction) -> Step:
    """[barrier] {, mask}: one arrival behind all that this thread has issued; with a mask, in each of those CTAs."""
    group_size(asm, instruction)
    address = asm.address(instruction.operands[0])[0]
    multicast = asm.source(instruction.operands[1], "u16") if "multicast::cluster" in instruction.opcode else None

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            cta, offset = place_of(warp, int(address(warp)[lane]))
            ctas = [cta]
            if multicast is not None:
                chosen = of_lane(multicast(warp), lane)
                ctas = [warp.cta.peer(rank) for rank in range(16) if chosen >> rank & 1]
            _enqueue(warp, instruction, _arrivals(ctas, offset))

    return step


def _arrivals(ctas: list[Cta], offset: int) -> Callable[[], None]:
    def arrive() -> None:
        for cta in ctas:
            update_barrier(cta, offset, 1, 0)

    return arrive


# --------------------------------------------------------------------------------------------------- instruction forms


@dataclass(frozen=True)
class Form:
    """An instruction descriptor of one kind, taken apart."""

    kind: str
    m: int
    n: int
    a_type: str
    b_type: str
    accumulator: str
    negative: bool
    a_mn_major: bool
    b_mn_major: bool
    scale_type: str
    a_scale_byte: int
    b_scale_byte: int

    @classmethod
    def decode(cls, bits: int, kind: str, scaled: bool, group: int) -> Form:
        _, types = KINDS[kind]
        unknown = KernelFault(
            f"tcgen05.mma: instruction descriptor {bits:#x} is not known to the virtual GPU for kind::{kind} and "
            f"cta_group::{group}: it knows dense operands, M of {64 * group} or {128 * group}, N from 8 to 256"
        )
        a, b = bits >> 7 & 7, bits >> 10 & 7
        m = (bits >> 27 & 3) << 7 if scaled else (bits >> 24 & 31) << 4
        n = (bits >> 17 & 63) << 3
        number = 1 if scaled else bits >> 4 & 3
        if bits >> 2 & 1 or a not in types or b not in types or number not in ACCUMULATORS:
            raise unknown
        if m not in (64 * group, 128 * group) or not 8 <= n <= 256 or n % (8 * group):
            raise unknown
        if (ACCUMULATORS[number] == "s32") != (kind == "i8") or (scaled and bits >> 31):
            raise unknown
        return cls(
            kind=kind,
            m=m,
            n=n,
            a_type=types[a],
            b_type=types[b],
            accumulator=ACCUMULATORS[number],
            negative=bool((bits >> 13 ^ bits >> 14) & 1),
            a_mn_major=bool(bits >> 15 & 1),
            b_mn_major=bool(bits >> 16 & 1),
            scale_type="ue8m0" if bits >> 23 & 1 else "ue4m3",
            a_scale_byte=bits >> 29 & 3,
            b_scale_byte=bits >> 4 & 3,
        )


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma with the values that its operands had."""

    ctas: list[Cta]
    form: Form
    target: int  # D in tensor memory
    a: int  # descriptor, or address in tensor memory
    a_in_tensor_memory: bool
    b: int
    accumulate: bool
    halvings: int  # of D before it is added to
    disabled: list[int]  # masks of lanes of D that stay as they are, 32 lanes each
    scales: tuple[int, int] | None  # addresses of the scales of A and B
    block: int  # elements of K that share a scale

    def execute(self) -> None:
        form, group = self.form, len(self.ctas)
        size, _ = KINDS[form.kind]
        place = SmemDescriptor.of_tcgen05(self.b)
        b = np.concatenate(
            [
                TO_F32[form.b_type](read_operand(cta, place, form.n // group, size, mn_major=form.b_mn_major))
                for cta in self.ctas
            ]
        )
        rows = form.m // group
        for number, cta in enumerate(self.ctas):
            # (lanes, columns): where the rows lie, and which columns of D each of these parts has.
            right = b
            if self.scales is not None:
                right = b * self._scales(cta, self.scales[1], form.n, form.b_scale_byte, b.shape[1])
            for lanes, first, last in _parts(form, group):
                a = self._a(cta, rows, lanes)
                if self.scales is not None:
                    a = a * self._scales(cta, self.scales[0], rows, form.a_scale_byte, a.shape[1])
                product = a @ right[first:last].T
                self._add(cta, -product if form.negative else product, lanes, number)

    def _a(self, cta: Cta, rows: int, lanes: npt.NDArray[np.int64]) -> Matrix:
        form = self.form
        if self.a_in_tensor_memory:
            cells = tensor_memory(cta).block(self.a & 0xFFFF, LANES, K_BYTES // 4)
            columns = (self.a & 0xFFFF) + np.arange(K_BYTES // 4)
            cta.grid.scheduler.tracker.tensor_used(cta, (self.a >> 16) + lanes, columns, reads=True, writes=False)
            return TO_F32[form.a_type](np.ascontiguousarray(cells[(self.a >> 16) + lanes]).view(np.uint8))
        size, _ = KINDS[form.kind]
        place = SmemDescriptor.of_tcgen05(self.a)
        return TO_F32[form.a_type](read_operand(cta, place, rows, size, mn_major=form.a_mn_major))

    def _scales(self, cta: Cta, address: int, rows: int, byte: int, depth: int) -> Matrix:
        """(rows, depth): row m has four scales, of consecutive blocks, in lane m % 32, column m // 32."""
        count = depth // self.block
        cells = tensor_memory(cta).block(address & 0xFFFF, 32, -(-rows // 32))
        row = np.arange(rows)
        columns = (address & 0xFFFF) + np.arange(-(-rows // 32))
        cta.grid.scheduler.tracker.tensor_used(cta, np.arange(32), columns, reads=True, writes=False)
        codes = np.ascontiguousarray(cells[row % 32, row // 32]).view(np.uint8).reshape(rows, 4)
        if byte + count > 4:
            raise KernelFault(f"tcgen05.mma: {count} scales from byte {byte} on: a cell has 4")
        return np.repeat(VALUES[self.form.scale_type][codes[:, byte : byte + count]], self.block, axis=1)

    def _add(self, cta: Cta, product: Matrix, lanes: npt.NDArray[np.int64], number: int) -> None:
        """Into the tensor memory of one CTA, the ``number``-th of its group."""
        block = tensor_memory(cta).block(self.target & 0xFFFF, LANES, product.shape[1])
        lanes = (self.target >> 16) + lanes
        if lanes.max() >= LANES:
            raise KernelFault(f"tcgen05.mma: accumulator at tensor memory {self.target:#x} reaches beyond lane {LANES}")
        kept = product
        if self.disabled:
            words = self.disabled[4 * number : 4 * number + 4]
            enabled = np.array([not words[lane // 32] >> (lane % 32) & 1 for lane in lanes])
            lanes, kept = lanes[enabled], product[enabled]
        columns = (self.target & 0xFFFF) + np.arange(product.shape[1])
        cta.grid.scheduler.tracker.tensor_used(cta, lanes, columns, reads=self.accumulate, writes=True)
        if self.form.accumulator == "s32":
            sums = block.view(np.int32)
            whole = np.rint(kept).astype(np.int32)
            sums[lanes] = sums[lanes] + whole if self.accumulate else whole
            return
        if self.form.accumulator == "f16":  # in the lower half of a cell
            halves = block.view(np.float16)[:, ::2]
            before = halves[lanes].astype(np.float32)
            block[lanes] = self._sum(before, kept).astype(np.float16).view(np.uint16)
            return
        floats = block.view(np.float32)
        floats[lanes] = self._sum(floats[lanes], kept)

    def _sum(self, before: Matrix, product: Matrix) -> Matrix:
        if not self.accumulate:
            return product
        return before * np.float32(2.0**-self.halvings) + product if self.halvings else before + product


def _parts(form: Form, group: int) -> list[tuple[npt.NDArray[np.int64], int, int]]:
    """Lanes of the rows of D in one CTA, and the columns of D that lie there."""
    rows = form.m // group
    if rows == LANES:
        return [(np.arange(LANES), 0, form.n)]
    row = np.arange(rows)
    if group == 1:  # 64 rows use the first half of each group of 32 lanes
        return [(row // 16 * 32 + row % 16, 0, form.n)]
    return [(row, 0, form.n // 2), (LANES // 2 + row, form.n // 2, form.n)]


MMA = re.compile(
    r"tcgen05\.mma\.cta_group::[12]\.kind::(?P<kind>\w+)"
    r"(?P<scaled>\.block_scale)?(?:\.scale_vec::(?P<vector>[124])X|\.block(?P<block>16|32))?"
    r"(?:\.collector::[ab]::(?:discard|lastuse|fill|use))*$"
)


@opcode("tcgen05.mma")
def _mma(asm: Assembler, instruction: Instruction) -> Step:
    """[D], A, B, instruction descriptor {, masks of disabled lanes}, accumulate {, halvings}
    [D], A, B, instruction descriptor, [scales of A], [scales of B], accumulate        with block_scale
    """
    group = group_size(asm, instruction)
    match = MMA.match(instruction.opcode)
    if match is None or match["kind"] not in KINDS or match["kind"].startswith("mx") != bool(match["scaled"]):
        raise ValueError("form")
    kind, scaled = match["kind"], bool(match["scaled"])
    operands = list(instruction.operands)
    target = asm.address(operands[0])[0]
    a_in_tensor_memory = operands[1].startswith("[")
    a = asm.address(operands[1])[0] if a_in_tensor_memory else asm.source(operands[1], "u64")
    b, descriptor = asm.source(operands[2], "u64"), asm.source(operands[3], "u32")
    rest = operands[4:]
    scale_addresses = [asm.address(rest.pop(0))[0] for _ in range(2)] if scaled else []
    masks = [asm.source(name, "u32") for name in asm.vector(rest.pop(0))] if rest[0].startswith("{") else []
    accumulate = asm.source(rest.pop(0), "pred")
    halvings = int(rest.pop(0), 0) if rest else 0
    if rest or (masks and len(masks) != 4 * group):
        raise ValueError("operands")

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            form = Form.decode(of_lane(descriptor(warp), lane), kind, scaled, group)
            disabled = [of_lane(words(warp), lane) for words in masks]
            product = Product(
                ctas=ctas_of(warp, group),
                form=form,
                target=int(target(warp)[lane]),
                a=of_lane(a(warp), lane),
                a_in_tensor_memory=a_in_tensor_memory,
                b=of_lane(b(warp), lane),
                accumulate=bool(of_lane(accumulate(warp), lane)),
                halvings=halvings,
                disabled=disabled if any(disabled) else [],
                scales=_scale_places(warp, lane, scale_addresses) if scaled else None,
                block=_block_size(match, kind),
            )
            _enqueue(warp, instruction, product.execute)

    return step


def _scale_places(warp: Warp, lane: int, addresses: list[Source]) -> tuple[int, int]:
    a, b = (int(address(warp)[lane]) for address in addresses)
    return a, b


def _block_size(match: re.Match[str], kind: str) -> int:
    """Elements of K that share a scale."""
    if match["block"]:
        return int(match["block"])
    depth = 32 if kind == "mxf8f6f4" else 64
    usual = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}.get(kind, 1)
    return depth // int(match["vector"] or usual)


# ---------------------------------------------------------------------------------------------- shared memory to cells

# By shape: rows, bytes of a row, and the first lanes of each copy of these rows (or, of halves: of each half).
COPIES: dict[str, tuple[int, int, list[list[int]]]] = {
    "128x256b": (128, 32, [[0, 32, 64, 96]]),
    "128x128b": (128, 16, [[0, 32, 64, 96]]),
    "64x128b.warpx2::02_13": (64, 16, [[0, 32], [64, 96]]),
    "64x128b.warpx2::01_23": (64, 16, [[0, 64], [32, 96]]),
    "32x128b.warpx4": (32, 16, [[0], [32], [64], [96]]),
}


@opcode("tcgen05.cp")
def _cp(asm: Assembler, instruction: Instruction) -> Step:
    """[to], descriptor: rows of shared memory to lanes; of a pair, in each CTA from its own to its own."""
    group = group_size(asm, instruction)
    shape = ".".join(instruction.parts[3:])
    rows, row_bytes, copies = COPIES[shape]
    address = asm.address(instruction.operands[0])[0]
    descriptor = asm.source(instruction.operands[1], "u64")

    def step(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            to, bits = int(address(warp)[lane]), of_lane(descriptor(warp), lane)
            ctas = ctas_of(warp, group)

            def copy(ctas: list[Cta] = ctas, to: int = to, bits: int = bits) -> None:
                place = SmemDescriptor.of_tcgen05(bits)
                for cta in ctas:
                    words = read_operand(cta, place, rows, row_bytes, row_bytes=row_bytes).view(np.uint32)
                    block = tensor_memory(cta).block(to & 0xFFFF, LANES, row_bytes // 4)
                    columns = (to & 0xFFFF) + np.arange(row_bytes // 4)
                    warp.tracker.tensor_used(cta, np.arange(LANES), columns, reads=False, writes=True)
                    for firsts in copies:
                        for number, first in enumerate(firsts):
                            block[first : first + 32] = words[32 * number : 32 * number + 32]

            _enqueue(warp, instruction, copy)

    return step
