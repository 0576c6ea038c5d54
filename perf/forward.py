"""Time of one forward on the GPU, with its correctness in the same run and cuBLAS beside it.

    python perf/forward.py --shape deepseek-v3 --local-experts 32 --tokens 8192 --shared 0 --out perf/results/NAME.json

Timing: CUDA events around single calls of forward (schedule excluded; built once), median of --repeat after --warmup;
the operands are several times the L2 cache. FLOP: 6 * routed rows * hidden * intermediate, padding not counted. The
ceiling is one dense cuBLAS product (torch.matmul, bf16) of 8192 x 8192 x 8192 and of the routed gate/up size. No figure
is printed unless the error ratio of ``mok-cute check`` passes on the same inputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from typing import Any

import torch

from mok_cute import functional, inputs, metrics, reference
from mok_cute.config import RunConfig
from mok_cute.shapes import MoEShape


def timed(call: Any, warmup: int, repeat: int) -> list[float]:
    """Milliseconds of each of ``repeat`` calls."""
    for _ in range(warmup):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def cublas_tflops(m: int, n: int, k: int) -> float:
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    return 2 * m * n * k / statistics.median(timed(lambda: a @ b.T, 3, 10)) / 1e9


def environment() -> dict[str, Any]:
    def commit() -> str:
        try:
            done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        except OSError:
            return "unknown"
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    import cutlass

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dsl": cutlass.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "perf/forward.py", *sys.argv[1:]]).partition(" --out")[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="deepseek-v3")
    parser.add_argument("--local-experts", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shared", type=int)
    parser.add_argument("--routing", default="random")
    parser.add_argument("--runs", default="2048:65536:16", help="minibatch:macrobatch:comm_sms, several by comma")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="list the GPU work of one forward")
    parser.add_argument("--out")
    args = parser.parse_args()

    shape = MoEShape.preset(args.shape, num_experts=args.local_experts, shared_intermediate=args.shared)
    device = "cuda"
    given = inputs.make_rank_inputs(shape, 0, 1, args.tokens, 0, routing=args.routing, device=device)
    routed = functional.RoutedWeights(*inputs.make_routed_weights(shape, 0, 1, 0, device=device))
    made = inputs.make_shared_weights(shape, 0, device=device)
    shared = None if made is None else functional.SharedWeights(*made)
    kinds: dict[str, Any] = {"shared_factor": given.shared_factor} if shape.shared_factor else {}
    runs = [RunConfig(int(m), int(b), int(s)) for m, b, s in (text.split(":") for text in args.runs.split(","))]
    largest = max(runs, key=lambda run: run.macrobatch)
    workspace = functional.create_workspace(shape, max_tokens=args.tokens, device=device, run=largest)
    schedule = functional.build_schedule(workspace, given.topk_ids)
    routes = int(reference.is_routed(given.topk_ids, shape.num_experts).sum())

    factors = None if given.shared_factor is None else [given.shared_factor]
    whole = (shape, [given.x], [given.topk_ids], [given.topk_weights], [routed], None if shared is None else [shared])
    pool = metrics.ErrorPool()
    exact = reference.forward(*whole, shared_factors=factors)
    baseline = reference.forward(*whole, shared_factors=factors, arithmetic=reference.TORCH_BF16)
    y, _ = functional.forward(workspace, schedule, given.x, given.topk_weights, routed, shared, run=runs[0], **kinds)
    workspace.check()
    pool.add([y], baseline, exact, routes)
    figures = pool.figures()
    print(json.dumps({"error": figures.to_json()}), flush=True)
    if not figures.ok:
        return 1
    del exact, baseline

    dense = {
        "8192x8192x8192": cublas_tflops(8192, 8192, 8192),
        "routed gate/up": cublas_tflops(args.tokens * shape.topk, 2 * shape.intermediate, shape.hidden),
    }
    record: dict[str, Any] = {
        "schema": 1,
        "case": {key: value for key, value in vars(args).items() if key != "out"},
        "routed_rows": int(schedule.num_rows),
        "routes": routes,
        "error_vs_torch_bf16": figures.error_vs_torch_bf16,
        "cublas_tflops": dense,
        "environment": environment(),
        "timings": [],
    }
    work = shape.flops_forward(routes)
    for run in runs:

        def call(run: RunConfig = run) -> torch.Tensor:
            return functional.forward(
                workspace, schedule, given.x, given.topk_weights, routed, shared, run=run, **kinds
            )[0]

        if not torch.equal(call(), y):
            print("not the same bits as the first run configuration", file=sys.stderr)
            return 1
        ms = timed(call, args.warmup, args.repeat)
        median = statistics.median(ms)
        row = {
            "minibatch": run.minibatch,
            "macrobatch": run.macrobatch,
            "comm_sms": run.comm_sms,
            "median_ms": median,
            "min_ms": min(ms),
            "p90_ms": sorted(ms)[int(0.9 * len(ms))],
            "n": len(ms),
            "routed_tflops": work / median / 1e9,
        }
        record["timings"].append(row)
        print(json.dumps(row), flush=True)
    schedule_ms = timed(lambda: functional.build_schedule(workspace, given.topk_ids), 3, 10)
    record["schedule_median_ms"] = statistics.median(schedule_ms)
    workspace.check()
    print(json.dumps({"cublas_tflops": dense, "schedule_median_ms": record["schedule_median_ms"]}), flush=True)
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        record["gpu_work_of_one_forward"] = [event.name for event in profile.events()]
        print(json.dumps({"gpu_work_of_one_forward": record["gpu_work_of_one_forward"]}), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
