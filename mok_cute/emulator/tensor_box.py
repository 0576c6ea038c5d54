"""The box of a tensor copy: which bytes of global memory it covers, and how they lie in shared memory.

Shared memory holds the box dense, dimension 0 fastest, its 16-byte chunks swizzled. Elements of 4 and 6 bits may be
stored sixteen to 16 bytes: packed in the first 8 or 12 of them, padding behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.tensor_map import TensorMap

if TYPE_CHECKING:
    from mok_cute.emulator.device import Cta
    from mok_cute.emulator.memory import DeviceMemory

Bytes = npt.NDArray[np.uint8]
PADDED = {"b4_in_bytes": 8, "b6_in_bytes": 12}  # bytes that mean something of each 16
GATHERED_ROWS = 4  # of a copy with tile::gather4 or scatter4


@dataclass(frozen=True)
class Box:
    """Rows of dimension 0 in global memory."""

    tensor: TensorMap
    rows: npt.NDArray[np.uint64]  # address of the first element inside the tensor, for each row in order
    inside: npt.NDArray[np.bool_]  # rows that lie inside
    row_bytes: int  # in global memory
    skip_bytes: int  # of each row, that lie before the tensor
    copied_bytes: int  # of each row, that lie inside

    @property
    def smem_bytes(self) -> int:
        """What it takes in shared memory and reports to a barrier."""
        useful = PADDED.get(self.tensor.dtype, 16)
        return len(self.rows) * self.row_bytes // useful * 16 if useful < 16 else len(self.rows) * self.row_bytes

    def chunks(self, cta: Cta, offset: int) -> npt.NDArray[np.int64]:
        """Indices of its 16-byte chunks in shared memory, in the order of the box."""
        if offset % 128:
            raise KernelFault(f"TMA: shared memory offset {offset:#x} is not a multiple of 128")
        num_bytes = self.smem_bytes
        if num_bytes % 16:
            raise KernelFault(f"TMA: a box of {num_bytes} bytes is not a multiple of 16")
        cta.check_shared(offset, num_bytes)
        places: npt.NDArray[np.int64] = self.tensor.swizzled(offset + np.arange(0, num_bytes, 16)) // 16
        return places

    def to_chunks(self, data: Bytes) -> npt.NDArray[np.void]:
        """(rows, row bytes) as ``read_box`` gives them -> 16-byte chunks of shared memory."""
        useful = PADDED.get(self.tensor.dtype, 16)
        if useful < 16:
            padded = np.zeros((data.size // useful, 16), np.uint8)
            padded[:, :useful] = data.reshape(-1, useful)
            data = padded
        chunks: npt.NDArray[np.void] = data.reshape(-1, 16).view("V16").ravel()
        return chunks

    def from_chunks(self, chunks: npt.NDArray[np.void]) -> Bytes:
        """The reverse of ``to_chunks``."""
        useful = PADDED.get(self.tensor.dtype, 16)
        data = np.ascontiguousarray(chunks).view(np.uint8).reshape(-1, 16)[:, :useful]
        return np.ascontiguousarray(data).reshape(len(self.rows), self.row_bytes)


def _check(tensor: TensorMap) -> None:
    if tensor.interleave or any(step != 1 for step in tensor.element_strides) or tensor.swizzle_atom_flip:
        raise KernelFault(f"TMA: interleaved and strided tensors and flipped atoms are not known here: {tensor}")


def box_at(tensor: TensorMap, coordinates: list[int]) -> Box:
    """The box that begins at these coordinates, one for each dimension."""
    _check(tensor)
    rows, inside = np.array([tensor.address], np.int64), np.ones(1, np.bool_)
    for dim in range(tensor.rank - 1, 0, -1):
        position = coordinates[dim] + np.arange(tensor.box[dim])
        valid = (position >= 0) & (position < tensor.dims[dim])
        rows = (rows[:, None] + (np.where(valid, position, 0) * tensor.strides_bytes[dim - 1])[None, :]).ravel()
        inside = (inside[:, None] & valid[None, :]).ravel()
    return _along_rows(tensor, rows, inside, coordinates[0])


def box_of_rows(tensor: TensorMap, coordinates: list[int]) -> Box:
    """tile::gather4 and scatter4: a column and four rows, which need not follow each other."""
    _check(tensor)
    if tensor.rank != 2 or tensor.box[1] != 1:
        raise KernelFault(f"TMA: gather4 and scatter4 need rank 2 and a box of one row, not {tensor}")
    column, *indices = coordinates
    position = np.array(indices, np.int64)
    inside = (position >= 0) & (position < tensor.dims[1])
    rows = tensor.address + np.where(inside, position, 0) * tensor.strides_bytes[0]
    return _along_rows(tensor, rows, inside, column)


def _along_rows(tensor: TensorMap, rows: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], start: int) -> Box:
    """Clip dimension 0."""
    bits = tensor.element_bits
    first, last = max(start, 0), min(start + tensor.box[0], tensor.dims[0])
    count = max(last - first, 0)
    skipped = first - start if count else 0
    if any(number * bits % 8 for number in (first, skipped, count, tensor.box[0])):
        raise KernelFault(f"TMA: column {start} of {tensor} does not begin or end at a byte")
    return Box(
        tensor,
        (rows + first * bits // 8).astype(np.uint64),
        inside,
        tensor.box[0] * bits // 8,
        skipped * bits // 8,
        count * bits // 8,
    )


def read_box(memory: DeviceMemory, box: Box) -> Bytes:
    """(rows, row bytes), zeros (or NaN) outside the tensor."""
    fill = 0xFF if box.tensor.oob_fill == "nan" else 0
    data = np.full((len(box.rows), box.row_bytes), fill, np.uint8)
    if not box.copied_bytes:
        return data
    rows = box.rows[box.inside]
    part = slice(box.skip_bytes, box.skip_bytes + box.copied_bytes)
    if box.copied_bytes % 16 == 0 and not (rows & np.uint64(15)).any():
        chunks = (rows[:, None] + np.arange(0, box.copied_bytes, 16, dtype=np.uint64)[None, :]).ravel()
        data[box.inside, part] = memory.gather(chunks, 16).reshape(len(rows), box.copied_bytes)
    else:
        for row, address in zip(np.flatnonzero(box.inside), rows, strict=True):
            data[row, part] = memory.read(int(address), box.copied_bytes, 1)
    return data


def write_box(memory: DeviceMemory, box: Box, data: Bytes) -> None:
    """Rows and bytes outside the tensor are dropped."""
    if not box.copied_bytes:
        return
    rows = box.rows[box.inside]
    kept = data[box.inside, box.skip_bytes : box.skip_bytes + box.copied_bytes]
    for address, row in zip(rows, kept, strict=True):
        memory.write(int(address), row)
