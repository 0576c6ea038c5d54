"""``python -m mok_cute.emulator``: scripts written for torch on CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

SCRIPT = """
import sys
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def add_one(tensor: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tensor[thread] = tensor[thread] + 1.0

@cute.jit
def launch(tensor: cute.Tensor):
    add_one(tensor).launch(grid=(1, 1, 1), block=(64, 1, 1))

x = torch.zeros(64, device="cuda")
function = cute.compile(launch, from_dlpack(x))
assert "gmem" in function.__ptx__
function(from_dlpack(x))
torch.cuda.synchronize()
print(sys.argv[1:], x.sum().item(), torch.cuda.get_device_name())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mok_cute.emulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_script_for_cuda_runs_unmodified(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run(str(tmp_path / "script.py"), "--size", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['--size', '3'] 64.0 virtual:sm_90a"
    assert "warp-instructions" in result.stderr


def test_a_missing_script_is_named() -> None:
    result = run("no_such_script.py")
    assert result.returncode == 2 and "no_such_script.py: there is no such file" in result.stderr
