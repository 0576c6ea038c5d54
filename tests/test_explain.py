"""explain's tables agree with the order they describe."""

from __future__ import annotations

import pytest

from mok_cute import explain
from mok_cute.templates.scheduler import order

GEOMETRY = order.Geometry(128, 4, 3, 2, 3, 2, 8, 8, 4)


@pytest.mark.parametrize(
    ("tokens", "blocks", "minibatch_blocks", "ring"),
    [(256, 7, 2, 2), (0, 3, 1, 1), (100, 0, 2, 2), (0, 0, 1, 1), (1000, 9, 4, 1)],
)
def test_step_rows_name_every_ticket_once_when_sizes_are(tokens: int, blocks: int, minibatch_blocks: int, ring: int):
    o = order.TaskOrder(GEOMETRY, tokens, blocks, minibatch_blocks, ring)
    next_ticket = 0
    for row in explain.step_rows(o):
        assert row["first_ticket"] == next_ticket
        assert row["last_ticket"] >= row["first_ticket"]
        next_ticket = row["last_ticket"] + 1
    assert next_ticket == o.num_tasks


def test_phase_rows_state_tasks_and_required_counts():
    o = order.TaskOrder(GEOMETRY, 256, 8, 2, 2)
    rows = {row["phase"]: row for row in explain.phase_rows(o)}
    assert sum(row["tasks"] for name, row in rows.items() if name != "dispatch") == o.num_tasks
    assert "x_routed_ready >= 32 (load)" in rows["gate_up"]["waits"]  # 16 groups of 8 rows in each of 2 blocks
    assert "hidden_ready >= 8 (load)" in rows["down"]["waits"]  # 4 columns, 2 store warps
    assert rows["down"]["publishes"] == "y_done +2; pushes_done +2"
    assert "exit of every peer" in rows["reduce"]["waits"]


def test_signal_rows_cover_all_signals():
    assert [row["signal"] for row in explain.signal_rows()] == [s.name for s in order.SIGNALS]
