"""What a launch will do, as plain tables: sizes, phases, the order of tasks, signals and the workspace.

The tables come from the same declarations as the kernel: ``MoEShape``, ``KernelConfig``, the workspace table and
``templates/scheduler/order.py``. The command line prints them; nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mok_cute.templates.scheduler import order

if TYPE_CHECKING:
    from mok_cute.config import KernelConfig, RunConfig
    from mok_cute.shapes import MoEShape

Row = dict[str, Any]


def describe(
    shape: MoEShape, config: KernelConfig, run: RunConfig, ranks: int, tokens: int
) -> dict[str, list[Row] | Row]:
    """Sections by name, for one rank with ``tokens`` tokens under balanced routing."""
    tokens_per_expert = balanced_tokens_per_expert(shape, ranks, tokens)
    blocks = sum(-(-n // config.tile_rows) for n in tokens_per_expert)
    # The ring is made for the worst routing: every route of every rank here, each expert padded.
    most = -(-ranks * tokens * shape.topk // config.tile_rows) + shape.local_experts(ranks)
    run = run.fitted(most * config.tile_rows, config.tile_rows)
    o = order.TaskOrder(config.geometry(shape), tokens, blocks, run.minibatch // config.tile_rows, run.ring_minibatches)
    return {
        "sizes": size_rows(shape, config, run, ranks, tokens, o),
        "phases": phase_rows(o),
        "order": step_rows(o),
        "signals": signal_rows(),
        "shared_memory": smem_rows(shape, config, ranks),
        "workspace": workspace_rows(shape, ranks, tokens, run),
    }


def smem_rows(shape: MoEShape, config: KernelConfig, ranks: int) -> list[Row]:
    """Shared memory of a CTA by purpose, as planned; the compiled figure adds the alignment between the parts."""
    plan = config.smem_plan(shape, shape.local_experts(ranks))
    return [{"purpose": purpose, "bytes": num_bytes} for purpose, num_bytes in plan.items()]


def balanced_tokens_per_expert(shape: MoEShape, ranks: int, tokens: int) -> list[int]:
    """Routes that reach each expert of rank 0 when all experts get equally many, the first ones the remainder."""
    each, more = divmod(ranks * tokens * shape.topk, shape.num_experts)
    return [each + (expert < more) for expert in shape.owned_experts(0, ranks)]


def size_rows(
    shape: MoEShape, config: KernelConfig, run: RunConfig, ranks: int, tokens: int, o: order.TaskOrder
) -> Row:
    return {
        **asdict(shape),
        "ranks": ranks,
        "tokens_per_rank": tokens,
        "local_experts": shape.local_experts(ranks),
        "precision": config.precision,
        "tile_rows": config.tile_rows,
        "minibatch": run.minibatch,
        "macrobatch": run.macrobatch,
        "comm_sms": run.comm_sms,
        "routed_rows": o.routed_blocks * config.tile_rows,
        "minibatches": o.num_minibatches,
        "ring_reused": max(o.num_minibatches - o.ring_minibatches, 0),
        "tasks": o.num_tasks,
        "dispatch_groups": o.num_dispatch_groups,
    }


def phase_rows(o: order.TaskOrder) -> list[Row]:
    """Each phase with what it waits for and announces; counts are those of a full minibatch of this launch."""
    number = {
        order.END: o.num_dispatch_groups,
        order.SHARED_GATE_UP: o.shared_gate_up_tasks,
        order.GATE_UP: o.routed_blocks * o.geometry.gate_up_cols,
        order.SHARED_DOWN: o.shared_down_tasks,
        order.DOWN: o.routed_blocks * o.geometry.down_cols,
        order.REDUCE: o.num_reduce_tasks,
    }
    # A tile of the last minibatch: the one that meets every guard, if any tile does.
    last = max(o.num_minibatches - 1, 0)
    return [
        {
            "phase": phase.name,
            "tasks": number[phase.kind],
            "reads": ", ".join(phase.reads),
            "writes": ", ".join(phase.writes),
            "waits": "; ".join(_wait_text(o, wait, order.Tile(phase.kind, last, 0, 0, 0, 0)) for wait in phase.waits),
            "publishes": "; ".join(f"{p.signal} +{p.arrivals(o)}" for p in phase.publishes),
        }
        for phase in order.PHASES
    ]


def _wait_text(o: order.TaskOrder, wait: order.Wait, tile: order.Tile) -> str:
    if wait.all_peers:
        return f"{wait.signal} of every peer >= epoch ({wait.by})"
    condition = ", when the ring block was used before" if wait.when is not None else ""
    return f"{wait.signal} >= {wait.required(o, tile)} ({wait.by}{condition})"


def step_rows(o: order.TaskOrder) -> list[Row]:
    """The picture of the order: one row per run of tickets of one phase and minibatch."""
    rows: list[Row] = []
    names = {phase.kind: phase.name for phase in order.PHASES}
    for step in range(o.num_minibatches + 1 + o.lookahead):
        ticket = o.step_start(step)
        while ticket < o.step_start(step + 1):
            kind, z, number = o.locate(ticket)
            assert number == 0, "a run of tickets starts with the first task of its phase"
            shared = kind in (order.SHARED_GATE_UP, order.SHARED_DOWN)
            count = _tasks_of(o, kind, z)
            rows.append(
                {
                    "step": step,
                    "phase": names[kind],
                    "first_ticket": ticket,
                    "last_ticket": ticket + count - 1,
                    "minibatch": None if shared else o.minibatch(z),
                    "row_blocks": f"0..{o.token_blocks - 1}"
                    if shared
                    else f"{o.first_block(z)}..{o.first_block(z) + o.blocks_of(z) - 1}",
                    "ring_slot": None if shared else z % o.ring_minibatches,
                }
            )
            ticket += count
    if o.num_reduce_tasks:
        rows.append(
            {
                "step": o.num_minibatches + 1 + o.lookahead,
                "phase": names[order.REDUCE],
                "first_ticket": o.num_gemm_tasks,
                "last_ticket": o.num_tasks - 1,
                "minibatch": None,
                "row_blocks": f"0..{o.token_blocks - 1}",
                "ring_slot": None,
            }
        )
    return rows


def _tasks_of(o: order.TaskOrder, kind: int, z: int) -> int:
    """Tasks of one phase of one minibatch."""
    if kind == order.SHARED_GATE_UP:
        return o.shared_gate_up_tasks
    if kind == order.SHARED_DOWN:
        return o.shared_down_tasks
    cols = o.geometry.gate_up_cols if kind == order.GATE_UP else o.geometry.down_cols
    return o.blocks_of(z) * cols


def signal_rows() -> list[Row]:
    return [{"signal": s.name, "scope": s.scope, "meaning": s.meaning} for s in order.SIGNALS]


def workspace_rows(shape: MoEShape, ranks: int, max_tokens: int, run: RunConfig) -> list[Row]:
    """Buffers of one rank with their bytes, from the workspace table."""
    from mok_cute.workspace import describe_workspace

    return describe_workspace(shape, ranks, max_tokens, run)
