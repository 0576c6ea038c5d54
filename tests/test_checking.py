"""A check finds what is wrong with a layer, and nothing with a right one. The layer is a fake that errs on demand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_layer import make_fake

import mok_cute
from mok_cute import checking, problem, reference
from mok_cute.checking import CheckResult, run_check
from mok_cute.config import RunConfig
from mok_cute.errors import PeerTimeoutError
from mok_cute.problem import CheckRequest
from mok_cute.shapes import MoEShape

SMALL = MoEShape(128, 128, 4, 2, 128)


@pytest.fixture(autouse=True)
def empty_memos() -> None:
    problem.WEIGHTS.clear()
    problem.EXPECTED.clear()


def check(monkeypatch: pytest.MonkeyPatch, fault: str | None = None, **changes: Any) -> CheckResult:
    module, _ = make_fake(fault)
    monkeypatch.setitem(sys.modules, "mok_cute.functional", module)
    monkeypatch.setitem(vars(mok_cute), "functional", module)
    fields: dict[str, Any] = {"shape": SMALL, "ranks": 1, "tokens": (64,), "device": "cpu", **changes}
    return run_check(CheckRequest(**fields))


def test_check_passes_when_layer_is_right(monkeypatch: pytest.MonkeyPatch):
    result = check(monkeypatch)
    assert result.ok and result.deterministic and result.schedule_exact
    assert result.findings == ()
    assert result.launches == {"schedule": 3, "forward": 1, "backward": 0}
    y = result.results["y"]
    assert y["error_vs_torch_bf16"] == pytest.approx(1.0)
    assert (y["limit"], y["seeds"]) == (1.1, 1)
    assert len(y["sha256"]) == 64
    assert result.config["tokens"] == [64]


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("wrong", "y: error_vs_torch_bf16="),
        ("nan", "y: error_vs_torch_bf16=nan"),
        ("launches", "launches.forward is 2"),
        ("schedule", "schedule of rank 0: tokens_per_expert[0] is"),
    ],
)
def test_check_fails_and_says_why_when_layer_is(fault: str, finding: str, monkeypatch: pytest.MonkeyPatch):
    result = check(monkeypatch, fault)
    assert not result.ok
    assert any(text.startswith(finding) for text in result.findings), result.findings


def test_check_reports_which_result_differs_when_runs_differ(monkeypatch: pytest.MonkeyPatch):
    result = check(monkeypatch, "random")
    assert not result.ok and not result.deterministic
    assert "y of rank 0: two runs differ in 1 of 8192 elements" in result.findings


def test_check_raises_the_report_when_a_wait_gave_up(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PeerTimeoutError) as raised:
        check(monkeypatch, "timeout")
    assert raised.value.report.signal == "x_routed_ready"


def test_check_pools_seeds_when_result_is_small(monkeypatch: pytest.MonkeyPatch):
    y = check(monkeypatch, tokens=(1,)).results["y"]
    assert (y["limit"], y["seeds"]) == (1.2, 32)


def test_check_passes_with_null_ratio_when_there_are_no_tokens(monkeypatch: pytest.MonkeyPatch):
    result = check(monkeypatch, tokens=(0, 0), ranks=2)
    assert result.ok
    assert result.results["y"]["error_vs_torch_bf16"] is None


@pytest.mark.ranks
@pytest.mark.parametrize("routing", ["random", "zipf", "all-to-one", "empty-rank"])
def test_check_passes_when_ranks_have_unequal_tokens(routing: str, monkeypatch: pytest.MonkeyPatch):
    result = check(monkeypatch, shape=MoEShape.preset("tiny"), ranks=3, tokens=(40, 0, 77), routing=routing)
    assert result.ok, result.findings


def test_preactivations_are_compared_exactly_when_inputs_are_integers(monkeypatch: pytest.MonkeyPatch):
    right = check(monkeypatch, inputs="integers", ranks=2, tokens=(64, 32))
    assert right.ok, right.findings
    assert set(right.results) == {"y", "x", "gate", "up"}
    wrong = check(monkeypatch, "saved", inputs="integers")
    assert any(text.startswith("saved gate of rank 0: element (0, 0) is") for text in wrong.findings)


def test_save_writes_results_without_padding_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from safetensors.torch import load_file

    path = tmp_path / "deep" / "saved.safetensors"
    result = check(monkeypatch, save=path, ranks=2, tokens=(64, 32))
    assert result.ok, result.findings
    saved = load_file(path)
    assert set(saved) == {f"{name}.{r}" for name in ("y", "gate", "up", "peer_rank", "peer_route") for r in (0, 1)}
    padding = saved["peer_rank.0"] < 0
    assert padding.any() and not padding.all()
    assert not saved["gate.0"][padding].any()
    assert saved["y.1"].shape == (32, 128)


def test_reference_and_weights_are_made_once_when_only_the_run_changes(monkeypatch: pytest.MonkeyPatch):
    calls: list[reference.Arithmetic] = []
    forward = reference.forward

    def counted(*args: Any, **options: Any) -> list[torch.Tensor]:
        calls.append(options["arithmetic"])
        return forward(*args, **options)

    monkeypatch.setattr(reference, "forward", counted)
    first = check(monkeypatch)
    weights = next(iter(problem.WEIGHTS.values.values()))
    made = len([a for a in calls if a is reference.EXACT])
    second = check(monkeypatch, run=RunConfig(minibatch=128, macrobatch=256, comm_sms=2))
    assert made == len([a for a in calls if a is reference.EXACT]) == 1
    assert next(iter(problem.WEIGHTS.values.values())) is weights
    assert first.results["y"]["sha256"] == second.results["y"]["sha256"]
    check(monkeypatch, seed=1)
    assert next(iter(problem.WEIGHTS.values.values())) is not weights


def test_routing_file_decides_token_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from safetensors.torch import save_file

    path = tmp_path / "routing.safetensors"
    ids = torch.tensor([[0, -1], [3, 3], [1, 2]])
    save_file({"ids.0": ids, "weights.0": torch.full((3, 2), 0.5)}, path)
    result = check(monkeypatch, routing=f"file:{path}", tokens=(100,))
    assert result.ok, result.findings
    assert result.config["tokens"] == [3]


def test_bits_differ_when_only_the_sign_of_zero_does():
    zero = torch.zeros(2, dtype=torch.bfloat16)
    nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    assert not checking.same_bits(zero, -zero)
    assert checking.same_bits(nan, nan.clone())


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernel_passes_check_when_run_on_a_gpu(ranks: int):
    result = run_check(CheckRequest(shape=MoEShape.preset("tiny"), ranks=ranks, tokens=(129,) * ranks))
    assert result.ok, result.findings


@pytest.mark.gpu
def test_kernel_gives_equal_bits_when_run_choices_change():
    shape = MoEShape.preset("tiny")
    runs = [RunConfig(128, 128, 1), RunConfig(256, 512, 4), RunConfig()]
    results = [run_check(CheckRequest(shape=shape, ranks=1, tokens=(1000,), run=run)) for run in runs]
    assert all(result.ok for result in results), [result.findings for result in results]
    assert len({result.results["y"]["sha256"] for result in results}) == 1
