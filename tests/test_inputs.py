"""Inputs: known bits, independence of chunks and rank counts, and the routings' promises."""

import pytest
import torch
from compare import assert_same_bits
from safetensors.torch import save_file

from mok_cute import inputs
from mok_cute.errors import ConfigError
from mok_cute.inputs import (
    load_routing_file,
    make_d_y,
    make_rank_inputs,
    make_routed_weights,
    make_shared_weights,
)
from mok_cute.shapes import MoEShape

TINY = MoEShape.preset("tiny")
TWO64 = 1 << 64


def make_ids(shape, rank, ranks, tokens, routing, seed=0, **options):
    return make_rank_inputs(shape, rank, ranks, tokens, seed, "normal", routing, **options).topk_ids


def splitmix(value):
    """The finalizer, written once more in plain integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % TWO64
    return value ^ (value >> 31)


def test_routing_is_all_one_expert_when_all_to_one():
    ids = [make_ids(TINY, rank, 2, 50, "all-to-one") for rank in range(2)]
    assert len(torch.cat(ids).unique()) == 1
    assert len({int(make_ids(TINY, 0, 1, 1, "all-to-one", seed)[0, 0]) for seed in range(40)}) == 8


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 3), (8, 4), (9, 4), (3, 8), (2, 2)])
def test_routing_leaves_one_owner_without_routes_when_empty_rank(experts, ranks):
    shape = MoEShape(128, 128, experts, 2)
    ids = torch.cat([make_ids(shape, rank, ranks, 100, "empty-rank") for rank in range(ranks)])
    empty = shape.owner(experts - 1, ranks)
    owners = ids // shape.local_experts(ranks)
    assert set(owners.flatten().tolist()) == set(range(empty))
    assert set(ids.flatten().tolist()) == {e for e in range(experts) if shape.owner(e, ranks) != empty}


def test_routing_leaves_odd_experts_without_routes_when_empty_rank_has_one_rank():
    assert set(make_ids(TINY, 0, 1, 200, "empty-rank").flatten().tolist()) == {0, 2, 4, 6}
    assert make_ids(MoEShape(128, 128, 1, 2), 0, 1, 5, "empty-rank").eq(0).all()


@pytest.mark.parametrize("routing", ["random", "zipf", "empty-rank"])
def test_experts_are_distinct_while_there_are_enough(routing):
    shape = MoEShape(128, 128, 16, 8)
    ids = make_ids(shape, 0, 1, 300, routing)
    ordered = ids.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and ids.min() >= 0 and ids.max() < 16


def test_experts_repeat_evenly_when_a_token_has_more_routes_than_experts():
    ids = make_ids(MoEShape(128, 128, 3, 8), 0, 1, 50, "random")
    counts = torch.stack([(ids == expert).sum(dim=1) for expert in range(3)], dim=1)
    assert counts.min() == 2 and counts.max() == 3


def test_random_routing_is_even_and_zipf_is_not():
    shape = MoEShape(128, 128, 16, 2)
    random = torch.bincount(make_ids(shape, 0, 1, 4000, "random").flatten(), minlength=16)
    zipf = torch.bincount(make_ids(shape, 0, 1, 4000, "zipf").flatten(), minlength=16).sort(descending=True).values
    assert random.min() > 400 and random.max() < 600  # 500 expected, standard deviation below 22
    assert zipf[0] > 1.5 * zipf[1] > 1.5 * 1.2 * zipf[2] and 8 * zipf[15] < zipf[0] and zipf[15] > 0


def test_popular_experts_are_the_same_on_all_ranks_when_zipf():
    hottest = {int(make_ids(TINY, rank, 4, 1000, "zipf").flatten().mode().values) for rank in range(4)}
    assert len(hottest) == 1


def test_drop_fraction_drops_that_share_and_nothing_else():
    kept = make_ids(TINY, 0, 1, 2000, "random")
    dropped = make_ids(TINY, 0, 1, 2000, "random", drop_fraction=0.25)
    gone = dropped == -1
    assert 0.22 < gone.double().mean() < 0.28
    assert torch.equal(dropped[~gone], kept[~gone])
    assert make_ids(TINY, 0, 1, 9, "random", drop_fraction=1.0).eq(-1).all()


@pytest.mark.parametrize("routing", ["random", "zipf", "all-to-one", "empty-rank"])
def test_inputs_have_their_forms_when_there_are_no_tokens(routing):
    shape = MoEShape.preset("tiny", shared_factor=True)
    made = make_rank_inputs(shape, 0, 1, 0, 0, routing=routing)
    assert made.x.shape == (0, 256) and made.topk_ids.shape == (0, 2) == made.topk_weights.shape
    assert made.shared_factor is not None and made.shared_factor.shape == (0,)


def test_topk_weights_are_positive_and_sum_to_one():
    weights = make_rank_inputs(MoEShape(128, 128, 64, 10), 1, 2, 500, 3).topk_weights
    assert weights.dtype == torch.float32 and weights.min() > 0
    assert (weights.double().sum(dim=1) - 1).abs().max() < 10 * 2.0**-24
    assert weights.unique().numel() > 4000


def test_normal_is_the_sum_of_eight_uniforms_scaled_exactly():
    key = inputs._key(5, "x", 2)
    sums = inputs._centred_sums(key, 1000, 64, "cpu").tolist()
    scale = inputs._exact_scale(1.0)
    for index, got in enumerate(sums, start=1000):
        first = splitmix((index * 0x9E3779B97F4A7C15 + key) % TWO64)
        second = splitmix((first + 0xD1B54A32D192ED03) % TWO64)
        uniforms = [hash_ >> shift & 0xFFFF for hash_ in (first, second) for shift in (0, 16, 32, 48)]
        assert got == sum(uniforms) - 262140
    assert all(float(torch.tensor(s).float() * scale) == s * scale for s in (*sums, 262140, -262139))


@pytest.mark.parametrize("std", [1.0, 7168**-0.5, 2048**-0.5, 128**-0.5])
def test_scale_is_near_and_has_six_bits(std):
    scale = inputs._exact_scale(std)
    mantissa = scale.hex().split("p")[0].removeprefix("0x1.").rstrip("0")
    assert len(mantissa) <= 2 and abs(scale * inputs._SUM_STD / std - 1) < 1 / 63


def test_bits_are_those_recorded():
    """Guards the promise across versions and devices: a changed bit here changes every recorded figure."""
    from mok_cute.metrics import sha256

    shape = MoEShape(128, 128, 8, 2, 128, shared_factor=True)
    assert sha256(t for t in make_rank_inputs(shape, 1, 2, 30, 7, routing="zipf") if t is not None) == RECORDED[0]
    assert sha256(make_routed_weights(shape, 1, 4, 7)) == RECORDED[1]
    assert sha256(make_routed_weights(shape, 1, 4, 7, "integers")) == RECORDED[2]


RECORDED = (  # rank inputs with zipf routing; normal weights; integer weights
    "d314c11ce94edcaf6f626fd285c44d0b55958e750a7624d74b56e3849994362a",
    "4505097cb471c8f6ac8e5318a03f3d9ee8621a07a606b0ac001e715a9ed6a102",
    "0290d80e2662b27093800dd48337e3e270003a05540f788d1e853fc3b6dcbab1",
)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", inputs.KINDS)
@pytest.mark.parametrize("routing", inputs.ROUTINGS)
def test_bits_are_equal_on_cpu_and_gpu(kind, routing):
    shape = MoEShape.preset("qwen3.5", num_experts=12, hidden=1024)
    for rank in range(3):
        on_cpu = make_rank_inputs(shape, rank, 3, 129, 11, kind, routing, "cpu", drop_fraction=0.1)
        on_gpu = make_rank_inputs(shape, rank, 3, 129, 11, kind, routing, "cuda", drop_fraction=0.1)
        for name, one, other in zip(on_cpu._fields, on_cpu, on_gpu, strict=True):
            assert one is not None and other is not None
            assert_same_bits(other, one, name)
    on_cpu_weights = make_routed_weights(shape, 1, 3, 11, kind, "cpu")
    for one, other in zip(on_cpu_weights, make_routed_weights(shape, 1, 3, 11, kind, "cuda"), strict=True):
        assert_same_bits(other, one, "weights")


def test_bits_do_not_depend_on_chunks(monkeypatch):
    whole = make_rank_inputs(TINY, 0, 1, 20, 1).x, *make_routed_weights(TINY, 1, 2, 1)
    monkeypatch.setattr(inputs, "_CHUNK_ELEMENTS", {"cpu": 999, "cuda": 999})
    parts = make_rank_inputs(TINY, 0, 1, 20, 1).x, *make_routed_weights(TINY, 1, 2, 1)
    for one, other in zip(whole, parts, strict=True):
        assert_same_bits(other, one)


@pytest.mark.parametrize("kind", inputs.KINDS)
def test_experts_are_the_same_model_for_any_number_of_ranks(kind):
    shape = MoEShape(128, 256, 7, 2)
    whole = make_routed_weights(shape, 0, 1, 4, kind)
    for rank in range(4):
        owned = shape.owned_experts(rank, 4)
        for one, other in zip(whole, make_routed_weights(shape, rank, 4, 4, kind), strict=True):
            assert other.shape[0] == 2
            assert_same_bits(other[: len(owned)], one[owned.start : owned.stop])
            assert other[len(owned) :].isnan().all()


def test_tensors_differ_by_seed_rank_and_name():
    shape = MoEShape(128, 128, 2, 2, 128)
    made = [make_rank_inputs(shape, rank, 2, 128, seed).x for rank in range(2) for seed in range(2)]
    made += [make_d_y(shape, 0, 128, 0)]
    for seed in range(2):
        shared = make_shared_weights(shape, seed)
        assert shared is not None
        made += [*(stack[i] for stack in make_routed_weights(shape, 0, 1, seed) for i in range(2)), *shared]
    for i, one in enumerate(made):
        for other in made[:i]:
            correlation = torch.corrcoef(torch.stack([one.float().flatten(), other.float().flatten()]))[0, 1]
            assert correlation.abs() < 6 / 128  # six standard deviations of 128 * 128 independent pairs


def test_normals_have_the_moments_of_a_normal():
    x = make_rank_inputs(TINY, 0, 1, 2000, 0).x.double()
    assert x.mean().abs() < 0.01 and 0.98 < x.std() < 1.02
    assert 2.7 < (x**4).mean() / x.var() ** 2 < 3.0  # eight uniforms: 2.85
    assert 3.9 < x.max() < 4.9
    gate, up, down = make_routed_weights(MoEShape(512, 128, 1, 1), 0, 1, 0)
    for weights, fan_in in ((gate, 512), (up, 512), (down, 128)):
        assert 0.97 < weights.double().std() * fan_in**0.5 < 1.03


def test_integers_keep_all_partial_sums_exact():
    widest = 7168
    shape = MoEShape(widest, 128, 1, 1, 128)
    x = make_rank_inputs(shape, 0, 1, 64, 0, "integers").x.double()
    gate, up, down = (w.double() for w in make_routed_weights(shape, 0, 1, 0, "integers"))
    assert set(x.unique().tolist()) == {-2, -1, 0, 1, 2}
    for weights in (gate, up, down):
        assert set(weights.unique().tolist()) == {-1, 0, 1}
        assert 0.2 < (weights != 0).double().mean() < 0.3
    assert x.abs().max() * gate.abs().max() * widest < 2**24
    assert (x.float() @ gate[0].float().T).double().equal(x @ gate[0].T)


def test_weights_of_the_shared_expert_are_none_without_one():
    assert make_shared_weights(MoEShape.preset("qwen3-30b"), 0) is None
    shared = make_shared_weights(TINY, 0)
    assert shared is not None and [tuple(w.shape) for w in shared] == [(256, 256)] * 3


def write_file(path, **changes):
    tensors = {
        "ids.0": torch.tensor([[0, -1], [9, 3], [5, 5]], dtype=torch.int32),
        "weights.0": torch.rand(3, 2),
        "ids.1": torch.zeros(0, 2, dtype=torch.int64),
        "weights.1": torch.zeros(0, 2),
        "x.1": torch.zeros(0, 256, dtype=torch.bfloat16),
    }
    tensors.update(changes)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, str(path))
    return tensors


def test_routing_file_gives_ids_weights_and_token_counts(tmp_path):
    tensors = write_file(tmp_path / "routes.safetensors", **{"x.0": torch.randn(3, 256).bfloat16()})
    routing = f"file:{tmp_path / 'routes.safetensors'}"
    first = make_rank_inputs(TINY, 0, 2, 100, 0, routing=routing)
    for got, name in ((first.topk_ids, "ids.0"), (first.topk_weights, "weights.0"), (first.x, "x.0")):
        assert_same_bits(got, tensors[name], name)
    assert make_rank_inputs(TINY, 1, 2, 100, 0, routing=routing).x.shape == (0, 256)


def test_routing_file_without_x_gets_the_seeded_x(tmp_path):
    write_file(tmp_path / "routes.safetensors")
    made = make_rank_inputs(TINY, 0, 2, 3, 8, routing=f"file:{tmp_path / 'routes.safetensors'}")
    assert_same_bits(made.x, make_rank_inputs(TINY, 0, 2, 3, 8).x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights.0": None}, "weights.0 missing for rank 0"),
        ({"ids.0": torch.zeros(3, 3, dtype=torch.int32)}, r"ids.0 is \(3, 3\)"),
        ({"ids.0": torch.zeros(3, 2)}, "int32 or int64"),
        ({"weights.0": torch.zeros(3, 2).bfloat16()}, "float32"),
        ({"weights.0": torch.zeros(2, 2)}, r"weights.0 is \(2, 2\)"),
        ({"x.0": torch.zeros(3, 128)}, r"x.0 is \(3, 128\)"),
    ],
)
def test_routing_file_is_refused_by_name_when_it_does_not_fit(tmp_path, changes, message):
    write_file(tmp_path / "routes.safetensors", **changes)
    with pytest.raises(ConfigError, match=message):
        load_routing_file(tmp_path / "routes.safetensors", TINY, 0)


def test_routing_file_is_refused_when_unreadable_or_too_long(tmp_path):
    write_file(tmp_path / "routes.safetensors")
    with pytest.raises(ConfigError, match="3 tokens, tokens=2"):
        make_rank_inputs(TINY, 0, 2, 2, 0, routing=f"file:{tmp_path / 'routes.safetensors'}")
    with pytest.raises(ConfigError, match="no such file"):
        load_routing_file(tmp_path / "none", TINY, 0)
    (tmp_path / "damaged").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a readable"):
        load_routing_file(tmp_path / "damaged", TINY, 0)


def test_unknown_words_are_refused():
    with pytest.raises(ConfigError, match="routing='evn'"):
        make_rank_inputs(TINY, 0, 1, 1, 0, routing="evn")
    with pytest.raises(ConfigError, match="inputs='uniform'"):
        make_rank_inputs(TINY, 0, 1, 1, 0, kind="uniform")
    with pytest.raises(ConfigError, match="rank=2"):
        make_rank_inputs(TINY, 2, 2, 1, 0)
