"""The torch model of the schedule against an independent loop, and the sizes it is given."""

import math

import pytest
import torch

from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.schedule import (
    SCHEDULE_ARGS,
    ScheduleState,
    allocate_schedule,
    build_schedule_reference,
    first_difference,
    launch_schedule,
    schedule_arguments,
    schedule_sizes,
)
from mok_cute.shapes import MoEShape


def make_shape(num_experts: int, topk: int) -> MoEShape:
    return MoEShape(hidden=128, intermediate=128, num_experts=num_experts, topk=topk)


def schedule_by_hand(ids_per_rank, shape, rank, ep_size):
    """Walk the round robin as the definition says it: a list of (peer, route) rows, None on padding, and the counts."""
    local = math.ceil(shape.num_experts / ep_size)
    rows: list[tuple[int, int] | None] = []
    ends: list[int] = []
    tokens: list[int] = []
    for expert in range(rank * local, (rank + 1) * local):
        queues = []
        for ids in ids_per_rank:
            flat = ids.flatten().tolist()
            queues.append([route for route, e in enumerate(flat) if e == expert and e < shape.num_experts])
        tokens.append(sum(map(len, queues)))
        while any(queues):
            for peer, queue in enumerate(queues):
                if queue:
                    rows.append((peer, queue.pop(0)))
        while len(rows) % 128:
            rows.append(None)
        ends.append(len(rows) // 128)
    return rows, ends, tokens


def assert_matches_hand(ids_per_rank, shape, ep_size, max_tokens, ranks=None):
    for rank in range(ep_size) if ranks is None else ranks:
        built = build_schedule_reference(ids_per_rank, shape, rank, ep_size, max_tokens)
        rows, ends, tokens = schedule_by_hand(ids_per_rank, shape, rank, ep_size)
        assert int(built.num_rows) == len(rows), f"rank {rank}"
        assert built.expert_block_end.tolist() == ends, f"rank {rank}"
        assert built.tokens_per_expert.tolist() == tokens, f"rank {rank}"
        got = list(zip(built.peer_rank.tolist(), built.peer_route.tolist(), strict=True))
        want = [(-1, -1) if row is None else row for row in rows]
        want += [(-1, -1)] * (len(got) - len(want))
        assert got == want, f"rank {rank}"
        own = ids_per_rank[rank]
        clean = [[e if 0 <= e < shape.num_experts else -1 for e in token] for token in own.tolist()]
        clean += [[-1] * shape.topk] * (max_tokens - len(own))
        assert built.local_ids.tolist() == clean, f"rank {rank}"
        assert int(built.num_tokens) == len(own)
        assert int(built.num_dropped) == sum(e >= shape.num_experts for e in own.flatten().tolist())


def random_ids(seed, tokens, shape, *, low=-1, high=None, dtype=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    high = shape.num_experts + 2 if high is None else high
    return torch.randint(low, high, (tokens, shape.topk), generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_reference_goes_round_the_peers_when_counts_are_unequal(ep_size, dtype):
    shape = make_shape(8, 3)  # at 3 ranks the last owns two experts and one that does not exist
    ids = [random_ids(seed, 40 * seed + 7, shape, dtype=dtype) for seed in range(ep_size)]
    assert_matches_hand(ids, shape, ep_size, 40 * ep_size)


def test_reference_holds_when_there_are_72_ranks_and_most_own_nothing():
    shape = make_shape(40, 2)
    ids = [random_ids(seed, seed % 4, shape) for seed in range(72)]
    assert_matches_hand(ids, shape, 72, 4, ranks=(0, 1, 39, 40, 71))


@pytest.mark.parametrize("topk", [1, 2])
def test_reference_holds_for_every_small_token_count(topk):
    shape = make_shape(3, topk)
    for tokens in range(131):
        assert_matches_hand([random_ids(tokens, tokens, shape)], shape, 1, 130)


@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(0, id="all_to_one"),
        pytest.param(7, id="last_expert"),
        pytest.param(-1, id="all_dropped"),
        pytest.param(8, id="all_beyond"),
        pytest.param(2**31 - 1, id="largest_id"),
    ],
)
def test_reference_holds_when_all_routes_are_alike(fill):
    shape = make_shape(8, 4)  # the same expert four times in each token
    ids = [torch.full((tokens, 4), fill, dtype=torch.int32) for tokens in (33, 0, 70)]
    assert_matches_hand(ids, shape, 3, 70)


def test_reference_drops_int64_ids_that_would_wrap_to_experts():
    shape = make_shape(8, 2)
    ids = [torch.tensor([[2**32 + 1, 1], [-(2**32) + 2, 3]], dtype=torch.int64)]
    assert_matches_hand(ids, shape, 1, 2)


def test_reference_is_empty_when_no_rank_has_tokens():
    shape = make_shape(8, 2)
    ids = [torch.empty((0, 2), dtype=torch.int64)] * 2
    assert_matches_hand(ids, shape, 2, 0)


def test_reference_rows_are_a_permutation_of_all_valid_routes():
    shape = make_shape(64, 8)
    ids = [random_ids(seed, 500, shape) for seed in range(4)]
    seen: set[tuple[int, int]] = set()
    for rank in range(4):
        built = build_schedule_reference(ids, shape, rank, 4, 512)
        live = built.peer_rank >= 0
        pairs = set(zip(built.peer_rank[live].tolist(), built.peer_route[live].tolist(), strict=True))
        assert len(pairs) == int(live.sum()) == int(built.tokens_per_expert.sum())
        assert not pairs & seen
        seen |= pairs
    assert len(seen) == sum(int(((i >= 0) & (i < 64)).sum()) for i in ids)


def test_sizes_hold_every_route_when_one_rank_gets_all():
    shape = make_shape(8, 2)
    ids = [torch.zeros((100, 2), dtype=torch.int32)] * 2
    built = build_schedule_reference(ids, shape, 0, 2, 100)
    assert int(built.num_rows) == 512 <= len(built.peer_rank)


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    [
        (UnsupportedError, (make_shape(8, 2), 73, 1), "ep_size=73"),
        (UnsupportedError, (make_shape(1024, 2), 1, 1), "1024 local experts"),
        (UnsupportedError, (make_shape(8, 32), 72, 2**20), "max_tokens=1048576"),
        (ConfigError, (make_shape(8, 2), 1, -1), "max_tokens=-1"),
    ],
)
def test_sizes_refuse_by_name(error, arguments, words):
    with pytest.raises(error, match=words):
        schedule_sizes(*arguments)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros((3, 3), dtype=torch.int32), r"shape \(3, 3\)"),
        (torch.zeros((3, 2), dtype=torch.int16), "int16"),
        (torch.zeros((2, 3), dtype=torch.int32).T, "strides"),
        (torch.zeros((5, 2), dtype=torch.int32), "max_tokens=4"),
    ],
)
def test_topk_ids_are_refused_by_name(ids, words):
    with pytest.raises(ConfigError, match=words):
        build_schedule_reference([ids], make_shape(8, 2), 0, 1, 4)


def test_state_parts_do_not_overlap():
    sizes = schedule_sizes(make_shape(256, 8), 72, 8192)
    layout, groups = sizes.layout, sizes.layout.groups_per_peer
    assert groups == 32
    parts = [
        (layout.peer_tickets, 72),
        (layout.peer_tokens, 72),
        (layout.counts, 72 * 4),
        (layout.group_counts, 72 * groups * 4),
        (layout.unit_routes, 72 * groups * 8),
        (layout.local_routes, 72 * groups * 2048),
        (layout.words, 0),
    ]
    for (start, size), (following, _) in zip(parts, parts[1:], strict=False):
        assert start % 32 == 0
        assert start + size <= following
    assert layout.published_tokens_bytes >= 2 * 4 * 8192 * 8
    assert layout.symmetric_bytes == layout.schedule_flags_bytes + 72 * 128


def test_launch_enqueues_every_publish_before_any_count():
    sizes = schedule_sizes(make_shape(8, 2), 2, 4)
    log = []
    compiled = {name: lambda *values, name=name: log.append((name, values)) for name in ("publish", "count", "place")}
    arguments = []
    for rank in range(2):
        state = ScheduleState.allocate(sizes, "cpu", poison=0x7FFFFFFF)
        assert not state.scratch[: sizes.layout.zeroed_words].any()
        assert state.scratch[sizes.layout.zeroed_words] == 0x7FFFFFFF
        arguments.append(
            schedule_arguments(
                state,
                allocate_schedule(sizes, "cpu"),
                topk_ids=torch.zeros((3, 2), dtype=torch.int32),
                num_tokens=None,
                peer_table=0,
                rank=rank,
                symmetric_offset=1024,
                stop=0,
                record=0,
                limit_ns=5,
            )
        )
    launch_schedule(compiled, arguments, [11, 12])
    assert [name for name, _ in log] == ["publish"] * 2 + ["count"] * 2 + ["place"] * 2
    assert [values[-1] for _, values in log] == [11, 12] * 3
    named = dict(zip([name for name, _ in SCHEDULE_ARGS], log[1][1], strict=False))
    assert (named["rank"], named["rows"], named["limit_ns"]) == (1, 3, 5)
    assert named["published_ids"] == 1024 + sizes.layout.published_ids_bytes


def test_first_difference_names_the_element():
    shape = make_shape(8, 2)
    ids = [random_ids(1, 20, shape)]
    built, expected = (build_schedule_reference(ids, shape, 0, 1, 20) for _ in range(2))
    assert first_difference(built, expected) is None
    built.peer_route[3] = 99
    assert first_difference(built, expected) == f"peer_route[3] is 99, expected {int(expected.peer_route[3])}"
