"""Speed of both engines of the virtual GPU, with the results checked in the same run.

    python perf/emulator.py --out perf/results/NAME.json

Cases: the pipelined GEMMs of tests/gemm_kernels.py, and the forward megakernel of the tiny preset on two ranks with 128
and 100 tokens. Each runs once to warm up, then --repeat times; the figure is the median of warp-instructions of all
launches that ran together by the seconds of their run. ``races`` is with the race detector.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import gemm_kernels  # noqa: E402
from compare import assert_near  # noqa: E402

from mok_cute import functional, inputs, reference  # noqa: E402
from mok_cute.emulator.device import LaunchStats, launch  # noqa: E402
from mok_cute.emulator.virtual_device import VirtualDevice  # noqa: E402
from mok_cute.shapes import MoEShape  # noqa: E402

TOKENS = [128, 100]
Measured = tuple[int, float]  # warp-instructions, seconds


def gemm(name: str, engine: str, races: bool) -> Callable[[], Measured]:
    case = gemm_kernels.GEMMS[name]
    kernel = case.kernel()
    kept: list[LaunchStats] = []

    def launch_on(*args: Any, **options: Any) -> LaunchStats:
        kept.append(launch(*args, **{**options, "engine": engine, "check_races": races}))
        return kept[-1]

    def once() -> Measured:
        gemm_kernels.launch = launch_on
        try:
            case.run(kernel, 0)
        finally:
            gemm_kernels.launch = launch
        return kept[-1].warp_instructions, kept[-1].seconds

    return once


def forward(arch: str, engine: Any, races: bool) -> Callable[[], Measured]:
    shape, size = MoEShape.preset("tiny"), len(TOKENS)

    def once() -> Measured:
        with VirtualDevice(arch, num_sms=4 * size, engine=engine, check_races=races) as device:
            given = [inputs.make_rank_inputs(shape, r, size, TOKENS[r], seed=0, device="cpu") for r in range(size)]
            weights = [inputs.make_routed_weights(shape, r, size, seed=0, device="cpu") for r in range(size)]
            routed = [functional.RoutedWeights(*three) for three in weights]
            made = inputs.make_shared_weights(shape, seed=0, device="cpu")
            shared = None if made is None else [functional.SharedWeights(*made)] * size
            workspaces = functional.create_workspaces(shape, ep_size=size, max_tokens=max(TOKENS), device=str(device))
            ids, topk_weights, xs = ([getattr(g, n) for g in given] for n in ("topk_ids", "topk_weights", "x"))
            schedules = functional.build_schedules(workspaces, ids)
            outputs = functional.forward_ranks(workspaces, schedules, xs, topk_weights, routed, shared)
            device.synchronize()
            expected = reference.forward(shape, xs, ids, topk_weights, routed, shared)
            for (y, _), wanted in zip(outputs, expected, strict=True):
                assert_near(y.float(), wanted.float(), 0.06, "y")
            ran = [stats for name, stats in device.launched if name.startswith("mok_forward")]
            return sum(stats.warp_instructions for stats in ran), ran[-1].seconds

    return once


CASES: dict[str, Callable[[Any, bool], Callable[[], Measured]]] = {
    "gemm sm_90a": lambda engine, races: gemm("wgmma", engine, races),
    "gemm sm_100a": lambda engine, races: gemm("tcgen05", engine, races),
    "forward sm_90a": lambda engine, races: forward("sm_90a", engine, races),
    "forward sm_100a": lambda engine, races: forward("sm_100a", engine, races),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--engines", default="fast,reference")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for case in args.cases.split(","):
        for engine in args.engines.split(","):
            for races in (False, True):
                once = CASES[case](engine, races)
                once()
                runs = [once() for _ in range(args.repeat)]
                seconds = statistics.median(seconds for _, seconds in runs)
                count = runs[0][0]
                row = {"case": case, "engine": engine, "races": races, "warp_instructions": count, "seconds": seconds}
                rows.append({**row, "million_per_second": count / seconds / 1e6})
                print(f"{case:16} {engine:10} races={races!s:5} {count:8} {seconds:8.3f} s {count / seconds / 1e6:.3f}")
    record = {
        "command": " ".join(["python", "perf/emulator.py", *sys.argv[1:]]).partition(" --out")[0],
        "machine": f"{platform.machine()}, 2-core VM, one core used",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
