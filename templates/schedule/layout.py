"""What the three schedule kernels are told, and how their scratch memory is cut up. Pure data, no DSL.

Vocabulary: a unit is 256 consecutive routes of one peer, the work of one warp; a group is the eight units of one CTA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cutlass import Int32, Int64

WARPS = 8
THREADS = 32 * WARPS
ROUTES_PER_UNIT = 256
ROUTES_PER_GROUP = WARPS * ROUTES_PER_UNIT
ROUTES_PER_PUBLISH_CTA = 1024

# Words of the state block (int32) that every launch shares, one 128-byte line each; all start at zero.
EPOCH, PUBLISH_TICKET, PLACE_TICKET, DROPPED, STATE_HEADER_WORDS = (32 * i for i in range(5))

# In symmetric memory: one line per token count and per peer's flag.
LINE_BYTES = 128


class ScheduleArgs(NamedTuple):
    """Arguments of publish, count and place alike, in order. Int64 fields are byte addresses unless said otherwise."""

    # this call
    topk_ids: Int64  # (rows, topk) i32 or i64, as compiled
    rows: Int32  # at most max_tokens; the local token count unless `count` is given
    count: Int64  # (1,) i32, local token count, at most rows; 0: absent
    # the schedule, all int32
    peer_rank: Int64  # (max_rows,)
    peer_route: Int64  # (max_rows,)
    num_rows: Int64  # (1,)
    expert_block_end: Int64  # (local_experts,)
    tokens_per_expert: Int64  # (local_experts,)
    local_ids: Int64  # (max_tokens, topk)
    num_dropped: Int64  # (1,)
    num_tokens: Int64  # (1,)
    # ranks
    peer_table: Int64  # (ep_size,) i64: base of each peer's symmetric memory
    rank: Int32
    ep_size: Int32
    max_tokens: Int32
    published_ids: Int64  # byte offset in symmetric memory: (2, published_stride) i32, by parity of the epoch
    published_stride: Int64  # words of one epoch's ids
    published_tokens: Int64  # byte offset: two i32 counts, LINE_BYTES apart, by parity of the epoch
    schedule_flags: Int64  # byte offset: (ep_size,) epochs, LINE_BYTES apart
    # scratch of this rank
    state: Int64  # STATE_HEADER_WORDS i32
    peer_tickets: Int64  # (ep_size,) i32, zero between launches
    peer_tokens: Int64  # (ep_size,) i32
    counts: Int64  # (ep_size, local_experts) i32
    group_counts: Int64  # (ep_size, groups_per_peer, local_experts) i32, then their exclusive prefix over groups
    unit_routes: Int64  # (ep_size, groups_per_peer, WARPS) i32: how many of a unit's routes come to this rank
    local_routes: Int64  # (ep_size, groups_per_peer, ROUTES_PER_GROUP) i32: place in unit | local expert << 8
    groups_per_peer: Int32
    # giving up
    stop: Int64  # (1,) i32
    record: Int64  # 16 i32, host-mapped
    limit_ns: Int64  # nanoseconds, 0: wait for ever


# (name, type) of every argument; the annotations are names, as this module must not import the DSL.
SCHEDULE_ARGS: tuple[tuple[str, str], ...] = tuple(
    (name, str(getattr(kind, "__forward_arg__", kind))) for name, kind in ScheduleArgs.__annotations__.items()
)


class ScheduleLayout(NamedTuple):
    """Memory that outlives calls. Word offsets lie in the rank's own scratch, byte offsets in symmetric memory."""

    words: int  # of the scratch, int32
    zeroed_words: int  # at its front, zero before the first launch; the kernels keep them up afterwards
    peer_tickets: int
    peer_tokens: int
    counts: int
    group_counts: int
    unit_routes: int
    local_routes: int
    groups_per_peer: int
    symmetric_bytes: int  # peers read published_*, and write schedule_flags
    published_ids_bytes: int
    published_stride: int  # words
    published_tokens_bytes: int
    schedule_flags_bytes: int  # from here to the end zero before the first launch of any rank


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def schedule_layout(*, topk: int, local_experts: int, ep_size: int, max_tokens: int) -> ScheduleLayout:
    """Lay out scratch and symmetric memory; every part starts on a 128-byte line."""
    groups = max(1, -(-max_tokens * topk // ROUTES_PER_GROUP))
    offsets, words = [], STATE_HEADER_WORDS
    for size in (
        ep_size,
        ep_size,
        ep_size * local_experts,
        ep_size * groups * local_experts,
        ep_size * groups * WARPS,
        ep_size * groups * ROUTES_PER_GROUP,
    ):
        offsets.append(words)
        words += _round_up(size, 32)
    stride = _round_up(max(1, max_tokens * topk), 32)
    tokens_bytes = 2 * stride * 4
    flags_bytes = tokens_bytes + 2 * LINE_BYTES
    return ScheduleLayout(
        words=words,
        zeroed_words=offsets[1],
        peer_tickets=offsets[0],
        peer_tokens=offsets[1],
        counts=offsets[2],
        group_counts=offsets[3],
        unit_routes=offsets[4],
        local_routes=offsets[5],
        groups_per_peer=groups,
        symmetric_bytes=flags_bytes + ep_size * LINE_BYTES,
        published_ids_bytes=0,
        published_stride=stride,
        published_tokens_bytes=tokens_bytes,
        schedule_flags_bytes=flags_bytes,
    )
