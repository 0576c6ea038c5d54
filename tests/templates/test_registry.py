"""Roles by name: a role from another file joins the kernel, and what does not fit is refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mok_cute.arch import get
from mok_cute.compile import compile_forward
from mok_cute.config import KernelConfig
from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.shapes import MoEShape
from mok_cute.templates import registry
from mok_cute.templates.interface import Plan

SHAPE = MoEShape(128, 128, 2, 1)
RELU = KernelConfig(roles=(("activation", "relu_squared"),))


@pytest.fixture
def relu_squared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    registry.register("activation", "relu_squared", ("sm_90a",), "relu_squared:ReluSquared")
    yield
    sys.modules.pop("relu_squared", None)


def test_every_role_has_a_default_on_hopper_that_can_be_made() -> None:
    plan = Plan(SHAPE, KernelConfig(), get("sm_90a"), 2)
    for role in registry.DEFAULTS:
        assert registry.make(plan, role) is not None


def test_a_role_from_another_file_joins_the_kernel(relu_squared: None) -> None:
    ours = compile_forward(SHAPE, None, "sm_90a", 2)
    theirs = compile_forward(SHAPE, RELU, "sm_90a", 2)
    assert "ex2.approx" in ours.ptx and "ex2.approx" not in theirs.ptx
    assert theirs.figures.spill_bytes == 0


def test_a_role_that_does_not_fit_says_why(relu_squared: None) -> None:
    clamped = MoEShape(128, 128, 2, 1, swiglu_limit=1.0)
    with pytest.raises(UnsupportedError, match=r"activation relu_squared: swiglu_limit=1.0.*drop the limit"):
        compile_forward(clamped, RELU, "sm_90a", 2)


def test_the_source_of_a_foreign_role_is_part_of_the_key(relu_squared: None) -> None:
    plan = Plan(SHAPE, RELU, get("sm_90a"), 2)
    assert list(registry.foreign_sources(plan)) == ["activation:relu_squared"]
    assert registry.foreign_sources(Plan(SHAPE, KernelConfig(), get("sm_90a"), 2)) == {}


def test_dispatch_refuses_row_pieces_that_the_operand_ring_cannot_hold() -> None:
    shape = MoEShape(2048, 128, 8, 2)  # rows of 4096 bytes
    plan = Plan(shape, KernelConfig(dispatch_slots=8), get("sm_90a"), 8)
    with pytest.raises(UnsupportedError, match=r"dispatch_slots=8: 393216 bytes .* 196608 .*lower KernelConfig\."):
        registry.find(plan, "dispatch")
    registry.find(Plan(shape, KernelConfig(dispatch_slots=8, dispatch_piece_bytes=2048), plan.arch, 8), "dispatch")


def test_unknown_names_are_refused_with_the_choice() -> None:
    plan = Plan(SHAPE, KernelConfig(roles=(("reduce", "mean"),)), get("sm_90a"), 2)
    with pytest.raises(UnsupportedError, match="reduce='mean' is not built for sm_90a; choose one of weighted_sum"):
        registry.find(plan, "reduce")
    with pytest.raises(ConfigError, match="role='reducer': unknown"):
        registry.register("reducer", "mean", ("sm_90a",), "a:B")
    with pytest.raises(ConfigError, match="name='weighted_sum'.*choose another name"):
        registry.register("reduce", "weighted_sum", ("sm_90a",), "a:B")
