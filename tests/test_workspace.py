"""The workspace on the host: what lies where, what a launch is told, and what a wait that gave up has left."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok_cute import functional, launcher
from mok_cute.config import MAX_EP_SIZE, ROW_BLOCK, KernelConfig, RunConfig
from mok_cute.errors import ConfigError, PeerTimeoutError, TimeoutReport, UnsupportedError
from mok_cute.gpu import Gpu
from mok_cute.launcher import expert_stride
from mok_cute.schedule import ScheduleState, allocate_schedule, schedule_sizes
from mok_cute.settings import Settings
from mok_cute.shapes import PRESETS, MoEShape
from mok_cute.symmetric import SymmetricBlock
from mok_cute.templates import launch_args, records
from mok_cute.templates.launch_args import FORWARD_ARGS
from mok_cute.workspace import (
    ALIGNMENT,
    BYTES,
    INT32,
    CounterLayout,
    Workspace,
    WorkspaceTable,
    describe_workspace,
    max_routed_rows,
    raise_if_any_failed,
)

TINY = MoEShape.preset("tiny")
NO_SHARED = MoEShape.preset("tiny", shared_intermediate=0)
SMALL_RUN = RunConfig(128, 256)
STREAM = 77
LINE_WORDS = 32  # int32 in a line of 128 bytes


def make_workspace(shape: MoEShape = TINY, ep_size: int = 1, max_tokens: int = 200, **changes: Any) -> Workspace:
    """The last rank's workspace, in memory of the host: no kernel can use it, its addresses are real."""
    run = changes.pop("run", SMALL_RUN)
    table = WorkspaceTable.of(shape, ep_size, max_tokens, run)
    memory = torch.zeros(table.symmetric_bytes, dtype=torch.uint8)
    peers = torch.full((ep_size,), memory.data_ptr(), dtype=torch.int64)
    fields: dict[str, Any] = {
        "shape": shape,
        "kernel": SimpleNamespace(function=Mock(), config=KernelConfig()),
        "settings": Settings(timeout_s=1.5, entry_timeout_s=0.0),
        "table": table,
        "symmetric": SymmetricBlock(memory, peers, ep_size - 1, ep_size),
        "local": torch.zeros(table.local_bytes, dtype=torch.uint8),
        "record": torch.zeros(records.RECORD_WORDS, dtype=torch.int32),
        "run": run.fitted(table.max_rows),
        "schedule_state": ScheduleState.allocate(schedule_sizes(shape, ep_size, max_tokens), "cpu"),
        "gpu": Mock(spec=Gpu),
        "stream": None,
        "num_sms": 132,
    }
    return Workspace(**{**fields, **changes})


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*PRESETS.values(), NO_SHARED], ids=lambda s: f"{s.name}-{s.shared_intermediate}")
@pytest.mark.parametrize(("ep_size", "max_tokens"), [(1, 0), (1, 129), (8, 4096), (72, 1)])
def test_buffers_are_aligned_and_do_not_overlap(shape: MoEShape, ep_size: int, max_tokens: int) -> None:
    table = WorkspaceTable.of(shape, ep_size, max_tokens, RunConfig())
    for scope, size in (("symmetric", table.symmetric_bytes), ("local", table.local_bytes)):
        buffers = sorted((b for b in table.buffers.values() if b.scope == scope), key=lambda b: b.offset)
        assert all(b.offset % ALIGNMENT == 0 and b.num_bytes > 0 for b in buffers)
        assert all(a.offset + a.num_bytes <= b.offset for a, b in pairwise(buffers))
        assert buffers[0].offset == 0 and buffers[-1].offset + buffers[-1].num_bytes <= size
    assert {b.scope for b in table.buffers.values()} == {"symmetric", "local"}


def test_rings_are_the_only_activations_of_routed_rows() -> None:
    few = WorkspaceTable.of(TINY, 4, 100_000, SMALL_RUN)
    assert few.ring_rows == SMALL_RUN.macrobatch
    in_rows = [b.name for b in few.buffers.values() if b.shape[0] == few.ring_rows]
    assert in_rows == ["x_ring", "hidden_ring"]
    assert few.max_rows > 100 * few.ring_rows


def test_rings_are_no_longer_than_the_rows_that_can_exist() -> None:
    assert WorkspaceTable.of(TINY, 1, 0, RunConfig()).ring_rows == 8 * ROW_BLOCK  # a padded block of every expert
    assert WorkspaceTable.of(TINY, 1, 64, RunConfig()).ring_rows == 9 * ROW_BLOCK


def test_shared_buffers_exist_exactly_with_a_shared_expert() -> None:
    with_shared = set(WorkspaceTable.of(TINY, 1, 8, SMALL_RUN).buffers)
    without = set(WorkspaceTable.of(NO_SHARED, 1, 8, SMALL_RUN).buffers)
    assert with_shared - without == {"shared_hidden", "shared_y"}


@given(
    experts=st.integers(1, 600),
    topk=st.integers(1, 12),
    ep_size=st.integers(1, MAX_EP_SIZE),
    tokens=st.integers(0, 500),
)
def test_table_and_schedule_agree_on_the_rows_of_the_worst_routing(
    experts: int, topk: int, ep_size: int, tokens: int
) -> None:
    shape = MoEShape(128, 128, experts, topk)
    rows = max_routed_rows(shape, ep_size, tokens)
    local = shape.local_experts(ep_size)
    assert rows % ROW_BLOCK == 0
    assert rows >= ep_size * tokens * topk + (ROW_BLOCK - 1) * min(local, ep_size * tokens * topk)
    if local <= 512:
        assert rows == schedule_sizes(shape, ep_size, tokens).max_rows


@pytest.mark.parametrize("ep_size", [-1, 0, MAX_EP_SIZE + 1])
def test_table_refuses_a_group_that_cannot_be(ep_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"ep_size={ep_size}: between 1 and {MAX_EP_SIZE}; pass the number of ranks"):
        WorkspaceTable.of(TINY, ep_size, 8, SMALL_RUN)


def test_table_refuses_a_negative_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens=-1: at least 0; pass the largest token count"):
        WorkspaceTable.of(TINY, 1, -1, SMALL_RUN)


def test_workspaces_refuse_a_device_that_is_not_cuda() -> None:
    with pytest.raises(UnsupportedError, match=r"device=cpu: .*pass device='cuda'"):
        functional.create_workspaces(TINY, ep_size=1, max_tokens=8, device="cpu")


def test_description_lists_the_tables_buffers() -> None:
    table = WorkspaceTable.of(TINY, 2, 300, SMALL_RUN)
    rows = describe_workspace(TINY, 2, 300, SMALL_RUN)
    assert [row["buffer"] for row in rows] == list(table.buffers)
    assert sum(row["bytes"] for row in rows) <= table.symmetric_bytes + table.local_bytes
    assert all(row["writer"] and row["reader"] for row in rows)


# ---- counters -------------------------------------------------------------------------------------------------------


@given(max_blocks=st.integers(1, 5000), token_blocks=st.integers(1, 500))
def test_counter_arrays_follow_the_scalars_on_lines_of_their_own(max_blocks: int, token_blocks: int) -> None:
    c = CounterLayout.of(max_blocks, token_blocks)
    lengths = {
        c.x_routed_ready: max_blocks,
        c.hidden_ready: max_blocks,
        c.shared_hidden_ready: token_blocks,
        c.y_done: max_blocks,
    }
    starts = sorted(lengths)
    assert len(starts) == 4 and starts[0] == launch_args.COUNTER_ARRAYS
    assert all(start % LINE_WORDS == 0 for start in [*starts, c.set_words])
    assert all(start + lengths[start] <= end for start, end in pairwise([*starts, c.set_words]))


def test_scalar_counters_and_control_words_have_lines_of_their_own() -> None:
    names = [name for name in vars(launch_args) if name.isupper() and not name.startswith(("CONTROL_", "PEER_"))]
    scalars = [vars(launch_args)[name] for name in names if type(vars(launch_args)[name]) is int]
    scalars.remove(launch_args.COUNTER_ARRAYS)
    assert len(scalars) >= 5
    assert len({word // LINE_WORDS for word in scalars}) == len(scalars)
    assert max(scalars) + LINE_WORDS <= launch_args.COUNTER_ARRAYS
    assert launch_args.CONTROL_STOP - launch_args.CONTROL_EPOCH >= LINE_WORDS
    assert launch_args.CONTROL_WORDS >= launch_args.CONTROL_STOP + LINE_WORDS


def test_two_sets_of_counters_are_kept() -> None:
    table = WorkspaceTable.of(TINY, 1, 8, SMALL_RUN)
    assert table.buffers["counters"].shape == (2, table.counters.set_words)


# ---- tensors and launch arguments -----------------------------------------------------------------------------------


def test_tensors_lie_at_their_addresses() -> None:
    w = make_workspace(ep_size=2)
    for name, b in w.table.buffers.items():
        tensor = w.tensor(name)
        assert tensor.data_ptr() == w.address(name) and tensor.shape == b.shape
        assert tensor.dtype is {INT32: torch.int32, BYTES: torch.uint8}.get(b.dtype, torch.bfloat16)
    assert w.x.shape == (200, TINY.hidden)
    assert w.address("combine") - w.address("x") == w.fixed_arguments["combine_offset"]


class Call:
    """Arguments of one forward on the host, and what its kernel was told."""

    def __init__(self, w: Workspace, tokens: int) -> None:
        shape, bf16 = w.shape, torch.bfloat16
        local, hidden, inner = shape.local_experts(w.ep_size), shape.hidden, shape.intermediate
        gate_up = torch.zeros(local, 2 * inner, hidden, dtype=bf16)
        down = torch.zeros(local, hidden, inner, dtype=bf16)
        self.workspace = w
        self.schedule = allocate_schedule(w.schedule_state.sizes, "cpu")
        self.x = torch.zeros(tokens, hidden, dtype=bf16)
        self.topk_weights = torch.zeros(tokens, shape.topk)
        self.routed = functional.RoutedWeights(gate_up[:, :inner], gate_up[:, inner:], down)
        width = shape.shared_intermediate
        parts = (torch.zeros(width, hidden, dtype=bf16), torch.zeros(width, hidden, dtype=bf16))
        self.shared = functional.SharedWeights(*parts, torch.zeros(hidden, width, dtype=bf16)) if width else None
        self.factor = torch.zeros(tokens) if shape.shared_factor else None

    def forward(self, **options: Any) -> functional.Output:
        return functional.forward(
            self.workspace,
            self.schedule,
            self.x,
            self.topk_weights,
            self.routed,
            self.shared,
            shared_factor=self.factor,
            **options,
        )

    def told(self, **options: Any) -> dict[str, int]:
        self.forward(**options)
        kernel: Any = self.workspace.kernel
        *values, stream = kernel.function.call_args.args
        assert stream == STREAM
        return dict(zip([name for name, _ in FORWARD_ARGS], values, strict=True))


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU torch has no streams to give."""
    monkeypatch.setattr(launcher, "rank_streams", lambda workspaces: nullcontext([STREAM] * len(workspaces)))


def test_launch_arguments_are_integers_that_fit_their_parameters() -> None:
    for w in (make_workspace(ep_size=3), make_workspace(NO_SHARED, max_tokens=0)):
        values = Call(w, 0).told()
        for name, kind in FORWARD_ARGS:
            assert type(values[name]) is int and kind in ("Int32", "Int64"), name
            assert 0 <= values[name] < (2**31 if kind == "Int32" else 2**63), name


def test_launch_arguments_say_where_things_are() -> None:
    w = make_workspace(ep_size=2)
    values = Call(w, 150).told()
    assert (values["rank"], values["ep_size"], values["num_ctas"]) == (1, 2, 132)
    assert (values["x_rows"], values["token_rows"], values["ring_rows"]) == (150, 200, 256)
    assert (values["minibatch_blocks"], values["ring_minibatches"], values["comm_ctas"]) == (1, 2, 16)
    assert (values["wait_limit_ns"], values["entry_limit_ns"]) == (1_500_000_000, 0)
    assert values["gate_stride"] == values["up_stride"] == 2 * TINY.intermediate * TINY.hidden
    assert values["down_stride"] == TINY.intermediate * TINY.hidden
    assert values["up"] - values["gate"] == 2 * TINY.intermediate * TINY.hidden  # bytes of half the rows, bf16
    assert values["saved_x"] == 0


def test_descriptors_of_absent_and_empty_tensors_get_a_valid_address() -> None:
    w = make_workspace(NO_SHARED)
    values = Call(w, 0).told()
    absent = ("x", "y", "topk_weights", "shared_factor", "shared_gate", "shared_up", "shared_down", "shared_hidden")
    assert {values[name] for name in (*absent, "shared_y")} == {w.address("x_ring")}
    assert values["x_rows"] == 1


def test_saved_tensors_are_those_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    w = make_workspace()
    context = functional.allocate_context(w, w.run)
    assert context.x.shape == (256, TINY.hidden) and context.gate.shape == context.up.shape == (256, TINY.intermediate)
    monkeypatch.setattr(functional, "allocate_context", lambda *_: context)
    values = Call(w, 100).told(save_for_backward=True)
    assert (values["saved_x"], values["saved_rows"]) == (context.x.data_ptr(), 256)
    assert (values["saved_gate"], values["saved_up"]) == (context.gate.data_ptr(), context.up.data_ptr())


def test_a_call_of_virtual_ranks_launches_one_kernel_for_each() -> None:
    calls = [Call(make_workspace(ep_size=2), tokens) for tokens in (3, 0)]
    outputs = functional.forward_ranks(
        [call.workspace for call in calls],
        [call.schedule for call in calls],
        [call.x for call in calls],
        [call.topk_weights for call in calls],
        [call.routed for call in calls],
        [call.shared for call in calls if call.shared],
    )
    assert [len(y) for y, _ in outputs] == [3, 0]
    assert [call.workspace.launches["forward"] for call in calls] == [1, 1]


FACTOR = MoEShape.preset("tiny", shared_factor=True)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "name", "value", "message"),
    [
        (TINY, "x", torch.zeros(8, 128), r"x: shape \(8, 128\): must be \(8, 256\); reshape"),
        (TINY, "x", torch.zeros(8, 256), r"x: dtype torch.float32: must be torch.bfloat16; convert"),
        (TINY, "x", torch.zeros(256, 8, dtype=BF16).T, r"x: strides \(1, 8\): .*contiguous"),
        (TINY, "x", torch.zeros(2049, dtype=BF16)[1:].view(8, 256), r"x: address .*multiple of 16 bytes"),
        (TINY, "x", torch.zeros(201, 256, dtype=BF16), r"x: 201 tokens: .*max_tokens=200; make a larger one"),
        (TINY, "topk_weights", torch.zeros(7, 2), r"topk_weights: shape \(7, 2\): must be \(8, 2\)"),
        (TINY, "topk_weights", torch.zeros(8, 2, dtype=BF16), r"topk_weights: dtype .*must be torch.float32"),
        (TINY, "shared", None, r"shared: missing, but shared_intermediate=256; pass shared weights exactly when"),
        (TINY, "factor", torch.zeros(8), r"shared_factor: given, but the shape says shared_factor=False; pass it"),
        (FACTOR, "factor", None, r"shared_factor: missing, but the shape says shared_factor=True; pass it exactly"),
        (FACTOR, "factor", torch.zeros(8, 1), r"shared_factor: shape \(8, 1\): must be \(8,\)"),
    ],
)
def test_forward_refuses_naming_argument_value_rule_and_change(
    shape: MoEShape, name: str, value: Any, message: str
) -> None:
    call = Call(make_workspace(shape), 8)
    call.forward()
    setattr(call, name, value)
    with pytest.raises(ConfigError, match=message):
        call.forward()
    assert call.workspace.launches["forward"] == 1


def test_forward_refuses_experts_that_a_descriptor_cannot_reach() -> None:
    call = Call(make_workspace(), 8)
    gate, up, down = call.routed
    wide = torch.zeros(8, 256 * 256 + 4, dtype=BF16)
    call.routed = functional.RoutedWeights(gate, up, wide.as_strided((8, 256, 256), (256 * 256 + 4, 256, 1)))
    with pytest.raises(ConfigError, match=r"routed.down: address or expert stride"):
        call.forward()
    call.routed = functional.RoutedWeights(gate, up, down.mT)
    with pytest.raises(ConfigError, match=r"routed.down: strides .*contiguous"):
        call.forward()


@pytest.mark.parametrize("experts", [0, 1])
def test_stride_between_experts_is_that_of_whole_experts_when_there_are_not_two(experts: int) -> None:
    assert expert_stride(torch.zeros(experts, 256, 128)) == 256 * 128


# ---- run configurations of a call -----------------------------------------------------------------------------------


def test_a_call_uses_the_workspaces_run_configuration_when_it_gives_none() -> None:
    w = make_workspace()
    assert functional.fit_run(w, None) is w.run


def test_a_call_may_use_less_of_the_rings_and_never_more() -> None:
    w = make_workspace(max_tokens=5000, run=RunConfig(256, 1024))
    assert functional.fit_run(w, RunConfig(128, 512)) == RunConfig(128, 512)
    with pytest.raises(ConfigError, match=r"macrobatch=1280: the rings of this workspace hold 1024 rows; create the"):
        functional.fit_run(w, RunConfig(256, 1280))


def test_a_call_may_ask_for_more_than_can_exist() -> None:
    w = make_workspace(max_tokens=8, run=RunConfig())
    assert functional.fit_run(w, RunConfig(4096, 8192)).macrobatch == w.table.ring_rows


@pytest.mark.parametrize(("num_sms", "chosen"), [(132, 16), (33, 8), (8, 2), (7, 1), (2, 1)])
def test_communication_ctas_are_a_quarter_and_at_most_sixteen_by_default(num_sms: int, chosen: int) -> None:
    w = make_workspace(num_sms=num_sms)
    assert functional.comm_ctas(w, RunConfig()) == chosen
    assert functional.comm_ctas(w, RunConfig(comm_sms=1)) == 1


@pytest.mark.parametrize("asked", [132, 500])
def test_communication_ctas_leave_one_to_compute(asked: int) -> None:
    w = make_workspace()
    assert functional.comm_ctas(w, RunConfig(comm_sms=131)) == 131
    with pytest.raises(ConfigError, match=rf"comm_sms={asked}: this rank has 132 CTAs .*set comm_sms to at most 131"):
        functional.comm_ctas(w, RunConfig(comm_sms=asked))


# ---- records of waits that gave up ----------------------------------------------------------------------------------


def make_record(
    signal: int, index: int = 5, role: int = records.ROLE_LOAD, age_ns: int = 2_500_000_000
) -> torch.Tensor:
    words = [0] * records.RECORD_WORDS
    entries = {
        records.STATUS: 1,
        records.RANK: 3,
        records.CTA: 17,
        records.ROLE: role,
        records.SIGNAL: signal,
        records.INDEX: index,
        records.SEEN: 7,
        records.EXPECTED: 8,
        records.AGE_NS + 1: age_ns >> 32,
    }
    for word, value in entries.items():
        words[word] = value
    low = age_ns & 0xFFFFFFFF
    words[records.AGE_NS] = low - 2**32 if low >= 2**31 else low
    return torch.tensor(words, dtype=torch.int32)


def report_of(record: torch.Tensor) -> TimeoutReport:
    w = make_workspace()
    w.raise_if_failed()  # an empty record is no report
    w.record.copy_(record)
    with pytest.raises(PeerTimeoutError) as caught:
        w.raise_if_failed()
    return caught.value.report


@pytest.mark.parametrize("name", [*records.SIGNAL_CODE, "schedule_flag"])
def test_a_record_names_the_missing_rank_when_its_signal_belongs_to_one(name: str) -> None:
    report = report_of(make_record(records.SIGNAL_CODE.get(name, records.SCHEDULE_FLAG)))
    assert (report.signal, report.rank, report.cta, report.role, report.index) == (name, 3, 17, "load", 5)
    assert (report.seen, report.expected, report.age_s) == (7, 8, pytest.approx(2.5))
    assert report.missing_rank == (5 if name in ("entry", "exit", "schedule_flag") else None)
    assert ("rank 5 is missing" in str(report)) == (report.missing_rank is not None)


@pytest.mark.parametrize("age_ns", [0, 2**31, 2**32 - 1, 2**32, 10**15])
def test_a_record_holds_ages_of_64_bits(age_ns: int) -> None:
    report = report_of(make_record(records.SIGNAL_CODE["entry"], age_ns=age_ns))
    assert report.age_s == pytest.approx(age_ns * 1e-9)


def test_codes_that_nobody_knows_are_told_as_numbers() -> None:
    report = report_of(make_record(99, role=42))
    assert (report.signal, report.role) == ("signal 99", "42")


def test_codes_of_signals_and_the_schedules_flag_differ() -> None:
    assert records.SCHEDULE_FLAG not in records.SIGNAL_CODE.values()
    assert [records.signal_name(code) for code in records.SIGNAL_CODE.values()] == list(records.SIGNAL_CODE)


def test_a_failed_rank_raises_before_the_next_launch_of_any() -> None:
    workspaces = [make_workspace(), make_workspace()]
    raise_if_any_failed(workspaces)
    workspaces[1].record.copy_(make_record(records.SIGNAL_CODE["exit"], index=2))
    with pytest.raises(PeerTimeoutError, match=r"exit\[2\] was 7, expected 8.*rank 2 is missing.*workspace\.reset\(\)"):
        raise_if_any_failed(workspaces)
    with pytest.raises(PeerTimeoutError):
        functional.build_schedules(workspaces, [torch.zeros(1, 2, dtype=torch.int32)] * 2)
