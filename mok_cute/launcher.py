"""CompiledKernel + workspace + tensors -> one launch on a stream. No synchronisation, nothing allocated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mok_cute.config import RunConfig
from mok_cute.templates.launch_args import FORWARD_ARGS

if TYPE_CHECKING:
    import torch

    from mok_cute.functional import ForwardContext, RoutedWeights, SharedWeights
    from mok_cute.schedule import Schedule
    from mok_cute.workspace import Workspace

NS_PER_S = 1_000_000_000


def forward_arguments(
    workspace: Workspace,
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    topk_weights: torch.Tensor,
    routed: RoutedWeights,
    shared: SharedWeights | None,
    shared_factor: torch.Tensor | None,
    context: ForwardContext | None,
    run: RunConfig,
    num_ctas: int,
    comm_ctas: int,
) -> tuple[int, ...]:
    """Values for ``FORWARD_ARGS``, in order. The tensors are already checked; ``run`` already fits the rings."""
    fixed = workspace.fixed_arguments
    anything = fixed["x_ring"]  # a valid address for what is absent or empty

    def at(tensor: torch.Tensor | None) -> int:
        return anything if tensor is None else tensor.data_ptr() or anything

    values = {
        **fixed,
        "x": at(x),
        "y": at(y),
        "topk_weights": at(topk_weights),
        "shared_factor": at(shared_factor),
        "saved_x": 0 if context is None else context.x.data_ptr(),
        "peer_rank": schedule.peer_rank.data_ptr(),
        "peer_route": schedule.peer_route.data_ptr(),
        "num_rows": schedule.num_rows.data_ptr(),
        "expert_block_end": schedule.expert_block_end.data_ptr(),
        "local_ids": schedule.local_ids.data_ptr(),
        "num_tokens": schedule.num_tokens.data_ptr(),
        "minibatch_blocks": run.minibatch // workspace.kernel.config.tile_rows,
        "ring_minibatches": run.ring_minibatches,
        "num_ctas": num_ctas,
        "comm_ctas": comm_ctas,
        "entry_limit_ns": int(workspace.settings.entry_timeout_s * NS_PER_S),
        "wait_limit_ns": int(workspace.settings.timeout_s * NS_PER_S),
        "x_rows": max(1, len(x)),
        "saved_rows": fixed["ring_rows"] if context is None else len(context.x),
        "saved_gate": fixed["hidden_ring"] if context is None else context.gate.data_ptr(),
        "saved_up": fixed["hidden_ring"] if context is None else context.up.data_ptr(),
        "gate": at(routed.gate),
        "gate_stride": expert_stride(routed.gate),
        "up": at(routed.up),
        "up_stride": expert_stride(routed.up),
        "down": at(routed.down),
        "down_stride": expert_stride(routed.down),
        "shared_gate": at(shared.gate if shared else None),
        "shared_up": at(shared.up if shared else None),
        "shared_down": at(shared.down if shared else None),
    }
    return tuple([values[name] for name, _ in FORWARD_ARGS])


def expert_stride(weight: torch.Tensor) -> int:
    """Elements between two experts; with one expert or none torch may report any stride."""
    return int(weight.stride(0)) if len(weight) > 1 else int(weight.shape[1] * weight.shape[2])


def launch_forward(
    workspaces: Sequence[Workspace], arguments: Sequence[tuple[int, ...]], streams: Sequence[int]
) -> None:
    """One kernel per rank, nothing in between: virtual ranks wait for each other inside their kernels."""
    for workspace, values, stream in zip(workspaces, arguments, streams, strict=True):
        workspace.kernel.function(*values, stream)
        workspace.launches["forward"] += 1


def rank_streams(workspaces: Sequence[Workspace]) -> AbstractContextManager[list[int]]:
    """Raw stream handles, one per rank, ordered behind the caller's current stream and before what follows on it.

    A single rank uses the current stream itself. Virtual ranks have a stream each, so that their kernels run at the
    same time.
    """
    own = [workspace.stream for workspace in workspaces if workspace.stream is not None]
    return workspaces[0].gpu.rank_streams(own)
