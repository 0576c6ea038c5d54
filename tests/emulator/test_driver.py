"""Launch interception: what host code launches arrives as it was asked for, through every way to call it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack, load_module, make_fake_stream

from mok_cute.arch import get
from mok_cute.emulator import driver, dsl_patches, shim
from mok_cute.emulator.driver import CLUSTER, Launch, LaunchError
from mok_cute.errors import UnsupportedError

pytestmark = pytest.mark.emulated


class Recorder:
    """A device that only writes down what comes."""

    arch = get("sm_90a")
    num_sms = 4

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.memory: dict[int, Any] = {}

    def submit(self, launch: Launch) -> None:
        self.launches.append(launch)

    def synchronize(self) -> None:
        self.launches.append(self.launches[-1])

    def allocate(self, num_bytes: int) -> int:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.memory[buffer.data_ptr()] = buffer
        return buffer.data_ptr()

    def release(self, address: int) -> None:
        del self.memory[address]

    def written(self, address: int, num_bytes: int) -> None:
        pass


@pytest.fixture
def device() -> Iterator[Recorder]:
    recorder = Recorder()
    with driver.install(recorder):
        yield recorder


@cute.kernel
def fill(address: Int64, value: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(64))[thread] = value


@cute.jit
def launch_fill(address: Int64, value: Int32, num_ctas: Int32, stream: cuda.CUstream):
    fill(address, value).launch(grid=(num_ctas, 3, 1), block=(64, 2, 1), cluster=(2, 1, 1), smem=1024, stream=stream)


@cute.kernel
def fill_tensor(tensor: cute.Tensor, value: Int32):
    thread, _, _ = cute.arch.thread_idx()
    tensor[thread] = value


@cute.jit
def launch_tensor(tensor: cute.Tensor, value: Int32):
    fill_tensor(tensor, value).launch(grid=(1, 1, 1), block=(64, 1, 1))


@cute.jit
def launch_twice(address: Int64, stream: cuda.CUstream):
    fill(address, Int32(1)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
    fill(address, Int32(2)).launch(grid=(2, 1, 1), block=(32, 1, 1), stream=stream)


def compile_fill(options: str = "") -> Any:
    return cute.compile(launch_fill, Int64(16), Int32(1), Int32(1), make_fake_stream(), options=options)


def check_fill(launch: Launch, value: int) -> None:
    assert launch.entry in launch.ptx and f".entry {launch.entry}(" in launch.ptx
    assert launch.kernel.name == launch.entry and ".target sm_90a" in launch.ptx
    assert (launch.grid, launch.block, launch.cluster) == ((4, 3, 1), (64, 2, 1), (2, 1, 1))
    assert launch.dynamic_smem_bytes == 1024 and launch.attributes[CLUSTER] == (2, 1, 1)
    assert launch.params == [struct.pack("<q", 4096), struct.pack("<i", value)]


def test_a_plain_function_delivers_its_launch(device: Recorder) -> None:
    function = compile_fill()
    function(4096, 7, 4, cuda.CUstream(1234))
    function(4096, -8, 4, cuda.CUstream(0))
    first, second = device.launches
    check_fill(first, 7)
    check_fill(second, -8)
    assert (first.stream, second.stream) == (1234, 0)


def test_a_tvm_ffi_function_delivers_its_launch(device: Recorder) -> None:
    function = compile_fill("--enable-tvm-ffi")
    function(4096, 7, 4, 1234)
    check_fill(device.launches[0], 7)
    assert device.launches[0].stream == 1234


def test_an_exported_function_finds_its_ptx_beside_the_object(device: Recorder, tmp_path: Path) -> None:
    compiled = compile_fill("--enable-tvm-ffi")
    compiled.export_to_c(str(tmp_path / "fill.o"), function_name="fill")
    (tmp_path / "fill.ptx").write_text(compiled.__ptx__)
    (tmp_path / "fill.cubin").write_bytes(compiled.__cubin__)
    load_module(str(tmp_path / "fill.o"), enable_tvm_ffi=True).fill(4096, 7, 4, 0)
    check_fill(device.launches[0], 7)


def test_a_jit_call_with_a_tensor_passes_its_host_address(device: Recorder) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    launch_tensor(from_dlpack(tensor), Int32(3))
    (launch,) = device.launches
    assert launch.params[0] == struct.pack("<q", tensor.data_ptr()) and launch.cluster == (1, 1, 1)


def test_launches_of_one_function_come_in_order(device: Recorder) -> None:
    cute.compile(launch_twice, Int64(16), make_fake_stream(), options="--enable-tvm-ffi")(4096, 0)
    assert [launch.grid[0] for launch in device.launches] == [1, 2]


def test_kernels_of_equal_names_stay_apart(device: Recorder) -> None:
    functions = []
    for value in (1, 2):

        @cute.kernel
        def same(address: Int64):
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = cutlass.const_expr(value)  # noqa: B023

        @cute.jit
        def launch_same(address: Int64):
            same(address).launch(grid=(1, 1, 1), block=(32, 1, 1))  # noqa: B023

        functions.append(cute.compile(launch_same, Int64(16)))
    for function in (*functions, functions[0]):
        function(4096)
    first, second, again = device.launches
    assert first.entry == second.entry and first.ptx != second.ptx and again.ptx == first.ptx


@pytest.mark.parametrize("num_ctas, problem", [(0, "no extent may be 0"), (3, "not a multiple of the cluster")])
def test_an_impossible_grid_is_refused_at_the_launch(device: Recorder, num_ctas: int, problem: str) -> None:
    with pytest.raises(Exception, match="InvalidConfiguration"):
        compile_fill()(4096, 7, num_ctas, cuda.CUstream(0))
    with pytest.raises(LaunchError, match=problem):
        driver.the_driver().take_error()
    driver.the_driver().take_error()
    assert device.launches == []


def test_a_function_called_after_the_device_was_left_says_so() -> None:
    with driver.install(Recorder()):
        function = compile_fill()
        function(4096, 7, 4, cuda.CUstream(0))
    with pytest.raises(Exception, match="InvalidConfiguration"):
        function(4096, 7, 4, cuda.CUstream(0))
    with pytest.raises(LaunchError, match="none is current"):
        driver.the_driver().take_error()


def test_two_devices_at_once_are_refused(device: Recorder) -> None:
    with pytest.raises(LaunchError, match="current already"):
        driver.install(Recorder())


def test_leaving_the_device_puts_back_what_was_replaced() -> None:
    found = dsl_patches.probe()
    before = [found["artifacts"].__post_init__, found["exported"].__init__, found["cuda_runtime"].cudaGetDeviceCount]
    settings = [dict(vars(dsl.envar)) for dsl in found["objects"]]
    with driver.install(Recorder()):
        assert found["artifacts"].__post_init__ is not before[0]
    after = [found["artifacts"].__post_init__, found["exported"].__init__, found["cuda_runtime"].cudaGetDeviceCount]
    assert after == before and [dict(vars(dsl.envar)) for dsl in found["objects"]] == settings


def test_an_unknown_release_of_the_dsl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dsl_patches.probe()["artifacts"], "__post_init__")
    with pytest.raises(
        UnsupportedError, match=r"needs nvidia-cutlass-dsl 4\.8\.1 .*JitFunctionArtifacts\.__post_init__"
    ):
        driver.install(Recorder())
    assert driver.the_driver().current is None


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="needs a C compiler once.*no-such-compiler"):
        shim.build(tmp_path, compilers=("no-such-compiler",))


def test_the_library_is_built_once(tmp_path: Path) -> None:
    path = shim.build(tmp_path)
    assert shim.build(tmp_path, compilers=()) == path and [file.name for file in tmp_path.iterdir()] == [path.name]
