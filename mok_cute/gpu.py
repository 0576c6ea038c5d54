"""What host code asks of a GPU, and who answers: CUDA, or the virtual GPU. One code path serves both.

``find`` turns a device as users write it, ``cuda:0`` or ``virtual:sm_90a``, into the ``Gpu`` that workspaces, launches
and checks talk to. Its tensors are tensors of ``torch_device``; a virtual GPU's lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mok_cute.arch import Arch, num_sms
from mok_cute.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

VIRTUAL_PREFIX = "virtual:"  # before the name of an arch
MAX_CUDA_RANKS = 8  # hardware launch queues by default; two waiting ranks in one queue would block each other


class NamedArray(NamedTuple):
    """An array somewhere in a block of device memory, as reports call it; ``offset`` in bytes."""

    name: str
    offset: int
    shape: tuple[int, ...]
    item_bytes: int


class Gpu(Protocol):
    """One GPU, with the ranks of this process on it.

    engine      what runs its kernels, for reports
    max_ranks   ranks whose kernels can run at the same time
    """

    @property
    def arch(self) -> Arch: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def engine(self) -> str: ...

    @property
    def max_ranks(self) -> int: ...

    @property
    def product_name(self) -> str: ...

    def sms_per_rank(self, ep_size: int) -> int:
        """CTAs that each of so many ranks may keep resident."""

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8 of device memory, aligned to at least 512 bytes."""

    def pinned_words(self, count: int) -> torch.Tensor:
        """(count,) int32 of host memory that kernels write and the host reads at any time, zero."""

    def name_arrays(self, memory: torch.Tensor, arrays: Sequence[NamedArray]) -> None:
        """Say what lies in a block that ``zeros`` gave, for reports of a virtual GPU."""

    def new_stream(self) -> Any:
        """A stream of a rank's own; what it is, only ``rank_streams`` knows."""

    def rank_streams(self, own: Sequence[Any]) -> AbstractContextManager[list[int]]:
        """Raw handles of these streams, ordered behind the caller's current stream and before what follows on it.
        Without any: the current stream alone."""

    def synchronize(self) -> None:
        """Wait for all launches. A virtual GPU raises KernelError here for what a kernel did wrong."""

    def use_schedule(self, seed: int) -> str:
        """Let this seed decide the order of what a GPU leaves open, and return a name for that order. A real GPU
        decides by itself, and the name is empty."""


class CudaGpu:
    """A CUDA device of torch."""

    engine = "cuda"
    max_ranks = MAX_CUDA_RANKS

    def __init__(self, device: torch.device) -> None:
        import torch

        self.torch_device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.arch = Arch.of_device(self.torch_device)

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    def product_name(self) -> str:
        import torch

        return torch.cuda.get_device_name(self.torch_device)

    def sms_per_rank(self, ep_size: int) -> int:
        """The ranks share the SMs."""
        return num_sms(self.torch_device) // ep_size

    def zeros(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def pinned_words(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=torch.int32).pin_memory()

    def name_arrays(self, memory: torch.Tensor, arrays: Sequence[NamedArray]) -> None:
        pass

    def new_stream(self) -> torch.cuda.Stream:
        import torch

        return torch.cuda.Stream(self.torch_device)

    @contextmanager
    def rank_streams(self, own: Sequence[torch.cuda.Stream]) -> Iterator[list[int]]:
        import torch

        device = self.torch_device
        current = torch.cuda.current_stream(device)
        with torch.cuda.device(device) if torch.cuda.current_device() != device.index else nullcontext():
            for stream in own:
                stream.wait_stream(current)
            yield [stream.cuda_stream for stream in own] or [current.cuda_stream]
            for stream in own:
                current.wait_stream(stream)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.torch_device)

    def use_schedule(self, seed: int) -> str:
        return ""


def is_virtual(device: torch.device | str) -> bool:
    return isinstance(device, str) and device.startswith(VIRTUAL_PREFIX)


def torch_device(device: torch.device | str) -> torch.device:
    """Where the tensors of a device lie, whether or not there is such a device."""
    import torch

    return torch.device("cpu") if is_virtual(device) else torch.device(device)


@contextmanager
def entered(device: torch.device | str, **options: Any) -> Iterator[None]:
    """Inside, a virtual device of that name is current: the one around the caller, or one made for this block with
    these options of ``VirtualDevice``. A real device needs no entering."""
    if not is_virtual(device):
        yield
        return
    from mok_cute.emulator.virtual_device import VirtualDevice

    with nullcontext() if VirtualDevice.is_any_current() else VirtualDevice.of_name(str(device), **options):
        yield


def find(device: torch.device | str) -> Gpu:
    """The GPU of that name. A virtual one is that of the ``with VirtualDevice(...)`` block around the caller; without
    one it is made, for the rest of the process.

    Raises UnsupportedError for what no kernel runs on, ConfigError when another virtual device is current.
    """
    if is_virtual(device):
        from mok_cute.emulator.virtual_device import VirtualDevice

        return VirtualDevice.current_or_new(str(device))
    wanted = torch_device(device)
    if wanted.type != "cuda":
        raise UnsupportedError(
            f"device={device}: kernels run on a CUDA device or a virtual one; pass device='cuda' or "
            f"device='{VIRTUAL_PREFIX}sm_90a'."
        )
    return CudaGpu(wanted)
