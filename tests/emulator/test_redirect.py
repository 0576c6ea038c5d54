"""Host code of the virtual GPU calls our library, and that of a real one the vendor's, whichever was opened first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

KERNEL = """
import sys
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import load_module, make_fake_stream

from mok_cute.emulator.virtual_device import VirtualDevice


@cute.kernel
def fill(address: Int64, value: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    words = cute.make_tensor(pointer, cute.make_layout(32))
    words[thread] = value


@cute.jit
def launch_fill(address: Int64, value: Int32, stream: cuda.CUstream):
    fill(address, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


folder = Path(sys.argv[1])
(folder / "dumps").mkdir()
words = torch.zeros(32, dtype=torch.int32)
keep = f"--enable-tvm-ffi --keep-ptx --keep-cubin --gpu-arch sm_90a --dump-dir {folder / 'dumps'}"


def compiled(options):
    return cute.compile(launch_fill, Int64(16), Int32(1), make_fake_stream(), options=options)


def export():
    made = compiled(keep)
    made.export_to_c(str(folder / "fill.o"), function_name="fill")
    (folder / "fill.ptx").write_text(made.__ptx__)
    (folder / "fill.cubin").write_bytes(made.__cubin__)


def load():
    return load_module(str(folder / "fill.o"), enable_tvm_ffi=True).fill


def on_the_virtual_gpu(function, value):
    function(words.data_ptr(), value, 0)
    assert words.tolist() == [value] * 32


def without_one(function):
    try:
        function(words.data_ptr(), 9, 0)
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("a kernel ran on a GPU that is not there")
"""

VENDOR_FIRST = """
export()
real = load()
without_one(real)
with VirtualDevice("sm_90a"):
    on_the_virtual_gpu(load(), 1)
    on_the_virtual_gpu(compiled(""), 2)
    on_the_virtual_gpu(compiled("--enable-tvm-ffi"), 3)
"""

VIRTUAL_FIRST = """
with VirtualDevice("sm_90a"):
    export()
    on_the_virtual_gpu(compiled(""), 1)
    on_the_virtual_gpu(load(), 2)
without_one(load())
"""


@pytest.mark.parametrize("script", [VENDOR_FIRST, VIRTUAL_FIRST], ids=["vendor", "virtual"])
def test_both_kinds_of_host_code_work_in_a_process_whichever_came_first(script: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a kernel loaded for the real GPU would write to host memory")
    path = tmp_path / "script.py"
    path.write_text(KERNEL + script)
    done = subprocess.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Cuda Runtime Error" in done.stdout  # what the vendor's library says of a machine without a GPU
