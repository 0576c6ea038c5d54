"""The error ratio: its pooling, its limits, and everything that must never pass."""

import hashlib
import json
import math

import pytest
import torch
from compare import assert_near, assert_same_bits

from mok_cute.errors import ConfigError
from mok_cute.metrics import SMALL_SEEDS, ErrorPool, ResultFigures, error_vs_torch_bf16, sha256

LARGE = 4096
NAN, INF = math.nan, math.inf


def figures_of(
    ours: torch.Tensor, baseline: torch.Tensor, reference: torch.Tensor, *, routes: int = 64, seeds: int = 1
) -> ResultFigures:
    pool = ErrorPool()
    for _ in range(seeds):
        pool.add([ours], [baseline], [reference], routes)
    return pool.figures()


def constant_errors(
    ours: float, baseline: float, elements: int = LARGE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    reference = torch.full((elements,), 2.0)
    return reference + ours, reference + baseline, reference


@pytest.mark.parametrize("where", ["ours", "baseline", "reference"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_figures_never_pass_when_an_operand_is_not_finite(where, bad):
    operands = dict(zip(("ours", "baseline", "reference"), constant_errors(0.5, 0.5), strict=True))
    operands[where] = operands[where].clone()
    operands[where][17] = bad
    assert not figures_of(*operands.values()).ok


@pytest.mark.parametrize("bad_seed", [0, 1])
def test_figures_keep_a_nan_when_it_comes_first_or_last(bad_seed):
    pool = ErrorPool()
    for seed in range(2):
        ours, baseline, reference = constant_errors(NAN if seed == bad_seed else 0.5, 0.5)
        pool.add([ours], [baseline], [reference], 64)
    figures = pool.figures()
    assert not figures.ok and math.isnan(figures.max_abs)
    assert figures.error_vs_torch_bf16 is not None and math.isnan(figures.error_vs_torch_bf16)


def test_figures_fail_when_the_baseline_is_exact_and_ours_is_not():
    figures = figures_of(*constant_errors(2.0**-20, 0.0))
    assert figures.error_vs_torch_bf16 == INF and not figures.ok


def test_ratio_is_null_and_passes_when_both_are_exact():
    figures = figures_of(*constant_errors(0.0, 0.0))
    assert figures.error_vs_torch_bf16 is None and figures.ok and figures.rel_l1 == 0 == figures.max_abs


def test_ratio_is_zero_not_null_when_only_ours_is_exact():
    figures = figures_of(*constant_errors(0.0, 0.5))
    assert figures.error_vs_torch_bf16 == 0.0 and figures.ok


def test_ratio_pools_squares_over_ranks_before_dividing():
    reference = [torch.zeros(2), torch.zeros(1), torch.zeros(0)]
    ours = [torch.tensor([3.0, 0.0]), torch.tensor([4.0]), torch.zeros(0)]
    baseline = [torch.tensor([0.0, 6.0]), torch.tensor([8.0]), torch.zeros(0)]
    assert error_vs_torch_bf16(ours, baseline, reference) == 0.5


def test_max_abs_and_rel_l1_follow_their_definitions():
    ours, reference = torch.tensor([1.0, -4.0, 2.5]), torch.tensor([1.0, -2.0, 3.0])
    figures = figures_of(ours, reference, reference)
    assert figures.max_abs == 2.0 and figures.rel_l1 == 2.5 / 6.0


@pytest.mark.parametrize(("ours", "passes"), [(1.0625, True), (1.125, False)])
def test_limit_is_1_1_when_the_result_is_large(ours, passes):
    figures = figures_of(*constant_errors(ours, 1.0))
    assert figures.limit == 1.1 and figures.ok is passes


@pytest.mark.parametrize(("elements", "routes"), [(LARGE - 1, 64), (LARGE, 63)])
@pytest.mark.parametrize(("ours", "passes"), [(1.125, True), (1.25, False)])
def test_limit_is_1_2_over_32_seeds_when_the_result_is_small(elements, routes, ours, passes):
    operands = constant_errors(ours, 1.0, elements)
    figures = figures_of(*operands, routes=routes, seeds=SMALL_SEEDS)
    assert figures.limit == 1.2 and figures.seeds == 32 and figures.ok is passes
    assert not figures_of(*operands, routes=routes, seeds=SMALL_SEEDS - 1).ok


def test_pool_wants_more_seeds_only_when_small():
    pool = ErrorPool()
    ours, baseline, reference = constant_errors(1.0, 1.0, 10)
    pool.add([ours], [baseline], [reference], 100)
    assert pool.seeds_wanted == 32 and not pool.is_complete and "seeds=1" in pool.figures().reason
    pool = ErrorPool()
    ours, baseline, reference = constant_errors(1.0, 1.0)
    pool.add([ours], [baseline], [reference], 64)
    assert pool.seeds_wanted == 1 and pool.is_complete


def test_pool_is_complete_when_there_are_no_elements():
    figures = figures_of(torch.zeros(0, 8), torch.zeros(0, 8), torch.zeros(0, 8), routes=0)
    assert figures.ok and figures.error_vs_torch_bf16 is None


def test_pool_outweighs_one_lucky_seed():
    pool = ErrorPool()
    for seed in range(SMALL_SEEDS):
        ours, baseline, reference = constant_errors(0.01 if seed == 0 else 1.5, 1.0, 4)
        pool.add([ours], [baseline], [reference], 2)
    assert not pool.figures().ok


def test_pool_refuses_tensors_of_other_shapes():
    with pytest.raises(ConfigError, match="differ"):
        ErrorPool().add([torch.zeros(2, 3)], [torch.zeros(2, 3)], [torch.zeros(3, 2)], 1)
    with pytest.raises(ConfigError, match="per rank"):
        ErrorPool().add([torch.zeros(2)], [], [torch.zeros(2)], 1)
    with pytest.raises(ConfigError, match="nothing was added"):
        ErrorPool().figures()


def test_chunks_change_nothing_when_a_result_spans_several(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randint(-8, 8, (7, 11), generator=generator).float() for _ in range(3)]
    whole = figures_of(*operands)
    monkeypatch.setattr("mok_cute.metrics._CHUNK_ELEMENTS", 10)
    assert figures_of(*operands) == whole


def test_sha256_is_that_of_the_bytes_in_row_major_order():
    bits = torch.tensor([[0x3F80, 0x0001], [-0x8000, 0x7FC0]], dtype=torch.int16)
    values = bits.view(torch.bfloat16)
    expected = hashlib.sha256(bytes.fromhex("803f01000080c07f")).hexdigest()
    assert sha256(values) == expected == sha256([values[:1], values[1:]])
    assert sha256(values.t()) != expected == sha256(values.t().contiguous().t())
    assert figures_of(values.float(), values.float(), values.float()).sha256 == sha256(values.float())


def test_json_is_standard_when_figures_are_not_finite():
    figures = figures_of(*constant_errors(NAN, 0.5))
    fields = json.loads(json.dumps(figures.to_json(), allow_nan=False))
    assert fields["max_abs"] == "nan" and fields["ok"] is False
    exact = figures_of(*constant_errors(0.0, 0.0)).to_json()
    assert exact["error_vs_torch_bf16"] is None


def test_compare_names_the_first_wrong_element():
    want = torch.full((2, 3), 2.0)
    got = want.clone()
    got[1, 0], got[1, 2] = 2.5, NAN
    with pytest.raises(AssertionError, match=r"y\[1, 0\]: .* 2\.5, expected 2\.0; 2 of 6"):
        assert_near(got, want, 0.125, "y")
    with pytest.raises(AssertionError, match=r"y\[1, 2\]: .* 1 of 6"):
        assert_near(got, want, 0.25, "y")
    with pytest.raises(AssertionError, match=r"y\[0\]: bits differ: -0\.0"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]), "y")
    assert_same_bits(got, got.clone())
