"""How a shape is computed: what a compile fixes (KernelConfig) and what a launch may still change (RunConfig)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mok_cute.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from mok_cute.shapes import MoEShape
    from mok_cute.templates.scheduler.order import Geometry

BF16_BYTES = 2
ROW_BLOCK = 128  # rows of a GEMM tile; every expert's segment of routed rows is padded to a multiple of it
MAX_LOCAL_EXPERTS = 512  # the prefix table of experts lies in shared memory
MAX_EP_SIZE = 72


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time choices. Defaults are those of sm_90a; ``validate`` names what cannot be built.

    tile_rows, tile_k     GEMM tile: token rows and contraction elements per pipeline stage
    hidden_cols           hidden columns of a gate/up tile (it multiplies as many gate and as many up rows)
    down_cols             output columns of a down tile
    stages                depth of the operand ring in shared memory
    out_cols              columns that the epilogue hands to a store warp at once
    dispatch_slots        row pieces that one communication warp holds in shared memory
    roles                 (role, name) pairs that replace the default roles, see templates/registry.py
    """

    precision: str = "bf16"
    tile_rows: int = ROW_BLOCK
    hidden_cols: int = 128
    down_cols: int = 256
    tile_k: int = 64
    stages: int = 4
    out_cols: int = 64
    consumer_warpgroups: int = 2
    dispatch_slots: int = 4
    dispatch_piece_bytes: int = 4096
    rows_per_dispatch_group: int = 8
    tokens_per_reduce: int = 8
    raster_rows: int = 16
    roles: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        def rule(ok: bool, argument: str, text: str) -> None:
            if not ok:
                raise ConfigError(
                    f"KernelConfig: {argument}={getattr(self, argument)!r}: {text}; set KernelConfig.{argument}."
                )

        rule(self.precision in ("bf16",), "precision", "only bf16 is built so far")
        rule(self.tile_rows == ROW_BLOCK, "tile_rows", f"segments of experts are padded to {ROW_BLOCK} rows")
        rule(self.hidden_cols == 128, "hidden_cols", "two halves of one 256-column wgmma tile: must be 128")
        rule(self.down_cols == 2 * self.hidden_cols, "down_cols", "both GEMMs share one tile: must be 256")
        rule(self.tile_k == 64, "tile_k", "one 128-byte swizzle row of bf16: must be 64")
        rule(2 <= self.stages <= 4, "stages", "2 to 4 stages of 48 KiB fit in shared memory")
        rule(self.out_cols == 64, "out_cols", "one 128-byte swizzle row of bf16: must be 64")
        rule(self.consumer_warpgroups == 2, "consumer_warpgroups", "64 rows each of a 128-row tile: must be 2")
        rule(3 <= self.dispatch_slots <= 8, "dispatch_slots", "3 to 8 pieces per communication warp")
        rule(
            self.dispatch_piece_bytes % 128 == 0 and 128 <= self.dispatch_piece_bytes,
            "dispatch_piece_bytes",
            "a positive multiple of 128",
        )
        rule(
            1 <= self.rows_per_dispatch_group <= 32 and self.tile_rows % self.rows_per_dispatch_group == 0,
            "rows_per_dispatch_group",
            "a divisor of 128 up to 32: one lane holds the address of one row",
        )
        rule(self.tokens_per_reduce == 8, "tokens_per_reduce", "one token per consumer warp: must be 8")
        rule(self.raster_rows >= 1, "raster_rows", "at least one row block")

    @property
    def threads(self) -> int:
        return 128 * (self.consumer_warpgroups + 1)

    @property
    def warps(self) -> int:
        return self.threads // 32

    def piece_bytes(self, shape: MoEShape) -> int:
        """Bytes of one piece of a row in dispatch: the row cut into equal parts of at most dispatch_piece_bytes,
        each a multiple of 16 bytes as bulk copies demand."""
        row = shape.hidden * BF16_BYTES
        pieces = -(-row // self.dispatch_piece_bytes)
        while row % (16 * pieces):
            pieces += 1
        return row // pieces

    def geometry(self, shape: MoEShape) -> Geometry:
        """The static part of the task order for this shape."""
        from mok_cute.templates.scheduler.order import Geometry

        has_shared = shape.shared_intermediate > 0
        down_cols = -(-shape.hidden // self.down_cols)
        return Geometry(
            tile_rows=self.tile_rows,
            gate_up_cols=shape.intermediate // self.hidden_cols,
            down_cols=down_cols,
            shared_gate_up_cols=shape.shared_intermediate // self.hidden_cols,
            shared_down_cols=down_cols if has_shared else 0,
            arrivals_per_tile=self.consumer_warpgroups,
            rows_per_dispatch_group=self.rows_per_dispatch_group,
            tokens_per_reduce=self.tokens_per_reduce,
            raster_rows=self.raster_rows,
        )

    def smem_plan(self, shape: MoEShape, local_experts: int) -> dict[str, int]:
        """Bytes of shared memory per CTA by purpose. Dispatch pieces lie in the operand ring, which is idle then."""
        operand = self.tile_rows * self.tile_k * BF16_BYTES + self.down_cols * self.tile_k * BF16_BYTES
        staging = self.consumer_warpgroups * 2 * (self.tile_rows // 2) * self.out_cols * BF16_BYTES
        barriers = 8 * (2 * self.stages + 2 + 4 * self.consumer_warpgroups + self.warps * self.dispatch_slots)
        return {
            "operand ring (A and B stages)": self.stages * operand,
            "epilogue staging": staging,
            "expert prefix table": 4 * local_experts,
            "barriers": barriers,
            "task slots": 64 * (1 + 2 * self.consumer_warpgroups),
        }

    def validate(self, shape: MoEShape, arch_name: str, smem_limit: int, local_experts: int) -> None:
        """Raise UnsupportedError for what this configuration cannot build, naming argument, value, rule and change."""
        if arch_name != "sm_90a":
            raise UnsupportedError(
                f"arch={arch_name}: the forward megakernel is built for sm_90a; choose --arch sm_90a."
            )
        if local_experts > MAX_LOCAL_EXPERTS:
            raise UnsupportedError(
                f"num_experts={shape.num_experts}: {local_experts} experts per rank exceed {MAX_LOCAL_EXPERTS}; "
                "use more ranks."
            )
        total = sum(self.smem_plan(shape, local_experts).values())
        if total > smem_limit:
            raise UnsupportedError(
                f"stages={self.stages}: {total} bytes of shared memory exceed {smem_limit} on {arch_name}; "
                "lower KernelConfig.stages."
            )


@dataclass(frozen=True)
class RunConfig:
    """Run-time choices: they change speed and memory, never results.

    minibatch     routed rows handed over at once between dispatch and compute; a multiple of 128
    macrobatch    routed rows that the rings hold; a multiple of minibatch
    comm_sms      CTAs that move rows before they join the others in computing, fewer than the rank's CTAs; None:
                  16, but at most a quarter of them
    num_sms       CTAs of the launch; None: all SMs of the device, divided by the ranks that share it
    """

    minibatch: int = 2048
    macrobatch: int = 65536
    comm_sms: int | None = None
    num_sms: int | None = None

    def __post_init__(self) -> None:
        def rule(ok: bool, argument: str, text: str) -> None:
            if not ok:
                raise ConfigError(f"RunConfig: {argument}={getattr(self, argument)!r}: {text}; set {argument}.")

        rule(self.minibatch > 0 and self.minibatch % ROW_BLOCK == 0, "minibatch", f"a positive multiple of {ROW_BLOCK}")
        rule(
            self.macrobatch > 0 and self.macrobatch % self.minibatch == 0,
            "macrobatch",
            f"a positive multiple of minibatch={self.minibatch}",
        )
        rule(self.comm_sms is None or self.comm_sms >= 1, "comm_sms", "at least one CTA moves rows")
        rule(self.num_sms is None or self.num_sms >= 2, "num_sms", "at least two CTAs: one moves rows, one computes")

    @property
    def minibatch_blocks(self) -> int:
        return self.minibatch // ROW_BLOCK

    @property
    def ring_minibatches(self) -> int:
        return self.macrobatch // self.minibatch

    def fitted(self, max_rows: int) -> RunConfig:
        """The same choices with the rings no longer than the rows that can exist (at least one minibatch)."""
        rows = max(ROW_BLOCK, max_rows)
        minibatch = min(self.minibatch, -(-rows // ROW_BLOCK) * ROW_BLOCK)
        needed = -(-rows // minibatch) * minibatch
        macrobatch = max(minibatch, min(self.macrobatch // minibatch * minibatch, needed))
        return replace(self, minibatch=minibatch, macrobatch=macrobatch)
