"""The protocol of a forward launch as a model: ranks, workers and signals, explored state by state on the host.

A *step* (``protocol_steps``) is what one worker does between two points where others can interfere: all its waits, then
its accesses, then its announcements. Merging them hides nothing: counters only grow within a launch, so a satisfied
wait stays satisfied and the step may as well run at the time of its last access.

Compute workers draw tickets in increasing order, hold up to ``HELD_TICKETS`` that are not loaded yet, and may load
one task while the previous one waits to be stored. A communication CTA becomes a compute worker when its groups are
done. A rank starts its next launch when all steps of this one are done.

``explore`` visits every reachable state once. It skips orders that cannot matter: when a step conflicts with no step
that could still come before it, only that step is followed; when a rank can do nothing but draw tickets until it
draws, only its draws are. "Could still come before" is decided from the waits alone, so a wait that is too weak takes
the shortcut away and its bad orders are visited. ``reduce=False`` visits all orders, and the tests compare the two.
``walk`` follows random orders of a case too large for that, each with its own preference for some workers.
``verdict`` does both on the situations that have to work.

Bounds of the exhaustive part: 1 to 3 ranks, two launches in a row, one communication worker and one compute worker per
rank (the first becomes a second compute worker), at most ``EXHAUSTIVE_TASKS`` tasks per rank and launch. What is
proved there: no state without a way on, no early read, no overwriting of a ring block or a symmetric buffer in use,
each required count equal to the arrivals, one writer per combine slot, counters cleared before they are used again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mok_cute.protocol_steps import Case, Condition, Protocol, Routing, System
from mok_cute.templates.scheduler import order

HELD_TICKETS = 3  # the task being loaded and two drawn ahead
UNSTORED_TASKS = 2  # loaded tasks whose results are not all stored
EXHAUSTIVE_TASKS = 8
MAX_FINDINGS = 8

# -- states ---------------------------------------------------------------------------------------------------------


class Worker(NamedTuple):
    """A compute worker that holds tickets; idle ones are only counted, as they are all alike."""

    held: tuple[int, ...]  # drawn, not loaded
    unstored: tuple[int, ...]  # loaded, not stored by all store warps


class RankState(NamedTuple):
    launch: int
    next_ticket: int
    workers: tuple[Worker, ...]  # sorted


class State(NamedTuple):
    done: int  # mask of steps
    ranks: tuple[RankState, ...]


IDLE = Worker((), ())


class Action(NamedTuple):
    rank: int
    step: int  # -1: draw a ticket
    worker: Worker | None  # the compute worker that acts


class Machine:
    """The moves of a system."""

    def __init__(self, system: System) -> None:
        self.system, self.case = system, system.case
        self.last_launch = len(system.case.routings)
        self.everything = (1 << len(system.steps)) - 1
        self.start = State(0, tuple(RankState(1, 0, ()) for _ in range(self.case.ranks)))

    def pending(self, state: State, rank: int) -> Iterator[Action]:
        """The next step of every worker of a rank, whether or not its waits are satisfied."""
        done, here = state.done, state.ranks[rank]
        plan = self.system.plans[here.launch, rank]
        for step in plan.free:
            if not done >> step & 1:
                yield Action(rank, step, None)
        for program in plan.comm:
            for step in program:
                if not done >> step & 1:
                    yield Action(rank, step, None)
                    break
        previous = None
        for worker in here.workers:
            if worker == previous:
                continue
            previous = worker
            if worker.held and len(worker.unstored) < UNSTORED_TASKS:
                yield Action(rank, plan.tasks[worker.held[0]].load, worker)
            for warp in range(self.case.geometry.arrivals_per_tile):
                for ticket in worker.unstored:
                    step = plan.tasks[ticket].stores[warp]
                    if not done >> step & 1:
                        yield Action(rank, step, worker)
                        break

    def draws(self, state: State, rank: int) -> Iterator[Action]:
        here = state.ranks[rank]
        plan = self.system.plans[here.launch, rank]
        if here.next_ticket >= len(plan.tasks):
            return
        for worker in here.workers:
            if len(worker.held) < HELD_TICKETS:
                yield Action(rank, -1, worker)
        joined = sum(mask & ~state.done == 0 for mask in plan.comm_cta)
        if len(here.workers) < self.case.compute_workers + joined:
            yield Action(rank, -1, IDLE)

    def unmet(self, action: Action, done: int) -> list[Condition]:
        return [w for w in self.system.steps[action.step].waits if (done & w.mask).bit_count() < w.required]

    def ready(self, step: int, done: int) -> bool:
        return all((done & w.mask).bit_count() >= w.required for w in self.system.steps[step].waits)

    def apply(self, state: State, action: Action) -> State:
        rank, here = action.rank, state.ranks[action.rank]
        plan = self.system.plans[here.launch, rank]
        done, next_ticket, workers = state.done, here.next_ticket, list(here.workers)
        worker = action.worker
        if worker is not None:
            if worker != IDLE:
                workers.remove(worker)
            if action.step < 0:
                worker = Worker((*worker.held, next_ticket), worker.unstored)
                next_ticket += 1
            elif worker.held and plan.tasks[worker.held[0]].load == action.step:
                loaded = worker.held[:1] if plan.tasks[worker.held[0]].stores else ()
                worker = Worker(worker.held[1:], worker.unstored + loaded)
        if action.step >= 0:
            done |= 1 << action.step
        if worker is not None:
            left = tuple(t for t in worker.unstored if any(not done >> s & 1 for s in plan.tasks[t].stores))
            worker = Worker(worker.held, left)
            if worker != IDLE:
                workers.append(worker)
        here = RankState(here.launch, next_ticket, tuple(sorted(workers)))
        if here.launch < self.last_launch and plan.steps & ~done == 0:
            here = RankState(here.launch + 1, 0, ())
        return State(done, (*state.ranks[:rank], here, *state.ranks[rank + 1 :]))

    def deadlock(self, state: State) -> str:
        stuck = []
        for rank in range(self.case.ranks):
            for action in self.pending(state, rank):
                for wait in self.unmet(action, state.done):
                    value = (state.done & wait.mask).bit_count()
                    where = self.system.steps[action.step].where
                    stuck.append(f"{where} waits at {wait.label}: {value} of {wait.required}")
        return "no worker can go on: " + "; ".join(stuck[:6])


@dataclass(frozen=True)
class CaseResult:
    """What one case showed. ``states``: states visited, or steps taken by random walks."""

    name: str
    mode: str  # "exhaustive" or "random"
    ranks: int
    launches: int
    max_tasks: int  # the largest number of tasks of a rank in a launch
    states: int
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def _result(system: System, mode: str, states: int, findings: list[str]) -> CaseResult:
    case = system.case
    most = max(len(plan.tasks) for plan in system.plans.values())
    unique = tuple(dict.fromkeys((*system.findings, *findings)))
    return CaseResult(case.name, mode, case.ranks, len(case.routings), most, states, unique)


def explore(
    case: Case, protocol: Protocol | None = None, *, reduce: bool = True, max_states: int = 2_000_000
) -> CaseResult:
    """Visit every reachable state of a small case; findings are early reads, overwrites, deadlocks, wrong counts."""
    system = System(case, protocol)
    machine = Machine(system)
    unordered = system.unordered_conflicts() if reduce else None
    findings: list[str] = []
    seen, stack = {machine.start}, [machine.start]
    while stack and len(findings) < MAX_FINDINGS:
        state = stack.pop()
        actions = _moves(machine, state, unordered)
        if not actions and state.done != machine.everything:
            findings.append(machine.deadlock(state))
        for action in actions:
            wrong = system.violation(action.step, state.done) if action.step >= 0 else None
            if wrong:
                findings.append(wrong)
                continue
            follower = machine.apply(state, action)
            if follower not in seen:
                seen.add(follower)
                stack.append(follower)
        if len(seen) > max_states:
            findings.append(f"more than {max_states} states: the case is too large to explore")
            break
    return _result(system, "exhaustive", len(seen), findings)


def _moves(machine: Machine, state: State, unordered: list[int] | None) -> list[Action]:
    """The moves worth following from a state: all of them, or fewer where the others cannot matter."""
    done, moves, only_draws = state.done, [], None
    for rank in range(machine.case.ranks):
        blocked_here = True  # by signals of this rank alone
        for action in machine.pending(state, rank):
            unmet = machine.unmet(action, done)
            if not unmet:
                if unordered is not None and unordered[action.step] & ~done == 0:
                    return [action]
                moves.append(action)
                blocked_here = False
            elif not any(wait.local for wait in unmet):
                blocked_here = False
        draws = list(machine.draws(state, rank))
        if blocked_here and draws and only_draws is None:
            only_draws = draws
        moves += draws
    return moves if unordered is None or only_draws is None else only_draws


def walk(case: Case, protocol: Protocol | None = None, *, walks: int = 4, seed: int = 0) -> CaseResult:
    """Follow random orders of a large case, each with its own random preferences among ranks and kinds of steps."""
    system = System(case, protocol)
    machine = Machine(system)
    rng = random.Random(seed)
    findings: list[str] = []
    steps = 0
    for _ in range(walks):
        state = machine.start
        weights: dict[tuple[int, str], float] = {}
        while len(findings) < MAX_FINDINGS:
            actions = [
                a
                for rank in range(case.ranks)
                for a in (*machine.pending(state, rank), *machine.draws(state, rank))
                if a.step < 0 or machine.ready(a.step, state.done)
            ]
            if not actions:
                if state.done != machine.everything:
                    findings.append(machine.deadlock(state))
                break
            keys = [(a.rank, system.steps[a.step].role if a.step >= 0 else "draw") for a in actions]
            for key in keys:
                weights.setdefault(key, rng.choice((0.01, 0.1, 1.0, 1.0)))
            action = rng.choices(actions, [weights[key] for key in keys])[0]
            wrong = system.violation(action.step, state.done) if action.step >= 0 else None
            if wrong:
                findings.append(wrong)
                break
            state = machine.apply(state, action)
            steps += 1
    return _result(system, "random", steps, findings)


# -- the situations that have to work ---------------------------------------------------------------------------------


def small_geometry(shared: bool) -> order.Geometry:
    """Row blocks of two rows, one column tile, two store warps: the fewest tasks that still meet in every way."""
    cols = int(shared)
    return order.Geometry(
        tile_rows=2,
        gate_up_cols=1,
        down_cols=1,
        shared_gate_up_cols=cols,
        shared_down_cols=cols,
        arrivals_per_tile=2,
        rows_per_dispatch_group=1,
        tokens_per_reduce=2,
        raster_rows=2,
    )


def small_cases() -> list[Case]:
    """Every routing of 2 ranks with 1 token each, top-2 of 3 experts or dropped, against a ring of one and of two
    minibatches; hard routes on 1 and 3 ranks; all followed by a second launch with other routes."""
    cases = []
    choices = [(a, b) for a in (-1, 0, 1, 2) for b in (-1, 0, 1, 2)]
    for a, b, ring in itertools.product(choices, choices, (1, 2)):
        routings: tuple[Routing, ...] = (((a,), (b,)), ((b,), (a,)))
        name = f"two ranks, routes {a} and {b}, ring of {ring}"
        cases.append(Case(name, small_geometry(False), 3, 2, routings, 1, ring))
    one: dict[str, Routing] = {
        "three blocks": (((0,), (0,), (1,), (0,)),),
        "short last minibatch": (((0,), (0,), (0,)),),
        "no routes": (((-1,), (-1,)),),
        "no tokens": ((),),
    }
    three: dict[str, Routing] = {
        "balanced": (((0,), (2,)), ((4,), (1,)), ((3,), (5,))),
        "all to one": (((4,), (4,)), ((4,), (4,)), ((4,), (4,))),
        "an empty rank and an empty expert": (((0,), (4,)), ((4,), (0,)), ((0,), (4,))),
        "unequal and no tokens": (((5,), (0,), (2,)), (), ((3,),)),
        "everything dropped": (((-1,), (9,)), ((-1,), (-1,)), ((6,), (-1,))),
    }
    for routes, experts in ((one, 2), (three, 6)):
        for (name, first), second in itertools.product(routes.items(), routes.values()):
            for shared, blocks, ring in ((False, 1, 1), (False, 1, 2), (False, 2, 1), (True, 1, 2)):
                label = f"{len(first)} ranks, {name}, {blocks} x {ring} blocks of ring"
                case = Case(label, small_geometry(shared), experts, 1, (first, second), blocks, ring)
                if max(len(plan.tasks) for plan in System(case).plans.values()) <= EXHAUSTIVE_TASKS:
                    cases.append(case)
    return cases


def hard_routings(ranks: int, tokens: int, experts: int, topk: int, rng: random.Random) -> dict[str, Routing]:
    """Routings by name: random, and those that break schedules."""
    local = -(-experts // ranks)

    def draw(choices: list[int], counts: list[int]) -> Routing:
        return tuple(tuple(tuple(rng.choice(choices) for _ in range(topk)) for _ in range(n)) for n in counts)

    everyone, same = list(range(experts)), [tokens] * ranks
    return {
        "random": draw(everyone, same),
        "empty experts": draw(everyone[::3], same),
        "empty rank": draw(everyone[local:] or [0], same),
        "all to one": draw([experts - 1], same),
        "dropped routes": draw([*everyone, -1, experts + 5], same),
        "no tokens": draw(everyone, [0] * ranks),
        "unequal tokens": draw(everyone, [(tokens * (r + 1)) // ranks if r else 0 for r in range(ranks)]),
    }


def large_cases(seed: int) -> list[Case]:
    """Many minibatches, several workers of each kind, three launches in a row."""
    rng, cases = random.Random(seed), []
    for ranks in (1, 2, 3):
        experts, topk = 3 * ranks - ranks // 3, 2
        routings = hard_routings(ranks, 26, experts, topk, rng)
        for name, routing in routings.items():
            blocks, ring = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
            shared = rng.choice((0, 1, 2))
            cols = rng.choice((1, 2))
            arrivals = rng.choice((1, 2))
            geometry = order.Geometry(4, rng.choice((1, 2, 3)), cols, shared, cols * (shared > 0), arrivals, 2, 2, 2)
            launches = (routing, rng.choice(list(routings.values())), routing)
            label = f"{ranks} ranks, {name}, {blocks} x {ring} blocks of ring"
            workers = {"comm_ctas": 2, "warps_per_comm_cta": rng.choice((1, 2)), "compute_workers": rng.choice((1, 3))}
            cases.append(Case(label, geometry, experts, topk, launches, blocks, ring, **workers))
    return cases


@dataclass(frozen=True)
class Verdict:
    """What the model says of the protocol. ``findings`` is empty exactly when ``ok``."""

    ok: bool
    cases: int
    states: int  # visited by the exhaustive part
    random_steps: int  # taken by the random part
    bounds: tuple[str, ...]
    findings: tuple[str, ...]
    results: tuple[CaseResult, ...]


def verdict(protocol: Protocol | None = None, *, walks: int = 4, seed: int = 0) -> Verdict:
    """Explore the small cases, walk the large ones; ``walks`` random orders each, 0 for none. Takes seconds."""
    results = [explore(case, protocol) for case in small_cases()]
    results += [walk(case, protocol, walks=walks, seed=seed) for case in large_cases(seed)] if walks else []
    exhaustive = [r for r in results if r.mode == "exhaustive"]
    randomly = [r for r in results if r.mode == "random"]
    bounds = [_bounds("all orders", exhaustive, "1 communication and 1 compute worker")]
    if randomly:
        bounds.append(_bounds(f"{walks} random orders", randomly, "2 communication CTAs, 1 to 3 compute workers"))
    findings = tuple(f"{r.name}: {finding}" for r in results for finding in r.findings)
    states, steps = sum(r.states for r in exhaustive), sum(r.states for r in randomly)
    return Verdict(not findings, len(results), states, steps, tuple(bounds), findings, tuple(results))


def _bounds(what: str, results: list[CaseResult], workers: str) -> str:
    ranks, tasks = max(r.ranks for r in results), max(r.max_tasks for r in results)
    launches = max(r.launches for r in results)
    return (
        f"{what} of {len(results)} cases: up to {ranks} ranks, {workers} per rank, {launches} launches in a row, "
        f"up to {tasks} tasks per rank and launch"
    )
