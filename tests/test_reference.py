"""The reference against loops over single routes, its gradients against autograd, and what must not change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compare import assert_all_near, assert_all_same_bits, assert_near, assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mok_cute import reference
from mok_cute.reference import EXACT, TORCH_BF16, RankGradients, Weights, WeightsLike
from mok_cute.shapes import MoEShape

E, K = 6, 2
SMALL = (5, 7, 3)  # hidden, intermediate and shared width: pairwise different, so that no transpose goes unnoticed
LEGAL = (128, 256, 384)  # what a kernel accepts and the shape states; the reference takes the widths of the tensors
FP64 = 1e-12


@dataclass(frozen=True)
class Call:
    """The arguments of one call, one list entry per rank."""

    shape: MoEShape
    xs: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_weights: Sequence[Tensor]
    routed: Sequence[WeightsLike]
    shared: Sequence[WeightsLike] | None
    shared_factors: Sequence[Tensor] | None

    def forward(self, arithmetic: reference.Arithmetic = EXACT) -> list[Tensor]:
        return reference.forward(
            self.shape,
            self.xs,
            self.topk_ids,
            self.topk_weights,
            self.routed,
            self.shared,
            shared_factors=self.shared_factors,
            arithmetic=arithmetic,
        )

    def backward(self, d_ys: Sequence[Tensor], arithmetic: reference.Arithmetic = EXACT) -> list[RankGradients]:
        return reference.backward(
            self.shape,
            self.xs,
            self.topk_ids,
            self.topk_weights,
            self.routed,
            d_ys,
            self.shared,
            shared_factors=self.shared_factors,
            arithmetic=arithmetic,
        )

    @property
    def local_experts(self) -> int:
        return self.shape.local_experts(len(self.xs))


def make(
    ids: list[Any],
    *,
    num_experts: int = E,
    shared: bool = True,
    factor: bool = True,
    limit: float | None = None,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, int, int] = SMALL,
) -> Call:
    """A call for ids: one nested list (T, K) per rank. Experts that no rank owns hold NaN, as do router weights of
    routes that are dropped."""
    g = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=g, dtype=torch.float64) * scale).to(dtype)

    topk = max((len(row) for rows in ids for row in rows), default=K)
    shape = MoEShape(
        *LEGAL[:2], num_experts, topk, LEGAL[2] if shared else 0, shared_factor=shared and factor, swiglu_limit=limit
    )
    hidden, inner, shared_inner = widths
    id_tensors = [torch.tensor(rows, dtype=torch.int64).reshape(len(rows), topk) for rows in ids]
    weights = []
    for chosen in id_tensors:
        w = normal(*chosen.shape)
        weights.append(torch.where((chosen >= 0) & (chosen < num_experts), w, math.nan))
    local = shape.local_experts(len(ids))
    routed: list[WeightsLike] = []
    for rank in range(len(ids)):
        gate, up = (normal(local, inner, hidden, scale=hidden**-0.5) for _ in range(2))
        down = normal(local, hidden, inner, scale=inner**-0.5)
        for matrix in (gate, up, down):
            matrix[len(shape.owned_experts(rank, len(ids))) :] = math.nan
        routed.append((gate, up, down))
    one = (
        normal(shared_inner, hidden, scale=hidden**-0.5),
        normal(shared_inner, hidden, scale=hidden**-0.5),
        normal(hidden, shared_inner, scale=shared_inner**-0.5),
    )
    return Call(
        shape,
        [normal(rows.shape[0], hidden) for rows in id_tensors],
        id_tensors,
        weights,
        routed,
        [one] * len(ids) if shared else None,
        [normal(rows.shape[0]) for rows in id_tensors] if shared and factor else None,
    )


HARD_IDS = {
    "empty expert": [[[0, 1], [3, 5], [5, 0]]],
    "empty rank": [[[0, 1], [2, 0]], [[1, 2], [2, 1], [0, 1]]],
    "all to one": [[[4, 4], [4, 4], [4, 4]], [[4, 4]]],
    "dropped": [[[-1, 2], [-1, -1], [0, -7]]],
    "beyond the experts": [[[6, 5], [2**31 - 1, 6], [2**40, 1]], [[3, 7], [6, 6]]],
    "repeated in a token": [[[3, 3], [0, 1], [5, 5]]],
    "zero tokens": [[[5, 4], [0, 2], [1, 1]], []],
    "zero tokens on all ranks": [[], []],
    "topk 1": [[[2], [0], [5], [-1]]],
    "topk 3 and three ranks": [[[1, 4, 0]], [[5, 5, -1], [2, 3, 0]], [[0, 0, 0], [6, 1, 2], [4, 2, 3]]],
    "ranks without experts": [[[0, 5]], [[1, 4], [2, 3]], [], [[4, 4], [5, 0], [3, 1]], [[2, 2]]],
}
hard = pytest.mark.parametrize("ids", HARD_IDS.values(), ids=HARD_IDS)


variant = pytest.mark.parametrize(
    ("limit", "shared", "factor"),
    [(None, True, False), (0.0, False, False), (0.7, True, True)],
    ids=["no limit", "limit 0 without shared expert", "limit and factor"],
)


def looped_ffn(x: Tensor, weights: Sequence[Tensor], limit: float | None) -> Tensor:
    gate, up = weights[0] @ x, weights[1] @ x
    if limit is not None:
        bound = torch.tensor(limit, dtype=x.dtype)
        gate, up = torch.minimum(gate, bound), torch.maximum(torch.minimum(up, bound), -bound)
    return weights[2] @ (torch.nn.functional.silu(gate) * up)


def looped_forward(call: Call) -> list[Tensor]:
    """One token and one route at a time."""
    ys, limit = [], call.shape.swiglu_limit
    for rank, x in enumerate(call.xs):
        rows = []
        for t in range(x.shape[0]):
            y = torch.zeros_like(x[t])
            if call.shared is not None:
                s = 1.0 if call.shared_factors is None else call.shared_factors[rank][t]
                y = y + s * looped_ffn(x[t], call.shared[rank], limit)
            for k, expert in enumerate(call.topk_ids[rank][t].tolist()):
                if 0 <= expert < call.shape.num_experts:
                    owner, place = divmod(expert, call.local_experts)
                    weights = [matrix[place] for matrix in call.routed[owner]]
                    y = y + call.topk_weights[rank][t, k] * looped_ffn(x[t], weights, limit)
            rows.append(y)
        ys.append(torch.stack(rows) if rows else torch.zeros_like(x))
    return ys


@hard
@variant
def test_forward_is_the_sum_over_single_routes_when(ids, limit, shared, factor):
    call = make(ids, shared=shared, factor=factor, limit=limit)
    assert_all_near(call.forward(), looped_forward(call), FP64, "y")


def flat_operands(call: Call) -> list[Tensor]:
    matrices = [m for weights in (*call.routed, *(call.shared or ())) for m in weights]
    return [*call.xs, *call.topk_weights, *matrices, *(call.shared_factors or ())]


def with_operands(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The inverse of flat_operands."""
    rest = iter(tensors)
    xs, ws = [next(rest) for _ in call.xs], [next(rest) for _ in call.xs]
    routed = [(next(rest), next(rest), next(rest)) for _ in call.routed]
    shared = None if call.shared is None else [(next(rest), next(rest), next(rest)) for _ in call.shared]
    factors = None if call.shared_factors is None else list(rest)
    return replace(call, xs=xs, topk_weights=ws, routed=routed, shared=shared, shared_factors=factors)


def flat_gradients(gradients: list[RankGradients]) -> list[Tensor]:
    """In the order of flat_operands."""
    shared = [g.shared for g in gradients if g.shared is not None]
    matrices = [m for weights in (*(g.routed for g in gradients), *shared) for m in weights]
    factors = [g.d_shared_factor for g in gradients if g.d_shared_factor is not None]
    return [*(g.d_x for g in gradients), *(g.d_topk_weights for g in gradients), *matrices, *factors]


def autograd_gradients(call: Call, d_ys: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in flat_operands(call)]
    ys = with_operands(call, leaves).forward()
    total = torch.stack([(y * d_y).sum() for y, d_y in zip(ys, d_ys, strict=True)]).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in tensors]


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("ids", [[[[0, 2], [2, 2], [-1, 3]]], [[[2, 0]], [[1, 1], [3, -1]]]], ids=["1 rank", "2 ranks"])
def test_gradcheck_passes_for_all_operands_when(ids, limit):
    call = make(ids, num_experts=3, limit=limit)
    # A numerical derivative by an operand that holds NaN is NaN, even where the operand is never read.
    leaves = [t.nan_to_num(0.5).requires_grad_() for t in flat_operands(call)]
    assert torch.autograd.gradcheck(lambda *tensors: tuple(with_operands(call, tensors).forward()), leaves)


@hard
@variant
def test_backward_in_closed_form_agrees_with_autograd_when(ids, limit, shared, factor):
    call = make(ids, shared=shared, factor=factor, limit=limit)
    d_ys = random_like(call.xs)
    assert_all_near(flat_gradients(call.backward(d_ys)), autograd_gradients(call, d_ys), 1e-11, "gradient")


def test_clamp_passes_the_gradient_when_its_bound_is_met_exactly():
    x = torch.tensor([[0.5, -0.5, 0.25]], dtype=torch.float64)  # gate and up are the same
    identity = torch.eye(3, dtype=torch.float64)[None]
    shape = MoEShape(*LEGAL[:2], 1, 1, swiglu_limit=0.5)
    one = torch.ones(1, 1, dtype=torch.float64)
    call = Call(shape, [x], [torch.tensor([[0]])], [one], [(identity, identity, identity)], None, None)
    d_ys = [torch.ones_like(x)]
    unclamped = flat_gradients(replace(call, shape=replace(shape, swiglu_limit=None)).backward(d_ys))
    assert_all_same_bits(flat_gradients(call.backward(d_ys)), unclamped, "gradient")
    assert_all_near(autograd_gradients(call, d_ys), unclamped, FP64, "gradient")


@hard
def test_gradients_are_zero_exactly_where_no_route_arrives_when(ids):
    call = make(ids)
    gradients = call.backward(random_like(call.xs))
    used = {e for chosen in call.topk_ids for e in chosen.flatten().tolist() if 0 <= e < E}
    for rank, (chosen, of_rank) in enumerate(zip(call.topk_ids, gradients, strict=True)):
        assert torch.equal(of_rank.d_topk_weights != 0, (chosen >= 0) & (chosen < E)), f"router gradient of rank {rank}"
        for place in range(call.local_experts):
            has_gradient = rank * call.local_experts + place in used
            assert all(bool((m[place] != 0).any()) is has_gradient for m in of_rank.routed), (rank, place)


def test_the_same_expert_twice_counts_twice():
    once, twice = make([[[3]]], shared=False), make([[[3, 3]]], shared=False)
    twice = replace(twice, xs=once.xs, routed=once.routed, topk_weights=[torch.tensor([[0.25, 0.5]]).double()])
    once = replace(once, topk_weights=[torch.tensor([[0.75]]).double()])
    assert_all_near(twice.forward(), once.forward(), FP64, "y")
    d_ys = random_like(once.xs)
    (a,), (b,) = twice.backward(d_ys), once.backward(d_ys)
    assert_near(a.d_x, b.d_x, FP64, "d_x")
    assert_all_near(a.routed, b.routed, FP64, "gradient of routed weights")
    assert_near(a.d_topk_weights, b.d_topk_weights.expand(1, 2), FP64, "d_topk_weights")


MANY = [[[0, 3], [5, 1], [2, 2], [-1, 4], [1, 0]], [[3, 5], [4, 4], [6, 0]]]


def test_results_do_not_change_when_experts_are_renumbered():
    call = make(MANY)
    to = torch.tensor([4, 2, 0, 5, 1, 3])  # old number -> new number

    def renumbered(place: int) -> Sequence[Tensor]:
        stacked = torch.cat([weights[place] for weights in call.routed])
        return torch.empty_like(stacked).index_copy_(0, to, stacked).chunk(2)

    gates, ups, downs = (renumbered(place) for place in range(3))
    ids = [torch.where((i >= 0) & (i < E), to[i.clamp(0, E - 1)], i) for i in call.topk_ids]
    moved = replace(call, topk_ids=ids, routed=list(zip(gates, ups, downs, strict=True)))
    assert_all_near(moved.forward(), call.forward(), FP64, "y")


def with_rows(call: Call, rows: Sequence[Any]) -> Call:
    """The tokens ``rows[rank]`` of each rank."""

    def of(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[at] for tensor, at in zip(tensors, rows, strict=True)]

    assert call.shared_factors is not None
    return replace(
        call,
        xs=of(call.xs),
        topk_ids=of(call.topk_ids),
        topk_weights=of(call.topk_weights),
        shared_factors=of(call.shared_factors),
    )


def test_rows_move_along_when_tokens_are_permuted():
    call = make(MANY)
    order = [torch.tensor([3, 0, 4, 1, 2]), torch.tensor([2, 0, 1])]
    expected = [y[at] for y, at in zip(call.forward(), order, strict=True)]
    assert_all_near(with_rows(call, order).forward(), expected, FP64, "y")


def test_results_add_up_when_a_batch_is_split():
    call = make(MANY)
    first, second = slice(0, 2), slice(2, None)
    parts = [with_rows(call, [rows] * 2) for rows in (first, second)]
    ys = [torch.cat(pair) for pair in zip(*(part.forward() for part in parts), strict=True)]
    assert_all_near(ys, call.forward(), FP64, "y")
    d_ys = random_like(call.xs)
    halves = [part.backward([d[rows] for d in d_ys]) for part, rows in zip(parts, (first, second), strict=True)]
    for rank, whole in enumerate(call.backward(d_ys)):
        sums = [a + b for a, b in zip(halves[0][rank].routed, halves[1][rank].routed, strict=True)]
        assert_all_near(sums, whole.routed, 1e-11, "gradient of routed weights")


def test_only_its_own_tokens_change_when_one_expert_changes():
    call = make(MANY)
    gate, up, down = call.routed[1]
    down = down.clone()
    down[1] += 1.0  # of expert 4
    before, after = call.forward(), replace(call, routed=[call.routed[0], (gate, up, down)]).forward()
    for rank, chosen in enumerate(call.topk_ids):
        touched = (chosen == 4).any(1)
        assert_same_bits(after[rank][~touched], before[rank][~touched], f"y of rank {rank}, other tokens")
        assert (after[rank][touched] != before[rank][touched]).all()


def test_y_is_one_expert_times_the_sum_of_weights_when_all_experts_are_alike():
    call = make([[[0, 3], [5, 1]], [[2, 2]]], shared=False)
    gate, up, down = (m[:1].expand_as(m) for m in call.routed[0])
    call = replace(call, routed=[(gate, up, down)] * 2)
    for x, w, y in zip(call.xs, call.topk_weights, call.forward(), strict=True):
        expected = torch.stack([looped_ffn(row, [gate[0], up[0], down[0]], None) for row in x]) * w.sum(1, keepdim=True)
        assert_near(y, expected, FP64, "y")


@pytest.mark.parametrize("ep_size", [2, 3, 4])
def test_results_equal_those_of_one_rank_when_experts_and_tokens_are_spread(ep_size):
    one = make([[*MANY[0], *MANY[1]]])
    cuts = [0, 1, 6][: ep_size - 1]  # the first rank has no tokens
    local = -(-E // ep_size)

    def spread(tensor: Tensor) -> list[Tensor]:
        return list(tensor.tensor_split(cuts))

    def experts_of(rank: int) -> WeightsLike:
        def padded(matrix: Tensor) -> Tensor:
            mine = matrix[rank * local : (rank + 1) * local]
            return torch.cat([mine, matrix.new_full((local - mine.shape[0], *matrix.shape[1:]), math.nan)])

        gate, up, down = one.routed[0]
        return padded(gate), padded(up), padded(down)

    assert one.shared is not None and one.shared_factors is not None
    many = replace(
        one,
        xs=spread(one.xs[0]),
        topk_ids=spread(one.topk_ids[0]),
        topk_weights=spread(one.topk_weights[0]),
        routed=[experts_of(rank) for rank in range(ep_size)],
        shared=list(one.shared) * ep_size,
        shared_factors=spread(one.shared_factors[0]),
    )
    assert_near(torch.cat(many.forward()), one.forward()[0], FP64, "y")
    d_y = random_like(one.xs)[0]
    ranks, (whole,) = many.backward(spread(d_y)), one.backward([d_y])
    assert_near(torch.cat([g.d_x for g in ranks]), whole.d_x, FP64, "d_x")
    assert_near(torch.cat([g.d_topk_weights for g in ranks]), whole.d_topk_weights, FP64, "d_topk_weights")
    assert whole.shared is not None
    for place in range(3):
        assert_near(torch.cat([g.routed[place] for g in ranks])[:E], whole.routed[place], FP64, "d_routed")
        total = torch.stack([g.shared[place] for g in ranks if g.shared is not None]).sum(0)
        assert_near(total, whole.shared[place], FP64, "d_shared")


def test_preactivations_follow_the_schedule_and_are_not_clamped():
    call = make(MANY, limit=0.0)
    # Rows of rank 1, which owns experts 3 to 5; row 5 pads, whatever its route says.
    peer_rank = torch.tensor([1, -1, 0, 1, 0, -1], dtype=torch.int32)
    peer_route = torch.tensor([2, -1, 7, 3, 2, 3], dtype=torch.int32)
    chosen = {0: (1, 1, 4), 2: (0, 3, 4), 3: (1, 1, 4), 4: (0, 1, 5)}  # row -> peer, token, expert
    gate, up, x = reference.routed_preactivations(
        call.shape, call.xs, call.topk_ids, call.routed, peer_rank, peer_route
    )
    for row in range(6):
        expected_gate, expected_up, expected_x = (torch.zeros(width).double() for width in (7, 7, 5))
        if row in chosen:
            peer, token, expert = chosen[row]
            expected_x = call.xs[peer][token]
            expected_gate = call.routed[1][0][expert - 3] @ expected_x
            expected_up = call.routed[1][1][expert - 3] @ expected_x
        assert_near(gate[row], expected_gate, FP64, f"gate of row {row}")
        assert_near(up[row], expected_up, FP64, f"up of row {row}")
        assert_same_bits(x[row], expected_x, f"x of row {row}")


def bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


def mm(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).bfloat16()


def written_out_expert(
    x: Tensor, d_y: Tensor, factor: Tensor, weights: Sequence[Tensor], limit: float | None
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """bf16 torch, forward and backward of factor * E(x), every tensor stored in bf16 where torch would store it.

    Returns E(x), d_x before its rounding, d_factor and the weight gradients.
    """
    gate, up = mm(x, weights[0].T), mm(x, weights[1].T)
    g = gate.float() if limit is None else gate.float().clamp(max=limit)
    u = up.float() if limit is None else up.float().clamp(-limit, limit)
    silu = bf16(torch.nn.functional.silu(g))
    hidden = bf16(silu.float() * u)
    out = mm(hidden, weights[2].T)
    d_factor = (d_y.float() * out.float()).sum(1)
    d_out = bf16(d_y.float() * factor[:, None])
    d_hidden = mm(d_out, weights[2]).float()
    leaf = g.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.nn.functional.silu(leaf).sum(), leaf)
    d_gate = bf16(d_hidden * u * slope * (1.0 if limit is None else (gate.float() <= limit)))
    d_up = bf16(d_hidden * silu.float() * (1.0 if limit is None else (up.float().abs() <= limit)))
    d_x = mm(d_gate, weights[0]).float() + mm(d_up, weights[1]).float()
    return out, d_x, d_factor, Weights(mm(d_gate.T, x), mm(d_up.T, x), mm(d_out.T, hidden))


def assert_nearly_all_same_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """The order of an fp32 sum may tip a rounding here and there; a rounding more or less would change far more."""
    assert actual.dtype == expected.dtype == torch.bfloat16 and actual.shape == expected.shape
    differing = (actual != expected).double().mean().item()
    assert differing < 0.01, f"{name}: {differing:.1%} of the elements differ"
    assert_near(actual.float(), expected.float(), 0.02, name)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_baseline_rounds_where_bf16_torch_stores_when(limit):
    tokens, num_experts = 160, 3
    ids = torch.randint(-1, num_experts + 1, (tokens, K), generator=torch.Generator().manual_seed(5)).tolist()
    call = make([ids], num_experts=num_experts, limit=limit, dtype=torch.bfloat16, widths=LEGAL)
    assert call.shared is not None and call.shared_factors is not None
    shared, w, factor = call.shared[0], call.topk_weights[0].float(), call.shared_factors[0].float()
    call = replace(call, topk_weights=[w], shared_factors=[factor])
    x, d_y = call.xs[0], random_like(call.xs)[0]
    assert call.shared is not None
    out, d_x, d_s, d_shared = written_out_expert(x, d_y, factor, shared, limit)
    y, d_w, d_routed = factor[:, None] * out.float(), torch.zeros_like(w), []
    for expert in range(num_experts):
        token, k = (call.topk_ids[0] == expert).nonzero(as_tuple=True)
        weights = [m[expert] for m in call.routed[0]]
        out, d_rows, d_w[token, k], d_weights = written_out_expert(x[token], d_y[token], w[token, k], weights, limit)
        y.index_add_(0, token, w[token, k, None] * out.float())
        d_x.index_add_(0, token, d_rows)
        d_routed.append(d_weights)
    assert_nearly_all_same_bits(call.forward(TORCH_BF16)[0], bf16(y), "y")
    (gradients,) = call.backward([d_y], TORCH_BF16)
    assert gradients.shared is not None and gradients.d_shared_factor is not None
    assert_nearly_all_same_bits(gradients.d_x, bf16(d_x), "d_x")
    assert_near(gradients.d_topk_weights, d_w, 1e-3, "d_topk_weights")
    assert_near(gradients.d_shared_factor, d_s, 1e-3, "d_shared_factor")
    for place, name in enumerate(("gate", "up", "down")):
        expected = torch.stack([weights[place] for weights in d_routed])
        assert_nearly_all_same_bits(gradients.routed[place], expected, f"d_{name}")
        assert_nearly_all_same_bits(gradients.shared[place], d_shared[place], f"d_{name} of the shared expert")


def test_baseline_is_off_by_a_bf16_rounding_and_the_reference_is_not():
    call = make(MANY, dtype=torch.bfloat16, widths=LEGAL)
    exact = looped_forward(with_operands(call, [t.double() for t in flat_operands(call)]))
    for y, b, e in zip(call.forward(), call.forward(TORCH_BF16), exact, strict=True):
        assert (y.dtype, b.dtype) == (torch.float32, torch.bfloat16)
        assert (y - e).norm() / e.norm() < 1e-6
        assert 1e-4 < (b.double() - e).norm() / e.norm() < 2e-2


def test_tf32_is_off_in_matmuls_and_the_callers_choice_stays():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                seen.append(torch.backends.cuda.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    call = make(MANY, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with Watch():
            call.forward()
            call.backward(call.xs)
            reference.routed_preactivations(
                call.shape, call.xs, call.topk_ids, call.routed, torch.tensor([0]), torch.tensor([0])
            )
        with pytest.raises(KeyError), reference.full_precision_matmul():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(seen) > 50 and set(seen) == {"ieee"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"topk_ids": c.topk_ids[:1]}, "topk_ids has 1 entries for 2 ranks"),
        (lambda c: {"shared": None, "shared_factors": None}, "shared_intermediate=384 with no shared weights"),
        (lambda c: {"shared_factors": None}, "the shape has a shared_factor"),
    ],
)
def test_operands_are_refused_and_named_when_they_disagree(change, message):
    call = make(MANY)
    with pytest.raises(ValueError, match=message):
        replace(call, **change(call)).forward()
