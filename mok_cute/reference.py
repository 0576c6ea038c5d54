"""The layer in slow, plain torch: the definition of correct, and the bf16 torch that our error is measured against.

All ranks live in one process. Experts are visited one after the other and rows in chunks, so nothing larger than one
expert's rows is held in the arithmetic's dtype, and a full model layer fits on one GPU. ``forward`` is differentiable;
``backward`` is the same gradient in closed form. ``baseline_forward`` and ``baseline_backward`` are bf16 torch written
out: the same formulas in fp32, with a rounding to bf16 at each place where bf16 torch stores a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mok_cute.errors import ConfigError

Weights = tuple[Tensor, Tensor, Tensor]  # gate, up, down
Rounding = Callable[[Tensor], Tensor]

CHUNK_ROWS = 16384  # rows of one expert computed at once; bounds the memory when one expert gets all routes


@dataclass(frozen=True)
class LayerInputs:
    """One call of the layer on all ranks; each list has one entry per rank.

    xs              (T, H) floating; T may differ between ranks and be zero
    topk_ids        (T, K) integers; ids below 0 or from num_experts on contribute nothing
    topk_weights    (T, K) fp32 (or fp64)
    routed          gate, up (E_local, I, H) and down (E_local, H, I) of the rank's own experts
    num_experts     over all ranks; rank r owns experts r * E_local and following, E_local = ceil(E / P)
    shared          gate, up (I_s, H) and down (H, I_s), one copy per rank; None: no shared expert
    shared_factors  (T,) per-token factor on the shared expert; None: 1
    swiglu_limit    gate clamped from above, up on both sides; None: no clamp, while 0.0 is a clamp
    """

    xs: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_weights: Sequence[Tensor]
    routed: Sequence[Weights]
    num_experts: int
    shared: Sequence[Weights] | None = None
    shared_factors: Sequence[Tensor] | None = None
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        if not self.xs:
            raise ConfigError("xs=[]: at least one rank; pass one tensor per rank.")
        if self.shared_factors is not None and self.shared is None:
            raise ConfigError("shared_factors without shared: a factor needs a shared expert; pass shared.")
        for name in ("topk_ids", "topk_weights", "routed", "shared", "shared_factors"):
            value = getattr(self, name)
            if value is not None and len(value) != self.ep_size:
                raise ConfigError(f"{name}: {len(value)} entries for {self.ep_size} ranks; pass one per rank.")
        for rank in range(self.ep_size):
            self._check_rank(rank)

    def _check_rank(self, rank: int) -> None:
        def rule(name: str, tensor: Tensor, *sizes: int) -> None:
            if tuple(tensor.shape) != sizes:
                raise ConfigError(f"{name}[{rank}]: shape {tuple(tensor.shape)}, expected {sizes}; pass that shape.")

        tokens, hidden = self.xs[rank].shape
        topk = self.topk_ids[0].shape[1]
        rule("topk_ids", self.topk_ids[rank], tokens, topk)
        rule("topk_weights", self.topk_weights[rank], tokens, topk)
        stacked = (("routed", self.routed[rank], (self.local_experts,)),)
        single = (("shared", self.shared[rank], ()),) if self.shared is not None else ()
        for name, (gate, up, down), lead in (*stacked, *single):
            width = gate.shape[-2]
            rule(f"{name} gate", gate, *lead, width, hidden)
            rule(f"{name} up", up, *lead, width, hidden)
            rule(f"{name} down", down, *lead, hidden, width)
        if self.shared_factors is not None:
            rule("shared_factors", self.shared_factors[rank], tokens)

    @property
    def ep_size(self) -> int:
        return len(self.xs)

    @property
    def local_experts(self) -> int:
        return -(-self.num_experts // self.ep_size)

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic's dtype: fp64 for fp64 inputs, else fp32."""
        return torch.float64 if self.xs[0].dtype == torch.float64 else torch.float32

    @property
    def num_routes(self) -> int:
        """Routes that reach an expert, over all ranks."""
        return sum(int(((ids >= 0) & (ids < self.num_experts)).sum()) for ids in self.topk_ids)


@dataclass(frozen=True)
class Gradients:
    """One entry per rank, each in the shape of what it is the gradient of. Experts without routes have zeros."""

    d_xs: list[Tensor]
    d_topk_weights: list[Tensor]
    d_routed: list[Weights]
    d_shared: list[Weights] | None
    d_shared_factors: list[Tensor] | None


@contextmanager
def tf32_off() -> Iterator[None]:
    """Full fp32 matmuls on CUDA. Put it around autograd's backward() too: that runs outside of ``forward``."""
    matmul = torch.backends.cuda.matmul
    # Since 2.9 torch keeps the choice in fp32_precision, and refuses to read allow_tf32 once anyone has used the former.
    flag, full = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, flag)
    setattr(matmul, flag, full)
    try:
        yield
    finally:
        setattr(matmul, flag, before)


def forward(inputs: LayerInputs, *, chunk_rows: int = CHUNK_ROWS) -> list[Tensor]:
    """y of each rank, (T, H) fp32 or fp64. Differentiable in x, weights, factors and all weight matrices."""
    return _forward(inputs, _exact, chunk_rows)


def backward(inputs: LayerInputs, d_ys: Sequence[Tensor], *, chunk_rows: int = CHUNK_ROWS) -> Gradients:
    """All gradients in closed form, fp32 or fp64; d_ys holds one (T, H) per rank."""
    return _backward(inputs, d_ys, _exact, chunk_rows)


def baseline_forward(inputs: LayerInputs, *, chunk_rows: int = CHUNK_ROWS) -> list[Tensor]:
    """y of each rank as bf16 torch computes it, (T, H) bf16."""
    return [y.bfloat16() for y in _forward(inputs, _to_bf16, chunk_rows)]


def baseline_backward(inputs: LayerInputs, d_ys: Sequence[Tensor], *, chunk_rows: int = CHUNK_ROWS) -> Gradients:
    """All gradients as bf16 torch computes them: bf16, but fp32 for the router weights and the shared factors."""
    exact = _backward(inputs, d_ys, _to_bf16, chunk_rows)

    def stored(weights: Weights) -> Weights:
        gate, up, down = weights
        return gate.bfloat16(), up.bfloat16(), down.bfloat16()

    return Gradients(
        [d_x.bfloat16() for d_x in exact.d_xs],
        exact.d_topk_weights,
        [stored(weights) for weights in exact.d_routed],
        None if exact.d_shared is None else [stored(weights) for weights in exact.d_shared],
        exact.d_shared_factors,
    )


def preactivations(
    inputs: LayerInputs, rank: int, peer_rank: Tensor, peer_route: Tensor, *, chunk_rows: int = CHUNK_ROWS
) -> tuple[Tensor, Tensor]:
    """Gate and up before the clamp, each (rows, I), for routed rows of ``rank`` in the schedule's order.

    peer_rank (rows,) names the rank that a row comes from and peer_route (rows,) its route token * K + k there; -1 in
    either is a padding row, whose result is zero. A route whose expert does not live on ``rank`` is a ConfigError.
    """
    gates, ups, _ = inputs.routed[rank]
    topk = inputs.topk_ids[0].shape[1]
    sources, routes = peer_rank.tolist(), peer_route.tolist()
    ids = [peer_ids.reshape(-1).tolist() for peer_ids in inputs.topk_ids]
    rows_of: dict[tuple[int, int], list[int]] = {}  # (local expert, peer) -> rows
    for row, (peer, route) in enumerate(zip(sources, routes, strict=True)):
        if peer < 0 or route < 0:
            continue
        local = ids[peer][route] - rank * inputs.local_experts
        if not 0 <= local < inputs.local_experts or ids[peer][route] >= inputs.num_experts:
            raise ConfigError(
                f"row {row}: route {route} of rank {peer} chose expert {ids[peer][route]}, which does not live on rank "
                f"{rank}; pass that rank's own schedule."
            )
        rows_of.setdefault((local, peer), []).append(row)
    gate_rows = torch.zeros(len(routes), gates.shape[1], dtype=inputs.dtype, device=gates.device)
    up_rows = torch.zeros_like(gate_rows)
    with tf32_off(), torch.no_grad():
        for (local, peer), all_rows in rows_of.items():
            gate_weight, up_weight = gates[local].to(inputs.dtype), ups[local].to(inputs.dtype)
            for start in range(0, len(all_rows), chunk_rows):
                rows = all_rows[start : start + chunk_rows]
                tokens = torch.tensor([routes[row] // topk for row in rows], device=inputs.xs[peer].device)
                x = inputs.xs[peer][tokens].to(gates.device, inputs.dtype)
                at = torch.tensor(rows, device=gates.device)
                gate_rows[at] = x @ gate_weight.T
                up_rows[at] = x @ up_weight.T
    return gate_rows, up_rows


def _exact(tensor: Tensor) -> Tensor:
    return tensor


def _to_bf16(tensor: Tensor) -> Tensor:
    """The value that a bf16 tensor would hold, kept in fp32."""
    return tensor.bfloat16().float()


class _Hidden(NamedTuple):
    """What one expert computes for a chunk of rows before its down projection; each (rows, I)."""

    gate: Tensor  # before the clamp
    up: Tensor  # before the clamp
    sigmoid: Tensor  # of the clamped gate
    silu: Tensor
    up_clamped: Tensor
    hidden: Tensor


def _expert_hidden(x: Tensor, weights: Weights, limit: float | None, rounded: Rounding) -> _Hidden:
    gate, up = rounded(x @ weights[0].T), rounded(x @ weights[1].T)
    gate_clamped = gate if limit is None else gate.clamp(max=limit)
    up_clamped = up if limit is None else up.clamp(-limit, limit)
    sigmoid = torch.sigmoid(gate_clamped)
    silu = rounded(gate_clamped * sigmoid)
    return _Hidden(gate, up, sigmoid, silu, up_clamped, rounded(silu * up_clamped))


def _expert_out(x: Tensor, weights: Weights, limit: float | None, rounded: Rounding) -> Tensor:
    return rounded(_expert_hidden(x, weights, limit, rounded).hidden @ weights[2].T)


class _Segment(NamedTuple):
    """Routes of one peer rank to one expert, at most a chunk of them; each (rows,) int64 on the peer's device."""

    peer: int
    token: Tensor
    route: Tensor  # token * K + k


def _routes_by_expert(ids: Tensor, num_experts: int) -> list[Tensor]:
    """For each global expert the routes that chose it, ascending. Foreign ids are masked before they index anything."""
    flat = ids.reshape(-1).long()
    kept = (flat >= 0) & (flat < num_experts)
    bucket = torch.where(kept, flat, num_experts)
    order = torch.argsort(bucket, stable=True)
    counts = torch.bincount(bucket, minlength=num_experts + 1).tolist()
    return list(order.split(counts))[:num_experts]


def _walk(inputs: LayerInputs, chunk_rows: int) -> Iterator[tuple[int, int, list[_Segment]]]:
    """Every expert that has routes: its rank, its place there, its routes of all ranks in chunks."""
    topk = inputs.topk_ids[0].shape[1]
    routes = [_routes_by_expert(ids, inputs.num_experts) for ids in inputs.topk_ids]
    for expert in range(inputs.num_experts):
        segments = [
            _Segment(peer, chunk // topk, chunk)
            for peer in range(inputs.ep_size)
            for chunk in routes[peer][expert].split(chunk_rows)
            if chunk.numel()
        ]
        if segments:
            yield expert // inputs.local_experts, expert % inputs.local_experts, segments


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


def _cast(weights: Weights, dtype: torch.dtype, expert: int | None = None) -> Weights:
    gate, up, down = weights if expert is None else (weights[0][expert], weights[1][expert], weights[2][expert])
    return gate.to(dtype), up.to(dtype), down.to(dtype)


def _forward(inputs: LayerInputs, rounded: Rounding, chunk_rows: int) -> list[Tensor]:
    dtype, limit = inputs.dtype, inputs.swiglu_limit
    ys = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs.xs]
    with tf32_off():
        for rank, y in enumerate(ys if inputs.shared is not None else []):
            assert inputs.shared is not None
            weights = _cast(inputs.shared[rank], dtype)
            for rows in _chunks(y.shape[0], chunk_rows):
                out = _expert_out(inputs.xs[rank][rows].to(dtype), weights, limit, rounded)
                if inputs.shared_factors is not None:
                    out = inputs.shared_factors[rank][rows].to(dtype)[:, None] * out
                y[rows] += out
        for owner, expert, segments in _walk(inputs, chunk_rows):
            weights = _cast(inputs.routed[owner], dtype, expert)
            for peer, token, route in segments:
                x = inputs.xs[peer][token].to(weights[0].device, dtype)
                out = _expert_out(x, weights, limit, rounded).to(ys[peer].device)
                w = inputs.topk_weights[peer].reshape(-1)[route].to(dtype)
                ys[peer].index_add_(0, token, w[:, None] * out)
    return ys


def _expert_backward(
    x: Tensor, d_y: Tensor, factor: Tensor | None, weights: Weights, sums: Weights, limit: float | None, rounded: Rounding
) -> tuple[Tensor, Tensor]:
    """Backward of factor * E(x) for rows x and d_y (rows, H), factor (rows,); adds the weight gradients to ``sums``.

    Returns d_x (rows, H) and d_factor (rows,). The clamp passes a gradient where its bound is met exactly.
    """
    gate, up, sigmoid, silu, up_clamped, hidden = _expert_hidden(x, weights, limit, rounded)
    out = rounded(hidden @ weights[2].T)
    d_factor = (d_y * out).sum(1)
    d_out = d_y if factor is None else rounded(d_y * factor[:, None])
    d_hidden = rounded(d_out @ weights[2])
    gate_clamped = gate if limit is None else gate.clamp(max=limit)
    d_gate = d_hidden * up_clamped * (sigmoid + gate_clamped * sigmoid * (1 - sigmoid))
    d_up = d_hidden * silu
    if limit is not None:
        d_gate = torch.where(gate <= limit, d_gate, 0.0)
        d_up = torch.where((up >= -limit) & (up <= limit), d_up, 0.0)
    d_gate, d_up = rounded(d_gate), rounded(d_up)
    sums[0].add_(d_gate.T @ x)
    sums[1].add_(d_up.T @ x)
    sums[2].add_(d_out.T @ hidden)
    return rounded(d_gate @ weights[0]) + rounded(d_up @ weights[1]), d_factor


def _backward(inputs: LayerInputs, d_ys: Sequence[Tensor], rounded: Rounding, chunk_rows: int) -> Gradients:
    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=inputs.dtype, device=tensor.device)

    def zero_weights(weights: Weights) -> Weights:
        return zeros(weights[0]), zeros(weights[1]), zeros(weights[2])

    shared, factors = inputs.shared, inputs.shared_factors
    gradients = Gradients(
        [zeros(x) for x in inputs.xs],
        [zeros(w) for w in inputs.topk_weights],
        [zero_weights(weights) for weights in inputs.routed],
        None if shared is None else [zero_weights(weights) for weights in shared],
        None if factors is None else [zeros(factor) for factor in factors],
    )
    with tf32_off(), torch.no_grad():
        _backward_shared(inputs, d_ys, gradients, rounded, chunk_rows)
        _backward_routed(inputs, d_ys, gradients, rounded, chunk_rows)
    return gradients


def _backward_shared(
    inputs: LayerInputs, d_ys: Sequence[Tensor], gradients: Gradients, rounded: Rounding, chunk_rows: int
) -> None:
    dtype, factors = inputs.dtype, inputs.shared_factors
    for rank, shared in enumerate(inputs.shared or ()):
        assert gradients.d_shared is not None
        weights = _cast(shared, dtype)
        for rows in _chunks(inputs.xs[rank].shape[0], chunk_rows):
            x, d_y = inputs.xs[rank][rows].to(dtype), d_ys[rank][rows].to(dtype)
            factor = None if factors is None else factors[rank][rows].to(dtype)
            d_x, d_factor = _expert_backward(
                x, d_y, factor, weights, gradients.d_shared[rank], inputs.swiglu_limit, rounded
            )
            gradients.d_xs[rank][rows] += d_x
            if gradients.d_shared_factors is not None:
                gradients.d_shared_factors[rank][rows] = d_factor


def _backward_routed(
    inputs: LayerInputs, d_ys: Sequence[Tensor], gradients: Gradients, rounded: Rounding, chunk_rows: int
) -> None:
    dtype = inputs.dtype
    for owner, expert, segments in _walk(inputs, chunk_rows):
        weights = _cast(inputs.routed[owner], dtype, expert)
        sums = _cast(gradients.d_routed[owner], dtype, expert)  # views of the stacked gradients: same dtype, no copy
        device = weights[0].device
        for peer, token, route in segments:
            x, d_y = inputs.xs[peer][token].to(device, dtype), d_ys[peer][token].to(device, dtype)
            w = inputs.topk_weights[peer].reshape(-1)[route].to(device, dtype)
            d_x, d_w = _expert_backward(x, d_y, w, weights, sums, inputs.swiglu_limit, rounded)
            gradients.d_xs[peer].index_add_(0, token, d_x.to(token.device))
            gradients.d_topk_weights[peer].view(-1)[route] = d_w.to(token.device)
