"""The error ratio: what it is, when it passes, and how small results are pooled."""

from __future__ import annotations

import hashlib
import json
import math
import sys

import pytest
import torch

from mok_cute import metrics


def pool_of(ours: list[float], baseline: list[float], *, routes: int = 64, elements: int = 4096, seeds: int = 1):
    """A pool whose result is the reference 0 everywhere but in the first elements, which hold the errors."""
    pool = metrics.ErrorPool()
    for _ in range(seeds):
        tensors = []
        for errors in (ours, baseline, []):
            tensor = torch.zeros(elements)
            tensor[: len(errors)] = torch.tensor(errors)
            tensors.append(list(tensor.split(max(1, elements // 3))))  # uneven ranks
        pool.add(*tensors, routes=routes)
    return pool


def test_ratio_is_of_frobenius_norms_pooled_over_ranks():
    reference = [torch.tensor([1.0, 2.0]), torch.tensor([[4.0]])]
    ours = [torch.tensor([4.0, 2.0]), torch.tensor([[8.0]])]  # errors 3 and 4: norm 5
    baseline = [torch.tensor([1.0, 4.0]), torch.tensor([[4.0]])]  # error 2
    assert metrics.error_vs_torch_bf16(ours, baseline, reference) == 2.5


def test_ratio_is_measured_in_fp64_when_results_are_bf16():
    reference = [torch.full((1000,), 1.0 + 2**-20)]
    ours = [torch.ones(1000, dtype=torch.bfloat16)]
    assert metrics.error_vs_torch_bf16(ours, [torch.ones(1000)], reference) == 1.0
    assert metrics.squared_error(ours, reference) == pytest.approx(1000 * 2.0**-40, rel=1e-12)


@pytest.mark.parametrize(("ours", "ok"), [(1.1, True), (1.101, False)])
def test_limit_is_tight_when_the_result_is_large(ours, ok):
    pool = pool_of([ours * 2.0**-10], [2.0**-10])
    assert pool.complete and pool.limit == 1.1
    assert pool.ok is ok or pool.ratio == pytest.approx(1.1)  # 1.1 itself is rounded in fp32


@pytest.mark.parametrize(("routes", "elements"), [(63, 4096), (64, 4095), (0, 10**4)])
def test_small_results_pool_32_seeds_when(routes, elements):
    for seeds in (1, 31):
        assert not pool_of([1.0], [1.0], routes=routes, elements=elements, seeds=seeds).complete
    for error, ok in ((1.19, True), (1.21, False)):
        pool = pool_of([error], [1.0], routes=routes, elements=elements, seeds=32)
        assert pool.complete and pool.limit == 1.2 and pool.ok is ok and pool.ratio == pytest.approx(error)


def test_pool_adds_squares_of_all_seeds_before_the_ratio():
    pool = metrics.ErrorPool()
    for ours, baseline in ((3.0, 1.0), (4.0, 0.0)):
        pool.add([torch.tensor([ours])], [torch.tensor([baseline])], [torch.tensor([0.0])], routes=1)
    assert pool.ratio == 5.0


def test_verdict_of_an_incomplete_pool_is_refused():
    with pytest.raises(AssertionError, match="3 of 32"):
        _ = pool_of([1.0], [1.0], routes=1, seeds=3).ok


def test_ratio_is_null_and_passes_only_when_both_errors_are_zero():
    pool = pool_of([], [])
    assert pool.ratio is None and pool.ok
    assert pool_of([], [1.0]).ratio == 0.0


def test_fails_when_only_the_baseline_is_exact():
    pool = pool_of([1e-30], [])
    assert pool.ratio == math.inf and not pool.ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("baseline", [[], [1.0]])
def test_fails_when_a_result_holds(bad, baseline):
    pool = pool_of([bad], baseline)
    assert not pool.ok
    zeros = [torch.zeros(4096)]
    figures = metrics.figures("y", [torch.full((4096,), bad)], zeros, pool)
    decoded = json.loads(json.dumps(figures.as_json(), allow_nan=False))
    assert decoded["ok"] is False and decoded["error_vs_torch_bf16"] == decoded["max_abs"] == sys.float_info.max


def test_result_without_elements_passes_after_one_set_of_inputs():
    pool = pool_of([], [], routes=0, elements=0)
    assert pool.complete and pool.ok and pool.ratio is None
    figures = metrics.figures("y", [torch.empty(0, 7)], [torch.empty(0, 7)], pool)
    assert (figures.max_abs, figures.rel_l1, figures.sha256) == (0.0, 0.0, hashlib.sha256().hexdigest())


def test_max_abs_and_rel_l1_span_ranks_and_chunks(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 3)
    reference = [torch.tensor([1.0, -2.0, 0.0, 4.0, 1.0]), torch.tensor([2.0])]
    ours = [torch.tensor([1.0, -2.0, 0.5, 4.0, 1.25]), torch.tensor([1.0])]
    assert metrics.max_abs(ours, reference) == 1.0
    assert metrics.rel_l1(ours, reference) == 1.75 / 10
    assert metrics.rel_l1([torch.ones(1)], [torch.zeros(1)]) == math.inf


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        metrics.max_abs([torch.zeros(1, 3)], [torch.zeros(3, 3)])


def test_sha256_is_of_the_row_major_bytes_in_rank_order(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 2)
    a, b = torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.tensor(1.5)
    expected = hashlib.sha256(a.view(torch.int16).numpy().tobytes() + b.numpy().tobytes()).hexdigest()
    assert metrics.sha256([a, b]) == expected == metrics.sha256([a.T.contiguous().T, b])
    assert metrics.sha256([b, a]) != expected
    assert metrics.sha256(torch.tensor(0.0)) != metrics.sha256(torch.tensor(-0.0))
