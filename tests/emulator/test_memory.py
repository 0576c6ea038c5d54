"""Device memory of the virtual GPU: what it lets through and how it names what it refuses."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from mok_cute.emulator import memory
from mok_cute.emulator.memory import Allocation, DeviceMemory, MemoryFault, find_torch_tensor


@pytest.fixture
def device() -> DeviceMemory:
    return DeviceMemory()


def add(device: DeviceMemory, array: np.ndarray, name: str = "buffer") -> Allocation:
    return device.add(array.ctypes.data, array.nbytes, name)


def lanes(start: int, step: int, count: int = 32) -> np.ndarray:
    return np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(step)


def test_read_and_write_move_bytes_at_host_addresses(device: DeviceMemory) -> None:
    array = np.arange(64, dtype=np.uint8)
    start = add(device, array).address
    assert device.read(start + 3, 5).tolist() == [3, 4, 5, 6, 7]
    device.write(start + 10, b"\xff\xfe")
    assert array[9:13].tolist() == [9, 255, 254, 12]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_gather_and_scatter_move_one_word_per_lane(device: DeviceMemory, size: int) -> None:
    start = device.allocate(4096, "scratch").address
    data = np.random.default_rng(size).integers(0, 256, (32, size), dtype=np.uint8)
    addresses = np.random.default_rng(0).permutation(lanes(start, 32))
    device.scatter(addresses, data)
    assert np.array_equal(device.gather(addresses, size), data)
    assert np.array_equal(device.read(int(addresses[5]), size), data[5])


def test_scatter_keeps_the_last_lane_when_addresses_are_equal(device: DeviceMemory) -> None:
    start = device.allocate(16, "word").address
    device.scatter(lanes(start, 0), np.arange(128, dtype=np.uint8).reshape(32, 4))
    assert device.read(start, 4).tolist() == [124, 125, 126, 127]


def test_an_access_past_the_end_names_the_allocation(device: DeviceMemory) -> None:
    allocation = device.allocate(256, "x_ring")
    with pytest.raises(MemoryFault, match=r"out of bounds: write of 16 bytes at 0x.*the last 8 lie beyond x_ring") as e:
        device.write(allocation.end - 8, bytes(16))
    assert (e.value.kind, e.value.nearest, e.value.num_bytes) == (memory.OUTSIDE, allocation, 16)
    with pytest.raises(MemoryFault, match="32 bytes after x_ring"):
        device.read(allocation.end + 32, 4)
    with pytest.raises(MemoryFault, match="4 bytes before x_ring"):
        device.read(allocation.address - 4, 4)
    with pytest.raises(MemoryFault, match="unknown address: .* before x_ring"):
        device.read(1 << 20, 4)


def test_one_bad_lane_of_a_gather_is_reported_with_its_address(device: DeviceMemory) -> None:
    start = add(device, np.zeros(128, np.uint8)).address
    addresses = lanes(start, 4)
    assert device.gather(addresses, 4).shape == (32, 4)
    addresses[7] = start + 4096
    with pytest.raises(MemoryFault) as e:
        device.gather(addresses, 4)
    assert e.value.address == start + 4096 and e.value.access == "read"


def test_misaligned_lanes_are_refused(device: DeviceMemory) -> None:
    start = device.add(device.allocate(1024, "scratch").address, 1024, "scratch").address
    device.gather(lanes(start, 8), 8)
    with pytest.raises(MemoryFault, match="misaligned: .* must be a multiple of 8; in scratch") as e:
        device.gather(lanes(start + 4, 8), 8)
    assert e.value.kind == memory.MISALIGNED
    with pytest.raises(MemoryFault, match="must be a multiple of 16"):
        device.read(start + 8, 32, align=16)


def test_a_null_pointer_is_called_one(device: DeviceMemory) -> None:
    with pytest.raises(MemoryFault, match="null pointer: read of 4 bytes at 0x8") as e:
        device.read(8, 4)
    assert e.value.kind == memory.NULL


def test_freed_memory_is_reported_as_such_until_it_is_used_again(device: DeviceMemory) -> None:
    array = np.zeros(64, np.uint8)
    start = add(device, array, "old").address
    device.remove(start)
    with pytest.raises(MemoryFault, match="use after free: .* inside old"):
        device.read(start, 4)
    add(device, array, "new")
    device.read(start, 4)


def test_an_overlapping_allocation_replaces_the_older_one(device: DeviceMemory) -> None:
    array = np.zeros(256, np.uint8)
    start = array.ctypes.data
    device.add(start, 256, "whole")
    device.add(start + 64, 64, "part")
    assert [a.name for a in device.allocations()] == ["part"]
    with pytest.raises(MemoryFault):
        device.read(start, 4)


def test_allocated_memory_must_be_written_before_it_is_read(device: DeviceMemory) -> None:
    start = device.allocate(64, "scratch").address
    device.write(start, bytes(16))
    device.read(start, 16)
    with pytest.raises(MemoryFault, match="uninitialised") as e:
        device.read(start + 8, 16)
    assert hex(start + 16) in str(e.value)
    with pytest.raises(MemoryFault, match="uninitialised"):
        device.gather(lanes(start, 4, 8), 4)
    device.mark_defined(start, 64)
    device.read(start, 64)


def test_a_torch_tensor_is_found_by_its_address_and_forgotten_with_it() -> None:
    device = DeviceMemory(discover=find_torch_tensor)
    tensor = torch.arange(100, dtype=torch.int32)
    start = tensor.data_ptr()
    assert device.read(start + 40, 4).view(np.int32).tolist() == [10]
    assert [a.name for a in device.allocations()] == ["torch tensor 100 torch.int32"]
    view = tensor[3:]
    del tensor
    gc.collect()
    device.read(start, 4)  # the view keeps the storage
    del view
    gc.collect()
    assert device.allocations() == []
    with pytest.raises(MemoryFault, match="use after free: .* torch tensor 100"):
        device.read(start, 4)


def test_an_address_of_no_tensor_is_unknown() -> None:
    device = DeviceMemory(discover=find_torch_tensor)
    array = np.zeros(1 << 20, np.uint8)
    with pytest.raises(MemoryFault, match="unknown address"):
        device.read(array.ctypes.data + 512, 4)
