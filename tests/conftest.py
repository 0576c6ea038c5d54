"""Marks, and what a test needs to run. Test files import the helpers beside this file, and those
in layer/, by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for _folder in ("", "layer"):
    sys.path.insert(0, str(Path(__file__).parent / _folder))

MARKS = {
    "gpu": "runs kernels on a CUDA device; skipped without one",
    "ranks": "several virtual ranks in one process",
    "emulated": "runs compiled kernels on the virtual GPU",
    "slow": "takes more than ten seconds on two cores",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu_reason() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_reason() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA device: torch {torch.__version__} is built without CUDA"
    return "needs a CUDA device: torch finds none"
