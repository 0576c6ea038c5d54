"""Warp roles of a CTA and their registers, one table per machine."""

from enum import IntEnum


class Sm90Warps(IntEnum):
    """First warp of each role on sm_90a: 12 warps, three warpgroups.

    warpgroup 0   load, scheduler and two store warps; few registers
    warpgroup 1   multiplies rows 0..63 of a tile, served by store warp 2
    warpgroup 2   multiplies rows 64..127, served by store warp 3
    """

    LOAD = 0
    SCHEDULER = 1
    STORE = 2
    CONSUMER = 4


SM90_WARPS = 12
# 512 registers for each triple of threads, one per warpgroup (64 Ki registers, 384 threads, multiples of 8).
SM90_REGISTERS_SERVICE = 72
SM90_REGISTERS_CONSUMER = 216


class Sm100Warps(IntEnum):
    """First warp of each role on sm_100a and sm_103a: 12 warps, three warpgroups.

    warpgroup 0   load, scheduler and two store warps
    warpgroup 1   epilogue; warp 4 + q reads lanes 32 * q .. 32 * q + 31 of tensor memory, which are rows of the tile
    warpgroup 2   MMA in its first warp, which issues for both CTAs of a pair, in CTA 0; the others only dispatch
    """

    LOAD = 0
    SCHEDULER = 1
    STORE = 2
    EPILOGUE = 4
    MMA = 8


SM100_WARPS = 12
# 512 registers for each triple of threads, as above.
SM100_REGISTERS_SERVICE = 96
SM100_REGISTERS_EPILOGUE = 240
SM100_REGISTERS_MMA = 152
