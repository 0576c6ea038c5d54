"""The whole layer forward on a GPU: what ``mok-cute check`` does not look at by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mok_cute import functional, inputs
from mok_cute.config import RunConfig
from mok_cute.errors import ConfigError, PeerTimeoutError
from mok_cute.shapes import MoEShape
from mok_cute.templates.launch_args import CONTROL_STOP

TINY = MoEShape.preset("tiny")
pytestmark = pytest.mark.gpu


class Layer:
    """Workspaces, weights and one call's inputs of ``ranks`` virtual ranks."""

    def __init__(self, ranks: int, tokens: list[int], shape: MoEShape = TINY, run: RunConfig | None = None) -> None:
        self.shape, self.ranks = shape, ranks
        self.workspaces = functional.create_workspaces(shape, ep_size=ranks, max_tokens=max(tokens), run=run)
        made = [inputs.make_rank_inputs(shape, r, ranks, tokens[r], 0, device="cuda") for r in range(ranks)]
        self.xs = [m.x for m in made]
        self.ids = [m.topk_ids for m in made]
        self.weights = [m.topk_weights for m in made]
        self.routed = [
            functional.RoutedWeights(*inputs.make_routed_weights(shape, r, ranks, 0, device="cuda"))
            for r in range(ranks)
        ]
        shared: Any = inputs.make_shared_weights(shape, 0, device="cuda")
        self.shared_expert = None if shared is None else functional.SharedWeights(*shared)
        self.shared = None if self.shared_expert is None else [self.shared_expert] * ranks

    def forward(self, **kwargs: Any) -> list[torch.Tensor]:
        schedules = functional.build_schedules(self.workspaces, self.ids)
        outputs = functional.forward_ranks(
            self.workspaces, schedules, self.xs, self.weights, self.routed, self.shared, **kwargs
        )
        return [y for y, _ in outputs]

    def limit(self, **limits: Any) -> None:
        """Other time limits for the calls that follow."""
        self.workspaces = [replace(w, settings=replace(w.settings, **limits)) for w in self.workspaces]

    def check(self) -> None:
        for workspace in self.workspaces:
            workspace.check()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_thousand_launches_in_a_row_give_the_same_bits(ranks: int) -> None:
    layer = Layer(ranks, [200 + r for r in range(ranks)], run=RunConfig(128, 256))
    first = layer.forward()
    schedules = functional.build_schedules(layer.workspaces, layer.ids)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        outputs = functional.forward_ranks(
            layer.workspaces, schedules, layer.xs, layer.weights, layer.routed, layer.shared
        )
        for (y, _context), wanted in zip(outputs, first, strict=True):
            different += (y != wanted).any()
    layer.check()
    assert int(different) == 0


def test_schedule_and_forward_alternate_with_changing_routes() -> None:
    layer = Layer(2, [300, 150])
    wanted = layer.forward()
    for seed in range(20):
        keep = layer.ids
        layer.ids = [torch.roll(ids, seed + 1, 0) for ids in keep]
        layer.forward()
        layer.ids = keep
        assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))
    layer.check()


def test_one_workspace_serves_layers_of_different_weights() -> None:
    layer = Layer(1, [256])
    first = layer.forward()[0]
    other = Layer(1, [256])
    other.workspaces, other.routed = layer.workspaces, [functional.RoutedWeights(*(-w for w in layer.routed[0]))]
    second = other.forward()[0]
    assert not torch.equal(first, second)
    assert torch.equal(layer.forward()[0], first)


def test_x_in_the_workspace_is_used_where_it_lies() -> None:
    layer = Layer(2, [130, 64])
    wanted = layer.forward()
    for i, workspace in enumerate(layer.workspaces):
        own = workspace.x[: len(layer.xs[i])]
        own.copy_(layer.xs[i])
        layer.xs[i] = own
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))


def test_stacked_gate_up_weights_are_read_in_place() -> None:
    layer = Layer(1, [200])
    wanted = layer.forward()[0]
    gate, up, down = layer.routed[0]
    stacked = torch.cat([gate, up], dim=1)
    inner = TINY.intermediate
    layer.routed = [functional.RoutedWeights(stacked[:, :inner], stacked[:, inner:], down)]
    assert torch.equal(layer.forward()[0], wanted)


def test_a_device_count_below_the_rows_of_x_ends_the_tokens() -> None:
    layer = Layer(1, [300])
    short = Layer(1, [300])
    short.ids, short.xs, short.weights = layer.ids, layer.xs, layer.weights
    count = torch.tensor([177], dtype=torch.int32, device="cuda")
    schedule = functional.build_schedule(layer.workspaces[0], layer.ids[0], count)
    y, _ = functional.forward(
        layer.workspaces[0], schedule, layer.xs[0], layer.weights[0], layer.routed[0], layer.shared_expert
    )
    layer.ids = [ids[:177] for ids in layer.ids]
    layer.xs = [x[:177] for x in layer.xs]
    layer.weights = [w[:177] for w in layer.weights]
    assert torch.equal(y[:177], layer.forward()[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cuda_graph_replays_with_changing_routes_and_inputs(ranks: int) -> None:
    layer = Layer(ranks, [256] * ranks)
    ids = [i.clone() for i in layer.ids]
    xs = [x.clone() for x in layer.xs]
    layer.ids, layer.xs = ids, xs
    layer.forward()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.forward()
    for seed in (1, 2, 3):
        for r in range(ranks):
            made = inputs.make_rank_inputs(TINY, r, ranks, 256, seed, device="cuda")
            ids[r].copy_(made.topk_ids)
            xs[r].copy_(made.x)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [y.clone() for y in captured]
        assert all(torch.equal(a, b) for a, b in zip(layer.forward(), replayed, strict=True)), seed
    layer.check()


def test_a_missing_rank_is_named_and_the_process_survives() -> None:
    layer = Layer(2, [128, 128])
    wanted = layer.forward()
    schedules = functional.build_schedules(layer.workspaces, layer.ids)
    torch.cuda.synchronize()
    layer.limit(entry_timeout_s=1, timeout_s=0.2)  # the limit inside a launch counts only once all have entered
    alone = (layer.workspaces[0], schedules[0], layer.xs[0], layer.weights[0], layer.routed[0], layer.shared_expert)
    functional.forward(*alone)
    with pytest.raises(PeerTimeoutError) as caught:
        layer.workspaces[0].check()
    report = caught.value.report
    assert (report.signal, report.missing_rank, report.rank) == ("entry", 1, 0)
    assert 1 <= report.age_s < 5
    with pytest.raises(PeerTimeoutError):
        layer.forward()
    layer.limit(entry_timeout_s=60, timeout_s=60)
    for workspace in layer.workspaces:
        workspace.reset()
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))
    layer.check()


def test_a_rank_that_vanishes_inside_the_launch_is_named() -> None:
    """Rank 1 enters (its entry signal is set by hand) but never pushes."""
    layer = Layer(2, [128, 128])
    wanted = layer.forward()
    schedules = functional.build_schedules(layer.workspaces, layer.ids)
    torch.cuda.synchronize()
    layer.limit(timeout_s=0.3)
    w = layer.workspaces[0]
    epoch = int(w.tensor("control")[0])
    w.tensor("entry").view(torch.int32)[32] = epoch + 1
    functional.forward(w, schedules[0], layer.xs[0], layer.weights[0], layer.routed[0], layer.shared_expert)
    with pytest.raises(PeerTimeoutError) as caught:
        w.check()
    assert (caught.value.report.signal, caught.value.report.missing_rank) == ("exit", 1)
    for workspace in layer.workspaces:
        workspace.reset()
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))


def test_a_rank_whose_schedule_gave_up_promises_its_peers_nothing() -> None:
    layer = Layer(2, [128, 128])
    wanted = layer.forward()
    torch.cuda.synchronize()
    w, peer = layer.workspaces
    before = {name: peer.tensor(name).clone() for name in ("entry", "exit")}
    w.tensor("control")[CONTROL_STOP] = 1
    empty = functional.build_schedule(Layer(1, [128]).workspaces[0], torch.full_like(layer.ids[0], -1))
    w.schedule_rows.clear()
    assert layer.shared is not None
    functional.forward(w, empty, layer.xs[0], layer.weights[0], layer.routed[0], layer.shared[0])
    torch.cuda.synchronize()
    assert all(torch.equal(peer.tensor(name), old) for name, old in before.items())
    for workspace in layer.workspaces:
        workspace.reset()
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))


@pytest.mark.parametrize("tokens", [[1000], [700, 300]])
def test_a_larger_macrobatch_than_the_rows_need_is_no_reason_to_refuse(tokens: list[int]) -> None:
    layer = Layer(len(tokens), tokens, run=RunConfig(128, 65536))
    wanted = layer.forward()
    again = layer.forward(run=RunConfig(2048, 65536, num_sms=20))
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


def test_ranks_may_give_ids_of_different_width() -> None:
    """Also in a fresh process: all kernels are loaded before a rank waits for another."""
    layer = Layer(2, [128, 90])
    wanted = layer.forward()
    layer.ids = [layer.ids[0].to(torch.int64), layer.ids[1].to(torch.int32)]
    assert all(torch.equal(a, b) for a, b in zip(layer.forward(), wanted, strict=True))
    layer.check()


def test_choices_on_the_wrong_device_are_refused() -> None:
    layer = Layer(1, [64])
    with pytest.raises(ConfigError, match="topk_ids: on cpu"):
        functional.build_schedule(layer.workspaces[0], layer.ids[0].cpu())
    with pytest.raises(ConfigError, match="num_tokens: torch.int64"):
        functional.build_schedule(layer.workspaces[0], layer.ids[0], torch.tensor([3], device="cuda"))


def test_forward_works_on_a_stream_that_is_not_the_default() -> None:
    layer = Layer(2, [128, 90])
    wanted = layer.forward()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        ys = layer.forward()
        copies = [y.clone() for y in ys]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(copies, wanted, strict=True))


def test_refusals_name_argument_value_rule_and_change() -> None:
    layer = Layer(1, [64])
    with pytest.raises(ConfigError, match=r"x: 65 tokens.*max_tokens=64"):
        big = torch.zeros(65, TINY.hidden, dtype=torch.bfloat16, device="cuda")
        schedule = functional.build_schedule(layer.workspaces[0], layer.ids[0])
        check = (layer.workspaces[0], schedule, big, torch.zeros(65, TINY.topk, device="cuda"), layer.routed[0])
        functional.check_tensors(*check, layer.shared_expert, None)
    with pytest.raises(ConfigError, match=r"comm_sms=\d+.*at most"):
        sms = layer.workspaces[0].num_sms
        functional.comm_ctas(layer.workspaces[0], replace(layer.workspaces[0].run, comm_sms=sms))
    with pytest.raises(ConfigError, match=r"x: 63 tokens: the schedule was built from 64"):
        layer.xs, layer.weights = [layer.xs[0][:63]], [layer.weights[0][:63]]
        layer.forward()
    monkey = layer.ids[0].clone()
    monkey[3, 1] = TINY.num_experts
    schedule = functional.build_schedule(layer.workspaces[0], monkey)
    with pytest.raises(ConfigError, match="1 ids at or above num_experts=8"):
        functional.refuse_dropped(layer.workspaces, [schedule])


def test_launching_takes_little_host_time() -> None:
    """Median of 200 launches, far above the aim of 20 us only on a busy host."""
    import time

    layer = Layer(1, [64])
    schedule = functional.build_schedule(layer.workspaces[0], layer.ids[0])
    call = (layer.workspaces[0], schedule, layer.xs[0], layer.weights[0], layer.routed[0], layer.shared_expert)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        functional.forward(*call)
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    median_us = sorted(times)[100] * 1e6
    print(f"host time of one forward: {median_us:.1f} us")
    assert median_us < 300
