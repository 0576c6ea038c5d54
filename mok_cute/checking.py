"""One check: run the layer on inputs made from a seed, twice, and hold every promise against it.

Checked are the error against the reference in units of bf16 torch's own error, equal bits in both runs, the number of
launches, the schedule against its torch model, and, where they are saved, the pre-activations. Before each run the
buffers that carry no state are filled with values that must never reach a result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mok_cute import reference
from mok_cute.config import KernelConfig, RunConfig
from mok_cute.inputs import make_rank_inputs, make_routed_weights, make_shared_weights
from mok_cute.metrics import SMALL_SEEDS, ErrorPool
from mok_cute.schedule import Schedule, build_schedule_reference, first_difference, schedule_sizes
from mok_cute.settings import Settings
from mok_cute.shapes import MoEShape

if TYPE_CHECKING:
    from mok_cute.functional import ForwardContext, RoutedWeights, SharedWeights
    from mok_cute.workspace import Workspace

POISONS = (math.nan, 3.0)  # one per run: a stale value that is read shows as NaN, or as a difference between the runs
MAX_SCHEDULE_LAUNCHES = 3
MAX_MODELLED_ROWS = 1 << 20  # schedules up to this size are compared with the torch model

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class CheckRequest:
    """What to check. ``tokens`` has one count per rank; ``routing`` is a kind or ``file:PATH``.

    With a routing file the token counts come from the file and ``tokens`` is only the maximum.
    """

    shape: MoEShape
    ranks: int
    tokens: tuple[int, ...]
    run: RunConfig = RunConfig()
    config: KernelConfig = KernelConfig()
    device: str = "cuda"
    routing: str = "random"
    inputs: str = "normal"
    seed: int = 0
    save: Path | None = None

    @property
    def saves_context(self) -> bool:
        """Pre-activations are looked at when they are written to a file or can be compared exactly."""
        return self.save is not None or self.inputs == "integers"

    def problem(self, seed: int) -> Hashable:
        """All that determines the reference's results, and nothing else."""
        kind, _, path = self.routing.partition(":")
        stamp = Path(path).stat().st_mtime_ns if kind == "file" else None
        where = (self.device, self.routing, stamp)
        return (self.shape, self.ranks, self.tokens, self.inputs, self.seed, seed, *where)


@dataclass(frozen=True)
class CheckResult:
    """The verdict. ``findings`` says in words what is wrong; it is empty exactly when ``ok``.

    launches          kernels per call and rank
    schedule_exact    None: not compared, because checks are off or the schedule is large
    """

    ok: bool
    deterministic: bool
    schedule_exact: bool | None
    launches: dict[str, int]
    results: dict[str, Json]
    findings: tuple[str, ...]
    wall_seconds: float
    seconds_compile: float
    config: Json

    def to_json(self) -> Json:
        return {**asdict(self), "findings": list(self.findings)}


class Inputs(NamedTuple):
    """One call's tensors, each list with one entry per rank."""

    xs: list[Tensor]  # (tokens, hidden) bf16
    topk_ids: list[Tensor]  # (tokens, topk) int32 or int64
    topk_weights: list[Tensor]  # (tokens, topk) fp32
    shared_factors: list[Tensor] | None  # (tokens,) fp32


class Weights(NamedTuple):
    """All ranks' weights, on the one device of a check. The shared expert's are the same tensors on every rank."""

    routed: list[RoutedWeights]
    shared: list[SharedWeights] | None


class Expected(NamedTuple):
    """What the reference says of one set of inputs: y in fp32, y of bf16 torch, routes that reach an expert."""

    ys: list[Tensor]
    baseline: list[Tensor]
    routes: int


class Run(NamedTuple):
    """One run of all ranks. Contexts are None where nothing is saved."""

    ys: list[Tensor]
    contexts: list[ForwardContext | None]
    schedules: list[Schedule]
    launches: list[dict[str, int]]  # per rank


class Memo:
    """The latest few values by key, so that a sweep over run configurations makes weights and references once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self.values:
            self.values[key] = self.values.pop(key)  # now the newest
        else:
            # Room first: an old value and its successor may not fit in memory together.
            while len(self.values) >= self.capacity:
                del self.values[next(iter(self.values))]
            self.values[key] = make()
        value: T = self.values[key]
        return value


WEIGHTS = Memo(1)
EXPECTED = Memo(SMALL_SEEDS + 2)  # a small problem pools its seeds; a large one has a single entry


@dataclass
class Findings:
    """Collects what is wrong and the figures on the way."""

    texts: list[str] = field(default_factory=list)
    deterministic: bool = True
    schedule_exact: bool | None = None
    launches: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)


def run_check(request: CheckRequest) -> CheckResult:
    """Check one request. Raises PeerTimeoutError when a wait gave up, UnsupportedError for what cannot be built."""
    from mok_cute import functional

    start = time.perf_counter()
    seconds_compile = compile_seconds(request)
    weights = WEIGHTS.get(weights_key(request), lambda: make_weights(request))
    first = make_inputs(request, request.seed)
    max_tokens = max(request.tokens)
    workspaces = functional.create_workspaces(
        request.shape,
        ep_size=request.ranks,
        max_tokens=max_tokens,
        device=request.device,
        run=request.run,
        config=request.config,
    )
    findings = Findings()
    pools: dict[str, ErrorPool] = {}
    for number in range(SMALL_SEEDS):
        inputs = first if number == 0 else make_inputs(request, request.seed + number)
        run = run_twice(request, workspaces, weights, inputs, findings)
        check_schedules(request, run.schedules, inputs, max_tokens, findings)
        for name, ours, baseline, exact, routes in compared(request, run, weights, inputs, request.seed + number):
            pools.setdefault(name, ErrorPool()).add(ours, baseline, exact, routes=routes)
            if request.inputs == "integers" and name != "y":
                check_exact(name, ours, baseline, findings)
        if request.saves_context:
            check_saved_x(request, run, inputs, findings)
        if number == 0 and request.save is not None:
            save_results(request.save, run)
        if all(pool.is_complete for pool in pools.values()):
            break
    results = {name: pool.figures() for name, pool in pools.items()}
    for name, result in results.items():
        if not result.ok:
            findings.add(f"{name}: {result.reason} (max_abs {result.max_abs:.4g}, rel_l1 {result.rel_l1:.4g})")
    return CheckResult(
        ok=not findings.texts,
        deterministic=findings.deterministic,
        schedule_exact=findings.schedule_exact,
        launches=findings.launches,
        results={name: result.to_json() for name, result in results.items()},
        findings=tuple(findings.texts),
        wall_seconds=time.perf_counter() - start,
        seconds_compile=seconds_compile,
        config=config_of(request, [len(x) for x in first.xs]),
    )


def config_of(request: CheckRequest, tokens: list[int]) -> Json:
    device = torch.device(request.device)
    return {
        "shape": asdict(request.shape),
        "ranks": request.ranks,
        "local_experts": request.shape.local_experts(request.ranks),
        "tokens": tokens,
        "routing": request.routing,
        "inputs": request.inputs,
        "seed": request.seed,
        "precision": request.config.precision,
        "direction": "forward",
        "device": request.device,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "run": asdict(request.run),
        "kernel": asdict(request.config),
    }


def compile_seconds(request: CheckRequest) -> float:
    """Compile, or find, the forward kernel ahead of the runs; how long that took here."""
    device = torch.device(request.device)
    if device.type != "cuda":
        return 0.0
    from mok_cute.arch import Arch
    from mok_cute.compile import compile_forward

    start = time.perf_counter()
    local_experts = request.shape.local_experts(request.ranks)
    compile_forward(request.shape, request.config, Arch.of_device(device).name, local_experts)
    return time.perf_counter() - start


# ---- what goes in ---------------------------------------------------------------------------------------------------


def weights_key(request: CheckRequest) -> Hashable:
    return (request.shape, request.ranks, request.seed, request.inputs, request.device)


def make_weights(request: CheckRequest) -> Weights:
    from mok_cute.functional import RoutedWeights, SharedWeights

    shape, ranks, device = request.shape, request.ranks, request.device
    routed = [
        RoutedWeights(*make_routed_weights(shape, rank, ranks, request.seed, request.inputs, device))
        for rank in range(ranks)
    ]
    shared = make_shared_weights(shape, request.seed, request.inputs, device)
    return Weights(routed, None if shared is None else [SharedWeights(*shared)] * ranks)


def make_inputs(request: CheckRequest, seed: int) -> Inputs:
    made = [
        make_rank_inputs(
            request.shape, rank, request.ranks, tokens, seed, request.inputs, request.routing, request.device
        )
        for rank, tokens in enumerate(request.tokens)
    ]
    factors = [rank.shared_factor for rank in made if rank.shared_factor is not None]
    return Inputs(
        xs=[rank.x for rank in made],
        topk_ids=[rank.topk_ids for rank in made],
        topk_weights=[rank.topk_weights for rank in made],
        shared_factors=factors or None,
    )


def expected_of(request: CheckRequest, weights: Weights, inputs: Inputs, seed: int) -> Expected:
    def make() -> Expected:
        with torch.no_grad():
            ys, baseline = (
                reference.forward(
                    request.shape,
                    inputs.xs,
                    inputs.topk_ids,
                    inputs.topk_weights,
                    weights.routed,
                    weights.shared,
                    shared_factors=inputs.shared_factors,
                    arithmetic=arithmetic,
                )
                for arithmetic in (reference.EXACT, reference.TORCH_BF16)
            )
        routes = sum(int(reference.is_routed(ids, request.shape.num_experts).sum()) for ids in inputs.topk_ids)
        return Expected(ys, baseline, routes)

    return EXPECTED.get(request.problem(seed), make)


# ---- running --------------------------------------------------------------------------------------------------------


def run_twice(
    request: CheckRequest, workspaces: Sequence[Workspace], weights: Weights, inputs: Inputs, findings: Findings
) -> Run:
    """The first run's results; the second one must give the same bits."""
    one, two = (run_once(request, workspaces, weights, inputs, poison) for poison in POISONS)
    for name, first, second in paired(one, two):
        if not same_bits(first, second):
            findings.deterministic = False
            findings.add(f"{name}: two runs differ in {differing(first, second)} of {first.numel()} elements")
    for launches in (*one.launches, *two.launches):
        for kind, count in launches.items():
            findings.launches[kind] = max(findings.launches.get(kind, 0), count)
        if launches["forward"] != 1:
            findings.add(f"launches.forward is {launches['forward']}: one forward is exactly one kernel")
        if launches["schedule"] > MAX_SCHEDULE_LAUNCHES:
            findings.add(f"launches.schedule is {launches['schedule']}: at most {MAX_SCHEDULE_LAUNCHES}")
    return one


def run_once(
    request: CheckRequest, workspaces: Sequence[Workspace], weights: Weights, inputs: Inputs, poison: float
) -> Run:
    from mok_cute import functional

    for workspace in workspaces:
        poison_buffers(workspace, poison)
    poison_allocator(request, inputs, poison)
    before = [dict(workspace.launches) for workspace in workspaces]
    schedules = functional.build_schedules(workspaces, inputs.topk_ids)
    outputs = functional.forward_ranks(
        workspaces,
        schedules,
        inputs.xs,
        inputs.topk_weights,
        weights.routed,
        weights.shared,
        shared_factors=inputs.shared_factors,
        save_for_backward=request.saves_context,
        run=request.run,
    )
    for workspace in workspaces:
        workspace.check()
    launches = [
        {kind: workspace.launches.get(kind, 0) - old.get(kind, 0) for kind in ("schedule", "forward", "backward")}
        for workspace, old in zip(workspaces, before, strict=True)
    ]
    # A workspace may build its next schedule into the same tensors.
    copies = [Schedule(**{name: tensor.clone() for name, tensor in vars(schedule).items()}) for schedule in schedules]
    return Run([y for y, _ in outputs], [context for _, context in outputs], copies, launches)


def poison_buffers(workspace: Workspace, value: float) -> None:
    """Fill the activations of a workspace: a call must not read what an earlier one left there."""
    for name, buffer in workspace.table.buffers.items():
        if buffer.dtype == "bf16":
            workspace.tensor(name).fill_(value)


def poison_allocator(request: CheckRequest, inputs: Inputs, value: float) -> None:
    """Leave poisoned blocks of the results' sizes for the allocator to hand out again; an element that the kernel
    forgets to write then shows."""
    blocks = [torch.full_like(x, value) for x in inputs.xs]
    if blocks and blocks[0].is_cuda:
        torch.cuda.synchronize(blocks[0].device)  # other streams may get these blocks next
    del blocks


def paired(one: Run, two: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Everything that must be equal in two runs; rows that no schedule fills are left out."""
    for rank, (a, b) in enumerate(zip(one.schedules, two.schedules, strict=True)):
        for name, tensor in vars(a).items():
            rows = int(a.num_rows) if name in ("peer_rank", "peer_route") else len(tensor)
            yield f"schedule {name} of rank {rank}", tensor[:rows], getattr(b, name)[:rows]
    for rank, (y_one, y_two) in enumerate(zip(one.ys, two.ys, strict=True)):
        yield f"y of rank {rank}", y_one, y_two
    for rank in range(len(one.ys)):
        saved = zip(saved_rows(one, rank).items(), saved_rows(two, rank).values(), strict=True)
        for (name, first), second in saved:
            yield f"saved {name} of rank {rank}", first, second


def saved_rows(run: Run, rank: int) -> dict[str, Tensor]:
    """x, gate and up of the routed rows that a context holds, without padding rows; empty when nothing was saved."""
    context = run.contexts[rank]
    if context is None:
        return {}
    valid = valid_rows(run, rank)
    return {name: getattr(context, name)[: len(valid)][valid] for name in ("x", "gate", "up")}


def valid_rows(run: Run, rank: int) -> Tensor:
    """(rows that were saved,) bool: the row holds a route."""
    context, schedule = run.contexts[rank], run.schedules[rank]
    assert context is not None
    return schedule.peer_rank[: min(int(schedule.num_rows), len(context.gate))] >= 0


# ---- comparing ------------------------------------------------------------------------------------------------------


def compared(
    request: CheckRequest, run: Run, weights: Weights, inputs: Inputs, seed: int
) -> Iterator[tuple[str, list[Tensor], list[Tensor], list[Tensor], int]]:
    """Each result: its name, ours, bf16 torch's, the reference's, one tensor per rank, and the routes behind it."""
    expected = expected_of(request, weights, inputs, seed)
    yield "y", run.ys, expected.baseline, expected.ys, expected.routes
    if not request.saves_context:
        return
    by_rank = [preactivations(request, run, rank, weights, inputs) for rank in range(request.ranks)]
    for name in ("gate", "up"):
        ours = [saved_rows(run, rank)[name] for rank in range(request.ranks)]
        exact = [getattr(rows, name) for rows in by_rank]
        # bf16 torch's pre-activation is the fp32 product, rounded once.
        yield name, ours, [rows.bfloat16() for rows in exact], exact, sum(len(rows) for rows in ours)


def preactivations(
    request: CheckRequest, run: Run, rank: int, weights: Weights, inputs: Inputs
) -> reference.Preactivations:
    """The reference's gate and up of the saved rows that hold a route."""
    valid, schedule = valid_rows(run, rank), run.schedules[rank]
    peer_rank, peer_route = (rows[: len(valid)][valid] for rows in (schedule.peer_rank, schedule.peer_route))
    return reference.routed_preactivations(
        request.shape, inputs.xs, inputs.topk_ids, weights.routed, peer_rank, peer_route
    )


def check_exact(name: str, ours: Sequence[Tensor], rounded: Sequence[Tensor], findings: Findings) -> None:
    """Integers are multiplied and summed without error, so only the one rounding to bf16 is left."""
    for rank, (a, b) in enumerate(zip(ours, rounded, strict=True)):
        if not torch.equal(a, b):
            at = tuple(torch.nonzero(a != b)[0].tolist())
            findings.add(
                f"saved {name} of rank {rank}: element {at} is {float(a[at])}, exactly {float(b[at])} is right"
            )


def check_saved_x(request: CheckRequest, run: Run, inputs: Inputs, findings: Findings) -> None:
    """Saved rows of x are copies."""
    for rank in range(request.ranks):
        valid, schedule = valid_rows(run, rank), run.schedules[rank]
        saved = saved_rows(run, rank)["x"]
        peer_rank, peer_route = (rows[: len(valid)][valid] for rows in (schedule.peer_rank, schedule.peer_route))
        for peer, x in enumerate(inputs.xs):
            rows = peer_rank == peer
            if not same_bits(saved[rows], x[peer_route[rows].long() // request.shape.topk]):
                findings.add(f"saved x of rank {rank}: rows from rank {peer} are not copies of its x")


def check_schedules(
    request: CheckRequest, schedules: Sequence[Schedule], inputs: Inputs, max_tokens: int, findings: Findings
) -> None:
    if Settings.from_environment().checks < 1:
        return
    if schedule_sizes(request.shape, request.ranks, max_tokens).max_rows > MAX_MODELLED_ROWS:
        return
    if findings.schedule_exact is None:
        findings.schedule_exact = True
    for rank, schedule in enumerate(schedules):
        model = build_schedule_reference(inputs.topk_ids, request.shape, rank, request.ranks, max_tokens)
        difference = first_difference(schedule, model)
        if difference is not None:
            findings.schedule_exact = False
            findings.add(f"schedule of rank {rank}: {difference}")


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal bit for bit: a NaN equals itself, and -0 does not equal 0."""
    return one.shape == two.shape and torch.equal(bits(one), bits(two))


def differing(one: Tensor, two: Tensor) -> int:
    return int((bits(one) != bits(two)).sum()) if one.shape == two.shape else max(one.numel(), two.numel())


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def save_results(path: Path, run: Run) -> None:
    """y.R, gate.R, up.R, peer_rank.R and peer_route.R of each rank R; padding rows of gate and up are zero."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for rank, y in enumerate(run.ys):
        tensors[f"y.{rank}"] = y
        context, valid, schedule = run.contexts[rank], valid_rows(run, rank), run.schedules[rank]
        for name in ("gate", "up"):
            rows = getattr(context, name)[: len(valid)]
            tensors[f"{name}.{rank}"] = torch.where(valid[:, None], rows, torch.zeros_like(rows))
        for name in ("peer_rank", "peer_route"):
            tensors[f"{name}.{rank}"] = getattr(schedule, name)[: len(valid)]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
