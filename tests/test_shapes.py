"""Shapes: presets, who owns which expert, refusals; and an import that costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mok_cute.errors import ConfigError, UnsupportedError
from mok_cute.shapes import PRESETS, MoEShape

PUBLISHED = {  # hidden, intermediate, experts, topk, shared, per-token factor
    "deepseek-v3": (7168, 2048, 256, 8, 2048, False),
    "kimi-k2": (7168, 2048, 384, 8, 2048, False),
    "glm-5": (6144, 2048, 256, 8, 2048, False),
    "qwen3.5": (4096, 1024, 512, 10, 1024, True),
    "deepseek-v4-pro": (7168, 3072, 384, 6, 3072, False),
    "qwen3-30b": (2048, 768, 128, 8, 0, False),
    "tiny": (256, 256, 8, 2, 256, False),
}


def test_presets_are_the_published_ones():
    assert set(PRESETS) == set(PUBLISHED)
    for name, sizes in PUBLISHED.items():
        s = MoEShape.preset(name)
        actual = (s.hidden, s.intermediate, s.num_experts, s.topk, s.shared_intermediate, s.shared_factor)
        assert actual == sizes and s.name == name and s.swiglu_limit is None


def test_preset_takes_overrides_and_skips_those_that_are_none():
    s = MoEShape.preset("tiny", hidden=384, topk=None, swiglu_limit=0.0)
    assert (s.hidden, s.intermediate, s.topk, s.swiglu_limit) == (384, 256, 2, 0.0)


def test_preset_drops_the_factor_when_the_shared_expert_is_taken_away():
    assert MoEShape.preset("qwen3.5", shared_intermediate=0).shared_factor is False
    with pytest.raises(ConfigError, match="shared_factor=True"):
        MoEShape.preset("qwen3.5", shared_intermediate=0, shared_factor=True)


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "counts"),
    [
        (8, 3, [3, 3, 2]),
        (8, 5, [2, 2, 2, 2, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (1, 3, [1, 0, 0]),
        (7, 1, [7]),
        (256, 72, [4] * 64 + [0] * 8),
    ],
)
def test_owned_experts_partition_the_experts_when_ranks_do_not_divide_them(num_experts, ep_size, counts):
    s = MoEShape(128, 256, num_experts, 2)
    ranges = [s.owned_experts(rank, ep_size) for rank in range(ep_size)]
    assert [len(r) for r in ranges] == counts
    assert [expert for r in ranges for expert in r] == list(range(num_experts))
    assert all(s.owner(expert, ep_size) == rank for rank, r in enumerate(ranges) for expert in r)
    assert s.local_experts(ep_size) == max(counts)


def test_flops_count_routed_and_shared_rows():
    assert MoEShape(128, 256, 8, 2, 384).flops_forward(10, 3) == 6 * 128 * (10 * 256 + 3 * 384)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": 200}, UnsupportedError, "hidden=200: must be a multiple of 128.* to 256"),
        ({"intermediate": 640 + 64}, UnsupportedError, "intermediate=704.* to 768"),
        ({"shared_intermediate": 1}, UnsupportedError, "shared_intermediate=1.* to 128"),
        ({"topk": 0}, ConfigError, "topk=0: an integer of at least 1"),
        ({"topk": 256}, UnsupportedError, "topk=256: at most 255"),
        ({"num_experts": 0}, ConfigError, "num_experts=0"),
        ({"hidden": 0}, ConfigError, "hidden=0"),
        ({"hidden": 128.0}, ConfigError, "hidden=128.0"),
        ({"topk": True}, ConfigError, "topk=True"),
        ({"shared_intermediate": -128}, ConfigError, "shared_intermediate=-128: an integer of at least 0"),
        ({"swiglu_limit": -1.0}, ConfigError, "swiglu_limit=-1.0"),
        ({"swiglu_limit": float("nan")}, ConfigError, "swiglu_limit=nan"),
        ({"shared_factor": True}, ConfigError, "shared_factor=True without a shared expert"),
    ],
)
def test_shape_refuses_and_names_argument_value_and_rule_when(arguments, error, message):
    with pytest.raises(error, match=message):
        MoEShape(**{"hidden": 128, "intermediate": 256, "num_experts": 3, "topk": 2, **arguments})


def test_preset_names_the_choices_when_unknown():
    with pytest.raises(ConfigError, match="preset='deepseek': unknown; choose one of deepseek-v3"):
        MoEShape.preset("deepseek")


def test_import_and_a_shape_load_neither_torch_nor_the_compiler():
    code = (
        "import sys, mok_cute; mok_cute.MoEShape.preset('tiny'); mok_cute.PeerTimeoutError; "
        "print([name for name in ('torch', 'cutlass', 'cuda') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_resolve_and_unknown_ones_do_not():
    import mok_cute

    assert all(getattr(mok_cute, name) is not None for name in mok_cute.__all__)
    assert set(mok_cute.__all__) <= set(dir(mok_cute))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mok_cute.no_such_name
