"""The workspace: one table says which buffers exist, who writes and reads them and where they lie.

The launcher takes addresses from it, the kernel's counters are laid out by it, ``explain`` prints it. One workspace
serves all layers of a model: it holds no state between calls except epochs, which the kernels advance themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mok_cute.config import MAX_EP_SIZE, ROW_BLOCK, RunConfig
from mok_cute.errors import ConfigError, PeerTimeoutError, TimeoutReport
from mok_cute.gpu import NamedArray
from mok_cute.schedule import schedule_symmetric_bytes
from mok_cute.templates.launch_args import (
    CONTROL_WORDS,
    COUNTER_ARRAYS,
    CTAS_DONE,
    ENTERED,
    PEER_SIGNAL_BYTES,
    PUSHES_DONE,
    SHARED_Y_DONE,
    TICKET,
    X_STAGED,
)

if TYPE_CHECKING:
    import torch

    from mok_cute.compile import CompiledKernel
    from mok_cute.gpu import Gpu
    from mok_cute.schedule import ScheduleState
    from mok_cute.settings import Settings
    from mok_cute.shapes import MoEShape
    from mok_cute.symmetric import SymmetricBlock

ALIGNMENT = 1024  # bytes; more than any TMA or bulk copy asks for
BF16, INT32, BYTES = "bf16", "int32", "uint8"
ITEM_BYTES = {BF16: 2, INT32: 4, BYTES: 1}
COUNTER_SETS = 2


@dataclass(frozen=True)
class Buffer:
    """One buffer of a rank. ``scope``: symmetric (peers reach it) or local; ``offset`` in bytes within that block."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scope: str
    writer: str
    reader: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class CounterLayout:
    """Word offsets of the counter arrays inside a set, see ``templates/scheduler/order.py`` for their meaning."""

    x_routed_ready: int
    hidden_ready: int
    shared_hidden_ready: int
    y_done: int
    set_words: int

    @classmethod
    def of(cls, max_blocks: int, token_blocks: int) -> CounterLayout:
        offsets = [COUNTER_ARRAYS]
        for length in (max_blocks, max_blocks, token_blocks, max_blocks):
            offsets.append(offsets[-1] + -(-length // 32) * 32)
        return cls(*offsets)

    def arrays(self) -> dict[str, tuple[int, int]]:
        """First word and length of every array of a set; single counters are arrays of one."""
        singles = {
            "ticket": TICKET,
            "x_staged": X_STAGED,
            "entered": ENTERED,
            "pushes_done": PUSHES_DONE,
            "shared_y_done": SHARED_Y_DONE,
            "ctas_done": CTAS_DONE,
        }
        firsts = [self.x_routed_ready, self.hidden_ready, self.shared_hidden_ready, self.y_done, self.set_words]
        names = ("x_routed_ready", "hidden_ready", "shared_hidden_ready", "y_done")
        arrays = {name: (word, 1) for name, word in singles.items()}
        arrays |= {name: (first, end - first) for name, first, end in zip(names, firsts, firsts[1:], strict=False)}
        return arrays


@dataclass(frozen=True)
class WorkspaceTable:
    """Every buffer of one rank with its place; sizes in bytes of the two blocks."""

    buffers: dict[str, Buffer]
    counters: CounterLayout
    max_tokens: int
    max_rows: int
    ring_rows: int
    symmetric_bytes: int
    local_bytes: int

    @classmethod
    def of(
        cls, shape: MoEShape, ep_size: int, max_tokens: int, run: RunConfig, row_block: int = ROW_BLOCK
    ) -> WorkspaceTable:
        """``row_block``: rows of a GEMM tile."""
        if not 1 <= ep_size <= MAX_EP_SIZE:
            raise ConfigError(f"ep_size={ep_size}: between 1 and {MAX_EP_SIZE}; pass the number of ranks.")
        if max_tokens < 0:
            raise ConfigError(f"max_tokens={max_tokens}: at least 0; pass the largest token count of any rank.")
        max_rows = max_routed_rows(shape, ep_size, max_tokens, row_block)
        ring_rows = run.fitted(max_rows, row_block).macrobatch
        tokens = max(max_tokens, 1)
        counters = CounterLayout.of(max_rows // row_block, -(-tokens // row_block))
        flags = (ep_size * PEER_SIGNAL_BYTES,)
        sym, loc = "symmetric", "local"
        rows = [
            Buffer("x", (tokens, shape.hidden), BF16, sym, "dispatch (staging) or the caller", "peers' dispatch"),
            Buffer("combine", (tokens * shape.topk, shape.hidden), BF16, sym, "peers' down tiles", "reduce"),
            Buffer("entry", flags, BYTES, sym, "peers' dispatch leader", "dispatch"),
            Buffer("exit", flags, BYTES, sym, "peers' last push", "scheduler before reduce"),
            Buffer(
                "schedule_exchange",
                (schedule_symmetric_bytes(shape, ep_size, tokens),),
                BYTES,
                sym,
                "publish",
                "peers' count and place",
            ),
            Buffer("x_ring", (ring_rows, shape.hidden), BF16, loc, "dispatch", "gate/up"),
            Buffer("hidden_ring", (ring_rows, shape.intermediate), BF16, loc, "gate/up", "down"),
            Buffer("counters", (COUNTER_SETS, counters.set_words), INT32, loc, "all roles", "all roles"),
            Buffer("control", (CONTROL_WORDS,), INT32, loc, "last CTA, waits that give up", "all roles"),
        ]
        if shape.shared_intermediate:
            rows += [
                Buffer(
                    "shared_hidden",
                    (tokens, shape.shared_intermediate),
                    BF16,
                    loc,
                    "shared gate/up",
                    "shared down",
                ),
                Buffer("shared_y", (tokens, shape.hidden), BF16, loc, "shared down", "reduce"),
            ]
        ends = {sym: 0, loc: 0}
        placed = {}
        for b in rows:
            offset = ends[b.scope]
            placed[b.name] = Buffer(b.name, b.shape, b.dtype, b.scope, b.writer, b.reader, offset)
            ends[b.scope] = -(-(offset + b.num_bytes) // ALIGNMENT) * ALIGNMENT
        return cls(placed, counters, max_tokens, max_rows, ring_rows, ends[sym], ends[loc])

    def named_arrays(self, scope: str, rank: int) -> list[NamedArray]:
        """What lies in a rank's symmetric or local block, as reports call it: buffers, and signals word by word."""
        named = []
        for b in self.buffers.values():
            if b.scope != scope:
                continue
            if b.name in ("entry", "exit"):
                peers = b.num_bytes // PEER_SIGNAL_BYTES
                named.append(NamedArray(f"rank {rank} {b.name}", b.offset, (peers,), PEER_SIGNAL_BYTES))
            elif b.name == "counters":
                for number in range(COUNTER_SETS):
                    for name, (first, length) in self.counters.arrays().items():
                        offset = b.offset + ITEM_BYTES[INT32] * (number * self.counters.set_words + first)
                        named.append(NamedArray(f"rank {rank} {name}", offset, (length,), ITEM_BYTES[INT32]))
            else:
                named.append(NamedArray(f"rank {rank} {b.name}", b.offset, b.shape, ITEM_BYTES[b.dtype]))
        return named


def max_routed_rows(shape: MoEShape, ep_size: int, max_tokens: int, row_block: int = ROW_BLOCK) -> int:
    """Rows of a rank for the worst routing: every route of every rank here, each expert's segment padded."""
    routes = ep_size * max_tokens * shape.topk
    return -(-routes // row_block) * row_block + row_block * shape.local_experts(ep_size)


def describe_workspace(
    shape: MoEShape, ep_size: int, max_tokens: int, run: RunConfig, row_block: int = ROW_BLOCK
) -> list[dict[str, Any]]:
    """One row per buffer, for ``explain``; nothing is allocated."""
    table = WorkspaceTable.of(shape, ep_size, max_tokens, run, row_block)
    return [
        {
            "buffer": b.name,
            "shape": list(b.shape),
            "dtype": b.dtype,
            "scope": b.scope,
            "writer": b.writer,
            "reader": b.reader,
            "bytes": b.num_bytes,
        }
        for b in table.buffers.values()
    ]


@dataclass(frozen=True)
class Workspace:
    """One rank's memory. Made by ``functional.create_workspaces``; used by one stream at a time.

    launches   kernels launched through this workspace, by kind: schedule, forward
    """

    shape: MoEShape
    kernel: CompiledKernel
    settings: Settings
    table: WorkspaceTable
    symmetric: SymmetricBlock
    local: torch.Tensor  # (local_bytes,) uint8
    record: torch.Tensor  # (RECORD_WORDS,) int32, host memory that the kernel writes
    run: RunConfig
    schedule_state: ScheduleState
    gpu: Gpu
    stream: Any  # this virtual rank's own stream, see ``Gpu.new_stream``; None: the caller's current stream
    num_sms: int  # CTAs this rank may keep resident
    launches: Counter[str] = field(default_factory=Counter)
    schedule_kernels: dict[int, dict[str, Callable[..., object]]] = field(default_factory=dict)  # by bits of an id
    schedule_rows: dict[int, int] = field(default_factory=dict)  # rows of topk_ids by address of a schedule's local_ids

    @property
    def rank(self) -> int:
        return self.symmetric.rank

    @property
    def ep_size(self) -> int:
        return self.symmetric.ep_size

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer as a tensor of its shape and dtype."""
        import torch

        b = self.table.buffers[name]
        block = self.symmetric.memory if b.scope == "symmetric" else self.local
        dtype = {BF16: torch.bfloat16, INT32: torch.int32, BYTES: torch.uint8}[b.dtype]
        return block[b.offset : b.offset + b.num_bytes].view(dtype).view(b.shape)

    @property
    def x(self) -> torch.Tensor:
        """(max_tokens, hidden) bf16 in symmetric memory: an x written here is not copied again by forward."""
        return self.tensor("x")

    def address(self, name: str) -> int:
        """Byte address of a local buffer, or of this rank's copy of a symmetric one."""
        b = self.table.buffers[name]
        block = self.symmetric.memory if b.scope == "symmetric" else self.local
        return int(block.data_ptr()) + b.offset

    def name_arrays(self) -> None:
        """Tell the GPU what lies where, for its reports."""
        self.gpu.name_arrays(self.symmetric.memory, self.table.named_arrays("symmetric", self.rank))
        self.gpu.name_arrays(self.local, self.table.named_arrays("local", self.rank))

    @cached_property
    def record_words(self) -> Any:
        """The record as the host sees it at any time: a NumPy view, whose reads cost next to nothing."""
        return self.record.numpy()

    @cached_property
    def device(self) -> torch.device:
        return self.local.device

    @cached_property
    def fixed_arguments(self) -> dict[str, int]:
        """The launch arguments that never change, see ``templates/launch_args.py``; made once, on first use."""
        offsets = {name: self.table.buffers[name].offset for name in ("x", "combine", "entry", "exit")}
        counters = self.table.counters
        anything = self.address("x_ring")  # a valid address for descriptors that no task uses
        has_shared = "shared_y" in self.table.buffers
        return {
            "peer_table": self.symmetric.peer_table.data_ptr(),
            "rank": self.rank,
            "ep_size": self.ep_size,
            "x_offset": offsets["x"],
            "combine_offset": offsets["combine"],
            "entry_offset": offsets["entry"],
            "exit_offset": offsets["exit"],
            "x_ring": anything,
            "shared_y": self.address("shared_y") if has_shared else anything,
            "counters": self.address("counters"),
            "set_words": counters.set_words,
            "x_routed_ready": counters.x_routed_ready,
            "hidden_ready": counters.hidden_ready,
            "shared_hidden_ready": counters.shared_hidden_ready,
            "y_done": counters.y_done,
            "control": self.address("control"),
            "record": self.record.data_ptr(),
            "token_rows": max(1, self.table.max_tokens),
            "ring_rows": self.table.ring_rows,
            "hidden_ring": self.address("hidden_ring"),
            "shared_hidden": self.address("shared_hidden") if has_shared else anything,
        }

    def raise_if_failed(self) -> None:
        """Raise the error of an earlier launch whose record has arrived, without waiting for anything."""
        if self.record_words[0]:
            report = read_record(self.record)
            assert report is not None
            raise PeerTimeoutError(report)

    def check(self) -> None:
        """Wait for this rank's work and raise PeerTimeoutError if a wait in it gave up."""
        self.gpu.synchronize()
        self.raise_if_failed()

    def reset(self) -> None:
        """Forget a failed launch: zero counters, epochs and signals. All ranks must do so before the next launch."""
        self.gpu.synchronize()
        self.record.zero_()
        for name in ("counters", "control", "entry", "exit", "schedule_exchange"):
            self.tensor(name).zero_()
        self.schedule_state.reset()
        self.gpu.synchronize()


def read_record(record: torch.Tensor) -> TimeoutReport | None:
    """The record a wait left in host memory, None when there is none."""
    from mok_cute.templates import records

    if not int(record[records.STATUS]):
        return None
    words = record.tolist()
    signal = records.signal_name(words[records.SIGNAL])
    index = words[records.INDEX]
    age_ns = (words[records.AGE_NS] & 0xFFFFFFFF) | (words[records.AGE_NS + 1] << 32)
    return TimeoutReport(
        rank=words[records.RANK],
        cta=words[records.CTA],
        role=records.ROLE_NAMES.get(words[records.ROLE], str(words[records.ROLE])),
        signal=signal,
        index=index,
        seen=words[records.SEEN],
        expected=words[records.EXPECTED],
        age_s=age_ns * 1e-9,
        missing_rank=index if signal in records.PER_PEER else None,
    )


def raise_if_any_failed(workspaces: Iterable[Workspace]) -> None:
    for workspace in workspaces:
        workspace.raise_if_failed()
