"""Cases that the forward must pass on virtual Blackwell GPUs: options of ``mok-cute check``, kernels, and which go
together in a short run.

The numbers of tokens lie around the 128 rows of a CTA's share of a tile and the 256 of a pair's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from forward_cases import ROUTINGS, Case
from safetensors.torch import save_file

from mok_cute.config import KernelConfig
from mok_cute.shapes import MoEShape

TICKETS, CONTROL = (("scheduler", role) for role in ("tickets", "launch_control"))


class Kernel(NamedTuple):
    ctas: int
    roles: tuple[tuple[str, str], ...]
    stages: int  # a single CTA's are larger
    dispatch_slots: int = 4  # of each warp, in the memory of the stages

    def config(self, arch: str) -> KernelConfig:
        return replace(
            KernelConfig.default(arch),
            ctas_per_tile=self.ctas,
            roles=self.roles,
            stages=self.stages,
            dispatch_slots=self.dispatch_slots,
        )


KERNELS = {
    "pair-tickets": Kernel(2, (TICKETS,), 6),
    "pair-control": Kernel(2, (CONTROL,), 6),
    "single-tickets": Kernel(1, (TICKETS,), 4),
    "single-control": Kernel(1, (CONTROL,), 4),
    "pair-short-ring": Kernel(2, (TICKETS,), 2, dispatch_slots=3),
    "single-short-ring": Kernel(1, (CONTROL,), 2),
}

TINY: Case = {"shape": "tiny"}
FACTOR: Case = {"shape": "qwen3.5", "hidden": 256, "intermediate": 128, "experts": 8, "topk": 3, "shared": 128}
# More than one tile in each direction, and rings of 512 rows for about 4000 with their padding.
BIG: Case = {"hidden": 768, "intermediate": 640, "experts": 16, "topk": 4, "shared": 512, "ranks": 2}
RING: Case = {"minibatch": 256, "macrobatch": 512}
TOKENS_OF_RANKS = {1: "129", 2: "130,41", 4: "0,129,1,40"}

CASES: dict[str, Case] = {}
for _ranks, _tokens in TOKENS_OF_RANKS.items():
    for _routing in ROUTINGS:
        CASES[f"{_routing}-{_ranks}-ranks"] = {**TINY, "ranks": _ranks, "tokens": _tokens, "routing": _routing}
for _count in (0, 1, 127, 128, 129, 255, 256, 257):
    CASES[f"{_count}-tokens"] = {**TINY, "tokens": str(_count)}
for _counts in ("0,0", "1,0", "127,129", "0,257", "255,256", "128,0,127,1"):
    CASES[f"{_counts}-tokens"] = {**TINY, "tokens": _counts, "ranks": _counts.count(",") + 1}
for _ranks in TOKENS_OF_RANKS:
    CASES[f"dropped-and-repeated-{_ranks}-ranks"] = {**TINY, "ranks": _ranks, "tokens": "90", "routing": "file"}
CASES |= {
    "no-shared-expert": {**TINY, "shared": 0, "tokens": "129,60", "ranks": 2},
    "clamp": {**TINY, "swiglu_limit": 0.5, "tokens": "129,60", "ranks": 2},
    "shared-factor": {**FACTOR, "tokens": "129,60", "ranks": 2},
    "shared-factor-clamp-zipf": {**FACTOR, "swiglu_limit": 1.0, "tokens": "70,0,1,129", "ranks": 4, "routing": "zipf"},
    "integers": {**TINY, "inputs": "integers", "tokens": "200,57", "ranks": 2},
    "half-a-tile-of-columns": {
        "hidden": 384,
        "intermediate": 128,
        "experts": 5,
        "topk": 1,
        "shared": 384,
        "tokens": "150,77",
        "ranks": 2,
    },
    "many-routes": {"hidden": 128, "intermediate": 256, "experts": 12, "topk": 11, "shared": 0, "tokens": "133"},
    "more-routes-than-experts": {**TINY, "experts": 3, "topk": 5, "tokens": "60,20", "ranks": 2},
    "ring-of-one-tile": {**TINY, "tokens": "257,100", "ranks": 2, "minibatch": 128, "macrobatch": 128},
    "big": {**BIG, **RING, "tokens": "300,200"},
    "big-zipf-integers": {**BIG, **RING, "tokens": "300,200", "routing": "zipf", "inputs": "integers"},
}

# Pairs of a case and a kernel that stand for the rest where minutes count.
SHORT = {
    "sm_100a": (
        ("zipf-4-ranks", "pair-tickets"),
        ("all-to-one-2-ranks", "pair-tickets"),
        ("257-tokens", "pair-control"),
        ("0,257-tokens", "pair-tickets"),
        ("dropped-and-repeated-2-ranks", "pair-tickets"),
        ("no-shared-expert", "single-tickets"),
        ("shared-factor-clamp-zipf", "pair-tickets"),
        ("half-a-tile-of-columns", "single-control"),
        ("ring-of-one-tile", "pair-control"),
        ("big-zipf-integers", "pair-short-ring"),
    ),
    "sm_103a": (
        ("empty-rank-4-ranks", "pair-tickets"),
        ("128,0,127,1-tokens", "pair-tickets"),
        ("129-tokens", "pair-control"),
    ),
    "sm_90a": (("dropped-and-repeated-4-ranks", "default"), ("shared-factor", "default")),
}
# Each has something that a wrong order of events would show: ring rows used again and again, ranks without work, routes
# that all meet in one expert, and rows that no route fills.
HARD = {
    "rings used eight times": ("big", "pair-tickets"),
    "ranks with nothing to do": ("128,0,127,1-tokens", "pair-control"),
    "one expert for all": ("all-to-one-4-ranks", "pair-tickets"),
    "dropped and repeated routes": ("dropped-and-repeated-4-ranks", "single-control"),
}
# Run configurations with the CTAs of each rank; those of one kernel must give the same bits.
RUNS: tuple[Case, ...] = (
    {},
    {"comm_sms": 2},
    {"comm_sms": 6},
    {"minibatch": 128, "macrobatch": 128},
    {"minibatch": 128, "macrobatch": 256, "comm_sms": 1},
    {"minibatch": 256, "macrobatch": 1024, "comm_sms": 4},
    {"minibatch": 384, "macrobatch": 768, "comm_sms": 3},
)
RUN_SMS = 8


def write_routing(path: Path, shape: MoEShape, tokens: int, ranks: int) -> None:
    """A routing file with hard routes: dropped ones, tokens without any, tokens that name an expert twice, and ids of
    32 bits on odd ranks, of 64 on even ones."""
    generator = torch.Generator().manual_seed(ranks)
    tensors = {}
    for rank in range(ranks):
        ids = torch.randint(-1, shape.num_experts, (tokens, shape.topk), generator=generator)
        ids[::7] = -1
        ids[3::7] = ids[3::7, :1]
        tensors[f"ids.{rank}"] = ids.to(torch.int32 if rank % 2 else torch.int64)
        tensors[f"weights.{rank}"] = torch.rand(tokens, shape.topk, generator=generator)
    save_file(tensors, path)
