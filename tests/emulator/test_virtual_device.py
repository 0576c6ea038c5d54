"""The virtual device: when launches run, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack, make_fake_stream

from mok_cute.emulator.decode import parse_module
from mok_cute.emulator.driver import Launch
from mok_cute.emulator.memory import MemoryFault
from mok_cute.emulator.streams import Streams
from mok_cute.emulator.virtual_device import VirtualDevice
from mok_cute.errors import ConfigError

pytestmark = pytest.mark.emulated

PTX = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry empty()\n{\n\tret;\n}\n"
EMPTY = parse_module(PTX)["empty"]


def launch_on(stream: int) -> Launch:
    return Launch("empty", PTX, EMPTY, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, stream, {}, [])


@cute.kernel
def add(address: Int64, value: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    words = cute.make_tensor(pointer, cute.make_layout(32))
    words[thread] = words[thread] * 2 + value


@cute.jit
def launch_add(address: Int64, value: Int32, stream: cuda.CUstream):
    add(address, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def meet(mine: Int64, other: Int64):
    """Leaves a word for a peer, then waits for the peer's."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.store(cute.make_ptr(Int32, mine, cute.AddressSpace.gmem), Int32(1), sem="release", scope="gpu")
        there = cute.make_ptr(Int32, other, cute.AddressSpace.gmem)
        while cute.arch.load(there, Int32, sem="acquire", scope="gpu") == 0:
            pass


@cute.jit
def launch_meet(mine: Int64, other: Int64, stream: cuda.CUstream):
    meet(mine, other).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def double(tensor: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tensor[thread] = tensor[thread] + tensor[thread]


@cute.jit
def launch_double(tensor: cute.Tensor):
    double(tensor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with VirtualDevice("sm_90a", num_sms=2) as entered:
        yield entered


def compile_add() -> Any:
    return cute.compile(launch_add, Int64(16), Int32(1), make_fake_stream(), options="--enable-tvm-ffi")


def test_a_launch_runs_when_torch_looks_at_the_tensor(device: VirtualDevice) -> None:
    words = torch.zeros(32, dtype=torch.int32)
    function = compile_add()
    function(words.data_ptr(), 1, 0)
    function(words.data_ptr(), 2, 0)
    fresh, view = torch.empty_like(words), words[3:].view(-1)
    assert fresh.shape == (32,) and view.numel() == 29 and device.streams.num_pending == 2
    assert view.tolist() == [4] * 29
    assert [stats.warp_instructions > 0 for _, stats in device.launched] == [True, True]


@pytest.mark.parametrize("make", [lambda t: torch.empty(5, dtype=t.dtype), torch.empty_like, lambda t: t.new_empty(5)])
def test_memory_that_nobody_wrote_looks_wrong(device: VirtualDevice, make: Any) -> None:
    assert make(torch.zeros(5, dtype=torch.bfloat16)).isnan().all()
    assert (make(torch.zeros(5, dtype=torch.int32)) == 2**31 - 1).all()
    assert make(torch.zeros(5, dtype=torch.bool)).shape == (5,)


def test_a_tensor_argument_is_device_memory(device: VirtualDevice) -> None:
    tensor = torch.arange(32, dtype=torch.float32)
    launch_double(from_dlpack(tensor))
    assert torch.equal(tensor, 2 * torch.arange(32, dtype=torch.float32))


def test_memory_lives_until_the_launch_that_was_given_its_address_has_run(device: VirtualDevice) -> None:
    words = torch.zeros(32, dtype=torch.int32)
    compile_add()(words.data_ptr(), 1, 0)
    del words
    device.synchronize()


def test_kernels_that_wait_for_each_other_run_together(device: VirtualDevice) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    addresses = [words.data_ptr(), words.data_ptr() + 4]
    function = cute.compile(launch_meet, Int64(16), Int64(16), make_fake_stream(), options="--enable-tvm-ffi")
    own = [device.new_stream(), device.new_stream()]
    with device.rank_streams(own) as streams:
        for mine, other, stream in zip(addresses, reversed(addresses), streams, strict=True):
            function(mine, other, stream)
    assert words.tolist() == [1, 1]


def test_a_fault_comes_out_of_synchronize_and_the_device_stays_usable(device: VirtualDevice) -> None:
    words = torch.zeros(32, dtype=torch.int32)
    function = compile_add()
    function(words.data_ptr() + 64, 1, 0)
    function(words.data_ptr(), 1, 0)
    with pytest.raises(MemoryFault, match=r"out of bounds.*torch tensor 32 torch.int32"):
        device.synchronize()
    assert words.tolist() == [0] * 32
    function(words.data_ptr(), 1, 0)
    assert words.tolist() == [1] * 32


def test_streams_are_ordered_by_waits() -> None:
    streams = Streams()
    first, second = streams.create(), streams.create()
    a, b, c, d = launch_on(first), launch_on(first), launch_on(second), launch_on(0)
    streams.enqueue(a)
    streams.enqueue(b)
    streams.wait(second, first)
    streams.enqueue(c)
    streams.enqueue(d)
    ready = streams.take_ready()
    assert len(ready) == 2 and ready[0] is a and ready[1] is d
    streams.end(ready)
    (ready_b,) = streams.take_ready()
    assert ready_b is b and streams.take_ready() == []
    streams.end([ready_b])
    (ready_c,) = streams.take_ready()
    assert ready_c is c and streams.num_pending == 1


def test_a_name_that_is_no_virtual_device_is_refused() -> None:
    assert str(VirtualDevice.of_name("virtual:sm_100a")) == "virtual:sm_100a"
    with pytest.raises(ConfigError, match="device=cuda: not a virtual device"):
        VirtualDevice.of_name("cuda")


def test_the_current_device_is_found_by_its_name(device: VirtualDevice) -> None:
    assert VirtualDevice.current_or_new("virtual:sm_90a") is device
    with pytest.raises(ConfigError, match="virtual:sm_90a is current"):
        VirtualDevice.current_or_new("virtual:sm_100a")


def test_memory_that_host_code_allocates_is_checked(device: VirtualDevice) -> None:
    address = device.allocate(256)
    device.written(address, 128)
    compile_add()(address, 1, 0)
    device.synchronize()
    with pytest.raises(MemoryFault, match="uninitialised"):
        compile_add()(address + 128, 1, 0)
        device.synchronize()
    device.release(address)
