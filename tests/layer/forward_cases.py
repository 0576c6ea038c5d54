"""The cases that a forward on a GPU must pass, as ``mok-cute check --cases`` takes them.

python tests/layer/forward_cases.py > cases.json && mok-cute check --cases cases.json --json > results.jsonl
python tests/layer/forward_cases.py results.jsonl        # verdict, and equal bits over run configurations
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

Case = dict[str, Any]
ROUTINGS = ("random", "zipf", "all-to-one", "empty-rank")
TOKEN_COUNTS = (0, 1, 63, 127, 128, 129, 1000)
# Run configurations that must give the same bits; rings of 256 rows are many times smaller than the rows.
RUNS: tuple[Case, ...] = (
    {},
    {"comm_sms": 1},
    {"comm_sms": 7},
    {"minibatch": 128, "macrobatch": 128},
    {"minibatch": 128, "macrobatch": 256},
    {"minibatch": 256, "macrobatch": 1024},
    {"minibatch": 384, "macrobatch": 768, "comm_sms": 3},
    {"minibatch": 1024, "macrobatch": 2048},
)


def presets() -> list[Case]:
    """Every preset at one rank with 4096 tokens."""
    names = ("tiny", "qwen3-30b", "qwen3.5", "glm-5", "deepseek-v3", "kimi-k2", "deepseek-v4-pro")
    return [{"shape": name, "tokens": "4096", "ranks": 1} for name in names]


def routings() -> list[Case]:
    return [
        {"shape": shape, "tokens": "1000", "ranks": ranks, "routing": routing}
        for shape in ("tiny", "qwen3-30b")
        for ranks in (1, 2, 4)
        for routing in ROUTINGS
    ]


def token_counts() -> list[Case]:
    equal = [{"shape": "tiny", "tokens": str(n), "ranks": r} for n in TOKEN_COUNTS for r in (1, 2)]
    unequal = ["0,129,1000,63", "1000,0,0,0", "1,2,3,4"]
    cases = [{"shape": "tiny", "tokens": text, "ranks": 4} for text in unequal]
    cases += [{"shape": "tiny", "tokens": text, "ranks": 3, "routing": "zipf"} for text in ("128,0,127", "1000,1,63")]
    return equal + cases


def shapes() -> list[Case]:
    """Sizes off the beaten track: odd multiples of 128, one route, many routes, the clamp, no shared expert."""
    return [
        {"hidden": 384, "intermediate": 128, "experts": 5, "topk": 1, "shared": 384, "tokens": "300,77", "ranks": 2},
        {"hidden": 128, "intermediate": 640, "experts": 12, "topk": 11, "shared": 0, "tokens": "333", "ranks": 1},
        {"shape": "tiny", "swiglu_limit": 0.5, "tokens": "500", "ranks": 2},
        {"shape": "tiny", "inputs": "integers", "tokens": "1000,700,3", "ranks": 3},
        {
            "hidden": 640,
            "intermediate": 512,
            "experts": 16,
            "topk": 4,
            "inputs": "integers",
            "tokens": "700",
            "ranks": 2,
        },
        {"shape": "qwen3.5", "experts": 16, "tokens": "1000,900", "ranks": 2},
    ]


def run_configurations() -> list[Case]:
    problems: tuple[Case, ...] = (
        {"shape": "tiny", "tokens": "1000", "ranks": 1},
        {"shape": "tiny", "tokens": "2048,1000", "ranks": 2, "routing": "zipf"},
        {"shape": "tiny", "tokens": "512,1000,0,700", "ranks": 4, "routing": "all-to-one"},
        {"shape": "qwen3-30b", "tokens": "1000", "ranks": 2},
    )
    return [{**problem, **run} for problem in problems for run in RUNS]


def all_cases() -> list[Case]:
    return [*token_counts(), *routings(), *run_configurations(), *shapes(), *presets()]


def judge(lines: list[Case]) -> list[str]:
    """What is wrong with the results of ``all_cases``: failures, and differing bits over run configurations."""
    wrong = [f"{line.get('case')}: {line.get('findings') or line.get('error')}" for line in lines if not line["ok"]]
    bits = defaultdict(set)
    runs = set().union(*RUNS)
    for line in lines:
        if line["ok"]:
            problem = json.dumps({k: v for k, v in line["case"].items() if k not in runs}, sort_keys=True)
            bits[problem].add(line["results"]["y"]["sha256"])
    return wrong + [
        f"{problem}: {len(hashes)} different results" for problem, hashes in bits.items() if len(hashes) > 1
    ]


def summary(lines: list[Case]) -> str:
    ratios = [
        line["results"]["y"]["error_vs_torch_bf16"]
        for line in lines
        if line["ok"] and line["results"]["y"]["error_vs_torch_bf16"] is not None
    ]
    worst = max(ratios) if ratios else None
    return f"{len(lines)} of {len(all_cases())} cases, {sum(line['ok'] for line in lines)} ok, worst ratio {worst}"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(all_cases()))
    else:
        with open(sys.argv[1]) as file:
            results = [json.loads(line) for line in file if line.startswith("{")]
        problems = judge(results)
        print("\n".join(problems) or "no findings")
        print(summary(results))
        sys.exit(bool(problems) or len(results) != len(all_cases()))
