"""Assertions on tensors that name the first wrong element, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAME_WIDTH_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Equal dtype, shape and bits; equal NaNs are equal, while 0.0 and -0.0 are not."""
    _assert_same_kind(actual, expected, name)
    width = SAME_WIDTH_INTEGER[actual.element_size()]
    wrong = actual.detach().contiguous().view(width) != expected.detach().to(actual.device).contiguous().view(width)
    _report(wrong, actual, expected, name, "bits differ")


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, name: str = "tensor") -> None:
    """Every element within ``tolerance`` times the root mean square of ``expected``: relative to the whole result,
    since an element that cancelled to nearly zero carries the error of its terms. NaN is near to nothing."""
    _assert_same_kind(actual, expected, name)
    exact = expected.detach().to(actual.device).double()
    bound = tolerance * float(exact.square().mean().sqrt()) if exact.numel() else 0.0
    wrong = ~((actual.detach().double() - exact).abs() <= bound)
    _report(wrong, actual, expected, name, f"differs by more than {bound:.3g} ({tolerance:g} of the root mean square)")


def assert_all_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor], name: str = "tensor") -> None:
    assert len(actual) == len(expected), f"{name}: {len(actual)} tensors, expected {len(expected)}"
    for rank, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(one, other, f"{name} of rank {rank}")


def assert_all_near(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, name: str = "tensor"
) -> None:
    assert len(actual) == len(expected), f"{name}: {len(actual)} tensors, expected {len(expected)}"
    for rank, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_near(one, other, tolerance, f"{name} of rank {rank}")


def _assert_same_kind(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"


def _report(wrong: Tensor, actual: Tensor, expected: Tensor, name: str, what: str) -> None:
    if not wrong.any():
        return
    at = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{name}{list(at)}: {what}: {actual[at].item()!r}, expected {expected[at].item()!r}; "
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
    )
