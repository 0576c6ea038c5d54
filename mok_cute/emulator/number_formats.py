"""Small number formats: tables of the value of every code, and rounding of single precision to a code.

A format has a sign, an exponent and a mantissa. All codes are numbers but the few that mean NaN or infinity: e4m3 has
one NaN and no infinity, e5m2 both as IEEE has them, those of 6 and 4 bits neither. ue8m0 is a power of two and ue4m3 is
e4m3 with the sign ignored; both scale blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float  # finite number

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


FORMATS = {
    "e4m3": Format("e4m3", 4, 3, 7, 448.0),
    "e5m2": Format("e5m2", 5, 2, 15, 57344.0),
    "e2m3": Format("e2m3", 2, 3, 1, 7.5),
    "e3m2": Format("e3m2", 3, 2, 3, 28.0),
    "e2m1": Format("e2m1", 2, 1, 1, 6.0),
}
NAN_CODE = 0x7F  # of e4m3 and e5m2, as conversions give it
UE8M0_NAN = 0xFF


def _values(form: Format) -> Table:
    """Of every byte; of a narrower format the upper bits are ignored."""
    values = []
    for byte in range(256):
        exponent = byte >> form.mantissa_bits & ((1 << form.exponent_bits) - 1)
        mantissa = byte & ((1 << form.mantissa_bits) - 1)
        fraction = mantissa / (1 << form.mantissa_bits)
        value = (1 + fraction) * 2.0 ** (exponent - form.bias) if exponent else fraction * 2.0 ** (1 - form.bias)
        if form.name == "e4m3" and byte & 0x7F == 0x7F:
            value = float("nan")
        if form.name == "e5m2" and exponent == 31:
            value = float("nan") if mantissa else float("inf")
        values.append(-value if byte >> (form.bits - 1) & 1 else value)
    return np.array(values, np.float32)


VALUES = {name: _values(form) for name, form in FORMATS.items()}
E4M3, E5M2 = VALUES["e4m3"], VALUES["e5m2"]
VALUES["ue8m0"] = np.array([2.0 ** (code - 127) for code in range(255)] + [float("nan")]).astype(np.float32)
VALUES["ue4m3"] = np.abs(E4M3)


def encode(value: Any, name: str, *, relu: bool = False) -> Codes:
    """Nearest code, ties to even, of single precision values; too large ones become the largest finite (satfinite)."""
    form = FORMATS[name]
    single = np.atleast_1d(np.asarray(value, np.float32))
    if relu:
        single = np.where(single > 0, single, np.where(np.isnan(single), single, np.float32(0)))
    number = np.minimum(np.abs(single.astype(np.float64)), form.largest)
    exponent = np.maximum(np.floor(np.log2(np.where(number > 0, number, 1.0))), 1 - form.bias)
    # log2 of a number just below a power of two may be rounded up.
    exponent = np.where(number < np.exp2(exponent), np.maximum(exponent - 1, 1 - form.bias), exponent)
    steps = np.rint(np.where(np.isnan(single), 0.0, number) / np.exp2(exponent - form.mantissa_bits)).astype(np.int64)
    # Counting steps from the exponent's first number, a carry into the next exponent comes out right by itself.
    code = steps + ((exponent.astype(np.int64) + form.bias - 1) << form.mantissa_bits)
    code |= np.signbit(single).astype(np.int64) << (form.bits - 1)
    nan = NAN_CODE if form.bits == 8 else (1 << (form.bits - 1)) - 1  # without a NaN: the largest number
    return np.where(np.isnan(single), nan, code).astype(np.uint8)


def encode_ue8m0(value: Any, *, up: bool) -> Codes:
    """Exponent of the power of two at or beyond |value|, up or towards zero; finite values stay finite."""
    single = np.abs(np.atleast_1d(np.asarray(value, np.float32)))
    bits = single.view(np.uint32)
    exponent, mantissa = (bits >> np.uint32(23)).astype(np.int64), bits & np.uint32(0x7FFFFF)
    # A subnormal lies at or below 2^-126, and code 0 is 2^-127.
    above = np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = np.minimum(exponent + (above if up else 0), 254)
    return np.where(np.isnan(single), UE8M0_NAN, code).astype(np.uint8)


def unpack_nibbles(raw: Codes) -> Codes:
    """(..., n) bytes -> (..., 2n) codes of 4 bits, the low half of a byte first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def unpack_six_bits(raw: Codes) -> Codes:
    """(..., 3n) bytes -> (..., 4n) codes of 6 bits, from the lowest bits up."""
    groups = raw.reshape(*raw.shape[:-1], -1, 3).astype(np.uint32)
    word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
    codes = np.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1)
    return codes.astype(np.uint8).reshape(*raw.shape[:-1], -1)


def unpack_chunks(raw: Codes, bits: int) -> Codes:
    """(..., 16n) bytes -> (..., 16n) codes: each 16 bytes hold 16 codes of 4 or 6 bits, packed, and padding behind."""
    chunks = raw.reshape(*raw.shape[:-1], -1, 16)
    packed = chunks[..., : 2 * bits]
    codes = unpack_nibbles(packed) if bits == 4 else unpack_six_bits(packed)
    return codes.reshape(raw.shape)


TO_F32: dict[str, Callable[[Any], Table]] = {  # of operand bytes, by type
    "f16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bf16": lambda raw: (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32),
    "tf32": lambda raw: (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32),
    "e4m3": lambda raw: E4M3[raw],
    "e5m2": lambda raw: E5M2[raw],
    "u8": lambda raw: raw.astype(np.float32),
    "s8": lambda raw: raw.view(np.int8).astype(np.float32),
    "e2m3_in_chunks": lambda raw: VALUES["e2m3"][unpack_chunks(raw, 6)],
    "e3m2_in_chunks": lambda raw: VALUES["e3m2"][unpack_chunks(raw, 6)],
    "e2m1_in_chunks": lambda raw: VALUES["e2m1"][unpack_chunks(raw, 4)],
    "e2m1": lambda raw: VALUES["e2m1"][unpack_nibbles(raw)],
}
