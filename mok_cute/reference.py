"""The layer in slow, plain torch: the definition of correct, and the bf16 baseline that errors are measured against.

All ranks are computed in one process, expert by expert. Of the shape it takes experts, topk and limit; widths are the
tensors' own, so that small tests may use widths that no kernel accepts. The arithmetic is given by an ``Arithmetic``:
``EXACT`` works in FP32 (FP64 where x is FP64) and rounds nothing; ``TORCH_BF16`` rounds to bf16 wherever plain bf16
torch would.

    P ranks, rank r has T_r tokens          E_local = ceil(num_experts / P), global expert g on rank g // E_local
    xs[r]            (T_r, hidden)          topk_ids[r]      (T_r, topk) int32 or int64, others than 0..E-1 are dropped
    topk_weights[r]  (T_r, topk)            shared_factors[r]  (T_r,), or no factor
    routed[r]        gate, up (E_local, intermediate, hidden), down (E_local, hidden, intermediate)
    shared[r]        gate, up (shared_intermediate, hidden), down (hidden, shared_intermediate)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mok_cute.shapes import MoEShape


class Weights(NamedTuple):
    """Three matrices: of one expert, or of a rank's experts stacked along a first dimension."""

    gate: Tensor
    up: Tensor
    down: Tensor


WeightsLike = tuple[Tensor, Tensor, Tensor]


class RankGradients(NamedTuple):
    """Gradients that one rank receives. ``routed`` sums over the tokens of all ranks, ``shared`` over its own."""

    d_x: Tensor  # (tokens, hidden)
    d_topk_weights: Tensor  # (tokens, topk), zero where a route is dropped
    routed: Weights  # shaped like the weights, zero for experts without routes
    shared: Weights | None
    d_shared_factor: Tensor | None  # (tokens,)


class Preactivations(NamedTuple):
    """What backward needs of routed rows, zero on padding rows."""

    gate: Tensor  # (rows, intermediate), before the clamp
    up: Tensor
    x: Tensor  # (rows, hidden) in its own dtype


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are kept between steps. ``rounds`` None: as computed."""

    rounds: torch.dtype | None

    def working_dtype(self, x: Tensor) -> torch.dtype:
        return torch.float64 if x.dtype == torch.float64 and self.rounds is None else torch.float32

    def rounded(self, value: Tensor) -> Tensor:
        """The value as it would be stored and read again; the working dtype does not change."""
        return value if self.rounds is None else value.to(self.rounds).to(value.dtype)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.rounded(a @ b)

    def result(self, value: Tensor) -> Tensor:
        """A result in the dtype it is returned in, rounded once."""
        return value if self.rounds is None else value.to(self.rounds)


EXACT = Arithmetic(rounds=None)
TORCH_BF16 = Arithmetic(rounds=torch.bfloat16)


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """FP32 products are FP32 products inside (no TF32, no bf16); the settings found are restored on the way out."""
    # Torch keeps an older and a newer form of this setting and refuses to multiply where they disagree. The older call
    # writes both; on the way out both are written back.
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul"))  # noqa: B009
    newer = [place.fp32_precision for place in places]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer form was used before, so the older one is at its default
        older = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for place, precision in zip(places, newer, strict=True):
            place.fp32_precision = precision


def is_routed(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Which choices name an expert; all others contribute nothing."""
    return (topk_ids >= 0) & (topk_ids < num_experts)


class _Hidden(NamedTuple):
    """An expert between its first and its last product; kept as stored, in the working dtype."""

    gate: Tensor  # (rows, intermediate), before the clamp
    up: Tensor
    silu: Tensor  # silu of the clamped gate
    hidden: Tensor  # silu times clamped up


def _working(weights: WeightsLike, dtype: torch.dtype, expert: int | None = None) -> Weights:
    """One expert's matrices in the working dtype: converted one at a time, so that a large model fits."""
    return Weights(*((matrix if expert is None else matrix[expert]).to(dtype) for matrix in weights))


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _expert_hidden(x: Tensor, weights: Weights, limit: float | None, arithmetic: Arithmetic) -> _Hidden:
    gate = arithmetic.matmul(x, weights.gate.T)
    up = arithmetic.matmul(x, weights.up.T)
    clamped_gate, clamped_up = _clamped(gate, up, limit)
    silu = arithmetic.rounded(torch.nn.functional.silu(clamped_gate))
    return _Hidden(gate, up, silu, arithmetic.rounded(silu * clamped_up))


class _ExpertBackward(NamedTuple):
    d_x: Tensor  # (rows, hidden)
    weights: Weights


def _expert_backward(
    x: Tensor, d_out: Tensor, h: _Hidden, weights: Weights, limit: float | None, arithmetic: Arithmetic
) -> _ExpertBackward:
    """Closed form. ``d_out`` is the gradient of the expert's output; limits themselves still pass the gradient."""
    d_hidden = arithmetic.matmul(d_out, weights.down)
    gate, up = _clamped(h.gate, h.up, limit)
    sigmoid = torch.sigmoid(gate)
    d_silu = sigmoid * (1 + gate * (1 - sigmoid))
    d_gate = d_hidden * up * d_silu
    d_up = d_hidden * h.silu
    if limit is not None:
        d_gate = d_gate.masked_fill(h.gate > limit, 0)
        d_up = d_up.masked_fill(h.up.abs() > limit, 0)
    d_gate, d_up = arithmetic.rounded(d_gate), arithmetic.rounded(d_up)
    return _ExpertBackward(
        d_x=arithmetic.matmul(d_gate, weights.gate) + arithmetic.matmul(d_up, weights.up),
        weights=Weights(
            gate=arithmetic.matmul(d_gate.T, x),
            up=arithmetic.matmul(d_up.T, x),
            down=arithmetic.matmul(d_out.T, h.hidden),
        ),
    )


@dataclass(frozen=True)
class _Layer:
    """The operands of one call, and the walk over experts that forward and backward share."""

    shape: MoEShape
    xs: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_weights: Sequence[Tensor]
    routed: Sequence[WeightsLike]
    shared: Sequence[WeightsLike] | None
    shared_factors: Sequence[Tensor] | None
    arithmetic: Arithmetic

    def __post_init__(self) -> None:
        ranks = len(self.xs)
        for name in ("topk_ids", "topk_weights", "routed", "shared", "shared_factors"):
            value = getattr(self, name)
            if value is not None and len(value) != ranks:
                raise ValueError(f"reference: {name} has {len(value)} entries for {ranks} ranks; pass one per rank.")
        if (self.shared is None) != (self.shape.shared_intermediate == 0):
            raise ValueError(
                f"reference: shared_intermediate={self.shape.shared_intermediate} with "
                f"{'no shared weights' if self.shared is None else 'shared weights'}; pass both or neither."
            )
        if self.shared_factors is not None and self.shared is None:
            raise ValueError("reference: shared_factors without a shared expert; drop them.")
        if self.shape.shared_factor and self.shared_factors is None:
            raise ValueError("reference: the shape has a shared_factor; pass shared_factors.")

    @property
    def dtype(self) -> torch.dtype:
        return self.arithmetic.working_dtype(self.xs[0])

    def x(self, rank: int) -> Tensor:
        return self.xs[rank].to(self.dtype)

    def route_weights(self, rank: int) -> Tensor:
        """(tokens, topk), zero where the route is dropped, whatever stood there."""
        kept = is_routed(self.topk_ids[rank], self.shape.num_experts)
        weights = self.topk_weights[rank].to(self.dtype)
        return torch.where(kept, weights, torch.zeros_like(weights))

    def experts(self) -> Iterator[tuple[int, int, list[Tensor]]]:
        """(owner, local expert, each rank's routes to it, ascending) of every expert of the model."""
        each = self.shape.local_experts(len(self.xs))
        flat = [ids.reshape(-1) for ids in self.topk_ids]
        for expert in range(self.shape.num_experts):
            routes = [torch.nonzero(ids == expert).reshape(-1) for ids in flat]
            yield expert // each, expert % each, routes

    def routed_inputs(self, routes: list[Tensor], xs: Sequence[Tensor]) -> Tensor:
        topk = self.shape.topk
        return torch.cat([x[r // topk] for x, r in zip(xs, routes, strict=True)])

    def expert_outputs(self) -> list[Tensor]:
        """Per rank (tokens, topk, hidden): each route's expert output as stored, zero where the route is dropped."""
        topk = self.shape.topk
        xs = [self.x(rank) for rank in range(len(self.xs))]
        outputs = [x.new_zeros(x.shape[0] * topk, x.shape[1]) for x in xs]
        for owner, local_expert, routes in self.experts():
            counts = [len(r) for r in routes]
            if not sum(counts):
                continue
            weights = _working(self.routed[owner], self.dtype, local_expert)
            x = self.routed_inputs(routes, xs)
            h = _expert_hidden(x, weights, self.shape.swiglu_limit, self.arithmetic)
            out = self.arithmetic.matmul(h.hidden, weights.down.T)
            for rank, part in enumerate(out.split(counts)):
                outputs[rank].index_copy_(0, routes[rank], part)
        return [out.view(-1, topk, out.shape[1]) for out in outputs]

    def shared_hidden(self, rank: int) -> tuple[_Hidden, Weights]:
        assert self.shared is not None
        weights = _working(self.shared[rank], self.dtype)
        return _expert_hidden(self.x(rank), weights, self.shape.swiglu_limit, self.arithmetic), weights

    def shared_factor(self, rank: int) -> Tensor | None:
        return None if self.shared_factors is None else self.shared_factors[rank].to(self.dtype)[:, None]


def forward(
    shape: MoEShape,
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    routed: Sequence[WeightsLike],
    shared: Sequence[WeightsLike] | None = None,
    *,
    shared_factors: Sequence[Tensor] | None = None,
    arithmetic: Arithmetic = EXACT,
) -> list[Tensor]:
    """y of every rank, (tokens, hidden): FP32 or FP64 from ``EXACT``, bf16 from ``TORCH_BF16``.

    Differentiable by autograd. Sums over k run in ascending k, after the shared expert.
    """
    layer = _Layer(shape, xs, topk_ids, topk_weights, routed, shared, shared_factors, arithmetic)
    ys = []
    with full_precision_matmul():
        for rank, outputs in enumerate(layer.expert_outputs()):
            y = torch.zeros_like(outputs[:, 0])
            if shared is not None:
                h, weights = layer.shared_hidden(rank)
                y = arithmetic.matmul(h.hidden, weights.down.T)
                factor = layer.shared_factor(rank)
                y = y if factor is None else factor * y
            route_weights = layer.route_weights(rank)
            for k in range(shape.topk):
                y = y + route_weights[:, k, None] * outputs[:, k]
            ys.append(arithmetic.result(y))
    return ys


@torch.no_grad()
def backward(
    shape: MoEShape,
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    routed: Sequence[WeightsLike],
    d_ys: Sequence[Tensor],
    shared: Sequence[WeightsLike] | None = None,
    *,
    shared_factors: Sequence[Tensor] | None = None,
    arithmetic: Arithmetic = EXACT,
) -> list[RankGradients]:
    """All gradients in closed form. ``d_ys[r]`` is (tokens, hidden). Router gradients and factors stay in FP32 or FP64.

    Weight gradients come as full stacks in the result dtype: for a large model in FP32, twice the bf16 weights.
    """
    layer = _Layer(shape, xs, topk_ids, topk_weights, routed, shared, shared_factors, arithmetic)
    with full_precision_matmul():
        return _backward(layer, [d_y.to(layer.dtype) for d_y in d_ys])


def _backward(layer: _Layer, d_ys: list[Tensor]) -> list[RankGradients]:
    shape, arithmetic, topk = layer.shape, layer.arithmetic, layer.shape.topk
    ranks = range(len(layer.xs))
    xs = [layer.x(rank) for rank in ranks]
    route_weights = [layer.route_weights(rank).reshape(-1, 1) for rank in ranks]
    d_x_routes = [x.new_zeros(x.shape[0] * topk, x.shape[1]) for x in xs]
    d_route_weights = [x.new_zeros(x.shape[0] * topk) for x in xs]
    kept = layer.dtype if arithmetic.rounds is None else arithmetic.rounds
    d_routed = [Weights(*(torch.zeros_like(stack, dtype=kept) for stack in stacks)) for stacks in layer.routed]
    for owner, local_expert, routes in layer.experts():
        counts = [len(r) for r in routes]
        if not sum(counts):
            continue
        weights = _working(layer.routed[owner], layer.dtype, local_expert)
        x = layer.routed_inputs(routes, xs)
        d_y = layer.routed_inputs(routes, d_ys)
        w = torch.cat([of_rank[r] for of_rank, r in zip(route_weights, routes, strict=True)])
        h = _expert_hidden(x, weights, shape.swiglu_limit, arithmetic)
        out = arithmetic.matmul(h.hidden, weights.down.T)
        gradients = _expert_backward(x, arithmetic.rounded(d_y * w), h, weights, shape.swiglu_limit, arithmetic)
        for stack, gradient in zip(d_routed[owner], gradients.weights, strict=True):
            stack[local_expert] = arithmetic.result(gradient)
        d_w = (d_y * out).sum(dim=1)
        for rank, (d_x_part, d_w_part) in enumerate(zip(gradients.d_x.split(counts), d_w.split(counts), strict=True)):
            d_x_routes[rank].index_copy_(0, routes[rank], d_x_part)
            d_route_weights[rank].index_copy_(0, routes[rank], d_w_part)

    results = []
    for rank in ranks:
        d_x, d_shared, d_factor = _shared_backward(layer, rank, xs[rank], d_ys[rank])
        for k in range(topk):
            d_x = d_x + d_x_routes[rank].view(-1, topk, d_x.shape[1])[:, k]
        d_topk_weights = d_route_weights[rank].view(-1, topk)
        results.append(RankGradients(arithmetic.result(d_x), d_topk_weights, d_routed[rank], d_shared, d_factor))
    return results


def _shared_backward(layer: _Layer, rank: int, x: Tensor, d_y: Tensor) -> tuple[Tensor, Weights | None, Tensor | None]:
    """The shared expert's part of d_x, not yet rounded, and its own gradients."""
    if layer.shared is None:
        return torch.zeros_like(x), None, None
    arithmetic, limit = layer.arithmetic, layer.shape.swiglu_limit
    h, weights = layer.shared_hidden(rank)
    factor = layer.shared_factor(rank)
    d_factor = None
    d_out = d_y
    if factor is not None:
        d_factor = (d_y * arithmetic.matmul(h.hidden, weights.down.T)).sum(dim=1)
        d_out = arithmetic.rounded(d_y * factor)
    gradients = _expert_backward(x, d_out, h, weights, limit, arithmetic)
    return gradients.d_x, Weights(*(arithmetic.result(matrix) for matrix in gradients.weights)), d_factor


@torch.no_grad()
def routed_preactivations(
    shape: MoEShape,
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    routed: Sequence[WeightsLike],
    peer_rank: Tensor,
    peer_route: Tensor,
    *,
    arithmetic: Arithmetic = EXACT,
) -> Preactivations:
    """Gate and up in FP32 or FP64, and x, of rows given in schedule order.

    Row i is route ``peer_route[i]`` = token * topk + k of rank ``peer_rank[i]``; where that is -1 the row is padding.
    """
    dtype = arithmetic.working_dtype(xs[0])
    each, topk = shape.local_experts(len(xs)), shape.topk
    device = xs[0].device
    peer_rank, peer_route = peer_rank.to(device).long(), peer_route.to(device).long()
    rows = len(peer_rank)
    x_rows = xs[0].new_zeros(rows, xs[0].shape[1])
    experts = torch.full((rows,), -1, dtype=torch.long, device=device)
    for rank, x in enumerate(xs):
        of_rank = torch.nonzero(peer_rank == rank).reshape(-1)
        routes = peer_route[of_rank]
        x_rows[of_rank] = x[routes // topk]
        experts[of_rank] = topk_ids[rank].to(device).reshape(-1)[routes].long()
    gate = torch.zeros(rows, routed[0][0].shape[1], dtype=dtype, device=device)
    up = torch.zeros_like(gate)
    with full_precision_matmul():
        for expert in torch.unique(experts).tolist():
            if not 0 <= expert < shape.num_experts:
                continue
            of_expert = torch.nonzero(experts == expert).reshape(-1)
            x_expert = x_rows[of_expert].to(dtype)
            gates, ups, _ = routed[expert // each]
            gate[of_expert] = arithmetic.matmul(x_expert, gates[expert % each].to(dtype).T)
            up[of_expert] = arithmetic.matmul(x_expert, ups[expert % each].to(dtype).T)
    return Preactivations(gate, up, x_rows)
