"""Descriptors of tensor copies, against words that the compiler made."""

from __future__ import annotations

import struct
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from mok_cute.arch import get
from mok_cute.emulator import driver
from mok_cute.emulator.driver import Launch
from mok_cute.emulator.tensor_map import DTYPES, TensorMap, TensorMapError

ADDRESS = 0x7F0012345600
MATRIX = TensorMap("f16", 2, ADDRESS, (512, 512), (1024,), (64, 128), (1, 1))
FIVE = TensorMap(
    "f16", 5, ADDRESS, (512, 384, 7, 5, 3), (1024, 393216, 2752512, 13762560), (64, 8, 2, 3, 2), (1,) * 5, swizzle=128
)


def words(tensor_map: TensorMap) -> list[int]:
    return list(struct.unpack_from("<8Q", tensor_map.encode()))


@pytest.mark.parametrize(
    "tensor_map, expected",
    [
        (MATRIX, "7f0012345600 4000240312 0 0 1ff000001ff 0 3f00000000000000 7f"),
        (replace(MATRIX, swizzle=128), "7f0012345600 4000246312 0 0 1ff000001ff 0 3f00000000000000 7f"),
        (replace(MATRIX, swizzle=64, box=(32, 128)), "7f0012345600 4000244312 0 0 1ff000001ff 0 1f00000000000000 7f"),
        (replace(MATRIX, swizzle=32, box=(16, 128)), "7f0012345600 4000242312 0 0 1ff000001ff 0 f00000000000000 7f"),
        (
            TensorMap("f16", 1, ADDRESS, (4096,), (), (64,), (1,)),
            "7f0012345600 40302 0 0 fff 0 3f00000000000000 0",
        ),
        (
            FIVE,
            "7f0012345600 4000246342 2a00000006000 d2000 17f000001ff 400000006 3f00000000000002 1020107",
        ),
    ],
)
def test_the_compiler_makes_the_same_words(tensor_map: TensorMap, expected: str) -> None:
    assert words(tensor_map) == [int(word, 16) for word in expected.split()]
    assert TensorMap.decode(tensor_map.encode()) == tensor_map


@pytest.mark.parametrize(
    "dtype, low",
    [
        ("bf16", 0x6512),
        ("f32", 0x6392),
        ("u8", 0x6012),
        ("b4", 0x6592),
        ("b4_in_bytes", 0x6612),
        ("b6_in_bytes", 0x6692),
    ],
)
def test_element_types_have_their_numbers(dtype: str, low: int) -> None:
    tensor_map = replace(MATRIX, dtype=dtype, swizzle=128)
    assert words(tensor_map)[1] & 0xFFFF == low
    assert words(replace(tensor_map, dtype="tf32"))[1] & 0x1FFFF == 0x16392
    assert TensorMap.decode(replace(tensor_map, dtype="tf32").encode()).dtype == "tf32"


def test_wide_strides_keep_their_high_bits() -> None:
    strides = (2**36 + 1024, 2**37 + 1024, 2**38 + 1024, 2**39 - 16)
    tensor_map = replace(FIVE, strides_bytes=strides)
    assert words(tensor_map)[2:4] == [0x0000004000000040, 0x00007421FFFFFFFF]
    assert TensorMap.decode(tensor_map.encode()).strides_bytes == strides


def test_the_size_hint_is_set_from_128_kib_on() -> None:
    small = replace(MATRIX, dims=(64, 1023), strides_bytes=(128,))
    assert words(small)[1] >> 21 & 1 == 0
    assert words(replace(small, dims=(64, 1024)))[1] >> 21 & 1 == 1


def test_what_lies_in_the_second_half_changes_nothing() -> None:
    assert TensorMap.decode(MATRIX.encode()[:64] + b"\xaa" * 64) == MATRIX


@st.composite
def tensor_maps(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 5))

    def several(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    return TensorMap(
        dtype=draw(st.sampled_from([*DTYPES, "tf32"])),
        rank=rank,
        address=16 * draw(st.integers(1, 2**43)),
        dims=several(1, 2**32),
        strides_bytes=tuple(16 * stride for stride in several(0, 2**36 - 1, rank - 1)),
        box=several(1, 256),
        element_strides=several(1, 8),
        swizzle=draw(st.sampled_from([0, 32, 64, 128])),
        interleave=draw(st.sampled_from([0, 16, 32])),
        oob_fill=draw(st.sampled_from(["zero", "nan"])),
        swizzle_atom=draw(st.sampled_from([16, 32, 64])),
        l2_promotion=draw(st.integers(0, 3)),
    )


@given(tensor_maps())
def test_decode_is_the_inverse_of_encode(tensor_map: TensorMap) -> None:
    assert TensorMap.decode(tensor_map.encode()) == tensor_map


def test_bytes_that_are_no_descriptor_are_refused() -> None:
    with pytest.raises(TensorMapError, match="no descriptor of a tiled copy: kind 0"):
        TensorMap.decode(bytes(128))
    with pytest.raises(TensorMapError, match="64 bytes|12 bytes"):
        TensorMap.decode(bytes(12))


@pytest.mark.parametrize("change", [{"address": 8}, {"strides_bytes": (1000,)}, {"box": (257, 1)}, {"dims": (1,)}])
def test_what_a_descriptor_cannot_hold_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TensorMapError):
        replace(MATRIX, **change).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize("swizzle, rows", [(0, 1), (32, 2), (64, 4), (128, 8)])
def test_a_swizzle_permutes_chunks_within_its_span(swizzle: int, rows: int) -> None:
    addresses = np.arange(0, 4096, 16)
    moved = replace(MATRIX, swizzle=swizzle).swizzled(addresses)
    assert sorted(moved) == addresses.tolist()
    assert np.array_equal(moved // max(16, swizzle), addresses // max(16, swizzle))
    assert len({tuple(moved[i : i + 8] % 128) for i in range(0, 64, 8)}) == rows


def test_the_copy_of_a_box_counts_all_its_bytes() -> None:
    assert MATRIX.box_bytes == 64 * 128 * 2
    assert replace(MATRIX, dtype="b4").box_bytes == 64 * 128 // 2
    assert replace(MATRIX, dtype="b4_in_bytes").box_bytes == 64 * 128


class Recorder:
    arch, num_sms = get("sm_90a"), 1

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def submit(self, launch: Launch) -> None:
        self.launches.append(launch)

    def synchronize(self) -> None: ...

    def allocate(self, num_bytes: int) -> int:
        raise AssertionError("nothing is allocated")

    def release(self, address: int) -> None: ...

    def written(self, address: int, num_bytes: int) -> None: ...


@cute.kernel
def copy_tile(atom: cute.CopyAtom, tensor: cute.Tensor):
    cpasync.prefetch_descriptor(atom)


@cute.jit
def launch_copy(matrix: cute.Tensor):
    layout = cute.make_layout((32, 64), stride=(64, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, layout, (32, 64))
    copy_tile(atom, tensor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.mark.emulated
def test_the_descriptor_of_a_launched_kernel_is_decoded() -> None:
    matrix = torch.zeros(96, 192, dtype=torch.bfloat16)
    recorder = Recorder()
    with driver.install(recorder):
        launch_copy(from_dlpack(matrix, assumed_align=16))
    raw = next(param for param in recorder.launches[0].params if len(param) == 128)
    decoded = TensorMap.decode(raw)
    assert (decoded.dtype, decoded.rank, decoded.address) == ("bf16", 2, matrix.data_ptr())
    assert (decoded.dims, decoded.strides_bytes, decoded.box) == ((192, 96), (384,), (64, 32))
    assert cutlass.BFloat16.width == decoded.element_bits
