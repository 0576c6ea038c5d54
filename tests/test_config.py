"""Configurations: what they refuse and in which words, and how they fit a shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_cute.arch import ARCHS
from mok_cute.config import MAX_LOCAL_EXPERTS, TENSOR_CORES, KernelConfig, RunConfig
from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.shapes import PRESETS, MoEShape

SM90 = ARCHS["sm_90a"]
TINY = MoEShape.preset("tiny")


@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("precision", "fp8", "only bf16 is built"),
        ("tensor_core", "mma", "one of wgmma, tcgen05"),
        ("ctas_per_tile", 2, "one of (1,) with wgmma"),
        ("hidden_cols", 64, "must be 128"),
        ("down_cols", 128, "must be 256"),
        ("tile_k", 128, "must be 64"),
        ("stages", 1, "2 to 6 stages"),
        ("stages", 7, "2 to 6 stages"),
        ("out_cols", 128, "must be 64"),
        ("dispatch_slots", 2, "3 to 8 pieces"),
        ("dispatch_slots", 9, "3 to 8 pieces"),
        ("dispatch_piece_bytes", 0, "positive multiple of 128"),
        ("dispatch_piece_bytes", 1000, "positive multiple of 128"),
        ("rows_per_dispatch_group", 0, "divisor of 128 up to 32"),
        ("rows_per_dispatch_group", 24, "divisor of 128 up to 32"),
        ("rows_per_dispatch_group", 64, "divisor of 128 up to 32"),
        ("raster_rows", 0, "at least one"),
    ],
)
def test_kernel_config_refuses_naming_argument_value_rule_and_change(argument: str, value: Any, rule: str) -> None:
    changes: dict[str, Any] = {argument: value}
    with pytest.raises(ConfigError) as caught:
        KernelConfig(**changes)
    text = str(caught.value)
    assert text.startswith(f"KernelConfig: {argument}={value!r}: ") and text.endswith(f"set KernelConfig.{argument}.")
    assert rule in text


@pytest.mark.parametrize(
    ("changes", "argument", "rule"),
    [
        ({"minibatch": 0}, "minibatch", "a positive multiple of 128"),
        ({"minibatch": -128}, "minibatch", "a positive multiple of 128"),
        ({"minibatch": 100}, "minibatch", "a positive multiple of 128"),
        ({"macrobatch": 0}, "macrobatch", "a positive multiple of minibatch=2048"),
        ({"minibatch": 2048, "macrobatch": 3072}, "macrobatch", "a positive multiple of minibatch=2048"),
        ({"minibatch": 256, "macrobatch": 128}, "macrobatch", "a positive multiple of minibatch=256"),
        ({"comm_sms": 0}, "comm_sms", "at least one CTA"),
        ({"num_sms": 1}, "num_sms", "at least two CTAs"),
    ],
)
def test_run_config_refuses_naming_argument_value_rule_and_change(
    changes: dict[str, Any], argument: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**changes)
    text = str(caught.value)
    assert text.startswith(f"RunConfig: {argument}={changes[argument]}: ") and text.endswith(f"set {argument}.")
    assert rule in text


@given(minibatch=st.integers(1, 40), times=st.integers(1, 40), rows=st.integers(0, 300_000))
def test_fitted_rings_hold_what_can_exist_and_no_more_than_asked(minibatch: int, times: int, rows: int) -> None:
    asked = RunConfig(128 * minibatch, 128 * minibatch * times, comm_sms=3, num_sms=9)
    fitted = asked.fitted(rows)
    assert fitted.minibatch <= asked.minibatch and fitted.macrobatch <= asked.macrobatch
    assert fitted.macrobatch - fitted.minibatch < max(rows, 128), "no minibatch of the ring is always empty"
    assert fitted.macrobatch == asked.macrobatch or fitted.macrobatch >= rows
    assert fitted.fitted(rows) == fitted
    assert (fitted.comm_sms, fitted.num_sms) == (3, 9)


@pytest.mark.parametrize("shape", PRESETS.values(), ids=list(PRESETS))
@pytest.mark.parametrize("ranks", [1, 8, 72])
def test_default_config_fits_every_preset(shape: MoEShape, ranks: int) -> None:
    config, local = KernelConfig(), shape.local_experts(ranks)
    config.validate(shape, SM90.name, SM90.smem_bytes_per_cta, local)
    assert sum(config.smem_plan(shape, local).values()) <= SM90.smem_bytes_per_cta


@given(hidden=st.integers(1, 100), piece=st.integers(1, 64))
def test_pieces_of_a_row_are_equal_parts_that_bulk_copies_can_move(hidden: int, piece: int) -> None:
    shape = MoEShape(128 * hidden, 128, 1, 1)
    config = KernelConfig(dispatch_piece_bytes=128 * piece)
    size = config.piece_bytes(shape)
    assert size % 16 == 0 and 0 < size <= config.dispatch_piece_bytes
    assert 2 * shape.hidden % size == 0


@pytest.mark.parametrize("arch_name", list(ARCHS))
def test_the_default_of_each_machine_is_valid_there_and_nowhere_else(arch_name: str) -> None:
    config = KernelConfig.default(arch_name)
    for other in ARCHS.values():
        if TENSOR_CORES[other.name] == TENSOR_CORES[arch_name]:
            config.validate(TINY, other.name, other.smem_bytes_per_cta, 8)
        else:
            with pytest.raises(UnsupportedError, match=f"tensor_core={config.tensor_core}: {other.name} has"):
                config.validate(TINY, other.name, other.smem_bytes_per_cta, 8)


def test_every_preset_fits_shared_memory_on_every_machine() -> None:
    for machine in ARCHS.values():
        for shape in PRESETS.values():
            KernelConfig.default(machine.name).validate(
                shape, machine.name, machine.smem_bytes_per_cta, shape.num_experts
            )


def test_validate_refuses_more_experts_than_the_prefix_table_holds() -> None:
    shape = MoEShape(128, 128, 2000, 2)
    KernelConfig().validate(shape, SM90.name, SM90.smem_bytes_per_cta, MAX_LOCAL_EXPERTS)
    with pytest.raises(UnsupportedError, match=r"num_experts=2000: 513 experts per rank exceed 512; use more ranks"):
        KernelConfig().validate(shape, SM90.name, SM90.smem_bytes_per_cta, MAX_LOCAL_EXPERTS + 1)


def test_validate_refuses_what_exceeds_shared_memory() -> None:
    total = sum(KernelConfig().smem_plan(TINY, 8).values())
    KernelConfig().validate(TINY, SM90.name, total, 8)
    with pytest.raises(UnsupportedError, match=rf"stages=4: {total} bytes .* exceed {total - 1} on sm_90a; lower"):
        KernelConfig().validate(TINY, SM90.name, total - 1, 8)


def test_geometry_counts_column_tiles() -> None:
    g = KernelConfig().geometry(MoEShape(640, 384, 8, 2, 512))
    assert (g.gate_up_cols, g.down_cols, g.shared_gate_up_cols, g.shared_down_cols) == (3, 3, 4, 3)
    g = KernelConfig().geometry(MoEShape(256, 256, 8, 2))
    assert (g.shared_gate_up_cols, g.shared_down_cols) == (0, 0)
