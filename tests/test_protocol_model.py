"""The protocol model: it accepts the declared order, and rejects every wrong one that we could think of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mok_cute import protocol_model as model
from mok_cute.protocol_steps import Case, Protocol, Routing, System
from mok_cute.templates.scheduler import order

ONE_RANK: Routing = (((0,), (1,), (0,)),)
TWO_RANKS: Routing = (((0,), (1,), (2,)), ((1,), (0,), (3,)))


def small(routing: Routing, *, shared: bool = False, blocks: int = 1, ring: int = 1, launches: int = 2) -> Case:
    geometry = model.small_geometry(shared)
    experts = 2 * len(routing)
    return Case("case", geometry, experts, 1, (routing,) * launches, blocks, ring)


RING_OF_ONE = small(TWO_RANKS)
RING_OF_TWO = small(TWO_RANKS, ring=2)
WITH_SHARED = small(TWO_RANKS, shared=True, ring=2)
ONE_RANK_REUSE = small(ONE_RANK, shared=True)
CASES = {"ring of one": RING_OF_ONE, "ring of two": RING_OF_TWO, "shared": WITH_SHARED, "one rank": ONE_RANK_REUSE}


def with_waits(phase: str, change: Callable[[order.Wait], order.Wait | None]) -> Protocol:
    def changed(p: order.Phase) -> order.Phase:
        waits = [change(w) for w in p.waits] if p.name == phase else p.waits
        return replace(p, waits=tuple(w for w in waits if w is not None))

    return Protocol(phases=tuple(changed(p) for p in order.PHASES))


def without(phase: str, signal: str) -> Protocol:
    return with_waits(phase, lambda w: None if w.signal == signal else w)


def off_by(phase: str, signal: str, difference: int) -> Protocol:
    def change(wait: order.Wait) -> order.Wait:
        if wait.signal != signal:
            return wait
        return replace(wait, required=lambda o, t: wait.required(o, t) + difference)

    return with_waits(phase, change)


class ReversedTickets(order.TaskOrder):
    """Every down tile comes before its gate/up tiles."""

    def tile(self, ticket: Any, *args: Any) -> order.Tile:
        return super().tile(self.num_gemm_tasks - 1 - ticket, *args)


class AlwaysAhead(order.TaskOrder):
    """Down one minibatch behind gate/up, even if the ring holds only one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lookahead = 1


class OneSlot(order.TaskOrder):
    """All minibatches share the first slot of the ring, whatever the guards believe."""

    def ring_block(self, z: Any, block_in_minibatch: Any) -> Any:
        return block_in_minibatch


class UnguardedPartial(order.TaskOrder):
    """The guards look at a ring block that a short minibatch never used."""

    def slot_was_used(self, t: order.Tile) -> Any:
        return t.z >= self.ring_minibatches


def dynamic_findings(case: Case, protocol: Protocol) -> list[str]:
    """What exploration found, beyond wrong counts."""
    static = System(case, protocol).findings
    return [f for f in model.explore(case, protocol).findings if f not in static]


# -- the protocol as declared -----------------------------------------------------------------------------------------


def test_verdict_is_ok_and_states_its_bounds():
    verdict = model.verdict(walks=2)
    assert verdict.findings == ()
    assert verdict.ok
    assert verdict.cases == len(verdict.results) > 600
    assert verdict.states > 40_000
    assert verdict.random_steps > 10_000
    exhaustive = [r for r in verdict.results if r.mode == "exhaustive"]
    assert {r.ranks for r in exhaustive} == {1, 2, 3}
    assert {r.launches for r in exhaustive} == {2}
    assert max(r.max_tasks for r in exhaustive) == model.EXHAUSTIVE_TASKS
    assert "up to 3 ranks" in verdict.bounds[0]
    assert "8 tasks" in verdict.bounds[0]


def test_large_cases_reuse_the_ring_many_times_and_hold_short_minibatches():
    orders = [plan.order for case in model.large_cases(0) for plan in System(case).plans.values()]
    assert max(o.num_minibatches for o in orders) >= 8
    assert any(o.num_minibatches >= 4 * o.ring_minibatches for o in orders)
    assert any(0 < o.partial_blocks < o.minibatch_blocks and o.num_minibatches > o.ring_minibatches for o in orders)
    assert any(o.num_tokens == 0 for o in orders)
    assert any(o.routed_blocks == 0 and o.num_tokens > 0 for o in orders)


@pytest.mark.parametrize("seed", range(1, 5))
def test_random_orders_of_large_cases_find_nothing_for_seed(seed: int):
    for case in model.large_cases(seed):
        assert model.walk(case, walks=2, seed=seed).findings == (), case


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 200])
def test_random_orders_of_many_large_cases_find_nothing(first: int):
    for seed in range(first, first + 12):
        for case in model.large_cases(seed):
            assert model.walk(case, walks=4, seed=seed).findings == (), (seed, case)


# Small enough to visit every order.
UNREDUCED = {
    "one rank, two launches": small((((0,), (1,)),)),
    "one rank with shared expert": small((((0,), (0,)),), shared=True, launches=1),
    "one rank, ring of two": small(ONE_RANK, ring=2, launches=1),
    "two ranks": small((((0,), (2,)), ((2,),)), launches=1),
}


@pytest.mark.parametrize("name", UNREDUCED)
def test_skipping_orders_changes_nothing_but_the_number_of_states(name: str):
    case = UNREDUCED[name]
    full, reduced = model.explore(case, reduce=False), model.explore(case)
    assert full.findings == reduced.findings == ()
    assert full.states > 2 * reduced.states


@pytest.mark.parametrize(
    ("phase", "signal"),
    [
        ("dispatch", "hidden_ready"),
        ("dispatch", "entry"),
        ("gate_up", "x_routed_ready"),
        ("gate_up", "y_done"),
        ("down", "hidden_ready"),
        ("reduce", "exit"),
        ("reduce", "shared_y_done"),
        ("shared_down", "shared_hidden_ready"),
    ],
)
def test_skipping_orders_hides_no_missing_wait(phase: str, signal: str):
    protocol = without(phase, signal)
    full = [model.explore(case, protocol, reduce=False).ok for case in UNREDUCED.values()]
    assert [model.explore(case, protocol).ok for case in UNREDUCED.values()] == full
    assert not all(full)  # a case need not have what the wait protects, but one has


def test_a_case_too_large_to_explore_is_a_finding():
    result = model.explore(RING_OF_ONE, max_states=10)
    assert "more than 10 states" in result.findings[0]


# -- wrong protocols --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "signal", "case", "expected"),
    [
        ("dispatch", "entry", "ring of two", "not ordered by entry["),
        ("dispatch", "hidden_ready", "ring of one", "overwrites x_ring of rank 0"),
        ("dispatch", "hidden_ready", "one rank", "not ordered by hidden_ready[1] of rank 0"),
        ("gate_up", "x_routed_ready", "ring of two", "not ordered by x_routed_ready[0]"),
        ("gate_up", "y_done", "ring of one", "overwrites hidden_ring of rank"),
        ("gate_up", "y_done", "one rank", "not ordered by y_done[1] of rank 0"),
        ("shared_down", "shared_hidden_ready", "shared", "not ordered by shared_hidden_ready["),
        ("down", "hidden_ready", "ring of two", "not ordered by hidden_ready["),
        ("reduce", "exit", "ring of two", "not ordered by exit["),
        ("reduce", "exit", "one rank", "not ordered by exit[0]"),
        ("reduce", "shared_y_done", "shared", "not ordered by shared_y_done[0]"),
    ],
)
def test_model_finds_the_access_when_a_wait_is_missing(phase: str, signal: str, case: str, expected: str):
    findings = model.explore(CASES[case], without(phase, signal)).findings
    assert any(expected in finding for finding in findings), findings


COUNTED = [(p.name, w.signal) for p in order.PHASES for w in p.waits if not w.all_peers]


@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize(("phase", "signal"), COUNTED)
def test_model_names_the_signal_when_a_required_count_is_off_by_one(phase: str, signal: str, difference: int):
    protocol = off_by(phase, signal, difference)
    findings = [f for case in CASES.values() for f in model.explore(case, protocol).findings]
    assert any(f"arrivals at {signal}[" in f for f in findings), findings
    if difference > 0:  # it can never be reached
        assert any(f.startswith("no worker can go on") and f"waits at {signal}[" in f for f in findings), findings


@pytest.mark.parametrize(
    ("phase", "signal", "case"),
    [
        ("gate_up", "x_routed_ready", "ring of two"),
        ("down", "hidden_ready", "ring of two"),
        ("shared_down", "shared_hidden_ready", "shared"),
        ("reduce", "shared_y_done", "shared"),
    ],
)
def test_model_finds_the_early_read_when_a_required_count_is_one_too_small(phase: str, signal: str, case: str):
    findings = dynamic_findings(CASES[case], off_by(phase, signal, -1))
    assert any(" before it is written by " in f and f"not ordered by {signal}[" in f for f in findings), findings


def test_model_finds_the_overwrite_when_a_guard_looks_for_one_of_two_columns():
    two_columns = replace(model.small_geometry(False), gate_up_cols=2, down_cols=2)
    case = replace(small(ONE_RANK, launches=1), geometry=two_columns)
    assert model.explore(case).ok
    for phase, signal, ring in (("dispatch", "hidden_ready", "x_ring"), ("gate_up", "y_done", "hidden_ring")):
        findings = dynamic_findings(case, off_by(phase, signal, -2))
        assert any(f"overwrites {ring}" in f and f"{signal}[1]" in f for f in findings), findings


@pytest.mark.parametrize(("difference", "expected"), [(-1, "not ordered by exit["), (1, "waits at exit[")])
def test_model_finds_a_wrong_total_of_pushes(difference: int, expected: str):
    protocol = Protocol(total_pushes=lambda o: order.total_pushes(o) + difference)
    findings = model.explore(RING_OF_TWO, protocol).findings
    assert any("arrivals at pushes_done[0]" in f for f in findings), findings
    assert any(expected in f for f in findings), findings


def test_model_finds_a_deadlock_when_down_comes_before_its_gate_up():
    for case in CASES.values():
        findings = model.explore(case, Protocol(task_order=ReversedTickets)).findings
        assert any("no worker can go on" in f and "waits at hidden_ready[" in f for f in findings), findings


def test_model_finds_a_deadlock_when_down_is_late_in_a_ring_of_one():
    protocol = Protocol(task_order=AlwaysAhead)
    findings = model.explore(RING_OF_ONE, protocol).findings
    assert any("no worker can go on" in f and "waits at y_done[" in f for f in findings), findings
    assert model.explore(RING_OF_TWO, protocol).ok


def test_model_finds_the_overwrite_when_minibatches_share_a_slot():
    findings = model.explore(RING_OF_TWO, Protocol(task_order=OneSlot)).findings
    assert any("overwrites x_ring" in f for f in findings), findings


def test_model_finds_the_guard_of_a_block_that_a_short_minibatch_did_not_use():
    routing: Routing = (((0,),) * 6,)  # three blocks: minibatches of two and of one
    case = small(routing, blocks=2, ring=1, launches=1)
    assert model.explore(case).ok
    findings = model.explore(case, Protocol(task_order=UnguardedPartial)).findings
    assert any("arrivals at hidden_ready[" in f for f in findings), findings
    assert any("no worker can go on" in f for f in findings), findings


def test_model_finds_counters_that_no_launch_cleared():
    findings = model.explore(RING_OF_TWO, Protocol(clears=False)).findings
    assert any("counter set of rank 0 [0] of launch 2 must have one writer, it has: nobody" in f for f in findings)


def test_model_finds_two_writers_of_a_combine_slot():
    class Doubled(order.TaskOrder):
        """The last down tile is done twice."""

        def tile(self, ticket: Any, *args: Any) -> order.Tile:
            return super().tile(self.num_gemm_tasks - 1 if ticket == self.num_gemm_tasks - 2 else ticket, *args)

    findings = System(RING_OF_TWO, Protocol(task_order=Doubled)).findings
    assert any("combine of rank" in f and "must have one writer" in f for f in findings), findings


def test_random_orders_find_missing_waits_too():
    case = next(c for c in model.large_cases(0) if c.name.startswith("3 ranks, random"))
    case = replace(case, minibatch_blocks=1, ring_minibatches=2)
    assert model.walk(case, walks=2).ok
    for phase, signal in (("dispatch", "hidden_ready"), ("gate_up", "y_done"), ("down", "hidden_ready")):
        findings = model.walk(case, without(phase, signal), walks=8).findings
        assert any(f"{signal}[" in f for f in findings), (phase, signal, findings)


def test_reusing_the_ring_needs_a_worker_that_only_computes():
    """All CTAs being communication CTAs is a deadlock: they wait for ring blocks that nobody works on."""
    case = replace(RING_OF_ONE, compute_workers=0)
    findings = model.explore(case).findings
    assert any("no worker can go on" in f and "waits at hidden_ready[" in f for f in findings), findings
    assert model.explore(replace(RING_OF_TWO, compute_workers=0)).ok  # nothing is reused
