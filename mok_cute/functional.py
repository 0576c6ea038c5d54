"""The layer as plain functions, for framework authors: workspace, schedule, forward.

Each function has a form for one rank and a form for all virtual ranks of this process (lists, one entry per rank).
Nothing here waits for the GPU, except ``MOK_CUTE_CHECKS=2`` and ``Workspace.check``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from mok_cute.config import KernelConfig, RunConfig
from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.settings import Settings
from mok_cute.workspace import Workspace, WorkspaceTable, raise_if_any_failed

if TYPE_CHECKING:
    import torch

    from mok_cute.gpu import Gpu
    from mok_cute.schedule import Schedule
    from mok_cute.shapes import MoEShape

MAX_GRID = 4
DEFAULT_COMM_SMS = 16
DEFAULT_COMM_SHARE = 4  # at most a quarter of a rank's CTAs by default


class RoutedWeights(NamedTuple):
    """This rank's experts, bf16. Rows are contiguous; experts may lie any multiple of 8 elements apart.

    local experts is ceil(E / P) on every rank: a rank that owns fewer pads, and the padding is never read.
    """

    gate: torch.Tensor  # (local experts, intermediate, hidden)
    up: torch.Tensor  # (local experts, intermediate, hidden)
    down: torch.Tensor  # (local experts, hidden, intermediate)


class SharedWeights(NamedTuple):
    """The shared expert, bf16, contiguous, the same on every rank."""

    gate: torch.Tensor  # (shared_intermediate, hidden)
    up: torch.Tensor  # (shared_intermediate, hidden)
    down: torch.Tensor  # (hidden, shared_intermediate)


@dataclass(frozen=True)
class ForwardContext:
    """What backward needs of macrobatch 0, the first ``rows`` rows of the schedule; allocated per call.

    x       (rows, hidden) bf16: the routed rows
    gate    (rows, intermediate) bf16, before the clamp
    up      (rows, intermediate) bf16, before the clamp
    Padding rows hold zeros, rows beyond the schedule's num_rows anything.
    """

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor


Output = tuple["torch.Tensor", "ForwardContext | None"]


def create_workspaces(
    shape: MoEShape,
    *,
    ep_size: int,
    max_tokens: int,
    device: torch.device | str = "cuda",
    run: RunConfig | None = None,
    config: KernelConfig | None = None,
    settings: Settings | None = None,
) -> list[Workspace]:
    """Memory for ``ep_size`` virtual ranks of this process on one GPU, each with its share of the SMs.

    max_tokens   largest token count of any rank in any call
    device       a CUDA device, or ``virtual:sm_90a``: the virtual GPU, whose tensors lie on the CPU
    run          its macrobatch sets the length of the rings; later calls may use less, never more
    settings     time limits and checks of all later calls; None: from the environment, now

    Compiles or loads the kernels, so that later calls launch at once. Raises ConfigError for arguments that mean
    nothing and UnsupportedError for what this machine cannot serve.
    """
    from mok_cute import gpu as gpus
    from mok_cute.compile import compile_forward
    from mok_cute.schedule import ScheduleState, schedule_sizes
    from mok_cute.symmetric import allocate_local
    from mok_cute.templates.records import RECORD_WORDS

    gpu = gpus.find(device)
    run = run or RunConfig()
    settings = settings or Settings.from_environment()
    config = config or default_config(shape, gpu.arch.name, ep_size, max_tokens)
    row_block = config.tile_rows
    table = WorkspaceTable.of(shape, ep_size, max_tokens, run, row_block)
    kernel = compile_forward(shape, config, gpu.arch.name, shape.local_experts(ep_size), settings)
    if ep_size > gpu.max_ranks:
        raise UnsupportedError(
            f"ep_size={ep_size}: at most {gpu.max_ranks} virtual ranks in one process, one stream each; "
            "use fewer ranks."
        )
    share = gpu.sms_per_rank(ep_size)
    needed = 2 * config.ctas_per_tile
    if share < needed:
        raise UnsupportedError(
            f"ep_size={ep_size}: {gpu} gives each virtual rank {share} SMs, and a rank needs at least {needed}; "
            "use fewer ranks."
        )
    schedule_kernels = load_schedule_kernels(shape, kernel.arch, ep_size, settings, gpu, row_block)
    blocks = allocate_local(table.symmetric_bytes, ep_size, gpu)
    sizes = schedule_sizes(shape, ep_size, max_tokens, row_block)
    workspaces = [
        Workspace(
            shape=shape,
            kernel=kernel,
            settings=settings,
            table=table,
            symmetric=block,
            local=gpu.zeros(table.local_bytes),
            record=gpu.pinned_words(RECORD_WORDS),
            run=run.fitted(table.max_rows, row_block),
            schedule_state=ScheduleState.allocate(sizes, gpu.torch_device),
            gpu=gpu,
            stream=gpu.new_stream() if ep_size > 1 else None,
            num_sms=min(share, run.num_sms or share),
            schedule_kernels=schedule_kernels,
        )
        for block in blocks
    ]
    for workspace in workspaces:
        workspace.name_arrays()
    gpu.synchronize()  # everything is zeroed before any stream may use it
    return workspaces


def create_workspace(
    shape: MoEShape,
    *,
    max_tokens: int,
    device: torch.device | str = "cuda",
    run: RunConfig | None = None,
    config: KernelConfig | None = None,
    settings: Settings | None = None,
) -> Workspace:
    """A workspace for a single rank that owns all experts; see ``create_workspaces``."""
    return create_workspaces(
        shape, ep_size=1, max_tokens=max_tokens, device=device, run=run, config=config, settings=settings
    )[0]


def build_schedules(
    workspaces: Sequence[Workspace],
    topk_ids: Sequence[torch.Tensor],
    num_tokens: Sequence[torch.Tensor] | None = None,
) -> list[Schedule]:
    """From each rank's expert choices to the routed rows of each rank, in three launches per rank.

    topk_ids     (tokens, topk) int32 or int64 per rank, contiguous; -1 and ids beyond the experts are dropped
    num_tokens   (1,) int32 on the device per rank: how many of the tokens count; None: all

    The arrays live on the device and may be used at once on the current stream.
    """
    from mok_cute.launcher import NS_PER_S, rank_streams
    from mok_cute.schedule import allocate_schedule, launch_schedule, schedule_arguments
    from mok_cute.templates.launch_args import CONTROL_STOP

    check_lengths(workspaces, topk_ids=topk_ids, num_tokens=num_tokens)
    raise_if_any_failed(workspaces)
    counts = [None] * len(workspaces) if num_tokens is None else list(num_tokens)
    for workspace, ids, count in zip(workspaces, topk_ids, counts, strict=True):
        if workspace.settings.checks >= 1:
            check_choices(workspace, ids, count)
    schedules = [allocate_schedule(w.schedule_state.sizes, w.device) for w in workspaces]
    compiled = [w.schedule_kernels[8 * ids.element_size()] for w, ids in zip(workspaces, topk_ids, strict=True)]
    arguments = [
        schedule_arguments(
            workspace.schedule_state,
            schedule,
            topk_ids=ids,
            num_tokens=count,
            peer_table=workspace.symmetric.peer_table.data_ptr(),
            rank=workspace.rank,
            symmetric_offset=workspace.table.buffers["schedule_exchange"].offset,
            stop=workspace.address("control") + 4 * CONTROL_STOP,
            record=workspace.record.data_ptr(),
            limit_ns=int(workspace.settings.entry_timeout_s * NS_PER_S),
        )
        for workspace, schedule, ids, count in zip(workspaces, schedules, topk_ids, counts, strict=True)
    ]
    with rank_streams(workspaces) as streams:
        launch_schedule(compiled, arguments, streams)
    for workspace, schedule, ids in zip(workspaces, schedules, topk_ids, strict=True):
        workspace.launches["schedule"] += 3
        workspace.schedule_rows[schedule.local_ids.data_ptr()] = len(ids)
    if workspaces[0].settings.checks >= 2:
        refuse_dropped(workspaces, schedules)
    return schedules


def build_schedule(workspace: Workspace, topk_ids: torch.Tensor, num_tokens: torch.Tensor | None = None) -> Schedule:
    """``build_schedules`` for a single rank."""
    return build_schedules([workspace], [topk_ids], None if num_tokens is None else [num_tokens])[0]


def check_choices(workspace: Workspace, topk_ids: torch.Tensor, count: torch.Tensor | None) -> None:
    """Refuse expert choices and a token count that the kernels cannot read."""
    import torch

    device = workspace.device
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"topk_ids: dtype {topk_ids.dtype}: must be int32 or int64; convert it.")
    if topk_ids.device != device:
        raise ConfigError(f"topk_ids: on {topk_ids.device}: must be on {device}; move it.")
    if count is not None and (count.dtype != torch.int32 or count.numel() != 1 or count.device != device):
        raise ConfigError(
            f"num_tokens: {count.dtype} of shape {tuple(count.shape)} on {count.device}: must be one int32 on "
            f"{device}; convert it."
        )


def refuse_dropped(workspaces: Sequence[Workspace], schedules: Sequence[Schedule]) -> None:
    """Raise ConfigError when a rank's ids name experts that do not exist. Waits for the GPU."""
    for workspace, schedule in zip(workspaces, schedules, strict=True):
        dropped = int(schedule.num_dropped)
        if dropped:
            raise ConfigError(
                f"topk_ids: rank {workspace.rank} has {dropped} ids at or above num_experts="
                f"{workspace.shape.num_experts}: ids run from 0, and -1 drops a route; correct them."
            )


def forward_ranks(
    workspaces: Sequence[Workspace],
    schedules: Sequence[Schedule],
    xs: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    routed: Sequence[RoutedWeights],
    shared: Sequence[SharedWeights] | None = None,
    *,
    shared_factors: Sequence[torch.Tensor] | None = None,
    save_for_backward: bool = False,
    run: RunConfig | None = None,
) -> list[Output]:
    """The layer forward, one kernel per rank: y[t] = s[t] * S(x[t]) + sum over k of w[t, k] * E[id[t, k]](x[t]).

    xs               (tokens, hidden) bf16 per rank, contiguous
    topk_weights     (tokens, topk) f32 per rank
    shared_factors   (tokens,) f32 per rank, exactly when the shape has a shared_factor
    run              changes speed and memory only; None: the workspace's

    Returns (y, context) per rank: y (tokens, hidden) bf16; context only with ``save_for_backward``. Where the schedule
    was given a device count, rows of y from that count on are left unwritten. Virtual ranks of one process must go
    through one call together: one rank alone would wait for the others. Raises
    PeerTimeoutError if an earlier launch gave up, as far as its record has arrived.
    """
    import torch

    from mok_cute.launcher import forward_arguments, launch_forward, rank_streams

    check_lengths(workspaces, schedules=schedules, xs=xs, topk_weights=topk_weights, routed=routed, shared=shared)
    check_lengths(workspaces, shared_factors=shared_factors)
    raise_if_any_failed(workspaces)
    outputs: list[Output] = []
    arguments = []
    for i, workspace in enumerate(workspaces):
        factor = None if shared_factors is None else shared_factors[i]
        shared_weights = None if shared is None else shared[i]
        if workspace.settings.checks >= 1:
            check_tensors(workspace, schedules[i], xs[i], topk_weights[i], routed[i], shared_weights, factor)
        chosen = fit_run(workspace, run)
        context = None
        if save_for_backward:
            context = allocate_context(workspace, chosen)
        y = torch.empty_like(xs[i])
        arguments.append(
            forward_arguments(
                workspace,
                schedules[i],
                xs[i],
                y,
                topk_weights[i],
                routed[i],
                shared_weights,
                factor,
                context,
                chosen,
                launch_ctas(workspace, chosen, len(xs[i])),
                comm_ctas(workspace, chosen),
            )
        )
        outputs.append((y, context))
    with rank_streams(workspaces) as streams:
        launch_forward(workspaces, arguments, streams)
    return outputs


def forward(
    workspace: Workspace,
    schedule: Schedule,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    routed: RoutedWeights,
    shared: SharedWeights | None = None,
    *,
    shared_factor: torch.Tensor | None = None,
    save_for_backward: bool = False,
    run: RunConfig | None = None,
) -> Output:
    """``forward_ranks`` for a single rank."""
    return forward_ranks(
        [workspace],
        [schedule],
        [x],
        [topk_weights],
        [routed],
        None if shared is None else [shared],
        shared_factors=None if shared_factor is None else [shared_factor],
        save_for_backward=save_for_backward,
        run=run,
    )[0]


def load_schedule_kernels(
    shape: MoEShape, arch_name: str, ep_size: int, settings: Settings, gpu: Gpu, row_block: int
) -> dict[int, dict[str, Callable[..., object]]]:
    """The schedule kernels for int32 and int64 ids, by bits, loaded by one launch each on a rank of their own.

    CUDA loads a kernel at its first launch and may wait for the device to do so. With virtual ranks that launch would
    stand behind a kernel of another rank that waits for it, so all of them run once before any rank needs them.
    """
    import torch

    from mok_cute.compile import compile_schedule
    from mok_cute.launcher import NS_PER_S
    from mok_cute.schedule import ScheduleState, allocate_schedule, launch_schedule, schedule_arguments, schedule_sizes
    from mok_cute.symmetric import allocate_local

    loaded = {}
    device = gpu.torch_device
    sizes = schedule_sizes(shape, 1, 1, row_block)
    for dtype in (torch.int32, torch.int64):
        id_bits = 8 * dtype.itemsize
        functions = compile_schedule(shape, arch_name, ep_size, id_bits, settings, row_block).functions
        block = allocate_local(sizes.layout.symmetric_bytes, 1, gpu)[0]
        words = torch.zeros(64, dtype=torch.int32, device=device)  # stop word, then a record
        nothing = torch.full((1, shape.topk), -1, dtype=dtype, device=device)
        arguments = schedule_arguments(
            ScheduleState.allocate(sizes, device),
            allocate_schedule(sizes, device),
            topk_ids=nothing,
            num_tokens=None,
            peer_table=block.peer_table.data_ptr(),
            rank=0,
            symmetric_offset=0,
            stop=words.data_ptr(),
            record=words.data_ptr() + 128,
            limit_ns=NS_PER_S,
        )
        with gpu.rank_streams([]) as streams:
            launch_schedule(functions, [arguments], streams)
        gpu.synchronize()
        loaded[id_bits] = functions
    return loaded


def fit_run(workspace: Workspace, run: RunConfig | None) -> RunConfig:
    """The run configuration of a call, within the rings that the workspace has."""
    if run is None:
        return workspace.run
    table = workspace.table
    fitted = run.fitted(table.max_rows, workspace.kernel.config.tile_rows)
    if fitted.macrobatch > table.ring_rows >= table.max_rows and fitted.minibatch <= table.ring_rows:
        fitted = replace(fitted, macrobatch=table.ring_rows // fitted.minibatch * fitted.minibatch)
    if fitted.macrobatch > table.ring_rows:
        raise ConfigError(
            f"macrobatch={run.macrobatch}: the rings of this workspace hold {table.ring_rows} rows; "
            "create the workspace with a larger macrobatch."
        )
    return fitted


def default_config(shape: MoEShape, arch_name: str, ep_size: int, max_tokens: int) -> KernelConfig:
    """What a workspace is built for when nothing is asked.

    A rank that has a Blackwell GPU to itself takes its tasks from launch control, with a grid for the worst routing.
    It draws tickets instead where that grid is more than ``MAX_GRID`` times what a balanced routing needs, and where
    virtual ranks share a GPU, which waiting clusters of one rank would fill.
    """
    config = KernelConfig.default(arch_name)
    routes = max_tokens * shape.topk  # of a balanced routing, here and elsewhere
    each = -(-routes // (shape.local_experts(ep_size) * config.tile_rows))
    balanced = min(routes, shape.local_experts(ep_size) * each)
    fits = most_blocks(shape, ep_size, max_tokens, config.tile_rows) <= MAX_GRID * balanced
    if config.tensor_core == "tcgen05" and ep_size == 1 and fits:
        config = replace(config, roles=(("scheduler", "launch_control"),))
    return config


def most_blocks(shape: MoEShape, ep_size: int, tokens: int, row_block: int) -> int:
    """Row blocks of a rank for the worst routing of ``tokens`` tokens on every rank."""
    routes = ep_size * tokens * shape.topk
    return min(routes, routes // row_block + shape.local_experts(ep_size))


def resident_ctas(workspace: Workspace, run: RunConfig) -> int:
    """CTAs that may run at once: never more than this rank's share of the SMs, in whole clusters."""
    cluster = workspace.kernel.config.ctas_per_tile
    return min(workspace.num_sms, run.num_sms or workspace.num_sms) // cluster * cluster


def launch_ctas(workspace: Workspace, run: RunConfig, tokens: int) -> int:
    """CTAs of the grid: the resident ones, or with launch control one cluster for each task there may be.

    tokens   of this rank in this call
    """
    from mok_cute.templates.scheduler.order import TaskOrder

    config, table = workspace.kernel.config, workspace.table
    if not config.uses_launch_control:
        return resident_ctas(workspace, run)
    blocks = table.max_rows // config.tile_rows
    if workspace.ep_size == 1:
        blocks = min(blocks, most_blocks(workspace.shape, 1, tokens, config.tile_rows))
    geometry, minibatch = config.geometry(workspace.shape), run.minibatch // config.tile_rows
    o = TaskOrder(geometry, tokens, blocks, minibatch, run.ring_minibatches)
    return comm_ctas(workspace, run) + config.ctas_per_tile * max(1, o.num_tasks)


def comm_ctas(workspace: Workspace, run: RunConfig) -> int:
    """CTAs that dispatch before they compute, in whole clusters. At least one cluster must compute from the start:
    dispatch may wait for ring rows that only computing frees."""
    num_ctas, cluster = resident_ctas(workspace, run), workspace.kernel.config.ctas_per_tile
    wanted = run.comm_sms
    if wanted is None:
        wanted = max(1, min(DEFAULT_COMM_SMS, num_ctas // DEFAULT_COMM_SHARE))
    wanted = -(-wanted // cluster) * cluster
    if wanted >= num_ctas:
        raise ConfigError(
            f"comm_sms={run.comm_sms}: this rank has {num_ctas} CTAs and at least {cluster} must compute; "
            f"set comm_sms to at most {num_ctas - cluster}."
        )
    return wanted


def allocate_context(workspace: Workspace, run: RunConfig) -> ForwardContext:
    import torch

    shape, rows = workspace.shape, run.macrobatch

    def empty(cols: int) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=torch.bfloat16, device=workspace.device)

    return ForwardContext(empty(shape.hidden), empty(shape.intermediate), empty(shape.intermediate))


def check_lengths(workspaces: Sequence[Workspace], **lists: Sequence[object] | None) -> None:
    if not workspaces:
        raise ConfigError("workspaces: empty; pass one workspace per rank.")
    for name, entries in lists.items():
        if entries is not None and len(entries) != len(workspaces):
            raise ConfigError(f"{name}: {len(entries)} entries for {len(workspaces)} ranks; pass one per rank.")


def check_tensors(
    workspace: Workspace,
    schedule: Schedule,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    routed: RoutedWeights,
    shared: SharedWeights | None,
    factor: torch.Tensor | None,
) -> None:
    """Refuse what the kernel cannot read, naming argument, value, rule and change."""
    import torch

    shape = workspace.shape
    hidden, inner, local = shape.hidden, shape.intermediate, shape.local_experts(workspace.ep_size)
    tokens, device = len(x) if x.dim() else 0, workspace.device

    def rule(name: str, tensor: torch.Tensor, wanted: tuple[int, ...], dtype: torch.dtype, stacked: bool) -> None:
        if tensor.shape != wanted:
            raise ConfigError(f"{name}: shape {tuple(tensor.shape)}: must be {wanted}; reshape it.")
        if tensor.dtype != dtype:
            raise ConfigError(f"{name}: dtype {tensor.dtype}: must be {dtype}; convert it.")
        if tensor.device != device:
            raise ConfigError(f"{name}: on {tensor.device}: must be on {device}; move it.")
        if stacked:  # experts may lie apart, as in a view of stacked gate and up weights
            strides = tensor.stride()
            inside, apart = strides[1:] == (wanted[2], 1), strides[0] % 8 == 0
        else:
            inside, apart = tensor.is_contiguous(), True
        if not inside:
            raise ConfigError(f"{name}: strides {tensor.stride()}: rows must be contiguous; call contiguous().")
        align = 16 if dtype == torch.bfloat16 else 4
        if not apart or tensor.data_ptr() % align:
            raise ConfigError(f"{name}: address or expert stride not a multiple of {align} bytes; copy it.")

    rule("x", x, (tokens, hidden), torch.bfloat16, False)
    if tokens > workspace.table.max_tokens:
        raise ConfigError(
            f"x: {tokens} tokens: the workspace was made for max_tokens={workspace.table.max_tokens}; "
            "make a larger one."
        )
    start = workspace.address("x")
    if workspace.ep_size > 1 and start < x.data_ptr() < start + workspace.table.buffers["x"].num_bytes:
        raise ConfigError("x: a slice of workspace.x that does not start at its first row; use workspace.x[:tokens].")
    known = workspace.schedule_rows.get(schedule.local_ids.data_ptr(), tokens)
    if known != tokens:
        raise ConfigError(f"x: {tokens} tokens: the schedule was built from {known} rows of topk_ids; pass as many.")
    rule("topk_weights", topk_weights, (tokens, shape.topk), torch.float32, False)
    rule("routed.gate", routed.gate, (local, inner, hidden), torch.bfloat16, True)
    rule("routed.up", routed.up, (local, inner, hidden), torch.bfloat16, True)
    rule("routed.down", routed.down, (local, hidden, inner), torch.bfloat16, True)
    if (shared is not None) != bool(shape.shared_intermediate):
        raise ConfigError(
            f"shared: {'given' if shared is not None else 'missing'}, but shared_intermediate="
            f"{shape.shared_intermediate}; pass shared weights exactly when the shape has a shared expert."
        )
    if shared is not None:
        width = shape.shared_intermediate
        rule("shared.gate", shared.gate, (width, hidden), torch.bfloat16, False)
        rule("shared.up", shared.up, (width, hidden), torch.bfloat16, False)
        rule("shared.down", shared.down, (hidden, width), torch.bfloat16, False)
    if (factor is not None) != shape.shared_factor:
        raise ConfigError(
            f"shared_factor: {'given' if factor is not None else 'missing'}, but the shape says "
            f"shared_factor={shape.shared_factor}; pass it exactly when the shape has one."
        )
    if factor is not None:
        rule("shared_factor", factor, (tokens,), torch.float32, False)
