"""A stand-in for ``mok_cute.functional`` that computes with the reference on the CPU, and errs on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from mok_cute import reference
from mok_cute.config import KernelConfig
from mok_cute.errors import PeerTimeoutError, TimeoutReport
from mok_cute.schedule import build_schedule_reference


class RoutedWeights(NamedTuple):
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class SharedWeights(NamedTuple):
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class FakeGpu:
    product_name = "cpu"
    engine = "none"

    def use_schedule(self, seed: int) -> str:
        return ""

    def synchronize(self) -> None:
        pass


@dataclass
class FakeWorkspace:
    shape: Any
    ep_size: int
    max_tokens: int
    rank: int
    fault: str | None
    launches: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    gpu: FakeGpu = field(default_factory=FakeGpu)
    kernel: Any = field(
        default_factory=lambda: SimpleNamespace(cached=False, compile_seconds=2.5, config=KernelConfig())
    )

    @property
    def table(self) -> Any:
        return SimpleNamespace(buffers={"x_ring": SimpleNamespace(dtype="bf16"), "control": SimpleNamespace(dtype="i")})

    def tensor(self, name: str) -> torch.Tensor:
        assert name == "x_ring", "only activations may be poisoned"
        return torch.zeros(4, dtype=torch.bfloat16)

    def check(self) -> None:
        if self.fault == "timeout":
            raise PeerTimeoutError(TimeoutReport(self.rank, 3, "load", "x_routed_ready", 5, 1, 2, 60.0))


def make_fake(fault: str | None = None) -> tuple[ModuleType, list[FakeWorkspace]]:
    """The module, and the list that its workspaces will appear in.

    fault   wrong, nan, random, launches, schedule, saved, timeout, memory; None: all is well
    """
    module: Any = ModuleType("mok_cute.functional")
    made: list[FakeWorkspace] = []

    def create_workspaces(shape: Any, *, ep_size: int, max_tokens: int, **_: Any) -> list[FakeWorkspace]:
        if fault == "memory":
            raise torch.OutOfMemoryError("tried to allocate much")
        new = [FakeWorkspace(shape, ep_size, max_tokens, rank, fault) for rank in range(ep_size)]
        made.extend(new)
        return new

    def build_schedules(workspaces: list[FakeWorkspace], topk_ids: list[torch.Tensor]) -> list[Any]:
        schedules = []
        for w in workspaces:
            w.launches["schedule"] += 3
            schedule = build_schedule_reference(topk_ids, w.shape, w.rank, w.ep_size, w.max_tokens)
            if fault == "schedule":
                schedule = replace(schedule, tokens_per_expert=schedule.tokens_per_expert + 1)
            schedules.append(schedule)
        return schedules

    def forward_ranks(
        workspaces: list[FakeWorkspace],
        schedules: list[Any],
        xs: list[torch.Tensor],
        topk_weights: list[torch.Tensor],
        routed: list[Any],
        shared: list[Any] | None = None,
        *,
        shared_factors: list[torch.Tensor] | None = None,
        save_for_backward: bool = False,
        run: Any = None,
    ) -> list[tuple[torch.Tensor, Any]]:
        shape = workspaces[0].shape
        ids = [schedule.local_ids[: len(x)] for schedule, x in zip(schedules, xs, strict=True)]
        ys = reference.forward(
            shape,
            xs,
            ids,
            topk_weights,
            routed,
            shared,
            shared_factors=shared_factors,
            arithmetic=reference.TORCH_BF16,
        )
        outputs = []
        for w, schedule, y in zip(workspaces, schedules, ys, strict=True):
            w.calls += 1
            w.launches["forward"] += 2 if fault == "launches" else 1
            if len(y):
                spoil(fault, y, w)
            context = save(shape, xs, ids, routed, schedule) if save_for_backward else None
            if context is not None and fault == "saved":
                context.gate[0, 0] += 1
            outputs.append((y, context))
        return outputs

    def save(shape: Any, xs: Any, ids: Any, routed: Any, schedule: Any) -> Any:
        rows = int(schedule.num_rows)
        peer_rank, peer_route = schedule.peer_rank[:rows], schedule.peer_route[:rows]
        gate, up, x = reference.routed_preactivations(shape, xs, ids, routed, peer_rank, peer_route)
        padding = peer_rank < 0
        return SimpleNamespace(
            **{
                name: tensor.bfloat16().masked_fill(padding[:, None], float("nan"))
                for name, tensor in (("x", x), ("gate", gate), ("up", up))
            }
        )

    members: dict[str, Callable[..., Any]] = {
        "create_workspaces": create_workspaces,
        "build_schedules": build_schedules,
        "forward_ranks": forward_ranks,
        "RoutedWeights": RoutedWeights,
        "SharedWeights": SharedWeights,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module, made


def spoil(fault: str | None, y: torch.Tensor, workspace: FakeWorkspace) -> None:
    if fault == "wrong":
        y.mul_(1.02)
    elif fault == "nan":
        y[-1, -1] = float("nan")
    elif fault == "random":
        y[0, 0] += workspace.calls
