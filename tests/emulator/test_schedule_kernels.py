"""Our own schedule kernels, compiled for sm_90a, on the virtual GPU against the torch model."""

from __future__ import annotations

import pytest
import torch

from mok_cute.compile import compile_schedule
from mok_cute.emulator.virtual_device import VirtualDevice
from mok_cute.schedule import (
    Schedule,
    ScheduleState,
    allocate_schedule,
    build_schedule_reference,
    first_difference,
    launch_schedule,
    schedule_arguments,
    schedule_sizes,
)
from mok_cute.shapes import MoEShape

pytestmark = pytest.mark.emulated

SHAPE = MoEShape(hidden=128, intermediate=128, num_experts=8, topk=3)


def build_on_virtual_gpu(device: VirtualDevice, ids: list[torch.Tensor], max_tokens: int) -> list[Schedule]:
    """The schedules of all ranks; their kernels run at the same time."""
    ep_size = len(ids)
    compiled = compile_schedule(SHAPE, "sm_90a", ep_size, 32)
    sizes = schedule_sizes(SHAPE, ep_size, max_tokens)
    symmetric = [device.zeros(sizes.layout.symmetric_bytes) for _ in ids]
    table = torch.tensor([part.data_ptr() for part in symmetric])
    stop, record = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    states = [ScheduleState.allocate(sizes, "cpu", poison=0x55555555) for _ in ids]
    schedules = [allocate_schedule(sizes, "cpu", poison=0x33333333) for _ in ids]
    arguments = [
        schedule_arguments(
            states[rank],
            schedules[rank],
            topk_ids=ids[rank],
            num_tokens=None,
            peer_table=table.data_ptr(),
            rank=rank,
            symmetric_offset=0,
            stop=stop.data_ptr(),
            record=record.data_ptr(),
            limit_ns=0,
        )
        for rank in range(ep_size)
    ]
    launch_schedule(compiled.functions, arguments, [rank + 1 for rank in range(ep_size)])
    device.synchronize()
    assert len(device.launched) == 3 * ep_size
    return schedules


@pytest.mark.parametrize(("tokens", "seed"), [((40,), 0), ((300,), 1), ((70, 33), 2), ((0, 40, 5), 3)])
def test_schedule_kernels_agree_with_the_model(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-1, 10, (count, 3), generator=generator, dtype=torch.int32) for count in tokens]
    with VirtualDevice("sm_90a", num_sms=4, seed=seed) as device:
        schedules = build_on_virtual_gpu(device, ids, max(tokens))
    for rank, schedule in enumerate(schedules):
        expected = build_schedule_reference(ids, SHAPE, rank, len(ids), max(tokens))
        assert first_difference(schedule, expected) is None, f"rank {rank}"
