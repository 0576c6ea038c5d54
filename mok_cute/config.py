"""How a shape is computed: what a compile fixes (KernelConfig) and what a launch may still change (RunConfig)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mok_cute.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from mok_cute.shapes import MoEShape
    from mok_cute.templates.scheduler.order import Geometry

BF16_BYTES = 2
ROW_BLOCK = 128  # rows of a GEMM tile that one CTA computes
TENSOR_CORES = {"sm_90a": "wgmma", "sm_100a": "tcgen05", "sm_103a": "tcgen05"}
MAX_STAGES = 6
ACC_STAGES = 2  # accumulators of tcgen05, 256 columns of tensor memory each
ANSWERS = 8  # requests for tasks that a cluster has under way while it drains
MAX_LOCAL_EXPERTS = 512  # the prefix table of experts lies in shared memory
MAX_EP_SIZE = 72


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time choices. Defaults are those of sm_90a, ``default`` has each machine's; ``validate`` names what
    cannot be built.

    tensor_core           "wgmma" (sm_90a) or "tcgen05" (sm_100a, sm_103a)
    ctas_per_tile         CTAs that compute a tile together, 128 rows each: 1, or with tcgen05 a pair
    tile_k                contraction elements per pipeline stage
    hidden_cols           hidden columns of a gate/up tile (it multiplies as many gate and as many up rows)
    down_cols             output columns of a down tile
    stages                depth of the operand ring in shared memory
    out_cols              columns that the epilogue hands to a store warp at once
    dispatch_slots        row pieces that one communication warp holds in shared memory
    roles                 (role, name) pairs that replace the default roles, see templates/registry.py
    """

    precision: str = "bf16"
    tensor_core: str = "wgmma"
    ctas_per_tile: int = 1
    hidden_cols: int = 128
    down_cols: int = 256
    tile_k: int = 64
    stages: int = 4
    out_cols: int = 64
    dispatch_slots: int = 4
    dispatch_piece_bytes: int = 4096
    rows_per_dispatch_group: int = 8
    raster_rows: int = 16
    roles: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        def rule(ok: bool, argument: str, text: str) -> None:
            if not ok:
                raise ConfigError(
                    f"KernelConfig: {argument}={getattr(self, argument)!r}: {text}; set KernelConfig.{argument}."
                )

        rule(self.precision in ("bf16",), "precision", "only bf16 is built so far")
        rule(self.tensor_core in TENSOR_CORES.values(), "tensor_core", "one of wgmma, tcgen05")
        pairs = (1, 2) if self.tensor_core == "tcgen05" else (1,)
        rule(self.ctas_per_tile in pairs, "ctas_per_tile", f"one of {pairs} with {self.tensor_core}")
        rule(self.hidden_cols == 128, "hidden_cols", "two halves of one 256-column tile: must be 128")
        rule(self.down_cols == 2 * self.hidden_cols, "down_cols", "both GEMMs share one tile: must be 256")
        rule(self.tile_k == 64, "tile_k", "one 128-byte swizzle row of bf16: must be 64")
        rule(2 <= self.stages <= MAX_STAGES, "stages", f"2 to {MAX_STAGES} stages")
        rule(self.out_cols == 64, "out_cols", "one 128-byte swizzle row of bf16: must be 64")
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
        rule(self.raster_rows >= 1, "raster_rows", "at least one row block")

    @classmethod
    def default(cls, arch_name: str) -> KernelConfig:
        """What is built on this machine when nothing is asked for."""
        if TENSOR_CORES.get(arch_name) == "tcgen05":
            return cls(tensor_core="tcgen05", ctas_per_tile=2, stages=6, raster_rows=8)
        return cls()

    @property
    def tile_rows(self) -> int:
        """Token rows of a tile; every expert's segment of routed rows is padded to a multiple of it."""
        return ROW_BLOCK * self.ctas_per_tile

    @property
    def warps(self) -> int:
        """Warps of a CTA, see templates/warps.py."""
        return 12

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def epilogue_warps(self) -> int:
        """Warps of a CTA that hold or read accumulators; half of them write each of its two 64-row parts."""
        return {"wgmma": 8, "tcgen05": 4}[self.tensor_core]

    @property
    def store_warps(self) -> int:
        return 2

    @property
    def uses_launch_control(self) -> bool:
        """Whether tasks are the clusters of the grid itself, or tickets for those that fit the GPU."""
        return ("scheduler", "launch_control") in self.roles

    @property
    def tokens_per_reduce(self) -> int:
        """Tokens of a reduce task: one for each epilogue warp of the CTAs that share it."""
        return self.epilogue_warps * self.ctas_per_tile

    @property
    def weight_rows(self) -> int:
        """Weight rows (columns of a tile) that one CTA brings to shared memory."""
        return self.down_cols // self.ctas_per_tile

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
            arrivals_per_tile=self.store_warps * self.ctas_per_tile,
            rows_per_dispatch_group=self.rows_per_dispatch_group,
            tokens_per_reduce=self.tokens_per_reduce,
            raster_rows=self.raster_rows,
        )

    def smem_plan(self, shape: MoEShape, local_experts: int) -> dict[str, int]:
        """Bytes of shared memory per CTA by purpose. Dispatch pieces lie in the operand ring, which is idle then."""
        operand = (ROW_BLOCK + self.weight_rows) * self.tile_k * BF16_BYTES
        barriers = 2 * self.stages + 2 + 4 * self.store_warps + self.warps * self.dispatch_slots
        plan = {
            "operand ring (A and B stages)": self.stages * operand,
            "epilogue staging": 2 * ROW_BLOCK * self.out_cols * BF16_BYTES,
            "expert prefix table": 4 * local_experts,
            "barriers": 8 * barriers,
            "task slot and messages": 64 + 2 * self.store_warps * 32,
        }
        if self.tensor_core == "tcgen05":
            plan["barriers"] += 8 * (2 * ACC_STAGES + ANSWERS + 3)
            plan["answers of the task source"] = 16 * ANSWERS + 16
        return plan

    def validate(self, shape: MoEShape, arch_name: str, smem_limit: int, local_experts: int) -> None:
        """Raise UnsupportedError for what this configuration cannot build, naming argument, value, rule and change."""
        wanted = TENSOR_CORES.get(arch_name)
        if self.tensor_core != wanted:
            raise UnsupportedError(
                f"tensor_core={self.tensor_core}: {arch_name} has {wanted}; use KernelConfig.default({arch_name!r})."
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

    minibatch     routed rows handed over at once between dispatch and compute; a multiple of 128, and rounded up to
                  whole tiles where those have more rows
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
    def ring_minibatches(self) -> int:
        return self.macrobatch // self.minibatch

    def fitted(self, max_rows: int, row_block: int = ROW_BLOCK) -> RunConfig:
        """The same choices in whole tiles of ``row_block`` rows, with the rings no longer than the rows that can exist
        (at least one minibatch)."""
        rows = max(row_block, max_rows)
        minibatch = min(-(-self.minibatch // row_block), -(-rows // row_block)) * row_block
        needed = -(-rows // minibatch) * minibatch
        macrobatch = max(minibatch, min(self.macrobatch // minibatch * minibatch, needed))
        return replace(self, minibatch=minibatch, macrobatch=macrobatch)
