"""Memory that peers can reach: one block per rank and the table of all ranks' base addresses.

A kernel computes ``peer_table[rank] + offset``; it never sees who made the table. Providers differ only in how the
blocks are allocated and their addresses exchanged. Built here: ``local``, several virtual ranks in one process on one
GPU, real or virtual, each with its own block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mok_cute.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mok_cute.gpu import Gpu


@dataclass(frozen=True)
class SymmetricBlock:
    """This rank's peer-visible memory and where everybody's lies.

    memory       (bytes,) uint8 on the device, 1024-byte aligned
    peer_table   (ep_size,) int64 on the same device: base address of each rank's block
    """

    memory: torch.Tensor
    peer_table: torch.Tensor
    rank: int
    ep_size: int


def allocate_local(num_bytes: int, ep_size: int, gpu: Gpu) -> list[SymmetricBlock]:
    """Blocks for ``ep_size`` virtual ranks of this process on one GPU, zeroed."""
    import torch

    if ep_size < 1:
        raise ConfigError(f"ep_size={ep_size}: at least one rank is needed; pass ep_size >= 1.")
    memories = [gpu.zeros(num_bytes) for _ in range(ep_size)]
    for memory in memories:
        assert memory.data_ptr() % 512 == 0, "the allocator aligns to 512 bytes"
    table = [memory.data_ptr() for memory in memories]
    return [
        SymmetricBlock(memory, torch.tensor(table, dtype=torch.int64, device=gpu.torch_device), rank, ep_size)
        for rank, memory in enumerate(memories)
    ]
