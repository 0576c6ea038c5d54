"""Routes to schedule: for each routed row of a rank, the peer and the route it comes from.

The device builds it (``templates/schedule``); ``build_schedule_reference`` defines it. An expert's rows are contiguous,
padded to blocks of 128, and go round the peers: first every peer's first route to the expert in rank order, then every
peer's second, and so on, so that any stretch of rows pulls from all peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mok_cute.config import MAX_EP_SIZE, MAX_LOCAL_EXPERTS, ROW_BLOCK
from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.templates.schedule.layout import SCHEDULE_ARGS, ScheduleLayout, schedule_layout

if TYPE_CHECKING:
    import torch

    from mok_cute.shapes import MoEShape

LAUNCHES = ("publish", "count", "place")
MAX_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Schedule:
    """One rank's schedule, int32 tensors on its device. Only ``build_schedule`` writes them.

    peer_rank          (max_rows,) owner of each routed row, -1 on padding; undefined from num_rows on
    peer_route         (max_rows,) its route there, token * topk + k; likewise
    num_rows           (1,) padded rows in use, a multiple of 128
    expert_block_end   (local_experts,) expert e owns row blocks end[e-1] up to end[e]
    tokens_per_expert  (local_experts,) routes of each local expert, without padding
    local_ids          (max_tokens, topk) this rank's choices, -1 where dropped and beyond num_tokens
    num_dropped        (1,) local choices at or above num_experts
    num_tokens         (1,) local token count
    """

    peer_rank: torch.Tensor
    peer_route: torch.Tensor
    num_rows: torch.Tensor
    expert_block_end: torch.Tensor
    tokens_per_expert: torch.Tensor
    local_ids: torch.Tensor
    num_dropped: torch.Tensor
    num_tokens: torch.Tensor


@dataclass(frozen=True)
class ScheduleSizes:
    """Everything that sizes a schedule and its memory. ``layout`` comes from ``templates/schedule/layout.py``."""

    num_experts: int
    local_experts: int
    topk: int
    ep_size: int
    max_tokens: int
    max_rows: int
    row_block: int  # rows that an expert's segment is padded to a multiple of: those of a GEMM tile
    layout: ScheduleLayout

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of ``Schedule``."""
        return {
            "peer_rank": (self.max_rows,),
            "peer_route": (self.max_rows,),
            "num_rows": (1,),
            "expert_block_end": (self.local_experts,),
            "tokens_per_expert": (self.local_experts,),
            "local_ids": (self.max_tokens, self.topk),
            "num_dropped": (1,),
            "num_tokens": (1,),
        }


def schedule_sizes(shape: MoEShape, ep_size: int, max_tokens: int, row_block: int = ROW_BLOCK) -> ScheduleSizes:
    """Sizes for the worst routing: every route of every rank may come to one rank."""
    if not 1 <= ep_size <= MAX_EP_SIZE:
        raise UnsupportedError(f"schedule: ep_size={ep_size}: 1 to {MAX_EP_SIZE} ranks; change the group.")
    if max_tokens < 0:
        raise ConfigError(f"schedule: max_tokens={max_tokens}: at least 0; pass the largest token count of a rank.")
    local_experts = shape.local_experts(ep_size)
    if local_experts > MAX_LOCAL_EXPERTS:
        raise UnsupportedError(
            f"schedule: num_experts={shape.num_experts} on ep_size={ep_size} ranks gives {local_experts} local "
            f"experts: at most {MAX_LOCAL_EXPERTS}; use more ranks."
        )
    routes = ep_size * max_tokens * shape.topk
    max_rows = -(-routes // row_block) * row_block + row_block * local_experts
    if max_rows > MAX_INDEX:
        raise UnsupportedError(
            f"schedule: max_tokens={max_tokens} with ep_size={ep_size} and topk={shape.topk} gives {max_rows} rows: "
            f"row indices are int32, at most {MAX_INDEX}; lower max_tokens."
        )
    layout = schedule_layout(topk=shape.topk, local_experts=local_experts, ep_size=ep_size, max_tokens=max_tokens)
    return ScheduleSizes(shape.num_experts, local_experts, shape.topk, ep_size, max_tokens, max_rows, row_block, layout)


def schedule_symmetric_bytes(shape: MoEShape, ep_size: int, max_tokens: int) -> int:
    """What a schedule needs of symmetric memory: zero before the first launch, the same on all ranks."""
    return schedule_sizes(shape, ep_size, max_tokens).layout.symmetric_bytes


def allocate_schedule(sizes: ScheduleSizes, device: torch.device | str, *, poison: int | None = None) -> Schedule:
    """Tensors for one rank. The kernels need no initial values; ``poison`` fills them, for tests."""
    import torch

    tensors = {
        name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.tensor_shapes().items()
    }
    if poison is not None:
        for tensor in tensors.values():
            tensor.fill_(poison)
    return Schedule(**tensors)


@dataclass(frozen=True)
class ScheduleState:
    """What the kernels of one rank keep between them and between calls: epoch, tickets, counts, kept routes.

    scratch   (layout.words,) int32 on the device; its front is zero before the first launch, the rest anything
    """

    sizes: ScheduleSizes
    scratch: torch.Tensor

    @classmethod
    def allocate(cls, sizes: ScheduleSizes, device: torch.device | str, *, poison: int | None = None) -> ScheduleState:
        import torch

        scratch = torch.empty(sizes.layout.words, dtype=torch.int32, device=device)
        if poison is not None:
            scratch.fill_(poison)
        state = cls(sizes, scratch)
        state.reset()
        return state

    def reset(self) -> None:
        """Back to before the first launch. All ranks must do so together, and zero their symmetric part."""
        self.scratch[: self.sizes.layout.zeroed_words].zero_()


def schedule_arguments(
    state: ScheduleState,
    schedule: Schedule,
    *,
    topk_ids: torch.Tensor,
    num_tokens: torch.Tensor | None,
    peer_table: int,
    rank: int,
    symmetric_offset: int,
    stop: int,
    record: int,
    limit_ns: int,
) -> tuple[int, ...]:
    """Values for ``SCHEDULE_ARGS``, in order.

    topk_ids           (rows, topk) int32 or int64, contiguous; rows at most max_tokens
    num_tokens         (1,) int32 on the device, at most rows; None: rows
    peer_table         address of the ranks' symmetric base addresses
    symmetric_offset   where the schedule's part starts in symmetric memory
    stop, record       addresses of the stop word and of the 16 words that describe a timeout
    """
    sizes, layout = state.sizes, state.sizes.layout
    rows = check_topk_ids(sizes, topk_ids)
    scratch = state.scratch.data_ptr()
    values = {name: getattr(schedule, name).data_ptr() for name in sizes.tensor_shapes()}
    values.update(
        topk_ids=topk_ids.data_ptr(),
        rows=rows,
        count=0 if num_tokens is None else num_tokens.data_ptr(),
        peer_table=peer_table,
        rank=rank,
        ep_size=sizes.ep_size,
        max_tokens=sizes.max_tokens,
        published_ids=symmetric_offset + layout.published_ids_bytes,
        published_stride=layout.published_stride,
        published_tokens=symmetric_offset + layout.published_tokens_bytes,
        schedule_flags=symmetric_offset + layout.schedule_flags_bytes,
        state=scratch,
        groups_per_peer=layout.groups_per_peer,
        stop=stop,
        record=record,
        limit_ns=limit_ns,
    )
    for name in ("peer_tickets", "peer_tokens", "counts", "group_counts", "unit_routes", "local_routes"):
        values[name] = scratch + 4 * getattr(layout, name)
    return tuple(values[name] for name, _ in SCHEDULE_ARGS)


def check_topk_ids(sizes: ScheduleSizes, topk_ids: torch.Tensor) -> int:
    """Refuse what the kernels cannot read; returns the number of tokens."""
    import torch

    if topk_ids.dim() != 2 or topk_ids.shape[1] != sizes.topk:
        raise ConfigError(f"topk_ids: shape {tuple(topk_ids.shape)}: must be (tokens, {sizes.topk}); reshape it.")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"topk_ids: dtype {topk_ids.dtype}: must be int32 or int64; convert it.")
    if not topk_ids.is_contiguous():
        raise ConfigError(f"topk_ids: strides {topk_ids.stride()}: must be contiguous; call contiguous().")
    if topk_ids.shape[0] > sizes.max_tokens:
        raise ConfigError(
            f"topk_ids: {topk_ids.shape[0]} tokens: the workspace was made for max_tokens={sizes.max_tokens}; "
            "make a larger one."
        )
    return topk_ids.shape[0]


def launch_schedule(
    compiled: Mapping[str, Callable[..., object]] | Sequence[Mapping[str, Callable[..., object]]],
    arguments: Sequence[tuple[int, ...]],
    streams: Sequence[int],
) -> None:
    """Enqueue the three launches for each rank of this process: one rank, or all virtual ranks of a GPU.

    All ranks' publish kernels are enqueued before anything else. They alone wait for other ranks, so no kernel that a
    rank waits for can stand behind a waiting one, even where streams share a hardware queue.

    compiled    functions of ``ScheduleKernels`` by launch name; a list where ranks differ
    arguments   one tuple of ``schedule_arguments`` per rank
    streams     one raw stream handle per rank
    """
    by_rank = [compiled] * len(arguments) if isinstance(compiled, Mapping) else compiled
    for launch in LAUNCHES:
        for functions, values, stream in zip(by_rank, arguments, streams, strict=True):
            functions[launch](*values, stream)


def build_schedule_reference(
    ids_per_rank: Sequence[torch.Tensor],
    shape: MoEShape,
    rank: int,
    ep_size: int,
    max_tokens: int,
    row_block: int = ROW_BLOCK,
) -> Schedule:
    """The schedule of one rank in plain torch; the device must give the same arrays.

    ids_per_rank   (tokens of the rank, topk) int32 or int64 each
    """
    import torch

    if len(ids_per_rank) != ep_size:
        raise ConfigError(f"ids_per_rank: {len(ids_per_rank)} tensors for ep_size={ep_size}; pass one per rank.")
    sizes = schedule_sizes(shape, ep_size, max_tokens, row_block)
    for ids in ids_per_rank:
        check_topk_ids(sizes, ids)
    device = ids_per_rank[rank].device
    clean = [torch.where((ids >= 0) & (ids < sizes.num_experts), ids, -1).long().to(device) for ids in ids_per_rank]

    # Every route that comes to this rank: its local expert, peer and route number, sorted by (peer, route).
    peer = torch.cat([torch.full((ids.numel(),), p, device=device) for p, ids in enumerate(clean)])
    route = torch.cat([torch.arange(ids.numel(), device=device) for ids in clean])
    expert = torch.cat([ids.flatten() for ids in clean])
    first_expert = rank * sizes.local_experts
    here = (expert >= first_expert) & (expert < first_expert + sizes.local_experts)
    peer, route, expert = peer[here], route[here], expert[here] - first_expert

    # j: number of the route among those of its expert and peer.
    pair = expert * ep_size + peer
    by_pair = torch.argsort(pair, stable=True)
    routes_per_pair = torch.bincount(pair, minlength=sizes.local_experts * ep_size)
    pair_start = torch.cumsum(routes_per_pair, 0) - routes_per_pair
    turn = torch.empty_like(route)
    turn[by_pair] = torch.arange(route.numel(), device=device) - pair_start[pair[by_pair]]

    # Rows of an expert: by j, then by peer.
    most = max(sizes.max_tokens * sizes.topk, 1)
    in_order = torch.argsort((expert * most + turn) * ep_size + peer)
    tokens_per_expert = torch.bincount(expert, minlength=sizes.local_experts)
    blocks = -(-tokens_per_expert // row_block)
    block_end = torch.cumsum(blocks, 0)
    expert_start = torch.cumsum(tokens_per_expert, 0) - tokens_per_expert
    owner = expert[in_order]
    row = (block_end - blocks)[owner] * row_block + torch.arange(route.numel(), device=device) - expert_start[owner]

    result = allocate_schedule(sizes, device, poison=-1)
    result.peer_rank[row] = peer[in_order].int()
    result.peer_route[row] = route[in_order].int()
    result.num_rows[0] = blocks.sum() * row_block
    result.expert_block_end.copy_(block_end)
    result.tokens_per_expert.copy_(tokens_per_expert)
    result.local_ids[: clean[rank].shape[0]] = clean[rank].int()
    result.num_dropped[0] = (ids_per_rank[rank] >= sizes.num_experts).sum()
    result.num_tokens[0] = clean[rank].shape[0]
    return result


def first_difference(built: Schedule, expected: Schedule) -> str | None:
    """The first place where two schedules differ, in words; rows from num_rows on do not count. Synchronises."""
    import torch

    rows = int(expected.num_rows)
    for field in fields(Schedule):
        got, want = getattr(built, field.name).cpu(), getattr(expected, field.name).cpu()
        if field.name in ("peer_rank", "peer_route"):
            got, want = got[:rows], want[:rows]
        wrong = torch.nonzero(got != want)
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return f"{field.name}[{', '.join(map(str, at))}] is {int(got[at])}, expected {int(want[at])}"
    return None
