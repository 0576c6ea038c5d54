"""How far a result is from the truth, as a multiple of what bf16 torch itself is off.

``error_vs_torch_bf16`` is the ratio of two Frobenius norms over all ranks: ours minus the FP32 reference, and the bf16
baseline minus the FP32 reference. A small result gives a noisy ratio, so it is pooled over 32 input seeds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mok_cute.errors import ConfigError

LARGE_ROUTES = 64
LARGE_ELEMENTS = 4096
LARGE_LIMIT = 1.1
SMALL_LIMIT = 1.2
SMALL_SEEDS = 32

_CHUNK_ELEMENTS = 1 << 24  # keeps the FP64 temporaries of a large result small


@dataclass(frozen=True)
class ResultFigures:
    """Figures of one result, over all ranks and all pooled seeds.

    max_abs              largest absolute difference from the FP32 reference
    rel_l1               sum of absolute differences over the sum of the reference's absolute values
    error_vs_torch_bf16  None where both errors are exactly 0
    limit                what the ratio may be
    seeds                how many input seeds were pooled
    sha256               of the bytes of all ranks' tensors, rank by rank and seed by seed
    ok, reason           the verdict; the reason is empty where ok
    """

    max_abs: float
    rel_l1: float
    error_vs_torch_bf16: float | None
    limit: float
    seeds: int
    sha256: str
    ok: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values; JSON has no NaN and no infinity, so they become the words "nan" and "inf"."""
        fields = asdict(self)
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }


class ErrorPool:
    """Collects one result over its ranks and over input seeds: one ``add`` per seed, then ``figures``."""

    def __init__(self) -> None:
        self._ours_sq = 0.0
        self._baseline_sq = 0.0
        self._abs = 0.0
        self._reference_abs = 0.0
        self._max_abs = 0.0
        self._hash = hashlib.sha256()
        self._seeds = 0
        self._routes: list[int] = []
        self._elements: list[int] = []

    def add(self, ours: Sequence[Tensor], baseline: Sequence[Tensor], reference: Sequence[Tensor], routes: int) -> None:
        """One seed: the tensors of every rank, and the routes of all ranks together that made them."""
        if not len(ours) == len(baseline) == len(reference):
            raise ConfigError(
                f"ErrorPool.add: {len(ours)} results, {len(baseline)} baselines, {len(reference)} references: "
                "pass one of each per rank."
            )
        for mine, theirs, exact in zip(ours, baseline, reference, strict=True):
            if not mine.shape == theirs.shape == exact.shape:
                raise ConfigError(
                    f"ErrorPool.add: shapes {tuple(mine.shape)}, {tuple(theirs.shape)}, {tuple(exact.shape)} differ."
                )
            self._add_tensor(mine, theirs, exact)
        _update(self._hash, ours)
        self._seeds += 1
        self._routes.append(routes)
        self._elements.append(sum(tensor.numel() for tensor in ours))

    def _add_tensor(self, ours: Tensor, baseline: Tensor, reference: Tensor) -> None:
        for mine, theirs, exact in zip(_chunks(ours), _chunks(baseline), _chunks(reference), strict=True):
            truth = exact.double().to(mine.device)
            difference = (mine.double() - truth).abs()
            figures = torch.stack(
                (
                    difference.square().sum(),
                    (theirs.to(mine.device).double() - truth).square().sum(),
                    difference.sum(),
                    truth.abs().sum(),
                    difference.max(),
                )
            )
            ours_sq, baseline_sq, total, reference_abs, largest = figures.tolist()
            self._ours_sq += ours_sq
            self._baseline_sq += baseline_sq
            self._abs += total
            self._reference_abs += reference_abs
            self._max_abs = max(largest, self._max_abs)

    @property
    def is_large(self) -> bool:
        """Whether one seed is enough."""
        return min(self._routes, default=0) >= LARGE_ROUTES and min(self._elements, default=0) >= LARGE_ELEMENTS

    @property
    def seeds_wanted(self) -> int:
        """Input seeds that the verdict needs: 1 for a large or an empty result, otherwise 32."""
        return 1 if self._seeds and (self.is_large or not any(self._elements)) else SMALL_SEEDS

    @property
    def is_complete(self) -> bool:
        return self._seeds >= self.seeds_wanted

    def figures(self) -> ResultFigures:
        if not self._seeds:
            raise ConfigError("ErrorPool.figures: nothing was added; call add first.")
        limit = LARGE_LIMIT if self.is_large else SMALL_LIMIT
        ratio = _ratio(math.sqrt(self._ours_sq), math.sqrt(self._baseline_sq))
        reason = ""
        if ratio is not None and not ratio <= limit:  # a NaN is not at most the limit
            reason = f"error_vs_torch_bf16={ratio:.6g}: at most {limit}"
        elif not self.is_complete:
            reason = f"seeds={self._seeds}: a small result is judged over {self.seeds_wanted} input seeds"
        return ResultFigures(
            max_abs=math.nan if math.isnan(self._abs) else self._max_abs,  # max() may lose a NaN
            rel_l1=_ratio(self._abs, self._reference_abs) or 0.0,
            error_vs_torch_bf16=ratio,
            limit=limit,
            seeds=self._seeds,
            sha256=self._hash.hexdigest(),
            ok=not reason,
            reason=reason,
        )


def error_vs_torch_bf16(
    ours: Sequence[Tensor], baseline: Sequence[Tensor], reference: Sequence[Tensor]
) -> float | None:
    """The bare ratio, pooled over ranks; None where both errors are exactly 0."""
    pool = ErrorPool()
    pool.add(ours, baseline, reference, routes=0)
    return pool.figures().error_vs_torch_bf16


def _ratio(error: float, against: float) -> float | None:
    if error == 0 and against == 0:
        return None
    if against == 0:
        return math.nan if math.isnan(error) else math.inf
    return math.nan if math.isinf(against) else error / against  # an infinite baseline measures nothing


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        yield flat[start : start + _CHUNK_ELEMENTS]


def sha256(tensors: Tensor | Iterable[Tensor]) -> str:
    """Of the tensors' elements as bytes, in row-major order, one tensor after the other."""
    digest = hashlib.sha256()
    _update(digest, [tensors] if isinstance(tensors, Tensor) else tensors)
    return digest.hexdigest()


def _update(digest: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        for chunk in _chunks(tensor):
            digest.update(chunk.contiguous().view(torch.uint8).cpu().numpy().data)
