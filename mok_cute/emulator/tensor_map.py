"""The 128-byte descriptor of a tensor copy: bytes to ``TensorMap`` and back.

The host code of the DSL packs it itself, as fields of eight 64-bit words; the other eight words are whatever lay there.
The places of the fields were derived from descriptors that the compiler made for 48 kinds of copy. What was only
inferred is listed in ``GUESSED``; a run that relies on one should say so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok_cute.errors import KernelError

NUM_BYTES = 128
WORDS = 8
MAX_RANK = 5
KIND = 2  # the lowest bits of word 1 in every descriptor of a tiled copy

# name: word, lowest bit, number of bits
FIELDS = {
    "address16": (0, 4, 53),
    "kind": (1, 0, 4),
    "rank_1": (1, 4, 3),
    "dtype": (1, 7, 4),
    "interleave": (1, 11, 2),
    "swizzle": (1, 13, 2),
    "oob_fill": (1, 15, 1),
    "tf32": (1, 16, 1),
    "l2_promotion": (1, 17, 2),
    "swizzle_atom": (1, 19, 2),
    "large": (1, 21, 1),
    **{f"stride{i + 1}_low": place for i, place in enumerate([(1, 32, 32), (2, 0, 32), (2, 32, 32), (3, 0, 32)])},
    **{f"stride{i + 1}_high": (3, 32 + 4 * i, 4) for i in range(4)},
    **{f"dim{i}_1": (4 + i // 2, 32 * (i % 2), 32) for i in range(5)},
    **{f"step{i}_1": (6, 32 + 3 * i, 3) for i in range(5)},
    "box0_1": (6, 56, 8),
    **{f"box{i + 1}_1": (7, 8 * i, 8) for i in range(4)},
}
GUESSED = ("kind", "interleave", "oob_fill", "l2_promotion", "element_strides", "swizzle_atom 2")

# Number in the descriptor, bits of an element in global memory.
DTYPES = {
    "u8": (0, 8),  # and every 8-bit float: a copy does not look inside
    "u16": (1, 16),
    "u32": (2, 32),
    "s32": (3, 32),
    "u64": (4, 64),
    "s64": (5, 64),
    "f16": (6, 16),
    "f32": (7, 32),
    "f32_ftz": (8, 32),
    "f64": (9, 64),
    "bf16": (10, 16),
    "b4": (11, 4),
    "b4_in_bytes": (12, 4),  # a byte each in shared memory
    "b6_in_bytes": (13, 6),
}
TF32 = "tf32"  # number 7 with a bit of its own
SWIZZLES = (0, 32, 64, 128)  # bytes after which the pattern repeats, by the number in the descriptor
SWIZZLE_ATOMS = {0: 16, 1: 32, 2: 32, 3: 64}  # bytes that stay together; 2 also swaps the halves of an atom
INTERLEAVES = (0, 16, 32)  # bytes
LARGE_BYTES = 1 << 17


class TensorMapError(KernelError):
    """Bytes that are not a descriptor, or values that a descriptor cannot hold."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves. Dimension 0 is contiguous.

    dims, box, element_strides   elements, ``rank`` of each; a 4-bit element counts as one
    strides_bytes                of dimensions 1 up to rank - 1; 0 repeats the same data
    swizzle, swizzle_atom        bytes: which 16-byte chunks of shared memory trade places, see ``swizzled``
    interleave                   bytes of an interleaved layout, 0 for none
    oob_fill                     "zero" or "nan": what is read outside the tensor
    """

    dtype: str
    rank: int
    address: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    oob_fill: str = "zero"
    swizzle_atom: int = 16
    swizzle_atom_flip: bool = False
    l2_promotion: int = 2

    @property
    def element_bits(self) -> int:
        """Of an element in global memory."""
        return 32 if self.dtype == TF32 else DTYPES[self.dtype][1]

    @property
    def smem_element_bits(self) -> int:
        return 8 if self.dtype.endswith("_in_bytes") else self.element_bits

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy brings to shared memory and reports to its barrier, those outside the tensor included."""
        count = 1
        for extent in self.box:
            count *= extent
        return count * self.smem_element_bits // 8

    @classmethod
    def decode(cls, raw: bytes | npt.NDArray[np.uint8]) -> TensorMap:
        """From the bytes of a descriptor; only the first 64 of them mean anything."""
        content = bytes(raw)
        if len(content) < 8 * WORDS:
            raise TensorMapError(f"tensor map of {len(content)} bytes: a descriptor has {NUM_BYTES}.")
        words = struct.unpack_from(f"<{WORDS}Q", content)
        value = {name: words[word] >> low & ((1 << bits) - 1) for name, (word, low, bits) in FIELDS.items()}
        rank = value["rank_1"] + 1
        names = {number: name for name, (number, _) in DTYPES.items()}
        if value["kind"] != KIND or rank > MAX_RANK or value["dtype"] not in names:
            raise TensorMapError(
                f"these bytes are no descriptor of a tiled copy: kind {value['kind']}, rank {rank}, element type "
                f"{value['dtype']}, first words {words[0]:#x} {words[1]:#x}."
            )
        strides = [value[f"stride{i}_high"] << 32 | value[f"stride{i}_low"] for i in range(1, rank)]
        return cls(
            dtype=TF32 if value["tf32"] else names[value["dtype"]],
            rank=rank,
            address=value["address16"] << 4,
            dims=tuple(value[f"dim{i}_1"] + 1 for i in range(rank)),
            strides_bytes=tuple(16 * stride for stride in strides),
            box=tuple(value[f"box{i}_1"] + 1 for i in range(rank)),
            element_strides=tuple(value[f"step{i}_1"] + 1 for i in range(rank)),
            swizzle=SWIZZLES[value["swizzle"]],
            interleave=INTERLEAVES[value["interleave"]],
            oob_fill="nan" if value["oob_fill"] else "zero",
            swizzle_atom=SWIZZLE_ATOMS[value["swizzle_atom"]],
            swizzle_atom_flip=value["swizzle_atom"] == 2,
            l2_promotion=value["l2_promotion"],
        )

    def encode(self) -> bytes:
        """The descriptor that ``decode`` reads, 128 bytes."""
        self._check()
        value = {
            "address16": self.address >> 4,
            "kind": KIND,
            "rank_1": self.rank - 1,
            "dtype": DTYPES["f32" if self.dtype == TF32 else self.dtype][0],
            "interleave": INTERLEAVES.index(self.interleave),
            "swizzle": SWIZZLES.index(self.swizzle),
            "oob_fill": int(self.oob_fill == "nan"),
            "tf32": int(self.dtype == TF32),
            "l2_promotion": self.l2_promotion,
            "swizzle_atom": 2 if self.swizzle_atom_flip else {16: 0, 32: 1, 64: 3}[self.swizzle_atom],
            "large": int(self._extent_bytes() >= LARGE_BYTES),
        }
        for i, stride in enumerate(self.strides_bytes, 1):
            value[f"stride{i}_low"], value[f"stride{i}_high"] = stride // 16 & 0xFFFFFFFF, stride // 16 >> 32
        for i in range(self.rank):
            value[f"dim{i}_1"] = self.dims[i] - 1
            value[f"box{i}_1"] = self.box[i] - 1
            value[f"step{i}_1"] = self.element_strides[i] - 1
        words = [0] * WORDS
        for name, number in value.items():
            word, low, bits = FIELDS[name]
            if not 0 <= number < 1 << bits:
                raise TensorMapError(f"{name}={number}: the descriptor has {bits} bits for it, in {self}.")
            words[word] |= number << low
        return struct.pack(f"<{WORDS}Q", *words) + bytes(NUM_BYTES - 8 * WORDS)

    def swizzled(self, addresses: Any) -> Any:
        """Where in shared memory the bytes go that would lie at these addresses without a swizzle.

        Address bits, not offsets in the tile, decide: the pattern is fixed in shared memory.
        """
        if not self.swizzle:
            return addresses
        low = {16: 4, 32: 5, 64: 6}[self.swizzle_atom]
        bits = {32: 1, 64: 3, 128: 7}[self.swizzle] >> (low - 4)
        moved = addresses ^ ((addresses >> 7 & bits) << low)
        return moved ^ (addresses >> 7 & 1) << 3 if self.swizzle_atom_flip else moved

    def _extent_bytes(self) -> int:
        if self.rank == 1:
            return self.dims[0] * self.element_bits // 8
        return max(dim * stride for dim, stride in zip(self.dims[1:], self.strides_bytes, strict=True))

    def _check(self) -> None:
        lengths = (len(self.dims), len(self.strides_bytes) + 1, len(self.box), len(self.element_strides))
        if not 1 <= self.rank <= MAX_RANK or set(lengths) != {self.rank}:
            raise TensorMapError(f"rank={self.rank}: 1 to {MAX_RANK}, with as many dims and boxes, in {self}.")
        if self.address % 16 or any(stride % 16 for stride in self.strides_bytes):
            raise TensorMapError(f"address and strides must be multiples of 16 bytes, in {self}.")
