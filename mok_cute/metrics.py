"""How far a result is from the fp32 reference, in units of the error that bf16 torch makes itself."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

LARGE_ROUTES, LARGE_ELEMENTS = 64, 4096  # from here on one set of inputs is a sample large enough
LARGE_LIMIT, POOLED_LIMIT = 1.1, 1.2
POOLED_SEEDS = 32
CHUNK_ELEMENTS = 1 << 24  # bounds the fp64 temporaries


@dataclass(frozen=True)
class ResultFigures:
    """The figures of one result, pooled over ranks.

    error_vs_torch_bf16   our error over bf16 torch's, Frobenius norms; None when both are exactly 0; inf when only
                          torch's is; nan when a result holds one
    limit                 the largest ratio that passes, for this many routes and elements
    seeds                 how many sets of inputs the ratio is pooled over
    """

    name: str
    ok: bool
    max_abs: float
    rel_l1: float
    error_vs_torch_bf16: float | None
    limit: float
    sha256: str
    routes: int
    elements: int
    seeds: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps. JSON knows no inf and no nan: both become the largest float, which fails too."""
        return {
            key: sys.float_info.max if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class ErrorPool:
    """Squared errors of one result over ranks and, for small results, over input seeds.

    Add one set of inputs at a time until ``complete``; ``ratio`` and ``ok`` then give the verdict. A large result is
    complete after the first set, a small one after 32.
    """

    def __init__(self) -> None:
        self.ours_squared = 0.0
        self.baseline_squared = 0.0
        self.seeds = 0
        self.routes = 0  # of the smallest set added, as are the elements
        self.elements = 0

    def add(
        self, ours: Sequence[Tensor], baseline: Sequence[Tensor], reference: Sequence[Tensor], *, routes: int
    ) -> None:
        """Add one set of inputs: a result's tensors on all ranks, and the routes of all ranks that reach an expert."""
        self.ours_squared += squared_error(ours, reference)
        self.baseline_squared += squared_error(baseline, reference)
        elements = sum(tensor.numel() for tensor in reference)
        self.routes = routes if self.seeds == 0 else min(routes, self.routes)
        self.elements = elements if self.seeds == 0 else min(elements, self.elements)
        self.seeds += 1

    @property
    def is_large(self) -> bool:
        return self.routes >= LARGE_ROUTES and self.elements >= LARGE_ELEMENTS

    @property
    def complete(self) -> bool:
        """Enough inputs for a verdict. A result without elements needs no more than one set."""
        if self.seeds == 0:
            return False
        return self.is_large or self.elements == 0 or self.seeds >= POOLED_SEEDS

    @property
    def limit(self) -> float:
        return LARGE_LIMIT if self.is_large else POOLED_LIMIT

    @property
    def ratio(self) -> float | None:
        """Our error over bf16 torch's; None when both are exactly 0, inf when only torch's is."""
        if self.ours_squared == 0 and self.baseline_squared == 0:
            return None
        if self.baseline_squared == 0:
            return math.nan if math.isnan(self.ours_squared) else math.inf
        return math.sqrt(self.ours_squared / self.baseline_squared)

    @property
    def ok(self) -> bool:
        """The verdict; an inf or nan ratio fails. Asked for before ``complete`` it is our own mistake."""
        assert self.complete, f"{self.seeds} of {POOLED_SEEDS} input sets added: too few for a verdict"
        return self.ratio is None or self.ratio <= self.limit


def error_vs_torch_bf16(
    ours: Sequence[Tensor], baseline: Sequence[Tensor], reference: Sequence[Tensor]
) -> float | None:
    """The ratio for one set of inputs: ||ours - reference|| / ||baseline - reference||, pooled over ranks."""
    pool = ErrorPool()
    pool.add(ours, baseline, reference, routes=0)
    return pool.ratio


def figures(name: str, ours: Sequence[Tensor], reference: Sequence[Tensor], pool: ErrorPool) -> ResultFigures:
    """The figures of a result: differences and hash of this set of inputs, ratio and verdict of the complete pool."""
    return ResultFigures(
        name=name,
        ok=pool.ok,
        max_abs=max_abs(ours, reference),
        rel_l1=rel_l1(ours, reference),
        error_vs_torch_bf16=pool.ratio,
        limit=pool.limit,
        sha256=sha256(ours),
        routes=pool.routes,
        elements=pool.elements,
        seeds=pool.seeds,
    )


def squared_error(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Sum over all ranks and elements of the squared difference, in fp64."""
    return sum((float((a - b).square().sum()) for a, b in _pairs(tensors, reference)), 0.0)


def max_abs(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest absolute difference; nan if there is one; 0 without elements."""
    largest = 0.0
    for a, b in _pairs(tensors, reference):
        here = float((a - b).abs().max())
        if math.isnan(here):
            return here
        largest = max(largest, here)
    return largest


def rel_l1(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Sum of absolute differences over the sum of absolute reference values; 0 when both are 0."""
    difference = magnitude = 0.0
    for a, b in _pairs(tensors, reference):
        difference += float((a - b).abs().sum())
        magnitude += float(b.abs().sum())
    if magnitude == 0:
        return 0.0 if difference == 0 else difference * math.inf
    return difference / magnitude


def sha256(tensors: Tensor | Sequence[Tensor]) -> str:
    """Hash of the elements' bytes in row-major order; of several tensors one after the other, in rank order."""
    digest = hashlib.sha256()
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        for chunk in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _pairs(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides in fp64, in chunks; shapes must agree, since broadcasting would compare the wrong elements."""
    for a, b in zip(tensors, reference, strict=True):
        assert a.shape == b.shape, f"a result of shape {tuple(a.shape)} against a reference of {tuple(b.shape)}"
        chunks = zip(
            a.detach().reshape(-1).split(CHUNK_ELEMENTS), b.detach().reshape(-1).split(CHUNK_ELEMENTS), strict=True
        )
        for a_chunk, b_chunk in chunks:
            if b_chunk.numel():
                yield a_chunk.double(), b_chunk.to(a_chunk.device).double()
