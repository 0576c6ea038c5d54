"""Our own schedule kernels, compiled for sm_90a, on the virtual GPU against the torch model."""

import random

import pytest
import torch

from mok_cute import cache
from mok_cute.emulator.decode import Kernel, parse_module
from mok_cute.emulator.device import Grid, LaunchStats, run
from mok_cute.emulator.memory import DeviceMemory
from mok_cute.schedule import (
    LAUNCHES,
    SCHEDULE_ARGS,
    ScheduleState,
    allocate_schedule,
    build_schedule_reference,
    first_difference,
    schedule_arguments,
    schedule_sizes,
)
from mok_cute.shapes import MoEShape

pytestmark = pytest.mark.emulated

THREADS = 256
SMEM_BYTES = 16384  # at least what the host function asks for


def compile_kernels(shape: MoEShape, ep_size: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """The three kernels by launch name. The compiled schedule does not keep its PTX, so listen at the cache."""
    from mok_cute.compile import compile_schedule

    texts: dict[str, str] = {}
    get_or_build = cache.get_or_build

    def listen(*arguments, **keywords):
        loaded = get_or_build(*arguments, **keywords)
        texts.update(loaded.ptx)
        return loaded

    monkeypatch.setattr(cache, "get_or_build", listen)
    compile_schedule(shape, "sm_90a", ep_size, 32)
    return {name: next(iter(parse_module(texts[name]).values())) for name in LAUNCHES}


def build_on_virtual_gpu(kernels, ids, shape, max_tokens, seed):
    """(schedules, statistics of each launch) of all ranks, every stage of all ranks at once."""
    ep_size = len(ids)
    sizes = schedule_sizes(shape, ep_size, max_tokens)
    memory = DeviceMemory()
    symmetric = [torch.zeros(sizes.layout.symmetric_bytes, dtype=torch.uint8) for _ in ids]
    table = torch.tensor([part.data_ptr() for part in symmetric])
    stop, record = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    kept, schedules, arguments = [table, stop, record, *symmetric, *ids], [], []
    for rank in range(ep_size):
        state = ScheduleState.allocate(sizes, "cpu", poison=0x55555555)
        schedules.append(allocate_schedule(sizes, "cpu", poison=0x33333333))
        kept += [state.scratch, *vars(schedules[-1]).values()]
        values = schedule_arguments(
            state,
            schedules[-1],
            topk_ids=ids[rank],
            num_tokens=None,
            peer_table=table.data_ptr(),
            rank=rank,
            symmetric_offset=0,
            stop=stop.data_ptr(),
            record=record.data_ptr(),
            limit_ns=0,
        )
        arguments.append(values)
    for number, tensor in enumerate(kept):
        if tensor.numel():
            memory.add(tensor.data_ptr(), tensor.numel() * tensor.element_size(), f"tensor {number}")
    stats: list[LaunchStats] = []
    for name in LAUNCHES:
        extent = (sizes.layout.groups_per_peer, ep_size, 1)
        if name == "publish":
            extent = (max(1, -(-max_tokens * shape.topk // 1024)), 1, 1)
        grids = []
        for values in arguments:
            params = [
                value.to_bytes(4 if kind == "Int32" else 8, "little")
                for value, (_, kind) in zip(values, SCHEDULE_ARGS, strict=True)
            ]
            grids.append(Grid(kernels[name], extent, (THREADS, 1, 1), params, memory, dynamic_smem_bytes=SMEM_BYTES))
        stats += run(grids, seed=seed, max_steps=3_000_000)
    return schedules, stats


@pytest.mark.parametrize(
    ("ep_size", "tokens", "seed"), [(1, (40,), 0), (1, (300,), 1), (2, (70, 33), 2), (3, (0, 40, 5), 3)]
)
def test_schedule_kernels_agree_with_the_model(ep_size, tokens, seed, monkeypatch):
    shape = MoEShape(hidden=128, intermediate=128, num_experts=8, topk=3)
    kernels = compile_kernels(shape, ep_size, monkeypatch)
    generator = torch.Generator().manual_seed(random.Random(seed).randrange(1 << 30))
    ids = [torch.randint(-1, 10, (count, 3), generator=generator, dtype=torch.int32) for count in tokens]
    max_tokens = max(tokens)
    schedules, stats = build_on_virtual_gpu(kernels, ids, shape, max_tokens, seed)
    for rank, schedule in enumerate(schedules):
        expected = build_schedule_reference(ids, shape, rank, ep_size, max_tokens)
        assert first_difference(schedule, expected) is None, f"rank {rank}"
    assert all(launched.warp_instructions > 0 for launched in stats)
