"""The machines we build for and their limits. ``Arch.of_device`` and ``num_sms`` are the only questions to a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mok_cute.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arch:
    """One compilation target. Limits are those of the CUDA programming guide for its compute capability."""

    name: str
    capability: tuple[int, int]
    smem_bytes_per_cta: int
    registers_per_sm: int
    tmem_columns: int  # of 32-bit words in 128 lanes; 0: no tensor memory, accumulators live in registers
    max_cluster: int  # CTAs in a cluster that every device of the kind runs
    max_cluster_opt_in: int  # CTAs in a cluster when the kernel allows a size that not every device can place

    @classmethod
    def of_device(cls, device: torch.device | str | int) -> Arch:
        """The target of a CUDA device; UnsupportedError if we do not build for it."""
        import torch

        capability = torch.cuda.get_device_capability(device)
        for arch in ARCHS.values():
            if arch.capability == capability:
                return arch
        known = ", ".join(f"{major}.{minor}" for major, minor in (arch.capability for arch in ARCHS.values()))
        raise UnsupportedError(
            f"device={device} ({torch.cuda.get_device_name(device)}): compute capability {capability[0]}."
            f"{capability[1]} is none of {known}; use such a GPU."
        )


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", (9, 0), 232448, 65536, 0, 8, 16),
        Arch("sm_100a", (10, 0), 232448, 65536, 512, 8, 16),
        Arch("sm_103a", (10, 3), 232448, 65536, 512, 8, 16),
    )
}


def get(name: str) -> Arch:
    """The target of that name; UnsupportedError names the ones there are."""
    if name not in ARCHS:
        raise UnsupportedError(f"arch={name}: not one of {', '.join(ARCHS)}; choose one of them.")
    return ARCHS[name]


def num_sms(device: torch.device | str | int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
