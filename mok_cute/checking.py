"""One check: run the layer on inputs made from a seed, twice or more, and hold every promise against it.

Checked are the error against the reference in units of bf16 torch's own error, equal bits in all runs, the number of
launches, the schedule against its torch model, and, where they are saved, the pre-activations. Before each run the
buffers that carry no state are filled with values that must never reach a result. On a virtual device each run has its
own order of events, and what the device finds wrong in a kernel is a finding of the check.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mok_cute import gpu, reference
from mok_cute.errors import KernelError, UnsupportedError
from mok_cute.metrics import SMALL_SEEDS, ErrorPool
from mok_cute.problem import (
    EXPECTED,
    WEIGHTS,
    CheckRequest,
    Inputs,
    Weights,
    expected_of,
    make_inputs,
    make_weights,
    weights_key,
)
from mok_cute.schedule import Schedule, build_schedule_reference, first_difference, schedule_sizes
from mok_cute.settings import Settings

if TYPE_CHECKING:
    from mok_cute.functional import ForwardContext
    from mok_cute.gpu import Gpu
    from mok_cute.workspace import Workspace

POISONS = (math.nan, 3.0)  # in turn: a stale value that is read shows as NaN, or as a difference between the runs
MAX_SCHEDULE_LAUNCHES = 3
MAX_MODELLED_ROWS = 1 << 20  # schedules up to this size are compared with the torch model

Json = dict[str, Any]


@dataclass(frozen=True)
class CheckResult:
    """The verdict. ``findings`` says in words what is wrong; it is empty exactly when ``ok``.

    launches          kernels per call and rank
    deterministic     None: not known, a run did not end
    schedule_exact    None: not compared, because checks are off or the schedule is large
    """

    ok: bool
    deterministic: bool | None
    schedule_exact: bool | None
    launches: dict[str, int]
    results: dict[str, Json]
    findings: tuple[str, ...]
    wall_seconds: float
    seconds_compile: float
    config: Json

    def to_json(self) -> Json:
        return {**asdict(self), "findings": list(self.findings)}


class Compared(NamedTuple):
    """One result: ours, bf16 torch's and the fp32 reference's, one tensor per rank, and the routes behind them."""

    ours: list[Tensor]
    baseline: list[Tensor]
    exact: list[Tensor]
    routes: int


class Run(NamedTuple):
    """One run of all ranks. Contexts are None where nothing is saved."""

    ys: list[Tensor]
    contexts: list[ForwardContext | None]
    schedules: list[Schedule]
    launches: list[dict[str, int]]  # per rank


@dataclass
class Findings:
    """Collects what is wrong and the figures on the way."""

    texts: list[str] = field(default_factory=list)
    deterministic: bool | None = True
    schedule_exact: bool | None = None
    launches: dict[str, int] = field(default_factory=dict)
    running: str = ""  # the order of events of the run under way, where the device has a name for it

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)


def run_check(request: CheckRequest, say: Callable[[str], None] = lambda text: None) -> CheckResult:
    """Check one request. Raises PeerTimeoutError when a wait gave up, UnsupportedError for what cannot be built here.

    say   told what is being done, for people who watch
    """
    try:
        with gpu.entered(request.device, check_races=request.check_races):
            return _run_check(request, say)
    except torch.OutOfMemoryError as error:
        WEIGHTS.clear()
        EXPECTED.clear()
        raise UnsupportedError(
            f"tokens={','.join(map(str, request.tokens))}, num_experts={request.shape.num_experts}: the memory of "
            f"{request.device} does not hold this request and its reference; lower --tokens or --local-experts. {error}"
        ) from None


def _run_check(request: CheckRequest, say: Callable[[str], None]) -> CheckResult:
    from mok_cute import functional

    start = time.perf_counter()
    say("making weights")
    weights = WEIGHTS.get(weights_key(request), lambda: make_weights(request))
    first = make_inputs(request, request.seed)
    say("compiling")
    workspaces = functional.create_workspaces(
        request.shape,
        ep_size=request.ranks,
        max_tokens=max(request.tokens),
        device=request.device,
        run=request.run,
        config=request.config,
    )
    findings = Findings()
    pools: dict[str, ErrorPool] = {}
    try:
        for number in range(SMALL_SEEDS):
            say(f"running input seed {request.seed + number} and comparing it with the reference")
            inputs = first if number == 0 else make_inputs(request, request.seed + number)
            check_inputs(request, workspaces, weights, inputs, request.seed + number, pools, findings)
            if all(pool.is_complete for pool in pools.values()):
                break
    except KernelError as error:  # the launches behind it are lost, so nothing more can be said
        findings.deterministic = None
        findings.add(f"{findings.running}: {error}")
        pools.clear()
    figures = {name: pool.figures() for name, pool in pools.items()}
    for name, its in figures.items():
        if not its.ok:
            findings.add(f"{name}: {its.reason} (max_abs {its.max_abs:.4g}, rel_l1 {its.rel_l1:.4g})")
    kernel = workspaces[0].kernel
    return CheckResult(
        ok=not findings.texts,
        deterministic=findings.deterministic,
        schedule_exact=findings.schedule_exact,
        launches=findings.launches,
        results={name: its.to_json() for name, its in figures.items()},
        findings=tuple(findings.texts),
        wall_seconds=time.perf_counter() - start,
        seconds_compile=0.0 if kernel.cached else kernel.compile_seconds,
        config=config_of(request, [len(x) for x in first.xs], workspaces[0]),
    )


def check_inputs(
    request: CheckRequest,
    workspaces: Sequence[Workspace],
    weights: Weights,
    inputs: Inputs,
    seed: int,
    pools: dict[str, ErrorPool],
    findings: Findings,
) -> None:
    """Run one set of inputs, that of this seed, and add what is found."""
    run = run_all(request, workspaces, weights, inputs, findings)
    check_schedules(request, run.schedules, inputs, workspaces[0], findings)
    results = compared(request, run, weights, inputs, seed)
    for name, result in results.items():
        pools.setdefault(name, ErrorPool()).add(result.ours, result.baseline, result.exact, routes=result.routes)
    check_saved(request, results, findings)
    if seed == request.seed and request.save is not None:
        save_results(request.save, run)


def config_of(request: CheckRequest, tokens: list[int], workspace: Workspace) -> Json:
    on, config = workspace.gpu, workspace.kernel.config
    return {
        "shape": asdict(request.shape),
        "ranks": request.ranks,
        "local_experts": request.shape.local_experts(request.ranks),
        "tokens": tokens,
        "routing": request.routing,
        "inputs": request.inputs,
        "seed": request.seed,
        "check_races": request.check_races,
        "schedule_seeds": list(request.schedule_seeds) if gpu.is_virtual(request.device) else None,
        "precision": config.precision,
        "direction": "forward",
        "device": request.device,
        "device_name": on.product_name,
        "engine": on.engine,
        "run": asdict(request.run),
        "kernel": asdict(config),
    }


# ---- running --------------------------------------------------------------------------------------------------------


def run_all(
    request: CheckRequest, workspaces: Sequence[Workspace], weights: Weights, inputs: Inputs, findings: Findings
) -> Run:
    """The first run's results; every other one must give the same bits."""
    first: tuple[str, Run] | None = None
    for seed, poison in zip(request.schedule_seeds, itertools.cycle(POISONS)):
        findings.running = workspaces[0].gpu.use_schedule(seed)
        run = run_once(request, workspaces, weights, inputs, poison)
        if first is None:
            first = findings.running, run
        else:
            compare_runs(first[1], run, f" ({first[0]} and {seed})" if findings.running else "", findings)
        check_launches(run, findings)
    assert first is not None, "a check has at least two runs"
    return first[1]


def compare_runs(one: Run, two: Run, which: str, findings: Findings) -> None:
    for name, first, second in paired(one, two):
        if not same_bits(first, second):
            findings.deterministic = False
            findings.add(f"{name}: two runs differ in {differing(first, second)} of {first.numel()} elements{which}")


def check_launches(run: Run, findings: Findings) -> None:
    for launches in run.launches:
        for kind, count in launches.items():
            findings.launches[kind] = max(findings.launches.get(kind, 0), count)
        if launches["forward"] != 1:
            findings.add(f"launches.forward is {launches['forward']}: one forward is exactly one kernel")
        if launches["schedule"] > MAX_SCHEDULE_LAUNCHES:
            findings.add(f"launches.schedule is {launches['schedule']}: at most {MAX_SCHEDULE_LAUNCHES}")


def run_once(
    request: CheckRequest, workspaces: Sequence[Workspace], weights: Weights, inputs: Inputs, poison: float
) -> Run:
    from mok_cute import functional

    for workspace in workspaces:
        poison_buffers(workspace, poison)
    poison_allocator(workspaces[0].gpu, inputs, poison)
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


def poison_allocator(on: Gpu, inputs: Inputs, value: float) -> None:
    """Leave poisoned blocks of the results' sizes for the allocator to hand out again; an element that the kernel
    forgets to write then shows."""
    blocks = [torch.full_like(x, value) for x in inputs.xs]
    on.synchronize()  # other streams may get these blocks next
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


def compared(request: CheckRequest, run: Run, weights: Weights, inputs: Inputs, seed: int) -> dict[str, Compared]:
    """Every result by name: y, and of a saved context x, gate and up."""
    expected = expected_of(request, weights, inputs, seed)
    results = {"y": Compared(run.ys, expected.baseline, expected.ys, expected.routes)}
    if not request.saves_context:
        return results
    exact = [preactivations(request, run, rank, weights, inputs) for rank in range(request.ranks)]
    for name in ("x", "gate", "up"):
        ours = [saved_rows(run, rank)[name] for rank in range(request.ranks)]
        truth = [getattr(rows, name) for rows in exact]
        # bf16 torch's pre-activation is the fp32 product, rounded once; a row of x is a copy.
        baseline = [rows.bfloat16() for rows in truth]
        results[name] = Compared(ours, baseline, truth, sum(len(rows) for rows in ours))
    return results


def preactivations(
    request: CheckRequest, run: Run, rank: int, weights: Weights, inputs: Inputs
) -> reference.Preactivations:
    """The reference's gate, up and x of the saved rows that hold a route."""
    valid, schedule = valid_rows(run, rank), run.schedules[rank]
    peer_rank, peer_route = (rows[: len(valid)][valid] for rows in (schedule.peer_rank, schedule.peer_route))
    return reference.routed_preactivations(
        request.shape, inputs.xs, inputs.topk_ids, weights.routed, peer_rank, peer_route
    )


def check_saved(request: CheckRequest, results: dict[str, Compared], findings: Findings) -> None:
    """Saved rows of x are copies. Integers are multiplied and summed without error, so only the one rounding to bf16
    is left in gate and up, and they too must be equal."""
    equal = {"x"} if request.inputs != "integers" else {"x", "gate", "up"}
    for name in equal & results.keys():
        for rank, (a, b) in enumerate(zip(results[name].ours, results[name].baseline, strict=True)):
            if not torch.equal(a, b):
                at = tuple(torch.nonzero(a != b)[0].tolist())
                findings.add(f"saved {name} of rank {rank}: element {at} is {float(a[at])}, not {float(b[at])}")


def check_schedules(
    request: CheckRequest, schedules: Sequence[Schedule], inputs: Inputs, workspace: Workspace, findings: Findings
) -> None:
    if Settings.from_environment().checks < 1:
        return
    max_tokens, row_block = max(request.tokens), workspace.kernel.config.tile_rows
    if schedule_sizes(request.shape, request.ranks, max_tokens, row_block).max_rows > MAX_MODELLED_ROWS:
        return
    if findings.schedule_exact is None:
        findings.schedule_exact = True
    for rank, schedule in enumerate(schedules):
        model = build_schedule_reference(inputs.topk_ids, request.shape, rank, request.ranks, max_tokens, row_block)
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
