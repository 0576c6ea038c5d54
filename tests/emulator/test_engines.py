"""The fast engine and the reference are one machine: one seed gives one order of events, equal bits and findings."""

from __future__ import annotations

from typing import Any

import gemm_kernels
import numpy as np
import pytest
from gemm_kernels import GEMMS
from microkernel import per_thread

from mok_cute.emulator.decode import Kernel
from mok_cute.emulator.device import Deadlock, LaunchStats, launch
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.memory import MemoryFault
from mok_cute.emulator.races import RaceError

pytestmark = pytest.mark.emulated

SEEDS = 3
# Mutants that end in each kind of report.
COMPARED = {
    "wgmma": [None, "loads to the other stage", "too many bytes", "no empty wait", "no proxy fence before the store"],
    "tcgen05": [
        None,
        "loads not waited for",
        "stage never freed",
        "sums onto the last tile",
        "last store not waited for",
    ],
}


def observe(gemm: str, kernel: Kernel, seed: int, engine: str, races: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How a run ends, in all that the two engines must agree on."""
    kept: list[LaunchStats] = []

    def launch_on(*args: Any, **options: Any) -> LaunchStats:
        kept.append(launch(*args, **{**options, "engine": engine, "check_races": races}))
        return kept[-1]

    monkeypatch.setattr(gemm_kernels, "launch", launch_on)
    try:
        GEMMS[gemm].run(kernel, seed)
    except RaceError as error:
        return sorted((one.kind, one.where, one.first, one.second, one.missing) for one in error.findings)
    except Deadlock as error:
        return type(error), error.waits
    except (KernelFault, MemoryFault) as error:
        return type(error), str(error)
    except AssertionError:
        return "numbers"
    stats = kept[-1]
    return stats.opcodes, stats.warps, stats.waits, stats.async_operations, stats.async_bytes


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize(
    ("gemm", "mutant"), [pytest.param(gemm, one, id=f"{gemm}, {one}") for gemm in COMPARED for one in COMPARED[gemm]]
)
def test_engines_agree_on_every_order_of_a_gemm(gemm, mutant, races, monkeypatch):
    kernel = GEMMS[gemm].kernel(mutant)
    for seed in range(SEEDS):
        fast, reference = (observe(gemm, kernel, seed, engine, races, monkeypatch) for engine in ("fast", "reference"))
        assert fast == reference


def test_one_seed_replays_a_run_exactly(monkeypatch):
    kernel = GEMMS["tcgen05"].kernel("loads not waited for")
    first, again = (observe("tcgen05", kernel, 5, "fast", True, monkeypatch) for _ in range(2))
    assert first == again
    assert isinstance(first, list)


SPECIAL = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 1, 0x807FFFFF, 0x3F800000, 0xBF800001], np.uint32
)
FLOATS = [
    "add.f32 %o, %i0, %i1;",
    "mul.rn.ftz.f32 %o, %i0, %i1;",
    "fma.rn.f32 %o, %i0, %i1, %i0;",
    "div.rn.f32 %o, %i0, %i1;",
    "min.f32 %o, %i0, %i1;",
    "max.NaN.f32 %o, %i0, %i1;",
    "ex2.approx.ftz.f32 %o, %i0;",
    "rcp.approx.ftz.f32 %o, %i0;",
    "rsqrt.approx.f32 %o, %i0;",
    "sqrt.rn.f32 %o, %i0;",
    "cvt.rn.bf16x2.f32 %o, %i0, %i1;",
    "cvt.rn.f16x2.f32 %o, %i0, %i1;",
    "cvt.rni.s32.f32 %o, %i0;",
    "cvt.rzi.u32.f32 %o, %i0;",
    "cvt.rn.f32.s32 %o, %i0;",
]
INTEGERS = [
    "add.s32 %o, %i0, %i1;",
    "mul.lo.s32 %o, %i0, %i1;",
    "mul.hi.u32 %o, %i0, %i1;",
    "mad.lo.s32 %o, %i0, %i1, %i0;",
    "shl.b32 %o, %i0, %i1;",
    "shr.s32 %o, %i0, %i1;",
    "shf.l.wrap.b32 %o, %i0, %i1, %i0;",
    "prmt.b32 %o, %i0, %i1, 30292;",
    "lop3.b32 %o, %i0, %i1, %i0, 150;",
    "bfe.u32 %o, %i0, 3, 11;",
    "clz.b32 %o, %i0;",
    "shfl.sync.bfly.b32 %o, %i0, 5, 31, -1;",
]


@pytest.mark.parametrize("body", FLOATS + INTEGERS)
def test_engines_give_the_same_bits(body, monkeypatch):
    random = np.random.default_rng(0)
    pairs = np.stack(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1)
    values = random.integers(0, 1 << 32, (2, 1024 - pairs.shape[1]), dtype=np.uint64).astype(np.uint32)
    a, b = (np.ascontiguousarray(row) for row in np.concatenate([pairs, values], axis=1))
    results = []
    for engine in ("fast", "reference"):
        monkeypatch.setenv("MOK_CUTE_ENGINE", engine)
        results.append(per_thread(body, a, b, result="u4"))
    np.testing.assert_array_equal(results[0], results[1])
    assert len(set(results[0].tolist())) > 3


def test_unknown_engine_is_refused():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="not one of auto, fast, reference"):
        patch.setattr(gemm_kernels, "launch", lambda *args, **options: launch(*args, **{**options, "engine": "quick"}))
        GEMMS["wgmma"].run(GEMMS["wgmma"].kernel(), 0)
