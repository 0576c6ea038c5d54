"""One PTX instruction or a few on the virtual GPU: each thread loads its inputs, runs the body, stores its result."""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_cute.emulator.decode import Kernel, parse_module
from mok_cute.emulator.device import LaunchStats, launch
from mok_cute.emulator.memory import DeviceMemory

Array = np.ndarray[Any, Any]
DECLARED = """
  .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<256>; .reg .b64 %q<32>;
  .reg .b32 %t; .reg .b64 %at; .reg .b64 %offset;
"""


def make_kernel(body: str, parameters: int, threads: int, smem: bool = True) -> Kernel:
    """A kernel ``micro`` with pointer parameters p0, p1, ...; ``smem`` declares dynamic shared memory."""
    listed = ", ".join(f".param .u64 p{number}" for number in range(parameters))
    declared = ".extern .shared .align 1024 .b8 smem[];" if smem else ""
    text = f".version 9.0\n.target sm_90a\n{declared}\n.visible .entry micro({listed})\n.reqntid {threads}, 1, 1\n"
    return parse_module(f"{text}{{{DECLARED}  mov.u32 %t, %tid.x;\n{body}\n  ret;\n}}\n")["micro"]


def run_kernel(body: str, *arrays: Array, threads: int = 32, **options: Any) -> LaunchStats:
    """Run ``body`` with the arrays as device memory, parameters p0, p1, ... in order."""
    memory = options.pop("memory", None) or DeviceMemory()
    for number, array in enumerate(arrays):
        memory.add(array.ctypes.data, array.nbytes, f"array {number}")
    kernel = make_kernel(body, len(arrays), threads)
    params = [array.ctypes.data.to_bytes(8, "little") for array in arrays]
    options = {"grid": (1, 1, 1), "dynamic_smem_bytes": 16384, "max_steps": 1_000_000, **options}
    return launch(kernel, block=(threads, 1, 1), params=params, memory=memory, **options)


def per_thread(body: str, *inputs: Array, result: str) -> Array:
    """The body reads inputs from %i0, %i1, ... and leaves its result, of this numpy type, in %o."""
    threads = len(inputs[0])
    output = np.zeros(threads, result)
    lines = []
    for number, array in enumerate((*inputs, output)):
        size = array.dtype.itemsize
        name = "%o" if number == len(inputs) else f"%i{number}"
        lines.append(f".reg .b{8 * size} {name};")
        lines.append(f"ld.param.b64 %at, [p{number}]; mul.wide.u32 %offset, %t, {size}; add.s64 %at, %at, %offset;")
        if number < len(inputs):
            lines.append(f"ld.global.b{8 * size} {name}, [%at];")
    lines += [body, f"st.global.b{8 * output.dtype.itemsize} [%at], %o;"]
    run_kernel("\n".join(lines), *inputs, output, threads=threads)
    return output
