"""The schedule kernels: what they compile to, and on a GPU the same arrays as the torch model, bit for bit."""

import re
from functools import cache

import pytest
import torch

from mok_cute.config import ROW_BLOCK
from mok_cute.schedule import (
    LAUNCHES,
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

cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

POISON = 0x7FFFFFFF
LIMIT_NS = 20_000_000_000  # a test that waits for a rank must end


def build(launch, options, *, num_experts, local_experts, topk, id_bits):
    from mok_cute.templates.schedule.kernels import ScheduleKernels

    kernels = ScheduleKernels(
        num_experts=num_experts, local_experts=local_experts, topk=topk, id_bits=id_bits, row_block=ROW_BLOCK
    )
    return cute.compile(getattr(kernels, launch), *kernels.example_arguments(), options=options)


# --- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("num_experts", "local_experts", "topk", "id_bits"), [(256, 4, 8, 32), (512, 512, 10, 64), (8, 3, 2, 32)]
)
def test_kernels_keep_everything_in_registers(launch, arch, num_experts, local_experts, topk, id_bits, tmp_path, capfd):
    compiled = build(
        launch,
        f"--gpu-arch {arch} --keep-ptx --dump-dir {tmp_path} remarks{{ptx}}",
        num_experts=num_experts,
        local_experts=local_experts,
        topk=topk,
        id_bits=id_bits,
    )
    ptx = compiled.__ptx__
    remarks = capfd.readouterr().err
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", remarks), remarks
    assert not re.search(r"\.local\b|vprintf|\bdiv\.s|\brem\.s", ptx)
    registers = re.search(r"Used (\d+) registers", remarks)
    assert registers is not None, remarks
    assert int(registers[1]) <= 64  # four CTAs of 256 threads on an SM
    # A buffer that another GPU or CTA may write is never read through the cache that assumes it constant.
    assert "ld.global.nc" not in ptx


def test_only_publish_waits_and_it_waits_for_peers_at_system_scope(tmp_path):
    ptx = {
        launch: build(
            launch,
            f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}",
            num_experts=8,
            local_experts=4,
            topk=2,
            id_bits=32,
        ).__ptx__
        for launch in LAUNCHES
    }
    publish = ptx["publish"]
    assert re.search(r"fence\.acq_rel\.sys;\s+st\.release\.sys\.global", publish)
    assert "ld.acquire.sys.global" in publish
    assert "nanosleep" in publish
    for launch in LAUNCHES:
        assert "atom.global.acq_rel.add" in ptx[launch], launch
        assert ("ld.acquire" in ptx[launch]) == (launch == "publish"), launch
    assert "match.any.sync.b32" in ptx["place"]


# --- on a GPU --------------------------------------------------------------------------------------------------------


@cache
def compiled_for_gpu(num_experts, local_experts, topk, id_bits):
    major, minor = torch.cuda.get_device_capability()
    options = f"--gpu-arch sm_{major}{minor}a --enable-tvm-ffi"
    return {
        launch: build(launch, options, num_experts=num_experts, local_experts=local_experts, topk=topk, id_bits=id_bits)
        for launch in LAUNCHES
    }


class VirtualRanks:
    """Several ranks on one GPU, each with a stream and symmetric memory of its own; everything poisoned."""

    SYMMETRIC_OFFSET = 1024

    def __init__(self, num_experts, topk, ep_size, max_tokens):
        self.shape = MoEShape(hidden=128, intermediate=128, num_experts=num_experts, topk=topk)
        self.sizes = schedule_sizes(self.shape, ep_size, max_tokens)
        self.ep_size, self.max_tokens = ep_size, max_tokens
        layout = self.sizes.layout
        self.states = [ScheduleState.allocate(self.sizes, "cuda", poison=POISON) for _ in range(ep_size)]
        words = (self.SYMMETRIC_OFFSET + layout.symmetric_bytes) // 4
        self.symmetric = [torch.full((words,), POISON, dtype=torch.int32, device="cuda") for _ in range(ep_size)]
        for memory in self.symmetric:
            memory[(self.SYMMETRIC_OFFSET + layout.schedule_flags_bytes) // 4 :] = 0
        self.peer_table = torch.tensor([memory.data_ptr() for memory in self.symmetric], device="cuda")
        self.stops = torch.zeros((ep_size, 32), dtype=torch.int32, device="cuda")
        self.records = torch.zeros((ep_size, 16), dtype=torch.int32).pin_memory()
        self.schedules = [allocate_schedule(self.sizes, "cuda") for _ in range(ep_size)]
        self.streams = [torch.cuda.Stream() for _ in range(ep_size)]

    def launch(self, ids, counts=None, *, ranks=None, streams=None, limit_ns=LIMIT_NS):
        ranks = range(self.ep_size) if ranks is None else ranks
        streams = [self.streams[r].cuda_stream for r in ranks] if streams is None else streams
        by_id_bits = {
            dtype: compiled_for_gpu(self.shape.num_experts, self.sizes.local_experts, self.shape.topk, bits)
            for dtype, bits in ((torch.int32, 32), (torch.int64, 64))
            if any(ids[r].dtype == dtype for r in ranks)
        }
        arguments = [
            schedule_arguments(
                self.states[r],
                self.schedules[r],
                topk_ids=ids[r],
                num_tokens=None if counts is None else counts[r],
                peer_table=self.peer_table.data_ptr(),
                rank=r,
                symmetric_offset=self.SYMMETRIC_OFFSET,
                stop=self.stops[r].data_ptr(),
                record=self.records[r].data_ptr(),
                limit_ns=limit_ns,
            )
            for r in ranks
        ]
        launch_schedule([by_id_bits[ids[r].dtype] for r in ranks], arguments, streams)

    def poison(self) -> None:
        for schedule in self.schedules:
            for tensor in vars(schedule).values():
                tensor.fill_(POISON)
        torch.cuda.synchronize()

    def build(self, ids, counts=None) -> list[Schedule]:
        self.poison()
        on_gpu = [each.cuda() for each in ids]
        torch.cuda.synchronize()
        self.launch(on_gpu, counts)
        torch.cuda.synchronize()
        assert not self.records.any(), self.records.tolist()
        return self.schedules

    def assert_matches_reference(self, ids, live=None):
        live = ids if live is None else live
        for rank, schedule in enumerate(self.schedules):
            expected = build_schedule_reference(live, self.shape, rank, self.ep_size, self.max_tokens)
            assert (difference := first_difference(schedule, expected)) is None, f"rank {rank}: {difference}"
            rows = int(expected.num_rows)
            assert bool((schedule.peer_rank[rows:] == POISON).all()), f"rank {rank}: wrote rows beyond num_rows"


def random_ids(seed, tokens, num_experts, topk, dtype=torch.int32, *, low=-1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, num_experts + 1, (tokens, topk), generator=generator, dtype=dtype)


def routing(kind, ep_size, tokens, num_experts, topk):
    if kind == "all_to_one":
        return [torch.full((tokens, topk), num_experts // 2, dtype=torch.int32) for _ in range(ep_size)]
    if kind == "all_dropped":
        return [torch.full((tokens, topk), (-1, num_experts)[r % 2], dtype=torch.int32) for r in range(ep_size)]
    if kind == "empty_rank":  # nobody chooses rank 0's experts, and the last rank has no tokens
        low = -(-num_experts // ep_size) if ep_size > 1 else 1
        return [random_ids(r, tokens * (r < ep_size - 1), num_experts, topk, low=low) for r in range(ep_size)]
    return [random_ids(r, tokens - 7 * r, num_experts, topk) for r in range(ep_size)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "all_to_one", "all_dropped", "empty_rank"])
@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_experts", "topk"), [(8, 2), (128, 8)])
def test_device_builds_the_reference_schedule(kind, ep_size, num_experts, topk):
    ranks = VirtualRanks(num_experts, topk, ep_size, 1000)
    for _ in range(3):  # both parities of the epoch, and one again
        ids = routing(kind, ep_size, 1000, num_experts, topk)
        ranks.build(ids)
        ranks.assert_matches_reference(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_device_holds_for_hard_token_counts_in_one_workspace(ep_size, dtype):
    ranks = VirtualRanks(8, 2, ep_size, 1030)
    for seed, tokens in enumerate((1000, 0, 1, 63, 127, 128, 129, 1023, 1024, 1025, 0, 1030)):
        counts = [(tokens * (r + 1)) % 1031 for r in range(ep_size)]
        ids = [random_ids(seed + r, counts[r], 8, 2, dtype) for r in range(ep_size)]
        ranks.build(ids)
        ranks.assert_matches_reference(ids)


@pytest.mark.gpu
def test_device_drops_int64_ids_that_would_wrap_to_experts():
    ranks = VirtualRanks(8, 2, 1, 4)
    ids = [torch.tensor([[2**32 + 1, 1], [-(2**32) + 2, 3], [2**40, -(2**40)]], dtype=torch.int64)]
    ranks.build(ids)
    ranks.assert_matches_reference(ids)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "topk", "ep_size", "tokens"),
    [(512, 10, 1, 4096), (256, 8, 1, 8192), (256, 8, 4, 8192), (384, 8, 8, 2048), (40, 2, 7, 5), (512, 32, 2, 700)],
)
def test_device_holds_for_large_and_odd_sizes(num_experts, topk, ep_size, tokens):
    ranks = VirtualRanks(num_experts, topk, ep_size, tokens)
    ids = [random_ids(r, max(tokens - r % 5, 0), num_experts, topk) for r in range(ep_size)]
    ranks.build(ids)
    ranks.assert_matches_reference(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 5, 200, 300, -1])
def test_device_reads_the_token_count_from_the_device(count):
    ranks = VirtualRanks(8, 2, 2, 300)
    ids = [random_ids(r, 200, 8, 2) for r in range(2)]
    counts = [torch.tensor([count], dtype=torch.int32, device="cuda"), torch.tensor([77], dtype=torch.int32).cuda()]
    ranks.build(ids, counts)
    ranks.assert_matches_reference(ids, [ids[0][: min(max(count, 0), 200)], ids[1][:77]])


@pytest.mark.gpu
def test_graph_replays_with_new_choices():
    ranks = VirtualRanks(8, 2, 1, 500)
    ids = torch.zeros((500, 2), dtype=torch.int32, device="cuda")
    ranks.launch([ids])  # loads the modules
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.launch([ids], streams=[torch.cuda.current_stream().cuda_stream])
    for seed in range(5):
        ranks.poison()
        new = random_ids(seed, 500, 8, 2)
        ids.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        ranks.assert_matches_reference([new])


@pytest.mark.gpu
def test_missing_rank_is_reported_and_the_schedule_is_empty():
    ranks = VirtualRanks(8, 2, 3, 100)
    ids = [random_ids(r, 100, 8, 2).cuda() for r in range(3)]
    compiled_for_gpu(8, 3, 2, 32)
    ranks.poison()
    ranks.launch(ids, ranks=[0, 2], limit_ns=200_000_000)
    torch.cuda.synchronize()
    for rank in (0, 2):
        record = ranks.records[rank].tolist()
        # status, kernel, rank, cta, role, signal, index: rank 1 is missing
        assert record[:3] + record[4:7] == [1, 1, rank, 16, 32, 1], record
        assert record[7:10] == [0, 1, 1], record  # seen, expected, epoch
        assert record[10] >= 200_000_000
        assert ranks.stops[rank, 0] == 1
        schedule = ranks.schedules[rank]
        assert schedule.num_rows.tolist() == [0]
        assert schedule.expert_block_end.tolist() == [0] * 3
        assert schedule.tokens_per_expert.tolist() == [0] * 3


@pytest.mark.gpu
def test_a_thousand_schedules_in_a_row_meet_without_a_host_sync():
    ranks = VirtualRanks(128, 8, 4, 256)
    ids = [[random_ids(10 * i + r, 256 - i * r, 128, 8).cuda() for r in range(4)] for i in range(4)]
    torch.cuda.synchronize()
    for i in range(1000):
        ranks.launch(ids[i % 4])
    torch.cuda.synchronize()
    assert not ranks.records.any(), ranks.records.tolist()
    assert [int(state.scratch[0]) for state in ranks.states] == [1000] * 4
    for rank, schedule in enumerate(ranks.schedules):
        expected = build_schedule_reference([each.cpu() for each in ids[3]], ranks.shape, rank, 4, 256)
        assert first_difference(schedule, expected) is None, f"rank {rank}"
