"""What one launch is told: addresses and run-time counts, one kernel parameter per field. Pure data, no DSL.

All addresses are byte addresses in global memory; 0 means absent where said. ``FORWARD_ARGS`` lists the host
function's arguments in order, for the compiler's example arguments and for the launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cutlass import Int32, Int64

# ENTERED is no signal, it orders nothing: it starts the clocks of a launch's waits once all peers are here.
# Word offsets inside one counter set (int32). Each scalar has a 128-byte line of its own: they are the hot ones.
TICKET, X_STAGED, ENTERED, PUSHES_DONE, SHARED_Y_DONE, CTAS_DONE, COUNTER_ARRAYS = (32 * i for i in range(7))
# Word offsets inside the control block, which outlives launches.
CONTROL_EPOCH, CONTROL_STOP, CONTROL_WORDS = 0, 32, 64
# Bytes between the epoch words of two peers: one line each.
PEER_SIGNAL_BYTES = 128


class LaunchArgs(NamedTuple):
    # this call
    x: Int64  # (num_tokens, hidden) bf16
    y: Int64  # (num_tokens, hidden) bf16, written
    topk_weights: Int64  # (num_tokens, topk) f32
    shared_factor: Int64  # (num_tokens,) f32; read only when the shape has a factor
    saved_x: Int64  # (saved rows, hidden) bf16, written for macrobatch 0; 0: nothing is saved
    # schedule
    peer_rank: Int64  # (max_rows,) i32, -1 on padding
    peer_route: Int64  # (max_rows,) i32
    num_rows: Int64  # (1,) i32
    expert_block_end: Int64  # (local_experts,) i32
    local_ids: Int64  # (max_tokens, topk) i32, -1 dropped
    num_tokens: Int64  # (1,) i32
    # ranks
    peer_table: Int64  # (ep_size,) i64: base of each peer's symmetric memory
    rank: Int32
    ep_size: Int32
    x_offset: Int64  # byte offsets in symmetric memory: x (max_tokens, hidden) bf16
    combine_offset: Int64  # (max_tokens * topk, hidden) bf16
    entry_offset: Int64  # (ep_size,) epoch words, PEER_SIGNAL_BYTES apart
    exit_offset: Int64
    # workspace of this rank
    x_ring: Int64  # (ring rows, hidden) bf16
    shared_y: Int64  # (max_tokens, hidden) bf16
    counters: Int64  # two sets of set_words int32
    set_words: Int32
    x_routed_ready: Int32  # word offsets of the counter arrays inside a set
    hidden_ready: Int32
    shared_hidden_ready: Int32
    y_done: Int32
    control: Int64
    record: Int64
    # run configuration
    minibatch_blocks: Int32
    ring_minibatches: Int32
    comm_ctas: Int32
    entry_limit_ns: Int64
    wait_limit_ns: Int64


class TensorArgs(NamedTuple):
    """Addresses that only the host function needs, to encode TMA descriptors."""

    x_rows: Int32  # rows of x (at least 1)
    token_rows: Int32  # rows of shared_hidden and shared_y
    ring_rows: Int32
    saved_rows: Int32
    hidden_ring: Int64  # (ring rows, intermediate) bf16
    shared_hidden: Int64  # (max_tokens, shared_intermediate) bf16
    saved_gate: Int64  # (saved rows, intermediate) bf16
    saved_up: Int64
    gate: Int64  # (local_experts, intermediate, hidden) bf16, rows contiguous
    gate_stride: Int64  # elements between experts
    up: Int64
    up_stride: Int64
    down: Int64  # (local_experts, hidden, intermediate) bf16
    down_stride: Int64
    shared_gate: Int64  # (shared_intermediate, hidden) bf16
    shared_up: Int64
    shared_down: Int64  # (hidden, shared_intermediate) bf16


def _flat(*groups: type) -> tuple[tuple[str, str], ...]:
    """(name, type) of every field; the annotations are names, as this module must not import the DSL."""
    return tuple(
        (name, str(getattr(kind, "__forward_arg__", kind)))
        for group in groups
        for name, kind in group.__annotations__.items()
    )


FORWARD_ARGS: tuple[tuple[str, str], ...] = (*_flat(LaunchArgs, TensorArgs), ("num_ctas", "Int32"))
