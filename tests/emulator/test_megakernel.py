"""Our forward megakernel for sm_90a, compiled and launched as on a GPU, on the virtual one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_near, assert_same_bits

from mok_cute import reference
from mok_cute.compile import CompiledKernel, compile_forward
from mok_cute.config import RunConfig
from mok_cute.emulator.decode import Instruction, Kernel
from mok_cute.emulator.device import Deadlock, Grid, run
from mok_cute.emulator.execute import KernelFault
from mok_cute.emulator.virtual_device import VirtualDevice
from mok_cute.functional import ForwardContext, RoutedWeights, SharedWeights, allocate_context, fit_run
from mok_cute.launcher import forward_arguments
from mok_cute.schedule import Schedule, ScheduleState, build_schedule_reference, schedule_sizes
from mok_cute.settings import Settings
from mok_cute.shapes import MoEShape
from mok_cute.symmetric import SymmetricBlock
from mok_cute.templates.records import RECORD_WORDS
from mok_cute.workspace import Workspace, WorkspaceTable

pytestmark = pytest.mark.emulated

NUM_CTAS, COMM_CTAS = 2, 1


class VirtualRanks:
    """A layer of ``ep_size`` ranks on one virtual device, with small integers for inputs."""

    def __init__(self, device: VirtualDevice, shape: MoEShape, tokens: list[int], seed: int) -> None:
        self.device, self.shape = device, shape
        self.generator = torch.Generator().manual_seed(seed)
        ep_size, max_tokens = len(tokens), max(tokens)
        local = shape.local_experts(ep_size)
        kernel = compile_forward(shape, None, "sm_90a", local)
        self.workspaces = self.make_workspaces(kernel, ep_size, max_tokens)
        self.xs = [self.integers(count, shape.hidden) for count in tokens]
        self.ids = [
            torch.randint(0, shape.num_experts, (count, shape.topk), generator=self.generator) for count in tokens
        ]
        self.topk_weights = [torch.rand(count, shape.topk, generator=self.generator) for count in tokens]
        up, down = (local, shape.intermediate, shape.hidden), (local, shape.hidden, shape.intermediate)
        self.routed = [RoutedWeights(self.integers(*up), self.integers(*up), self.integers(*down)) for _ in tokens]
        s, h = shape.shared_intermediate, shape.hidden
        self.shared = SharedWeights(self.integers(s, h), self.integers(s, h), self.integers(h, s)) if s else None
        self.schedules: list[Schedule] = []
        for rank in range(ep_size):
            self.schedules.append(build_schedule_reference(self.ids, shape, rank, ep_size, max_tokens))

    def bf16(self, *size: int) -> torch.Tensor:
        count = int(torch.Size(size).numel())
        return self.device.zeros(2 * count).view(torch.bfloat16).view(size)

    def integers(self, *size: int) -> torch.Tensor:
        """Eighths of small integers: sums of products are exact."""
        return self.bf16(*size).copy_(torch.randint(-3, 4, size, generator=self.generator) / 8)

    def make_workspaces(self, kernel: CompiledKernel, ep_size: int, max_tokens: int) -> list[Workspace]:
        table = WorkspaceTable.of(self.shape, ep_size, max_tokens, RunConfig())
        memories = [self.device.zeros(table.symmetric_bytes) for _ in range(ep_size)]
        peers = torch.tensor([memory.data_ptr() for memory in memories])
        sizes = schedule_sizes(self.shape, ep_size, max_tokens)
        return [
            Workspace(
                shape=self.shape,
                kernel=kernel,
                settings=Settings.from_environment(),
                table=table,
                symmetric=SymmetricBlock(memory, peers, rank, ep_size),
                local=self.device.zeros(table.local_bytes),
                record=torch.zeros(RECORD_WORDS, dtype=torch.int32),
                run=RunConfig().fitted(table.max_rows),
                schedule_state=ScheduleState.allocate(sizes, "cpu"),
                gpu=self.device,
                stream=None,
                num_sms=NUM_CTAS,
            )
            for rank, memory in enumerate(memories)
        ]

    def forward(self) -> tuple[list[torch.Tensor], list[ForwardContext]]:
        ys, contexts, arguments = [], [], []
        for rank, workspace in enumerate(self.workspaces):
            chosen = fit_run(workspace, None)
            contexts.append(allocate_context(workspace, chosen))
            ys.append(self.bf16(*self.xs[rank].shape).fill_(float("nan")))
            values = forward_arguments(
                workspace,
                self.schedules[rank],
                self.xs[rank],
                ys[-1],
                self.topk_weights[rank],
                self.routed[rank],
                self.shared,
                None,
                contexts[-1],
                chosen,
                NUM_CTAS,
                COMM_CTAS,
            )
            arguments.append(values)
        # Nothing between the launches: torch waits for the device when it looks at a tensor.
        for rank, (workspace, values) in enumerate(zip(self.workspaces, arguments, strict=True)):
            workspace.kernel.function(*values, rank + 1)
        self.device.synchronize()
        return ys, contexts

    def check(self, ys: list[torch.Tensor], contexts: list[ForwardContext]) -> None:
        shared = None if self.shared is None else [self.shared] * len(ys)
        expected = reference.forward(self.shape, self.xs, self.ids, self.topk_weights, self.routed, shared)
        for rank, (y, want) in enumerate(zip(ys, expected, strict=True)):
            assert_near(y.float(), want.float(), 0.06, f"y of rank {rank}")
        for rank, (context, schedule) in enumerate(zip(contexts, self.schedules, strict=True)):
            rows = min(int(schedule.num_rows), len(context.gate))
            peers = schedule.peer_rank[:rows], schedule.peer_route[:rows]
            before = reference.routed_preactivations(self.shape, self.xs, self.ids, self.routed, *peers)
            for name in ("gate", "up", "x"):
                actual = getattr(context, name)[:rows]
                assert_same_bits(actual + 0.0, getattr(before, name).to(torch.bfloat16) + 0.0, f"{name} of rank {rank}")


TINY = MoEShape(hidden=128, intermediate=128, num_experts=2, topk=1)


@pytest.mark.parametrize(
    ("shape", "tokens", "seed"),
    [
        pytest.param(TINY, [5], 0, id="one_rank"),
        pytest.param(TINY, [7, 4], 1, id="two_ranks"),
        pytest.param(MoEShape(hidden=256, intermediate=128, num_experts=4, topk=2), [150, 9], 3, id="two_of_four"),
        pytest.param(MoEShape(128, 128, 2, 2, shared_intermediate=128), [3, 20], 2, id="shared_expert"),
    ],
)
def test_forward_agrees_with_the_reference(shape, tokens, seed):
    with VirtualDevice("sm_90a", num_sms=NUM_CTAS, seed=seed) as device:
        ranks = VirtualRanks(device, shape, tokens, seed)
        ranks.check(*ranks.forward())
        assert {name for name, _ in device.launched} == {"mok_forward_0"}


def pass_every_wait(instruction: Instruction) -> Instruction:
    """An mbarrier wait that looks and goes on whatever it sees."""
    put = instruction.operands[0]
    return replace(instruction, opcode="setp.eq.s32", operands=(put, "0", "0"), text=f"dropped: {instruction.text}")


def announce_too_much(instruction: Instruction) -> Instruction:
    *others, barrier, num_bytes = instruction.operands
    return replace(instruction, opcode="mbarrier.expect_tx.shared.b64", operands=(barrier, "16"))


def drop(instruction: Instruction) -> Instruction:
    return replace(instruction, opcode="membar.cta", operands=())


MUTANTS: dict[str, tuple[str, Any]] = {
    "mbarrier waits": ("mbarrier.try_wait", pass_every_wait),
    "announced bytes": ("mbarrier.arrive.expect_tx", announce_too_much),
    "signals": ("red.release.gpu.global.add", drop),
    "stores of epochs": ("st.release.sys.global", drop),
    "named barriers": ("bar.sync", drop),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_megakernel_is_noticed(mutant, monkeypatch):
    """Every instruction of a kind changed at once: a deadlock, a fault or wrong numbers in one of a few seeds."""
    prefix, change = MUTANTS[mutant]

    def broken(kernel: Kernel) -> Kernel:
        changed = [change(one) if one.opcode.startswith(prefix) else one for one in kernel.instructions]
        assert changed != kernel.instructions
        return replace(kernel, instructions=changed)

    def run_broken(grids: list[Grid], **options: Any) -> Any:
        copies = [replace(grid, kernel=broken(grid.kernel)) for grid in grids]
        return run(copies, max_steps=300_000, **options)

    monkeypatch.setattr("mok_cute.emulator.virtual_device.run", run_broken)
    noticed = None
    for seed in range(4):
        try:
            with VirtualDevice("sm_90a", num_sms=NUM_CTAS, seed=seed) as device:
                ranks = VirtualRanks(device, TINY, [7, 4], seed)
                ranks.check(*ranks.forward())
        except (Deadlock, KernelFault, AssertionError) as found:
            noticed = found
            break
    assert noticed is not None
