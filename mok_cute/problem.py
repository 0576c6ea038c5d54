"""What a check is about: weights, inputs and the reference's answer, made once while they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mok_cute import gpu, reference
from mok_cute.config import KernelConfig, RunConfig
from mok_cute.inputs import make_rank_inputs, make_routed_weights, make_shared_weights
from mok_cute.shapes import MoEShape

if TYPE_CHECKING:
    from mok_cute.functional import RoutedWeights, SharedWeights

T = TypeVar("T")


@dataclass(frozen=True)
class CheckRequest:
    """What to check. ``tokens`` has one count per rank; ``routing`` is a kind or ``file:PATH``.

    With a routing file the token counts come from the file and ``tokens`` is only the maximum.

    schedule_seeds   a run for each, at least two. A virtual device orders by the seed what a GPU leaves open; on a
                     real one only their number counts
    check_races      a virtual device also looks for races, missing fences and reads of what nobody wrote
    """

    shape: MoEShape
    ranks: int
    tokens: tuple[int, ...]
    run: RunConfig = RunConfig()
    config: KernelConfig | None = None  # None: what the device's workspaces are built for by default
    device: str = "cuda"
    routing: str = "random"
    inputs: str = "normal"
    seed: int = 0
    schedule_seeds: tuple[int, ...] = (0, 1)
    check_races: bool = False
    save: Path | None = None

    @property
    def torch_device(self) -> torch.device:
        """Where weights, inputs and results lie."""
        return gpu.torch_device(self.device)

    @property
    def saves_context(self) -> bool:
        """Pre-activations are looked at when they are written to a file or can be compared exactly."""
        return self.save is not None or self.inputs == "integers"

    @property
    def problem(self) -> Hashable:
        """All that determines the reference's results, and nothing else."""
        kind, _, path = self.routing.partition(":")
        stamp = Path(path).stat().st_mtime_ns if kind == "file" else None
        return (self.shape, self.ranks, self.tokens, self.inputs, self.seed, self.device, self.routing, stamp)


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

    def clear(self) -> None:
        self.values.clear()


WEIGHTS = Memo(1)  # as large as the GPU's memory may be
EXPECTED = Memo(3)  # problem -> seed -> Expected


def weights_key(request: CheckRequest) -> Hashable:
    return (request.shape, request.ranks, request.seed, request.inputs, request.device)


def make_weights(request: CheckRequest) -> Weights:
    from mok_cute.functional import RoutedWeights, SharedWeights

    shape, ranks, device = request.shape, request.ranks, request.torch_device
    routed = [
        RoutedWeights(*make_routed_weights(shape, rank, ranks, request.seed, request.inputs, device))
        for rank in range(ranks)
    ]
    shared = make_shared_weights(shape, request.seed, request.inputs, device)
    return Weights(routed, None if shared is None else [SharedWeights(*shared)] * ranks)


def make_inputs(request: CheckRequest, seed: int) -> Inputs:
    made = [
        make_rank_inputs(
            request.shape, rank, request.ranks, tokens, seed, request.inputs, request.routing, request.torch_device
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
    by_seed: dict[int, Expected] = EXPECTED.get(request.problem, dict)
    if seed not in by_seed:
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
        by_seed[seed] = Expected(ys, baseline, routes)
    return by_seed[seed]
