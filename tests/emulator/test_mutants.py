"""Broken kernels are reported and right ones are not: mutants of two pipelined GEMMs and of our forward megakernel.

A mutant differs from the right kernel in one place. It counts as reported when one of a few orders of events ends in an
error of the virtual GPU, or in wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from compare import assert_near
from gemm_kernels import GEMMS

from mok_cute import functional, inputs, reference
from mok_cute.config import RunConfig
from mok_cute.emulator.decode import Instruction, Kernel
from mok_cute.emulator.device import Deadlock, Grid, run
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.memory import MemoryFault
from mok_cute.emulator.races import RaceError
from mok_cute.emulator.virtual_device import VirtualDevice
from mok_cute.shapes import MoEShape

pytestmark = pytest.mark.emulated

MOST_SEEDS = 8
SLOW_SEEDS = range(20, 200)

# ---------------------------------------------------------------------------------------------------------------- GEMMs

# What must be found first, in one order or another. Waits that pass at once mostly end in a fault: arrivals come twice.
FOUND = {
    "barriers not fenced": "mbarrier",
    "barriers used at once": "mbarrier, deadlock, fault",
    "no empty wait": "fault",
    "wrong parity of the empty wait": "deadlock",
    "too many bytes": "deadlock",
    "too few bytes": "deadlock",
    "loads to the other stage": "race",
    "no full wait": "fault",
    "wrong parity of the full wait": "fault",
    "full wait of the other stage": "fault, race",
    "stage freed before its products": "race",
    "stage never freed": "deadlock",
    "products not waited for": "race",
    "staging reused while it is stored": "race",
    "no barrier before the staging is reused": "race",
    "no proxy fence before the store": "proxy",
    "no barrier before the store": "race",
    "last store not waited for": "exit",
    "accumulator not waited for": "fault",
    "accumulator never ready": "deadlock",
    "wrong accumulator ready": "deadlock",
    "accumulator reused before it is read": "race",
    "readers never arrive": "deadlock",
    "loads not waited for": "race",
    "no fence before the readers' barrier": "tensor fence",
    "no fence behind the readers' barrier": "tensor fence",
    "sums onto the last tile": "uninitialised",
}


def outcome(act: Callable[[], None]) -> set[str]:
    """Kinds of what is found; empty: nothing."""
    try:
        act()
    except RaceError as error:
        return {finding.kind for finding in error.findings}
    except Deadlock:
        return {"deadlock"}
    except (KernelFault, MemoryFault):
        return {"fault"}
    except AssertionError:
        return {"numbers"}
    return set()


@pytest.mark.parametrize(
    ("gemm", "mutant"),
    [pytest.param(name, mutant, id=f"{name}, {mutant}") for name in GEMMS for mutant in GEMMS[name].mutants],
)
def test_broken_gemm_is_reported(gemm, mutant):
    kernel = GEMMS[gemm].kernel(mutant)
    for seed in range(MOST_SEEDS):
        found = outcome(partial(GEMMS[gemm].run, kernel, seed))
        if found:
            assert found & set(FOUND[mutant].split(", ")), found
            return
    pytest.fail("nothing was found")


@pytest.mark.parametrize("gemm", GEMMS)
def test_right_gemm_is_right_in_every_order(gemm):
    kernel = GEMMS[gemm].kernel()
    for seed in range(20):
        GEMMS[gemm].run(kernel, seed)


@pytest.mark.slow
@pytest.mark.parametrize("gemm", GEMMS)
def test_right_gemm_is_right_in_very_many_orders(gemm):
    kernel = GEMMS[gemm].kernel()
    for seed in SLOW_SEEDS:
        GEMMS[gemm].run(kernel, seed)


# --------------------------------------------------------------------------------------------------- forward megakernel

SHAPE, TOKENS = MoEShape(hidden=128, intermediate=128, num_experts=4, topk=2), [150, 40]
# By turns a ring of one minibatch, so that every slot is used several times, and one that holds all rows.
RUNS = [RunConfig(minibatch=128, macrobatch=128), RunConfig(minibatch=128, macrobatch=1024)]
SMS_PER_RANK = 4


def forward(arch: str, tokens: list[int], seed: int, comm_sms: int = 1) -> None:
    """The schedule kernels and the layer on as many ranks, checked for races and compared with the reference."""
    size, run = len(tokens), replace(RUNS[seed % 2], comm_sms=comm_sms)
    with VirtualDevice(arch, num_sms=SMS_PER_RANK * size, seed=seed, check_races=True) as device:
        given = [inputs.make_rank_inputs(SHAPE, rank, size, tokens[rank], seed=0, device="cpu") for rank in range(size)]
        made = [inputs.make_routed_weights(SHAPE, rank, size, seed=0, device="cpu") for rank in range(size)]
        routed = [functional.RoutedWeights(*three) for three in made]
        xs, ids, weights = [g.x for g in given], [g.topk_ids for g in given], [g.topk_weights for g in given]
        workspaces = functional.create_workspaces(
            SHAPE, ep_size=size, max_tokens=max(tokens), device=str(device), run=run
        )
        schedules = functional.build_schedules(workspaces, ids)
        outputs = functional.forward_ranks(workspaces, schedules, xs, weights, routed, None)
        device.synchronize()
        expected = reference.forward(SHAPE, xs, ids, weights, routed, None)
        for rank, ((y, _), wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert_near(y.float(), wanted.float(), 0.06, f"y of rank {rank}")


# Instructions of the kernel for one rank or more without a shared expert, by opcode in the order of the program, and
# what each of them is there for. A wait looks once, and then again and again.
ACQUIRES = ("x_staged", "entry", "ring of x", "rows", "exit", "ring of hidden")
PLACES: dict[str, tuple[str, ...]] = {
    "ld.acquire": tuple(f"{name}, {look}" for name in ACQUIRES for look in ("first", "again")),
    "red.release": ("x_staged", "entered", "x_routed_ready", "hidden_ready", "y_done"),
    "fence.proxy.async.global": (
        "x_staged", "entry", "ring of x", "x_routed_ready", "rows", "ring of hidden", "hidden_ready",
    ),
    "cp.async.bulk.wait_group": ("x_staged", "x_routed_ready", "hidden_ready"),
    "atom.global.acq_rel.add": ("pushes_done", "ctas_done"),
    "bar.sync": ("start", "zeros", "dispatch", "end"),
}  # fmt: skip
NOTHING = "membar.cta"


def at(opcode: str, *names: str) -> Callable[[Kernel], list[int]]:
    """Where the instructions of these names are in a kernel."""

    def find(kernel: Kernel) -> list[int]:
        starts = [number for number, one in enumerate(kernel.instructions) if one.opcode.startswith(opcode)]
        if opcode == "cp.async.bulk.wait_group":
            starts = [number for number in starts if "read" not in kernel.instructions[number].parts]
        assert len(starts) == len(PLACES[opcode]), f"{len(starts)} times {opcode}: bring PLACES up to date"
        return [start for start, name in zip(starts, PLACES[opcode], strict=True) if name.split(",")[0] in names]

    return find


def drop(one: Instruction) -> Instruction:
    return replace(one, opcode=NOTHING, operands=(), text=f"dropped: {one.text}")


def passes(one: Instruction) -> Instruction:
    """A wait that sees enough at once, and acquires nothing."""
    return replace(one, opcode="mov.b32", operands=(one.operands[0], str(1 << 30)), text=f"passed: {one.text}")


def with_opcode(old: str, new: str) -> Callable[[Instruction], Instruction]:
    def change(one: Instruction) -> Instruction:
        assert old in one.opcode
        opcode = one.opcode.replace(old, new)
        return replace(one, opcode=opcode, text=one.text.replace(old, new))

    return change


def comparisons(kernel: Kernel) -> list[int]:
    """Of the load warp's waits with what they require: the signed difference is above -1."""
    found = []
    for start in at("ld.acquire", "rows")(kernel):
        near = range(start, start + 4)
        found += [number for number in near if kernel.instructions[number].opcode == "setp.gt.s32"]
    assert len(found) == 2
    return found


def one_less(one: Instruction) -> Instruction:
    assert one.operands[2] == "-1"
    return replace(one, operands=(*one.operands[:2], "-2"), text=f"one less: {one.text}")


def told_to_peers(kernel: Kernel) -> list[int]:
    """Stores of an epoch to a peer's signal; the others are of records."""
    stores = [number for number, one in enumerate(kernel.instructions) if one.opcode.startswith("st.release.sys")]
    return [
        number
        for number in stores
        if not any("nanosleep" in one.text for one in kernel.instructions[number - 60 : number])
    ]


relaxed = with_opcode("release", "relaxed")
# By what is wrong: where, the change, and a name that the report must have.
MUTANTS: dict[str, tuple[Callable[[Kernel], list[int]], Callable[[Instruction], Instruction], str]] = {
    "load waits for no rows": (at("ld.acquire", "rows"), passes, "_ring["),
    "load waits for a row group too few": (comparisons, one_less, "_ring["),
    "load does not acquire": (at("ld.acquire", "rows"), with_opcode("acquire", "relaxed"), "_ring["),
    "no proxy fence behind the load's wait": (at("fence.proxy.async.global", "rows"), drop, "_ring["),
    "hidden published before it is stored": (
        at("cp.async.bulk.wait_group", "hidden_ready"),
        with_opcode("wait_group", "wait_group.read"),
        "hidden_ring[",
    ),
    "hidden published without a proxy fence": (at("fence.proxy.async.global", "hidden_ready"), drop, "hidden_ring["),
    "hidden published without a release": (at("red.release", "hidden_ready"), relaxed, "hidden_ready["),
    "rows published before they are stored": (at("cp.async.bulk.wait_group", "x_routed_ready"), drop, "x_ring["),
    "rows published without a proxy fence": (at("fence.proxy.async.global", "x_routed_ready"), drop, "x_ring["),
    "rows published without a release": (at("red.release", "x_routed_ready"), relaxed, "x_routed_ready["),
    "ring of x not guarded": (at("ld.acquire", "ring of x"), passes, "x_ring["),
    "ring of hidden not guarded": (at("ld.acquire", "ring of hidden"), passes, "hidden_ring["),
    "x read before the peer has staged it": (at("ld.acquire", "entry"), passes, "x["),
    "pushes counted without order": (
        at("atom.global.acq_rel.add", "pushes_done"),
        with_opcode("acq_rel", "relaxed"),
        "combine[",
    ),
    "sums made before the peers' exit": (at("ld.acquire", "exit"), passes, "combine["),
    "peers told at gpu scope": (told_to_peers, with_opcode("sys", "gpu"), "exit["),
    "no barrier before the zeros are stored": (at("bar.sync", "zeros"), drop, "shared memory offset"),
    "no barrier behind dispatch": (at("bar.sync", "dispatch"), drop, "shared memory offset"),
}


# Where mostly other signals order the warps of a CTA, too: those at entry, if there are several ranks, and that of the
# last rows, if the CTA that moves rows finds no other tile left when it is through.
SPECIAL: dict[str, tuple[list[int], int]] = {
    "no barrier before the zeros are stored": (TOKENS[:1], 1),
    "no barrier behind dispatch": (TOKENS[:1], 3),
}


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_megakernel_is_reported_by_name(mutant, monkeypatch):
    where, change, name = MUTANTS[mutant]
    tokens, comm_sms = SPECIAL.get(mutant, (TOKENS, 1))

    def broken(kernel: Kernel) -> Kernel:
        if not kernel.name.startswith("mok_forward"):
            return kernel
        places = where(kernel)
        assert places
        changed = [change(one) if at in places else one for at, one in enumerate(kernel.instructions)]
        return replace(kernel, instructions=changed)

    def run_broken(grids: list[Grid], **options: Any) -> Any:
        return run([replace(grid, kernel=broken(grid.kernel)) for grid in grids], max_steps=2_000_000, **options)

    monkeypatch.setattr("mok_cute.emulator.virtual_device.run", run_broken)
    for seed in range(MOST_SEEDS):
        try:
            forward("sm_90a", tokens, seed, comm_sms)
        except (RaceError, Deadlock, KernelFault, MemoryFault) as found:
            if name in str(found):
                return
    pytest.fail(f"no report has {name}")


@pytest.mark.ranks
@pytest.mark.parametrize("tokens", [TOKENS[:1], TOKENS], ids=["one_rank", "two_ranks"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)], ids=["once", "often"])
def test_right_megakernel_has_no_findings(arch, tokens, seeds):
    for seed in seeds:
        forward(arch, tokens, seed)
